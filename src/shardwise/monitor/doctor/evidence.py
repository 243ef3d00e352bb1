"""Evidence of a run that rules judge: steady lines, typical figures of them, the noise.

Note [What is judged]
~~~~~~~~~~~~~~~~~~~~~
The first steps allocate, learn the order of units and compile; they are left out. Of the newest
lines after them each figure's median counts, so one slow step (a save, a detailed look) changes
nothing. A rank is named only if it is the same one in nearly all lines. A duration below a slice of
a core's time is noise: on a CPU ranks share cores with each other and with other processes.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from shardwise.monitor import metrics as m
from shardwise.monitor.lateness import noise_of
from shardwise.monitor.metrics import OverRanks
from shardwise.monitor.record import Memory, Moment, RunRecord, StepLine, over_steps

WARM_UP_LINES, _MIN_LINES, _MAX_LINES = 3, 5, 20
_SAME_RANK_SHARE = 0.8
Which = Literal["min", "median", "max"]
Lines = Sequence[StepLine]


class NotEnough(Exception):
    """Raised by a rule that cannot judge; the text names the missing evidence."""


def figure(line: StepLine, name: str) -> OverRanks:
    """Return a figure of a line. **Raises** NotEnough for a line without it."""
    if name not in line.metrics:
        raise NotEnough(f"the figure {name}")
    return line.metrics[name]


def total(lines: Lines, name: str, which: Which = "max") -> float:
    """Return a figure of a step, summed over all steps that some lines are about."""
    return float(sum(getattr(figure(line, name), which) * line.num_steps for line in lines))


def count_steps(lines: Lines) -> int:
    """Return how many steps some lines are about."""
    return sum(line.num_steps for line in lines)


class Evidence:
    """A run as rules read it. Figures are of the steady lines, unless a rule names others.

    **Raises** NotEnough, in every method, if the run lacks what is asked for.
    """

    def __init__(self, run: RunRecord) -> None:
        self.run, self.facts = run, run.facts
        self.num_shards = run.facts.degrees.get("shard", 1)
        self.is_cpu = run.facts.device == "cpu"
        self.noise_s = noise_of(run.facts.device)  # below it nothing is judged

    @cached_property
    def lines(self) -> Lines:
        """The steady lines; see Note [What is judged]."""
        lines = self.run.steps[WARM_UP_LINES:][-_MAX_LINES:]
        if len(lines) < _MIN_LINES:
            have, need = len(self.run.steps), WARM_UP_LINES + _MIN_LINES
            raise NotEnough(f"lines of steps: {have}, and {need} are needed")
        return lines

    @property
    def warm_lines(self) -> Lines:
        """All lines after the first steps, if some are steady."""
        return self.run.steps[WARM_UP_LINES:] if self.lines else ()

    def lines_with(self, name: str) -> Lines:
        """Return the steady lines that have a figure, at least one."""
        if not (lines := [line for line in self.lines if name in line.metrics]):
            raise NotEnough(f"the figure {name}")
        return lines

    def typical(
        self,
        name: str,
        which: Which = "median",
        default: float | None = None,
        lines: Lines | None = None,
    ) -> float:
        """Return the median over lines of a figure, or ``default`` if no line has it."""
        found = over_steps(self.lines if lines is None else lines, name)
        if found is not None:
            return float(getattr(found, which))
        if default is None:
            raise NotEnough(f"the figure {name}")
        return default

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return self.typical(m.STEP_S)

    @property
    def core_wait_s(self) -> float:
        """The time for which the rank that waits most for a core does; 0 if unknown."""
        return self.typical(m.CORE_WAIT_S, "max", 0.0)

    @property
    def memory_percent(self) -> float:
        """The memory in use at the peak, per cent of the device; ranks of a host share its own."""
        sharing = max(Counter(self.facts.hosts).values(), default=1) if self.is_cpu else 1
        return sharing * self.typical(m.MAX_ACTIVE_SHARE, "max")

    def late_seconds(self, *causes: str) -> tuple[dict[int, float], dict[int, int]]:
        """Return the seconds for which others waited for each rank, and in how many steps.

        With ``causes`` only seconds of these parts; of the lines after the first steps.
        """
        seconds: dict[int, float] = defaultdict(float)
        counts = Counter[int]()
        for line in self.warm_lines:
            for rank, late in line.late.items():
                taken = {c: s for c, s in late.seconds.items() if not causes or c in causes}
                seconds[rank] += sum(taken.values())
                counts[rank] += late.num_steps if taken else 0
        return dict(seconds), dict(counts)

    def check_cores(self, seconds: float, times: float = 1.0, lines: Lines | None = None) -> None:
        """Check that ranks on a CPU do not wait for cores as long as ``seconds / times``."""
        if self.is_cpu and seconds < times * self.typical(m.CORE_WAIT_S, "max", 0.0, lines):
            raise NotEnough("a core for each rank: they wait for cores as long")

    def same_rank(
        self, name: str, which: Literal["min", "max"], lines: Lines | None = None
    ) -> int | None:
        """Return the rank that has the extreme in nearly all lines; None without such a rank."""
        lines = self.lines if lines is None else lines
        ranks = Counter(getattr(figure(line, name), f"{which}_rank") for line in lines)
        rank, count = ranks.most_common(1)[0]
        return int(rank) if count >= _SAME_RANK_SHARE * len(lines) else None

    @property
    def peak(self) -> Moment:
        """The moment of the newest sampled step that has the most memory."""
        lines = [line for _, line in self.run.lines(Memory)]
        if not lines:
            raise NotEnough("the memory of a step (sampled at the 3rd, then every detail_every)")
        newest = max(reversed(lines), key=lambda line: line.step)
        return newest.moments[newest.peak]
