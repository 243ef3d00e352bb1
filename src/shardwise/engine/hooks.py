"""Registration of hooks on modules, also on those that the root wraps; no other file registers any.

Note [Calls that bypass the root]
Some libraries wrap a model and then call the wrapped module: PEFT's ``generate()`` is that of the
base model. The hooks of the root unit, which has the parameters that are in no other unit, are on
the wrapper and would not run. So a module that the root merely wraps is an *entrance*: its hooks
run the root's actions. While a pass of the model runs, the root has been entered already, and an
entrance does nothing. So it changes nothing for a call through the wrapper.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol, SupportsIndex

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.engine.runtime import Engine
from shardwise.unit.unit import Unit


class HasModule(Protocol):
    """Interface of `Unit` required by hooks."""

    @property
    def module(self) -> nn.Module:
        """The module with the forward hooks."""


class Watcher(Protocol):
    """The receiver of hook calls: the engine, or the planner's recorder."""

    @property
    def suspended(self) -> bool:
        """Tell whether the receiver ignores forward passes now."""

    def before_forward(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments to call the module with."""

    def after_forward(self, unit: Any, output: object) -> object:
        """Take the output (None if forward raised); return a replacement, or None."""


class _Hooks:
    """The two hooks of one unit, opaque to torch.compile.

    A compiled module breaks its graph at the hooks and compiles the code between them.
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
    def post_forward(self, module: nn.Module, args: object, output: object) -> object:
        if not self._watcher.suspended:
            return self._watcher.after_forward(self._unit, output)
        return None

    def __deepcopy__(self, memo: object) -> "_Hooks":
        """Return self, as functions do; the engine decides how a model is copied."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Raise the engine's error for ``torch.save(model)``, which pickles the hooks first."""
        return self._watcher.__reduce_ex__(protocol)


def register_hooks(watcher: Watcher, unit: HasModule) -> tuple[RemovableHandle, ...]:
    """Register the hooks of the unit's module; return their handles."""
    hooks = _Hooks(watcher, unit)
    return (
        unit.module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(hooks.post_forward, always_call=True),
    )


def forget_hooks(module: nn.Module) -> None:
    """Remove our hooks from a copied module; hooks of other libraries stay."""
    pre_hooks = module._forward_pre_hooks
    for hooks in (pre_hooks, module._forward_hooks):
        numbers = [n for n, h in hooks.items() if isinstance(getattr(h, "__self__", None), _Hooks)]
        for number in numbers:
            del hooks[number]
            if hooks is pre_hooks:
                module._forward_pre_hooks_with_kwargs.pop(number, None)
            else:
                module._forward_hooks_with_kwargs.pop(number, None)
                module._forward_hooks_always_called.pop(number, None)


def register_state_dict_hooks(
    module: nn.Module, before: Callable[[], None], after_load: Callable[[], None]
) -> None:
    """Call ``before`` before the module saves or loads its state, ``after_load`` after a load."""
    module.register_state_dict_pre_hook(lambda *_: before())
    module.register_load_state_dict_pre_hook(lambda *_: before())
    module.register_load_state_dict_post_hook(lambda *_: after_load())


def register_load_check(model: nn.Module, check: Callable[..., None]) -> None:
    """Call ``check`` before a module of the model loads its state; register it only once."""
    for module in model.modules():
        if not _numbers_of(module, check):
            module.register_load_state_dict_pre_hook(check)


def forget_load_check(module: nn.Module, check: Callable[..., None]) -> None:
    """Remove from a copied module the hook of `register_load_check`."""
    for number in _numbers_of(module, check):
        del module._load_state_dict_pre_hooks[number]


def _numbers_of(module: nn.Module, check: Callable[..., None]) -> list[int]:
    hooks = module._load_state_dict_pre_hooks.items()
    return [number for number, hook in hooks if getattr(hook, "hook", None) is check]


class Entrance:
    """One module that the root merely wraps. See Note [Calls that bypass the root]."""

    def __init__(self, engine: Engine, watcher: Watcher, root: object, module: nn.Module) -> None:
        self.module = module
        self._engine = engine
        self._watcher = watcher
        self._root = root
        self._enters: list[bool] = []  # for each running call, outermost first

    @property
    def suspended(self) -> bool:
        """Tell whether the engine ignores forward passes now."""
        return self._engine.suspended

    def before_forward(self, unit: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Enter the root unless a pass runs."""
        self._enters.append(not self._engine.is_running())
        return self._watcher.before_forward(self._root, args, kwargs) if self._enters[-1] else None

    def after_forward(self, unit: object, output: object) -> object:
        """Leave the root if this call entered it."""
        if self._enters and self._enters.pop():
            return self._watcher.after_forward(self._root, output)
        return None


def register_wrappers(
    engine: Engine, units: list[Unit], watcher: Watcher | None = None, root: object = None
) -> list[nn.Module]:
    """Register hooks on the modules that the root merely wraps; return these modules.

    ``watcher`` and ``root`` replace the engine and the root unit as receiver and argument of calls.
    """
    first = units[0]
    wrapped = wrapped_by(first.module, {id(module) for u in units for module in u.modules})
    for module in wrapped:
        entrance = Entrance(engine, watcher or engine, first if root is None else root, module)
        register_hooks(entrance, entrance)
    return wrapped


def wrapped_by(module: nn.Module, others: Collection[int]) -> list[nn.Module]:
    """Return the chain of only children with parameters, down to one of ``others`` (ids)."""
    chain: list[nn.Module] = []
    while not any(p is not None for p in module._parameters.values()):
        inner = [child for child in module.children() if any(True for _ in child.parameters())]
        if len(inner) != 1 or id(inner[0]) in others:
            break
        module = inner[0]
        chain.append(module)
    return chain
