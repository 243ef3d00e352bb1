"""The only place where hooks are registered on modules."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class HasModule(Protocol):
    """A unit, for all that hooks need to know."""

    @property
    def module(self) -> nn.Module:
        """The module whose forward passes are watched."""


class Watcher(Protocol):
    """Who is called: the engine, or the planner that records when the engine would be."""

    @property
    def suspended(self) -> bool:
        """Tell whether forward passes go unnoticed now."""

    def before_forward(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments that the module gets."""

    def after_forward(self, unit: Any, output: Any) -> Any:
        """See the output (None after a forward pass that raised); return another one, or None."""


class _Hooks:
    """The two hooks of one unit, opaque to torch.compile.

    A compiled module breaks its graph there and compiles what lies between.
    """

    def __init__(self, watcher: Watcher, unit: HasModule) -> None:
        self._watcher = watcher
        self._unit = unit

    @torch._disable_dynamo
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._watcher.suspended:
            return self._watcher.before_forward(self._unit, args, kwargs)
        return None

    @torch._disable_dynamo
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._watcher.suspended:
            return self._watcher.after_forward(self._unit, output)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hooks":
        """Stay one, as functions do; the engine says what becomes of a copied model."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Answer ``torch.save(model)``, which meets the hooks first, as the engine does."""
        return self._watcher.__reduce_ex__(protocol)


def register_hooks(watcher: Watcher, unit: HasModule) -> tuple[RemovableHandle, ...]:
    """Make the engine see the forward passes of the unit's module; return what removes hooks."""
    hooks = _Hooks(watcher, unit)
    return (
        unit.module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(hooks.post_forward, always_call=True),
    )


def forget_hooks(module: nn.Module) -> None:
    """Take our hooks from a module that was copied with them; those of others stay."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    for hooks in (before, after):
        ours = [n for n, h in hooks.items() if isinstance(getattr(h, "__self__", None), _Hooks)]
        for number in ours:
            del hooks[number]
            if hooks is before:
                module._forward_pre_hooks_with_kwargs.pop(number, None)
            else:
                module._forward_hooks_with_kwargs.pop(number, None)
                module._forward_hooks_always_called.pop(number, None)


def register_state_dict_hooks(
    module: nn.Module, before: Callable[[], None], after_load: Callable[[], None]
) -> None:
    """Call ``before`` when the module's state is asked for or loaded, ``after_load`` afterwards."""
    module.register_state_dict_pre_hook(lambda *_: before())
    module.register_load_state_dict_pre_hook(lambda *_: before())
    module.register_load_state_dict_post_hook(lambda *_: after_load())


def register_load_check(model: nn.Module, check: Callable[..., None]) -> None:
    """Call ``check`` before a module of the model loads its state; once, if called again."""
    for module in model.modules():
        if not _numbers_of(module, check):
            module.register_load_state_dict_pre_hook(check)


def forget_load_check(module: nn.Module, check: Callable[..., None]) -> None:
    """Take from a copied module what `register_load_check` has added."""
    for number in _numbers_of(module, check):
        del module._load_state_dict_pre_hooks[number]


def _numbers_of(module: nn.Module, check: Callable[..., None]) -> list[int]:
    hooks = module._load_state_dict_pre_hooks.items()
    return [number for number, hook in hooks if getattr(hook, "hook", None) is check]
