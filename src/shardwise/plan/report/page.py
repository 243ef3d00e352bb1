"""Plans as HTML pages with SVG pictures.

Each picture is a whole document, may stand inside an HTML page, and follows the reader's light or
dark setting.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from shardwise import svg
from shardwise.plan.candidate import Candidate
from shardwise.plan.planned import Planned, time_rows
from shardwise.plan.step.ledger import Moment
from shardwise.plan.step.program import Op, Stream
from shardwise.plan.timing.breakdown import Span, unit_name
from shardwise.quantities import format_bytes, format_count

_WIDTH, _LEFT, _RIGHT = 760, 96, 736
_BAR, _GAP = 22, 12
_ENDS = (_LEFT, _RIGHT)
LINE_COLOURS = {
    "param_shards": "#1f6fd1",
    "param_full": "#6cabf5",
    "grad_full": "#e08a1e",
    "grad_shards": "#b3560b",
    "optimizer_state": "#27864b",
    "optimizer_temporary": "#6dc48c",
    "state_staging": "#a5dcb8",
    "gather_staging": "#8f6bd6",
    "reduce_staging": "#c0a6f0",
    "activations": "#d1487a",
    "temporary": "#eb97b7",
    "logits": "#8a6d3b",
    "inputs": "#7a828c",
    "buffers": "#a9b1ba",
}
_STREAM_NAMES: dict[Stream, str] = {
    "compute": "compute",
    "shard": "shard axis",
    "replicate": "replicate axis",
    "to_device": "host to device",
    "to_host": "device to host",
    "cpu": "host cores",
    "disk": "disk",
}
PHASE_COLOURS = {
    "forward": "#1f6fd1",
    "loss": "#8a6d3b",
    "recompute": "#6cabf5",
    "backward": "#b3560b",
    "unshard": "#8f6bd6",
    "reduce": "#d1487a",
    "clip": "#7a828c",
    "optimizer": "#27864b",
    "offload": "#a9b1ba",
}


def memory_svg(plan: Planned) -> str:
    """Draw the ledger at the peak of each phase as one bar, beside what the device has."""
    moments = plan.played.peaks
    most = max(plan.memory.high_bytes, *(m.ledger.total for m in moments))
    extent = max(most, min(plan.capacity_bytes, 2 * most)) * 1.02
    scale = (_RIGHT - _LEFT) / extent
    parts: list[str] = []
    top = 52
    for moment in moments:
        parts += _memory_bar(plan, moment, top, scale)
        top += _BAR + _GAP
    if plan.capacity_bytes <= extent:
        x = _LEFT + plan.capacity_bytes * scale
        parts.append(svg.element("line", "limit", stroke_width=1.5, x1=x, x2=x, y1=40, y2=top))
        parts.append(svg.text(x, 37, "device", 'text-anchor="middle"'))
    low, high = (_LEFT + b * scale for b in (plan.memory.low_bytes, plan.memory.high_bytes))
    said = f"{format_bytes(plan.memory.low_bytes)} to {format_bytes(plan.memory.high_bytes)}"
    said = f"interval of the whole: {said}"
    parts.append(svg.bar(low, top, max(high - low, 2), "#7a828c", said, 6))
    parts.append(svg.text(_LEFT - 8, top + 8, "low to high", 'text-anchor="end"'))
    shown = [name for name in LINE_COLOURS if any(m.ledger.lines()[name] for m in moments)]
    items = [(name.replace("_", " "), LINE_COLOURS[name]) for name in shown]
    legend, bottom = svg.squares(items, _ENDS, top + 26)
    return _document(
        "Memory of one rank", plan.label, _describe_memory(plan), parts + legend, bottom
    )


def _memory_bar(plan: Planned, moment: Moment, top: float, scale: float) -> list[str]:
    parts = [svg.text(_LEFT - 8, top + 15, moment.phase, 'text-anchor="end"')]
    x = float(_LEFT)
    for name, num_bytes in moment.ledger.lines().items():
        if num_bytes:
            width = num_bytes * scale
            said = f"{moment.phase} of {plan.unit_name(moment.unit)}: {name.replace('_', ' ')}"
            said = f"{said} {format_bytes(num_bytes)}"
            parts.append(svg.bar(x, top, width, LINE_COLOURS[name], said))
            x += width
    label = format_bytes(moment.ledger.total)
    inside = x + 70 > _RIGHT
    place = f'text-anchor="{"end" if inside else "start"}"'
    style = 'fill="#fff" style="fill:#fff"' if inside else 'class="strong"'
    return [*parts, svg.text(x - 6 if inside else x + 6, top + 15, label, f"{place} {style}")]


def step_svg(plan: Planned) -> str:
    """Draw the operations of the slowest rank in time, one line per stream."""
    run = plan.simulated.slowest
    ops = run.program.ops
    streams = [s for s in _STREAM_NAMES if any(ops[span.op].stream == s for span in run.spans)]
    scale = (_RIGHT - _LEFT) / max(run.step_s, 1e-12)
    parts: list[str] = []
    top = 52
    for stream in streams:
        spans = [s for s in run.spans if ops[s.op].stream == stream and s.end_s > s.start_s]
        parts.append(svg.text(_LEFT - 8, top + 15, _STREAM_NAMES[stream], 'text-anchor="end"'))
        parts += _stream_bars(plan, ops, _joined(ops, spans, run.step_s / 1200), top, scale)
        top += _BAR + _GAP
    parts.append(svg.element("line", "axis", x1=_LEFT, x2=_RIGHT, y1=top, y2=top))
    parts.append(svg.text(_LEFT, top + 16, "0 s"))
    parts.append(svg.text(_RIGHT, top + 16, f"{run.step_s:.3g} s", 'text-anchor="end"'))
    phases = [p for p in PHASE_COLOURS if any(op.phase == p for op in ops)]
    legend, bottom = svg.squares([(p, PHASE_COLOURS[p]) for p in phases], _ENDS, top + 34)
    description = (
        f"A step takes {run.step_s:.3g} s; compute works {run.compute_s:.3g} s of it, and "
        f"{run.exposed_s:.3g} s are communication that nothing hides."
    )
    return _document("One step in time", plan.label, description, parts + legend, bottom)


def _joined(ops: Sequence[Op], spans: Sequence[Span], least_s: float) -> list[tuple[Span, float]]:
    """Join neighbours of one phase that are too short to be seen; return (first, end)."""
    joined: list[tuple[Span, float]] = []
    for span in spans:
        if joined:
            first, end_s = joined[-1]
            alike = ops[first.op].phase == ops[span.op].phase
            if alike and span.start_s - end_s < least_s and span.end_s - span.start_s < least_s:
                joined[-1] = first, span.end_s
                continue
        joined.append((span, span.end_s))
    return joined


def _stream_bars(
    plan: Planned, ops: Sequence[Op], bars: Sequence[tuple[Span, float]], top: float, scale: float
) -> list[str]:
    begin_s, program = plan.simulated.slowest.begin_s, plan.simulated.program
    return [
        svg.bar(
            _LEFT + (first.start_s - begin_s) * scale,
            top,
            (end_s - first.start_s) * scale,
            PHASE_COLOURS[ops[first.op].phase],
            f"{ops[first.op].phase} of {unit_name(program, ops[first.op]) or '(root)'}: "
            f"{end_s - first.start_s:.3g} s",
        )
        for first, end_s in bars
    ]


def _describe_memory(plan: Planned) -> str:
    peak = plan.played.peak
    lines = sorted(peak.ledger.lines().items(), key=lambda line: -line[1])
    largest = ", ".join(f"{n.replace('_', ' ')} {format_bytes(b)}" for n, b in lines[:4] if b)
    return (
        f"The peak is in {peak.phase} of {plan.unit_name(peak.unit)}: "
        f"{format_bytes(peak.ledger.total)}, of which {largest}."
    )


def _document(title: str, label: str, description: str, parts: Sequence[str], height: float) -> str:
    drawn = [svg.heading(16, 24, title), *parts]  # the label may be longer than the picture is wide
    return svg.document((_WIDTH, height), f"{title}: {label}", description, drawn)


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
    """Return a fragment as a whole HTML document."""
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
