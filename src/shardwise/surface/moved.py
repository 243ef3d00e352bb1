"""Parameters that were moved, replaced, added or removed in a model while it was gathered.

Libraries change modules inside `gathered`: a parametrization and `torch.nn.utils.prune` register a
parameter under another name, other code assigns a new one. A move is kept: the sharded parameter
takes the new places, and has the new name in checkpoints. A new parameter of the same shape and
dtype in all places of an old one gives it its values. Everything else would lose a value or leave a
parameter that no rank sums, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

from shardwise.errors import StateError
from shardwise.layout.units import ParamUse
from shardwise.unit.param import ShardedParam
from shardwise.unit.unit import Unit

Place = tuple[int, str]  # id of a module, attribute


@dataclass
class Moves:
    """The changes of one context: new uses, new full values, and the reasons to refuse."""

    uses: list[tuple[ShardedParam, tuple[ParamUse, ...]]] = field(default_factory=list)
    values: dict[str, nn.Parameter] = field(default_factory=dict)  # by the parameter's name
    refused: list[str] = field(default_factory=list)

    def facts(self, *, with_values: bool) -> list[str]:
        """Return the changes as lines of text, equal on ranks that made the same changes."""
        lines = [f"'{param.name}' as '{uses[0].name}'" for param, uses in self.uses]
        if with_values:
            lines += [f"'{name}' replaced" for name in self.values]
        return [*self.refused, *lines] or ["no change"]

    def check(self) -> None:
        """Raise StateError for changes that cannot be kept, on all ranks."""
        if self.refused:
            raise StateError(
                f"gathered(): {'; '.join(self.refused[:3])}. The model has its parameters of "
                "before the context again. Replace a parameter by one of the same shape and dtype, "
                "move it inside its unit, or change the model before shard()"
            )

    def keep(self) -> None:
        """Register the sharded parameters in their new places."""
        for param, uses in self.uses:
            param.uses = uses
        for unit in {id(param.unit): param.unit for param, _ in self.uses}.values():
            unit.slots.replace_params(unit.params)


def find_moves(
    root: nn.Module,
    params: Sequence[ShardedParam],
    fulls: Sequence[nn.Parameter],
    *,
    may_replace: bool,
) -> Moves:
    """Compare the places of full parameters in the model with those of before the context."""
    by_id = {id(full): param for param, full in zip(params, fulls, strict=True)}
    now: dict[int, list[ParamUse]] = {id(param): [] for param in params}
    others: dict[Place, tuple[str, nn.Parameter]] = {}
    for use, tensor in _all_uses(root):
        param = by_id.get(id(tensor))
        if param is None:
            others[id(use.module), use.attribute] = use.name, tensor
        else:
            now[id(param)].append(use)
    moves = Moves()
    for param, full in zip(params, fulls, strict=True):
        uses = now[id(param)]
        before = _places(param.uses)
        places = _places(uses)
        if before == places or (places <= before and _are_unchanged(param, full)):
            continue
        new = [others.get(place) for place in before]
        if not uses and _is_replacement(new, full):
            moves.values[param.name] = next(tensor for _, tensor in filter(None, new))
            for place in before:
                others.pop(place)
        elif not uses:
            moves.refused.append(f"'{param.name}' was removed, or replaced by another shape")
        elif any(new):
            moves.refused.append(f"'{param.name}' was replaced in one of its places")
        elif not _are_inside(uses, param.unit):
            moves.refused.append(f"'{param.name}' was moved out of its unit, to '{uses[0].name}'")
        else:
            moves.uses.append((param, tuple(uses)))
    added = (name for name, tensor in others.values() if tensor.requires_grad)
    moves.refused += [f"'{name}' was added, and no rank would sum its gradient" for name in added]
    if moves.values and not may_replace:
        moves.refused.append("parameters were replaced without writeback=True")
    return moves


_CONTAINERS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)]


class ModuleBefore:
    """A module's class, parameter names, buffers, children and hooks, to restore them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kind = type(module)
        # torch makes a class for each parametrized module, with a property for each parameter.
        self._members = dict(vars(self._kind)) if parametrize.is_parametrized(module) else None
        self._contents = {name: copy.copy(vars(module)[name]) for name in _CONTAINERS}

    def restore(self) -> None:
        """Undo the changes of the context; the caller puts the sharded parameters back."""
        module = self._module
        kind = self._kind
        if self._members is not None:
            for name in set(vars(kind)) - set(self._members):
                delattr(kind, name)
            for name in set(self._members) - set(vars(kind)):
                setattr(kind, name, self._members[name])
        module.__class__ = kind
        for name in self._contents["_parameters"]:
            vars(module).pop(name, None)  # pruning puts a plain tensor there
        for name, before in self._contents.items():
            container = vars(module)[name]
            container.clear()
            container.update(before)


def _all_uses(root: nn.Module) -> Iterator[tuple[ParamUse, nn.Parameter]]:
    for path, module in root.named_modules():
        for attribute, tensor in module._parameters.items():
            if tensor is not None:
                name = f"{path}.{attribute}" if path else attribute
                yield ParamUse(module, attribute, name), tensor


def _places(uses: Sequence[ParamUse]) -> set[Place]:
    return {(id(use.module), use.attribute) for use in uses}


def _are_unchanged(param: ShardedParam, full: torch.Tensor) -> bool:
    """Tell whether the parameter's modules hold ``full``, even if they have left the model."""
    return all(use.module._parameters.get(use.attribute) is full for use in param.uses)


def _is_replacement(new: Sequence[tuple[str, nn.Parameter] | None], full: torch.Tensor) -> bool:
    """Tell whether one parameter of the same shape and dtype is in all places."""
    tensors = [pair[1] for pair in new if pair is not None]
    if None in new or len(set(map(id, tensors))) != 1:
        return False
    first = tensors[0]
    return (first.shape, first.dtype, type(first.data)) == (full.shape, full.dtype, type(full.data))


def _are_inside(uses: Sequence[ParamUse], unit: Unit) -> bool:
    inside = {id(inner) for module in unit.modules for inner in module.modules()}
    return all(id(use.module) in inside for use in uses)
