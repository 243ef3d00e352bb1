"""Partition of a model's modules and parameters into units.

Units are exactly the classes or instances that the user names. Without names they are:

- the modules that Hugging Face models name, see Note [Hints of Hugging Face models];
- similar children of a ``ModuleList``;
- layers outside these that are as large as one of them.

All other parameters belong to the root unit. A tied weight belongs to the lowest unit that contains
all its users.

Note [Hints of Hugging Face models]
``_no_split_modules`` names classes whose modules should be on one device. ``_fsdp_plan`` maps
paths, with ``*`` for a number, to "free_full_weight" (such a module becomes a unit) or to
"keep_full_weight" (its parameters belong to the root unit). Many plans are a default with paths
that the model lacks; single layers in them, usually embeddings, are units if they are large. Both
hints apply to the modules inside the module that has them, so they also work for a model inside a
wrapper, and for a vision model inside another model. If a model's config has
``is_encoder_decoder``, the encoder is a unit for its parameters outside its layers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

from shardwise.config import UnitChoice
from shardwise.errors import ConfigError
from shardwise.mesh import DataAxes


@dataclass(frozen=True)
class ParamUse:
    """One place where a parameter is registered: ``module._parameters[attribute]``."""

    module: nn.Module
    attribute: str
    name: str


@dataclass(frozen=True)
class ParamSpec:
    """A parameter that a unit owns, with all its uses; the first use names it.

    The parameter is cut along ``dim``, or one rank of the shard axis, its ``owner``, has it whole;
    see `placements`.
    """

    param: nn.Parameter
    uses: tuple[ParamUse, ...]
    dim: int = 0
    owner: int | None = None

    @property
    def name(self) -> str:
        """The parameter's fully qualified name."""
        return self.uses[0].name


@dataclass(frozen=True)
class UnitSpec:
    """A unit: its module, that module's name ('' is the root), and the parameters it owns.

    ``optional``: some ranks may skip it while others run it. ``axes`` are those of the unit's mesh
    if it is not the model's, see `placements`; several units of one module differ in ``axes``.
    """

    name: str
    module: nn.Module
    params: tuple[ParamSpec, ...]
    optional: bool = False
    axes: DataAxes | None = None


def partition_into_units(
    model: nn.Module,
    units: UnitChoice | Iterable[UnitChoice] | None,
    optional: UnitChoice | Iterable[UnitChoice] = (),
) -> tuple[UnitSpec, ...]:
    """Divide the model's parameters among units; the root unit is first, then in module order.

    ``units`` may be one choice; a list of modules is a choice of all its items. The choices in
    ``optional`` are units too.

    **Raises** ConfigError, with the model's classes, if a named class or instance matches none.
    """
    skippable = _named_modules(model, optional, "optional") - {id(model)}
    chosen = _chosen_modules(model, units) | skippable
    names = {id(m): n for n, m in model.named_modules()}
    owners = [model, *(m for _, m in model.named_modules() if id(m) in chosen and m is not model)]
    ancestors = {id(m): _unit_path(names[id(m)], model, chosen) for m in model.modules()}
    uses: dict[int, list[ParamUse]] = {}
    params: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            uses.setdefault(id(param), []).append(ParamUse(module, attribute, name))
            params[id(param)] = param
    owned: dict[int, list[ParamSpec]] = {id(m): [] for m in owners}
    for key, places in uses.items():
        paths = [ancestors[id(use.module)] for use in places]
        owner = _lowest_common(paths)
        owned[id(owner)].append(ParamSpec(params[key], tuple(places)))
    return tuple(
        UnitSpec(names[id(m)], m, tuple(owned[id(m)]), id(m) in skippable)
        for m in owners
        if owned[id(m)] or m is model
    )


def _unit_path(name: str, model: nn.Module, chosen: set[int]) -> tuple[nn.Module, ...]:
    """Return the unit modules on the path from the root to module ``name``, root first."""
    path = [model]
    module = model
    for part in name.split(".") if name else ():
        module = module._modules[part]  # type: ignore[assignment]
        if id(module) in chosen and module is not model:
            path.append(module)
    return tuple(path)


def _lowest_common(paths: Sequence[tuple[nn.Module, ...]]) -> nn.Module:
    common = paths[0][0]
    for level in zip(*paths, strict=False):
        if any(module is not level[0] for module in level):
            break
        common = level[0]
    return common


def _chosen_modules(model: nn.Module, units: UnitChoice | Iterable[UnitChoice] | None) -> set[int]:
    if units is not None:
        return _named_modules(model, units)
    blocks = _hinted_modules(model)
    blocks += _similar_children_outside(model, blocks)
    return {id(m) for m in (*blocks, *_encoders(model), *_large_leaves(model, blocks))}


def _hinted_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hints name; see Note [Hints of Hugging Face models].

    If only one of them is inside another, it is left out.
    """
    hinted: dict[int, nn.Module] = {}
    for owner in model.modules():
        classes = set(getattr(owner, "_no_split_modules", None) or ())
        paths = _freed_paths(getattr(owner, "_fsdp_plan", None) or {})
        if not classes and paths is None:
            continue
        for name, module in owner.named_modules():
            is_freed = paths is not None and paths.fullmatch(name) and not _is_leaf(module)
            if type(module).__name__ in classes or is_freed:
                hinted[id(module)] = module
    for module in list(hinted.values()):
        inside = [m for m in module.modules() if m is not module and id(m) in hinted]
        if len(inside) == 1:
            del hinted[id(inside[0])]
    return [m for m in hinted.values() if m is not model]


def _encoders(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the encoders that ``generate()`` calls separately, with their hooks."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False) is True:
            encoder = getattr(module, "encoder", None)
            if isinstance(encoder, nn.Module):
                yield encoder


def _freed_paths(plan: Mapping[str | tuple[str, ...], str]) -> re.Pattern[str] | None:
    """Return a pattern of the paths in an ``_fsdp_plan`` whose weights are freed after use."""
    freed = [key for key, style in plan.items() if style == "free_full_weight"]
    paths = [path for key in freed for path in ((key,) if isinstance(key, str) else key)]
    patterns = [re.escape(path).replace(r"\*", r"\d+") for path in paths]
    return re.compile("|".join(patterns)) if patterns else None


def _similar_children_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return similar children outside the blocks, if together they are as large as a block."""
    smallest = min((_numel(block.parameters()) for block in blocks), default=0)
    inside = {id(module) for block in blocks for module in block.modules()}
    chosen: list[nn.Module] = []
    for children in _similar_children(model):
        is_outside = all(id(m) not in inside for child in children for m in child.modules())
        if is_outside and sum(_numel(child.parameters()) for child in children) >= smallest:
            chosen += children
    return chosen


def _large_leaves(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers outside the blocks that are as large as a block: embeddings, heads.

    In the root unit they would stay full, with unreduced gradients, from the first layer's forward
    to its backward.
    """
    smallest = min((_numel(b.parameters()) for b in blocks), default=0)
    inside = {id(m) for block in blocks for m in block.modules()}
    for module in model.modules():
        is_leaf = module is not model and _is_leaf(module)
        if is_leaf and id(module) not in inside and _numel(module.parameters()) >= smallest > 0:
            yield module


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _numel(params: Iterator[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def _named_modules(
    model: nn.Module, units: UnitChoice | Iterable[UnitChoice], setting: str = "units"
) -> set[int]:
    """Return the ids of the modules that match the choices of a setting."""
    ids: set[int] = set()
    for choice in _choices(units, setting):
        matches = {id(m) for m in model.modules() if _matches(m, choice)}
        if not matches:
            raise _no_match(model, choice, setting)
        ids |= matches
    return ids


def _choices(units: UnitChoice | Iterable[UnitChoice], setting: str) -> list[UnitChoice]:
    """Return the choices one by one. **Raises** ConfigError for other types."""
    if isinstance(units, nn.ModuleDict):
        return list(units.values())
    is_list = isinstance(units, nn.ModuleList | nn.Sequential)
    if isinstance(units, str | type) or (isinstance(units, nn.Module) and not is_list):
        return [units]
    expected = "expected module classes, their names, or modules"
    if not isinstance(units, Iterable):
        raise ConfigError(f"{setting}={units!r}: {expected}")
    choices = list(units)
    for choice in choices:
        if not isinstance(choice, str | type | nn.Module):
            raise ConfigError(f"{setting}: {expected}, got {choice!r} among them")
    return choices


def _no_match(model: nn.Module, choice: UnitChoice, setting: str) -> ConfigError:
    classes = sorted({type(m).__name__ for m in model.modules()})
    if isinstance(choice, nn.Module):
        problem = f"this {type(choice).__name__} is not in the model"
    else:
        name = (choice or "''") if isinstance(choice, str) else choice.__name__
        close = get_close_matches(name, classes, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close and close[0] != name else ""
        if close and close[0] == name:
            hint = ", which is another class of that name"
        problem = f"{name} matches no module{hint}"
    return ConfigError(f"{setting}: {problem}; the model has {', '.join(classes)}")


def _matches(module: nn.Module, choice: UnitChoice) -> bool:
    if isinstance(choice, str):
        return type(module).__name__ == choice
    if isinstance(choice, type):
        return isinstance(module, choice)
    return module is choice


def _similar_children(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the children of each outermost ModuleList, if they have one type and parameters."""
    children = [c for c in module.children() if any(True for _ in c.parameters())]
    are_similar = len(children) > 1 and len({type(c) for c in children}) == 1
    if isinstance(module, nn.ModuleList) and are_similar:
        yield children
        return
    for child in module.children():
        yield from _similar_children(child)


def find_device(units: Sequence[UnitSpec]) -> torch.device | None:
    """Return the device of all parameters; ``None`` if all are on meta.

    **Raises** ConfigError for several devices, with the name of one parameter on each.
    """
    first: dict[torch.device, str] = {}
    for unit in units:
        for spec in unit.params:
            first.setdefault(spec.param.device, spec.name)
    real = {d: n for d, n in first.items() if d.type != "meta"}
    if len(real) > 1:
        places = "; ".join(f"{name} on {device}" for device, name in real.items())
        raise ConfigError(f"model: parameters on different devices ({places}); move it to one")
    return next(iter(real), None)
