"""Lines of figures made of recorded steps, behind the training.

Note [Steps that are short]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A look at a step's spans takes 0.3 ms, a line 3 ms, both behind the training. To stay below 0.3 % of
the time, of usual steps only one in `_LOOKED_AT_S` is looked at and stands for the others, and a
line has as many steps as take `_LINE_S`, unless the user has given a number. Each unusual step is
looked at: one that took long, or whose timeline is kept. Time, tokens and logged values are of
every step. All ranks end their lines after the same steps, since the slowest rank's mean step
decides, which every line tells all of them.
"""

import json
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest

import torch

from shardwise.comm.collective_key import ranks_of
from shardwise.comm.control import Control, exchange_any
from shardwise.device import memory_figures
from shardwise.host import core_wait_s
from shardwise.monitor import metrics as m
from shardwise.monitor.outputs import Outputs
from shardwise.monitor.rank_lines import NonFinite, OtherSave, RankLine, SpanRow, Timeline
from shardwise.monitor.record import RunFacts, StepLine
from shardwise.monitor.spans import Recorded, Span, device_spans_of, spans_of, without_lines_of
from shardwise.names import MAIN

FIRST_STEPS = 10  # each of which is a line
_MAX_NAMED = 8  # parameters, of those with bad gradients
_MAX_WAITED_FOR = 4  # ranks for which a rank has waited, that it sends
_MAX_TOKENS = 256  # steps of a line whose numbers of tokens are sent to the other ranks
_LOOKED_AT_S, _LINE_S = 0.25, 2.0
_LINE_STEPS = 10  # at least, and of which a line has a multiple
_LONG = 1.5  # times the mean step of the last line
Figures = Mapping[str, float]


@dataclass(frozen=True)
class ObservedStep:
    """One step, as the training hands it over."""

    step: int
    recorded: Recorded
    values: dict[str, float]  # logged by the loop until the step is handed over
    figures: Figures
    own_lines: Sequence[RankLine] = ()
    bad_gradients: Sequence[str] = ()
    keeps_timeline: bool = False


@dataclass
class _LineUnderWay:
    """This rank's part of a line, beside the figures of its spans.

    ``told`` are the figures that every step has and ``values`` those logged, each with its step.
    ``waited_for`` has seconds by global rank, ``bad_since`` is as in `StepLine`.
    """

    told: list[tuple[int, Figures]] = field(default_factory=list)
    values: list[tuple[int, Figures]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    waited_for: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    bad_since: dict[str, int] = field(default_factory=dict)


class LineMaker:
    """Makes lines of steps, on the observing thread; ``latest`` is the newest over all ranks.

    ``saves`` are the seconds of the training thread in saves by torch's calls since the last step.
    If ``is_abandoned``, no line is exchanged with the other ranks any more. Made on the training
    thread.
    """

    def __init__(
        self,
        control: Control,
        facts: RunFacts,
        outputs: Outputs,
        every: int | None,
        device: torch.device,
    ) -> None:
        self.latest: StepLine | None = None
        self.last_step = 0
        self.saves: defaultdict[str, float] = defaultdict(float)
        self.is_abandoned = False
        self._control, self._facts, self._outputs = control, facts, outputs
        self._gauges = _Gauges(facts, device)
        self._sampler, self._line = Sampler(every), _LineUnderWay()
        self._values: dict[str, float] = {}  # logged last
        self._finite_step = 0  # the last one in which gradients were looked at and finite
        self._left_open: dict[str, list[tuple[str, str]]] = {}
        self._began_s = time.monotonic()

    def take(self, step: ObservedStep) -> None:
        """Take a step; write a line if it is the last one of it."""
        self.last_step = step.step
        self._note(step)
        if self._sampler.ends_line:
            self._write_line(step.step)

    def end(self) -> None:
        """Write the line under way."""
        if self._sampler.num_steps:
            self._write_line(self.last_step)

    def _note(self, step: ObservedStep) -> None:
        line = self._line
        number, recorded, values = step.step, step.recorded, step.values
        for call, seconds in self.saves.items():
            self._outputs.write_own(OtherSave(number, call, seconds))
        self.saves.clear()
        told = {m.STEP_S: recorded.seconds}
        if recorded.num_tokens:
            told[m.TOKENS_PER_S] = recorded.num_tokens / recorded.seconds
            if self._facts.peak_flops:
                flops = told[m.TOKENS_PER_S] * self._facts.flops_per_token
                told[m.MFU_SHARE] = 100 * flops / self._facts.peak_flops
        line.told.append((number, told))
        line.values.append((number, values))
        line.tokens.append(recorded.num_tokens)
        bad = sum(not math.isfinite(value) for value in values.values())
        is_rare = step.keeps_timeline or recorded.first is not None or recorded.has_other_lines
        known = {**told, **step.figures, m.BAD_VALUES: bad}
        self._sampler.take(known, lambda: self._look_at(step), is_rare or bool(self._left_open))
        for (group, peer), seconds in recorded.waited_for.items():
            with suppress(KeyError, ValueError):  # a group that is gone
                line.waited_for[ranks_of(group)[peer]] += seconds
        self._values.update(values)
        num_bad, looked_at = step.figures.get(m.BAD_GRADIENTS), dict(values)
        if num_bad is not None:
            looked_at[m.BAD_GRADIENTS] = math.inf if num_bad else 0
        for name, value in looked_at.items():
            if not line.bad_since.get(name):
                line.bad_since[name] = 0 if math.isfinite(value) else number
        for own in step.own_lines:
            self._outputs.write_own(own)
        if step.bad_gradients:
            named = step.bad_gradients[:_MAX_NAMED]
            self._outputs.write_own(NonFinite(number, named, self._finite_step))
        elif num_bad is not None:
            self._finite_step = number

    def _look_at(self, step: ObservedStep) -> dict[str, float]:
        """Return the figures of a step's spans; write the spans if its timeline is kept."""
        recorded = step.recorded
        spans = spans_of(recorded, self._left_open)
        on_device = device_spans_of(recorded)
        by_host = without_lines_of(on_device, spans)
        if on_device or step.keeps_timeline:  # the device's spans count from the step's begin
            by_host = [span.earlier(recorded.begin_s) for span in by_host]
        if step.keeps_timeline:
            rows = [_row(span) for span in (*by_host, *on_device)]
            self._outputs.write_own(Timeline(step.step, recorded.seconds, rows))
        if on_device:
            by_host = [span for span in by_host if span.line != MAIN and "." not in span.line]
        return m.step_metrics([*on_device, *by_host], recorded.seconds)

    def _write_line(self, step: int) -> None:
        """Exchange the figures of the line with all ranks; write it, on rank 0."""
        if self.is_abandoned:
            return
        line, self._line = self._line, _LineUnderWay()
        num_steps = self._sampler.num_steps
        longest = nlargest(_MAX_WAITED_FOR, line.waited_for.items(), key=lambda each: each[1])
        tokens = line.tokens[: 1 if len(set(line.tokens)) == 1 else _MAX_TOKENS]
        mine = {
            "metrics": {**self._sampler.mean(), **self._gauges.read(num_steps)},
            "waited_for": {r: 1e3 * s / num_steps for r, s in longest},
            "bad_since": line.bad_since,
            "tokens": tokens,
        }
        rows = [json.loads(row) for row in exchange_any(self._control, json.dumps(mine).encode())]
        for row, found in zip(rows, m.tokens_over_ranks([r["tokens"] for r in rows]), strict=False):
            row["metrics"] |= found
        metrics = m.over_ranks([row["metrics"] for row in rows])
        waited_for = {
            rank: {int(other): ms for other, ms in row["waited_for"].items()}
            for rank, row in enumerate(rows)
        }
        bad_since = {
            name: {
                r: row["bad_since"][name] for r, row in enumerate(rows) if name in row["bad_since"]
            }
            for name in sorted({n for row in rows for n, bad in row["bad_since"].items() if bad})
        }
        self.latest = StepLine(
            step,
            num_steps,
            round(time.monotonic() - self._began_s, 3),
            metrics,
            dict(self._values),
            waited_for,
            bad_since,
            values_over_steps=m.summarize_steps(line.values),
            metrics_over_steps=m.summarize_steps(line.told),
        )
        self._sampler.begin_line(metrics[m.STEP_S].max)
        if self._control.rank == 0:
            self._outputs.write(self.latest)


class Sampler:
    """The steps of the line under way; see Note [Steps that are short].

    ``every`` is the number of steps of a line; None lets their time decide.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._num_seen = 0
        self._length = 1  # of this line
        self._one_in = 1  # usual steps is looked at
        self._usual_s = math.inf  # how long a step took in the last line
        self._clear()

    def _clear(self) -> None:
        self._known: list[Figures] = []  # of every step
        self._usual: list[Figures] = []  # of steps that were looked at
        self._rare: list[Figures] = []
        self._skipped: Callable[[], Figures] | None = None

    @property
    def num_steps(self) -> int:
        """Steps of the line so far."""
        return len(self._known)

    @property
    def ends_line(self) -> bool:
        """Tell whether the line has all its steps."""
        return self.num_steps >= self._length

    def take(self, known: Figures, look: Callable[[], Figures], is_rare: bool) -> None:
        """Take a step with its known figures; ``look`` returns those of its spans."""
        self._num_seen += 1
        self._known.append(known)
        if is_rare or known[m.STEP_S] > _LONG * self._usual_s:
            self._rare.append(look())
        elif self._num_seen % self._one_in == 0:
            self._usual.append(look())
        else:
            self._skipped = look

    def mean(self) -> dict[str, float]:
        """Return the means over all steps of the line; usual ones stand for those not looked at."""
        if self._skipped is not None and not self._usual:
            self._usual.append(self._skipped())
        each = (self.num_steps - len(self._rare)) / max(len(self._usual), 1)
        weighed = [(each, step) for step in self._usual] + [(1.0, step) for step in self._rare]
        return {**m.mean_of(weighed), **m.mean_of([(1.0, step) for step in self._known])}

    def begin_line(self, slowest_s: float) -> None:
        """Begin a line; ``slowest_s`` is the mean step of the slowest rank in the last one."""
        self._usual_s = statistics.fmean(known[m.STEP_S] for known in self._known)
        self._clear()
        if self._num_seen < FIRST_STEPS:
            return
        at_least = self._every or max(_LINE_STEPS, math.ceil(_LINE_S / slowest_s))
        unit = self._every or _LINE_STEPS
        self._length = math.ceil(at_least / unit) * unit - self._num_seen % unit
        self._one_in = max(min(int(_LOOKED_AT_S / slowest_s), at_least), 1)


class _Gauges:
    """Figures with a current value: memory, padding, waits of the training thread for a core."""

    def __init__(self, facts: RunFacts, device: torch.device) -> None:
        self._facts, self._device = facts, device
        self._native_id = threading.get_native_id()
        self._core_wait_s = core_wait_s(self._native_id)

    def read(self, num_steps: int) -> dict[str, float]:
        """Return the figures of a line that ends, of so many steps.

        **Cost** 0.1 to 0.3 ms of system calls.
        """
        waited_s, self._core_wait_s = self._core_wait_s, core_wait_s(self._native_id)
        memory = memory_figures(self._device)
        return {
            m.CORE_WAIT_S: (self._core_wait_s - waited_s) / num_steps,
            m.PADDING_SHARE: 100 * self._facts.padding_share,
            m.MAX_ACTIVE_GIB: memory.peak_bytes / m.GIB,
            m.MAX_RESERVED_GIB: memory.reserved_bytes / m.GIB,
            m.MAX_ACTIVE_SHARE: 100 * memory.peak_bytes / memory.capacity_bytes,
            m.RETRIES: memory.num_retries,
            m.OOMS: memory.num_ooms,
        }


def _row(span: Span) -> SpanRow:
    times = round(1e3 * span.begin_s, 4), round(1e3 * span.seconds, 4)
    return span.line, span.phase, span.unit, *times, span.num_bytes
