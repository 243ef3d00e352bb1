"""What is gathered, freed and reduced, and when: every decision of a step, without torch.

The engine asks with real units; the planner asks the same code with units that only count bytes,
so a plan cannot differ from the run. What autograd needs (uses, hooks, versions) is the engine's.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from shardwise.engine.order import Order
from shardwise.engine.prefetch import units_to_prefetch
from shardwise.stages import UnitSettings

_LOOKAHEAD_UNITS = 16


class ScheduledUnit(Protocol):
    """A unit as the schedule sees it.

    ``is_resident``: its full parameters are being gathered, or hold present values already.
    """

    index: int
    used_outside: bool
    in_backward: bool

    @property
    def settings(self) -> UnitSettings:
        """What was asked for this unit; never changes during a pass."""

    @property
    def full_bytes(self) -> int:
        """Bytes of the full copy."""

    @property
    def is_resident(self) -> bool:
        """Tell whether to gather it would send nothing."""

    @property
    def is_trained(self) -> bool:
        """Tell whether any of its parameters has a gradient."""

    @property
    def backward_reads_params(self) -> bool:
        """Tell whether backward needs the full parameters."""

    def start_unshard(self) -> None:
        """Start gathering the full parameters, if they are not fresh already."""

    def finish_unshard(self) -> None:
        """Wait until the full parameters may be read."""

    def reshard(self) -> None:
        """Give the full parameters up."""


class StartedReduction(Protocol):
    """The reduction of a bucket of units: it is started, and waited for later."""

    def start(self) -> None:
        """Hand the gradients to the transport."""

    def settle(self) -> None:
        """Wait for the sums."""


U = TypeVar("U", bound=ScheduledUnit)
V = TypeVar("V", bound=ScheduledUnit, contravariant=True)
R = TypeVar("R", bound=StartedReduction)


class ReduceQueue(Generic[U, R]):
    """Gradients in buckets: when one is full it starts, and only a few are in flight.

    ``settles_at_close``: something comes after a reduction (stage 0, a replicate axis), so it is
    waited for at the end of the pass, and no collective is left for the first reader of ``p.grad``.
    """

    def __init__(
        self,
        make: Callable[[list[U]], R],
        bucket_bytes: int,
        reduces_in_flight: int,
        settles_at_close: bool,
    ) -> None:
        self._make = make
        self._bucket_bytes = bucket_bytes
        self._reduces_in_flight = reduces_in_flight
        self._settles_at_close = settles_at_close
        self.bucket: list[U] = []
        self.in_flight: list[R] = []
        self.settled: list[R] = []

    @property
    def all(self) -> list[R]:
        """Reductions that were started and not taken, oldest first."""
        return self.settled + self.in_flight

    def add(self, unit: U) -> None:
        """Take a unit's gradients; a full bucket starts, which may wait for the oldest reduction.

        **Cost** small units share one reduction of ``bucket_bytes``.
        """
        if unit in self.bucket:
            return
        self.bucket.append(unit)
        if sum(u.full_bytes for u in self.bucket) >= self._bucket_bytes:
            self._start_bucket()

    def _start_bucket(self) -> None:
        if not self.bucket:
            return
        reduction = self._make(self.bucket)
        self.bucket = []
        reduction.start()
        self.in_flight.append(reduction)
        self.settle(self._reduces_in_flight)

    def settle(self, num_left: int = 0) -> None:
        """Wait for the oldest reductions until ``num_left`` are in flight."""
        while len(self.in_flight) > num_left:
            self.in_flight[0].settle()
            self.settled.append(self.in_flight.pop(0))

    def close(self) -> None:
        """Start what is left, at the end of a backward pass."""
        self._start_bucket()
        if self._settles_at_close:
            self.settle()


class Collector(Protocol[V]):
    """What becomes of a unit's gradients when its backward has passed."""

    def add(self, unit: V) -> None:
        """Reduce them."""

    def keep(self, unit: V) -> None:
        """Keep them on this rank, for the last micro-batch of the window."""


class Schedule(Generic[U]):
    """Gathers ahead and frees, by the units' settings, their order and the prefetch budget."""

    def __init__(self, prefetch_bytes: int | None, collector: Collector[U]) -> None:
        self.units: list[U] = []
        self._prefetch_bytes = prefetch_bytes or 0
        self._asked_bytes = prefetch_bytes
        self._collector = collector
        self._order = Order(())
        self._ahead: set[int] = set()

    def settle(self, units: list[U], order: Sequence[int] | None = None) -> None:
        """Take the units over, the root first; unless asked, the largest other is the budget.

        ``order`` is the one that the first step is expected in, else that of registration.
        """
        self.units = units
        self._order = Order([u.index for u in units] if order is None else order)
        if self._asked_bytes is None:
            self._prefetch_bytes = max((u.full_bytes for u in units[1:]), default=0)

    # -- forward
    def forget(self) -> None:
        """Drop the order of a forward pass whose backward pass will not come."""
        self._order.forget()

    def before_forward(self, unit: U, *, in_backward: bool, records: bool) -> bool:
        """Unshard the unit, start gathering the next ones; tell whether its backward comes next.

        ``in_backward``: this forward runs inside the backward pass (activation checkpointing).
        """
        unit.start_unshard()
        self._ahead.discard(unit.index)  # used now: the budget is for the next ones
        upcoming = None if in_backward else self._order.visit_forward(unit.index, records)
        self._gather_ahead(unit.settings.forward_prefetch, upcoming)
        unit.finish_unshard()
        return in_backward or upcoming == []

    def after_forward(
        self,
        unit: U,
        *,
        in_backward: bool,
        expects_backward: bool,
        backward_is_next: bool,
        still_runs: bool,
        at_root: bool,
    ) -> None:
        """Free what may be freed; the root and the last unit stay for their backward.

        ``still_runs``: the unit is inside another forward of its own. ``at_root``: no forward is
        left.
        """
        settings = unit.settings
        is_last = settings.keeps_last and (backward_is_next or unit is self.units[0])
        waits = expects_backward and is_last
        if settings.stage.frees_after_forward and not waits and not in_backward:
            in_use = unit.in_backward or unit.used_outside or still_runs
            if not in_use:
                unit.reshard()
        if at_root and not in_backward:
            self._drop_prefetched()

    def note_ahead(self, unit: U) -> None:
        """Count a unit as gathered ahead, so that it is freed at the end of the forward pass."""
        self._ahead.add(unit.index)

    def _drop_prefetched(self) -> None:
        for index in self._ahead:
            if not self.units[index].used_outside:
                self.units[index].reshard()
        self._ahead.clear()

    def _gather_ahead(self, named: Sequence[U] | None, upcoming: Sequence[int] | None) -> None:
        """Start gathering the units that the settings name, else those that are expected next."""
        if named is None:
            self._prefetch(upcoming)
            return
        for unit in named:
            if not unit.is_resident:
                unit.start_unshard()
                self._ahead.add(unit.index)

    def _prefetch(self, upcoming: Sequence[int] | None) -> None:
        if not self._prefetch_bytes or not upcoming:
            return
        chosen = units_to_prefetch(
            upcoming[:_LOOKAHEAD_UNITS],
            lambda i: self.units[i].full_bytes,
            self._ahead,
            lambda i: self.units[i].is_resident,
            self._prefetch_bytes,
        )
        for index in chosen:
            self.units[index].start_unshard()
            self._ahead.add(index)

    # -- backward
    def begin_backward(self) -> None:
        """Expect the units in the reverse order of this step's forward."""
        self._order.begin_backward()

    def before_backward(self, unit: U) -> None:
        """Unshard the unit for its backward, start gathering those that follow."""
        if unit.backward_reads_params:
            unit.start_unshard()
        self._ahead.discard(unit.index)
        upcoming = self._order.visit_backward(unit.index) or ()
        upcoming = [i for i in upcoming if self.units[i].backward_reads_params]
        self._gather_ahead(unit.settings.backward_prefetch, upcoming)
        if unit.backward_reads_params:
            unit.finish_unshard()

    def reduces(self, unit: U, is_last: bool) -> bool:
        """Tell whether the unit's gradients are reduced in this micro-batch of the window."""
        return is_last or unit.settings.stage.reduce_every == "micro_batch"

    def after_backward(self, unit: U, *, is_last: bool) -> None:
        """Reduce the unit's gradients or keep them for the window's end; free its parameters."""
        if unit.is_trained:
            if self.reduces(unit, is_last):
                self._collector.add(unit)
            else:
                self._collector.keep(unit)
        if unit.settings.stage.frees_after_backward:
            unit.reshard()

    def end_pass(self) -> None:
        """Free what is full; what was recorded is the order that the next step is expected in."""
        for unit in self.units:
            if not unit.settings.stays_full:
                unit.reshard()
        self._ahead.clear()
        self._order.end_step()
