"""Plans as HTML: one file without anything to load, or a fragment for a notebook."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from shardwise.plan.candidate import Candidate
from shardwise.plan.planned import Planned, time_rows
from shardwise.plan.report.pictures import memory_svg, step_svg
from shardwise.quantities import format_bytes, format_count

_MOST_PLANS = 5
_MOST_REASONS = 200


def plans_html(
    plans: Sequence[Planned], reasons: Mapping[str, Sequence[Candidate]] | None = None
) -> str:
    """Return the first plans, and why others lost, as a fragment of HTML with pictures inside."""
    from markupsafe import Markup

    shown = [(those[0].label, len(those) - 1, reason) for reason, those in (reasons or {}).items()]
    return _render(
        "body.html.j2",
        plans=plans[:_MOST_PLANS],
        rejected=shown[:_MOST_REASONS],
        num_more=max(0, len(shown) - _MOST_REASONS),
        memory_svg=lambda plan: Markup(memory_svg(plan)),
        step_svg=lambda plan: Markup(step_svg(plan)),
        time_rows=time_rows,
    )


def full_page(body: str, title: str) -> str:
    """Return a fragment as an HTML document of its own."""
    from markupsafe import Markup

    return _render("page.html.j2", body=Markup(body), title=title)


def _render(template: str, **values: Any) -> str:
    """Fill a template; all that is not marked as markup is escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters["bytes"] = format_bytes
    environment.filters["count"] = format_count
    source = files("shardwise.plan.report").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)
