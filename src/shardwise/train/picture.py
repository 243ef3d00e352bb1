"""The loss of a run as a picture, drawn from its metrics file: SVG text, in light and dark.

Above are the training loss and the held-out loss over the steps, below the learning rate. A run
that was resumed has all its steps in that file, so its curve continues. Imports no torch.

Many points are drawn as in Note [Few shapes]. If a few losses lie so far above the others that
these could not be read, the axis ends below them, and marks at its upper edge have their values as
titles.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from shardwise import svg

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 760, 466, 74, 722
_TOP, _BOTTOM, _RATE_TOP, _RATE_BOTTOM = 78, 318, 352, 416
_COLUMN = 2  # pixels

Point = tuple[int, float]  # (step, value)


@dataclass
class Curves:
    """Losses and learning rates of a metrics file; ``bad`` are steps without a finite loss."""

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
    """Draw the losses of a metrics file; return whether there were any. **Raises** OSError."""
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
    """Read JSON lines of a metrics file; skip lines of any other kind."""
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
    """Draw the curves of a run: a whole SVG document, which may stand inside an HTML page."""
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
        *(svg.draw_levels(up, ticks, across) if values else []),
        *(svg.tick(across.at(step), _BOTTOM) for step in svg.whole_ticks(across, 9)),
        *svg.draw_steps(across, _RATE_BOTTOM, 9),
        svg.text((_LEFT + _RIGHT) / 2, _RATE_BOTTOM + 40, "step", 'text-anchor="middle"'),
        *_resumed(curves.resumed, across),
        *svg.draw_curves(
            [
                _curve("train", "training loss", curves.train, curves.bad, high),
                _curve("held", "held out", curves.held_out, (), high),
            ],
            across,
            up,
        ),
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


def _resumed(steps: Sequence[int], across: svg.Axis) -> list[str]:
    """Draw where the run was resumed, each column once."""
    columns = {round(across.at(step) / _COLUMN): step for step in reversed(steps)}
    dashed = {"stroke_dasharray": "3 3", "y1": _TOP, "y2": _BOTTOM}
    return [
        svg.element("line", "resumed", f"resumed after step {step:,}", **dashed, x1=x, x2=x)
        for step in columns.values()
        for x in (across.at(step),)
    ]


def _curve(
    look: str, name: str, points: Sequence[Point], gaps: Sequence[int], high: float
) -> svg.Curve:
    """Return one loss as a curve, with the values above ``high`` as points that are marked."""
    made = [svg.Point(step, value, value, value) for step, value in points]
    shown = svg.thin([p for p in made if p.middle <= high], (_RIGHT - _LEFT) // _COLUMN)
    return svg.Curve(look, name, sorted([*shown, *(p for p in made if p.middle > high)]), gaps)


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
        *svg.draw_levels(up, ends, across, [f"{tick:g}" for tick in ends]),
        svg.draw_line("rate", line, stroke_width=1.6, stroke_linejoin="round"),
    ]
