"""The share of time that failures and checkpoints leave.

Note [The expected time between two checkpoints]
Training runs for an interval t, then stops for s while a checkpoint is saved. Failures come at
random with the mean time M between them for the whole job; each costs d to detect, restart and
load. From one checkpoint to the next a failure-free job takes t + s. After a failure it must live
through d + t + s without another, which takes M (exp((d + t + s) / M) - 1) on average. Together
the expectation is ``M exp(d / M) (exp((t + s) / M) - 1)``. The interval that makes it smallest per
unit of progress solves ``(1 - t / M) exp(t / M) = exp(-s / M)``, whatever d is; its first order is
Young's ``sqrt(2 s M)``.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9),
1974. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
Future Generation Computer Systems 22(3), 2006.
"""

import math
from dataclasses import dataclass

from shardwise.errors import ConfigError

_LARGEST_EXPONENT = 700.0  # exp() of more is no float


@dataclass(frozen=True)
class Goodput:
    """Share of the time that is progress which is kept; the other shares add up to 1 with it.

    ``num_lost_steps_per_failure`` were computed and must be computed again. ``young_interval_s`` is
    the first-order interval, ``best_interval_s`` the exact one, not shorter than a step;
    ``kept_at_best_interval_fraction`` is the goodput with it. The names are the keys in JSON.
    """

    kept_fraction: float
    checkpoint_fraction: float
    failure_fraction: float
    mtbf_s: float
    num_lost_steps_per_failure: float
    num_steps_per_checkpoint: int
    young_interval_s: float
    best_interval_s: float
    kept_at_best_interval_fraction: float


def expected_goodput(
    step_s: float, *, mtbf_s: float, back_s: float, interval_s: float, stall_s: float
) -> Goodput:
    """Return the expectation over a long run, see Note [The expected time between two ...].

    ``mtbf_s`` is the job's; ``back_s`` pass from a failure until it trains again. Training runs
    ``interval_s`` between two saves, rounded to whole steps, and stops for ``stall_s``.

    **Raises** ConfigError for times that are not above 0; a stall and the way back may be 0.
    """
    given = {"step_s": step_s, "mtbf_s": mtbf_s, "interval_s": interval_s}
    for name, value in (given | {"back_s": back_s, "stall_s": stall_s}).items():
        if not (math.isfinite(value) and value >= 0 and (value > 0 or name not in given)):
            raise ConfigError(f"{name}={value!r}: expected seconds above 0")
    steps = max(1, round(interval_s / step_s))
    interval_s = steps * step_s
    fraction = _fraction(interval_s, stall_s, back_s, mtbf_s)
    checkpoints = fraction * stall_s / interval_s
    best_s = max(best_interval_s(stall_s, mtbf_s), step_s)
    # A failure at a random moment of the cycle has half an interval behind it while training runs,
    # and a whole one during the stall.
    lost_s = interval_s * (interval_s / 2 + stall_s) / (interval_s + stall_s)
    return Goodput(
        kept_fraction=fraction,
        checkpoint_fraction=checkpoints,
        failure_fraction=1 - fraction - checkpoints,
        mtbf_s=mtbf_s,
        num_lost_steps_per_failure=lost_s / step_s,
        num_steps_per_checkpoint=steps,
        young_interval_s=young_interval_s(stall_s, mtbf_s),
        best_interval_s=best_s,
        kept_at_best_interval_fraction=_fraction(best_s, stall_s, back_s, mtbf_s),
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


def _fraction(interval_s: float, stall_s: float, back_s: float, mtbf_s: float) -> float:
    cycle_s = interval_s + stall_s
    if (back_s + cycle_s) / mtbf_s > _LARGEST_EXPONENT:
        return 0.0
    expected_s = mtbf_s * math.exp(back_s / mtbf_s) * math.expm1(cycle_s / mtbf_s)
    return min(1.0, interval_s / expected_s)
