"""The forward calls of units, their states until backward has ended, and their forward passes.

Note [Several forward passes before a backward pass]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Some programs run several forward passes and one backward pass through all of them (a sum of
losses). Others run one backward pass through each (pipelines), in any order. The first backward
pass to end after several forward passes shows the kind. Until then, and if any pass has gone
through several, a unit waits for the open calls of all forward passes since the last backward pass:
it is reduced once, but closes late. Otherwise it waits only for calls of forward passes that this
pass has reached. The calls waited for decide when units are reduced, so they must be the same on
all ranks. So forward passes made are counted, not live graphs, which may differ between ranks.
"""

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any, Protocol

from torch import nn

from shardwise.unit.states import State, check_transition

_MAX_FORWARD_PASSES = 256  # micro-batches in flight; older ones count as dropped


class CallState(State):
    """The state of a call, from its forward to the end of its backward.

    FORWARD: it runs. AWAITING: autograd has recorded it, and its backward is expected. BACKWARD:
    autograd has reached one of its outputs. PASSED: its backward has ended in the current pass.
    SPENT: no pass is expected. Its graph may still run again (``retain_graph``).
    """

    FORWARD = "forward"
    AWAITING = "awaiting backward"
    BACKWARD = "backward"
    PASSED = "passed"
    SPENT = "spent"


class PassUnit(Protocol):
    """Interface of `Unit` required by its calls; the planner has another implementation."""

    @property
    def index(self) -> int:
        """Its index among the units; the root has 0."""

    @property
    def name(self) -> str:
        """Its module's name."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose forward passes are its calls."""

    def read_versions(self) -> tuple[int, ...]:
        """Return numbers that change whenever a parameter is modified."""


CALL_TRANSITIONS = frozenset(
    {
        (CallState.FORWARD, CallState.AWAITING),
        (CallState.FORWARD, CallState.SPENT),  # not recorded, or no output has a gradient
        (CallState.AWAITING, CallState.BACKWARD),
        (CallState.AWAITING, CallState.PASSED),  # autograd has reached only its inputs
        (CallState.AWAITING, CallState.SPENT),  # the pass of its graph has ended
        (CallState.BACKWARD, CallState.PASSED),
        (CallState.BACKWARD, CallState.SPENT),  # the pass ended or raised
        (CallState.PASSED, CallState.SPENT),
        (CallState.SPENT, CallState.BACKWARD),
        (CallState.SPENT, CallState.PASSED),
    }
)


_OPEN = frozenset({CallState.AWAITING, CallState.BACKWARD})


class _Coverage(Enum):
    """The number of forward passes that one backward pass goes through, if several were made."""

    UNKNOWN = "unknown"  # no backward pass has ended after several forward passes
    ONE = "one"
    SEVERAL = "several"


class ForwardPass:
    """One forward pass of the model, whose calls share a graph.

    ``order`` lists the units in the order of their calls. ``open`` counts, for each unit, the calls
    whose backward runs or is expected. It holds no tensor and may outlive its graph.
    """

    __slots__ = ("open", "order")

    def __init__(self) -> None:
        self.order: list[int] = []
        self.open: Counter[int] = Counter()


class Call:
    """One forward call of a unit. A recorded call lives as long as its graph.

    ``enclosing`` are the units whose calls contain this one. ``versions`` are those of the unit's
    parameters in forward. ``recomputes``: activation checkpointing runs it again inside the unit's
    backward. ``backward_is_next``: no other unit is expected between it and its backward.
    ``has_input_hook``: a hook on an input marks the end of its backward. ``peers`` are the calls of
    the same unit in all micro-batches that run together (`accumulate(order="breadth_first")`).

    Only if units may be skipped: ``parent`` is the call around it. ``inside`` are the calls made in
    it, in order. ``num_passed`` counts the units in it that have run or were skipped.
    ``is_visited``: backward gathers its unit on all ranks, even if autograd does not reach it.
    """

    __slots__ = (
        "__weakref__",
        "backward_is_next",
        "enclosing",
        "forward_pass",
        "has_input_hook",
        "in_backward",
        "inside",
        "is_visited",
        "num_passed",
        "parent",
        "peers",
        "recomputes",
        "state",
        "unit",
        "versions",
    )

    def __init__(
        self, unit: Any, enclosing: tuple[Any, ...], in_backward: bool, recomputes: bool
    ) -> None:
        self.unit = unit
        self.enclosing = enclosing
        self.in_backward = in_backward
        self.recomputes = recomputes
        self.state = CallState.FORWARD
        self.forward_pass: ForwardPass | None = None  # set if autograd records it
        self.versions: tuple[int, ...] = ()
        self.has_input_hook = False
        self.backward_is_next = False
        self.is_visited = False
        self.num_passed = 0
        self.inside: list[Call] = []
        self.parent: weakref.ref[Call] | None = None
        self.peers: Collection[Call] = ()

    @property
    def is_recorded(self) -> bool:
        """Tell whether autograd records the call."""
        return self.forward_pass is not None

    @property
    def has_begun(self) -> bool:
        """Tell whether the current backward pass has reached the call."""
        return self.state in (CallState.BACKWARD, CallState.PASSED)

    @property
    def with_begun_peers(self) -> list["Call"]:
        """This call and its peers in backward: all are later than the node of the call's input."""
        begun = [peer for peer in self.peers if peer.state is CallState.BACKWARD]
        return list(dict.fromkeys((self, *begun)))

    def enter(self, state: CallState) -> None:
        """Move to ``state``; update the forward pass's count of open calls."""
        was_open = self.state in _OPEN
        self.state = check_transition(CALL_TRANSITIONS, self.unit.name, self.state, state)
        if self.forward_pass is not None:
            self.forward_pass.open[self.unit.index] += (state in _OPEN) - was_open

    def end_pass(self) -> None:
        """End the call's backward pass, even if the pass did not reach the call."""
        if self.state not in (CallState.FORWARD, CallState.SPENT):
            self.enter(CallState.SPENT)


class ForwardPasses:
    """The forward passes since the last backward pass, and those that a backward pass covers.

    ``current`` records calls now. See Note [Several forward passes before a backward pass].
    """

    def __init__(self) -> None:
        self.current: ForwardPass | None = None
        self._made: list[ForwardPass] = []  # without a backward pass yet
        self._reached: list[ForwardPass] = []  # by the current backward pass
        self._coverage = _Coverage.UNKNOWN

    def begin(self) -> ForwardPass:
        """Return a new forward pass to record calls in."""
        forward_pass = ForwardPass()
        self._made.append(forward_pass)
        del self._made[:-_MAX_FORWARD_PASSES]
        return forward_pass

    def record(self, call: Call) -> None:
        """Record a call; the first of a recomputation begins a pass that backward has reached."""
        if self.current is None and call.in_backward:
            self.current = ForwardPass()
            self._reached.append(self.current)
        elif self.current is None:
            self.current = self.begin()
        if not call.in_backward:
            self.current.order.append(call.unit.index)
        call.forward_pass = self.current

    def reach(self, call: Call) -> None:
        """Note that the backward pass goes through the forward pass of a recorded call."""
        if call.forward_pass not in self._reached:
            assert call.forward_pass is not None
            self._reached.append(call.forward_pass)

    def is_reached(self, call: Call) -> bool:
        """Tell whether the backward pass goes through the forward pass of a recorded call."""
        return call.forward_pass in self._reached

    def order(self) -> list[int]:
        """Return the unit indices in the order of the forward passes that backward covers."""
        covered = self._made
        if self._coverage is _Coverage.ONE:
            covered = [made for made in covered if made in self._reached] or covered[-1:]
        return [index for forward_pass in covered for index in forward_pass.order]

    def awaits(self, unit: PassUnit) -> bool:
        """Tell whether calls of a unit that the backward pass waits for are open."""
        waited_for = self._reached
        if self._coverage is not _Coverage.ONE:
            waited_for = self._made + self._reached
        return any(forward_pass.open[unit.index] for forward_pass in waited_for)

    def awaits_backward(self, call: Call) -> bool:
        """Tell whether a call's forward pass has had no backward pass yet."""
        return call.forward_pass in self._made

    def end_backward(self) -> None:
        """Forget the forward passes that the backward pass has covered."""
        covered = [made for made in self._made if made in self._reached]
        if covered and len(self._made) > 1 and self._coverage is not _Coverage.SEVERAL:
            self._coverage = _Coverage.ONE if len(covered) == 1 else _Coverage.SEVERAL
        if self._coverage is not _Coverage.ONE:
            covered = self._made
        self._made = [made for made in self._made if made not in covered]
        self._reached = []
