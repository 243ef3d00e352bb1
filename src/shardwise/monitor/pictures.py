"""Pictures of runs as SVG: curves over the steps, where the time goes, one step's memory and spans.

Classes of elements are styled by the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from shardwise import svg
from shardwise.monitor.record import RunRecord
from shardwise.names import MAIN, name_of_unit
from shardwise.quantities import format_bytes, format_count

_WIDTH, _LEFT, _TOP, _BOTTOM = 760, 64, 40, 250
_CURVES = (380, 196)
_LARGE = 1e5  # numbers above it are abbreviated beside the axis
_BAR, _ROW, _SPACE = 22, 15, 4
_NAMES = 172  # the left end of the rows of a timeline
_OTHER_NAME = "activations, temporaries, others"
_SIZES = (("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40))


def curves_svg(title: str, curves: Sequence[svg.Curve], from_zero: bool = False) -> str:
    """Draw values over the steps, a line for each run, with bands from minimum to maximum."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    steps = [point.step for point in points]
    across = svg.Axis(min(steps), max(steps), 52, 370)
    high = svg.highest_shown([point.high for point in points])
    least = [0.0] if from_zero else []
    ticks = svg.padded_ticks([*least, *(min(p.low, high) for p in points), high], 6)
    up = svg.Axis(ticks[0], ticks[-1], 168, 34)
    is_large = max(abs(tick) for tick in ticks) >= _LARGE
    parts = [
        svg.heading(8, 18, title, 13),
        *svg.draw_levels(up, ticks, across, [format_count(t) for t in ticks] if is_large else None),
        *svg.draw_steps(across, up.begin, 5),
        *svg.draw_curves(curves, across, up),
    ]
    ends = [(curve.name, curve.points[0], curve.points[-1]) for curve in curves if curve.points]
    described = "; ".join(
        f"{name}: from {first.middle:.4g} at step {first.step:,.0f} to {last.middle:.4g} at step "
        f"{last.step:,.0f}"
        for name, first, last in ends
    )
    return svg.document(_CURVES, title, f"{title}. {described}.", parts, has_style=False)


def time_svg(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw the seconds of a step by phase, a bar for each run, all to one scale."""
    most = max((sum(phases.values()) for _, phases in rows), default=0.0)
    if not most:
        return ""
    across = svg.Axis(0.0, most, 8, _WIDTH - 8)
    title = "Where a step's time goes"
    parts = [svg.heading(8, 18, f"{title}, median over the ranks", 12)]
    top, names = 40.0, {phase: phase for _, phases in rows for phase in phases}
    for name, phases in rows:
        whole, spans = sum(phases.values()), svg.stack(phases)
        parts.append(svg.text(8, top + 2, f"{name}: {whole:.3g} s a step", 'class="strong"'))
        parts += svg.draw_spans([(top + 9, spans)], across, _BAR, partial(_say_share, whole))
        for span in spans:
            share = f"{100 * span.length / whole:.0f} %"
            if across.at(span.length) - across.begin > 8 * len(share):
                middle = across.at(span.begin + span.length / 2)
                look = "on-light" if svg.is_light(svg.colour_of(span.kind)) else "on-dark"
                look = f'text-anchor="middle" class="{look}"'
                parts.append(svg.text(middle, top + 13 + _BAR / 2, share, look))
        top += _BAR + 34
    legend, bottom = svg.squares(names, 8, _WIDTH - 8, top + 4)
    described = "; ".join(
        f"{name}: {', '.join(f'{phase} {seconds:.3g} s' for phase, seconds in phases.items())}"
        for name, phases in rows
    )
    return svg.document((_WIDTH, bottom), title, f"{described}.", parts + legend, has_style=False)


def _say_share(whole_s: float, span: svg.Span, seconds: float) -> str:
    return f"{span.kind}: {seconds:.3g} s, {100 * seconds / whole_s:.1f} % of a step"


# -- the memory of a step
@dataclass(frozen=True)
class MemoryOfStep:
    """The device memory of one rank in one step: phase, unit and bytes by kind of each moment.

    ``units`` has bytes by kind at the moment ``units_at``. ``process_bytes`` is the peak of the
    whole process if no other figure is known, as on the CPU, else 0.
    """

    rank: int
    step: int
    moments: Sequence[tuple[str, str, Mapping[str, int]]]
    units: Mapping[str, Mapping[str, int]]
    units_at: int
    process_bytes: int = 0

    @property
    def peak(self) -> int:
        """The index of the largest moment."""
        totals = [sum(kinds.values()) for _, _, kinds in self.moments]
        return totals.index(max(totals))

    @property
    def peak_bytes(self) -> int:
        """The bytes of the largest moment."""
        return max(sum(kinds.values()) for _, _, kinds in self.moments)

    @property
    def kinds(self) -> list[str]:
        """The kinds of all moments; `svg.OTHER` comes last."""
        return sorted({k for _, _, kinds in self.moments for k in kinds}, key=svg.order_of_kinds)


def memory_of(rank: int, line: Mapping[str, Any], is_process: bool) -> MemoryOfStep:
    """Return a line of "memory" as values.

    With ``is_process`` the record knows of other memory only that the process has it, as on the
    CPU. It may contain freed memory, so it is no part of a moment.
    """
    rows = line["moments"]
    moments = [
        (
            row["phase"],
            row["unit"],
            row["device"] if is_process else {**row["device"], svg.OTHER: row["other"]},
        )
        for row in rows
    ]
    whole = max(sum(m["device"].values()) + m["other"] for m in rows) if is_process else 0
    return MemoryOfStep(rank, line["step"], moments, line["units"]["device"], line["peak"], whole)


def largest_memory(record: RunRecord) -> MemoryOfStep | None:
    """Return the memory of the newest sampled step, of the rank that had the most."""
    is_process = record.facts.device == "cpu"
    newest = dict(record.lines("memory"))
    found = [memory_of(rank, line, is_process) for rank, line in newest.items()]
    return max(found, key=lambda memory: memory.peak_bytes, default=None)


def memory_svg(
    memory: MemoryOfStep, name: str, planned: Mapping[str, int] | None, most: int
) -> str:
    """Draw the memory of a step over its moments by kind, in at most ``most`` columns.

    ``planned`` is drawn beside it: the peak of the plan.
    """
    rows = [kinds for _, _, kinds in memory.moments]
    width = max(1, -(-len(rows) // most))
    columns = [
        (first, max(rows[first : first + width], key=lambda kinds: sum(kinds.values())))
        for first in range(0, len(rows), width)
    ]
    top_bytes = max(sum(kinds.values()) for _, kinds in columns)
    whole = max(top_bytes, sum((planned or {}).values()))
    unit, power = [(n, p) for n, p in _SIZES if whole >= 1 << p or not p][-1]
    ticks = svg.round_ticks(0.0, whole / (1 << power) or 1.0, 6)
    across = svg.Axis(0, len(rows), _LEFT, _WIDTH - (100 if planned else 16))
    up = svg.Axis(0.0, ticks[-1] * (1 << power), _BOTTOM, _TOP)
    at = across.at(memory.peak + 0.5)
    peak = {"stroke_width": 1.2, "stroke_dasharray": "3 3", "x1": at, "x2": at}
    kinds = sorted({*memory.kinds, *(planned or {})}, key=svg.order_of_kinds)
    names = {kind: name_of_kind(kind) for kind in kinds}
    legend, bottom = svg.squares(names, _LEFT, _WIDTH - 8, _BOTTOM + 48)
    parts = [
        svg.heading(8, 18, f"{name}: memory, {unit}", 12),
        *svg.draw_levels(up, [t * (1 << power) for t in ticks], across, svg.labels(ticks)),
        *svg.draw_areas(memory.kinds, columns, across, up, _say_memory),
        *_phases_below(memory, across),
        svg.element("line", "limit", "", **peak, y1=_TOP, y2=_BOTTOM),
        svg.text(at, _TOP - 6, "peak", 'text-anchor="middle"'),
        *_planned_column(planned or {}, up, across.end + 30),
        *legend,
    ]
    phase, of, _ = memory.moments[memory.peak]
    described = f"The largest moment is {phase} of {name_of_unit(of)}, {format_bytes(top_bytes)}."
    title = f"{name}: memory of step {memory.step:,} on rank {memory.rank}"
    return svg.document((_WIDTH, bottom), title, described, parts, has_style=False)


def name_of_kind(kind: str) -> str:
    """Return the shown name of a kind of memory."""
    return _OTHER_NAME if kind == svg.OTHER else kind.replace("_", " ")


def _say_memory(kind: str, most: float) -> str:
    return f"{name_of_kind(kind)}: up to {format_bytes(most)}"


def _phases_below(memory: MemoryOfStep, across: svg.Axis) -> list[str]:
    """Draw the phase of each moment as a strip below."""
    pieces: dict[str, list[str]] = {}
    at = 0
    for phase, group in groupby(phase.removesuffix("_end") for phase, _, _ in memory.moments):
        end = at + len(list(group))
        strip = svg.rectangle(across.at(at), _BOTTOM + 4, across.at(end) - across.at(at), 8)
        pieces.setdefault(phase, []).append(strip)
        at = end
    words = "the moments of a step, in order; below, which phase begins or ends"
    return [*svg.draw_paths(pieces), svg.text(_LEFT, _BOTTOM + 28, words)]


def _planned_column(planned: Mapping[str, int], up: svg.Axis, x: float) -> list[str]:
    if not planned:
        return []
    parts = [svg.text(x, _BOTTOM + 12, "plan", 'class="strong"')]
    for kind, begin, num_bytes, _ in svg.stack({k: n for k, n in planned.items() if n}):
        top = up.at(begin + num_bytes)
        said = f"plan: {name_of_kind(kind)} {format_bytes(num_bytes)}"
        parts.append(svg.draw_bar(x, top, 36, up.at(begin) - top, svg.colour_of(kind), said))
    return parts


# -- the timeline of a step
def timeline_svg(
    timelines: Mapping[int, Mapping[str, Any]], name: str, most: int, most_titles: int
) -> str:
    """Draw the spans of one step, a row for each line of each rank.

    About ``most`` bars are drawn, and ``most_titles`` of them have a title.
    """
    seconds = max(line["seconds"] for line in timelines.values())
    step = next(iter(timelines.values()))["step"]
    across = svg.Axis(0.0, 1e3 * seconds, _NAMES, _WIDTH - 12)
    parts = [svg.heading(8, 18, f"{name}: timeline of step {step:,}, ms", 12)]
    rows, top = [], 32.0
    for rank, line in timelines.items():
        top += 6
        parts.append(svg.text(8, top + 12, f"rank {rank}", 'class="strong"'))
        by_line: dict[str, list[svg.Span]] = {}
        for row, phase, unit, begin_ms, length_ms, *_ in line["spans"]:
            by_line.setdefault(row, []).append(svg.Span(phase, begin_ms, length_ms, unit))
        for row in sorted(by_line, key=place_of):
            parts.append(svg.text(_NAMES - 8, top + 12, row, 'text-anchor="end"'))
            rows.append((top, by_line[row]))
            top += _ROW + _SPACE
    shortest = 1e3 * seconds * len(rows) / most
    parts += svg.draw_spans(rows, across, _ROW, _say_span, shortest, most_titles)
    parts.append(svg.element("line", "axis", x1=across.begin, x2=across.end, y1=top, y2=top))
    for tick in svg.round_ticks(0.0, across.high, 7):
        if tick <= across.high:
            x = across.at(tick)
            parts += [svg.tick(x, top), svg.text(x, top + 18, f"{tick:,g}", 'text-anchor="middle"')]
    names = {span.kind: span.kind for _, spans in rows for span in spans}
    legend, bottom = svg.squares(names, 8, _WIDTH - 8, top + 42)
    title = f"{name}: timeline of step {step:,}, ms"
    described = f"{seconds:.3g} s on {len(timelines)} ranks: {', '.join(names)}."
    return svg.document((_WIDTH, bottom), title, described, parts + legend, has_style=False)


def place_of(line: str) -> tuple[int, str]:
    """Return the place of a line: the one that computes, then collectives, then other threads."""
    return (0 if line in ("device", MAIN) else 1 if "." in line else 2), line


def _say_span(span: svg.Span, length_ms: float) -> str:
    of = "" if span.kind == "outside" else f" of {name_of_unit(span.of)}"
    return f"{span.kind}{of}: {length_ms:.3g} ms"
