"""The reductions of a backward pass: collected in buckets, a few in flight, then ``p.grad``.

A unit's gradients are final as soon as its own reduction is finished; see `unit.sums`.
"""

from collections.abc import Callable, Sequence

from shardwise.engine.buckets import ReduceQueue
from shardwise.unit.reduce import Reduction
from shardwise.unit.sums import Held
from shardwise.unit.unit import Unit


class Reductions:
    """Gradients on their way from the units to ``p.grad``.

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
            or unit.settings.stands_while_full
            for unit in units
        )
        self._queue: ReduceQueue[Unit, Reduction] = ReduceQueue(
            Reduction,
            bucket_bytes,
            reduces_in_flight,
            waits_at_close,
            lambda unit: (id(unit.comm), unit.sums.divisor),
        )

    def allow_in_flight(self, num: int) -> None:
        """Let so many reductions be in flight from now on."""
        self._queue.reduces_in_flight = num

    @property
    def nbytes(self) -> int:
        """Bytes of the means that are not in ``p.grad`` yet."""
        return sum(r.nbytes for r in self._queue.all)

    @property
    def held(self) -> list[Held]:
        """The memory of the reductions under way."""
        return [held for reduction in self._queue.all if (held := reduction.held) is not None]

    def is_waiting(self, unit: Unit) -> bool:
        """Tell whether a unit is in a bucket, its reduction not started yet."""
        return self._queue.holds(unit)

    def add(self, unit: Unit) -> None:
        """Take a unit's gradients to reduce them, which may wait for the oldest reduction."""
        is_shared = unit.comm.axes.num_ranks > 1  # another rank may have a gradient
        if is_shared:
            self._compare()
        if is_shared or unit.sums.zero_fill or any(param.has_partial for param in unit.params):
            self._queue.add(unit)

    def keep(self, unit: Unit) -> None:
        """Keep a unit's gradients on this rank, added to those of the window so far."""
        unit.keep_partials()

    def close(self) -> None:
        """Start what is left, at the end of a backward pass."""
        self._queue.close()
        if not any(reduction.is_asked for reduction in self._queue.all):
            self._queue.take()

    def finish(self, unit: Unit | None = None) -> None:
        """Complete reductions and set ``p.grad``: those up to one unit's, or all."""
        last = None
        if unit is not None:
            last = next((r for r in reversed(self._queue.all) if unit in r.units), None)
            if last is None:
                return
        for reduction in self._queue.take(last):
            reduction.finish()

    def drop(self) -> None:
        """Complete every reduction and forget the results, after a backward pass that raised."""
        self._queue.forget_buckets()
        for reduction in self._queue.all:
            reduction.is_dropped = True
        for reduction in self._queue.take():
            reduction.drop()
