"""How throughput grows with the number of ranks: a table, and a picture of it as SVG text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log2, log10

from shardwise import svg
from shardwise.errors import ConfigError
from shardwise.quantities import format_count

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 664, 72, 372
_LABEL_GAP = 44  # labels of points closer than this would touch
_MOST_TICKS = 7
_LEGEND = (("line", "simulated, % of ideal", ""), ("ideal", "ideal", "5 4"))


@dataclass(frozen=True)
class ScalingRow:
    """What was found for one number of ranks; ``tokens_per_step`` are those of all ranks.

    ``efficiency`` is throughput per rank, relative to the first line's of the table.
    """

    num_ranks: int
    step_s: float
    tokens_per_step: float
    exposed_s: float = 0.0
    memory_bytes: int = 0
    efficiency: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.tokens_per_step / self.step_s

    @property
    def exposed(self) -> float:
        """Share of the step in which communication is not hidden."""
        return self.exposed_s / self.step_s


def scaling_rows(points: Iterable[ScalingRow]) -> tuple[ScalingRow, ...]:
    """Return the table of a scaling curve, ordered by the number of ranks.

    **Raises** ConfigError: no points, a number of ranks twice, a time that is not above 0.
    """
    ordered = sorted(points, key=lambda point: point.num_ranks)
    if not ordered:
        raise ConfigError("points: expected at least one, got none")
    for before, point in zip([None, *ordered], ordered, strict=False):
        if before is not None and before.num_ranks == point.num_ranks:
            raise ConfigError(f"points: {point.num_ranks} ranks are there twice; give each once")
        for name in ("num_ranks", "step_s", "tokens_per_step"):
            value = getattr(point, name)
            if not (value > 0 and isfinite(value)):
                raise ConfigError(f"points: {name}={value!r}: expected a number above 0")
    best = ordered[0].tokens_per_s / ordered[0].num_ranks
    return tuple(replace(p, efficiency=p.tokens_per_s / p.num_ranks / best) for p in ordered)


def scaling_svg(rows: Sequence[ScalingRow], title: str = "Scaling") -> str:
    """Draw tokens per second over ranks, both on logarithmic axes, beside the ideal line.

    The text is a whole SVG document, which may also be put into an HTML page; colours follow the
    reader's light or dark setting. The labels at the points are the efficiencies.
    """
    first = rows[0]
    ideal = [first.tokens_per_s * row.num_ranks / first.num_ranks for row in rows]
    across = svg.Axis(log2(first.num_ranks), log2(rows[-1].num_ranks), _LEFT, _RIGHT)
    values = [*ideal, *(row.tokens_per_s for row in rows)]
    ticks = _ticks(min(values) / 2, max(values))  # room for the label of the lowest point
    up = svg.Axis(log10(ticks[0]), log10(ticks[-1]), _BOTTOM, _TOP)
    curve = [(across.at(log2(r.num_ranks)), up.at(log10(r.tokens_per_s))) for r in rows]
    straight = [(x, up.at(log10(best))) for (x, _), best in zip(curve, ideal, strict=True)]
    parts = [
        svg.heading(_LEFT, 26, title),
        *svg.legend(_LEGEND, _RIGHT, _TOP - 18),
        *_value_axis(up, ticks, across),
        *_ranks_axis(across, rows),
        svg.draw_line("ideal", straight, stroke_dasharray="5 4"),
        svg.draw_line("line", curve, stroke_width=2),
        *_dots(curve, rows),
    ]
    return svg.document((_WIDTH, _HEIGHT), title, _description(rows), parts, ids="scaling")


def _description(rows: Sequence[ScalingRow]) -> str:
    return "Tokens per second by number of ranks: " + "; ".join(
        f"{row.num_ranks} ranks {row.tokens_per_s:.3g} tokens/s, "
        f"{row.efficiency:.0%} of ideal per rank"
        for row in rows
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return the round values 1, 2, 5, 10 ... around a range; two at least."""
    powers = range(floor(log10(low)) - 1, ceil(log10(high)) + 2)
    round_values = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max(i for i, value in enumerate(round_values) if value <= low)
    last = min(i for i, value in enumerate(round_values) if value >= high)
    return round_values[first : max(last, first + 1) + 1]


def _value_axis(up: svg.Axis, ticks: Sequence[float], across: svg.Axis) -> list[str]:
    """Draw a line for each round value, or for each power of ten if there are many."""
    if len(ticks) > _MOST_TICKS:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    words = [format_count(tick) for tick in ticks]
    levels = svg.draw_levels(up, [log10(tick) for tick in ticks], across, words)
    return [svg.text(_LEFT - 60, _TOP - 18, "tokens/s"), *levels]


def _ranks_axis(across: svg.Axis, rows: Sequence[ScalingRow]) -> list[str]:
    parts = [
        svg.element("line", "grid", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM),
        svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 46, "ranks", 'text-anchor="middle"'),
    ]
    shown = -_WIDTH * 1.0
    for row in rows:
        x = across.at(log2(row.num_ranks))
        parts.append(svg.tick(x, _BOTTOM))
        if x - shown >= _LABEL_GAP:
            parts.append(svg.text(x, _BOTTOM + 21, f"{row.num_ranks:,}", 'text-anchor="middle"'))
            shown = x
    return parts


def _dots(curve: list[tuple[float, float]], rows: Sequence[ScalingRow]) -> list[str]:
    """Draw the points; efficiencies stand below right, where neither line passes."""
    parts = []
    shown = -_WIDTH * 1.0
    for (x, y), row in zip(curve, rows, strict=True):
        parts.append(svg.dot("line-fill", x, y, radius=4))
        if x - shown >= _LABEL_GAP:
            parts.append(svg.text(x + 6, y + 18, f"{row.efficiency:.0%}", 'class="strong"'))
            shown = x
    return parts
