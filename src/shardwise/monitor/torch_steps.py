"""Calls of torch about an optimizer's step: loss scalers, clipping, learning rate schedulers.

Note [Calls that are seen]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A loss scaler that skips a step calls no hook of the optimizer, and clipping leaves no trace of the
norm before it. So while a run is observed, `torch.amp.GradScaler.step` and
`torch.nn.utils.clip_grad_norm_` report their calls. The latter keeps its function in a cell of a
closure, so it is seen under any name that it was imported by.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

from shardwise.monitor import metrics as m
from shardwise.monitor.record import SkippedSteps

_REPORTED_SKIPS = (8, 16, 32, 64)  # steps in a row


class StepWatcher(Protocol):
    """Receives the calls of the thread that trains."""

    def see_norm(self, norm: torch.Tensor, max_norm: float) -> None:
        """Receive the norm of gradients before they were clipped."""

    def see_scaled_step(self, scaler: torch.amp.GradScaler, optimizer: object) -> None:
        """Learn that a loss scaler has taken a step, or skipped it."""


class StepCalls:
    """Reports the calls of a process to watchers, each of the thread on which it was begun."""

    def __init__(self) -> None:
        self._watchers: list[tuple[int, StepWatcher]] = []
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def reporting(self, watcher: StepWatcher) -> Iterator[None]:
        """Report calls inside to a watcher. **Cost** a microsecond for each call."""
        if not self._watchers:
            self._restore = self._wrap()
        entry = threading.get_ident(), watcher
        self._watchers.append(entry)
        try:
            yield
        finally:
            self._watchers.remove(entry)
            if not self._watchers:
                self._restore()

    def see_norm(self, norm: object, max_norm: float) -> None:
        """Report a norm; of one that is not whole on this rank nothing is reported."""
        if type(norm) is torch.Tensor:
            for watcher in self._of_thread():
                watcher.see_norm(norm.detach(), float(max_norm))

    def _of_thread(self) -> list[StepWatcher]:
        thread = threading.get_ident()
        return [watcher for at, watcher in self._watchers if at == thread]

    def _wrap(self) -> Callable[[], None]:
        step = torch.amp.GradScaler.step
        cells = clip_grad.clip_grad_norm_.__closure__ or ()
        clip = getattr(clip_grad.clip_grad_norm_, "__wrapped__", None)
        cell = next((each for each in cells if each.cell_contents is clip), None)

        def scaled(scaler: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(scaler, optimizer, *args, **kwargs)
            if scaler.is_enabled():
                for watcher in self._of_thread():
                    watcher.see_scaled_step(scaler, optimizer)
            return result

        def clipped(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            norm = clip(parameters, max_norm, *args, **kwargs)  # type: ignore[misc]
            self.see_norm(norm, max_norm)
            return norm

        def restore() -> None:
            torch.amp.GradScaler.step = step  # type: ignore[method-assign]
            if cell is not None:
                cell.cell_contents = clip

        torch.amp.GradScaler.step = scaled  # type: ignore
        if cell is not None:
            cell.cell_contents = clipped
        return restore


STEP_CALLS = StepCalls()


class StepFigures:
    """The norms before clipping and the loss scales of one run; a `StepWatcher`.

    ``num_steps`` returns how many steps the last of ``optimizers`` has taken. ``is_detailed`` tells
    whether this step is looked at: a read of a value may wait for the device.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        num_steps: Callable[[], int],
        is_detailed: Callable[[], bool],
        note: Callable[[SkippedSteps], None],
    ) -> None:
        self._optimizer: object = optimizers[-1]
        self._num_steps, self._is_detailed, self._note = num_steps, is_detailed, note
        self._steps_before = 0
        self._skipped, self._in_a_row = 0, 0
        self._has_scaler = False
        self._figures: dict[str, float | torch.Tensor] = {}

    def see_norm(self, norm: torch.Tensor, max_norm: float) -> None:
        """Keep the norm before clipping, if the step is looked at."""
        if self._is_detailed():
            self._figures |= {m.GRAD_NORM: norm.detach().clone(), m.MAX_NORM: max_norm}

    def see_scaled_step(self, scaler: torch.amp.GradScaler, optimizer: object) -> None:
        """Count a skipped step, and read the scale if the step was skipped or is looked at."""
        if getattr(optimizer, "optimizer", optimizer) is not self._optimizer:
            return
        self._has_scaler = True
        num_steps = self._num_steps()
        was_taken, self._steps_before = num_steps != self._steps_before, num_steps
        if was_taken:
            self._in_a_row = 0
            if self._is_detailed():
                self._figures[m.LOSS_SCALE] = scaler.get_scale()
            return
        self._skipped, self._in_a_row = self._skipped + 1, self._in_a_row + 1
        if self._in_a_row in _REPORTED_SKIPS or self._in_a_row % _REPORTED_SKIPS[-1] == 0:
            self._note(SkippedSteps(max(num_steps, 1), self._in_a_row, scaler.get_scale()))

    def take(self) -> dict[str, float | torch.Tensor]:
        """Return the figures of the step that has ended."""
        found, self._figures = self._figures, {}
        if self._has_scaler:
            found[m.SKIPPED_STEPS], self._skipped = self._skipped, 0
        return found

    def clear(self) -> None:
        """Keep no optimizer alive."""
        self._optimizer = None


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Return the learning rate schedulers of optimizers.

    An optimizer does not know its scheduler, which has left the first rate in its groups.

    **Cost** looks at all of Python's objects, some milliseconds to a tenth of a second, if there is
    a scheduler.
    """
    scheduled = [o for o in optimizers if any("initial_lr" in group for group in o.param_groups)]
    owners = gc.get_referrers(*scheduled) if scheduled else []
    dicts = [owner for owner in owners if isinstance(owner, dict)]
    owners += gc.get_referrers(*dicts) if dicts else []
    return [owner for owner in owners if isinstance(owner, LRScheduler)]


def is_stepped(scheduler: LRScheduler) -> bool:
    """Tell whether ``step()`` was called; the constructor counts as one call."""
    return getattr(scheduler, "_step_count", 0) > 1 or scheduler.last_epoch > 0
