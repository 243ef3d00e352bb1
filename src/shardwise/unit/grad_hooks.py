"""Hooks on a parameter, called with its reduced gradient (optimizer in backward)."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ConfigError

Hook = Callable[[Any], None]


class GradHooks:
    """The hooks of one parameter; ``is_due`` if its gradient has grown since they ran."""

    def __init__(self) -> None:
        self.is_due = False
        self._hooks: dict[int, Hook] = OrderedDict()

    def __bool__(self) -> bool:
        """Tell whether the parameter has hooks."""
        return bool(self._hooks)

    def add(self, hook: Hook, leaf: torch.Tensor) -> RemovableHandle:
        """Register a hook. **Raises** RuntimeError for a frozen parameter, as torch does."""
        if not leaf.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        self.is_due = False
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def adopt(self, plain: torch.Tensor) -> None:
        """Take over the hooks of the original parameter; their handles stay valid."""
        if plain._post_accumulate_grad_hooks is not None:
            self._hooks = plain._post_accumulate_grad_hooks

    def run(self, param: Any) -> None:
        """Call the hooks if they are due."""
        is_due, self.is_due = self.is_due, False
        if is_due:
            for hook in list(self._hooks.values()):
                hook(param)


def check_hooks(name: str, param: torch.Tensor) -> None:
    """Refuse a parameter with hooks that sharding cannot keep. **Raises** ConfigError."""
    if param._backward_hooks:
        raise ConfigError(
            f"parameter '{name}' has a hook of register_hook(), which autograd calls with a "
            "gradient of this rank and micro-batch alone; the sharded parameter has only the mean. "
            "Remove it, and use register_post_accumulate_grad_hook(), which is called with the "
            "mean in p.grad, or change p.grad before optimizer.step()"
        )


class _Unit(Protocol):
    @property
    def params(self) -> Iterable[Any]: ...


def any_grad_hooks(units: Iterable[_Unit]) -> bool:
    """Tell whether any parameter has a hook."""
    return any(param.grad_hooks for unit in units for param in unit.params)


@torch.no_grad()
def run_grad_hooks(units: Iterable[_Unit]) -> None:
    """Call the hooks of the parameters that got a gradient, in the order of the units."""
    for unit in units:
        for param in unit.params:
            if param.grad_hooks and param.grad is not None:
                param.grad_hooks.run(param.sharded)
