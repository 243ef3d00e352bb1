"""The losses and learning rate of a run as SVG, from its metrics file; imports no torch.

Note [Many points and outliers]
The picture is some hundred columns wide. If a loss has more points, each column shows their mean
and a band from the lowest to the highest, so a spike of one step is visible. If a few losses are so
high that the others could not be read, the axis ends below them, and marks at its upper edge have
their values as titles.
"""

import json
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import floor, isfinite
from pathlib import Path
from typing import Any

from shardwise import svg

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 760, 466, 74, 722
_TOP, _BOTTOM, _RATE_TOP, _RATE_BOTTOM = 78, 318, 352, 416
_COLUMN = 2  # pixels
_FEW = 60  # points that are dotted
_CURVE: dict[str, Any] = {"stroke_width": 1.6, "stroke_linejoin": "round"}
_DASHED: dict[str, Any] = {"stroke_dasharray": "3 3"}
_THICKER: dict[str, Any] = {"stroke_width": 1.5}
_NO_NUMBER = "the loss is not a number at step"

Point = tuple[int, float]  # (step, value)


@dataclass
class Curves:
    """The curves of a metrics file; ``bad`` has the steps whose loss was not a number."""

    train: list[Point] = field(default_factory=list)
    held_out: list[Point] = field(default_factory=list)
    rate: list[Point] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step."""
        ends = [*self.bad[:1], *self.bad[-1:]]
        for points in (self.train, self.held_out):
            ends += [step for step, _ in (*points[:1], *points[-1:])]
        return min(ends), max(ends)


def write_picture(metrics: Path, target: Path) -> bool:
    """Draw the losses of a metrics file; return whether it has any. **Raises** OSError."""
    if not metrics.exists():
        return False
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        curves = read_curves(lines)
    if not (curves.train or curves.held_out or curves.bad):
        return False
    part = target.with_name(f"{target.name}.part")
    part.write_text(loss_svg(curves, f"Loss of {metrics.parent}"), encoding="utf-8")
    part.replace(target)
    return True


def read_curves(lines: Iterable[str]) -> Curves:
    """Read JSON lines of a metrics file; other lines are skipped."""
    found = Curves()
    for text in lines:
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        if "load_s" in line:
            found.resumed.append(step)
        for name, points in (("loss", found.train), ("eval_loss", found.held_out)):
            if name in line and isinstance(line[name], int | float) and isfinite(line[name]):
                points.append((step, float(line[name])))
            elif name in line:
                found.bad.append(step)
        if isinstance(line.get("lr"), int | float):
            found.rate.append((step, float(line["lr"])))
    return found


def loss_svg(curves: Curves, title: str) -> str:
    """Return the curves of a run as an SVG document, which an HTML page may embed."""
    across = svg.Axis(*curves.steps, _LEFT, _RIGHT)
    high = svg.highest_shown([value for _, value in (*curves.train, *curves.held_out)])
    values = [v for _, v in (*curves.train, *curves.held_out) if v <= high]
    ticks = svg.padded_ticks(values or [0.5], 7)
    up = svg.Axis(ticks[0], ticks[-1], _BOTTOM, _TOP)
    parts = [
        svg.element("rect", "paper", width=_WIDTH, height=_HEIGHT, rx=6),
        svg.heading(_LEFT, 28, title),
        svg.text(_LEFT, _TOP - 14, "loss, nats per token"),
        *svg.legend(_legend(curves, up.high), _RIGHT, _TOP - 14),
        *(_grid(up, ticks, svg.labels(ticks)) if values else []),
        *_steps_axis(across),
        *_marks(curves, across),
        *_series("train", curves.train, curves.bad, across, up),
        *_series("held", curves.held_out, (), across, up),
        *_rate(curves.rate, across),
    ]
    return svg.document((_WIDTH, _HEIGHT), title, _description(curves), parts)


def _described(name: str, points: Sequence[Point]) -> list[str]:
    if not points:
        return []
    (first, begin), (last, end) = points[0], points[-1]
    low_step, low = min(points, key=lambda point: point[1])
    if first == last:
        return [f"{name} {begin:.4g} at step {first:,}"]
    text = f"{name} from {begin:.4g} at step {first:,} to {end:.4g} at step {last:,}"
    return [f"{text}, lowest {low:.4g} at step {low_step:,}"]


def _description(curves: Curves) -> str:
    parts = _described("training loss", curves.train) + _described("held out", curves.held_out)
    if curves.bad:
        parts.append(f"no number at {len(curves.bad):,} steps, first at step {curves.bad[0]:,}")
    if curves.rate:
        highest = max(value for _, value in curves.rate)
        parts.append(f"learning rate at most {highest:.4g}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _legend(curves: Curves, high: float) -> list[tuple[str, str, str]]:
    above = any(value > high for _, value in (*curves.train, *curves.held_out))
    items = (
        ("train", "training", "", curves.train),
        ("held", "held out", "", curves.held_out),
        ("bad", "not a number", "", curves.bad),
        ("resumed", "resumed", "3 3", curves.resumed),
        ("above", "above the axis", "", above),
    )
    return [(name, text, dashes) for name, text, dashes, there in items if there]


def _grid(up: svg.Axis, ticks: Sequence[float], labels: Sequence[str]) -> list[str]:
    levels = zip(ticks, labels, strict=True)
    return [part for t, label in levels for part in svg.level(up.at(t), _LEFT, _RIGHT, label)]


def _steps_axis(across: svg.Axis) -> list[str]:
    first, last = int(across.low), int(across.high)
    ticks = [t for t in svg.round_ticks(first, last, 9) if first <= t <= last and t == int(t)]
    parts = [svg.text((_LEFT + _RIGHT) / 2, _RATE_BOTTOM + 40, "step", 'text-anchor="middle"')]
    for tick in dict.fromkeys([*ticks] if len(ticks) > 1 else [first, last]):
        x = across.at(tick)
        parts += [svg.tick(x, _BOTTOM), svg.tick(x, _RATE_BOTTOM)]
        parts.append(svg.text(x, _RATE_BOTTOM + 20, f"{tick:,.0f}", 'text-anchor="middle"'))
    return parts


def _marks(curves: Curves, across: svg.Axis) -> list[str]:
    """Mark resumed steps, and steps whose loss was not a number, once per column."""
    parts = []
    for name, steps, top, look, said in (
        ("resumed", curves.resumed, _TOP, _DASHED, "resumed after step"),
        ("bad", curves.bad, _BOTTOM - 14, _THICKER, _NO_NUMBER),
    ):
        columns = {round(across.at(step) / _COLUMN): step for step in reversed(steps)}
        for step in columns.values():
            x, words = across.at(step), f"{said} {step:,}"
            parts.append(svg.element("line", name, words, **look, x1=x, x2=x, y1=top, y2=_BOTTOM))
    return parts


def _series(
    name: str, points: Sequence[Point], gaps: Sequence[int], across: svg.Axis, up: svg.Axis
) -> list[str]:
    """Draw one loss as a line, with dots if it has few points and a band if it has many."""
    shown = [(step, value) for step, value in points if value <= up.high]
    parts: list[str] = []
    if len(shown) > 2 * (_RIGHT - _LEFT) / _COLUMN:
        columns = _columns(shown, across)
        edges = [(x, up.at(high)) for x, _, _, high in columns]
        edges += [(x, up.at(low)) for x, low, _, _ in reversed(columns)]
        band = f"{name}-fill"
        parts.append(svg.element("polygon", band, fill_opacity=0.25, points=svg.places(edges)))
        parts.append(svg.line(name, [(x, up.at(mean)) for x, _, mean, _ in columns], **_CURVE))
    else:
        parts += [
            svg.line(name, [(across.at(s), up.at(v)) for s, v in piece], **_CURVE)
            for piece in _pieces(shown, gaps)
        ]
    if len(shown) <= _FEW:
        parts += [
            svg.dot(f"{name}-fill", across.at(step), up.at(value), f"step {step:,}: {value:.4g}")
            for step, value in shown
        ]
    return parts + _beyond(name, points, across, up)


def _pieces(points: Sequence[Point], gaps: Sequence[int]) -> Iterable[list[Point]]:
    """Split the points at steps whose loss was not a number."""
    begin = 0
    steps = [step for step, _ in points]
    for end in sorted({bisect(steps, gap) for gap in gaps} | {len(points)}):
        if end > begin:
            yield list(points[begin:end])
        begin = end


def _columns(points: Sequence[Point], across: svg.Axis) -> list[tuple[float, float, float, float]]:
    """Return (x, lowest, mean, highest) of each column of pixels that has points."""
    found: dict[int, list[Point]] = {}
    for point in points:
        found.setdefault(floor((across.at(point[0]) - _LEFT) / _COLUMN), []).append(point)
    columns = []
    for inside in found.values():
        values = [value for _, value in inside]
        x = sum(across.at(step) for step, _ in inside) / len(inside)
        columns.append((x, min(values), sum(values) / len(values), max(values)))
    return columns


def _beyond(name: str, points: Sequence[Point], across: svg.Axis, up: svg.Axis) -> list[str]:
    """Mark the highest loss above the axis in each column, by a small triangle."""
    highest: dict[int, Point] = {}
    for point in points:
        column = round(across.at(point[0]) / 8)
        known = highest.get(column)
        if point[1] > up.high and (known is None or point[1] > known[1]):
            highest[column] = point
    said = "step {:,}: {:.4g}, above what is shown"
    marks = ((across.at(point[0]) - 4, said.format(*point)) for point in highest.values())
    return [svg.above(f"{name}-fill", x, _TOP + 2, words) for x, words in marks]


def _rate(points: Sequence[Point], across: svg.Axis) -> list[str]:
    if not points:
        return []
    ticks = svg.round_ticks(0.0, max(value for _, value in points), 4)
    up = svg.Axis(ticks[0], ticks[-1], _RATE_BOTTOM, _RATE_TOP)
    stride = max(1, len(points) // (_RIGHT - _LEFT))
    kept = [*points[:-1:stride], points[-1]]
    line = [(across.at(step), up.at(value)) for step, value in kept]
    if len(line) == 1:
        line = [(line[0][0] - 3, line[0][1]), (line[0][0] + 3, line[0][1])]
    ends = list(dict.fromkeys([ticks[0], ticks[-1]]))
    return [
        svg.text(_LEFT, _RATE_TOP - 10, "learning rate"),
        *_grid(up, ends, [f"{tick:g}" for tick in ends]),
        svg.line("rate", line, **_CURVE),
    ]
