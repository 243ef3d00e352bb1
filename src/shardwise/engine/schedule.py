"""The schedule of gathers, frees and reductions: every decision of a step, without torch.

The engine calls it with real units. The planner calls it with units that only count bytes, so a
plan cannot differ from the run. `passes` holds autograd's part (calls, hooks, versions).

Note [Ranks that skip layers]
Ranks may run different units (layerdrop, stochastic depth, a head per task, experts). But all ranks
must start every collective, on NCCL in one order. So if full parameters stay (stages 0 to 2),
gathers and reductions follow an order that all ranks share, not the order in which a rank runs. A
unit waits for its turn, and a unit that does not run takes part with zeros. The shared order is
registration order during the first backward pass, and then the order that rank 0 has seen in that
pass. If all ranks run all units in one order, nothing waits.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shardwise.stages import UnitSettings


class Order:
    """Predicts the next units, forward and backward, from the order of the step before.

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
            self.forward, self.seen = self.seen, []
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
            has_run = unit.engine is not None
            known = unit.engine.schedule.order.forward if has_run else []
            order = {index: place for place, index in enumerate(known)}
            places[id(unit.engine)] = len(places), order

    def turn(unit: Any) -> tuple[int, int, int]:
        model, order = places[id(unit.engine)]
        return model, order.get(unit.index, len(order)), unit.index

    return sorted(units, key=turn)


def units_to_prefetch(
    upcoming: Sequence[int],
    full_bytes: Callable[[int], int],
    ahead: Collection[int],
    is_resident: Callable[[int], bool],
    budget_bytes: int,
) -> list[int]:
    """Return the units to prefetch now, in order.

    ``upcoming`` are the expected next units, nearest first. Units in ``ahead`` are prefetched and
    not used yet; they count against the budget. Resident units hold current values and cost
    nothing. The first unit that does not fit ends the list: no later unit overtakes it.
    """
    left = budget_bytes - sum(full_bytes(unit) for unit in ahead)
    chosen: list[int] = []
    for unit in upcoming:
        if unit in ahead or unit in chosen or is_resident(unit):
            continue
        left -= full_bytes(unit)
        if left < 0:
            break
        chosen.append(unit)
    return chosen


class Turns:
    """Releases units in one fixed order, whatever their order of arrival; once per pass."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._places = {index: place for place, index in enumerate(order)}
        self._next = 0
        self._here: set[int] = set()

    def begin(self) -> None:
        """Begin a pass; wait for every unit, because any unit's gradient may come late."""
        self._next = 0
        self._here.clear()

    def arrive(self, index: int) -> list[int]:
        """Record a unit's arrival; return the units whose turn has come, in order.

        A unit that arrives after its turn is returned at once.
        """
        if self._places[index] < self._next:
            return [index]
        self._here.add(index)
        begin = self._next
        while self._next < len(self._order) and self._order[self._next] in self._here:
            self._next += 1
        return self._order[begin : self._next]

    def waits(self, index: int) -> bool:
        """Tell whether the unit has arrived before its turn."""
        return index in self._here and self._places[index] >= self._next

    def end(self) -> list[int]:
        """End the pass; return all units that have not had their turn, in order."""
        rest = self._order[self._next :]
        self._next = len(self._order)
        return rest


class GatherOrder:
    """The order in which all ranks gather units, and how far this forward pass has come."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._places: dict[int, int] = {}
        self._num_reached = 0

    def take(self, order: Sequence[int]) -> None:
        """Take over an order of all units."""
        self._order = list(order)
        self._places = {index: place for place, index in enumerate(order)}

    def before(self, index: int) -> list[int]:
        """Return the units that come before one."""
        return self._order[: self._places[index]]

    def missed(self, index: int | None = None) -> list[int]:
        """Return the units from the last one that ran to one that runs now, or to the end."""
        return self._order[self._num_reached : None if index is None else self._places[index]]

    def reach(self, index: int) -> list[int]:
        """Note that a unit runs, after gathering what it `missed`; return the units behind it."""
        place = self._places[index]
        self._num_reached = max(self._num_reached, place)
        return self._order[place + 1 :]

    def end(self) -> None:
        """End the forward pass."""
        self._num_reached = 0


def complete(order: Iterable[int], indices: Sequence[int]) -> list[int]:
    """Return ``order`` without repetitions, then the missing ``indices``."""
    return list(dict.fromkeys([*order, *indices]))


_LOOKAHEAD_UNITS = 16
_READ_AHEAD_UNITS = 3  # a disk reads no more than its buffers hold, which are for 3 units


class ScheduledUnit(Protocol):
    """The part of a unit that the schedule uses.

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
    """The handling of a unit's gradients after its backward."""

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
        self.reduces_in_turn = False
        self._gathers_in_turn = False
        self._has_peers = has_peers
        self._prefetch_bytes = prefetch_bytes or 0
        self._asked_bytes = prefetch_bytes
        self._reducer = reducer
        self.order = Order(())
        self._ahead: set[int] = set()
        self._held: set[int] = set()  # used outside their modules: full until backward ends
        self._in_backward: set[int] = set()
        self._gathers = GatherOrder()
        self._turns = Turns(())
        self._closed: list[int] = []

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
        self._gathers_in_turn = self._has_peers and not frees
        may_skip = not frees or any(u.settings.optional for u in units)
        self.reduces_in_turn = self._has_peers and may_skip
        self.order = Order([u.index for u in units] if order is None else order)
        self.share_order(order or (), closes or ())
        if self._asked_bytes is None:
            self._prefetch_bytes = max((u.full_bytes for u in units[1:]), default=0)

    def share_seen(self, broadcast: Callable[[bytes], bytes]) -> bool:
        """Take over the order that rank 0 has seen in this pass; tell whether it has seen one.

        A pass outside the hooks has no order (`gathered` ends such passes).
        """
        seen = json.dumps([self.order.seen, self._closed]).encode()
        gathers, closes = json.loads(broadcast(seen))
        if gathers:
            self.share_order(gathers, closes)
        return bool(gathers)

    def share_order(self, gathers: Sequence[int], closes: Sequence[int]) -> None:
        """Set the orders of gathers and closes that all ranks share from now on."""
        indices = [u.index for u in self.units]
        self._gathers.take(complete(gathers, indices))
        self._turns = Turns(complete(closes, indices[::-1]))
        self._turns.end()

    # -- forward
    def before_forward(self, unit: U, *, in_backward: bool) -> bool:
        """Gather the unit, start gathering the next ones; tell whether its backward comes next.

        ``in_backward``: this forward runs inside the backward pass (activation checkpointing).
        """
        following = None
        if self._gathers_in_turn and not in_backward:
            self._gather_too(self._gathers.missed(unit.index))
            following = self._gathers.reach(unit.index)
        unit.start_unshard()
        self._ahead.discard(unit.index)  # the budget is for units not used yet
        upcoming = None if in_backward else self.order.visit_forward(unit.index)
        ahead = upcoming if following is None else following
        self._gather_ahead(unit.settings.forward_prefetch, ahead)
        unit.finish_unshard()
        return in_backward or upcoming == []

    def start_unshard(self, unit: U) -> None:
        """Start gathering a unit; with a shared order, gather the units before it first."""
        if self._gathers_in_turn:
            self._gather_too(self._gathers.before(unit.index))
        unit.start_unshard()

    def _gather_too(self, indices: Sequence[int]) -> None:
        """Take part in gathers that other ranks may start."""
        for index in indices:
            if not self.units[index].is_resident:
                self.units[index].start_unshard()
                self._ahead.add(index)

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
        """Free the unit if possible; the root and the last unit stay for their backward.

        ``still_runs``: another forward of the unit is running. ``at_root``: no forward is left.
        """
        settings = unit.settings
        is_last = settings.keeps_last and (backward_is_next or unit is self.units[0])
        waits = expects_backward and is_last
        in_use = still_runs or unit.index in self._in_backward or unit.index in self._held
        if settings.stage.frees_after_forward and not (waits or in_backward or in_use):
            unit.reshard()
        if at_root and not in_backward:
            if self._gathers_in_turn:
                self._gather_too(self._gathers.missed())
                self._gathers.end()
            self._drop_prefetched()

    def note_ahead(self, unit: U) -> None:
        """Count a unit as prefetched, so that the end of the forward pass frees it."""
        self._ahead.add(unit.index)

    def hold(self, unit: U) -> None:
        """Keep a unit full until the backward pass ends."""
        self._held.add(unit.index)

    def _drop_prefetched(self) -> None:
        for index in self._ahead - self._held:
            self.units[index].reshard()
        self._ahead.clear()

    def _gather_ahead(self, named: Sequence[U] | None, upcoming: Sequence[int] | None) -> None:
        """Prefetch the units named in settings, or with a shared order the expected next units."""
        if named is None or self._gathers_in_turn:
            self._prefetch(upcoming)
            return
        for unit in named:
            if not unit.is_resident:
                unit.start_unshard()
                self._ahead.add(unit.index)

    def _prefetch(self, upcoming: Sequence[int] | None) -> None:
        if not self._prefetch_bytes or not upcoming:
            return
        # With a shared order, skipped units do not count as prefetched any more.
        ahead = self._ahead.intersection(upcoming) if self._gathers_in_turn else self._ahead
        chosen = units_to_prefetch(
            upcoming[:_LOOKAHEAD_UNITS],
            lambda i: self.units[i].full_bytes,
            ahead,
            lambda i: self.units[i].is_resident,
            self._prefetch_bytes,
        )
        for index in chosen:
            self.units[index].start_unshard()
            self._ahead.add(index)
        for index in upcoming[:_READ_AHEAD_UNITS]:
            self.units[index].read_ahead()

    # -- backward
    def begin_backward(self, order: Sequence[int]) -> None:
        """Begin a pass that is expected to take the units in the reverse of ``order``."""
        self.order.begin_backward(order)
        self._closed = []
        if self.reduces_in_turn:
            self._turns.begin()

    def before_backward(self, unit: U) -> None:
        """Gather the unit for its backward; start gathering the next ones."""
        self._in_backward.add(unit.index)
        if unit.settings.reads_in_backward:
            unit.start_unshard()
        self._ahead.discard(unit.index)
        upcoming = self.order.visit_backward(unit.index) or ()
        upcoming = [i for i in upcoming if self.units[i].settings.reads_in_backward]
        self._gather_ahead(unit.settings.backward_prefetch, upcoming)
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
        elif self.reduces_in_turn:
            self._reduce(self._turns.arrive(unit.index), is_last)
        elif unit.is_trained:
            self._reducer.add(unit)
        if unit.settings.stage.frees_after_backward:
            unit.reshard()

    def will_reduce_in_turn(self, is_last: bool | None) -> bool:
        """Tell whether this pass reduces, and ranks may begin to reduce in different layers."""
        return self.reduces_in_turn and any(self.reduces(unit, is_last) for unit in self.units)

    def _reduce(self, indices: Sequence[int], is_last: bool | None) -> None:
        for unit in (self.units[index] for index in indices):
            if unit.is_trained and self.reduces(unit, is_last):
                self._reducer.add(unit)

    def is_waiting(self, unit: U) -> bool:
        """Tell whether the reduction of a closed unit has not started."""
        return self._reducer.is_waiting(unit) or (
            self.reduces_in_turn and self._turns.waits(unit.index)
        )

    def close_turns(self, is_last: bool | None) -> None:
        """Reduce zeros, at the end of a backward pass, for units that only other ranks ran."""
        if self.will_reduce_in_turn(is_last):
            self._reduce(self._turns.end(), is_last)

    def end_pass(self, running: Collection[int] = ()) -> None:
        """Free full parameters; predict the next step from the recorded order.

        ``running`` are units whose forward runs around this backward pass; they stay full.
        """
        for unit in self.units:
            if not unit.settings.stays_full and unit.index not in running:
                unit.reshard()
        for indices in (self._ahead, self._held, self._in_backward):
            indices.clear()
        self._turns.end()
        self.order.end_step()
