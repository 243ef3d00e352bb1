"""torchtitan: a model's own ``parallelize_fn`` that shards by Shardwise's ``fully_shard``.

Note [Requirements of torchtitan]
torchtitan builds a model on meta, calls its ``parallelize_fn``, then ``to_empty`` and
``init_weights``. Its loss is a sum over this rank's tokens, divided by the tokens of all ranks, so
gradients are summed over ranks and not averaged. Its chunked loss uses ``lm_head`` as a separate
FSDPModule. Under "spmd_types" it names the data-parallel axes of the mesh, and newer versions of
torch read from the parameters what the other axes mean. Without other axes nothing needs a name.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError
from shardwise.interop.fsdp2.api import fully_shard
from shardwise.versions import load_neighbour

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # torch 2.11 lacks it

_SHARDS = "torchtitan.distributed.fsdp"  # shards all of its decoders


def with_shardwise(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a model's own ``parallelize_fn`` with Shardwise's ``fully_shard`` in it.

    It supports every degree of parallelism that torchtitan has for the model: tensor, context,
    pipeline and expert parallelism, units, activation checkpointing and compilation are
    torchtitan's own. See Note [Requirements of torchtitan].

    **Raises** ConfigError from the returned function for a setting that Shardwise lacks, before
    anything is changed.
    """

    @wraps(parallelize_fn)
    def parallelized(model: nn.Module, **settings: Any) -> nn.Module:
        load_neighbour("torchtitan", "shardwise.interop.torchtitan")
        _check(settings)
        with mock.patch.object(import_module(_SHARDS), "fully_shard", _fully_shard):
            return parallelize_fn(model, **settings)

    return parallelized


def _fully_shard(
    module: object,
    *,
    mesh: DeviceMesh,
    dp_mesh_dims: "DataParallelMeshDims | None" = None,
    **options: Any,
) -> object:
    """Call `fully_shard`, without names where all axes of the mesh are data-parallel."""
    dims = dp_mesh_dims
    if dims is not None and len(dims.shard_names) == 1 == mesh.ndim - len(dims.replicate_names):
        dims = None
    return fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **options)


def _check(settings: Mapping[str, Any]) -> None:
    dims, parallelism = settings["parallel_dims"], settings["parallelism"]
    if parallelism.spmd_backend == "full_dtensor":
        raise ConfigError(
            "parallelism.spmd_backend='full_dtensor': the inputs would be DTensors and the "
            "gathered parameters are not; use 'spmd_types' or 'partial_dtensor'"
        )
    if parallelism.enable_fsdp_symm_mem:
        raise ConfigError(
            "parallelism.enable_fsdp_symm_mem: Shardwise has no collectives on symmetric memory; "
            "leave it off"
        )
    shards = "fsdp" if dims.spmd_backend == "partial_dtensor" else "dp_shard"
    mesh = dims.get_activated_mesh(["dp_replicate", shards])
    if mesh.device_type == "cuda" and not settings["training"].disable_cuda_graphs:
        raise ConfigError(
            "training.disable_cuda_graphs=False: gathers and frees are decided on the host, in "
            "every step; set training.disable_cuda_graphs"
        )
