"""What all pictures are drawn with: a document that follows light and dark, elements, an axis."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

_ENOUGH, _FAR = 20, 10  # values of which some can be called far away; by how many of their range
_COLOURS = {  # what is drawn: which property has the colour; on light, on dark
    "text": ("fill", "#4a5058", "#b3bac3"),
    ".strong": ("fill", "#1c2024", "#f0f3f6"),
    ".paper": ("fill", "#fff", "#16191d"),
    ".grid": ("stroke", "#dfe3e8", "#3a4149"),
    ".axis": ("stroke", "#c6ccd3", "#4a5158"),
    ".ideal,.resumed": ("stroke", "#7a828c", "#8d96a0"),
    ".line,.train": ("stroke", "#1f6fd1", "#6cabf5"),
    ".line-fill,.train-fill": ("fill", "#1f6fd1", "#6cabf5"),
    ".held": ("stroke", "#b3560b", "#f0a35a"),
    ".held-fill": ("fill", "#b3560b", "#f0a35a"),
    ".rate": ("stroke", "#27864b", "#6dc48c"),
    ".bad,.limit": ("stroke", "#c0392b", "#ff8a7a"),
}


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high``, drawn from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Return where a value lies; an axis of one value has it in the middle."""
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
    """Return ticks around some values, with room beside values that are all alike."""
    low, high = min(values), max(values)
    if high - low < 1e-6 * abs(high) or high == low:
        room = 0.05 * abs(high) or 1.0
        low, high = low - room, high + room
    return round_ticks(low, high, most)


def labels(ticks: Sequence[float]) -> list[str]:
    """Write ticks with as many digits as tell them apart."""
    gap = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    digits = -floor(log10(gap) + 1e-9)
    largest = max(abs(tick) for tick in ticks)
    if largest >= 1e6 or digits > 4:
        return [f"{tick:.6g}" if abs(tick) > 1e-12 * largest else "0" for tick in ticks]
    return [f"{tick:,.{max(0, digits)}f}" for tick in ticks]


def highest_shown(values: Iterable[float]) -> float:
    """Return where an axis may end: below a few values that lie far above all others."""
    ordered = sorted(values)
    if len(ordered) < _ENOUGH:
        return ordered[-1] if ordered else 0.0
    low, usual = ordered[0], ordered[int(0.98 * (len(ordered) - 1))]
    far = usual + _FAR * max(usual - low, 1e-3 * abs(usual))
    return max(value for value in ordered if value <= far)


def document(
    size: tuple[float, float],
    title: str,
    description: str,
    parts: Iterable[str],
    ids: str = "",
    has_style: bool = True,
) -> str:
    """Return a whole SVG document, which may stand inside an HTML page.

    With ``ids`` title and description have ids, by which the picture is labelled. Pictures of a
    page that has `style` need none of their own.
    """
    label = f'aria-label="{escape(title, quote=True)}"'
    if ids:
        label = f'aria-labelledby="{ids}-title {ids}-desc"'
    named = [f' id="{ids}-{name}"' if ids else "" for name in ("title", "desc")]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" '
        f'role="img" class="shardwise-picture" {label}>',
        f"<title{named[0]}>{escape(title)}</title>",
        f"<desc{named[1]}>{escape(description)}</desc>",
        *([f"<style>{style()}</style>"] if has_style else []),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def style() -> str:
    """Return what the classes of elements look like, as CSS."""
    light, dark = (
        "\n".join(
            f"{','.join(f'.shardwise-picture {one}' for one in of.split(','))}{{{row[0]}:{row[i]}}}"
            for of, row in _COLOURS.items()
        )
        for i in (1, 2)
    )
    font = ".shardwise-picture{font-family:system-ui,sans-serif;font-size:12px}"
    return f"\n{font}\n{light}\n@media (prefers-color-scheme:dark){{\n{dark}\n}}\n"


def element(tag: str, name: str, said: str = "", **attributes: Any) -> str:
    """Write an element of the class ``name``; ``said`` is shown under a pointer.

    An attribute's "_" stands for "-".
    """
    given = {"class": name, **attributes} if name else attributes
    written = " ".join(f'{k.replace("_", "-")}="{_number(v)}"' for k, v in given.items())
    return f"<{tag} {written}>{f'<title>{escape(said)}</title>' if said else ''}</{tag}>"


def _number(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Write a text at a place; ``more`` are attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def heading(x: float, y: float, words: str) -> str:
    """Write the title of a picture."""
    return text(x, y, words, 'class="strong" font-size="15" font-weight="600"')


def dot(name: str, x: float, y: float, said: str = "", radius: float = 2.6) -> str:
    """Draw a point; ``said`` is shown under a pointer."""
    return element("circle", name, said, cx=x, cy=y, r=radius)


def line(name: str, points: Sequence[tuple[float, float]], **attributes: Any) -> str:
    """Draw a line through points, with the class ``name``."""
    return element("polyline", name, fill="none", **attributes, points=places(points))


def places(points: Iterable[tuple[float, float]]) -> str:
    """Write points as an attribute has them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def level(y: float, left: float, right: float, label: str) -> list[str]:
    """Draw a line of the grid with its label at the left."""
    stroke = element("line", "grid", x1=left, x2=right, y1=y, y2=y)
    return [stroke, text(left - 8, y + 4, label, 'text-anchor="end"')]


def tick(x: float, y: float) -> str:
    """Draw a tick below an axis."""
    return element("line", "grid", x1=x, x2=x, y1=y, y2=y + 5)


def legend(items: Sequence[tuple[str, str, str]], right: float, y: float) -> list[str]:
    """Draw (class, text, dashes) one beside the other, up to ``right``; "above" is a mark."""
    parts = []
    x = right - sum(38 + 6.6 * len(words) for _, words, _ in items)
    for name, words, dashes in items:
        look = {"stroke_width": 2, **({"stroke_dasharray": dashes} if dashes else {})}
        stroke = element("line", name, "", **look, x1=x + 12, x2=x + 32, y1=y - 4, y2=y - 4)
        parts += [above("train-fill", x + 18, y) if name == "above" else stroke]
        parts += [text(x + 37, y, words)]
        x += 38 + 6.6 * len(words)
    return parts


def above(name: str, x: float, y: float, said: str = "") -> str:
    """Draw a small triangle: there is something above."""
    return element("path", name, said, d=f"M{x:.1f},{y:.1f} h8 l-4,-8 z")


def bar(x: float, y: float, width: float, fill: str, said: str = "", height: float = 22) -> str:
    """Draw a bar of a colour of its own, wide enough to be seen."""
    seen = max(width, 0.3)
    return element("rect", "", said, x=x, y=y, width=seen, height=height, fill=fill)


def squares(
    items: Sequence[tuple[str, str]], ends: tuple[float, float], top: float
) -> tuple[list[str], float]:
    """Draw a legend of (text, colour) in lines between two ends; return it and where it ends."""
    parts: list[str] = []
    x = float(ends[0])
    for name, colour in items:
        width = 28 + 6.8 * len(name)
        if x + width > ends[1]:
            x, top = float(ends[0]), top + 20
        parts.append(bar(x, top - 9, 10, colour, "", 10))
        parts.append(text(x + 15, top, name))
        x += width
    return parts, top + 16
