"""What rules judge by: the steady lines of a run, typical figures of them, what counts as noise.

Note [What is judged]
~~~~~~~~~~~~~~~~~~~~~
The first steps allocate, learn the order of units and compile; they are left out. Of the newest
lines after them each figure's median counts, so one slow step (a save, a detailed look) changes
nothing. A rank is named only if it is the same one in nearly all lines. What is shorter than a
slice of a core's time is noise: on a CPU ranks share cores with each other and with others' work.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shardwise.monitor.findings import Change, Finding, Gain
from shardwise.monitor.lessons import LESSONS
from shardwise.monitor.metrics import CORE_WAIT_S, STEP_S
from shardwise.monitor.record import RunFacts, RunRecord, StepLine, over_steps

_WARM_UP_LINES = 3
_MIN_LINES = 5
_MAX_LINES = 20
_SAME_RANK_SHARE = 0.8
_NOISE_S, _CPU_NOISE_S = 0.002, 0.02
Which = Literal["min", "median", "max"]


class NotEnough(Exception):
    """A rule cannot judge; the text says what is missing."""


def steady(run: RunRecord) -> Sequence[StepLine]:
    """Return the lines that are judged. **Raises** NotEnough."""
    lines = run.steps[_WARM_UP_LINES:][-_MAX_LINES:]
    if len(lines) < _MIN_LINES:
        have, need = len(run.steps), _WARM_UP_LINES + _MIN_LINES
        raise NotEnough(f"lines of steps: {have}, and {need} are needed")
    return lines


def typical(lines: Sequence[StepLine], name: str, which: Which = "median") -> float:
    """Return the median over lines of a figure. **Raises** NotEnough where no line has it."""
    found = over_steps(lines, name)
    if found is None:
        raise NotEnough(f"the figure {name}")
    return float(getattr(found, which))


def typical_or(lines: Sequence[StepLine], name: str, which: Which, otherwise: float) -> float:
    """Return `typical`, or something else where no line has it."""
    try:
        return typical(lines, name, which)
    except NotEnough:
        return otherwise


def step_s(lines: Sequence[StepLine]) -> float:
    """Return the seconds of a step."""
    return typical(lines, STEP_S)


def same_rank(lines: Sequence[StepLine], name: str, which: Literal["min", "max"]) -> int | None:
    """Return the rank that has the extreme in nearly all lines; None if there is no such one."""
    ranks = Counter(getattr(line.metrics[name], f"{which}_rank") for line in lines)
    rank, count = ranks.most_common(1)[0]
    return int(rank) if count >= _SAME_RANK_SHARE * len(lines) else None


def is_cpu(facts: RunFacts) -> bool:
    """Tell whether the model runs on the host."""
    return facts.device == "cpu"


def noise_s(facts: RunFacts) -> float:
    """Return the seconds below which nothing is judged."""
    return _CPU_NOISE_S if is_cpu(facts) else _NOISE_S


def core_wait_s(run: RunRecord, lines: Sequence[StepLine]) -> float:
    """Return how long the rank that waits most for a core does; 0 where that is not known."""
    return typical_or(lines, CORE_WAIT_S, "max", 0.0)


def ranks_per_host(facts: RunFacts) -> int:
    """Return the most ranks that share a host."""
    return max(Counter(facts.hosts).values(), default=1)


def num_shards(facts: RunFacts) -> int:
    """Return the size of the shard axis."""
    return facts.degrees.get("shard", 1)


def peak_of(run: RunRecord) -> Mapping[str, Any]:
    """Return the moment of the newest sampled step that has the most memory.

    **Raises** NotEnough where no step was sampled.
    """
    newest: Mapping[str, Any] | None = None
    for _, line in run.lines("memory"):
        if newest is None or line["step"] >= newest["step"]:
            newest = line
    if newest is None:
        raise NotEnough("the memory of a step (sampled at the 3rd, then every detail_every)")
    moment: Mapping[str, Any] = newest["moments"][newest["peak"]]
    return moment


def finding(
    run: RunRecord,
    code: str,
    verdict: str,
    evidence: Mapping[str, float],
    why: str,
    changes: Sequence[Change] = (),
    gain: Gain | None = None,
    unit: str | None = None,
    rank: int | None = None,
) -> Finding:
    """Return a finding with what its lesson says."""
    lesson = LESSONS[code]
    rounded = {name: _rounded(value) for name, value in evidence.items()}
    step = run.steps[-1].step if run.steps else None
    told = (tuple(changes), gain, unit, rank, step)
    return Finding(code, lesson.severity, lesson.title, verdict, rounded, why, *told)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")
