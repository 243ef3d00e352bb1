"""`observe` in another library's loop, which only calls back.

Such a loop calls back when a phase ends, and seldom when one begins. So `ObservedLoop.go_into`
names the phase from one call to the next, and ends the phase before.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsFloat, TypeGuard

import torch

from shardwise.engine.parts import Model, Optimizer
from shardwise.monitor.observer import Observation, observe

PAUSE = "pause"


class ObservedLoop:
    """An observation that is begun and ended by calls. ``options`` are those of `observe`."""

    def __init__(self, output: str | Path | None, options: Mapping[str, Any]) -> None:
        self.run: Observation | None = None
        self._output = output
        self._options = options
        self._in = ""
        self._open = ExitStack()

    def begin(self, model: Model, optimizer: Optimizer, num_done: int) -> None:
        """Begin to observe; every rank calls it. An observation that is still open ends."""
        self.end(RuntimeError("the loop broke off"))
        self.run = observe(
            model, optimizer, self._output, first_step=num_done + 1, **self._options
        ).start()

    def go_into(self, phase: str) -> None:
        """Begin a phase: "data", "save", `PAUSE`, or "" for the loop's own computation."""
        if self.run is None or phase == self._in:
            return
        self._open.close()
        self._in = phase
        if phase:
            self._open.enter_context(
                self.run.paused() if phase == PAUSE else self.run.during(phase)
            )

    def log(self, values: Mapping[str, object]) -> None:
        """Record figures of the loop; values that are no numbers are left out."""
        if self.run is not None:
            self.run.log(**{k: float(v) for k, v in values.items() if is_number(v)})

    def end(self, error: BaseException | None = None) -> None:
        """End the observation, if there is one; after an ``error`` without the other ranks."""
        self.go_into("")
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None)


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Tell whether a logged value is one number, without waiting for a tensor."""
    return isinstance(value, int | float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )
