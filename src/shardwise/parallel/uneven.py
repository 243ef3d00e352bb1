"""Different numbers of batches, or of tokens, per rank: ``join()`` and ``mean_loss()``."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import all_reduce_scalars
from shardwise.comm.pending import CollectiveId
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError

_COUNT = CollectiveId("gather", "(tokens)", 0)


def mean_loss(
    model: nn.Module, total: torch.Tensor, num_tokens: int | torch.Tensor
) -> torch.Tensor:
    """Return a loss whose gradients are those of the mean over all ranks' tokens.

    ``total`` is this rank's sum of losses over its valid tokens, and ``num_tokens`` their number,
    which may be 0. With several micro-batches, call it with the ``total`` of each and the number
    in all. A mean of the ranks' means weights a token more on a rank with fewer tokens, which is
    wrong if sequences are padded, packed or cut (context parallelism). Reductions divide gradients
    by the number of data-parallel ranks, so this function multiplies by it. The loss to log is the
    result summed over micro-batches and averaged over these ranks.

    **Cost** one collective of a number over each data-parallel axis; all ranks call it.
    If no rank has a token, the loss is 0.
    """
    engine = engine_of(model)
    comm = engine.comm
    sums = engine.units[0].grads.sum_settings
    count = torch.as_tensor(num_tokens, dtype=torch.float64, device=comm.device).reshape(1)
    for axis in comm.axes.all if sums.over_replicas else comm.axes.sharded:
        count = comm.sum_in_rank_order(count, axis, _COUNT)
    divisor = sums.divisor or comm.axes.num_ranks
    weight = (divisor / count.clamp_min(1)).to(torch.promote_types(total.dtype, torch.float32))
    return total * weight.squeeze()


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
        fetched = list(islice(iterator, 1))
        kept = fetched or kept
        present, without = _sums([float(bool(fetched)), float(not kept)], mesh)
        if not present:
            return
        if without:
            and_this = "" if kept else ", this one among them"
            raise ConfigError(
                f"join(): {without:.0f} of {mesh.size()} ranks have no batch at all{and_this}, so "
                "they cannot take part in the others' passes; give every rank one batch or more"
            )
        weight = mesh.size() / present if divide_by_present else 1.0
        yield kept[0], weight if fetched else 0.0


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
