"""What all pictures are drawn with: texts, lines, an axis and its round ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10


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


def svg_text(x: float, y: float, text: str, more: str = "") -> str:
    """Write a text at a place; ``more`` are attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def svg_line(name: str, points: Sequence[tuple[float, float]], more: str) -> str:
    """Draw a line through points, with the class ``name``."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{name}" fill="none" {more} points="{places}"/>'
