"""Plans as pictures and as HTML: memory at each phase's peak, and the step in time.

Pictures are whole SVG documents, may stand inside an HTML page, and follow the reader's light or
dark setting. HTML is one file without anything to load, or a fragment for a notebook.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files

from shardwise import charts
from shardwise.plan.candidate import Candidate
from shardwise.plan.planned import Planned, time_rows
from shardwise.plan.timing.breakdown import unit_name
from shardwise.quantities import format_bytes, format_count

_STREAM_NAMES = {
    "compute": "compute",
    "shard": "shard axis",
    "replicate": "replicate axis",
    "to_device": "host to device",
    "to_host": "device to host",
    "cpu": "host cores",
    "disk": "disk",
}
_MOST_PLANS, _MOST_REASONS = 5, 200


def memory_svg(plan: Planned) -> str:
    """Draw the ledger at the peak of each phase as one bar, beside what the device has."""
    peak, low, high = plan.played.peak, plan.memory.low_bytes, plan.memory.high_bytes
    rows = [
        charts.Bar(f"{m.phase} of {plan.unit_name(m.unit)}", m.ledger.lines())
        for m in plan.played.peaks
    ]
    lines = sorted(peak.ledger.lines().items(), key=lambda line: -line[1])
    largest = ", ".join(f"{n.replace('_', ' ')} {format_bytes(b)}" for n, b in lines[:4] if b)
    of = f"{peak.phase} of {plan.unit_name(peak.unit)}: {format_bytes(peak.ledger.total)}"
    most = max(high, *(m.ledger.total for m in plan.played.peaks))
    return charts.bars_chart(
        "Memory of one rank",
        rows,
        format_bytes,
        described=f"{plan.label}. The peak is in {of}, of which {largest}",
        limit=("device", plan.capacity_bytes),
        interval=(f"in all {format_bytes(low)} to {format_bytes(high)}", low, high),
        extent=1.02 * max(most, min(plan.capacity_bytes, 2 * most)),
        has_style=True,
    )


def step_svg(plan: Planned) -> str:
    """Draw the operations of the slowest rank in time, one line per stream."""
    run = plan.simulated.slowest
    rows: dict[str, list[charts.Span]] = {}
    for span in run.spans:
        op, length_s = run.program.ops[span.op], span.end_s - span.start_s
        spans = rows.setdefault(op.stream, [])
        if length_s > 0:
            begin_ms, name = 1e3 * (span.start_s - run.begin_s), unit_name(run.program, op)
            spans.append(charts.Span(op.phase, begin_ms, 1e3 * length_s, name))
    shown = {name: rows[stream] for stream, name in _STREAM_NAMES.items() if stream in rows}
    said = (
        f"{plan.label}. A step takes {run.step_s:.3g} s; compute works {run.compute_s:.3g} s of "
        f"it, and {run.exposed_s:.3g} s are exposed communication."
    )
    return charts.timeline_chart(
        "One step in time, ms",
        [("", shown)],
        1e3 * run.step_s,
        described=said,
        has_style=True,
    )


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


def _render(template: str, **values: object) -> str:
    """Fill a template; all that is not marked as markup is escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters |= {"bytes": format_bytes, "count": format_count}
    source = files("shardwise.plan.report").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)
