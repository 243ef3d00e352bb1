"""Forward and backward passes of a model's units: the open calls and their ends.

In the core only this file registers hooks on tensors and on graph nodes. The engine and the
planner's recorder receive the same few events from it, so a plan cannot differ from the run.

Note [One backward pass]
~~~~~~~~~~~~~~~~~~~~~~~~
Hooks on a call's outputs mark the start of its backward, hooks on its inputs the end. An input's
hook fires when autograd reaches the node that made the input. Autograd runs later nodes first, so
every node of the call has run by then. A call without such an input ends when another call's
backward begins, or at the end of the pass. A unit closes with its last open call.
`Listener.on_pass_end` is queued once per pass. The hooks keep a `Call` alive in the graph, so a
graph dropped without a backward pass leaves nothing behind.

Note [Double backward]
~~~~~~~~~~~~~~~~~~~~~~
A pass with create_graph=True only makes the graph of a second pass (for a gradient penalty). No
parameter gets a gradient, so nothing is reduced, and no full parameter may be freed. The second
pass mixes forward's nodes with nodes of the first pass, and some devices number these separately.
So no hook marks the end of a unit: all units close at the end of the second pass.

Note [Hooks and torch.compile]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If a compiled function calls backward(), dynamo would compile the hooks too. So each hook is a
`partial`, which has no frame to compile, of a function that dynamo skips.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from shardwise.engine.calls import Call, CallState, ForwardPasses, PassUnit
from shardwise.engine.misuse import changed_since_forward
from shardwise.engine.seams import Activations
from shardwise.engine.tree import tensors_in


def in_backward() -> bool:
    """Tell whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class Listener(Protocol):
    """The receiver of events: the engine, or the planner's recorder."""

    def on_pass_begin(self, order: list[int]) -> None:
        """A backward pass begins; ``order`` is the unit order of its forward passes."""

    def on_grad(self, unit: Any, leaf: torch.Tensor) -> None:
        """Autograd has written the gradient of a full parameter."""

    def on_call_reached(self, call: Call) -> None:
        """The backward of a call is about to begin; the listener may raise."""

    def on_backward(self, unit: Any, is_first: bool) -> None:
        """The backward of a unit's call begins; ``is_first``: the unit's first in this pass."""

    def on_call_end(self, call: Call) -> None:
        """The backward of a call has ended."""

    def on_unit_end(self, unit: Any) -> None:
        """The backward of all calls of a unit has ended."""

    def on_pass_end(self) -> None:
        """The backward pass has ended; units may still be open. `Passes.reset` must follow."""

    def on_pass_raised(self) -> None:
        """A pass begins after one that raised; `Passes.reset` must follow."""

    def on_double_backward(self) -> None:
        """A pass with create_graph=True has ended; `Passes.reset` must follow."""


class _PassToken:
    """Marks that a backward pass runs.

    Only the callback that autograd calls at the end of the pass holds it. If the pass raises,
    autograd drops the callback and the token with it.
    """


@dataclass(slots=True)
class _Progress:
    """One unit's calls, and its progress in the current backward pass."""

    calls: weakref.WeakSet[Call] = field(default_factory=weakref.WeakSet)  # recorded, graph alive
    in_backward: bool = False  # from the first call that the pass reaches to `Passes.close`
    num_grads: int = 0  # gradients written since `in_backward` became True
    used_outside: bool = False  # a parameter was used outside the unit's module


@torch._disable_dynamo
def _note_grad(passes: "Passes", unit: PassUnit, leaf: torch.Tensor) -> None:
    passes.note_grad(unit, leaf)


@torch._disable_dynamo
def _check_versions(unit: PassUnit, versions: tuple[int, ...], _: object) -> None:
    if versions != unit.read_versions():
        raise changed_since_forward(unit.name)


class Passes:
    """The running calls of a model's units, forward and backward."""

    def __init__(self, listener: Listener, activations: Activations | None = None) -> None:
        self._listener = listener
        self._activations = activations
        self._root: PassUnit | None = None
        self._inside: dict[int, frozenset[int]] = {}  # ids of modules inside a unit, on demand
        self._progress: list[_Progress] = []  # one per unit, by index
        self.stack: list[Call] = []  # the running forward calls, outermost first
        self.forward = ForwardPasses()
        # Calls in backward without a hook on an input, each with the node at which it began.
        self._unhooked: list[tuple[Call, int]] = []
        self._token: weakref.ref[_PassToken] | None = None  # of the current backward pass
        self.creates_graph = False  # the current backward pass has create_graph=True
        self._second_is_due = False  # the previous backward pass had create_graph=True

    def take_units(self, units: Sequence[PassUnit]) -> None:
        """Set the units, in the order of their indices, the root first."""
        self._root = units[0] if units else None
        self._progress = [_Progress() for _ in units]
        self._inside = {}

    def contains(self, unit: PassUnit, other: PassUnit) -> bool:
        """Tell whether ``other``'s module is inside a module of ``unit``."""
        if unit.index not in self._inside:
            modules = (inner for module in unit.modules for inner in module.modules())
            self._inside[unit.index] = frozenset(map(id, modules))
        return other is not unit and id(other.modules[0]) in self._inside[unit.index]

    # -- forward
    def enter(self, unit: PassUnit) -> Call:
        """Begin a call."""
        runs_backward = in_backward()
        if self._activations is not None and not runs_backward and self._is_outermost(unit):
            self._activations.open()
        recomputes = runs_backward and self._progress[unit.index].in_backward
        call = Call(unit, tuple(c.unit for c in self.stack), runs_backward, recomputes)
        self.stack.append(call)
        return call

    def record(self, call: Call) -> None:
        """Record the innermost call, which autograd records too."""
        self.forward.record(call)
        call.versions = call.unit.read_versions()
        self._progress[call.unit.index].calls.add(call)

    def watch_inputs(self, call: Call, inputs: object) -> None:
        """Register hooks on a call's inputs, which fire when its backward has ended."""

        for tensor in tensors_in(inputs):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._reach_input, call))
                call.has_input_hook = True

    @torch._disable_dynamo
    def _reach_input(self, call: Call, _: object) -> None:
        for begun in call.with_begun_peers:
            self.end_call(begun)

    def leave(self) -> Call:
        """End the forward of the innermost call."""
        call = self.stack.pop()
        if not self.stack:
            self.forward.current = None
        if self._activations is not None and self._is_outermost(call.unit):
            self._activations.close()
        return call

    def _is_outermost(self, unit: PassUnit) -> bool:
        """Tell whether a call is outermost; a call of the root is, even if old calls are left."""
        return not self.stack or unit is self._root

    def watch_outputs(self, call: Call, output: object) -> bool:
        """Register hooks on a recorded call's outputs; tell whether its backward is expected."""
        expects_backward = call.is_visited
        for tensor in tensors_in(output):
            if not tensor.requires_grad or tensor.grad_fn is None:
                continue
            expects_backward = True
            # On the node, not on the tensor: a node's hooks run after those of its tensors, so the
            # following unit is freed before this one is gathered. A view that is changed in place
            # later gets a new node; its base keeps the old node (pytorch#181832).
            for hooked in (tensor, tensor._base):
                if hooked is not None and hooked.grad_fn is not None:
                    node = hooked.grad_fn._sequence_nr()
                    hooked.grad_fn.register_prehook(partial(self._reach_output, call, node))
        call.enter(CallState.AWAITING if expects_backward else CallState.SPENT)
        return expects_backward

    @torch._disable_dynamo
    def _reach_output(self, call: Call, node: int, _: object) -> None:
        self._begin_backward(call, node)

    def watch_grad(self, unit: PassUnit, leaf: torch.Tensor) -> RemovableHandle:
        """Register a hook that runs when autograd has written a full parameter's gradient."""
        hook = partial(_note_grad, weakref.proxy(self), weakref.proxy(unit))
        return leaf.register_post_accumulate_grad_hook(hook)

    def use_outside(self, unit: PassUnit) -> bool:
        """Keep a unit open until the pass ends, because its parameter is used outside its module.

        Return False if the unit stays open until this use ends anyway, because it is recomputed in
        its backward. A unit without an input hook may close before this use's gradient arrives.
        """
        progress = self._progress[unit.index]
        waits = any(call.unit is unit for call, _ in self._unhooked)
        if progress.in_backward and in_backward() and not waits:
            return False
        progress.used_outside |= torch.is_grad_enabled()
        return True

    def watch_use(self, unit: PassUnit, leaf: torch.Tensor) -> torch.Tensor:
        """Return the leaf for one use outside its module, watched while its graph lives.

        Backward through the graph raises StateError if the parameters have changed since.
        """
        used = leaf.view_as(leaf) if leaf.requires_grad else leaf
        if used.grad_fn is None:
            return leaf
        used.grad_fn.register_prehook(partial(_check_versions, unit, unit.read_versions()))
        return used

    # -- backward
    @property
    def is_under_way(self) -> bool:
        """Tell whether a backward pass has begun and was not reset."""
        return self._token is not None

    def is_open(self, unit: PassUnit) -> bool:
        """Tell whether the pass has reached a unit, or a gradient came after the unit closed."""
        progress = self._progress[unit.index]
        return progress.in_backward or progress.num_grads > 0

    def note_grad(self, unit: PassUnit, leaf: torch.Tensor) -> None:
        """Count a gradient that was written; begin the pass if needed."""
        self._listener.on_grad(unit, leaf)
        self._begin_pass()
        self._progress[unit.index].num_grads += 1

    def expect_reduction(self, unit: PassUnit) -> None:
        """Count a gradient of the unit on some rank, so that the end of the pass closes it."""
        self._progress[unit.index].num_grads += 1

    def _begin_pass(self, call: Call | None = None) -> None:
        if self._token is not None and self._token() is None:
            self._listener.on_pass_raised()
        if call is not None:
            self.forward.reach(call)
        if self._token is None:
            self._listener.on_pass_begin(self.forward.order())
            token = _PassToken()
            self._token = weakref.ref(token)
            Variable._execution_engine.queue_callback(partial(self._end_pass, token))

    def _begin_backward(self, call: Call, node: int) -> None:
        """Begin the backward of a call at the node with this sequence number."""
        self._begin_pass(call)
        if call.has_begun:
            return
        parent = None if call.parent is None else call.parent()
        if parent is not None and parent.state is CallState.AWAITING:
            self._begin_backward(parent, node)  # the enclosing call begins first
        if torch.is_grad_enabled():
            self.creates_graph = True
        self._listener.on_call_reached(call)
        if call.versions != call.unit.read_versions():
            raise changed_since_forward(call.unit.name)
        is_first = self.begin_call(call, node)
        if not call.has_input_hook and call.unit is not self._root:
            self._unhooked.append((call, node))
        self._listener.on_backward(call.unit, is_first)

    def begin_call(self, call: Call, node: int = -1) -> bool:
        """Begin the backward of a call; tell whether it is the unit's first in this pass."""
        progress = self._progress[call.unit.index]
        is_first = not progress.in_backward
        progress.in_backward = True
        call.enter(CallState.BACKWARD)
        self.close_unhooked(call, node)
        return is_first

    def close_unhooked(self, begun: Call, node: int = -1) -> None:
        """Close the calls without an input hook whose backward must have ended by now.

        Backward runs nodes in the reverse order of forward, so a call has ended when a call outside
        it begins. Complete gradients are no reason to close: they may differ between ranks, and the
        order of reductions must not. If a call returns an earlier call's output unchanged, both
        begin at one node, and neither has ended then.
        """
        waiting = self._unhooked
        self._unhooked = []
        for call, begin_node in waiting:
            unit = call.unit
            if begin_node == node or unit in begun.enclosing or self.contains(unit, begun.unit):
                self._unhooked.append((call, begin_node))
            else:
                self.end_call(call)

    def end_call(self, call: Call) -> None:
        """Close one call, and its unit after the last open call."""
        if call.state in (CallState.FORWARD, CallState.PASSED) or self._token is None:
            return
        if self.creates_graph or self._second_is_due:
            return  # see Note [Double backward]
        if call.is_visited and call.state is not CallState.BACKWARD:
            return  # its visit comes next
        call.enter(CallState.PASSED)
        self._listener.on_call_end(call)
        unit = call.unit
        if not self._progress[unit.index].used_outside and not self.forward.awaits(unit):
            self.close(unit)

    def close(self, unit: PassUnit) -> None:
        """Close a unit."""
        progress = self._progress[unit.index]
        progress.num_grads = 0
        progress.in_backward = False
        self._listener.on_unit_end(unit)

    def begun_calls(self, unit: PassUnit) -> Iterator[Call]:
        """Yield the unit's calls that the backward pass has reached."""
        for call in list(self._progress[unit.index].calls):
            if call.has_begun:
                yield call

    @torch._disable_dynamo
    def _end_pass(self, token: _PassToken) -> None:
        if self.creates_graph:
            self._listener.on_double_backward()
        else:
            self._listener.on_pass_end()

    def reset(self) -> None:
        """Forget the pass after it has ended or raised."""
        self.forward.end_backward()
        for progress in self._progress:
            progress.used_outside = progress.in_backward = False
            progress.num_grads = 0
            for call in progress.calls:
                if not self.forward.awaits_backward(call):
                    call.end_pass()
        self._unhooked.clear()
        self._token = None
        self._second_is_due = self.creates_graph
        self.creates_graph = False

    def forget_forward(self) -> None:
        """Forget the running forward calls after a pass that raised."""
        self.stack.clear()
        self.forward.current = None
