"""Units that some ranks may skip while others run them, where parameters are freed (stage 3).

Note [Visits of skipped units]
A gather needs all ranks. So a rank that skips an optional unit visits it all the same: it gathers
and frees it where the others run it, and in backward it gathers it once more and reduces zeros.
Forward, that moment has come when another unit inside the same parent runs that is registered
later, or when the parent is through; backward, when a unit runs that the forward pass had before
it, or when the parent's backward is over. The order of collectives is then the same on all ranks,
as long as a parent calls its units in the order in which they are registered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.engine.schedule import Schedule
from shardwise.unit.unit import Unit
from shardwise.unit.use import Use


@dataclass(slots=True)
class Call:
    """One forward call under way: ``use`` is None where nothing is recorded.

    ``num_passed`` counts the units inside it that have run or were passed over.
    """

    unit: Unit
    use: Use | None
    in_backward: bool
    backward_is_next: bool = False
    num_passed: int = 0


class Visited(Protocol):
    """What a visit asks of the engine."""

    def close_unhooked(self, begun: Unit, its_use: Use, node: int) -> None:
        """Close the units whose backward must be over when another one's begins."""

    def after_use(self, unit: Unit, use: Use) -> None:
        """Close one use of the unit."""


class OptionalUnits:
    """Visits the units that a call has skipped. See Note [Visits of skipped units]."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule[Unit], engine: Visited) -> None:
        self._schedule = schedule
        self._engine = engine
        self._any = any(u.settings.optional and u.settings.stage.frees_after_forward for u in units)
        self._inside: dict[int, list[Unit]] = {unit.index: [] for unit in units}
        for unit in units[1:] if self._any else ():
            parents = [u for u in units if u is not unit and u.contains(unit)]
            self._inside[max(parents, key=lambda u: len(u.name)).index].append(unit)

    def record(self, unit: Unit, stack: Sequence[Call]) -> Use:
        """Note the innermost call of the stack, which autograd records."""
        use = Use(unit.read_versions(), tuple(call.unit for call in stack[:-1]))
        unit.uses.add(use)
        if self._any and len(stack) > 1 and stack[-2].use is not None:
            use.enter(unit, stack[-2].use)
        return use

    def visit_forward(self, stack: list[Call], unit: Unit | None) -> None:
        """Visit what the innermost call skips by running ``unit`` next, or nothing more (None)."""
        if self._any and stack:
            for skipped in self._skipped(stack[-1], unit):
                self._visit(skipped, stack)

    def _skipped(self, call: Call, unit: Unit | None) -> Iterator[Unit]:
        inside = self._inside[call.unit.index]
        at = len(inside)
        if unit is not None:
            if unit not in inside[call.num_passed :]:
                return
            at = inside.index(unit)
        begin, call.num_passed = call.num_passed, at + 1
        yield from (u for u in inside[begin:at] if u.settings.optional)

    def _visit(self, unit: Unit, stack: list[Call]) -> None:
        parent = stack[-1]
        call = Call(unit, None, parent.in_backward)
        stack.append(call)
        is_next = self._schedule.before_forward(
            unit, in_backward=call.in_backward, records=parent.use is not None
        )
        if parent.use is not None:
            call.use = self.record(unit, stack)
            call.use.was_skipped = True
        for inner in self._inside[unit.index]:
            self._visit(inner, stack)
        stack.pop()
        self._schedule.after_forward(
            unit,
            in_backward=call.in_backward,
            expects_backward=call.use is not None,
            backward_is_next=is_next,
            still_runs=False,
            at_root=False,
        )

    def visit_backward(self, parent: Use | None, use: Use | None = None) -> None:
        """Visit what was skipped inside ``parent``, after ``use`` if given, the latest first."""
        if not self._any or parent is None:
            return
        uses = [other for _, other in parent.inside]
        begin = uses.index(use) + 1 if use in uses else 0
        for unit, skipped in reversed(parent.inside[begin:]):
            if skipped.was_skipped and not skipped.begun:
                skipped.begun = unit.in_backward = True
                skipped.done = False
                self._engine.close_unhooked(unit, skipped, -1)
                self._schedule.before_backward(unit)
                self.visit_backward(skipped)
                self._engine.after_use(unit, skipped)

    def end_backward(self, units: Sequence[Unit]) -> None:
        """Visit what is left where a backward pass has begun and not closed its unit."""
        for unit in units if self._any else ():
            for use in list(unit.uses):
                if use.begun:
                    self.visit_backward(use)
