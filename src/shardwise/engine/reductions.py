"""Gradient reductions of a backward pass: buckets, a few in flight, then ``p.grad``.

A unit's gradients are final when its reduction is finished; see `unit.sums`.
"""

from collections.abc import Callable, Sequence

import torch

from shardwise.engine.buckets import ReduceQueue
from shardwise.unit.param import ShardedParam
from shardwise.unit.sums import BuffersInFlight, RunningSum
from shardwise.unit.unit import Unit


class Reduction:
    """The reduction of one or several units, which share a mesh and `SumSettings`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self._names = [unit.name for unit in units]
        self._tracer = units[0].comm.tracer
        # A ShardTensor finishes the reduction when its ``p.grad`` is read, so that a pass that
        # raises leaves the old gradient. A DTensor, and hooks that step in backward, cannot: their
        # ``p.grad`` is set as soon as the sum is there.
        self.finishes_reduction_on_read = any(
            p.form.finishes_reduction_on_read for u in units for p in u.params
        )
        self.is_dropped = False  # True if the result is to be discarded
        self._running: RunningSum | None = None  # None before the start and after the end
        self._first: list[ShardedParam] = []  # parameters that had no ``p.grad`` before

    @torch.no_grad()
    def start(self) -> None:
        """Start the reduce-scatter. **State** PARTIAL -> REDUCING."""
        with self._tracer.span("reduce", *self._names):
            for unit in self.units:
                unit.grads.begin_reducing()
            self._running = RunningSum(self.units, self.units[0].grads.sum_settings)
            for unit in self.units:
                unit.grads.has_local_sum = False

    def wait(self) -> None:
        """Wait for the sums; set ``p.grad`` unless a read of it does."""
        if self._running is None:
            return
        with self._tracer.span("wait_reduce", *self._names):
            self._running.wait()
        if not self.finishes_reduction_on_read and not self.is_dropped:
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
        """Wait and discard the result, after a pass that raised."""
        if self._running is not None:
            self._running.finish()  # its memory must outlive the collectives in flight
            self._end()
        for param in self._first:
            param.sharded.grad = None
        self._forget_grads_if_none()

    def _end(self) -> None:
        self._running = None
        for unit in self.units:
            unit.grads.end_reducing(is_deferred=unit.is_deferred)

    def _forget_grads_if_none(self) -> None:
        for unit in self.units:
            if not unit.grads.num_reducing:
                unit.grads.enter_empty_if_none()

    @property
    def held(self) -> BuffersInFlight | None:
        """The memory that the reduction holds while in flight, else None."""
        return (
            None if self._running is None else self._running.buffers_in_flight(tuple(self._names))
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the means while the reduction is in flight, else 0."""
        return 0 if self._running is None else self._running.nbytes


class Reductions:
    """The reductions of a model's units.

    ``compare`` is called before a reduction that other ranks take part in.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        bucket_bytes: int,
        reduces_in_flight: int,
        compare: Callable[[], None],
    ) -> None:
        self._compare = compare
        waits_at_close = any(
            unit.comm.axes.replicate is not None
            or not unit.settings.stage.shards_state
            or unit.settings.full_between_calls
            for unit in units
        )
        self._queue: ReduceQueue[Unit, Reduction] = ReduceQueue(
            Reduction,
            bucket_bytes,
            reduces_in_flight,
            waits_at_close,
            lambda unit: (id(unit.comm), unit.grads.sum_settings.key),
        )

    def allow_in_flight(self, num: int) -> None:
        """Set the limit of reductions in flight."""
        self._queue.reduces_in_flight = num

    @property
    def nbytes(self) -> int:
        """Bytes of the means that are not in ``p.grad`` yet."""
        return sum(reduction.nbytes for reduction in self._queue.all)

    @property
    def held(self) -> list[BuffersInFlight]:
        """The memory of the reductions in flight."""
        return [held for reduction in self._queue.all if (held := reduction.held) is not None]

    def is_waiting(self, unit: Unit) -> bool:
        """Tell whether a unit is in a bucket that has not started."""
        return self._queue.holds(unit)

    def add(self, unit: Unit) -> None:
        """Reduce a unit's gradients; this may wait for the oldest reduction."""
        is_shared = unit.comm.axes.num_ranks > 1  # another rank may have a gradient
        if is_shared:
            self._compare()
        if (
            is_shared
            or unit.grads.sum_settings.zero_fill
            or any(param.gradient.has_partial for param in unit.params)
        ):
            self._queue.add(unit)

    def keep(self, unit: Unit) -> None:
        """Keep a unit's gradients on this rank, added to those of the window so far."""
        unit.grads.accumulate_partials()

    def close(self) -> None:
        """Start the remaining reductions at the end of a backward pass."""
        self._queue.close()
        if not any(reduction.finishes_reduction_on_read for reduction in self._queue.all):
            self._queue.collect()

    def finish(self, unit: Unit | None = None) -> None:
        """Complete reductions, up to one unit's or all, and set ``p.grad``."""
        last = None
        if unit is not None:
            last = next((r for r in reversed(self._queue.all) if unit in r.units), None)
            if last is None:
                return
        for reduction in self._queue.collect(last):
            reduction.finish()

    def drop(self) -> None:
        """Complete every reduction and discard the results, after a backward pass that raised."""
        self._queue.forget_buckets()
        for reduction in self._queue.all:
            reduction.is_dropped = True
        for reduction in self._queue.collect():
            reduction.drop()
