"""`observe` in another library's loop, which only calls back.

Such a loop calls back when a phase ends, and seldom when one begins. So `ObservedLoop._go_into`
names the phase from one call to the next, and ends the phase before.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsFloat, TypeGuard

import torch

from shardwise.monitor.observer import Observation, observe
from shardwise.parallel.parts import Model, Optimizer

PAUSE = "pause"


class ObservedLoop:
    """A callback that observes the steps of a loop; ``options`` are those of `observe`."""

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        self._run: Observation | None = None
        self._output = output
        self._options = options
        self._in = ""
        self._open = ExitStack()

    @property
    def run(self) -> Observation | None:
        """The observation; None before training begins and after it ends."""
        return self._run

    def _begin(self, model: Model, optimizer: Optimizer, num_done: int) -> None:
        """Begin to observe; every rank calls it. An observation that is still open ends."""
        self._end(RuntimeError("the loop broke off"))
        self._run = observe(
            model, optimizer, self._output, first_step=num_done + 1, **self._options
        ).start()

    def _go_into(self, phase: str) -> None:
        """Begin a phase: "data", "save", `PAUSE`, or "" for the loop's own computation."""
        if self._run is None or phase == self._in:
            return
        self._open.close()
        self._in = phase
        if phase:
            self._open.enter_context(
                self._run.paused() if phase == PAUSE else self._run.during(phase)
            )

    def _log(self, values: Mapping[str, object]) -> None:
        """Record figures of the loop; values that are no numbers are left out."""
        if self._run is not None:
            self._run.log(**{k: float(v) for k, v in values.items() if is_number(v)})

    def _end(self, error: BaseException | None = None) -> None:
        """End the observation, if there is one; after an ``error`` without the other ranks."""
        self._go_into("")
        run, self._run = self._run, None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None)


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Tell whether a logged value is one number, without waiting for a tensor."""
    return isinstance(value, int | float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )
