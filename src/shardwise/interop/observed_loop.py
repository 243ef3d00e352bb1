"""`observe` in a loop that another library runs and that only calls back.

Such a loop says when a thing is over, seldom when it begins. So what goes on from one call to the
next is told by `ObservedLoop.go_into`, which ends what went on before.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
        """Observe from now on; every rank calls it. What an earlier run left open is over."""
        self.end(RuntimeError("the loop broke off"))
        self.run = observe(
            model, optimizer, self._output, first_step=num_done + 1, **self._options
        ).start()

    def go_into(self, phase: str) -> None:
        """Tell that the loop does this from now on: "data", "save", `PAUSE`, or "" for its own."""
        if self.run is None or phase == self._in:
            return
        self._open.close()
        self._in = phase
        if phase:
            what = self.run.paused() if phase == PAUSE else self.run.during(phase)
            self._open.enter_context(what)

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep figures of the loop's own; what is no number is left out."""
        if self.run is not None:
            self.run.log(**{k: float(v) for k, v in values.items() if is_number(v)})

    def end(self, error: BaseException | None = None) -> None:
        """Stop to observe, if it goes on; after an ``error`` without the other ranks."""
        self.go_into("")
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None)


def is_number(value: Any) -> bool:
    """Tell whether something logged is one number; of a tensor without waiting for it."""
    return isinstance(value, int | float) or getattr(value, "numel", lambda: 0)() == 1
