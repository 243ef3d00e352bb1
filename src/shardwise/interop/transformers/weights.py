"""Stored tensors into a sharded model: which make which parameter, and this rank's slices of them.

Note [Conversions by rows]
transformers 5 joins tensors that older checkpoints store separately: the experts of a mixture
become one tensor with an expert per row. If a conversion stacks its sources along dim 0 and then
only joins the stacks along other dims, row ``e`` needs only the sources number ``e``, so a rank
reads those of its own rows. Any other conversion gets its sources whole on every rank, one
parameter at a time.

Note [The draws of a plain model]
A head that a checkpoint lacks is drawn at random, and two scripts with the same seed should get the
same one, sharded or not. So every rank walks the modules as transformers does, with rank 0's
generator, draws the whole parameter on the CPU, and keeps its own slice. If a rank's generator was
the same as rank 0's, it continues after the draws, as in a plain script; else it is put back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SkipParameters,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import guard_torch_init_functions

from shardwise.checkpoint.container import element_bytes, torch_dtype
from shardwise.checkpoint.restore import Place, places_of_sharded
from shardwise.checkpoint.source import Source, TensorInfo
from shardwise.comm.control import Control
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.tensor.plain_state import owner_of

if TYPE_CHECKING:
    from transformers.utils.loading_report import LoadStateDictInfo

_PIECE_BYTES = 64 << 20  # of one tensor in memory at a time
_DONE = "_is_hf_initialized"  # transformers' initialisation skips tensors with this attribute


@dataclass(frozen=True)
class Recipe:
    """How parameters or buffers are made of stored tensors.

    Without ``converter`` the one target is the one stored tensor. With it, ``sources`` are pairs of
    a pattern and the tensor that it matches, in the order of the converter's arguments.
    """

    targets: tuple[str, ...]
    sources: tuple[tuple[str, TensorInfo], ...]
    converter: WeightConverter | None = None

    @property
    def is_by_rows(self) -> bool:
        """True if each row needs only its own sources. See Note [Conversions by rows]."""
        if self.converter is None or len(self.targets) != 1:
            return False
        first, *others = self.converter.operations
        stacks = type(first) is MergeModulelist and first.dim == 0
        return stacks and all(type(op) is Concatenate and op.dim > 0 for op in others)

    def convert(
        self,
        tensors: Sequence[torch.Tensor],
        model: Any,
        report: LoadStateDictInfo,
        sources: Sequence[tuple[str, TensorInfo]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Convert the sources, or those of some rows; return {} and fill ``report`` on failure."""
        converter: Any = deepcopy(self.converter)
        name = self.targets[0]
        for (pattern, info), tensor in zip(sources or self.sources, tensors, strict=True):
            converter.add_tensor(name, info.name, pattern, tensor)
        try:
            made = converter.convert(name, model=model, config=model.config, loading_info=report)
        except SkipParameters:
            return {}
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def match_keys(
    model: nn.Module,
    infos: Sequence[TensorInfo],
    mapping: Sequence[WeightTransform],
    report: LoadStateDictInfo,
) -> dict[str, Recipe]:
    """Return the recipe of every parameter and buffer that can be made, by its name.

    ``mapping`` are transformers' transforms for this model. Missing and unexpected names and other
    shapes are added to ``report``, transformers' own account of them.

    **Raises** CheckpointError when two stored tensors are for one parameter.
    """
    expected = model.state_dict()
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    direct: dict[str, TensorInfo] = {}
    grouped: dict[str, list[tuple[str, TensorInfo]]] = {}
    prefix = getattr(model, "base_model_prefix", "")
    for info in sorted(infos, key=lambda i: dot_natural_key(i.name)):
        name, pattern = rename_source_key(info.name, renamings, converters, prefix, expected)
        if name not in expected and info.name in expected:
            name, pattern = rename_source_key(info.name, [], [], prefix, expected)
        if name in expected and pattern is not None:
            grouped.setdefault(name, []).append((pattern, info))
        elif name in expected:
            if direct.setdefault(name, info) is not info:
                both = f"'{direct[name].name}' and '{info.name}'"
                raise CheckpointError(f"the stored tensors {both} are both for '{name}'")
        elif pattern is not None:
            first, *_ = patterns = by_pattern[pattern].target_patterns
            report.unexpected_keys |= {name.replace(first, target) for target in patterns}
        else:
            report.unexpected_keys.add(name)
    made = [(Recipe((name,), (("", info),)), {name: info.shape}) for name, info in direct.items()]
    for name, sources in grouped.items():
        recipe = Recipe((name,), tuple(sources), by_pattern[sources[0][0]])
        empty = [
            torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
            for _, info in sources
        ]
        shapes = {n: tuple(t.shape) for n, t in recipe.convert(empty, model, report).items()}
        made.append((Recipe(tuple(shapes), recipe.sources, recipe.converter), shapes))
    mismatched: Any = report.mismatched_keys  # typed as shapes of one dim
    recipes = {}
    for recipe, shapes in made:
        for name, shape in shapes.items():
            report.missing_keys.discard(name)
            if name not in expected:
                report.unexpected_keys.add(name)
            elif tuple(shape) != tuple(expected[name].shape):
                mismatched.add((name, torch.Size(shape), expected[name].shape))
            else:
                recipes[name] = recipe
    return recipes


def _places_of(model: nn.Module) -> dict[str, Place]:
    """Return this rank's slice of every parameter and persistent buffer, by all of its names."""
    places = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter):
            data = tensor.detach().view(-1)
            places[name] = Place((name,), tensor, tuple(tensor.shape), 0, data.numel(), data)
    for param in (param for unit in engine_of(model).units for param in unit.params):
        if param.cut.piece.shape != param.cut.shape:
            raise ConfigError(
                f"parameter '{param.name}' is {param.sharded.placements}: weights are read into "
                "parameters that are cut along dim 0 alone; load them, and shard the model then"
            )
        place, *others = places_of_sharded(param)
        if others:
            kind = type(param.sharded.to_local()).__name__
            raise ConfigError(
                f"parameter '{param.name}' is a {kind}, which is made of several "
                "tensors; load the plain weights, and make tensors of this class of them then"
            )
        for use in param.uses:
            places[use.name] = replace(place, data=place.data.view(-1))
    return places


@torch.no_grad()
def read_weights(
    model: nn.Module,
    source: Source,
    recipes: Mapping[str, Recipe],
    dtypes: Mapping[str, torch.dtype],
    report: LoadStateDictInfo,
) -> None:
    """Read this rank's slice of every parameter and buffer that has a recipe.

    ``dtypes`` are the model's before it is sharded. A value is cast to that dtype first, as in a
    plain model, then to the shard's.

    **Cost** this rank's bytes of each file; in memory 64 MiB of them, or one conversion.
    """
    places = _places_of(model)
    for recipe in {id(r): r for r in recipes.values()}.values():
        wanted = {name: places[name] for name in recipe.targets if recipes.get(name) is recipe}
        if recipe.converter is None:
            ((name, place),) = wanted.items()
            info = recipe.sources[0][1]
            step = _PIECE_BYTES // element_bytes(info.dtype)
            for lo in range(place.lo, place.hi, step):
                piece = source.read(info, lo, min(lo + step, place.hi))
                place.data[lo - place.lo :][: piece.numel()].copy_(piece.to(dtypes[name]))
        else:
            _read_converted(model, source, recipe, wanted, dtypes, report)
    for place in places.values():  # full copies elsewhere are stale now
        torch.autograd.graph.increment_version(place.data)


def _read_converted(
    model: nn.Module,
    source: Source,
    recipe: Recipe,
    wanted: Mapping[str, Place],
    dtypes: Mapping[str, torch.dtype],
    report: LoadStateDictInfo,
) -> None:
    """Convert whole sources, or those of this rank's rows. See Note [Conversions by rows]."""
    place = next(iter(wanted.values()))
    by_pattern: dict[str, list[tuple[str, TensorInfo]]] = {}
    for pattern, info in recipe.sources:
        by_pattern.setdefault(pattern, []).append((pattern, info))
    num_rows, row_numel = place.shape[0] if place.shape else 0, prod(place.shape[1:])
    sources, start = list(recipe.sources), 0
    if recipe.is_by_rows and all(len(stack) == num_rows for stack in by_pattern.values()):
        if place.hi == place.lo:
            return
        first, last = place.lo // row_numel, -(-place.hi // row_numel)
        sources = [pair for stack in by_pattern.values() for pair in stack[first:last]]
        start = first * row_numel
    dtype = dtypes[recipe.targets[0]]
    tensors = [source.read(i, 0, i.numel).view(i.shape).to(dtype) for _, i in sources]
    made = recipe.convert(tensors, model, report, sources)
    for name, place in wanted.items():
        if name in made and place.hi > place.lo:
            full = made[name].reshape(-1)
            place.data.copy_(full[place.lo - start : place.hi - start].to(dtypes[name]))


def initialise_missing(
    model: PreTrainedModel, loaded: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Initialise the parameters that were not loaded, and the buffers that no file holds.

    Every rank calls it. ``dtypes`` are the model's before it is sharded.
    See Note [The draws of a plain model].

    **Cost** one module's missing parameters whole, in host memory.
    """
    state = model.state_dict(keep_vars=True)
    for name in loaded:
        setattr(state[name], _DONE, True)
    drawn = {id(state[name]): dtypes[name] for name in state if name not in loaded}

    def visit(module: nn.Module, owner: PreTrainedModel) -> None:
        """Initialise a module after its children, by the rules of the model that owns it."""
        for child in module.children():
            visit(child, child if isinstance(child, PreTrainedModel) else owner)
        with _full_params(module, drawn):
            owner._initialize_weights(module, owner.is_custom_code())

    control = engine_of(model).comm.control
    with torch.no_grad(), _generator_of_rank_0(control), guard_torch_init_functions():
        visit(model, model)


@contextmanager
def _full_params(module: nn.Module, drawn: Mapping[int, torch.dtype]) -> Iterator[None]:
    """Replace the module's own missing parameters by full ones; keep this rank's slices."""
    fulls: dict[Any, nn.Parameter] = {}
    for param in module.parameters(recurse=False):
        owner = owner_of(param)
        if owner is not None and id(param) in drawn and not hasattr(param, _DONE):
            memory = torch.empty(param.shape, dtype=drawn[id(param)], device="cpu")
            fulls[owner] = nn.Parameter(memory, requires_grad=param.requires_grad)
    for owner, full in fulls.items():
        owner.put_in_modules(full)
    try:
        yield
    finally:
        for owner in fulls:
            owner.put_in_modules(owner.sharded)
    for owner, full in fulls.items():
        owner.sharded.to_local().copy_(owner.cut.slice_of(full))
        setattr(owner.sharded, _DONE, True)


@contextmanager
def _generator_of_rank_0(control: Control) -> Iterator[None]:
    own = torch.get_rng_state()
    first = torch.frombuffer(bytearray(control.broadcast(own.numpy().tobytes())), dtype=torch.uint8)
    torch.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            torch.set_rng_state(own)
