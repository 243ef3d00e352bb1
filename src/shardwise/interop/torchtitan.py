"""torchtitan: a ``parallelize_fn`` for its ModelSpec that shards by Shardwise's ``fully_shard``.

Note [Requirements of torchtitan]
torchtitan builds a model on meta, calls ``parallelize_fn``, then ``to_empty`` and ``init_weights``.
Its loss is a sum over this rank's tokens, divided by the tokens of all ranks, so gradients are
summed over ranks and not averaged. Its chunked loss uses ``lm_head`` as a separate FSDPModule.
Activation checkpointing comes first, then compilation of each block, then sharding.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.errors import ConfigError
from shardwise.interop.fsdp2.api import fully_shard
from shardwise.surface.methods import FSDPModule
from shardwise.versions import load_neighbour


class Degrees(Protocol):
    """torchtitan's ParallelDims."""

    spmd_backend: str

    def get_activated_mesh(self, names: list[str]) -> DeviceMesh:
        """Return the mesh of those axes that have several ranks."""


class Training(Protocol):
    """torchtitan's TrainingConfig."""

    mixed_precision_param: str
    mixed_precision_reduce: str
    enable_cpu_offload: bool
    disable_cuda_graphs: bool


class Parallelism(Protocol):
    """torchtitan's ParallelismConfig."""

    fsdp_reshard_after_forward: str
    spmd_backend: str
    enable_fsdp_symm_mem: bool


class Compiling(Protocol):
    """torchtitan's CompileConfig."""

    enable: bool
    components: list[str]


_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_RESHARDS = {"default": True, "always": True, "never": False}
_SHARDS = "torchtitan.distributed.fsdp"  # shards all of its decoders
_DEGREES = {
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Degrees,
    training: Training,
    parallelism: Parallelism,
    compile_config: Compiling,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Shard a torchtitan model over its data-parallel ranks, as a ``parallelize_fn``.

    torchtitan's Trainer passes the arguments. Units are those of torchtitan: the embedding, each
    layer, norm and head together. The degrees of replicas and shards make the mesh; activation
    checkpointing and compilation are torchtitan's own. See Note [Requirements of torchtitan].

    **Raises** ConfigError for a setting that is not data parallelism, before anything is changed.
    """
    load_neighbour("torchtitan", "shardwise.interop.torchtitan")
    _check(model, parallel_dims, training, parallelism)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        compiling = import_module("torchtitan.distributed.compile")
        compiling.apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    policy = parallelism.fsdp_reshard_after_forward
    options = {
        "mesh": _mesh(parallel_dims),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[training.mixed_precision_param],
            reduce_dtype=_DTYPES[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy(),
    }
    for modules, is_last in _groups(model):
        reshards = policy == "always" if is_last else _RESHARDS[policy]
        fully_shard(modules, reshard_after_forward=reshards, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided already
    return model


def with_shardwise(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a model's own ``parallelize_fn`` with Shardwise's ``fully_shard`` in it.

    It supports every degree of parallelism that torchtitan has for the model: tensor, context,
    pipeline and expert parallelism are torchtitan's own.

    **Raises** ConfigError from the returned function, as `parallelize`, except for degrees.
    """

    @wraps(parallelize_fn)
    def parallelized(model: nn.Module, **settings: Any) -> nn.Module:
        load_neighbour("torchtitan", "shardwise.interop.torchtitan")
        _check_settings(settings["parallel_dims"], settings["training"], settings["parallelism"])
        with mock.patch.object(import_module(_SHARDS), "fully_shard", fully_shard):
            return parallelize_fn(model, **settings)

    return parallelized


def _check(
    model: nn.Module, parallel_dims: Degrees, training: Training, parallelism: Parallelism
) -> None:
    for name, key in _DEGREES.items():
        degree = getattr(parallel_dims, name)
        if degree > 1:
            raise ConfigError(
                f"parallelism.{key}={degree}: parallelize() shards over data-parallel ranks; for "
                "all degrees give with_shardwise(parallelize_fn), around the model's own"
            )
    _check_settings(parallel_dims, training, parallelism)
    if not isinstance(getattr(model, "layers", None), nn.ModuleDict):
        raise ConfigError(
            f"model: {type(model).__name__} has no ModuleDict `layers`; parallelize() knows "
            "torchtitan's decoders, use shardwise.fully_shard for others"
        )


def _check_settings(parallel_dims: Degrees, training: Training, parallelism: Parallelism) -> None:
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
    if _mesh(parallel_dims).device_type == "cuda" and not training.disable_cuda_graphs:
        raise ConfigError(
            "training.disable_cuda_graphs=False: gathers and frees are decided on the host, in "
            "every step; set training.disable_cuda_graphs"
        )
    if parallelism.fsdp_reshard_after_forward not in _RESHARDS:
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward={parallelism.fsdp_reshard_after_forward!r}: "
            f"expected one of {', '.join(_RESHARDS)}"
        )


def _mesh(parallel_dims: Degrees) -> DeviceMesh:
    """Return the mesh of replicas, if there are several, and shards."""
    shards = "fsdp" if parallel_dims.spmd_backend == "partial_dtensor" else "dp_shard"
    return parallel_dims.get_activated_mesh(["dp_replicate", shards])


def _groups(model: nn.Module) -> list[tuple[list[nn.Module], bool]]:
    """Return the modules of each unit, and True for the last unit, whose backward comes first."""
    parts = {name: getattr(model, name, None) for name in ("tok_embeddings", "norm", "lm_head")}
    first = ["tok_embeddings"]
    last = ["norm", "lm_head"]
    if getattr(model, "enable_weight_tying", False):
        first, last = [], ["tok_embeddings", *last]
    layers = model.layers
    assert isinstance(layers, nn.ModuleDict)  # `_check` has seen it
    found = [([parts[name] for name in first], False)]
    found += [([layer], False) for layer in layers.values()]
    found += [([parts[name] for name in last], True)]
    there = [([m for m in modules if m is not None], is_last) for modules, is_last in found]
    return [(modules, is_last) for modules, is_last in there if modules]
