"""The losses of a run as a picture, drawn from its metrics file: SVG, in light and dark.

The learning rate is drawn below. A run that was resumed has all its steps in that file, so its
curve continues. Many points are drawn as in Note [Few shapes]. If a few losses lie far above the
others, the axis ends below them, and marks at its upper edge have their values as titles. Imports
no torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path

from shardwise import svg

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 760, 466, 74, 722
_TOP, _BOTTOM, _RATE_TOP, _RATE_BOTTOM = 78, 318, 352, 416
_COLUMN = 2  # pixels
_LOOKS = {"loss": ("train", "training loss"), "eval_loss": ("held", "held out")}


def write_picture(metrics: Path, target: Path) -> bool:
    """Draw the losses of a metrics file; return whether there were any. **Raises** OSError."""
    if not metrics.exists():
        return False
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        drawn = loss_svg(lines, f"Loss of {metrics.parent}")
    if drawn:
        part = target.with_name(f"{target.name}.part")
        part.write_text(drawn, encoding="utf-8")
        part.replace(target)
    return bool(drawn)


def loss_svg(lines: Iterable[str], title: str) -> str:
    """Draw the losses in JSON lines of a metrics file as an SVG document; "" without losses."""
    points: dict[str, list[svg.Point]] = {name: [] for name in (*_LOOKS, "lr")}
    bad: list[int] = []
    resumed: list[int] = []
    for line in map(_parse, lines):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        resumed += [step] * ("load_s" in line)
        for name in points.keys() & line.keys():
            value = line[name]
            if isinstance(value, int | float) and isfinite(value):
                points[name].append(svg.Point(step, value, value, value))
            elif name in _LOOKS:
                bad.append(step)
    rates = points.pop("lr")
    every = [point for each in points.values() for point in each]
    steps = [*bad, *(point.step for point in every)]
    if not steps:
        return ""
    across = svg.Axis(min(steps), max(steps), _LEFT, _RIGHT)
    high = svg.highest_shown([point.high for point in every])
    ticks = svg.padded_ticks([p.high for p in every if p.high <= high] or [0.5], 7)
    up = svg.Axis(ticks[0], ticks[-1], _BOTTOM, _TOP)
    curves = []
    for name, (look, words) in _LOOKS.items():  # values above the axis are kept one by one
        below = [p for p in points[name] if p.high <= high]
        shown = svg.thin(below, (_RIGHT - _LEFT) // _COLUMN)
        shown += [p for p in points[name] if p.high > high]
        curves.append(svg.Curve(look, words, sorted(shown), bad if name == "loss" else ()))
    legend = [
        *((curve.look, curve.name) for curve in curves if curve.points),
        *[("bad", "not a number")] * bool(bad),
        *[("resumed", "resumed")] * bool(resumed),
        *[("above", "above the axis")] * any(p.high > up.high for p in every),
    ]
    columns = {round(across.at(step) / _COLUMN): step for step in reversed(resumed)}
    parts = [
        f"<style>{svg.style()}</style>",
        svg.element("rect", "paper", width=_WIDTH, height=_HEIGHT, rx=6),
        svg.heading(_LEFT, 28, title),
        svg.text(_LEFT, _TOP - 14, "loss, nats per token"),
        *svg.legend(legend, _RIGHT, _TOP - 14),
        *(svg.draw_levels(up, ticks, across) if every else []),
        *_draw_rates([rate for rate in rates if rate.step <= across.high], across),
        *svg.draw_steps(across, _RATE_BOTTOM, 9),
        svg.text((_LEFT + _RIGHT) / 2, _RATE_BOTTOM + 40, "step", 'text-anchor="middle"'),
        *(
            svg.element("line", "resumed", said, x1=x, x2=x, y1=_TOP, y2=_BOTTOM)
            for step in columns.values()
            for x, said in ((across.at(step), f"resumed after step {step:,}"),)
        ),
        *chain.from_iterable(svg.draw_curve(curve, across, up) for curve in curves),
    ]
    described = [svg.describe(_LOOKS[name][1], each) for name, each in points.items() if each]
    if bad:
        described.append(f"no number at {len(bad):,} steps, first at step {bad[0]:,}")
    if rates:
        described.append(f"learning rate at most {max(rate.high for rate in rates):.4g}")
    return svg.document((_WIDTH, _HEIGHT), title, f"{'; '.join(described).capitalize()}.", parts)


def _draw_rates(rates: Sequence[svg.Point], across: svg.Axis) -> list[str]:
    if not rates:
        return []
    ticks = svg.round_ticks(0.0, max(rate.high for rate in rates), 4)
    up = svg.Axis(ticks[0], ticks[-1], _RATE_BOTTOM, _RATE_TOP)
    ends = list(dict.fromkeys((ticks[0], ticks[-1])))
    curve = svg.Curve("rate", "learning rate", svg.thin(rates, (_RIGHT - _LEFT) // _COLUMN))
    return [
        svg.text(_LEFT, _RATE_TOP - 10, curve.name),
        *svg.draw_levels(up, ends, across, [f"{tick:g}" for tick in ends]),
        *svg.draw_curve(curve, across, up),
    ]


def _parse(line: str) -> Mapping[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
