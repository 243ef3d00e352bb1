"""The shard axis and the replicate axis of a DeviceMesh."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.axes import DENSE, Axes, data_of, shared_mesh
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as this rank sees it; ``rank`` and ``size`` are along the axis."""

    name: str
    group: dist.ProcessGroup
    rank: int
    size: int
    backend: str


@dataclass(frozen=True)
class DataAxes:
    """The axes that state is sharded and replicated over (HSDP).

    ``stages``: the pipeline's axis if the model is one of its stages.
    """

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis | None
    stages: Axis | None = None

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks: the divisor of the gradients' mean."""
        return self.shard.size * (self.replicate.size if self.replicate else 1)

    def __str__(self) -> str:
        """Describe the numbers of ranks, which are the same on every rank."""
        replicas = self.replicate.size if self.replicate else 1
        return f"{replicas} replicas x {self.shard.size} shards"

    @cached_property
    def sharded(self) -> tuple[Axis, ...]:
        """The shard axis alone."""
        return (self.shard,)

    @property
    def all(self) -> tuple[Axis, ...]:
        """Both axes, the shard axis first."""
        return (self.shard,) if self.replicate is None else (self.shard, self.replicate)


def resolve_axes(mesh: DeviceMesh | Axes | None, device_type: str) -> DataAxes:
    """Find the axes: a mesh of one axis shards, one of two is (replicate, shard).

    Of `Axes`, or a mesh that has their names, those that carry data parallelism are taken.

    **Raises** ConfigError if there is no process group, or the mesh has more axes.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "mesh: there is no process group. Start with torchrun (or `shardwise train --ranks N`) "
            "and call torch.distributed.init_process_group() before shard(); one process is fine"
        )
    if mesh is None:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if isinstance(mesh, Axes):
        mesh = mesh.mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh={mesh!r}: expected shardwise.Axes(), a DeviceMesh, as torch's "
            "init_device_mesh() makes it, or None for all ranks"
        )
    names = tuple(mesh.mesh_dim_names or ())
    stages = None
    if names and set(names) <= set(DENSE):
        stages = stages_of(mesh)
        mesh = data_of(mesh)
        names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim > 2:
        raise ConfigError(
            f"mesh: {mesh.ndim} axes {names or '(unnamed)'}; pass the one or two that carry data "
            'parallelism, such as mesh["shard"] or mesh["replicate", "shard"]'
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"mesh: rank {dist.get_rank()} is not part of it")
    return replace(axes_of(mesh), stages=stages)


def axes_of(mesh: DeviceMesh) -> DataAxes:
    """Return the axes of a mesh of one or two: the last one shards, one before it replicates."""
    shard = axis_of(mesh, mesh.ndim - 1, "shard")
    return DataAxes(mesh, shard, axis_of(mesh, 0, "replicate") if mesh.ndim == 2 else None)


def check_nearby(axes: DataAxes, num_ranks: int | None) -> None:
    """Raise ConfigError if the shard axis has no groups of so many neighbours."""
    if num_ranks is None:
        return
    size = axes.shard.size
    if size % num_ranks:
        raise ConfigError(
            f"nearby_ranks={num_ranks}: expected a divisor of the {size} ranks of the shard axis, "
            "so that each group of neighbours has as many"
        )
    if axes.mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"nearby_ranks={num_ranks}: the mesh has {axes.mesh.size()} of "
            f"{dist.get_world_size()} ranks; beside tensor, context or pipeline parallelism leave "
            "it out"
        )


def nearby_axis(mesh: DeviceMesh, num_ranks: int) -> Axis:
    """Return the axis of this rank's neighbours along the last axis of a mesh; all ranks call it.

    **Cost** a process group for each group of neighbours, once for all models on them.
    """
    device_type, groups = mesh.device_type, mesh.mesh.view(-1, num_ranks)
    key = device_type, tuple(map(tuple, groups.tolist()))
    return axes_of(shared_mesh(key, lambda: DeviceMesh(device_type, groups))).shard


def stages_of(mesh: DeviceMesh) -> Axis | None:
    """Return the pipeline's axis of a mesh; None for one stage."""
    if "pp" not in (mesh.mesh_dim_names or ()) or mesh["pp"].size() == 1:
        return None
    return axis_of(mesh["pp"], 0, "stages")


def axis_of(mesh: DeviceMesh, mesh_dim: int, role: str) -> Axis:
    """Return one axis of a mesh, with its role as name."""
    group = mesh.get_group(mesh_dim)
    return Axis(
        name=role,
        group=group,
        rank=mesh.get_local_rank(mesh_dim),
        size=mesh.size(mesh_dim),
        backend=str(dist.get_backend(group)),
    )
