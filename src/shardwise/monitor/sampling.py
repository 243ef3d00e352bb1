"""Which steps are looked at, how many of them make one line of figures, and their mean.

Note [Steps that are short]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
To look at a step's spans takes 0.3 ms, to tell a line 3 ms, both behind the training. So that this
stays below 0.3 % of the time, of usual steps only one in `_LOOKED_AT_S` is looked at, and stands
for the others; and a line has as many steps as take `_LINE_S`, unless the user has said how many.
Looked at is each step that is not usual: that took long, or whose timeline is kept. Time, tokens
and what the loop logs are of every step. All ranks tell their lines after the same steps: they
count alike, and the slowest rank's mean step, which every line tells all of them, decides.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping

from shardwise.monitor.metrics import STEP_S, mean_of

Figures = Mapping[str, float]
_FIRST_STEPS = 10  # each of which is a line by itself
_LOOKED_AT_S, _LINE_S = 0.25, 2.0
_LINE_STEPS = 10  # at least, and of which a line has a multiple
_LONG = 1.5  # times the mean step of the last line


class Sampler:
    """The line that is being made; ``every`` are the steps of one, None as the Note says."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._num_seen = 0
        self._length = 1  # of this line
        self._one_in = 1  # usual steps is looked at
        self._usual_s = math.inf  # how long a step took in the last line
        self._clear()

    def _clear(self) -> None:
        self._told: list[Figures] = []  # of every step
        self._usual: list[Figures] = []  # of steps that were looked at
        self._rare: list[Figures] = []
        self._passed_over: Callable[[], Figures] | None = None

    @property
    def num_steps(self) -> int:
        """Of the line, so far."""
        return len(self._told)

    @property
    def ends_line(self) -> bool:
        """Tell whether the line has all its steps."""
        return self.num_steps >= self._length

    def take(self, told: Figures, look: Callable[[], Figures], is_rare: bool) -> None:
        """Take a step, of which ``told`` is known; ``look`` looks at it, now or later or never."""
        self._num_seen += 1
        self._told.append(told)
        if is_rare or told[STEP_S] > _LONG * self._usual_s:
            self._rare.append(look())
        elif self._num_seen % self._one_in == 0:
            self._usual.append(look())
        else:
            self._passed_over = look

    def mean(self) -> dict[str, float]:
        """Return the means over all steps of the line: usual ones stand for those passed over."""
        if self._passed_over is not None and not self._usual:
            self._usual.append(self._passed_over())
        sums: dict[str, float] = defaultdict(float)
        weights: dict[str, float] = defaultdict(float)
        usual = (len(self._told) - len(self._rare)) / max(len(self._usual), 1)
        for weight, steps in ((usual, self._usual), (1.0, self._rare)):
            for name, value in (each for step in steps for each in step.items()):
                sums[name] += weight * value
                weights[name] += weight
        looked_at = {name: sums[name] / weights[name] for name in sums}
        return {**looked_at, **mean_of(self._told)}

    def begin_line(self, slowest_s: float) -> None:
        """Begin the next line; ``slowest_s`` is the mean step of the slowest rank in this one."""
        self._usual_s = statistics.fmean(told[STEP_S] for told in self._told)
        self._clear()
        if self._num_seen < _FIRST_STEPS:
            return
        at_least = self._every or max(_LINE_STEPS, math.ceil(_LINE_S / slowest_s))
        unit = self._every or _LINE_STEPS
        self._length = math.ceil(at_least / unit) * unit - self._num_seen % unit
        self._one_in = max(min(int(_LOOKED_AT_S / slowest_s), at_least), 1)
