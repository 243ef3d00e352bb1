"""One forward call of a unit, and its states until its backward has ended."""

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import nn

from shardwise.unit.states import State, check_transition


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
    """The part of a unit that its calls use."""

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

    ``enclosing`` are the units whose calls contain this one. ``mates`` are the calls of all
    micro-batches of a round (`layer_by_layer`). If units may be skipped: ``inside`` are the calls
    made in this one, in order; ``num_passed`` counts the units in it that have run or were skipped;
    ``was_skipped`` marks a call that stands for a skipped unit.
    """

    __slots__ = (
        "__weakref__",
        "backward_is_next",
        "enclosing",
        "forward_pass",
        "has_input_hook",
        "in_backward",
        "inside",
        "mates",
        "num_passed",
        "parent",
        "recomputes",
        "state",
        "unit",
        "versions",
        "was_skipped",
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
        self.was_skipped = False
        self.num_passed = 0
        self.inside: list[Call] = []
        self.parent: weakref.ref[Call] | None = None
        self.mates: Collection[Call] = ()

    @property
    def is_recorded(self) -> bool:
        """Tell whether autograd records the call."""
        return self.forward_pass is not None

    @property
    def has_begun(self) -> bool:
        """Tell whether the current backward pass has reached the call."""
        return self.state in (CallState.BACKWARD, CallState.PASSED)

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
