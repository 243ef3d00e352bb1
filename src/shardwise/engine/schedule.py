"""The schedule of gathers, frees and reductions: every decision of a step, without torch.

The engine calls it with real units. The planner calls it with units that only count bytes, so a
plan cannot differ from the run. `passes` holds autograd's part (calls, hooks, versions).

Note [Ranks that skip layers]
Ranks may run different units (layerdrop, stochastic depth, a head per task, experts). But all ranks
must start every collective, on NCCL in one order. So if full parameters stay (stages 0 to 2),
gathers and reductions follow an order that all ranks share, not the order in which a rank runs. A
unit's reduction waits for those of the units before it, and a unit that does not run sends zeros.
The shared order is registration order during the first backward pass, and then the order that rank
0 has seen in that pass. If all ranks run all units in one order, nothing waits.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shardwise.stages import UnitSettings


class OrderPrediction:
    """Predicts the next units, forward and backward, from the order of the step before.

    Unlike `ReduceOrder` and `GatherOrder`, it is a guess of this rank and binds nothing.
    ``forward`` is the expected order of a forward pass. ``seen`` is the forward order that belongs
    to the current backward pass, or empty.
    """

    def __init__(self, registration_order: Sequence[int]) -> None:
        self.forward = list(registration_order)
        self._backward: list[int] = []
        self.seen: list[int] = []
        self._forward_at = -1
        self._backward_at = -1

    def visit_forward(self, unit: int) -> list[int] | None:
        """Record that a unit runs forward; return the units expected after it, nearest first.

        Return None if the unit was not expected.
        """
        self._forward_at = _find(self.forward, unit, self._forward_at + 1)
        return None if self._forward_at < 0 else self.forward[self._forward_at + 1 :]

    def begin_backward(self, forward: Sequence[int]) -> None:
        """Set the backward prediction: the reverse of the ``forward`` order."""
        self.seen = list(forward)
        self._backward = self.seen[::-1]
        self._backward_at = -1

    def visit_backward(self, unit: int) -> list[int] | None:
        """Record that a unit's backward begins; return the units expected after it."""
        self._backward_at = _find(self._backward, unit, self._backward_at + 1)
        return None if self._backward_at < 0 else self._backward[self._backward_at + 1 :]

    def end_step(self) -> None:
        """Use the order seen in this step as the prediction for the next step."""
        if self.seen:
            self.forward = self.seen
            self.seen = []
        self._forward_at = self._backward_at = -1


def _find(order: Sequence[int], unit: int, start: int) -> int:
    """Return the next place of ``unit`` at or after ``start``, else its first, else -1."""
    for begin in (start, 0):
        try:
            return order.index(unit, begin)
        except ValueError:
            continue
    return -1


def in_forward_order(units: Iterable[Any]) -> list[Any]:
    """Return the units in the order in which each model's next forward pass needs them."""
    places: dict[int, tuple[int, dict[int, int]]] = {}
    for unit in units:
        if id(unit.engine) not in places:
            has_engine = unit.engine is not None
            known = unit.engine.schedule.order.forward if has_engine else []
            order = {index: place for place, index in enumerate(known)}
            places[id(unit.engine)] = len(places), order

    def sort_key(unit: Any) -> tuple[int, int, int]:
        model, order = places[id(unit.engine)]
        return model, order.get(unit.index, len(order)), unit.index

    return sorted(units, key=sort_key)


def units_to_prefetch(
    upcoming: Sequence[int],
    full_bytes: Callable[[int], int],
    prefetched: Collection[int],
    is_resident: Callable[[int], bool],
    budget_bytes: int,
) -> list[int]:
    """Return the units to prefetch now, in order.

    ``upcoming`` are the expected next units, nearest first. Units in ``prefetched`` are gathered
    and not used yet; they count against the budget. Resident units hold current values and cost
    nothing. The first unit that does not fit ends the list: no later unit overtakes it.
    """
    left = budget_bytes - sum(full_bytes(unit) for unit in prefetched)
    chosen: list[int] = []
    for unit in upcoming:
        if unit in prefetched or unit in chosen or is_resident(unit):
            continue
        left -= full_bytes(unit)
        if left < 0:
            break
        chosen.append(unit)
    return chosen


class ReduceOrder:
    """The fixed order in which all ranks reduce units, whatever the order of their backward.

    A unit is *ready* when its backward has ended on this rank. It is reduced after all units that
    precede it in the order.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._places = {index: place for place, index in enumerate(order)}
        self._next = 0  # the place of the first unit that is not released yet
        self._ready: set[int] = set()  # in this pass

    def begin(self) -> None:
        """Begin a pass; no unit is ready."""
        self._next = 0
        self._ready.clear()

    def mark_ready(self, index: int) -> list[int]:
        """Record that a unit is ready; return the units to reduce now, in order.

        A unit whose place has passed already (a late gradient) is returned at once.
        """
        if self._places[index] < self._next:
            return [index]
        self._ready.add(index)
        begin = self._next
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._next += 1
        return self._order[begin : self._next]

    def is_blocked(self, index: int) -> bool:
        """Tell whether the unit is ready and waits for a unit before it."""
        return index in self._ready and self._places[index] >= self._next

    def end(self) -> list[int]:
        """End the pass; return the units that were not reduced, in order."""
        remaining = self._order[self._next :]
        self._next = len(self._order)
        return remaining


class GatherOrder:
    """The order in which all ranks gather units, and how far this forward pass has come."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._places: dict[int, int] = {}
        self._num_reached = 0  # the furthest place in the order where a unit ran in this pass

    def set_order(self, order: Sequence[int]) -> None:
        """Set the order of all units."""
        self._order = list(order)
        self._places = {index: place for place, index in enumerate(order)}

    def preceding(self, index: int) -> list[int]:
        """Return the units before ``index`` in the shared order."""
        return self._order[: self._places[index]]

    def skipped_before(self, index: int | None = None) -> list[int]:
        """Return the units that this rank has skipped before unit ``index``, or before the end."""
        return self._order[self._num_reached : None if index is None else self._places[index]]

    def advance_to(self, index: int) -> list[int]:
        """Record that the unit runs; return the units after it.

        Gather the units of `skipped_before` first.
        """
        place = self._places[index]
        self._num_reached = max(self._num_reached, place)
        return self._order[place + 1 :]

    def end(self) -> None:
        """End the forward pass."""
        self._num_reached = 0


def complete_order(order: Iterable[int], indices: Sequence[int]) -> list[int]:
    """Return ``order`` without repetitions, followed by the ``indices`` that it lacks."""
    return list(dict.fromkeys([*order, *indices]))


_LOOKAHEAD_UNITS = 16
_READ_AHEAD_UNITS = 3  # a disk reads no more than its buffers hold, which are for 3 units


class ScheduledUnit(Protocol):
    """Interface of `Unit` required by the schedule; the planner has another implementation.

    ``is_resident``: its full parameters are being gathered, or hold current values.
    """

    index: int

    @property
    def settings(self) -> UnitSettings:
        """The unit's settings, which never change during a pass."""

    @property
    def full_bytes(self) -> int:
        """Bytes of the full copy."""

    @property
    def is_resident(self) -> bool:
        """Tell whether a gather of the unit would send nothing."""

    @property
    def is_trained(self) -> bool:
        """Tell whether any of its parameters requires a gradient."""

    def read_ahead(self) -> None:
        """Start reading slices that are offloaded to files, for a later gather."""

    def start_unshard(self) -> None:
        """Start gathering the full parameters unless they are current."""

    def finish_unshard(self) -> None:
        """Wait until the full parameters may be read."""

    def reshard(self) -> None:
        """Free the full parameters."""


U = TypeVar("U", bound=ScheduledUnit)
V = TypeVar("V", bound=ScheduledUnit, contravariant=True)


class GradReducer(Protocol[V]):
    """Receiver of a unit's gradients after its backward: `Reductions`, or the planner's."""

    def add(self, unit: V) -> None:
        """Reduce the unit's gradients."""

    def keep(self, unit: V) -> None:
        """Keep the unit's gradients on this rank until the window's last micro-batch."""

    def is_waiting(self, unit: V) -> bool:
        """Tell whether the unit's reduction waits in a bucket."""


class Schedule(Generic[U]):
    """Prefetches and frees units, by their settings, their order and the prefetch budget.

    ``has_peers``: other ranks run the same units, or some of them. Then, if parameters stay,
    gathers and reductions follow one order on all ranks. If parameters are freed and units may be
    skipped, only reductions do. See Note [Ranks that skip layers].
    """

    def __init__(
        self, prefetch_bytes: int | None, reducer: GradReducer[U], *, has_peers: bool = False
    ) -> None:
        self.units: list[U] = []
        self.reduces_in_order = False
        self._gathers_in_order = False
        self._has_peers = has_peers
        self._prefetch_bytes = prefetch_bytes or 0
        self._requested_bytes = prefetch_bytes  # None: the default of `take_units`
        self._reducer = reducer
        self.order = OrderPrediction(())
        self._prefetched: set[int] = set()  # gathered and not used yet; they use up the budget
        self._kept_full: set[int] = set()  # used outside their modules: full until backward ends
        self._in_backward: set[int] = set()  # units whose backward has begun and not ended
        self._gather_order = GatherOrder()
        self._reduce_order = ReduceOrder(())
        self._closed: list[int] = []  # units in the order in which their backward ended

    def take_units(
        self,
        units: list[U],
        order: Sequence[int] | None = None,
        closes: Sequence[int] | None = None,
    ) -> None:
        """Take over the units, the root first; the default budget is the largest other unit.

        ``order`` is the expected order of the first step, by default registration order. ``closes``
        is the expected order in which backward closes units, by default the reverse.
        """
        self.units = units
        frees = any(u.settings.stage.frees_after_backward for u in units)
        self._gathers_in_order = self._has_peers and not frees
        may_skip = not frees or any(u.settings.optional for u in units)
        self.reduces_in_order = self._has_peers and may_skip
        self.order = OrderPrediction([u.index for u in units] if order is None else order)
        self.share_order(order or (), closes or ())
        if self._requested_bytes is None:
            self._prefetch_bytes = max((u.full_bytes for u in units[1:]), default=0)

    def share_seen(self, broadcast: Callable[[bytes], bytes]) -> bool:
        """Use rank 0's order of this pass on all ranks; tell whether rank 0 has one.

        A pass outside the hooks has no order (`gathered` ends such passes).
        """
        seen = json.dumps([self.order.seen, self._closed]).encode()
        gathers, closes = json.loads(broadcast(seen))
        if gathers:
            self.share_order(gathers, closes)
        return bool(gathers)

    def share_order(self, gathers: Sequence[int], closes: Sequence[int]) -> None:
        """Set the orders of gathers and reductions that all ranks share from now on."""
        indices = [u.index for u in self.units]
        self._gather_order.set_order(complete_order(gathers, indices))
        self._reduce_order = ReduceOrder(complete_order(closes, indices[::-1]))
        self._reduce_order.end()

    # -- forward
    def before_forward(self, unit: U, *, in_backward: bool) -> bool:
        """Gather the unit, start gathering the next ones; tell whether its backward comes next.

        ``in_backward``: this forward runs inside the backward pass (activation checkpointing).
        """
        following = None
        if self._gathers_in_order and not in_backward:
            self._join_gathers(self._gather_order.skipped_before(unit.index))
            following = self._gather_order.advance_to(unit.index)
        unit.start_unshard()
        self._prefetched.discard(unit.index)
        upcoming = None if in_backward else self.order.visit_forward(unit.index)
        expected = upcoming if following is None else following
        self._gather_next(unit.settings.forward_prefetch, expected)
        unit.finish_unshard()
        return in_backward or upcoming == []

    def start_unshard(self, unit: U) -> None:
        """Start gathering a unit; with a shared order, gather the units before it first."""
        if self._gathers_in_order:
            self._join_gathers(self._gather_order.preceding(unit.index))
        unit.start_unshard()

    def _join_gathers(self, indices: Sequence[int]) -> None:
        """Join the gathers of units that other ranks may run and this rank does not."""
        for index in indices:
            if not self.units[index].is_resident:
                self.units[index].start_unshard()
                self._prefetched.add(index)

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
        """Free the unit if possible; the root and the last unit stay full for their backward.

        ``still_runs``: another forward of the unit is running. ``at_root``: no forward is left.
        """
        settings = unit.settings
        is_last = settings.keeps_last and (backward_is_next or unit is self.units[0])
        waits = expects_backward and is_last
        in_use = still_runs or unit.index in self._in_backward or unit.index in self._kept_full
        if settings.stage.frees_after_forward and not (waits or in_backward or in_use):
            unit.reshard()
        if at_root and not in_backward:
            if self._gathers_in_order:
                self._join_gathers(self._gather_order.skipped_before())
                self._gather_order.end()
            self._drop_prefetched()

    def mark_prefetched(self, unit: U) -> None:
        """Count the unit as prefetched, so that the end of the forward pass frees it."""
        self._prefetched.add(unit.index)

    def keep_full(self, unit: U) -> None:
        """Keep the unit full until the backward pass ends."""
        self._kept_full.add(unit.index)

    def _drop_prefetched(self) -> None:
        for index in self._prefetched - self._kept_full:
            self.units[index].reshard()
        self._prefetched.clear()

    def _gather_next(self, named: Sequence[U] | None, upcoming: Sequence[int] | None) -> None:
        """Prefetch the units that settings name, or with a shared order the expected next units."""
        if named is None or self._gathers_in_order:
            self._prefetch(upcoming)
            return
        for unit in named:
            if not unit.is_resident:
                unit.start_unshard()
                self._prefetched.add(unit.index)

    def _prefetch(self, upcoming: Sequence[int] | None) -> None:
        if not self._prefetch_bytes or not upcoming:
            return
        # With a shared order, skipped units do not count as prefetched any more.
        prefetched = self._prefetched
        if self._gathers_in_order:
            prefetched = prefetched.intersection(upcoming)
        chosen = units_to_prefetch(
            upcoming[:_LOOKAHEAD_UNITS],
            lambda i: self.units[i].full_bytes,
            prefetched,
            lambda i: self.units[i].is_resident,
            self._prefetch_bytes,
        )
        for index in chosen:
            self.units[index].start_unshard()
            self._prefetched.add(index)
        for index in upcoming[:_READ_AHEAD_UNITS]:
            self.units[index].read_ahead()

    # -- backward
    def begin_backward(self, order: Sequence[int]) -> None:
        """Begin a pass that is expected to take the units in the reverse of ``order``."""
        self.order.begin_backward(order)
        self._closed = []
        if self.reduces_in_order:
            self._reduce_order.begin()

    def before_backward(self, unit: U) -> None:
        """Gather the unit for its backward; start gathering the next ones."""
        self._in_backward.add(unit.index)
        if unit.settings.reads_in_backward:
            unit.start_unshard()
        self._prefetched.discard(unit.index)
        upcoming = self.order.visit_backward(unit.index) or ()
        upcoming = [i for i in upcoming if self.units[i].settings.reads_in_backward]
        self._gather_next(unit.settings.backward_prefetch, upcoming)
        if unit.settings.reads_in_backward:
            unit.finish_unshard()

    def reduces(self, unit: U, is_last: bool | None) -> bool:
        """Tell whether the unit's gradients are reduced in this micro-batch of the window.

        ``is_last`` is None outside a window. Then all units reduce, except with ``keeps_grads``.
        """
        keeps = unit.settings.keeps_grads
        if is_last or keeps:
            return bool(is_last) and not (keeps and unit.settings.awaits_end)
        return is_last is None or unit.settings.stage.reduce_every == "micro_batch"

    def after_backward(self, unit: U, *, is_last: bool | None) -> None:
        """Reduce the unit's gradients, or keep them until the window's end; free its parameters."""
        self._closed.append(unit.index)
        self._in_backward.discard(unit.index)
        if not self.reduces(unit, is_last):
            if unit.is_trained:
                self._reducer.keep(unit)
        elif self.reduces_in_order:
            self._reduce(self._reduce_order.mark_ready(unit.index), is_last)
        elif unit.is_trained:
            self._reducer.add(unit)
        if unit.settings.stage.frees_after_backward:
            unit.reshard()

    def will_reduce_in_order(self, is_last: bool | None) -> bool:
        """Tell whether this pass reduces, in the order that all ranks share."""
        return self.reduces_in_order and any(self.reduces(unit, is_last) for unit in self.units)

    def _reduce(self, indices: Sequence[int], is_last: bool | None) -> None:
        for unit in (self.units[index] for index in indices):
            if unit.is_trained and self.reduces(unit, is_last):
                self._reducer.add(unit)

    def is_waiting(self, unit: U) -> bool:
        """Tell whether the reduction of a closed unit has not started."""
        return self._reducer.is_waiting(unit) or (
            self.reduces_in_order and self._reduce_order.is_blocked(unit.index)
        )

    def reduce_unvisited(self, is_last: bool | None) -> None:
        """Reduce zeros, at the end of a backward pass, for units that only other ranks ran."""
        if self.will_reduce_in_order(is_last):
            self._reduce(self._reduce_order.end(), is_last)

    def end_pass(self, running: Collection[int] = ()) -> None:
        """Free full parameters; predict the next step from the recorded order.

        ``running`` are units whose forward runs around this backward pass; they stay full.
        """
        for unit in self.units:
            if not unit.settings.stays_full and unit.index not in running:
                unit.reshard()
        self._prefetched.clear()
        self._kept_full.clear()
        self._in_backward.clear()
        self._reduce_order.end()
        self.order.end_step()
