"""Evidence that rules share: the steady lines of a run, typical figures of them, the noise.

Note [What is judged]
~~~~~~~~~~~~~~~~~~~~~
The first steps allocate, learn the order of units and compile; they are left out. Of the newest
lines after them each figure's median counts, so one slow step (a save, a detailed look) changes
nothing. A rank is named only if it is the same one in nearly all lines. A duration below a slice of
a core's time is noise: on a CPU ranks share cores with each other and with other processes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shardwise.monitor.metrics import CORE_WAIT_S, STEP_S
from shardwise.monitor.record import RunFacts, RunRecord, StepLine, over_steps

WARM_UP_LINES = 3
_MIN_LINES = 5
_MAX_LINES = 20
_SAME_RANK_SHARE = 0.8
_NOISE_S, _CPU_NOISE_S = 0.002, 0.02
Which = Literal["min", "median", "max"]


class NotEnough(Exception):
    """Raised by a rule that cannot judge; the text says what is missing."""


def steady(run: RunRecord) -> Sequence[StepLine]:
    """Return the lines that are judged. **Raises** NotEnough."""
    lines = run.steps[WARM_UP_LINES:][-_MAX_LINES:]
    if len(lines) < _MIN_LINES:
        have, need = len(run.steps), WARM_UP_LINES + _MIN_LINES
        raise NotEnough(f"lines of steps: {have}, and {need} are needed")
    return lines


def steady_with(run: RunRecord, name: str) -> Sequence[StepLine]:
    """Return the steady lines that have a figure. **Raises** NotEnough if there is none."""
    lines = [line for line in steady(run) if name in line.metrics]
    if not lines:
        raise NotEnough(f"the figure {name}")
    return lines


def typical(
    lines: Sequence[StepLine], name: str, which: Which = "median", default: float | None = None
) -> float:
    """Return the median over lines of a figure, or ``default`` if no line has it.

    **Raises** NotEnough without a default.
    """
    found = over_steps(lines, name)
    if found is not None:
        return float(getattr(found, which))
    if default is None:
        raise NotEnough(f"the figure {name}")
    return default


def step_s(lines: Sequence[StepLine]) -> float:
    """Return the seconds of a step."""
    return typical(lines, STEP_S)


def same_rank(lines: Sequence[StepLine], name: str, which: Literal["min", "max"]) -> int | None:
    """Return the rank that has the extreme in nearly all lines; None if there is no such one."""
    ranks = Counter(getattr(line.metrics[name], f"{which}_rank") for line in lines)
    rank, count = ranks.most_common(1)[0]
    return int(rank) if count >= _SAME_RANK_SHARE * len(lines) else None


def several_ranks(facts: RunFacts) -> bool:
    """Tell whether a run has more than one rank."""
    return facts.num_ranks > 1


def is_cpu(facts: RunFacts) -> bool:
    """Tell whether the model runs on the host."""
    return facts.device == "cpu"


def noise_s(facts: RunFacts) -> float:
    """Return the seconds below which nothing is judged."""
    return _CPU_NOISE_S if is_cpu(facts) else _NOISE_S


def num_shards(facts: RunFacts) -> int:
    """Return the size of the shard axis."""
    return facts.degrees.get("shard", 1)


def core_wait_s(lines: Sequence[StepLine]) -> float:
    """Return the time for which the rank that waits most for a core does; 0 if not known."""
    return typical(lines, CORE_WAIT_S, "max", 0.0)


def check_cores(
    run: RunRecord, lines: Sequence[StepLine], seconds: float, times: float = 1.0
) -> None:
    """Check that ranks on a CPU do not wait for cores as long as ``seconds``, divided by ``times``.

    **Raises** NotEnough.
    """
    if is_cpu(run.facts) and seconds < times * core_wait_s(lines):
        raise NotEnough("a core for each rank: they wait for cores as long")


def peak_of(run: RunRecord) -> Mapping[str, Any]:
    """Return the moment of the newest sampled step that has the most memory.

    **Raises** NotEnough if no step was sampled.
    """
    newest: Mapping[str, Any] | None = None
    for _, line in run.lines("memory"):
        if newest is None or line["step"] >= newest["step"]:
            newest = line
    if newest is None:
        raise NotEnough("the memory of a step (sampled at the 3rd, then every detail_every)")
    moment: Mapping[str, Any] = newest["moments"][newest["peak"]]
    return moment
