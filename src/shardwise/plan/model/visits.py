"""Records when the engine would be called, on a plain module: the visits of a tape.

`engine.passes` finds out when that is, for the engine and here alike; nothing is gathered or
reduced.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.engine.calls import Call
from shardwise.engine.hooks import register_hooks
from shardwise.engine.passes import Passes
from shardwise.engine.tree import map_tensors, tensors_in
from shardwise.layout.units import UnitSpec
from shardwise.plan.model.tape import Phase, Visit, VisitKind


class _Unit:
    """What the visits of one unit depend on."""

    def __init__(self, index: int, spec: UnitSpec, params: list[nn.Parameter]) -> None:
        self.index = index
        self.name = spec.name
        self.module = spec.module
        self.modules = (spec.module,)
        self.params = params

    def read_versions(self) -> tuple[int, ...]:
        return ()


class Visitor:
    """Hooks a module's units; calls ``visit`` and, when a unit is closed, ``take_grads``.

    ``written`` is called with a parameter when autograd has written its gradient.

    ``place`` tells inside which unit, and in which phase, what runs now runs.
    """

    suspended = False

    def __init__(
        self,
        specs: tuple[UnitSpec, ...],
        params: dict[int, nn.Parameter],
        cast_to: torch.dtype | None,
        visit: Callable[[Visit], None],
        take_grads: Callable[[list[nn.Parameter]], None],
        written: Callable[[torch.Tensor], None],
    ) -> None:
        self.units = [
            _Unit(i, s, [params[id(p.param)] for p in s.params]) for i, s in enumerate(specs)
        ]
        self._cast_to = cast_to
        self._visit = visit
        self._take_grads = take_grads
        self._written = written
        self.first_in_checkpoint: set[int] = set()  # units by index
        self._region: Callable[[], Any] = lambda: None
        self._backward: list[_Unit] = []
        self._begun = False
        self._passes = Passes(self)
        self._passes.take_units(self.units)
        self._handles: list[Any] = []
        for unit in self.units:
            self._handles += register_hooks(self, unit)
            for param in unit.params:
                if param.requires_grad:
                    self._handles.append(self._passes.watch_grad(unit, param))

    def remove(self) -> None:
        """Take all hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    def place(self) -> tuple[int, Phase]:
        """Return the innermost unit that runs now, and the phase."""
        if self._passes.stack:
            unit: _Unit = self._passes.stack[-1].unit
            return unit.index, "recompute" if self._begun else "forward"
        if self._begun:
            return (self._backward[-1].index if self._backward else 0), "backward"
        return 0, "loss"

    def _say(
        self, kind: VisitKind, unit: _Unit, recomputes: bool = False, input_bytes: int = 0
    ) -> None:
        self._visit(Visit(kind, unit.index, recomputes, input_bytes))

    # -- forward (hooks.Watcher)
    def before_forward(self, unit: _Unit, args: Any, kwargs: Any) -> Any:
        """Record the visit, cast the inputs, watch them for backward."""
        call = self._passes.enter(unit)
        taken = 0
        if not call.in_backward and unit is not self.units[0]:  # masks and tables are not computed
            taken = sum(t.nbytes for t in tensors_in(args) if t.grad_fn is not None)
        self._say("before_forward", unit, call.recomputes, taken)
        if not call.in_backward:
            self._note_checkpoint(unit)
        args, kwargs = map_tensors(args, self._cast), map_tensors(kwargs, self._cast)
        if torch.is_grad_enabled() and not call.recomputes:
            self._passes.record(call)
            self._passes.watch_inputs(call, (args, kwargs))
        return args, kwargs

    def _note_checkpoint(self, unit: _Unit) -> None:
        """Note that a checkpoint is around a unit, and no unit before it was inside the same one.

        It is known by its hooks on saved tensors, which live as long as its graph.
        """
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0] is not self._region():
            self._region = weakref.ref(hooks[0])
            self.first_in_checkpoint.add(unit.index)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._cast_to is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._cast_to)

    def after_forward(self, unit: _Unit, output: Any) -> None:
        """Record the visit, watch the outputs for backward."""
        stack = self._passes.stack
        if not stack or stack[-1].unit is not unit:
            return
        self._say("after_forward", unit, stack[-1].recomputes)
        call = self._passes.leave()
        if call.is_recorded:
            self._passes.watch_outputs(call, output)

    # -- backward (passes.Listener)
    def on_pass(self, order: list[int]) -> None:
        """Do nothing: the first visit says that backward has begun."""

    def on_grad(self, unit: _Unit, leaf: torch.Tensor) -> None:
        """Say which gradient is there."""
        self._written(leaf)

    def on_reached(self, call: Call) -> None:
        """Do nothing: nothing is refused here."""

    def on_backward(self, unit: _Unit, is_first: bool) -> None:
        """Record the visit."""
        self._say("before_backward", unit)
        self._begun = True
        self._backward.append(unit)

    def on_call_over(self, call: Call) -> None:
        """Do nothing: what counts is the unit."""

    def on_unit_over(self, unit: _Unit) -> None:
        """Record the visit; the gradients are not this unit's any more."""
        self._say("after_backward", unit)
        self._backward = [u for u in self._backward if u is not unit]
        self._take_grads(unit.params)

    def on_pass_end(self) -> None:
        """Close what is still open; there is one pass only."""
        for unit in reversed(self.units):
            if self._passes.is_open(unit):
                self._passes.close(unit)

    def on_cut(self) -> None:
        """Do nothing: what raises ends the trace."""

    def on_double(self) -> None:
        """Do nothing: a pass with create_graph=True is not traced."""
