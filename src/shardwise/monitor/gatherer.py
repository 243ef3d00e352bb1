"""The thread that makes lines of recorded steps, behind the training.

Note [What the training waits for]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Nothing. The training appends events to a list and hands over the lists of some steps at a time, as
a thread that wakes after each short step takes Python's lock from the training more often. This
thread turns them into spans and figures, exchanges figures with the other ranks on a separate group
(a training collective is never behind one), and writes lines. If that fails, the next step or the
end of the run raises. If a line cannot be written (a full disk, an unreachable tracker), a warning
is logged once and the training continues.
"""

import queue
import threading
import time
from dataclasses import replace
from typing import TypedDict

import torch.distributed as dist

from shardwise.comm.collective_key import reason_of
from shardwise.comm.control import Control
from shardwise.comm.process_groups import FAILED_GROUPS
from shardwise.errors import CollectiveError
from shardwise.hangs.diagnosis import call_of_error
from shardwise.hangs.heartbeat import save_under_way
from shardwise.monitor.memory import is_out_of_memory
from shardwise.monitor.outputs import Outputs
from shardwise.monitor.rank_lines import End
from shardwise.monitor.record import StepLine
from shardwise.monitor.step_lines import FIRST_STEPS, LineMaker, ObservedStep

_LONG_S = 1.0  # seconds after which a step is handed over, even if its line is not due
_LOOK_S = 0.1  # without a step, after which the training thread is looked at
_MAX_MESSAGE = 1000  # characters of an error


class Gatherer:
    """Takes over steps from the training thread, and hands them to a thread that makes lines.

    ``lines`` makes them; ``rank`` is among those that are observed, ``every`` is as in `Sampler`.
    Made on the training thread.
    """

    def __init__(
        self, control: Control, lines: LineMaker, outputs: Outputs, every: int | None
    ) -> None:
        self.outputs, self.rank = outputs, control.rank
        self._control, self._every = control, every
        self._taken: list[ObservedStep] = []  # and not yet handed over
        self._num_taken, self._handed_over_s = 0, 0.0
        self._batches: queue.SimpleQueue[list[ObservedStep] | None] = queue.SimpleQueue()
        self._lines = lines
        self._error: BaseException | None = None
        self._trained_by = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="shardwise-observe", daemon=True)

    @property
    def latest(self) -> StepLine | None:
        """The newest line over all ranks."""
        return self._lines.latest

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
        is_first = self._num_taken <= FIRST_STEPS
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
        self._lines.is_abandoned = True
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
        if self._lines.is_abandoned:
            self._control.break_off()
        self._batches.put(None)
        if self._thread.is_alive():
            self._thread.join()
        error = error or self._error
        is_clean = error is None or (isinstance(error, SystemExit) and not error.code)
        end = End(max(self._lines.last_step, 1), None, round(time.time(), 3))
        if error is not None and not is_clean:
            end = replace(end, during=during, phase=phase, unit=unit, **_describe_error(error))
        self.outputs.note(end)
        self.outputs.close()

    # -- the thread
    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                for step in batch:
                    self._lines.take(step)
            self._lines.end()
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
                    self._lines.saves[call] += time.monotonic() - began_s


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
