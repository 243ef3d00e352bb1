"""Pictures as SVG text: axes, curves over steps, and the elements of a document.

Colours follow the reader's light or dark setting.

Note [Few shapes]
~~~~~~~~~~~~~~~~~
A step has thousands of spans, and a run more steps than a picture has columns. Steps that share a
column become one: the least of the minima, the mean of the values (weighed by their number of
steps), the greatest of the maxima, so a spike of one step is still seen. Spans that are too short
to be seen are joined with their neighbours and drawn with as much of each kind as they had. Only
spans that a pointer can hit have titles; the shapes of all others of one kind in a row are one
path.
"""

import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from math import ceil, floor, log10
from typing import NamedTuple

# Fewer values have no outliers; an outlier is above the others by this many times their range.
_ENOUGH, _FAR = 20, 10
_DOT_GAP = 11  # pixels between points that are dotted
WIDTH = 760  # of charts that are as wide as a page
OTHER = "other"  # bytes of the device that are not the engine's


@cache
def _colours() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(files(__package__).joinpath("svg.toml").read_text(encoding="utf-8"))


def colour_of(name: str) -> str:
    """Return the colour of work or of a kind of memory; an unknown one has the same everywhere."""
    tables = _colours()
    known, rest = {**tables["kinds"], **tables["work"]}, [*tables["rest"].values()]
    word = known.get(name) or known.get(name_of_kind(name))
    return word or rest[sum(map(ord, name)) % len(rest)]


def order_of_kinds(kind: str) -> tuple[bool, int]:
    """Return the place of a kind of memory in pictures and tables; `OTHER` is last."""
    known = list(_colours()["kinds"])
    return kind == OTHER, known.index(kind) if kind in known else len(known)


def name_of_kind(kind: str) -> str:
    """Return the word for a phase or a kind of memory; phases of one kind of work share one."""
    return _colours()["words"].get(kind) or kind.replace("_", " ")


# -- axes
@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high``, drawn from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Return the place of a value; an axis of one value has it in the middle."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.begin + share * (self.end - self.begin)


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` multiples of 1, 2 or 5 times a power of ten, around a range."""
    if not high > low:
        return [low]
    power = floor(log10((high - low) / most))
    for step in (10.0**power * n for n in (1, 2, 5, 10, 20, 50)):
        first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [number * step for number in range(first, last + 1)]


def padded_ticks(values: Sequence[float], most: int) -> list[float]:
    """Return ticks around some values, with room beside values that are all equal."""
    low, high = min(values), max(values)
    if high - low < 1e-6 * abs(high) or high == low:
        room = 0.05 * abs(high) or 1.0
        low, high = low - room, high + room
    return round_ticks(low, high, most)


def labels(ticks: Sequence[float]) -> list[str]:
    """Write ticks with enough digits to distinguish them."""
    gap = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    digits = -floor(log10(gap) + 1e-9)
    largest = max(abs(tick) for tick in ticks)
    if largest >= 1e6 or digits > 4:
        return [f"{tick:.6g}" if abs(tick) > 1e-12 * largest else "0" for tick in ticks]
    return [f"{tick:,.{max(0, digits)}f}" for tick in ticks]


def highest_shown(values: Iterable[float]) -> float:
    """Return the end of an axis: below a few values that lie far above all others."""
    ordered = sorted(values)
    if len(ordered) < _ENOUGH:
        return ordered[-1] if ordered else 0.0
    low, usual = ordered[0], ordered[int(0.98 * (len(ordered) - 1))]
    far = usual + _FAR * max(usual - low, 1e-3 * abs(usual))
    return max(value for value in ordered if value <= far)


def draw_levels(
    up: Axis, ticks: Sequence[float], across: Axis, words: Sequence[str] | None = None
) -> list[str]:
    """Draw lines of the grid, with labels at the left."""
    parts = []
    for tick, label in zip(ticks, words or labels(ticks), strict=True):
        y = up.at(tick)
        parts.append(element("line", "grid", x1=across.begin, x2=across.end, y1=y, y2=y))
        parts.append(text(across.begin - 8, y + 4, label, 'text-anchor="end"'))
    return parts


def draw_ticks(across: Axis, bottom: float, ticks: Sequence[float]) -> list[str]:
    """Draw ticks with their numbers below an axis."""
    parts = []
    for value in ticks:
        x = across.at(value)
        look = "end" if x > across.end - 16 else "middle"
        parts.append(element("line", "grid", x1=x, x2=x, y1=bottom, y2=bottom + 5))
        parts.append(text(x, bottom + 20, f"{value:,.12g}", f'text-anchor="{look}"'))
    return parts


def draw_steps(across: Axis, bottom: float, most: int) -> list[str]:
    """Draw round whole numbers below an axis, or its two ends if fewer than two lie on it."""
    ticks = [t for t in round_ticks(across.low, across.high, most) if t == int(t)]
    ticks = [t for t in ticks if across.low <= t <= across.high]
    ends = list(dict.fromkeys((across.low, across.high)))
    return draw_ticks(across, bottom, ticks if len(ticks) > 1 else ends)


# -- values over steps
class Point(NamedTuple):
    """The lowest, middle and highest value of ``weight`` steps up to ``step``."""

    step: float
    low: float
    middle: float
    high: float
    weight: int = 1


@dataclass(frozen=True)
class Curve:
    """A line of a chart; ``gaps`` are steps without a number.

    ``look`` is the class of the line, ``look-fill`` that of its band and its dots.
    """

    look: str
    name: str
    points: Sequence[Point]
    gaps: Sequence[float] = ()


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most ``most`` points, each of neighbouring steps; see Note [Few shapes]."""
    if len(points) <= most:
        return list(points)
    first, last = points[0].step, points[-1].step
    groups: dict[int, list[Point]] = {}
    for point in points:
        place = min(int((point.step - first) / (last - first) * most), most - 1)
        groups.setdefault(place, []).append(point)
    return [
        Point(
            group[-1].step,
            min(point.low for point in group),
            sum(point.middle * point.weight for point in group) / weight,
            max(point.high for point in group),
            weight,
        )
        for group in groups.values()
        for weight in (sum(point.weight for point in group),)
    ]


def describe(name: str, points: Sequence[Point]) -> str:
    """Describe a curve in words."""
    first, last, lowest = points[0], points[-1], min(points, key=lambda point: point.low)
    return (
        f"{name} from {first.middle:.4g} at step {first.step:,} to {last.middle:.4g} at step "
        f"{last.step:,}, lowest {lowest.low:.4g} at step {lowest.step:,}"
    )


def draw_curve(curve: Curve, across: Axis, up: Axis) -> list[str]:
    """Draw a line over steps, with a band from lowest to highest.

    Points have dots if they are few. Values above the axis and steps without a number have marks.
    """
    fill, parts = f"{curve.look}-fill", []
    shown = [p for p in curve.points if p.middle <= up.high]
    if any(p.high > p.low for p in shown):
        edges = [(across.at(p.step), up.at(min(p.high, up.high))) for p in shown]
        edges += [(across.at(p.step), up.at(p.low)) for p in reversed(shown)]
        parts.append(element("polygon", fill, fill_opacity=0.22, points=places(edges)))
    gaps = sorted(curve.gaps)
    for _, piece in groupby(shown, key=lambda p: bisect_left(gaps, p.step)):
        line = [(across.at(p.step), up.at(p.middle)) for p in piece]
        parts.append(element("polyline", curve.look, points=places(line)))
    if len(shown) * _DOT_GAP <= across.end - across.begin:
        for p in shown:
            tooltip = f"step {p.step:,.0f}: {p.middle:.4g}"
            parts.append(
                element("circle", fill, tooltip, cx=across.at(p.step), cy=up.at(p.middle), r=2.6)
            )
    beyond: dict[int, Point] = {}
    for point in curve.points:
        column = round(across.at(point.step) / 8)
        if point.high > max(up.high, beyond[column].high if column in beyond else up.high):
            beyond[column] = point
    for point in beyond.values():
        tooltip = f"step {point.step:,.0f}: {point.high:.4g}, above what is shown"
        parts.append(above(fill, across.at(point.step) - 4, up.end + 2, tooltip))
    for x, step in {round(across.at(step)): step for step in reversed(gaps)}.items():
        tooltip = f"{curve.name}: not a number at step {step:,.0f}"
        ends = {"x1": x, "x2": x, "y1": up.begin - 13, "y2": up.begin}
        parts.append(element("line", "bad", tooltip, stroke_width=1.5, **ends))
    return parts


# -- the document and its elements
def document(size: tuple[float, float], title: str, description: str, parts: Iterable[str]) -> str:
    """Return a whole SVG document, for a page that contains `style` or with it in its parts."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" '
        f'role="img" class="shardwise-picture" aria-label="{escape(title, quote=True)}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(description)}</desc>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


@cache
def style() -> str:
    """Return the CSS of the classes of elements."""
    return files(__package__).joinpath("svg.css").read_text(encoding="utf-8")


def element(tag: str, name: str, tooltip: str = "", **attributes: object) -> str:
    """Write an element of the class ``name``; a pointer over it shows ``tooltip``.

    An attribute's "_" is written as "-".
    """
    given = {"class": name, **attributes} if name else attributes
    written = ""
    for key, value in given.items():
        number = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
        written += f' {key.replace("_", "-")}="{number}"'
    return f"<{tag}{written}>{f'<title>{escape(tooltip)}</title>' if tooltip else ''}</{tag}>"


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Write a text at a place; ``more`` are attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def heading(x: float, y: float, words: str, size: int = 15) -> str:
    """Write the title of a picture."""
    return text(x, y, words, f'class="strong" font-size="{size}" font-weight="600"')


def places(points: Iterable[tuple[float, float]]) -> str:
    """Write points as an attribute."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def legend(items: Sequence[tuple[str, str]], right: float, y: float) -> list[str]:
    """Draw (class, text) side by side, up to ``right``; "above" is a mark."""
    parts = []
    x = right - sum(38 + 6.6 * len(words) for _, words in items)
    for name, words in items:
        ends = {"x1": x + 12, "x2": x + 32, "y1": y - 4, "y2": y - 4, "stroke_width": 2}
        mark = above("train-fill", x + 18, y) if name == "above" else ""
        parts += [mark or element("line", name, "", **ends), text(x + 37, y, words)]
        x += 38 + 6.6 * len(words)
    return parts


def above(name: str, x: float, y: float, tooltip: str = "") -> str:
    """Draw a small triangle, the mark of a value above the axis."""
    return element("path", name, tooltip, d=f"M{x:.1f},{y:.1f} h8 l-4,-8 z")


def draw_bar(x: float, y: float, width: float, height: float, fill: str, tooltip: str = "") -> str:
    """Draw a bar, wide enough to be seen."""
    return element("rect", "", tooltip, x=x, y=y, width=max(width, 0.3), height=height, fill=fill)


def squares(kinds: Iterable[str], left: float, top: float) -> tuple[list[str], float]:
    """Draw a legend of kinds with their names, in lines; return it and its lower end."""
    parts: list[str] = []
    x = left
    for kind in dict.fromkeys(kinds):
        name = name_of_kind(kind)
        width = 28 + 6.8 * len(name)
        if x + width > WIDTH - 8:
            x, top = left, top + 20
        parts += [draw_bar(x, top - 9, 10, 10, colour_of(kind)), text(x + 15, top, name)]
        x += width
    return parts, top + 16
