"""Units that some ranks may skip while others run them, if parameters are freed (stage 3).

Note [Visits of skipped units]
A gather needs all ranks. So a rank that skips an optional unit still visits it: it gathers and
frees the unit when the others run it, and in backward it gathers the unit again and reduces zeros.
In forward, the visit comes when a later registered unit of the same parent runs, or when the parent
ends. In backward, it comes when a unit runs that preceded it in forward, or when the parent's
backward ends. The order of collectives is then the same on all ranks, if each parent calls its
units in registration order.

A rank that skips a unit cannot know whether the others need its backward: the unit may be frozen,
run under no_grad, or its output may be detached. So in backward every rank visits the optional
units, and the units inside them, that autograd does not reach. **Cost** one more gather of a unit
that no rank needs in backward. A unit that runs under no_grad may also be inside a reentrant
checkpoint. Then its recomputation takes the place of the visit.

A module with parameters on several meshes has a unit for each mesh. Their calls are nested.
Backward begins with the outermost call, as for any call that returns the output of a call inside
it, so all ranks are at the same point when they visit the next unit. Backward ends with the
innermost call, in whatever order autograd finishes them.
"""

import weakref
from collections.abc import Iterator, Sequence

from shardwise.engine.calls import Call, CallState
from shardwise.engine.passes import Passes
from shardwise.engine.schedule import Schedule
from shardwise.unit.unit import Unit


class OptionalUnits:
    """Visits the units that a call has skipped. See Note [Visits of skipped units]."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule[Unit], passes: Passes) -> None:
        self._schedule = schedule
        self._passes = passes
        self._has_optional = any(
            u.settings.optional and u.settings.stage.frees_after_forward for u in units
        )
        # By unit: the units directly inside it, in registration order.
        self._inside: dict[int, list[Unit]] = {unit.index: [] for unit in units}
        self._visited: set[int] = set()  # the optional units and those inside them
        self._unrecorded: list[weakref.ref[Call]] = []  # under no_grad, oldest first
        for place, unit in enumerate(units if self._has_optional else ()):
            # Units are in module order, and those of one module are nested, so the innermost is the
            # last one before it. A module used in several places is visited in the first.
            around = [u for u in units[:place] if passes.contains(u, unit)]
            if around:
                self._inside[around[-1].index].append(unit)
            if any(u.settings.optional for u in (unit, *around)):
                self._visited.add(unit.index)

    def note_parent(self, call: Call) -> None:
        """Record the call in which the innermost one runs, if units in it may be skipped."""
        parent = self._passes.stack[-2] if len(self._passes.stack) > 1 else None
        if self._has_optional and parent is not None and parent.is_recorded:
            call.parent = weakref.ref(parent)
            call.is_visited = call.unit.index in self._visited
            parent.inside.append(call)

    def note_unrecorded(self, call: Call) -> None:
        """Record the innermost call, which runs under no_grad, if backward visits its unit."""
        parent = self._passes.stack[-2] if len(self._passes.stack) > 1 else None
        if parent is not None and parent.is_recorded and call.unit.index in self._visited:
            self._passes.record(call)
            self.note_parent(call)
            self._unrecorded = [ref for ref in self._unrecorded if ref() is not None]
            self._unrecorded.append(weakref.ref(call))

    def begin_recompute(self, call: Call) -> None:
        """If a reentrant checkpoint recomputes a unit, visit the units skipped behind it."""
        if not self._unrecorded or not call.in_backward or call.recomputes:
            return
        for earlier in (ref() for ref in reversed(self._unrecorded)):
            if earlier is None or earlier.unit is not call.unit or earlier.has_begun:
                continue
            if self._passes.forward.is_reached(earlier):
                assert earlier.parent is not None
                self._passes.close_unhooked(earlier)
                self.visit_backward(earlier.parent(), earlier)
                _mark_passed(earlier)
                return

    def visit_forward(self, unit: Unit | None) -> None:
        """Visit the units that the innermost call skips before ``unit``; at its end, the rest."""
        if self._has_optional and self._passes.stack:
            for skipped in self._skipped(self._passes.stack[-1], unit):
                self._visit(skipped)

    def _skipped(self, call: Call, unit: Unit | None) -> Iterator[Unit]:
        inside = self._inside[call.unit.index]
        end = len(inside)
        if unit is not None:
            if unit not in inside[call.num_passed :]:
                return
            end = inside.index(unit)
        begin = call.num_passed
        call.num_passed = end + 1
        yield from (u for u in inside[begin:end] if u.settings.optional)

    def _visit(self, unit: Unit) -> None:
        parent = self._passes.stack[-1]
        call = self._passes.enter(unit)
        is_next = self._schedule.before_forward(unit, in_backward=call.in_backward)
        if parent.is_recorded:
            self._passes.record(call)
            self.note_parent(call)
            call.enter(CallState.AWAITING)
        for inner in self._inside[unit.index]:
            self._visit(inner)
        self._passes.leave()
        self._schedule.after_forward(
            unit,
            in_backward=call.in_backward,
            expects_backward=call.is_recorded,
            backward_is_next=is_next,
            still_runs=False,
            at_root=False,
        )

    def visit_backward(self, parent: Call | None, call: Call | None = None) -> None:
        """Visit the units inside ``parent`` that autograd did not reach, the latest first.

        Visit those after ``call`` if given.
        """
        if not self._has_optional or parent is None:
            return
        begin = parent.inside.index(call) + 1 if call in parent.inside else 0
        for skipped in reversed(parent.inside[begin:]):
            if skipped.is_visited and not skipped.has_begun:
                calls = list(_of_one_module(skipped))
                for inner in calls:
                    self._passes.begin_call(inner)
                    self._schedule.before_backward(inner.unit)
                for inner in reversed(calls):
                    self.visit_backward(inner)
                    self._passes.end_call(inner)

    def after_backward(self, call: Call) -> None:
        """Visit the units skipped inside a call; end the calls of the same module inside it."""
        self.visit_backward(call)
        for inner in list(_of_one_module(call))[:0:-1] if self._has_optional else ():
            self._passes.end_call(inner)

    def end_backward(self, units: Sequence[Unit]) -> None:
        """Visit the skipped units of calls whose backward has begun and not ended."""
        for unit in units if self._has_optional else ():
            for call in self._passes.begun_calls(unit):
                self.visit_backward(call)


def _of_one_module(call: Call) -> Iterator[Call]:
    """Yield a call and the calls of the same module's units inside it, outermost first."""
    yield call
    for inner in call.inside:
        if inner.unit.module is call.unit.module:
            yield from _of_one_module(inner)


def _mark_passed(call: Call) -> None:
    """Mark a call and those inside it as passed, because its unit is recomputed."""
    call.enter(CallState.PASSED)
    for inner in call.inside:
        if not inner.has_begun:
            _mark_passed(inner)
