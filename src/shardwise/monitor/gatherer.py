"""The thread that makes lines of recorded steps, behind the training.

Note [What the training waits for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Nothing. The training appends events to a list and hands over the lists of some steps at a time, as
a thread that wakes after each short step takes Python's lock from the training more often. This
thread turns them into spans and figures, exchanges figures with the other ranks on a separate group
(a training collective is never behind one), and writes lines. If that fails, the next step or the
end of the run raises. If a line cannot be written (a full disk, an unreachable tracker), a warning
is logged once and the training continues.

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
import logging
import math
import queue
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from heapq import nlargest
from typing import Protocol, TypedDict

import torch
import torch.distributed as dist

from shardwise.comm.collective_key import ranks_of, reason_of
from shardwise.comm.control import Control, exchange_any
from shardwise.comm.process_groups import FAILED_GROUPS
from shardwise.device import memory_figures
from shardwise.errors import CollectiveError
from shardwise.hangs.diagnosis import call_of_error
from shardwise.hangs.heartbeat import save_under_way
from shardwise.host import core_wait_s
from shardwise.monitor.ledger import is_out_of_memory
from shardwise.monitor.lines import JsonLines
from shardwise.monitor.live_run import LiveDoctor
from shardwise.monitor.metrics import (
    BAD_GRADIENTS,
    BAD_VALUES,
    CORE_WAIT_S,
    GIB,
    MAX_ACTIVE_GIB,
    MAX_ACTIVE_SHARE,
    MAX_RESERVED_GIB,
    MFU_SHARE,
    OOMS,
    PADDING_SHARE,
    RETRIES,
    STEP_S,
    TOKENS_PER_S,
    mean_of,
    over_ranks,
    step_metrics,
    summarize_steps,
    tokens_over_ranks,
)
from shardwise.monitor.rank_lines import (
    End,
    NonFinite,
    OtherSave,
    RankLine,
    SpanRow,
    Timeline,
    keys_of,
)
from shardwise.monitor.record import RunFacts, StepLine
from shardwise.monitor.spans import Recorded, Span, device_spans_of, spans_of, without_lines_of
from shardwise.names import MAIN

_LOG = logging.getLogger("shardwise")
_FIRST_STEPS = 10  # handed over one by one, each of which is a line
_LONG_S = 1.0  # seconds after which a step is handed over, even if its line is not due
_LOOK_S = 0.1  # without a step, after which the training thread is looked at
_MAX_NAMED = 8  # parameters, of those with bad gradients
_MAX_WAITED_FOR = 4  # ranks for which a rank has waited, that it sends
_MAX_TOKENS = 256  # steps of a line whose numbers of tokens are sent to the other ranks
_MAX_MESSAGE = 1000  # characters of an error
_LOOKED_AT_S, _LINE_S = 0.25, 2.0
_LINE_STEPS = 10  # at least, and of which a line has a multiple
_LONG = 1.5  # times the mean step of the last line
Figures = Mapping[str, float]


class Sink(Protocol):
    """An output of figures besides the run's files."""

    def write(self, line: StepLine) -> None:
        """Take the figures of a few steps; rank 0 calls it, behind the training."""

    def close(self) -> None:
        """Close files and connections."""


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


class Outputs:
    """The outputs of this rank: its lines and, on rank 0, those of all ranks.

    The first error of writing is logged and ends all writing, but not the training. ``doctor`` and
    ``sinks`` receive each line of all ranks, the doctor those of this rank too.
    """

    def __init__(
        self, rank: int, steps: JsonLines, own: JsonLines, doctor: LiveDoctor, sinks: Sequence[Sink]
    ) -> None:
        self.doctor = doctor
        self._rank = rank
        self._steps, self._own, self._sinks = steps, own, sinks
        self._has_failed = False

    def note(self, line: RankLine) -> None:
        """Write a line of this rank now; any thread may."""
        with self._writing():
            self._own.write(**keys_of(line))

    def write_own(self, line: RankLine) -> None:
        """Write a line of this rank, and tell the doctor."""
        self.note(line)
        self.doctor.note(line)

    def write(self, line: StepLine) -> None:
        """Write a line over all ranks, on rank 0."""
        with self._writing():
            self._steps.write(**asdict(line))
            for sink in (*self._sinks, self.doctor):
                sink.write(line)

    def close(self) -> None:
        """Close all outputs."""
        self._close()
        with self._writing():
            self.doctor.close()

    def _close(self) -> None:
        for close in (self._steps.close, self._own.close, *(sink.close for sink in self._sinks)):
            with self._writing():
                close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._has_failed:
                return
            self._has_failed = True
            _LOG.warning(
                "rank %d: observe() could not write its record of the run and writes no more: "
                "%s: %s",
                *(self._rank, type(error).__name__, error),
            )
            self._close()
            self._sinks = ()


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
        if is_rare or known[STEP_S] > _LONG * self._usual_s:
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
        return {**mean_of(weighed), **mean_of([(1.0, step) for step in self._known])}

    def begin_line(self, slowest_s: float) -> None:
        """Begin a line; ``slowest_s`` is the mean step of the slowest rank in the last one."""
        self._usual_s = statistics.fmean(known[STEP_S] for known in self._known)
        self._clear()
        if self._num_seen < _FIRST_STEPS:
            return
        at_least = self._every or max(_LINE_STEPS, math.ceil(_LINE_S / slowest_s))
        unit = self._every or _LINE_STEPS
        self._length = math.ceil(at_least / unit) * unit - self._num_seen % unit
        self._one_in = max(min(int(_LOOKED_AT_S / slowest_s), at_least), 1)


class Gatherer:
    """Takes over steps and makes lines of them; ``latest`` is the newest over all ranks.

    ``every`` is as in `Sampler`. Made on the training thread.
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
        self.outputs = outputs
        self.rank = control.rank  # among those that are observed
        self._control = control
        self._facts = facts
        self._device = device
        self._every = every
        self._taken: list[ObservedStep] = []  # and not yet handed over
        self._handed_over_s = 0.0
        self._batches: queue.SimpleQueue[list[ObservedStep] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._line = Sampler(every)
        self._waited_for: defaultdict[int, float] = defaultdict(float)  # by global rank
        self._of_each: list[tuple[int, Figures, Figures]] = []
        self._values: dict[str, float] = {}
        self._tokens: list[int] = []  # of each step of the line
        self._bad_since: dict[str, int] = {}  # as in `StepLine`, of this rank
        self._finite_step = 0  # the last one in which gradients were looked at and finite
        self._saves: defaultdict[str, float] = defaultdict(float)  # seconds in each call
        self._trained_by, self._native_id = threading.get_ident(), threading.get_native_id()
        self._core_wait_s = core_wait_s(self._native_id)
        self._left_open: dict[str, list[tuple[str, str]]] = {}
        self._num_taken = self._last_step = 0
        self._is_abandoned = False
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shardwise-observe", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, step: ObservedStep) -> None:
        """Take over a step; dropped after an error. **Raises** the error of an earlier one."""
        self._raise_once()
        if not self._thread.is_alive():
            return
        self._taken.append(step)
        self._num_taken += 1
        is_asked_for = self._every is not None and self._num_taken % self._every == 0
        is_late = time.monotonic() - self._handed_over_s > _LONG_S
        is_first = self._num_taken <= _FIRST_STEPS
        if is_first or is_asked_for or is_late or step.bad_gradients:
            self._hand_over()

    def _hand_over(self) -> None:
        taken, self._taken = self._taken, []
        self._handed_over_s = time.monotonic()
        self._batches.put(taken)

    def _raise_once(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Write all steps and close the files. **Raises** the error of the thread."""
        self._end(self._error)
        self._raise_once()

    def abandon(
        self, error: BaseException, last: ObservedStep | None, during: int, phase: str, unit: str
    ) -> None:
        """End after an error, without exchanges with the other ranks, which may never come.

        ``last`` is a step that was not taken yet. The error was raised in the step ``during``.
        """
        self._taken += [] if last is None else [last]
        self._is_abandoned = True
        self._end(error, during, phase, unit)

    def _end(
        self,
        error: BaseException | None,
        during: int | None = None,
        phase: str | None = None,
        unit: str | None = None,
    ) -> None:
        """Write the end of the run, which a run that hangs or was killed lacks; close the files."""
        self._hand_over()
        if self._is_abandoned:
            self._control.break_off()
        self._batches.put(None)
        if self._thread.is_alive():
            self._thread.join()
        error = error or self._error
        is_clean = error is None or (isinstance(error, SystemExit) and not error.code)
        end = End(max(self._last_step, 1), None, round(time.time(), 3))
        if error is not None and not is_clean:
            end = replace(end, during=during, phase=phase, unit=unit, **_describe_error(error))
        self.outputs.note(end)
        self.outputs.close()

    # -- the thread
    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                for step in batch:
                    self._last_step = step.step
                    self._note(step)
                    if self._line.ends_line:
                        self._write_line(step.step)
            if self._line.num_steps:
                self._write_line(self._last_step)
        except BaseException as error:
            self._error = error

    def _next_batch(self) -> list[ObservedStep] | None:
        """Wait for steps; meanwhile add up the time of the training thread in saves by torch."""
        while True:
            began_s = time.monotonic()
            try:
                return self._batches.get(timeout=_LOOK_S)
            except queue.Empty:
                if (call := save_under_way(self._trained_by)) is not None:
                    self._saves[call] += time.monotonic() - began_s

    def _note(self, step: ObservedStep) -> None:
        number, recorded, values = step.step, step.recorded, step.values
        for call, seconds in self._saves.items():
            self.outputs.write_own(OtherSave(number, call, seconds))
        self._saves.clear()
        told = {STEP_S: recorded.seconds}
        if recorded.num_tokens:
            told[TOKENS_PER_S] = recorded.num_tokens / recorded.seconds
            if self._facts.peak_flops:
                flops = told[TOKENS_PER_S] * self._facts.flops_per_token
                told[MFU_SHARE] = 100 * flops / self._facts.peak_flops
        self._of_each.append((number, told, values))
        self._tokens.append(recorded.num_tokens)
        bad = sum(not math.isfinite(value) for value in values.values())
        is_rare = step.keeps_timeline or recorded.first is not None or recorded.has_other_lines
        known = {**told, **step.figures, BAD_VALUES: bad}
        self._line.take(known, lambda: self._look_at(step), is_rare or bool(self._left_open))
        for (group, peer), seconds in recorded.waited_for.items():
            with suppress(KeyError, ValueError):  # a group that is gone
                self._waited_for[ranks_of(group)[peer]] += seconds
        self._values.update(values)
        num_bad, looked_at = step.figures.get(BAD_GRADIENTS), dict(values)
        if num_bad is not None:
            looked_at[BAD_GRADIENTS] = math.inf if num_bad else 0
        for name, value in looked_at.items():
            if not self._bad_since.get(name):
                self._bad_since[name] = 0 if math.isfinite(value) else number
        for line in step.own_lines:
            self.outputs.write_own(line)
        if step.bad_gradients:
            named = step.bad_gradients[:_MAX_NAMED]
            self.outputs.write_own(NonFinite(number, named, self._finite_step))
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
            self.outputs.write_own(Timeline(step.step, recorded.seconds, rows))
        if on_device:
            by_host = [span for span in by_host if span.line != MAIN and "." not in span.line]
        return step_metrics([*on_device, *by_host], recorded.seconds)

    def _gauges(self, num_steps: int) -> dict[str, float]:
        """Return the figures with a current value: memory, padding, waits for a core a step.

        **Cost** 0.1 to 0.3 ms of system calls.
        """
        waited_s, self._core_wait_s = self._core_wait_s, core_wait_s(self._native_id)
        memory = memory_figures(self._device)
        return {
            CORE_WAIT_S: (self._core_wait_s - waited_s) / num_steps,
            PADDING_SHARE: 100 * self._facts.padding_share,
            MAX_ACTIVE_GIB: memory.peak_bytes / GIB,
            MAX_RESERVED_GIB: memory.reserved_bytes / GIB,
            MAX_ACTIVE_SHARE: 100 * memory.peak_bytes / memory.capacity_bytes,
            RETRIES: memory.num_retries,
            OOMS: memory.num_ooms,
        }

    def _write_line(self, step: int) -> None:
        """Exchange the figures of the line with all ranks; write it, on rank 0."""
        if self._is_abandoned:
            return
        num_steps = self._line.num_steps
        longest = nlargest(_MAX_WAITED_FOR, self._waited_for.items(), key=lambda each: each[1])
        tokens = self._tokens[: 1 if len(set(self._tokens)) == 1 else _MAX_TOKENS]
        mine = {
            "metrics": {**self._line.mean(), **self._gauges(num_steps)},
            "waited_for": {r: 1e3 * s / num_steps for r, s in longest},
            "bad_since": self._bad_since,
            "tokens": tokens,
        }
        rows = [json.loads(row) for row in exchange_any(self._control, json.dumps(mine).encode())]
        for row, found in zip(rows, tokens_over_ranks([r["tokens"] for r in rows]), strict=False):
            row["metrics"] |= found
        metrics = over_ranks([row["metrics"] for row in rows])
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
        of_each, self._of_each = self._of_each, []
        self.latest = StepLine(
            step,
            num_steps,
            round(time.monotonic() - self._began_s, 3),
            metrics,
            dict(self._values),
            waited_for,
            bad_since,
            values_over_steps=summarize_steps([(number, values) for number, _, values in of_each]),
            metrics_over_steps=summarize_steps([(number, told) for number, told, _ in of_each]),
        )
        self._line.begin_line(metrics[STEP_S].max)
        self._waited_for.clear()
        self._tokens, self._bad_since = [], {}
        if self.rank == 0:
            self.outputs.write(self.latest)


class _Error(TypedDict):
    error: str
    message: str
    follows: bool


def _describe_error(error: BaseException) -> _Error:
    """Return an error as fields of `End`."""
    text, call = reason_of(error), None
    follows = isinstance(error, CollectiveError)
    if isinstance(error, RuntimeError) and not follows and not is_out_of_memory(error):
        call = call_of_error(error)
    if call is not None:
        text = f"{call.text} failed: {FAILED_GROUPS.reason(call.group) or text}"
        follows = isinstance(error, dist.DistError) or "gloo" in str(error)
    return {"error": type(error).__name__, "message": text[:_MAX_MESSAGE], "follows": follows}


def _row(span: Span) -> SpanRow:
    times = round(1e3 * span.begin_s, 4), round(1e3 * span.seconds, 4)
    return span.line, span.phase, span.unit, *times, span.num_bytes
