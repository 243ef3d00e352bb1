"""The charts of reports, as SVG text: lines, bars, stacked areas and timelines."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from shardwise import svg
from shardwise.names import name_of_unit
from shardwise.quantities import ByteUnit, format_bytes, format_count
from shardwise.svg import Axis, Curve, colour_of, document, draw_bar, element, heading, text

_LARGE = 1e5  # numbers above it are abbreviated beside the axis
_EDGE, _NAMES = 8, 172  # the left end of bars, and of the rows of spans
_BAR, _ROW = 22, 15  # heights
_POINTED = 2.0  # pixels of a span with a title


def lines_chart(title: str, curves: Sequence[Curve], from_zero: bool = False) -> str:
    """Draw values over the steps, a line for each curve; empty if there are none."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    steps = [point.step for point in points]
    across = Axis(min(steps), max(steps), 52, 370)
    high = svg.highest_shown([point.high for point in points])
    ticks = svg.padded_ticks([*[0.0] * from_zero, *(min(p.low, high) for p in points), high], 6)
    up = Axis(ticks[0], ticks[-1], 168, 34)
    is_large = max(abs(tick) for tick in ticks) >= _LARGE
    held = [(curve.look, curve.name) for curve in curves if curve.look == "held"]
    parts = [
        heading(8, 18, title, 13),
        *svg.legend(held, across.end, 18),
        *svg.draw_levels(up, ticks, across, [format_count(t) for t in ticks] if is_large else None),
        *svg.draw_steps(across, up.begin, 5),
        *chain.from_iterable(svg.draw_curve(curve, across, up) for curve in curves),
    ]
    described = "; ".join(svg.describe(each.name, each.points) for each in curves if each.points)
    return document((380, 196), title, f"{title}. {described}.", parts)


# -- rows of coloured bars
class Bar(NamedTuple):
    """A row of a chart of bars: its name, and its parts by kind."""

    name: str
    parts: Mapping[str, float]


def bars_chart(title: str, rows: Sequence[Bar], write: Callable[[float], str]) -> str:
    """Draw rows of stacked bars to one scale; ``write`` writes a value."""
    most = max(sum(row.parts.values()) for row in rows)
    across = Axis(0.0, most or 1.0, _EDGE, svg.WIDTH - _EDGE)
    kinds = (kind for row in rows for kind, value in row.parts.items() if value)
    parts, top = [heading(_EDGE, 20, title, 13)], 58.0
    for row in rows:
        whole, at = sum(row.parts.values()), 0.0
        parts.append(text(_EDGE, top - 6, f"{row.name}: {write(whole)}", 'class="strong"'))
        for kind, value in row.parts.items():
            x, width, share = across.at(at), across.at(value) - across.begin, value / (whole or 1)
            at += value
            tooltip = f"{row.name}: {svg.name_of_kind(kind)} {write(value)}, {share:.1%}"
            if value:
                parts.append(draw_bar(x, top, width, _BAR, colour_of(kind), tooltip))
            if width > 40:
                look = 'text-anchor="middle" class="on-bar"'
                parts.append(text(x + width / 2, top + 15, f"{share:.0%}", look))
        top += _BAR + 30
    legend, bottom = svg.squares(kinds, _EDGE, top)
    described = "; ".join(
        f"{name}: {', '.join(f'{svg.name_of_kind(k)} {write(v)}' for k, v in held.items())}"
        for name, held in rows
    )
    return document((svg.WIDTH, bottom), title, f"{described}.", [*parts, *legend])


# -- stacked areas
def areas_chart(
    title: str,
    moments: Sequence[Bar],
    most: int,
    *,
    described: str = "",
    beside: Bar | None = None,
) -> str:
    """Draw bytes by kind over moments as stacked areas, in at most ``most`` columns.

    A column has the largest of its moments. The name of a moment is its phase, shown by a strip
    below. ``beside`` is drawn at the right, to the same scale.
    """
    width = max(1, -(-len(moments) // most))
    held = [moment.parts for moment in moments]
    totals = [sum(parts.values()) for parts in held]
    groups = (held[at : at + width] for at in range(0, len(held), width))
    columns = [max(group, key=lambda parts: sum(parts.values())) for group in groups]
    others = {} if beside is None else beside.parts
    most_bytes = max(*totals, sum(others.values()))
    unit = ByteUnit(most_bytes)
    ticks = svg.round_ticks(0.0, most_bytes / unit.size or 1.0, 6)
    across = Axis(0, len(moments), 64, svg.WIDTH - (16 if beside is None else 100))
    up = Axis(0.0, ticks[-1] * unit.size, 250, 48)
    kinds = sorted({k for parts in (*columns, others) for k in parts}, key=svg.order_of_kinds)
    peak = across.at(totals.index(max(totals)) + 0.5)
    parts = [
        heading(_EDGE, 20, f"{title}, {unit.name}", 13),
        *svg.draw_levels(up, [tick * unit.size for tick in ticks], across, svg.labels(ticks)),
        *_draw_areas(kinds, columns, across, up),
        *_draw_phases(moments, across, up.begin + 4),
        element("line", "limit", x1=peak, x2=peak, y1=up.end, y2=up.begin),
        text(peak, up.end - 6, "peak", 'text-anchor="middle"'),
    ]
    if beside is not None:
        parts.append(text(across.end + 30, up.begin + 12, beside.name, 'class="strong"'))
        at = 0.0
        for kind in (kind for kind in kinds if beside.parts.get(kind)):
            value, low = beside.parts[kind], up.at(at)
            at += value
            tooltip = f"{beside.name}: {svg.name_of_kind(kind)} {format_bytes(value)}"
            x, top = across.end + 30, up.at(at)
            parts.append(draw_bar(x, top, 36, low - top, colour_of(kind), tooltip))
    legend, bottom = svg.squares(kinds, across.begin, up.begin + 48)
    return document((svg.WIDTH, bottom), title, described, parts + legend)


def _draw_areas(
    kinds: Sequence[str], columns: Sequence[Mapping[str, float]], across: Axis, up: Axis
) -> list[str]:
    """Draw equally wide columns as areas, the first kind lowest."""
    width, parts = (across.end - across.begin) / len(columns), []

    def edge(values: Sequence[float]) -> list[tuple[float, float]]:
        """Return the corners of a line of steps; a value that stays adds none."""
        found: list[tuple[float, float]] = []
        for value, group in groupby(enumerate(values), key=lambda row: row[1]):
            same = [at for at, _ in group]
            ends = (across.begin + width * at for at in (same[0], same[-1] + 1))
            found += [(x, up.at(value)) for x in ends]
        return found

    below = [0.0] * len(columns)
    for kind in kinds:
        top = [low + column.get(kind, 0) for low, column in zip(below, columns, strict=True)]
        if top != below:
            corners = svg.places([*edge(top), *reversed(edge(below))])
            most = max(column.get(kind, 0) for column in columns)
            tooltip = f"{svg.name_of_kind(kind)}: up to {format_bytes(most)}"
            parts.append(element("polygon", "", tooltip, points=corners, fill=colour_of(kind)))
        below = top
    return parts


def _draw_phases(moments: Sequence[Bar], across: Axis, top: float) -> list[str]:
    """Draw a strip of the phases of moments; name those with room."""
    parts, at = [], 0
    for phase, group in groupby(moment.name for moment in moments):
        x, at = across.at(at), at + len(list(group))
        width = across.at(at) - x
        parts.append(draw_bar(x, top, width, 8, colour_of(phase), phase))
        if width > 7 * len(phase):
            parts.append(text(x + width / 2, top + 24, phase, 'text-anchor="middle"'))
    return parts


# -- a timeline
class Span(NamedTuple):
    """A part of a row: its kind, which tells its colour, its begin and length; its owner."""

    kind: str
    begin: float
    length: float
    of: str = ""


def timeline_chart(
    title: str,
    groups: Sequence[tuple[str, Mapping[str, Sequence[Span]]]],
    length_ms: float,
    *,
    described: str = "",
    most: int,
) -> str:
    """Draw groups of rows of spans over time; about ``most`` bars, see Note [Few shapes].

    A group has a heading and its rows by name.
    """
    across = Axis(0.0, length_ms or 1e-9, _NAMES, svg.WIDTH - 12)
    parts, top = [heading(_EDGE, 20, title, 13)], 32.0
    num_rows = sum(len(rows) for _, rows in groups)
    for group, rows in groups:
        top += 6
        parts.append(text(_EDGE, top + 12, group, 'class="strong"'))
        for name, row in rows.items():
            parts.append(text(_NAMES - 8, top + 12, name, 'text-anchor="end"'))
            parts += _draw_row(row, across, top, length_ms * num_rows / most)
            top += _ROW + 4
    parts.append(element("line", "axis", x1=across.begin, x2=across.end, y1=top, y2=top))
    ticks = [at for at in svg.round_ticks(0.0, across.high, 7) if at <= across.high]
    parts += svg.draw_ticks(across, top, ticks)
    spans = [span for _, rows in groups for row in rows.values() for span in row]
    legend, bottom = svg.squares((svg.name_of_kind(s.kind) for s in spans), _EDGE, top + 42)
    return document((svg.WIDTH, bottom), title, described, parts + legend)


def _draw_row(spans: Sequence[Span], across: Axis, top: float, shortest: float) -> list[str]:
    """Draw a row of spans; short neighbours are drawn as one, with as much of each kind."""
    groups: list[list[Span]] = []
    end = length = 0.0  # of the last group
    for span in spans:
        is_near = span.begin - end < shortest / 4 and length < shortest
        if groups and is_near and min(length, span.length) < shortest / 2:
            groups[-1].append(span)
        else:
            groups.append([span])
        end = span.begin + span.length
        length = end - groups[-1][0].begin
    untitled: dict[str, list[str]] = {}
    titled = []
    for first, *others in groups:
        at, kinds = first.begin, dict[str, float]()
        for span in (first, *others):
            kinds[span.kind] = kinds.get(span.kind, 0.0) + span.length
        for kind, length in kinds.items():
            x, width = across.at(at), max(across.at(at + length) - across.at(at), 0.3)
            width, at = min(width, across.end - x), at + length
            if width >= _POINTED:
                of = f" of {name_of_unit(first.of)}" if kind != "outside" else ""
                tooltip = f"{kind}{of}: {length:.3g} ms"
                titled.append(draw_bar(x, top, width, _ROW, colour_of(kind), tooltip))
            else:
                shape = f"M{x:.1f},{top:.0f}h{width:.1f}v{_ROW}h-{width:.1f}z"
                untitled.setdefault(kind, []).append(shape)
    paths = [element("path", "", d="".join(of), fill=colour_of(k)) for k, of in untitled.items()]
    return paths + titled
