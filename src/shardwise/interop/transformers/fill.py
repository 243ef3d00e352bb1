"""Read stored tensors into a sharded model: each rank the bytes of its own slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.container import element_bytes
from shardwise.checkpoint.source import Source, TensorInfo
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError
from shardwise.interop.transformers.recipes import Part, Recipe, convert
from shardwise.tensor.inner import inner_of

if TYPE_CHECKING:
    from torch import nn

_PIECE_BYTES = 64 << 20  # of one tensor in memory at a time


@dataclass(frozen=True)
class Place:
    """Where elements [lo, hi) of a parameter or buffer are on this rank, flat."""

    data: torch.Tensor
    lo: int
    hi: int
    shape: tuple[int, ...]

    @property
    def row_numel(self) -> int:
        """Return the elements of one row."""
        return prod(self.shape[1:])


def places_of(model: nn.Module) -> dict[str, Place]:
    """Return the place of every parameter and persistent buffer, by all of its names."""
    places = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.nn.Parameter):
            shape = tuple(tensor.shape)
            places[name] = Place(tensor.detach().view(-1), 0, tensor.numel(), shape)
    for param in (param for unit in engine_of(model).units for param in unit.params):
        if param.cut.piece.shape != param.cut.shape:
            raise ConfigError(
                f"parameter '{param.name}' is {param.sharded.placements}: weights are read into "
                "parameters that are cut along dim 0 alone; load them, and shard the model then"
            )
        local = param.sharded.to_local()
        parts = inner_of(local, param.cut, param.name)
        if len(parts) > 1:
            raise ConfigError(
                f"parameter '{param.name}' is a {type(local).__name__}, which is made of several "
                "tensors; load the plain weights, and make tensors of this class of them then"
            )
        cut, data = parts[0].cut, parts[0].local.view(-1)
        for use in param.uses:
            places[use.name] = Place(data, cut.lo, cut.hi, cut.shape)
    return places


@torch.no_grad()
def fill(
    model: nn.Module,
    source: Source,
    recipes: Mapping[str, Recipe],
    dtypes: Mapping[str, torch.dtype],
    report: Any,
) -> None:
    """Give every parameter and buffer that has a recipe its stored value, where this rank has it.

    ``dtypes`` are those that the model has before it is sharded: a value is cast to it first, as a
    plain model's would be, then to the shard's.

    **Cost** this rank's bytes of each file; 64 MiB of them in memory, or what one conversion takes.
    """
    places = places_of(model)
    for recipe in {id(r): r for r in recipes.values()}.values():
        wanted = {name: places[name] for name in recipe.targets if recipes.get(name) is recipe}
        if recipe.converter is None:
            ((name, place),) = wanted.items()
            for lo, piece in _pieces(source, recipe.parts[0][1], place.lo, place.hi):
                place.data[lo - place.lo :][: piece.numel()].copy_(piece.to(dtypes[name]))
        else:
            _fill_converted(model, source, recipe, wanted, dtypes, report)
    for place in places.values():  # who keeps full copies must see that they are stale
        torch.autograd.graph.increment_version(place.data)


def _pieces(
    source: Source, info: TensorInfo, lo: int, hi: int
) -> Iterator[tuple[int, torch.Tensor]]:
    step = _PIECE_BYTES // element_bytes(info.dtype)
    for start in range(lo, hi, step):
        yield start, source.read(info, start, min(start + step, hi))


def _fill_converted(
    model: nn.Module,
    source: Source,
    recipe: Recipe,
    wanted: Mapping[str, Place],
    dtypes: Mapping[str, torch.dtype],
    report: Any,
) -> None:
    """Convert whole sources, or those of this rank's rows. See Note [Conversions by rows]."""
    parts, start = _parts_of_rows(recipe, next(iter(wanted.values())))
    if not parts:
        return
    dtype = dtypes[recipe.targets[0]]
    tensors = [source.read(i, 0, i.numel).view(i.shape).to(dtype) for _, i in parts]
    made = convert(recipe, tensors, model, report, parts)
    for name, place in wanted.items():
        if name in made and place.hi > place.lo:
            full = made[name].reshape(-1)
            place.data.copy_(full[place.lo - start : place.hi - start].to(dtypes[name]))


def _parts_of_rows(recipe: Recipe, place: Place) -> tuple[list[Part], int]:
    """Return the sources that this rank needs, and the element at which what they make begins."""
    by_pattern: dict[str, list[Part]] = {}
    for part in recipe.parts:
        by_pattern.setdefault(part[0], []).append(part)
    num_rows = place.shape[0] if place.shape else 0
    if not recipe.is_by_rows or any(len(parts) != num_rows for parts in by_pattern.values()):
        return list(recipe.parts), 0
    if place.hi == place.lo:
        return [], 0
    first, last = place.lo // place.row_numel, -(-place.hi // place.row_numel)
    needed = [part for parts in by_pattern.values() for part in parts[first:last]]
    return needed, first * place.row_numel
