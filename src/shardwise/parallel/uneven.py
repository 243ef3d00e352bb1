"""Training with different numbers of batches per rank, until the last rank has finished."""

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
    """Iterate over this rank's batches, as often as the rank with the most batches.

    Yields ``(batch, weight)``. Multiply the loss by ``weight``, which is 1.0. A rank without
    batches left gets its last one again with weight 0.0, so that it takes part in every collective
    and adds nothing. Gradients stay means over all ranks. With ``divide_by_present`` the weight is
    N divided by the number of ranks that still have data, so gradients are means over those ranks.
    The model is sharded by `shard` or `fully_shard`. If one rank leaves the loop, all must.

    **Cost** one small blocking all-reduce per batch; this rank's last batch stays in memory.

    **Raises** ConfigError on all ranks if one rank has no batch at all and another has one.
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
    if meshes:  # some parameters may have a smaller mesh
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
