"""Ranks with different numbers of batches: all go on until the last one is through."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import all_reduce_scalars
from shardwise.errors import ConfigError

T = TypeVar("T")


def join(
    model: nn.Module, batches: Iterable[T], *, divide_by_present: bool = False
) -> Iterator[tuple[T, float]]:
    """Iterate over this rank's batches, as often as the rank that has most of them.

    Yields ``(batch, weight)``. Multiply the loss by ``weight``: it is 1.0, and 0.0 where this rank
    has no batch left and gets its last one again, so that it takes part in every collective and
    adds nothing. Gradients stay means over all ranks; with ``divide_by_present`` the weight is N
    divided by the number of ranks that still have data, which makes them means over those. The
    model is one of `shard` or of `fully_shard`. Leave the loop on all ranks alike.

    **Cost** one small all-reduce per batch, waited for; this rank's last batch in memory.

    **Raises** ConfigError on all ranks when one of them has no batch at all and another has.
    """
    mesh = _mesh_of(model)
    iterator = iter(batches)
    kept: list[T] = []  # the last batch
    while True:
        found = list(islice(iterator, 1))
        kept = found or kept
        present, without = _sums([float(bool(found)), float(not kept)], mesh)
        if not present:
            return
        if without:
            here = "" if kept else ", this one among them"
            raise ConfigError(
                f"join(): {without:.0f} of {mesh.size()} ranks have no batch at all{here}, so they "
                "cannot take part in the others' passes; give every rank one batch or more"
            )
        weight = mesh.size() / present if divide_by_present else 1.0
        yield kept[0], weight if found else 0.0


def _mesh_of(model: nn.Module) -> DeviceMesh:
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    if meshes:  # some parameters may have a smaller one of their own
        return max(meshes, key=DeviceMesh.size)
    raise ConfigError(
        f"join(): this {type(model).__name__} is not sharded; pass the module that was given to "
        "shardwise.shard() or fully_shard()"
    )


def _sums(values: list[float], mesh: DeviceMesh) -> list[float]:
    """Return the sums over all ranks of a mesh."""
    for dim in range(mesh.ndim):
        values = all_reduce_scalars(values, mesh.get_group(dim))
    return values
