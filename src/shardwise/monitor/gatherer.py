"""Lines of figures made of recorded steps on a thread behind the training, and their outputs.

Note [What the training waits for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Nothing. The training appends events to a list and hands over the list of each step. A thread looks
for steps five times a second: to wake it after each step, but for the first ones, would take
Python's lock from the training more often. It turns them into spans and figures, exchanges figures
with the other ranks on a separate group (a training collective is never behind one), and writes
lines. If that fails, the next step or the end of the run raises. If a line cannot be written (a
full disk, an unreachable tracker), a warning is logged once and the training continues.

Note [Steps that are short]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The details of a step cost half a millisecond of the training and a look at them as much behind it;
a line takes 3 ms. To stay below 0.3 % of the time, only one short step in `_LOOKED_AT_S` has
details, which stand for the others, and a line has as many steps as take `_LINE_S`, unless the
user has given a number. Time by phase, tokens and logged values are of every step. All ranks end
their lines after the same steps, since the slowest rank's mean step decides, which every line tells
all of them.
"""

import json
import logging
import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from heapq import nlargest
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardwise.comm.collective_key import ranks_of, reason_of
from shardwise.comm.control import Control, exchange_any
from shardwise.comm.process_groups import FAILED_GROUPS
from shardwise.device import memory_figures, memory_in_use_bytes
from shardwise.errors import CollectiveError
from shardwise.hangs.diagnosis import call_of_error
from shardwise.hangs.heartbeat import save_under_way
from shardwise.host import resident_bytes
from shardwise.monitor import metrics as m
from shardwise.monitor.doctor import LiveDoctor
from shardwise.monitor.lateness import late_over_ranks, noise_of, parts_of
from shardwise.monitor.lines import JsonLines
from shardwise.monitor.memory import is_out_of_memory
from shardwise.monitor.record import (
    End,
    NoGradient,
    OtherSave,
    RankLine,
    RunFacts,
    StepLine,
    Timeline,
    keys_of,
)
from shardwise.monitor.spans import Recorded, device_spans_of, spans_of
from shardwise.names import MAIN

_LOG = logging.getLogger("shardwise")
_LOOK_S = 0.2  # between looks for new steps
_MAX_NAMED = 8  # parameters of a line
_MAX_MESSAGE = 1000  # characters of an error
_FIRST_STEPS = 10  # each of which is a line
_MAX_WAITED_FOR = 4  # ranks for which a rank has waited, that it sends
_MAX_TOKENS = 256  # steps of a line whose numbers of tokens are sent to the other ranks
_LOOKED_AT_S, _LINE_S = 1.0, 2.0
_LINE_STEPS = 10  # at least, and of which a line has a multiple
_LONG = 1.5  # times the mean step of the last line
Figures = Mapping[str, float]
Idle = Mapping[str, bool]  # names of parameters, and whether they require a gradient


class ObservedStep(NamedTuple):
    """One step, as the training hands it over."""

    step: int
    recorded: Recorded
    values: dict[str, float]  # logged by the loop until the step is handed over
    figures: Mapping[str, float | torch.Tensor]  # a tensor is read behind the training
    own_lines: Sequence[RankLine] = ()
    keeps_timeline: bool = False
    digest: int | None = None  # of the inputs, of a step that was checked
    idle: Idle | None = None  # parameters without a gradient on this rank, likewise


class Gatherer:
    """Takes over steps from the training thread; a thread of its own makes lines of them.

    ``latest`` is the newest line over all ranks; ``rank`` is among those that are observed. Made on
    the training thread.
    """

    def __init__(
        self,
        control: Control,
        facts: RunFacts,
        outputs: "Outputs",
        every: int | None,
        device: torch.device,
        params: Mapping[str, int],
    ) -> None:
        """``params`` has the number of elements of each parameter."""
        self._numels = params
        self.outputs, self.rank = outputs, control.rank
        self.latest: StepLine | None = None
        self._control, self._facts = control, facts
        self._steps: deque[ObservedStep] = deque()
        self._num_taken, self._is_over, self._is_abandoned = 0, False, False
        self._wakes = threading.Event()
        self._error: BaseException | None = None
        self._has_failed = False
        self._trained_by = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="shardwise-observe", daemon=True)
        # What follows is the thread's.
        self._device = device
        self._sampler = Sampler(every)
        self._digests: set[int] = set()  # of inputs so far
        self._begin_line()
        self._last_step = 0
        self._saves: defaultdict[str, float] = defaultdict(float)  # by torch's calls, since then
        self._values: dict[str, float] = {}  # logged last
        self._left_open: dict[str, list[tuple[str, str]]] = {}
        self._began_s = time.monotonic()

    def _begin_line(self) -> None:
        """Begin this rank's part of a line; lists have the numbers of their steps."""
        self._speeds: list[tuple[int, Figures]] = []  # figures that every step has
        self._parts: list[Figures] = []  # of every step, those of its phases
        self._logged: list[tuple[int, Figures]] = []
        self._tokens: list[int] = []
        self._waited_for: defaultdict[int, float] = defaultdict(float)  # seconds by global rank
        self._num_detailed = 0
        self._inputs: dict[int, int] = {}  # digests by step
        self._idle: tuple[int, Idle] | None = None  # step, parameters without a gradient
        self._bad_since: dict[str, int] = {}  # as in `StepLine`

    def wants_details(self, number: int) -> bool:
        """Tell whether a step, counted from 1, should have details; see `Sampler`."""
        return self._sampler.wants_details(number)

    def start(self) -> int | None:
        """Start the thread; return its number in the system."""
        self._thread.start()
        return self._thread.native_id

    def take(self, step: ObservedStep) -> None:
        """Take over a step; dropped after an error. **Raises** the error of an earlier one."""
        if self._error is not None:
            self._raise_once()
        if not self._has_failed:
            self._steps.append(step)
            self._num_taken += 1
            if self._num_taken <= _FIRST_STEPS:
                self._wakes.set()

    def _raise_once(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(
        self,
        error: BaseException | None = None,
        last: ObservedStep | None = None,
        **place: int | str,
    ) -> None:
        """Write all steps and the end, which a run that hangs or was killed lacks; close the files.

        An ``error`` was raised at a ``place`` (`End`), and ``last`` is a step that was not taken
        yet. Then there are no exchanges with the other ranks, which may never come.

        **Raises** the error of the thread, unless the run has ended with one.
        """
        if error is not None:
            self._steps.extend([] if last is None else [last])
            self._is_abandoned = True
            self._control.break_off()
        self._is_over = True
        self._wakes.set()
        if self._thread.is_alive():
            self._thread.join()
        cause, ending = error or self._error, dict[str, object](error=None)
        if cause is not None and not (isinstance(cause, SystemExit) and not cause.code):
            ending = {**place, **_describe_error(cause)}
        step, now_s = max(self._last_step, 1), round(time.time(), 3)
        self.outputs.note(End(step, unix_s=now_s, **ending))  # type: ignore[arg-type]
        self.outputs.close()
        if error is None:
            self._raise_once()

    # -- the thread
    def _run(self) -> None:
        try:
            is_over = False
            while not is_over:
                began_s = time.monotonic()
                self._wakes.wait(_LOOK_S)
                self._wakes.clear()
                is_over = self._is_over
                if not self._steps and (call := save_under_way(self._trained_by)) is not None:
                    self._saves[call] += time.monotonic() - began_s
                while self._steps:
                    self._add(self._steps.popleft())
            if self._sampler.num_steps:
                self._write_line(self._last_step)
        except BaseException as error:
            self._error, self._has_failed = error, True

    def _add(self, step: ObservedStep) -> None:
        """Add a step to the line; write the line if it is the last one of it."""
        number, recorded, values = step.step, step.recorded, step.values
        self._last_step = number
        for call, seconds in self._saves.items():
            self.outputs.note(OtherSave(number, call, seconds))
        self._saves.clear()
        speed = {m.STEP_S: recorded.seconds}
        if recorded.num_tokens:
            speed[m.TOKENS_PER_S] = recorded.num_tokens / recorded.seconds
            if self._facts.peak_flops:
                flops = speed[m.TOKENS_PER_S] * self._facts.flops_per_token
                speed[m.MFU_SHARE] = 100 * flops / self._facts.peak_flops
        self._speeds.append((number, speed))
        self._logged.append((number, values))
        self._tokens.append(recorded.num_tokens)
        bad = sum(not math.isfinite(value) for value in values.values())
        is_rare = step.keeps_timeline or recorded.first is not None or recorded.has_other_lines
        detail = None
        if recorded.main_s is None or recorded.has_other_lines or self._left_open:
            detail = self._look_at(step)
        if recorded.main_s is None:
            parts = {name: detail[name] for name in m.OF_MAIN} if detail is not None else {}
        else:
            parts = m.main_metrics(recorded.main_s, recorded.seconds)
            # A root without hooks would leave the time of its units out.
            self._sampler.needs_details |= "forward" not in recorded.main_s
        figures = {name: float(value) for name, value in step.figures.items()}
        parts = {**parts, m.PAUSED_S: recorded.paused_s, **figures}
        if step.digest is not None:
            # The same batch again says nothing about ranks.
            self._inputs[number] = 0 if step.digest in self._digests else step.digest
            self._digests.add(step.digest)
        if step.idle is not None:
            self._idle = number, step.idle
        self._parts.append(parts)
        self._sampler.take({**speed, **parts, m.BAD_VALUES: bad}, detail, is_rare)
        self._num_detailed += recorded.is_detailed
        for (group, peer), seconds in recorded.waited_for.items():
            with suppress(KeyError, ValueError):  # a group that is gone
                self._waited_for[ranks_of(group)[peer]] += seconds
        self._values.update(values)
        num_bad, looked_at = figures.get(m.BAD_GRADIENTS), dict(values)
        if num_bad is not None:
            looked_at[m.BAD_GRADIENTS] = math.inf if num_bad else 0
        for name, value in looked_at.items():
            if not self._bad_since.get(name):
                self._bad_since[name] = 0 if math.isfinite(value) else number
        for own in step.own_lines:
            self.outputs.note(own)
        if self._sampler.ends_line:
            self._write_line(number)

    def _look_at(self, step: ObservedStep) -> dict[str, float]:
        """Return the figures of a step's spans; write the spans if its timeline is kept.

        Without details the spans are those of threads in the background alone.
        """
        recorded = step.recorded
        on_device = device_spans_of(recorded)
        by_host = spans_of(recorded, self._left_open, on_device)
        if recorded.main_s is not None:
            by_host = [span for span in by_host if span.line != MAIN]
        if step.keeps_timeline:
            rows = [span.to_row() for span in (*by_host, *on_device)]
            self.outputs.note(Timeline(step.step, recorded.seconds, rows))
        if on_device:
            by_host = [span for span in by_host if span.line != MAIN and "." not in span.line]
        return m.step_metrics([*on_device, *by_host], recorded.seconds)

    def _gauges(self) -> dict[str, float]:
        """Return figures with a current value: memory and padding.

        **Cost** 0.1 to 0.3 ms of system calls.
        """
        memory = memory_figures(self._device)
        return {
            m.PADDING_SHARE: 100 * self._facts.padding_share,
            m.MAX_ACTIVE_GIB: memory.peak_bytes / m.GIB,
            m.MAX_RESERVED_GIB: memory.reserved_bytes / m.GIB,
            m.MAX_ACTIVE_SHARE: 100 * memory.peak_bytes / memory.capacity_bytes,
            m.IN_USE_GIB: memory_in_use_bytes(self._device) / m.GIB,
            m.HOST_GIB: (resident_bytes() or 0) / m.GIB,
            m.RETRIES: memory.num_retries,
            m.OOMS: memory.num_ooms,
        }

    def _write_line(self, step: int) -> None:
        """Exchange the figures of the line with all ranks; write it, on rank 0."""
        if self._is_abandoned:
            return
        num_steps = self._sampler.num_steps
        longest = nlargest(_MAX_WAITED_FOR, self._waited_for.items(), key=lambda each: each[1])
        tokens = self._tokens[: 1 if len(set(self._tokens)) == 1 else _MAX_TOKENS]
        num_ranks = self._control.num_ranks
        mine = {
            "parts": parts_of(self._parts, num_ranks),
            "metrics": {**self._sampler.mean(), **self._gauges()},
            "waited_for": {r: 1e3 * s / max(self._num_detailed, 1) for r, s in longest},
            "bad_since": self._bad_since,
            "logged_at": self._steps_of_seldom() if any(self._bad_since.values()) else {},
            "tokens": tokens,
            "inputs": self._inputs,
            "idle": self._idle,
        }
        rows = [json.loads(row) for row in exchange_any(self._control, json.dumps(mine).encode())]
        for row, found in zip(rows, m.tokens_over_ranks([r["tokens"] for r in rows]), strict=False):
            row["metrics"] |= found
        for row, share in zip(rows, m.shared_inputs([r["inputs"] for r in rows]), strict=True):
            row["metrics"] |= {} if share is None else {m.SHARED_INPUTS_SHARE: share}
        self._note_idle([row["idle"] for row in rows])
        metrics = m.over_ranks([row["metrics"] for row in rows])
        waited_for = {
            rank: {int(other): ms for other, ms in row["waited_for"].items()}
            for rank, row in enumerate(rows)
        }
        bad_since = _bad_over_ranks(rows)
        self.latest = StepLine(
            step,
            num_steps,
            round(time.monotonic() - self._began_s, 3),
            metrics,
            dict(self._values),
            waited_for,
            bad_since,
            values_over_steps=m.summarize_steps(self._logged),
            metrics_over_steps=m.summarize_steps(self._speeds),
            late=late_over_ranks([r["parts"] for r in rows], noise_of(self._facts.device)),
        )
        self._sampler.begin_line(metrics[m.STEP_S].max)
        self._begin_line()
        if self._control.rank == 0:
            self.outputs.write(self.latest)

    def _steps_of_seldom(self) -> dict[str, list[int]]:
        """Return the steps of values that were not logged in every step of the line."""
        found: dict[str, list[int]] = {}
        for number, values in self._logged:
            for name in values:
                found.setdefault(name, []).append(number)
        return {n: steps for n, steps in found.items() if len(steps) < len(self._logged)}

    def _note_idle(self, rows: Sequence[tuple[int, Idle] | None]) -> None:
        """Note the parameters that have a gradient on no rank, of a step that all have checked."""
        checked = [row for row in rows if row is not None]
        if len(checked) < len(rows) or len({step for step, _ in checked}) > 1:
            return
        shared = set[str].intersection(*(set(names) for _, names in checked))
        step, idle = checked[0]
        names = [name for name in idle if name in shared]
        share = sum(self._numels.get(name, 0) for name in names) / sum(self._numels.values())
        trained = sum(idle[name] for name in names)
        self.outputs.note(NoGradient(step, names[:_MAX_NAMED], len(names), share, trained))

    def note_end(self, error: BaseException | None) -> None:
        """Write the end of a run that was not closed, as the program ends."""
        ending = {"error": None} if error is None else dict(_describe_error(error))
        step, now_s = max(self._last_step, 1), round(time.time(), 3)
        self.outputs.note(End(step, unix_s=now_s, **ending))


def _bad_over_ranks(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[int, int]]:
    """Return ``bad_since`` of a line.

    A rank that logs a value seldom, and not in the first bad step, says nothing about that step, so
    it is left out.
    """
    found = {}
    for name in sorted({n for row in rows for n, bad in row["bad_since"].items() if bad}):
        first = min(bad for row in rows if (bad := row["bad_since"].get(name)))
        found[name] = {
            rank: row["bad_since"][name]
            for rank, row in enumerate(rows)
            if name in row["bad_since"]
            and (row["bad_since"][name] == first or first in row["logged_at"].get(name, [first]))
        }
    return found


def _describe_error(error: BaseException) -> Mapping[str, str | bool]:
    """Return an error as fields of `End`."""
    text, call = reason_of(error), None
    follows = isinstance(error, CollectiveError)
    if isinstance(error, RuntimeError) and not follows and not is_out_of_memory(error):
        call = call_of_error(error)
    if call is not None:
        text = f"{call.text} failed: {FAILED_GROUPS.reason(call.key.group) or text}"
        follows = isinstance(error, dist.DistError) or "gloo" in str(error)
    return {"error": type(error).__name__, "message": text[:_MAX_MESSAGE], "follows": follows}


class Sampler:
    """The steps of the line under way; see Note [Steps that are short].

    ``every`` is the number of steps of a line; None lets their time decide.
    """

    def __init__(self, every: int | None) -> None:
        self.needs_details = False  # of every step
        self._every = every
        self._num_seen = 0
        self._length = 1  # of this line
        self._one_in = 1  # steps has details
        self._usual_s = math.inf  # how long a step took in the last line
        self._last: Figures | None = None  # the newest details of a usual step
        self._clear()

    def _clear(self) -> None:
        self._known: list[Figures] = []  # of every step
        self._usual: list[Figures] = []  # of steps with details
        self._rare: list[Figures] = []

    @property
    def num_steps(self) -> int:
        """Steps of the line so far."""
        return len(self._known)

    @property
    def ends_line(self) -> bool:
        """Tell whether the line has all its steps."""
        return self.num_steps >= self._length

    def wants_details(self, number: int) -> bool:
        """Tell whether a step, counted from 1, should have details. Any thread may ask."""
        is_first = number <= _FIRST_STEPS or self.needs_details
        return is_first or number % self._one_in == 0

    def take(self, known: Figures, detail: Figures | None, is_rare: bool) -> None:
        """Take a step with its known figures, and those of its details if it has any."""
        self._num_seen += 1
        self._known.append(known)
        if detail is None:
            return
        if is_rare or known[m.STEP_S] > _LONG * self._usual_s:
            self._rare.append(detail)
        else:
            self._usual.append(detail)
            self._last = detail

    def mean(self) -> dict[str, float]:
        """Return the means over all steps of the line; usual details stand for missing ones."""
        usual = self._usual or [self._last or {}]
        each = (self.num_steps - len(self._rare)) / len(usual)
        weighed = [(each, step) for step in usual if each] + [(1.0, step) for step in self._rare]
        return {**m.mean_of(weighed), **m.mean_of([(1.0, step) for step in self._known])}

    def begin_line(self, slowest_s: float) -> None:
        """Begin a line; ``slowest_s`` is the mean step of the slowest rank in the last one."""
        self._usual_s = statistics.fmean(known[m.STEP_S] for known in self._known)
        self._clear()
        if self._num_seen < _FIRST_STEPS:
            return
        at_least = self._every or max(_LINE_STEPS, math.ceil(_LINE_S / slowest_s))
        unit = self._every or _LINE_STEPS
        self._length = math.ceil(at_least / unit) * unit - self._num_seen % unit
        self._one_in = max(min(int(_LOOKED_AT_S / slowest_s), at_least), 1)


class Sink(Protocol):
    """An output of figures besides the run's files."""

    def write(self, line: StepLine) -> None:
        """Take the figures of a few steps; rank 0 calls it, behind the training."""

    def close(self) -> None:
        """Close files and connections."""


class Outputs:
    """The outputs of this rank: its lines and, on rank 0, those of all ranks.

    The first error of writing is logged and ends all writing, but not the training. ``doctor`` and
    ``sinks`` receive each line of all ranks, the doctor those of this rank too.
    """

    def __init__(
        self, rank: int, steps: JsonLines, own: JsonLines, doctor: LiveDoctor, sinks: Sequence[Sink]
    ) -> None:
        self.doctor, self._rank = doctor, rank
        self._steps, self._own, self._sinks = steps, own, sinks
        self._has_failed = False

    def note(self, line: RankLine) -> None:
        """Write a line of this rank now; any thread may."""
        with self._writing():
            self._own.write(**keys_of(line))
        self.doctor.note(line)

    def write(self, line: StepLine) -> None:
        """Write a line over all ranks, on rank 0."""
        with self._writing():
            self._steps.write(**asdict(line))
            for sink in (*self._sinks, self.doctor):
                sink.write(line)

    def close(self) -> None:
        """Close all outputs."""
        self._close_record()
        with self._writing():
            self.doctor.close()

    def _close_record(self) -> None:
        """Close all outputs but the doctor's; later lines are dropped."""
        sinks, self._sinks = self._sinks, ()
        for close in (self._steps.close, self._own.close, *(sink.close for sink in sinks)):
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
            self._close_record()
