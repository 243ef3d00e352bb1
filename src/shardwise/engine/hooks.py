"""The only place where hooks are registered on modules.

Note [Ways past the root]
Some libraries wrap a model and then call what they wrapped: PEFT's ``generate()`` is that of the
base model. The hooks of the root unit, which has the parameters that are in no other unit, stand on
the wrapper and would see nothing. So the modules that the root merely wraps are entrances too. An
entrance does nothing while a pass of the model is under way, where the root has been entered
already; a call that comes through the wrapper is therefore handled as if there were no entrance.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.engine.runtime import Engine
from shardwise.unit.unit import Unit


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


class Entrance:
    """One module that the root merely wraps. See Note [Ways past the root]."""

    def __init__(self, engine: Engine, watcher: Watcher, root: Any, module: nn.Module) -> None:
        self.module = module
        self._engine = engine
        self._watcher = watcher
        self._root = root
        self._enters: list[bool] = []  # of the module's calls under way, outermost first

    @property
    def suspended(self) -> bool:
        """Tell whether forward passes go unnoticed now."""
        return self._engine.suspended

    def before_forward(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the root, unless a pass is under way."""
        self._enters.append(not self._engine.is_running())
        return self._watcher.before_forward(self._root, args, kwargs) if self._enters[-1] else None

    def after_forward(self, unit: Any, output: Any) -> Any:
        """Leave the root where this call entered it."""
        if self._enters and self._enters.pop():
            return self._watcher.after_forward(self._root, output)
        return None


def register_wrappers(
    engine: Engine, units: list[Unit], watcher: Watcher | None = None, root: Any = None
) -> list[nn.Module]:
    """Make the engine see calls of what the root merely wraps; return these modules.

    ``watcher`` and ``root``: who is told of them instead, and of what.
    """
    first = units[0]
    found = wrapped_by(first.module, {id(module) for u in units for module in u.modules})
    for module in found:
        entrance = Entrance(engine, watcher or engine, first if root is None else root, module)
        register_hooks(entrance, entrance)
    return found


def wrapped_by(module: nn.Module, others: Collection[int]) -> list[nn.Module]:
    """Return the chain of only children with parameters, down to one of ``others`` (ids)."""
    found: list[nn.Module] = []
    while not any(p is not None for p in module._parameters.values()):
        inner = [child for child in module.children() if any(True for _ in child.parameters())]
        if len(inner) != 1 or id(inner[0]) in others:
            break
        module = inner[0]
        found.append(module)
    return found
