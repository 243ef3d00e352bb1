"""Buckets of gradients, and the limit of reductions in flight; imports no torch."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class ReducedUnit(Protocol):
    """Interface of `Unit` required by buckets; the planner has another implementation."""

    @property
    def full_bytes(self) -> int:
        """Bytes of the full copy."""


class QueuedReduction(Protocol):
    """Interface of `Reduction` required by the queue; the planner has another implementation."""

    def start(self) -> None:
        """Start the collective."""

    def wait(self) -> None:
        """Wait for the sums."""


U = TypeVar("U", bound=ReducedUnit)
R = TypeVar("R", bound=QueuedReduction)


class ReduceQueue(Generic[U, R]):
    """Buckets of gradients: a full bucket starts its reduction; few reductions are in flight.

    Units with equal ``bucket_of`` share a bucket; ``make`` makes the reduction of its units.
    ``waits_at_close``: another collective follows a reduction (stage 0, a replicate axis). Then the
    end of the pass waits for reductions, so reading ``p.grad`` starts no collective.
    ``reduces_in_flight`` is the limit, and may change.
    """

    def __init__(
        self,
        make: Callable[[list[U]], R],
        bucket_bytes: int,
        reduces_in_flight: int,
        waits_at_close: bool,
        bucket_of: Callable[[U], Hashable] = lambda unit: None,
    ) -> None:
        self._make = make
        self._bucket_bytes = bucket_bytes
        self.reduces_in_flight = reduces_in_flight
        self._waits_at_close = waits_at_close
        self._bucket_of = bucket_of
        self._buckets: dict[Hashable, list[U]] = {}
        self._num_bytes = Counter[Hashable]()  # in each bucket
        self._in_flight: list[R] = []  # oldest first
        self._waited_for: list[R] = []  # ended, and not collected yet

    @property
    def all(self) -> list[R]:
        """The reductions started and not collected yet, oldest first."""
        return self._waited_for + self._in_flight

    def holds(self, unit: U) -> bool:
        """Tell whether a unit is in a bucket that has not started."""
        return any(unit in bucket for bucket in self._buckets.values())

    def add(self, unit: U) -> None:
        """Add a unit's gradients to a bucket; a full bucket starts and may wait for the oldest.

        **Cost** small units share one reduction of ``bucket_bytes``.
        """
        key = self._bucket_of(unit)
        bucket = self._buckets.setdefault(key, [])
        if unit in bucket:
            return
        bucket.append(unit)
        self._num_bytes[key] += unit.full_bytes
        if self._num_bytes[key] >= self._bucket_bytes:
            self._start_bucket(key)

    def _start_bucket(self, key: Hashable) -> None:
        del self._num_bytes[key]
        reduction = self._make(self._buckets.pop(key))
        reduction.start()
        self._in_flight.append(reduction)
        self._wait(self.reduces_in_flight)

    def _wait(self, num_left: int = 0) -> None:
        """Wait for the oldest reductions until ``num_left`` are in flight."""
        while len(self._in_flight) > num_left:
            self._in_flight[0].wait()
            self._waited_for.append(self._in_flight.pop(0))

    def close(self) -> None:
        """Start the remaining buckets at the end of a backward pass."""
        for key in list(self._buckets):
            self._start_bucket(key)
        if self._waits_at_close:
            self._wait()

    def collect(self, last: R | None = None) -> list[R]:
        """Wait for the reductions up to ``last``, or for all; remove and return them in order."""
        count = len(self.all) if last is None else self.all.index(last) + 1
        self._wait(len(self.all) - max(count, len(self._waited_for)))
        collected = self._waited_for[:count]
        del self._waited_for[:count]
        return collected

    def forget_buckets(self) -> None:
        """Forget units whose reduction has not started, after a pass that raised."""
        self._buckets = {}
        self._num_bytes.clear()
