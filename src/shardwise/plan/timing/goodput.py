"""What share of a long run is progress, when ranks fail and checkpoints take time.

Note [The expected time between two checkpoints]
Training runs for an interval t, then stands still for s while the state is copied; the checkpoint
is durable l after that, while training goes on. Failures come at random with the mean time M
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
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.plan.timing.scenario import Checkpoints, Failures, Scenario

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

    A moment of the cycle picked at random has half an interval behind it while training goes on, a
    whole one during the stall, and one more as long as the last save is not durable.
    """
    return interval_s * (interval_s / 2 + saves.cost_s) / (interval_s + saves.stall_s)
