"""The reduction of one bucket of units: from full gradients to the parameters' ``grad``."""

from collections.abc import Sequence

import torch

from shardwise.unit.param import ShardedParam
from shardwise.unit.states import GradState
from shardwise.unit.sums import Held, Running
from shardwise.unit.unit import Unit


class Reduction:
    """Gradients of one or several units, which share a mesh and a way to be summed."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self._names = [unit.name for unit in units]
        self._tracer = units[0].comm.tracer
        # A parameter that asks its unit gets its gradient when it asks: a pass that raises after
        # all must leave what was there. An attribute, and hooks that step in backward, cannot wait.
        self.is_asked = any(param.form.asks_unit for unit in units for param in unit.params)
        self.is_dropped = False  # its result is not wanted any more
        self._running: Running | None = None
        self._first: list[ShardedParam] = []  # got a gradient from it and had none before

    @torch.no_grad()
    def start(self) -> None:
        """Hand the gradients to the transport. **State** PARTIAL -> REDUCING."""
        with self._tracer.span("reduce", *self._names):
            for unit in self.units:
                unit.enter_grad_state(GradState.PARTIAL)
                unit.enter_grad_state(GradState.REDUCING)
                unit.num_reducing += 1
            self._running = self.units[0].sums.start(self.units)
            for unit in self.units:
                unit.has_local_sum = False

    def wait(self) -> None:
        """Wait for the sums; set ``p.grad`` where nobody asks for it."""
        if self._running is None:
            return
        with self._tracer.span("wait_reduce", *self._names):
            self._running.wait()
        if not self.is_asked and not self.is_dropped:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait; set ``p.grad``, or add to it. **State** REDUCING -> REDUCED."""
        if self._running is None:
            return
        means = self._running.finish()
        self._end()
        for param, mean in means.items():
            if param.grad is None:
                self._first.append(param)
            param.form.add_to_grad(param, mean)
        self._forget_grads_if_none()

    def drop(self) -> None:
        """Wait and forget the result, after a pass that was cut short."""
        if self._running is not None:
            self._running.drop()
            self._end()
        for param in self._first:
            param.sharded.grad = None
        self._forget_grads_if_none()

    def _end(self) -> None:
        self._running = None
        for unit in self.units:
            unit.num_reducing -= 1
            if not unit.num_reducing and unit.grad_state is GradState.REDUCING:
                unit.enter_grad_state(GradState.PARTIAL if unit.is_deferred else GradState.REDUCED)

    def _forget_grads_if_none(self) -> None:
        for unit in self.units:
            if not unit.num_reducing:
                unit.forget_grads_if_none()

    @property
    def held(self) -> Held | None:
        """The memory that it takes as long as it is under way."""
        return None if self._running is None else self._running.held(tuple(self._names))

    @property
    def nbytes(self) -> int:
        """Bytes of the means, as long as the reduction is under way."""
        return 0 if self._running is None else self._running.nbytes
