"""Scaling curves, and the share of time that failures and checkpoints leave.

Note [The expected time between two checkpoints]
Training runs for an interval t, then stands still for s while the state is copied; the checkpoint
is durable l after that, while training continues. Failures come at random with the mean time M
between them for the whole job; each costs d to detect, restart and load. From one durable moment to
the next a failure-free job takes t + s. After a failure it must live through d + t + s + l without
another, which takes M (exp((d + t + s + l) / M) - 1) on average. Together the expectation is
``M exp((d + l) / M) (exp((t + s) / M) - 1)``; without l it is Daly's. The interval that makes it
smallest per unit of progress solves ``(1 - t / M) exp(t / M) = exp(-s / M)``, whatever d and l are;
its first order is Young's ``sqrt(2 s M)``.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9),
1974. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
Future Generation Computer Systems 22(3), 2006.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log2, log10

from shardwise import svg
from shardwise.errors import ConfigError
from shardwise.plan.timing.scenario import Checkpoints, Failures, Scenario
from shardwise.quantities import format_count

_LARGEST_EXPONENT = 700.0  # exp() of more is no float


@dataclass(frozen=True)
class Goodput:
    """Share of the time that is progress which is kept; the other shares add up to 1 with it.

    ``lost_steps_per_failure`` were computed and must be computed again. ``young_interval_s`` is
    the first-order interval, ``best_interval_s`` the exact one, not shorter than a step and than
    a save takes; ``fraction_at_best`` is the goodput with it.
    """

    fraction: float
    checkpoint_fraction: float
    failure_fraction: float
    mtbf_s: float
    lost_steps_per_failure: float
    steps_per_checkpoint: int
    young_interval_s: float
    best_interval_s: float
    fraction_at_best: float


def expected_goodput(step_s: float, scenario: Scenario) -> Goodput:
    """Return the expectation over a long run, see Note [The expected time between two ...].

    The interval is rounded to whole steps, one at least.

    **Raises** ConfigError: the scenario has no failures or no checkpoints, or no step time.
    """
    failures, saves, mtbf_s = _facts(step_s, scenario)
    # Whole steps, and never so few that two saves overlap.
    shortest = math.ceil((saves.cost_s - saves.stall_s) / step_s)
    steps = max(1, shortest, round(saves.interval_s / step_s))
    interval_s = steps * step_s
    fraction = _fraction(interval_s, failures, saves, mtbf_s)
    checkpoints = fraction * saves.stall_s / interval_s
    best_s = max(best_interval_s(saves.stall_s, mtbf_s), saves.cost_s - saves.stall_s, step_s)
    return Goodput(
        fraction=fraction,
        checkpoint_fraction=checkpoints,
        failure_fraction=1 - fraction - checkpoints,
        mtbf_s=mtbf_s,
        lost_steps_per_failure=_lost_s(interval_s, saves) / step_s,
        steps_per_checkpoint=steps,
        young_interval_s=young_interval_s(saves.stall_s, mtbf_s),
        best_interval_s=best_s,
        fraction_at_best=_fraction(best_s, failures, saves, mtbf_s),
    )


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval between checkpoints that is best to first order.

    **Source** Young 1974: the square root of 2 x cost x MTBF.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Return the interval that makes the expected time smallest, by bisection.

    **Source** Note [The expected time between two checkpoints].
    """
    target = math.exp(-stall_s / mtbf_s)
    low, high = 0.0, 1.0  # in units of the MTBF; the left side falls from 1 to 0
    for _ in range(100):
        middle = (low + high) / 2
        if (1 - middle) * math.exp(middle) > target:
            low = middle
        else:
            high = middle
    return low * mtbf_s


def _facts(step_s: float, scenario: Scenario) -> tuple[Failures, Checkpoints, float]:
    """Return what the formulas need: how ranks fail, how the job saves, the job's MTBF."""
    if not (step_s > 0 and math.isfinite(step_s)):
        raise ConfigError(f"step_s={step_s!r}: expected seconds above 0")
    if scenario.failures is None:
        raise ConfigError("failures: expected Failures(mtbf_hours=...), got None")
    if scenario.checkpoints is None:
        raise ConfigError("checkpoints: expected Checkpoints(interval_s=...), got None")
    mtbf_s = scenario.failures.mtbf_hours * 3600 / scenario.num_ranks
    return scenario.failures, scenario.checkpoints, mtbf_s


def _fraction(interval_s: float, failures: Failures, saves: Checkpoints, mtbf_s: float) -> float:
    back_s = failures.detect_s + failures.restart_s + saves.load_s
    after_s = back_s + saves.cost_s - saves.stall_s
    cycle_s = interval_s + saves.stall_s
    if (after_s + cycle_s) / mtbf_s > _LARGEST_EXPONENT:
        return 0.0
    expected_s = mtbf_s * math.exp(after_s / mtbf_s) * math.expm1(cycle_s / mtbf_s)
    return min(1.0, interval_s / expected_s)


def _lost_s(interval_s: float, saves: Checkpoints) -> float:
    """Return the training since the last durable checkpoint at a failure, to first order.

    A moment of the cycle picked at random has half an interval behind it while training runs, a
    whole one during the stall, and one more as long as the last save is not durable.
    """
    return interval_s * (interval_s / 2 + saves.cost_s) / (interval_s + saves.stall_s)


_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 664, 72, 372
_LABEL_GAP = 44  # labels of points closer than this would touch
_MOST_TICKS = 7
_LEGEND = (("line", "simulated, % of ideal", ""), ("ideal", "ideal", "5 4"))


@dataclass(frozen=True)
class ScalingRow:
    """The result for one number of ranks; ``tokens_per_step`` are those of all ranks.

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
    if len(ticks) > _MOST_TICKS:  # powers of ten only
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    words = [format_count(tick) for tick in ticks]
    curve = [(across.at(log2(r.num_ranks)), up.at(log10(r.tokens_per_s))) for r in rows]
    straight = [(x, up.at(log10(best))) for (x, _), best in zip(curve, ideal, strict=True)]
    parts = [
        svg.heading(_LEFT, 26, title),
        *svg.legend(_LEGEND, _RIGHT, _TOP - 18),
        svg.text(_LEFT - 60, _TOP - 18, "tokens/s"),
        *svg.draw_levels(up, [log10(tick) for tick in ticks], across, words),
        svg.element("line", "grid", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM),
        svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 46, "ranks", 'text-anchor="middle"'),
        svg.draw_line("ideal", straight, stroke_dasharray="5 4"),
        svg.draw_line("line", curve, stroke_width=2),
    ]
    labelled = -1.0 * _LABEL_GAP
    for (x, y), row in zip(curve, rows, strict=True):
        parts.append(svg.element("line", "grid", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 5))
        parts.append(svg.element("circle", "line-fill", cx=x, cy=y, r=4))
        if x - labelled >= _LABEL_GAP:  # efficiencies stand where neither line passes
            count = f"{row.num_ranks:,}"
            parts.append(svg.text(x, _BOTTOM + 21, count, 'text-anchor="middle"'))
            parts.append(svg.text(x + 6, y + 18, f"{row.efficiency:.0%}", 'class="strong"'))
            labelled = x
    description = "Tokens per second by number of ranks: " + "; ".join(
        f"{row.num_ranks} ranks {row.tokens_per_s:.3g} tokens/s, "
        f"{row.efficiency:.0%} of ideal per rank"
        for row in rows
    )
    return svg.document((_WIDTH, _HEIGHT), title, description, parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return the round values 1, 2, 5, 10 ... around a range; two at least."""
    powers = range(floor(log10(low)) - 1, ceil(log10(high)) + 2)
    round_values = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max(i for i, value in enumerate(round_values) if value <= low)
    last = min(i for i, value in enumerate(round_values) if value >= high)
    return round_values[first : max(last, first + 1) + 1]
