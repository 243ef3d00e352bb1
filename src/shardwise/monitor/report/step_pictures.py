"""One step of a run as SVG: its memory moment by moment, and its timeline by rank and line.

Note [Few shapes]
A step has thousands of spans and moments, a page has little room. Moments that share a column are
drawn as the largest of them. Spans that are too short to be seen are joined with their neighbours,
and what is drawn has as much of each phase as they had. Only the longest have titles; the shapes of
all others of one phase on a line are one path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shardwise import svg
from shardwise.monitor.record import RunRecord
from shardwise.monitor.report.colours import (
    OTHER,
    colour_of_kind,
    colour_of_phase,
    order_of_kinds,
)
from shardwise.monitor.timeline import place_of
from shardwise.names import name_of_unit
from shardwise.quantities import format_bytes

_WIDTH, _LEFT, _TOP, _BOTTOM = 760, 64, 40, 250
_ROW, _SPACE = 15, 4
_NAMES = 172  # where the rows of a timeline begin
_OTHER_NAME = "activations, temporaries, others"
_SIZES = (("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40))


@dataclass(frozen=True)
class MemoryOfStep:
    """The device memory of one rank in one step: a mapping of bytes by kind for each moment.

    ``process_bytes`` are what the whole process had at most, where no more than that is known.
    """

    rank: int
    step: int
    moments: Sequence[tuple[str, str, Mapping[str, int]]]  # phase, unit, bytes by kind
    units: Mapping[str, Mapping[str, int]]  # bytes by kind at the moment ``units_at``
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
        """The kinds that some moment has; what is not the engine's comes last."""
        return sorted({k for _, _, kinds in self.moments for k in kinds}, key=order_of_kinds)


def memory_of(rank: int, line: Mapping[str, Any], is_process: bool) -> MemoryOfStep:
    """Return a line of "memory" as values.

    ``is_process``: the record knows no more of what is not the engine's than that it is in the
    process, as on the CPU. What was freed may be in there too, so it is no part of a moment.
    """
    rows = line["moments"]
    moments = [
        (m["phase"], m["unit"], m["device"] if is_process else {**m["device"], OTHER: m["other"]})
        for m in rows
    ]
    whole = max(sum(m["device"].values()) + m["other"] for m in rows) if is_process else 0
    return MemoryOfStep(rank, line["step"], moments, line["units"]["device"], line["peak"], whole)


def largest_memory(record: RunRecord) -> MemoryOfStep | None:
    """Return the memory of the newest sampled step, of the rank that had the most."""
    newest = dict(record.lines("memory"))
    if not newest:
        return None
    is_process = record.facts.device == "cpu"
    found = [memory_of(rank, line, is_process) for rank, line in newest.items()]
    return max(found, key=lambda memory: memory.peak_bytes)


def memory_svg(
    memory: MemoryOfStep, name: str, planned: Mapping[str, int] | None, most: int
) -> str:
    """Draw the memory of a step over its moments by kind; ``planned`` is the plan's peak beside.

    ``most`` is how many columns are drawn.
    """
    right = _WIDTH - (100 if planned else 16)
    columns = _columns(memory, most)
    top_bytes = max(sum(kinds.values()) for _, kinds in columns)
    whole = max(top_bytes, sum((planned or {}).values()))
    unit, power = [(n, p) for n, p in _SIZES if whole >= 1 << p or not p][-1]
    ticks = svg.round_ticks(0.0, whole / (1 << power) or 1.0, 6)
    up = svg.Axis(0.0, ticks[-1] * (1 << power), _BOTTOM, _TOP)
    across = svg.Axis(0, len(memory.moments), _LEFT, right)
    parts = [svg.text(8, 18, f"{name}: memory, {unit}", 'class="strong" font-weight="600"')]
    for tick, label in zip(ticks, svg.labels(ticks), strict=True):
        parts += svg.level(up.at(tick * (1 << power)), _LEFT, right, label)
    parts += _areas(memory.kinds, columns, across, up)
    parts += _strip(memory, across)
    at = across.at(memory.peak + 0.5)
    stroke = {"stroke_width": 1.2, "stroke_dasharray": "3 3"}
    parts.append(svg.element("line", "limit", "", **stroke, x1=at, x2=at, y1=_TOP, y2=_BOTTOM))
    parts.append(svg.text(at, _TOP - 6, "peak", 'text-anchor="middle"'))
    if planned:
        parts += _planned(planned, up, right + 30)
    kinds = sorted({*memory.kinds, *(planned or {})}, key=order_of_kinds)
    items = [(name_of_kind(kind), colour_of_kind(kind)) for kind in kinds]
    legend, bottom = svg.squares(items, (_LEFT, _WIDTH - 8), _BOTTOM + 48)
    phase, of, _ = memory.moments[memory.peak]
    told = f"The largest moment is {phase} of {name_of_unit(of)}, {format_bytes(top_bytes)}."
    title = f"{name}: memory of step {memory.step:,} on rank {memory.rank}"
    return svg.document((_WIDTH, bottom), title, told, [*parts, *legend], has_style=False)


def name_of_kind(kind: str) -> str:
    """Return a kind of memory as people read it."""
    return _OTHER_NAME if kind == OTHER else kind.replace("_", " ")


def _columns(memory: MemoryOfStep, most: int) -> list[tuple[int, Mapping[str, int]]]:
    """Return (first moment, bytes by kind) of each column, the largest moment of each."""
    width = max(1, -(-len(memory.moments) // most))
    rows = [kinds for _, _, kinds in memory.moments]
    return [
        (first, max(rows[first : first + width], key=lambda kinds: sum(kinds.values())))
        for first in range(0, len(rows), width)
    ]


def _areas(
    kinds: Sequence[str],
    columns: Sequence[tuple[int, Mapping[str, int]]],
    across: svg.Axis,
    up: svg.Axis,
) -> list[str]:
    below = [0] * len(columns)
    parts = []
    for kind in kinds:
        above = [b + row.get(kind, 0) for b, (_, row) in zip(below, columns, strict=True)]
        if above != below:
            upper = _steps(above, columns, across, up)
            lower = _steps(below, columns, across, up)[::-1]
            path = "M" + "L".join(f"{x:.0f},{y:.1f}" for x, y in [*upper, *lower]) + "z"
            most = max(row.get(kind, 0) for _, row in columns)
            said = f"{name_of_kind(kind)}: up to {format_bytes(most)}"
            parts.append(svg.element("path", "", said, d=path, fill=colour_of_kind(kind)))
        below = above
    return parts


def _steps(
    values: Sequence[int],
    columns: Sequence[tuple[int, Mapping[str, int]]],
    across: svg.Axis,
    up: svg.Axis,
) -> list[tuple[float, float]]:
    """Return the corners of a line of steps; values that stay have none."""
    firsts = [first for first, _ in columns]
    ends = [*firsts[1:], across.high]
    corners: list[tuple[float, float]] = []
    rows = zip(firsts, ends, values, strict=True)
    for value, group in groupby(rows, key=lambda row: row[2]):
        these = list(group)
        corners += [(across.at(x), up.at(value)) for x in (these[0][0], these[-1][1])]
    return corners


def _strip(memory: MemoryOfStep, across: svg.Axis) -> list[str]:
    """Draw below the moments in which phase they lie."""
    phases = [phase.removesuffix("_end") for phase, _, _ in memory.moments]
    pieces: dict[str, list[str]] = {}
    at = 0
    for phase, group in groupby(phases):
        end = at + len(list(group))
        width = across.at(end) - across.at(at)
        pieces.setdefault(phase, []).append(_piece(across.at(at), _BOTTOM + 4, width, 8))
        at = end
    words = "the moments of a step, in order; below, which phase begins or ends"
    return [*_paths(pieces), svg.text(_LEFT, _BOTTOM + 28, words)]


def _piece(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as part of a path."""
    return f"M{x:.1f},{y:.0f}h{width:.1f}v{height:.0f}h-{width:.1f}z"


def _paths(pieces: Mapping[str, Sequence[str]]) -> list[str]:
    """Draw the rectangles of each phase as one shape."""
    return [
        svg.element("path", "", d="".join(these), fill=colour_of_phase(phase))
        for phase, these in pieces.items()
    ]


def _planned(planned: Mapping[str, int], up: svg.Axis, x: float) -> list[str]:
    parts, at = [svg.text(x, _BOTTOM + 12, "plan", 'class="strong"')], 0
    for kind, num_bytes in planned.items():
        if num_bytes:
            top = up.at(at + num_bytes)
            said = f"plan: {name_of_kind(kind)} {format_bytes(num_bytes)}"
            parts.append(svg.bar(x, top, 36, colour_of_kind(kind), said, up.at(at) - top))
            at += num_bytes
    return parts


def timeline_svg(
    timelines: Mapping[int, Mapping[str, Any]], name: str, most: int, most_titles: int
) -> str:
    """Draw the spans of one step, a row for each line of each rank, see Note [Few shapes].

    ``most`` and ``most_titles`` say about how many bars are drawn, and have a title.
    """
    seconds = max(line["seconds"] for line in timelines.values())
    step = next(iter(timelines.values()))["step"]
    num_rows = sum(len(_by_line(line["spans"])) for line in timelines.values())
    across = svg.Axis(0.0, 1e3 * seconds, _NAMES, _WIDTH - 12)
    rows = [
        (rank, row, _joined(spans, 1e3 * seconds * num_rows / most))
        for rank, line in timelines.items()
        for row, spans in _by_line(line["spans"]).items()
    ]
    lengths = sorted((bar.length_ms for _, _, bars in rows for bar in bars), reverse=True)
    said_ms = lengths[most_titles] if len(lengths) > most_titles else 0.0
    title = f"{name}: timeline of step {step:,}, ms"
    parts = [svg.text(8, 18, title, 'class="strong" font-weight="600"')]
    top, last_rank = 32.0, None
    for rank, row, bars in rows:
        if rank != last_rank:
            top += 6
            parts.append(svg.text(8, top + 12, f"rank {rank}", 'class="strong"'))
        parts.append(svg.text(_NAMES - 8, top + 12, row, 'text-anchor="end"'))
        parts += _bars(bars, across, top, said_ms)
        top, last_rank = top + _ROW + _SPACE, rank
    parts.append(svg.element("line", "axis", x1=across.begin, x2=across.end, y1=top, y2=top))
    for tick in svg.round_ticks(0.0, across.high, 7):
        if tick <= across.high:
            x = across.at(tick)
            parts += [svg.tick(x, top), svg.text(x, top + 18, f"{tick:,g}", 'text-anchor="middle"')]
    phases = list(
        dict.fromkeys(phase for _, _, bars in rows for bar in bars for phase in bar.phases)
    )
    items = [(phase, colour_of_phase(phase)) for phase in phases]
    legend, bottom = svg.squares(items, (8, _WIDTH - 8), top + 42)
    told = f"{seconds:.3g} s on {len(timelines)} ranks: {', '.join(phases)}."
    return svg.document((_WIDTH, bottom), title, told, [*parts, *legend], has_style=False)


@dataclass
class _Bar:
    """A span, or several short ones: milliseconds by phase, in the order of the first ones."""

    unit: str
    begin_ms: float
    end_ms: float
    phases: dict[str, float]
    count: int = 1

    @property
    def length_ms(self) -> float:
        return self.end_ms - self.begin_ms

    def __str__(self) -> str:
        if self.count == 1:
            (phase,) = self.phases
            of = "" if phase == "outside" else f" of {name_of_unit(self.unit)}"
            return f"{phase}{of}: {self.length_ms:.3g} ms"
        told = ", ".join(f"{phase} {ms:.3g} ms" for phase, ms in self.phases.items())
        return f"{self.count} spans from {name_of_unit(self.unit)} on: {told}"


def _by_line(spans: Sequence[Sequence[Any]]) -> dict[str, list[Sequence[Any]]]:
    found: dict[str, list[Sequence[Any]]] = {}
    for span in spans:
        found.setdefault(span[0], []).append(span)
    return {line: found[line] for line in sorted(found, key=place_of)}


def _joined(spans: Sequence[Sequence[Any]], shortest_ms: float) -> list[_Bar]:
    """Return spans as bars; neighbours are joined until a bar is long enough to be seen."""
    bars: list[_Bar] = []
    for _, phase, unit, begin, length, *_ in spans:
        last = bars[-1] if bars else None
        if last is not None and _belong_together(last, begin, length, shortest_ms):
            last.phases[phase] = last.phases.get(phase, 0.0) + length
            last.end_ms, last.count = begin + length, last.count + 1
        else:
            bars.append(_Bar(unit, begin, begin + length, {phase: length}))
    return bars


def _belong_together(last: _Bar, begin_ms: float, length_ms: float, shortest_ms: float) -> bool:
    is_near = begin_ms - last.end_ms < shortest_ms / 4
    is_one_short = min(last.length_ms, length_ms) < shortest_ms / 2
    return is_near and is_one_short and last.length_ms < shortest_ms


def _bars(bars: Sequence[_Bar], across: svg.Axis, top: float, said_ms: float) -> list[str]:
    """Draw bars of one row; one of several phases has as much of each as there was."""
    short: dict[str, list[str]] = {}
    parts = []
    for bar in bars:
        at = bar.begin_ms
        for phase, length in bar.phases.items():
            x = across.at(at)
            at += length
            width = max(across.at(at) - x, 0.3)
            if bar.length_ms > said_ms and bar.count == 1:
                parts.append(svg.bar(x, top, width, colour_of_phase(phase), str(bar), _ROW))
            else:
                short.setdefault(phase, []).append(_piece(x, top, width, _ROW))
        if bar.length_ms > said_ms and bar.count > 1:  # nothing to be seen but its title
            x, width = across.at(bar.begin_ms), across.at(bar.end_ms) - across.at(bar.begin_ms)
            parts.append(svg.bar(x, top, width, "#0000", str(bar), _ROW))
    return _paths(short) + parts
