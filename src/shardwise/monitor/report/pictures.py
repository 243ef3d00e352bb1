"""Curves of runs and the parts of a settled step, as SVG; classes are styled by the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise import svg
from shardwise.monitor.report.colours import colour_of_phase, is_light
from shardwise.monitor.report.curves import Column
from shardwise.quantities import format_count

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 380, 196, 52, 370, 34, 168
_WIDE, _BAR, _GAP = 760, 22, 12
_LARGE = 1e5  # too long to be written out beside the axis


@dataclass(frozen=True)
class Curve:
    """One run's values in a picture; ``number`` is the run's, ``gaps`` steps without a number."""

    number: int
    name: str
    columns: Sequence[Column]
    gaps: Sequence[int] = ()


def curves_svg(title: str, curves: Sequence[Curve], from_zero: bool = False) -> str:
    """Draw values over the steps, a line for each run; minimum to maximum is a band."""
    columns = [column for curve in curves for column in curve.columns]
    if not columns:
        return ""
    steps = [column.step for column in columns]
    across = svg.Axis(min(steps), max(steps), _LEFT, _RIGHT)
    high = svg.highest_shown([column.high for column in columns])
    least = [0.0] if from_zero else []
    ticks = svg.padded_ticks([*least, *(min(c.low, high) for c in columns), high], 6)
    up = svg.Axis(ticks[0], ticks[-1], _BOTTOM, _TOP)
    parts = [svg.text(8, 18, title, 'class="strong" font-size="13" font-weight="600"')]
    is_large = max(abs(tick) for tick in ticks) >= _LARGE
    labels = [format_count(tick) for tick in ticks] if is_large else svg.labels(ticks)
    for tick, label in zip(ticks, labels, strict=True):
        parts += svg.level(up.at(tick), _LEFT, _RIGHT, label)
    parts += _steps_axis(across)
    for curve in curves:
        parts += _drawn(curve, across, up)
    return svg.document((_WIDTH, _HEIGHT), title, _described(title, curves), parts, has_style=False)


def _steps_axis(across: svg.Axis) -> list[str]:
    ticks = svg.round_ticks(across.low, across.high, 5)
    shown = [t for t in ticks if across.low <= t <= across.high and t == int(t)]
    parts = []
    for tick in shown if len(shown) > 1 else dict.fromkeys((across.low, across.high)):
        x = across.at(tick)
        anchor = "end" if x > _RIGHT - 16 else "middle"
        parts += [svg.tick(x, _BOTTOM)]
        parts += [svg.text(x, _BOTTOM + 20, f"{tick:,.0f}", f'text-anchor="{anchor}"')]
    return parts


def _drawn(curve: Curve, across: svg.Axis, up: svg.Axis) -> list[str]:
    name, parts = f"run-{curve.number}", []
    shown = [c for c in curve.columns if c.middle <= up.high]
    if any(c.high > c.low for c in shown):
        edges = [(across.at(c.step), up.at(min(c.high, up.high))) for c in shown]
        edges += [(across.at(c.step), up.at(c.low)) for c in reversed(shown)]
        band = svg.element("polygon", f"{name}-fill", fill_opacity=0.22, points=svg.places(edges))
        parts.append(band)
    line = [(across.at(c.step), up.at(c.middle)) for c in shown]
    if len(line) == 1:
        parts.append(svg.dot(f"{name}-fill", *line[0]))
    else:
        parts.append(svg.line(name, line, stroke_width=1.6, stroke_linejoin="round"))
    beyond = {round(across.at(c.step) / 8): c for c in curve.columns if c.high > up.high}
    for column in beyond.values():
        said = f"step {column.step:,.0f}: up to {column.high:.4g}, above what is shown"
        parts.append(svg.above(f"{name}-fill", across.at(column.step) - 4, _TOP + 2, said))
    places = {round(across.at(step)): step for step in curve.gaps}
    for x, step in places.items():
        said = f"{curve.name}: not a number at step {step:,}"
        ends = {"x1": x, "x2": x, "y1": _BOTTOM - 12, "y2": _BOTTOM}
        parts.append(svg.element("line", "bad", said, stroke_width=1.5, **ends))
    return parts


def _described(title: str, curves: Sequence[Curve]) -> str:
    told = []
    for curve in curves:
        if curve.columns:
            first, last = curve.columns[0], curve.columns[-1]
            words = f"{curve.name}: from {first.middle:.4g} at step {first.step:,.0f}"
            told.append(f"{words} to {last.middle:.4g} at step {last.step:,.0f}")
    return f"{title}. {'; '.join(told)}."


def time_svg(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw the seconds of a step by phase, a bar for each run, all to one scale."""
    most = max((sum(phases.values()) for _, phases in rows), default=0.0)
    if not most:
        return ""
    scale = (_WIDE - 16) / most
    parts: list[str] = []
    top = 40.0
    for name, phases in rows:
        whole = sum(phases.values())
        parts.append(svg.text(8, top + 2, f"{name}: {whole:.3g} s a step", 'class="strong"'))
        x = 8.0
        for phase, seconds in phases.items():
            width = seconds * scale
            said = f"{phase}: {seconds:.3g} s, {100 * seconds / whole:.1f} % of a step"
            parts.append(svg.bar(x, top + 9, width, colour_of_phase(phase), said, _BAR))
            share = f"{100 * seconds / whole:.0f} %"
            if width > 8 * len(share):
                at = (x + width / 2, top + 9 + _BAR / 2 + 4)
                look = "on-light" if is_light(colour_of_phase(phase)) else "on-dark"
                parts.append(svg.text(*at, share, f'text-anchor="middle" class="{look}"'))
            x += width
        top += _BAR + _GAP + 22
    names = list(dict.fromkeys(phase for _, phases in rows for phase in phases))
    items = [(name, colour_of_phase(name)) for name in names]
    legend, bottom = svg.squares(items, (8, _WIDE - 8), top + 4)
    title = "Where a step's time goes"
    told = "; ".join(f"{n}: {', '.join(f'{p} {s:.3g} s' for p, s in ph.items())}" for n, ph in rows)
    head = svg.text(8, 18, f"{title}, median over the ranks", 'class="strong" font-weight="600"')
    size = (_WIDE, bottom)
    return svg.document(size, title, f"{told}.", [head, *parts, *legend], has_style=False)
