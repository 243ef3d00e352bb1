"""Conversion of torch's meshes and placements to our axes, and specs of sharded DTensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.axes import Axes
from shardwise.errors import ConfigError
from shardwise.mesh import DataAxes, axes_of, axis_of, stages_of
from shardwise.tensor.cut import placed_inside

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # torch 2.11 lacks it


@dataclass(frozen=True)
class ShardingMesh:
    """The axes that a call shards parameters on, and the mesh of their DTensors.

    ``spmd`` is the full mesh of ``dp_mesh_dims``, on which parameters are DTensors already.
    ``experts`` is the mesh for experts, DTensors on an axis named ep. ``divisor`` divides sums of
    gradients, if not by the number of ranks.
    """

    mesh: DeviceMesh
    axes: DataAxes
    spmd: DeviceMesh | None = None
    dims: "DataParallelMeshDims | None" = None
    experts: "ShardingMesh | None" = None
    divisor: float | None = None

    @property
    def reduced_dims(self) -> tuple[int, ...]:
        """The axes of ``spmd`` that gradients are reduced over; () without it."""
        if self.spmd is None or self.dims is None:
            return ()
        names = self.spmd.mesh_dim_names or ()
        chosen = (*self.dims.shard_names, *self.dims.replicate_names)
        return tuple(names.index(name) for name in chosen)

    def outer(self, own: DTensorSpec) -> DTensorSpec | None:
        """Return a DTensor's spec on the axes that are not data-parallel, if any."""
        if self.spmd is None:
            return own
        rest = [dim for dim in range(own.mesh.ndim) if dim not in self.reduced_dims]
        if not rest:
            return None
        names = own.mesh.mesh_dim_names or ()
        mesh = own.mesh[tuple(names[dim] for dim in rest)]
        placements = tuple(own.placements[dim] for dim in rest)
        return DTensorSpec(mesh, placements, tensor_meta=own.tensor_meta)

    def __hash__(self) -> int:
        """Hash the process groups: parameters with equal groups share a unit."""
        return hash(tuple(id(axis.group) for axis in self.axes.all))

    def __eq__(self, other: object) -> bool:
        """Compare the process groups."""
        if not isinstance(other, ShardingMesh):
            return False
        ours, theirs = self.axes.all, other.axes.all
        return [id(a.group) for a in ours] == [id(a.group) for a in theirs]


def default_mesh() -> DeviceMesh:
    """Return a mesh of all ranks on the accelerator, else on the CPU.

    **Raises** ConfigError without a process group, if the environment cannot make one.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            reason = str(error).removeprefix("Error initializing torch.distributed using ")
            raise ConfigError(
                f"mesh: there is no process group, and the environment makes none ({reason}). "
                "Start with torchrun, or call torch.distributed.init_process_group() before; one "
                "process is fine"
            ) from None
    found = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(found.type if found else "cpu", (dist.get_world_size(),))


def spread_over(mesh: DeviceMesh | Axes, dims: "DataParallelMeshDims | None") -> ShardingMesh:
    """Return the axes of a mesh: (shard), (replicate, shard), or those that ``dims`` names.

    Of `Axes`, it takes the data-parallel axes; experts have separate axes.

    **Raises** ConfigError (a ValueError) for another number of axes, or unknown names.
    """
    if isinstance(mesh, Axes):
        axes = replace(axes_of(mesh.data), stages=stages_of(mesh.mesh))
        experts = None
        if mesh["ep"].size() > 1:  # each expert gets the gradients of all ranks' tokens
            over, ranks = mesh.experts, float(axes.num_ranks)
            of_experts = replace(axes_of(over), stages=axes.stages)
            experts = ShardingMesh(over, of_experts, divisor=ranks)
        return ShardingMesh(mesh.data, axes, experts=experts)
    if dims is not None:
        return _named(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ConfigError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: init_device_mesh(..., "
            "mesh_dim_names=('replicate', 'shard'))"
        )
    return ShardingMesh(mesh, axes_of(mesh))


def _named(mesh: DeviceMesh, dims: "DataParallelMeshDims") -> ShardingMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ConfigError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")

    def part(chosen: tuple[str, ...]) -> DeviceMesh:
        found: DeviceMesh = mesh[chosen[0]]
        if len(chosen) > 1:
            found = mesh[chosen]._flatten("_".join(chosen))
        return found

    if not dims.shard_names:
        replicas = part(dims.replicate_names)
        axis = axis_of(replicas, 0, "replicate")
        alone = replace(axis, name="shard", rank=0, size=1)
        return ShardingMesh(replicas, DataAxes(replicas, alone, axis), mesh, dims)
    shards = part(dims.shard_names)
    if not dims.replicate_names:
        return ShardingMesh(shards, axes_of(shards), mesh, dims)
    both = DeviceMesh._concatenate([part(dims.replicate_names), shards])
    return ShardingMesh(both, axes_of(both), mesh, dims)


def chosen_placement(
    param: nn.Parameter, choose: Callable[[nn.Parameter], Any] | None, spread: ShardingMesh
) -> tuple[int, ShardingMesh]:
    """Return the dim to shard a parameter along, and the mesh, by ``shard_placement_fn``.

    The function returns None, a ``Shard``, or torch's ShardPlacementResult with another mesh.
    """
    answer = choose(param) if choose is not None else None
    if spread.experts is not None and _is_expert(param):
        spread = spread.experts
    info = getattr(answer, "mesh_info", None)
    placement = getattr(answer, "placement", answer) if info is not None else answer
    if info is not None and info.mesh is not spread.mesh:
        axes = replace(axes_of(info.mesh), stages=spread.axes.stages)
        spread = ShardingMesh(info.mesh, axes)
    if placement is None:
        return 0, spread
    if not isinstance(placement, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: expected Shard or None, got {answer}")
    return placement.dim + param.ndim if placement.dim < 0 else placement.dim, spread


def _is_expert(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) and "ep" in (param.device_mesh.mesh_dim_names or ())


def sharded_spec(param: nn.Parameter, name: str, dim: int, spread: ShardingMesh) -> DTensorSpec:
    """Return the parameter's spec after sharding along ``dim``.

    A DTensor (tensor parallelism) gets one or two more axes in front.
    """
    placed: Placement = Shard(dim)
    if not isinstance(param, DTensor):
        if spread.spmd is not None:
            raise ConfigError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD "
                f"mesh (e.g. via distribute_module). Got plain tensor for parameter '{name}'."
            )
        meta = TensorMeta(param.size(), param.stride(), param.dtype)
        return DTensorSpec(spread.mesh, _in_front(spread, placed), tensor_meta=meta)
    own = param._spec
    if spread.spmd is not None:
        return _spmd_spec(own, dim, spread)
    try:
        mesh = DeviceMesh._concatenate([spread.mesh, own.mesh])
    except RuntimeError as error:
        remedy = "take both from one mesh, with no axis in common"
        if _is_expert(param):
            remedy = "pass mesh=shardwise.Axes(..., ep=n), which has a mesh for experts"
        raise ConfigError(
            f"parameter '{name}' is a DTensor on {own.mesh}, which does not go together with "
            f"{spread.mesh} ({error}): {remedy}"
        ) from error
    if len(own.placements) > 2:
        raise NotImplementedError(
            f"parameter '{name}': {own.placements}: fully_shard takes DTensors with one or two axes"
        )
    placements = (*_in_front(spread, placed_inside(own, dim)), *own.placements)
    return DTensorSpec(mesh, placements, tensor_meta=own.tensor_meta)


def _in_front(spread: ShardingMesh, placed: Placement) -> tuple[Placement, ...]:
    if spread.axes.replicate is None:
        return (placed,)
    return (Replicate(), placed) if spread.mesh.ndim > 1 else (Replicate(),)


def _spmd_spec(own: DTensorSpec, dim: int, spread: ShardingMesh) -> DTensorSpec:
    """Replace Replicate by Shard on the data-parallel axes of the parameter's mesh."""
    assert spread.spmd is not None and spread.dims is not None
    mesh, dims = spread.spmd, spread.dims
    names = mesh.mesh_dim_names or ()
    if own.mesh is not mesh:
        raise ConfigError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
            "different mesh objects"
        )
    for role, chosen in (("shard", dims.shard_names), ("replicate", dims.replicate_names)):
        for name in chosen:
            index = names.index(name)
            if not isinstance(own.placements[index], Replicate):
                raise ConfigError(
                    f"Expected Replicate() on DP {role} dim '{name}' (index {index}) but got "
                    f"{own.placements[index]}"
                )
    placements: list[Placement] = list(own.placements)
    for name in dims.shard_names:
        index = names.index(name)
        pieces = 1
        for behind in range(index + 1, mesh.ndim):
            at = own.placements[behind]
            if isinstance(at, Shard | _StridedShard) and at.dim == dim:
                pieces *= mesh.size(behind)
        placements[index] = _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)
    if len(dims.shard_names) <= 1:
        return DTensorSpec(mesh, tuple(placements), tensor_meta=own.tensor_meta)
    meshes: list[DeviceMesh] = []
    merged: list[Placement] = []
    for name, placed in zip(names, placements, strict=True):
        if name == dims.shard_names[0]:
            meshes.append(spread.mesh)
            merged += [Replicate()] * (spread.axes.replicate is not None) + [placed]
        elif name not in (*dims.shard_names, *dims.replicate_names):
            meshes.append(mesh[name])
            merged.append(placed)
    return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(merged), tensor_meta=own.tensor_meta)
