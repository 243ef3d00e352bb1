"""Records when the engine would be called, on a plain module: the visits of a tape.

Note [The same calls as the engine's]
`engine.runtime` decides by forward hooks, by prehooks on the nodes that made a unit's outputs, by
hooks on its inputs, and at the end of backward. This file registers the same hooks in the same
places, so that the visits fall between the same operations; it gathers and reduces nothing.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from shardwise.engine.hooks import register_hooks
from shardwise.engine.nest import map_tensors, tensors_in
from shardwise.layout.units import UnitSpec
from shardwise.plan.model.tape import Phase, Visit, VisitKind


class _Use:
    """One forward call that autograd recorded; lives in its graph."""

    def __init__(self, enclosing: tuple["_Unit", ...]) -> None:
        self.enclosing = enclosing
        self.begun = self.done = self.spent = self.has_input_hook = False

    @property
    def is_open(self) -> bool:
        return not self.done and (self.begun or not self.spent)


class _Unit:
    """What the visits of one unit depend on."""

    def __init__(self, index: int, spec: UnitSpec, params: list[nn.Parameter]) -> None:
        self.index = index
        self.name = spec.name
        self.module = spec.module
        self.params = params
        self.uses: weakref.WeakSet[_Use] = weakref.WeakSet()
        self.in_backward = False
        self.num_grads = 0

    def contains(self, other: "_Unit") -> bool:
        return not self.name or other.name.startswith(f"{self.name}.")


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
        self._stack: list[tuple[_Unit, _Use | None]] = []
        self._backward: list[_Unit] = []
        self._unhooked: list[tuple[_Unit, _Use, int]] = []
        self._begun = False
        self._handles: list[Any] = []
        for unit in self.units:
            self._hook(unit)

    def _hook(self, unit: _Unit) -> None:
        def on_grad(param: torch.Tensor) -> None:
            self._ensure_callback()
            unit.num_grads += 1
            self._written(param)

        self._handles += register_hooks(self, unit)
        for param in unit.params:
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(on_grad))

    def remove(self) -> None:
        """Take all hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    def place(self) -> tuple[int, Phase]:
        """Return the innermost unit that runs now, and the phase."""
        if self._stack:
            return self._stack[-1][0].index, "recompute" if self._begun else "forward"
        if self._begun:
            return (self._backward[-1].index if self._backward else 0), "backward"
        return 0, "loss"

    def _say(self, kind: VisitKind, unit: _Unit, recomputes: bool = False) -> None:
        self._visit(Visit(kind, unit.index, recomputes))

    # -- forward
    def before_forward(self, unit: _Unit, args: Any, kwargs: Any) -> Any:
        """Record the visit, cast the inputs, watch them for backward."""
        recomputes = _in_backward() and unit.in_backward
        self._say("before_forward", unit, recomputes)
        enclosing = tuple(u for u, _ in self._stack)
        use = _Use(enclosing) if torch.is_grad_enabled() and not recomputes else None
        self._stack.append((unit, use))
        args, kwargs = map_tensors(args, self._cast), map_tensors(kwargs, self._cast)
        if use is not None:
            unit.uses.add(use)
            self._hook_inputs(unit, use, args, kwargs)
        return args, kwargs

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._cast_to is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._cast_to)

    def _hook_inputs(self, unit: _Unit, use: _Use, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._after_use(unit, use))
                use.has_input_hook = True

    def after_forward(self, unit: _Unit, output: Any) -> None:
        """Record the visit, watch the outputs for backward."""
        if not self._stack or self._stack[-1][0] is not unit:
            return
        recomputes = _in_backward() and unit.in_backward
        _, use = self._stack[-1]
        self._say("after_forward", unit, recomputes)
        self._stack.pop()
        if use is not None and not self._hook_outputs(unit, use, output):
            use.spent = True

    def _hook_outputs(self, unit: _Unit, use: _Use, output: Any) -> bool:
        found = False
        for tensor in tensors_in(output):
            if not tensor.requires_grad or tensor.grad_fn is None:
                continue
            found = True
            for made in (tensor, tensor._base):
                if made is not None and made.grad_fn is not None:
                    node = made.grad_fn._sequence_nr()
                    made.grad_fn.register_prehook(
                        lambda _, node=node: self._before_backward(unit, use, node)
                    )
        return found

    # -- backward
    def _ensure_callback(self) -> None:
        if not self._begun:
            Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: _Unit, use: _Use, node: int) -> None:
        self._ensure_callback()
        if use.begun:
            return
        use.begun = unit.in_backward = True
        use.done = False
        waiting, self._unhooked = self._unhooked, []
        for other, its_use, at in waiting:
            if at == node or other in use.enclosing or other.contains(unit):
                self._unhooked.append((other, its_use, at))
            else:
                self._after_use(other, its_use)
        if not use.has_input_hook and unit is not self.units[0]:
            self._unhooked.append((unit, use, node))
        self._say("before_backward", unit)
        self._begun = True
        self._backward.append(unit)

    def _after_use(self, unit: _Unit, use: _Use) -> None:
        if use.done or not self._begun:
            return
        use.done = True
        if not any(u.is_open for u in unit.uses):
            self._after_backward(unit)

    def _after_backward(self, unit: _Unit) -> None:
        for use in unit.uses:
            use.done = True
        unit.num_grads = 0
        unit.in_backward = False
        self._say("after_backward", unit)
        self._backward = [u for u in self._backward if u is not unit]
        self._take_grads(unit.params)

    def _end_backward(self) -> None:
        for unit in reversed(self.units):
            if unit.in_backward or unit.num_grads:
                self._after_backward(unit)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
