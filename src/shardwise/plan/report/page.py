"""Plans as HTML: one file without anything to load, or a fragment for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from shardwise.plan.report.pictures import memory_svg, step_svg
from shardwise.plan.report.times import time_rows
from shardwise.quantities import format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.plan.candidate import Candidate
    from shardwise.plan.planning import Plan
    from shardwise.plan.searching import SearchResult

_MOST_PLANS = 5
_MOST_REASONS = 200


def plan_html(plan: Plan) -> str:
    """Return a plan as a fragment of HTML with its pictures inside."""
    return _body([plan], {})


def search_html(result: SearchResult) -> str:
    """Return the fastest plans of a search and why the others lost, as a fragment of HTML."""
    return _body(result.pareto[:_MOST_PLANS], result.reasons)


def whole_page(body: str, title: str) -> str:
    """Return a fragment as an HTML document of its own."""
    from markupsafe import Markup

    return _render("page.html.j2", body=Markup(body), title=title)


def _body(plans: Sequence[Plan], reasons: Mapping[str, Sequence[Candidate]]) -> str:
    from markupsafe import Markup

    shown = [(those[0].label, len(those) - 1, reason) for reason, those in reasons.items()]
    return _render(
        "body.html.j2",
        plans=plans,
        rejected=shown[:_MOST_REASONS],
        num_more=max(0, len(shown) - _MOST_REASONS),
        memory_svg=lambda plan: Markup(memory_svg(plan)),
        step_svg=lambda plan: Markup(step_svg(plan)),
        time_rows=time_rows,
    )


def _render(template: str, **values: Any) -> str:
    """Fill a template; all that is not marked as markup is escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters["bytes"] = format_bytes
    environment.filters["count"] = format_count
    source = files("shardwise.plan.report").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)
