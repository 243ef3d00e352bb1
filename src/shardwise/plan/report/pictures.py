"""Pictures of one plan as SVG text: where the memory is at each phase's peak, and the step in time.

Both are whole documents, may stand inside an HTML page, and follow the reader's light or dark
setting.
"""

from collections.abc import Sequence

from shardwise import svg
from shardwise.plan.planned import Planned
from shardwise.plan.step.ledger import Moment
from shardwise.plan.step.program import Stream
from shardwise.plan.timing.breakdown import unit_name
from shardwise.quantities import format_bytes

_WIDTH, _LEFT, _RIGHT = 760, 96, 736
_BAR, _GAP = 22, 12
_STREAM_NAMES: dict[Stream, str] = {
    "compute": "compute",
    "shard": "shard axis",
    "replicate": "replicate axis",
    "to_device": "host to device",
    "to_host": "device to host",
    "cpu": "host cores",
    "disk": "disk",
}


def memory_svg(plan: Planned) -> str:
    """Draw the ledger at the peak of each phase as one bar, beside what the device has."""
    moments = plan.played.peaks
    most = max(plan.memory.high_bytes, *(m.ledger.total for m in moments))
    extent = max(most, min(plan.capacity_bytes, 2 * most)) * 1.02
    across = svg.Axis(0.0, extent, _LEFT, _RIGHT)
    parts: list[str] = []
    top = 52
    for moment in moments:
        parts += _memory_bar(plan, moment, top, across)
        top += _BAR + _GAP
    if plan.capacity_bytes <= extent:
        x = across.at(plan.capacity_bytes)
        parts.append(svg.element("line", "limit", stroke_width=1.5, x1=x, x2=x, y1=40, y2=top))
        parts.append(svg.text(x, 37, "device", 'text-anchor="middle"'))
    low, high = across.at(plan.memory.low_bytes), across.at(plan.memory.high_bytes)
    said = f"{format_bytes(plan.memory.low_bytes)} to {format_bytes(plan.memory.high_bytes)}"
    said = f"interval of the whole: {said}"
    parts.append(svg.draw_bar(low, top, max(high - low, 2), 6, "#7a828c", said))
    parts.append(svg.text(_LEFT - 8, top + 8, "low to high", 'text-anchor="end"'))
    shown = [name for name in svg.KIND_COLOURS if any(m.ledger.lines().get(name) for m in moments)]
    names = {name: name.replace("_", " ") for name in shown}
    legend, bottom = svg.squares(names, _LEFT, _RIGHT, top + 26)
    return _document(
        "Memory of one rank", plan.label, _describe_memory(plan), parts + legend, bottom
    )


def _memory_bar(plan: Planned, moment: Moment, top: float, across: svg.Axis) -> list[str]:
    def say(span: svg.Span, num_bytes: float) -> str:
        kind = span.kind.replace("_", " ")
        return f"{moment.phase} of {plan.unit_name(moment.unit)}: {kind} {format_bytes(num_bytes)}"

    spans = svg.stack({name: n for name, n in moment.ledger.lines().items() if n})
    x, label = across.at(moment.ledger.total), format_bytes(moment.ledger.total)
    inside = x + 70 > _RIGHT
    place = f'text-anchor="{"end" if inside else "start"}"'
    style = 'fill="#fff" style="fill:#fff"' if inside else 'class="strong"'
    return [
        svg.text(_LEFT - 8, top + 15, moment.phase, 'text-anchor="end"'),
        *svg.draw_spans([(top, spans)], across, _BAR, say),
        svg.text(x - 6 if inside else x + 6, top + 15, label, f"{place} {style}"),
    ]


def step_svg(plan: Planned) -> str:
    """Draw the operations of the slowest rank in time, one line per stream."""
    run = plan.simulated.slowest
    program = run.program
    across = svg.Axis(0.0, max(run.step_s, 1e-12), _LEFT, _RIGHT)
    by_stream: dict[Stream, list[svg.Span]] = {}
    for span in run.spans:
        op, length_s = program.ops[span.op], span.end_s - span.start_s
        spans = by_stream.setdefault(op.stream, [])
        if length_s > 0:
            name = unit_name(program, op)
            spans.append(svg.Span(op.phase, span.start_s - run.begin_s, length_s, name))
    parts, rows, top = [], [], 52
    for stream in (stream for stream in _STREAM_NAMES if stream in by_stream):
        parts.append(svg.text(_LEFT - 8, top + 15, _STREAM_NAMES[stream], 'text-anchor="end"'))
        rows.append((top, by_stream[stream]))
        top += _BAR + _GAP
    parts += svg.draw_spans(rows, across, _BAR, _say_op, run.step_s / 600)
    parts.append(svg.element("line", "axis", x1=_LEFT, x2=_RIGHT, y1=top, y2=top))
    parts.append(svg.text(_LEFT, top + 16, "0 s"))
    parts.append(svg.text(_RIGHT, top + 16, f"{run.step_s:.3g} s", 'text-anchor="end"'))
    phases: set[str] = {op.phase for op in program.ops}
    names: dict[str, str] = {phase: phase for phase in svg.PHASE_COLOURS if phase in phases}
    legend, bottom = svg.squares(names, _LEFT, _RIGHT, top + 34)
    description = (
        f"A step takes {run.step_s:.3g} s; compute works {run.compute_s:.3g} s of it, and "
        f"{run.exposed_s:.3g} s are exposed communication."
    )
    return _document("One step in time", plan.label, description, parts + legend, bottom)


def _say_op(span: svg.Span, length_s: float) -> str:
    return f"{span.kind} of {span.of or '(root)'}: {length_s:.3g} s"


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
