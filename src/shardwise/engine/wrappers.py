"""Calls of what the root unit merely wraps: they are calls of the root.

Note [Ways past the root]
Some libraries wrap a model and then call what they wrapped: PEFT's ``generate()`` is that of the
base model. The hooks of the root unit, which has the parameters that are in no other unit, stand on
the wrapper and would see nothing. So the modules that the root merely wraps are entrances too. An
entrance does nothing while a pass of the model is under way, where the root has been entered
already; a call that comes through the wrapper is therefore handled as if there were no entrance.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from shardwise.engine.hooks import Watcher, register_hooks
from shardwise.engine.runtime import Engine
from shardwise.unit.unit import Unit


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
