"""What is gathered, freed and reduced, and when: every decision of a step, without torch.

The engine asks with real units; the planner asks the same code with units that only count bytes,
so a plan cannot differ from the run. What autograd needs (calls, hooks, versions) is in `passes`.

Note [Ranks that skip layers]
Ranks need not run the same units (layerdrop, stochastic depth, a head per task, experts), and a
collective that one rank starts must be started by all, on NCCL in one order. Where full parameters
stay (stages 0 to 2), gathers and reductions therefore follow an order that all ranks share, not the
order in which a rank runs: a unit whose turn has not come waits, and one that does not run takes
part with zeros. The order is that of registration until the first backward pass is over, then the
one that rank 0 has seen in it. Where all ranks run all units in one order, nothing waits.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shardwise.stages import UnitSettings


class Order:
    """Predicts which units come next in either direction, from the order of the step before.

    ``forward`` is the order in which a forward pass is expected to need the units; ``seen`` that of
    the backward pass under way, or empty.
    """

    def __init__(self, registration_order: Sequence[int]) -> None:
        self.forward = list(registration_order)
        self._backward: list[int] = []
        self.seen: list[int] = []
        self._forward_at = -1
        self._backward_at = -1

    def visit_forward(self, unit: int) -> list[int] | None:
        """Note that a unit runs forward; return the units expected after it, nearest first.

        None when the unit was not expected at all.
        """
        self._forward_at = _find(self.forward, unit, self._forward_at + 1)
        return None if self._forward_at < 0 else self.forward[self._forward_at + 1 :]

    def begin_backward(self, forward: Sequence[int]) -> None:
        """Fix the backward prediction: the order of the forward pass before it, reversed."""
        self.seen = list(forward)
        self._backward = self.seen[::-1]
        self._backward_at = -1

    def visit_backward(self, unit: int) -> list[int] | None:
        """Note that a unit's backward begins; return the units expected after it."""
        self._backward_at = _find(self._backward, unit, self._backward_at + 1)
        return None if self._backward_at < 0 else self._backward[self._backward_at + 1 :]

    def end_step(self) -> None:
        """Make what was seen the prediction for the next step."""
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
        if id(unit.scheduler) not in places:
            known = [] if unit.scheduler is None else unit.scheduler.order.forward  # it has not run
            order = {index: place for place, index in enumerate(known)}
            places[id(unit.scheduler)] = len(places), order

    def turn(unit: Any) -> tuple[int, int, int]:
        model, order = places[id(unit.scheduler)]
        return model, order.get(unit.index, len(order)), unit.index

    return sorted(units, key=turn)


def units_to_prefetch(
    upcoming: Sequence[int],
    full_bytes: Callable[[int], int],
    ahead: Collection[int],
    is_resident: Callable[[int], bool],
    budget_bytes: int,
) -> list[int]:
    """Return the units to start gathering now, in order.

    ``upcoming`` are the units expected next, nearest first. ``ahead`` were gathered ahead and not
    used yet, and count against the budget; resident units hold present values and cost nothing.
    Gathering stops at the first unit that does not fit: no later unit overtakes a nearer one.
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
    """Hands units on in one order, whatever order they come in; once per pass."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._places = {index: place for place, index in enumerate(order)}
        self._next = 0
        self._here: set[int] = set()

    def begin(self) -> None:
        """Begin a pass: every unit is waited for, as a gradient may come late for any of them."""
        self._next = 0
        self._here.clear()

    def arrive(self, index: int) -> list[int]:
        """Note that a unit has come; return those whose turn it is now, in order.

        A unit that has had its turn, and comes again, is handed on at once.
        """
        if self._places[index] < self._next:
            return [index]
        self._here.add(index)
        begin = self._next
        while self._next < len(self._order) and self._order[self._next] in self._here:
            self._next += 1
        return self._order[begin : self._next]

    def waits(self, index: int) -> bool:
        """Tell whether the unit has come, and its turn has not."""
        return index in self._here and self._places[index] >= self._next

    def end(self) -> list[int]:
        """Return all whose turn has not come, in order, and end the pass."""
        rest = self._order[self._next :]
        self._next = len(self._order)
        return rest


def complete(order: Iterable[int], indices: Sequence[int]) -> list[int]:
    """Return ``order`` without repetitions, then those of ``indices`` that it does not hold."""
    return list(dict.fromkeys([*order, *indices]))


_LOOKAHEAD_UNITS = 16
_READ_AHEAD_UNITS = 3  # a disk has buffers for as many, and reads no more than these hold


class ScheduledUnit(Protocol):
    """A unit as the schedule sees it.

    ``is_resident``: its full parameters are being gathered, or hold present values already.
    """

    index: int

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

    def read_ahead(self) -> None:
        """Start bringing from files what a gather will need, if it rests there."""

    def start_unshard(self) -> None:
        """Start gathering the full parameters, if they are not fresh already."""

    def finish_unshard(self) -> None:
        """Wait until the full parameters may be read."""

    def reshard(self) -> None:
        """Give the full parameters up."""


U = TypeVar("U", bound=ScheduledUnit)
V = TypeVar("V", bound=ScheduledUnit, contravariant=True)


class GradReducer(Protocol[V]):
    """What becomes of a unit's gradients when its backward has passed."""

    def add(self, unit: V) -> None:
        """Reduce them."""

    def keep(self, unit: V) -> None:
        """Keep them on this rank, for the last micro-batch of the window."""

    def is_waiting(self, unit: V) -> bool:
        """Tell whether its reduction is yet to be started."""


class Schedule(Generic[U]):
    """Gathers ahead and frees, by the units' settings, their order and the prefetch budget.

    ``has_peers``: other ranks run the same units, or some of them. Where parameters stay, gathers
    and reductions then follow one order on all ranks; where they are freed and units may be
    skipped, reductions do. See turns.py, Note [Ranks that skip layers].
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
        self._gathers: list[int] = []
        self._places: dict[int, int] = {}  # of each unit in these
        self._num_reached = 0  # of these, in the pass under way
        self._turns = Turns(())
        self._closed: list[int] = []

    def take_units(
        self,
        units: list[U],
        order: Sequence[int] | None = None,
        closes: Sequence[int] | None = None,
    ) -> None:
        """Take the units over, the root first; unless asked, the largest other is the budget.

        ``order`` is the one that the first step is expected in, else that of registration, and
        ``closes`` the one in which its backward passes end, else the reverse of registration.
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

        None is there in a pass that did not come through the hooks (`gathered` ends such).
        """
        seen = json.dumps([self.order.seen, self._closed]).encode()
        gathers, closes = json.loads(broadcast(seen))
        if gathers:
            self.share_order(gathers, closes)
        return bool(gathers)

    def share_order(self, gathers: Sequence[int], closes: Sequence[int]) -> None:
        """Take over the orders that all ranks share from now on."""
        indices = [u.index for u in self.units]
        self._gathers = complete(gathers, indices)
        self._places = {index: place for place, index in enumerate(self._gathers)}
        self._turns = Turns(complete(closes, indices[::-1]))
        self._turns.end()

    # -- forward
    def before_forward(self, unit: U, *, in_backward: bool) -> bool:
        """Unshard the unit, start gathering the next ones; tell whether its backward comes next.

        ``in_backward``: this forward runs inside the backward pass (activation checkpointing).
        """
        following = self._reach(unit) if self._gathers_in_turn and not in_backward else None
        unit.start_unshard()
        self._ahead.discard(unit.index)  # used now: the budget is for the next ones
        upcoming = None if in_backward else self.order.visit_forward(unit.index)
        ahead = upcoming if following is None else following
        self._gather_ahead(unit.settings.forward_prefetch, ahead)
        unit.finish_unshard()
        return in_backward or upcoming == []

    def start_unshard(self, unit: U) -> None:
        """Start gathering a unit; in turns, whoever comes before it first."""
        if self._gathers_in_turn:
            self._gather_in_turn(0, self._places[unit.index])
        unit.start_unshard()

    def _gather_in_turn(self, begin: int, end: int) -> None:
        """Take part in the gathers of a part of the order, which other ranks may have asked for."""
        for index in self._gathers[begin:end]:
            if not self.units[index].is_resident:
                self.units[index].start_unshard()
                self._ahead.add(index)

    def _reach(self, unit: U) -> list[int]:
        """Take part in all gathers before a unit that runs now; return those that come after it."""
        place = self._places[unit.index]
        self._gather_in_turn(self._num_reached, place)
        self._num_reached = max(self._num_reached, place)
        return self._gathers[place + 1 :]

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
        in_use = still_runs or unit.index in self._in_backward or unit.index in self._held
        if settings.stage.frees_after_forward and not (waits or in_backward or in_use):
            unit.reshard()
        if at_root and not in_backward:
            if self._gathers_in_turn:
                self._gather_in_turn(self._num_reached, len(self._gathers))
                self._num_reached = 0
            self._drop_prefetched()

    def note_ahead(self, unit: U) -> None:
        """Count a unit as gathered ahead, so that it is freed at the end of the forward pass."""
        self._ahead.add(unit.index)

    def hold(self, unit: U) -> None:
        """Keep a unit full until the backward pass ends."""
        self._held.add(unit.index)

    def _drop_prefetched(self) -> None:
        for index in self._ahead - self._held:
            self.units[index].reshard()
        self._ahead.clear()

    def _gather_ahead(self, named: Sequence[U] | None, upcoming: Sequence[int] | None) -> None:
        """Gather the units that the settings name, but in turns always those expected next."""
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
        # In turns, what was passed over is not ahead any more.
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
        """Expect the units in the reverse of ``order``, that of the forward pass before it."""
        self.order.begin_backward(order)
        self._closed = []
        if self.reduces_in_turn:
            self._turns.begin()

    def before_backward(self, unit: U) -> None:
        """Unshard the unit for its backward, start gathering those that follow."""
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

        None: no window is open, and each micro-batch is the last one but for ``keeps_grads``.
        """
        keeps = unit.settings.keeps_grads
        if is_last or keeps:
            return bool(is_last) and not (keeps and unit.settings.awaits_end)
        return is_last is None or unit.settings.stage.reduce_every == "micro_batch"

    def after_backward(self, unit: U, *, is_last: bool | None) -> None:
        """Reduce the unit's gradients or keep them for the window's end; free its parameters."""
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
        """Tell whether this pass reduces, and ranks may come to it in different layers."""
        return self.reduces_in_turn and any(self.reduces(unit, is_last) for unit in self.units)

    def _reduce(self, indices: Sequence[int], is_last: bool | None) -> None:
        for unit in (self.units[index] for index in indices):
            if unit.is_trained and self.reduces(unit, is_last):
                self._reducer.add(unit)

    def is_waiting(self, unit: U) -> bool:
        """Tell whether a unit that is closed has its reduction still before it."""
        return self._reducer.is_waiting(unit) or (
            self.reduces_in_turn and self._turns.waits(unit.index)
        )

    def close_turns(self, is_last: bool | None) -> None:
        """Reduce what other ranks may have run, at the end of a backward pass: here it is zeros."""
        if self.will_reduce_in_turn(is_last):
            self._reduce(self._turns.end(), is_last)

    def end_pass(self, running: Collection[int] = ()) -> None:
        """Free what is full; what was recorded is the order that the next step is expected in.

        ``running`` are units whose forward is under way, around a backward pass inside of it.
        """
        for unit in self.units:
            if not unit.settings.stays_full and unit.index not in running:
                unit.reshard()
        for indices in (self._ahead, self._held, self._in_backward):
            indices.clear()
        self._turns.end()
        self.order.end_step()
