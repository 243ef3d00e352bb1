"""One forward call of a unit, and the states that it goes through until backward has passed it."""

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import nn

from shardwise.unit.states import State, check_transition


class CallState(State):
    """Where a call is, from its forward to the end of its backward.

    FORWARD: it runs. AWAITING: autograd has recorded it, and its backward is expected. BACKWARD:
    autograd has reached an output of it. PASSED: the pass under way is through with it. SPENT: no
    pass is expected any more; its graph may run again all the same (``retain_graph``).
    """

    FORWARD = "forward"
    AWAITING = "awaiting backward"
    BACKWARD = "backward"
    PASSED = "passed"
    SPENT = "spent"


class PassUnit(Protocol):
    """A unit, for all that its calls depend on."""

    @property
    def index(self) -> int:
        """Its place among the units, the root being 0."""

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
        (CallState.AWAITING, CallState.PASSED),  # autograd has reached its inputs another way
        (CallState.AWAITING, CallState.SPENT),  # the pass of its graph is over
        (CallState.BACKWARD, CallState.PASSED),
        (CallState.BACKWARD, CallState.SPENT),  # the pass is over, or was cut short
        (CallState.PASSED, CallState.SPENT),
        (CallState.SPENT, CallState.BACKWARD),
        (CallState.SPENT, CallState.PASSED),
    }
)


_OPEN = frozenset({CallState.AWAITING, CallState.BACKWARD})


class ForwardPass:
    """One forward pass of the model, from its entrance to its exit: its calls share a graph.

    ``order`` are the units in the order of their calls, and ``open`` counts the calls of each unit
    whose backward goes on or is expected. It holds no tensor, and is kept when its graph is not.
    """

    __slots__ = ("open", "order")

    def __init__(self) -> None:
        self.order: list[int] = []
        self.open: Counter[int] = Counter()


class Call:
    """One forward call of a unit; one that autograd has recorded dies with its graph.

    ``enclosing`` are the units whose calls it was made in. Where units may be skipped, ``inside``
    are the calls made in this one, in order, ``num_passed`` counts the units in it that have run or
    were passed over, and a call may be none: ``was_skipped``. ``mates`` are those of all micro-
    batches that go through the unit together (`layer_by_layer`).
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
        self.forward_pass: ForwardPass | None = None  # where autograd records it
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
        """Tell whether autograd records it."""
        return self.forward_pass is not None

    @property
    def has_begun(self) -> bool:
        """Tell whether the pass under way has begun with it."""
        return self.state in (CallState.BACKWARD, CallState.PASSED)

    def enter(self, state: CallState) -> None:
        """Move along the table of calls; its forward pass counts the open ones."""
        was_open = self.state in _OPEN
        self.state = check_transition(CALL_TRANSITIONS, self.unit.name, self.state, state)
        if self.forward_pass is not None:
            self.forward_pass.open[self.unit.index] += (state in _OPEN) - was_open

    def end_pass(self) -> None:
        """Note that the backward pass of its graph has ended, with or without this call."""
        if self.state not in (CallState.FORWARD, CallState.SPENT):
            self.enter(CallState.SPENT)
