"""The thread that makes figures of what was recorded, behind the training.

Note [What the training waits for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Nothing: it appends events to a list, and hands the lists of some steps over together, as a thread
that wakes after each short step takes Python's lock from the training more often. This thread
makes spans and figures of them, tells the other ranks its own in exchanges on a group of its own
(a training collective is never behind one), and writes. Of short steps it looks at some, see Note
[Steps that are short]. If that fails, the next step or the end of the run raises. What cannot be
written, as a disk is full or a tracker is away, is told once, and no training ends for it.
"""

import json
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from heapq import nlargest
from operator import itemgetter
from typing import Any, Protocol

import torch.distributed as dist

from shardwise.comm.collective_key import ranks_of, reason_of
from shardwise.comm.control import Control, exchange_any
from shardwise.comm.process_groups import FAILED_GROUPS
from shardwise.errors import CollectiveError
from shardwise.hangs.waits import call_of_error, save_under_way
from shardwise.monitor.lines import JsonLines
from shardwise.monitor.metrics import (
    BAD_GRADIENTS,
    BAD_VALUES,
    MFU_SHARE,
    STEP_S,
    TOKENS_PER_S,
    over_ranks,
    pace,
    step_metrics,
    summarize_steps,
    tokens_over_ranks,
)
from shardwise.monitor.oom import is_out_of_memory
from shardwise.monitor.record import RunFacts, StepLine
from shardwise.monitor.sampling import Sampler
from shardwise.monitor.spans import Recorded, Span, device_spans_of, spans_of, without_lines_of
from shardwise.monitor.standing import Standing
from shardwise.names import MAIN

_LOG = logging.getLogger("shardwise")
_FIRST_STEPS = 10  # which are handed over one by one
_LONG_S = 1.0  # seconds after which a step is handed over, whether its line is due or not
_LOOK_S = 0.1  # without a step, after which the training thread is looked at
_MAX_NAMED = 8  # parameters, of those with bad gradients
_MAX_WAITED_FOR = 4  # ranks that each rank tells it has waited for
_MAX_TOKENS = 256  # steps of a line whose numbers of tokens are told to the other ranks
_MAX_TOLD = 1000  # characters of an error


class Sink(Protocol):
    """Where figures go besides the run's own files."""

    def write(self, line: StepLine) -> None:
        """Take the figures of a few steps; rank 0 calls it, behind the training."""

    def close(self) -> None:
        """Let go of what is open."""


@dataclass(frozen=True)
class ObservedStep:
    """One step, as the training hands it over."""

    step: int
    recorded: Recorded
    values: dict[str, float]  # what the loop logs until the step is handed over
    figures: Mapping[str, float]
    own_lines: Sequence[Mapping[str, Any]] = ()
    bad_gradients: Sequence[str] = ()
    keeps_timeline: bool = False


@dataclass(frozen=True)
class Outputs:
    """What this rank writes: figures of all ranks (rank 0), lines of its own."""

    steps: JsonLines
    own: JsonLines
    sinks: Sequence[Sink] = ()


class Gatherer:
    """Takes steps over, and makes lines of them; ``on_line`` hears of each, on rank 0.

    ``on_own`` hears of the lines of this rank alone. ``every``: of `Sampler`.
    """

    def __init__(
        self,
        control: Control,
        facts: RunFacts,
        outputs: Outputs,
        every: int | None,
        standing: Standing,
        on_line: Callable[[StepLine], None] = lambda line: None,
        on_own: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        self.latest: StepLine | None = None
        self._control = control
        self._facts = facts
        self._outputs = outputs
        self._every = every
        self._standing = standing
        self._on_line = on_line
        self._on_own = on_own
        self._taken: list[ObservedStep] = []  # and not yet handed over
        self._handed_over_s = 0.0
        self._batches: queue.SimpleQueue[list[ObservedStep] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._line = Sampler(every)
        self._waited_for: defaultdict[int, float] = defaultdict(float)  # by global rank
        self._of_each: list[tuple[int, Mapping[str, float], Mapping[str, float]]] = []
        self._values: dict[str, float] = {}
        self._tokens: list[int] = []  # of each step of the line
        self._bad_since: dict[str, int] = {}  # as in `StepLine`, of this rank
        self._finite_step = 0  # the last one in which gradients were looked at and finite
        self._saves: defaultdict[str, float] = defaultdict(float)  # seconds in each call
        self._trained_by = threading.get_ident()
        self._left_open: dict[str, list[tuple[str, str]]] = {}
        self._num_taken = self._last_step = 0
        self._is_abandoned = self._is_told = False
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shardwise-observe", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, step: ObservedStep) -> None:
        """Take a step over; none after an error. **Raises** what went wrong with an earlier one."""
        self.raise_once()
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

    @property
    def rank(self) -> int:
        """This rank's number among those that are observed."""
        return self._control.rank

    def note(self, **values: Any) -> None:
        """Write a line of this rank's own now."""
        with self._writing(), suppress(ValueError):  # closed already
            self._outputs.own.write(**values)

    def raise_once(self) -> None:
        """Raise what went wrong behind the training, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Return when all that was taken is told and written. **Raises** what went wrong."""
        self._hand_over()
        self._stop_thread()
        self._end(self._error)
        self.raise_once()

    def abandon(self, error: BaseException, last: ObservedStep | None, **place: Any) -> None:
        """End without the other ranks, which may never come: no more is told to them.

        ``last`` is a step that was not taken yet, ``place`` says where the error was raised.
        """
        self._taken += [] if last is None else [last]
        self._is_abandoned = True
        self._hand_over()
        self._control.break_off()
        self._stop_thread()
        self._end(error, **place)

    def _stop_thread(self) -> None:
        self._batches.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _end(self, error: BaseException | None, **place: Any) -> None:
        """Say that the run is over, which a run that hangs or was killed does not; close files."""
        outputs = self._outputs
        said = {"error": None} if error is None or _is_clean_exit(error) else _told(error) | place
        with self._writing(), suppress(ValueError):  # closed already
            at_s = round(time.time(), 3)
            outputs.own.write(kind="end", step=max(self._last_step, 1), unix_s=at_s, **said)
        for close in (outputs.steps.close, outputs.own.close, *(s.close for s in outputs.sinks)):
            with self._writing():
                close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Write inside; what fails there is told once, ends what is written, and no training."""
        try:
            yield
        except Exception as error:
            if self._is_told:
                return
            self._is_told = True
            self._outputs = Outputs(JsonLines(None), JsonLines(None))
            _LOG.warning(
                "rank %d: what observe() keeps of the run could not be written, and it writes no "
                "more: %s: %s",
                self._control.rank,
                type(error).__name__,
                error,
            )

    # -- the thread
    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                for step in batch:
                    self._last_step = step.step
                    self._note(step)
                    if self._line.ends_line:
                        self._tell(step.step)
            if self._line.num_steps:
                self._tell(self._last_step)
        except BaseException as error:
            self._error = error

    def _next_batch(self) -> list[ObservedStep] | None:
        """Wait for steps; meanwhile look whether the training thread is in a save of torch's."""
        while True:
            began_s = time.monotonic()
            try:
                return self._batches.get(timeout=_LOOK_S)
            except queue.Empty:
                if (call := save_under_way(self._trained_by)) is not None:
                    self._saves[call] += time.monotonic() - began_s

    def _note(self, step: ObservedStep) -> None:
        for call, seconds in self._saves.items():
            self._write_own(kind="other_save", step=step.step, call=call, seconds=seconds)
        self._saves.clear()
        recorded = step.recorded
        told = pace(recorded.seconds, recorded.num_tokens)
        if self._facts.peak_flops and TOKENS_PER_S in told:
            flops = told[TOKENS_PER_S] * self._facts.flops_per_token
            told[MFU_SHARE] = 100 * flops / self._facts.peak_flops
        self._of_each.append((step.step, told, step.values))
        self._tokens.append(recorded.num_tokens)
        bad = sum(not math.isfinite(value) for value in step.values.values())
        told = {**told, **step.figures, BAD_VALUES: bad}
        is_rare = step.keeps_timeline or recorded.first is not None or recorded.has_other_lines
        self._line.take(told, lambda: self._look_at(step), is_rare or bool(self._left_open))
        for (group, peer), seconds in recorded.waited_for.items():
            with suppress(KeyError, ValueError):  # a group that is gone
                self._waited_for[ranks_of(group)[peer]] += seconds
        self._values.update(step.values)
        num_bad = step.figures.get(BAD_GRADIENTS)
        looked_at = step.values | (
            {} if num_bad is None else {BAD_GRADIENTS: math.inf if num_bad else 0}
        )
        for name, value in looked_at.items():
            if not self._bad_since.get(name):
                self._bad_since[name] = 0 if math.isfinite(value) else step.step
        for line in step.own_lines:
            self._write_own(**{"kind": line["kind"], "step": step.step, **line})
        if step.bad_gradients:
            names = list(step.bad_gradients[:_MAX_NAMED])
            self._write_own(
                kind="non_finite", step=step.step, parameters=names, finite_step=self._finite_step
            )
        elif num_bad is not None:
            self._finite_step = step.step

    def _look_at(self, step: ObservedStep) -> dict[str, float]:
        """Return the figures of a step's spans; write them, if its timeline is kept."""
        recorded = step.recorded
        spans = spans_of(recorded, self._left_open)
        on_device = device_spans_of(recorded)
        by_host = without_lines_of(on_device, spans)
        if step.keeps_timeline:
            self._write_own(
                kind="timeline",
                step=step.step,
                seconds=recorded.seconds,
                spans=_rows(by_host, recorded.begin_s) + _rows(on_device, 0.0),
            )
        if not on_device:
            return step_metrics(spans, recorded.seconds)
        began_s = recorded.begin_s  # where the device's spans count from
        beside = [
            span._replace(begin_s=span.begin_s - began_s, end_s=span.end_s - began_s)
            for span in by_host
            if span.line != MAIN and "." not in span.line
        ]
        return step_metrics([*on_device, *beside], recorded.seconds)

    def _write_own(self, **line: Any) -> None:
        with self._writing():
            self._outputs.own.write(**line)
        self._on_own(line)

    def _tell(self, step: int) -> None:
        """Exchange the figures since the last time; write them, on rank 0."""
        if self._is_abandoned:
            return
        num_steps = self._line.num_steps
        mine = {**self._line.mean(), **self._standing.read(num_steps)}
        longest = nlargest(_MAX_WAITED_FOR, self._waited_for.items(), key=itemgetter(1))
        waited_ms = {r: 1e3 * s / num_steps for r, s in longest}
        is_alike = len(set(self._tokens)) == 1
        tokens, self._tokens = self._tokens[: 1 if is_alike else _MAX_TOKENS], []
        told = {"metrics": mine, "waited_for": waited_ms, "bad_since": self._bad_since}
        told["tokens"] = tokens
        self._waited_for.clear()
        rows = [json.loads(row) for row in exchange_any(self._control, json.dumps(told).encode())]
        for row, found in zip(rows, tokens_over_ranks([r["tokens"] for r in rows]), strict=False):
            row["metrics"] |= found
        metrics = over_ranks([row["metrics"] for row in rows])
        self._line.begin_line(metrics[STEP_S].max)
        waited_for = {
            rank: {int(other): ms for other, ms in row["waited_for"].items()}
            for rank, row in enumerate(rows)
        }
        self._bad_since = {}
        bad_since = {
            name: {
                r: row["bad_since"][name] for r, row in enumerate(rows) if name in row["bad_since"]
            }
            for name in sorted({n for row in rows for n, step in row["bad_since"].items() if step})
        }
        at_s = time.monotonic() - self._began_s
        of_each, self._of_each = self._of_each, []
        over_steps = (
            summarize_steps([(number, values) for number, _, values in of_each]),
            summarize_steps([(number, told) for number, told, _ in of_each]),
        )
        values = dict(self._values)
        by_name = metrics, values, waited_for, bad_since, *over_steps
        line = StepLine(step, num_steps, round(at_s, 3), *by_name)
        self.latest = line
        if self._control.rank == 0:
            with self._writing():
                self._outputs.steps.write(**asdict(line))
                for sink in self._outputs.sinks:
                    sink.write(line)
                self._on_line(line)


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code


def _told(error: BaseException) -> dict[str, Any]:
    """Return what the line of a rank's end says of an error.

    ``follows``: communication failed, as a rule since another rank had failed before.
    """
    text, call = reason_of(error), None
    follows = isinstance(error, CollectiveError)
    if isinstance(error, RuntimeError) and not follows and not is_out_of_memory(error):
        call = call_of_error(error)
    if call is not None:
        text = f"{call.text} failed: {FAILED_GROUPS.reason(call.group) or text}"
        follows = isinstance(error, dist.DistError) or "gloo" in str(error)
    return {"error": type(error).__name__, "message": text[:_MAX_TOLD], "follows": follows}


def _rows(spans: Sequence[Span], begin_s: float) -> list[list[Any]]:
    """Return spans as lists: line, phase, unit, begin and length in milliseconds, bytes."""
    return [
        [
            span.line,
            span.phase,
            span.unit,
            round(1e3 * (span.begin_s - begin_s), 4),
            round(1e3 * span.seconds, 4),
            span.num_bytes,
        ]
        for span in spans
    ]
