"""The cut of one tensor: the elements that each rank owns, and DTensor's description of them.

Note [A piece of a tensor]
Tensor and expert parallelism give each rank a box of a parameter, as torch's DTensor describes it.
Data parallelism cuts that box, not the tensor. The layers get the gathered box as a DTensor with
its former placements. So the mesh of a sharded parameter is the data-parallel mesh followed by the
DTensor's mesh. If both cut one dim, data parallelism cuts the pieces of the DTensor
(``_StridedShard``).
Source of these conventions: ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py`` of torch 2.13.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId
from shardwise.errors import ShardError, StateError
from shardwise.layout.boxes import Region, contiguous_stride, full_region
from shardwise.layout.segments import Layout
from shardwise.mesh import Axis, axis_of

GATHER_SITE = CollectiveId("gather", "(tensor)", 0)


class CutMismatch(ShardError):
    """The arguments of an operation have different cuts, so ranks lack elements of some."""


class Ragged(Placement):
    """A placement: this rank owns elements [lo, hi) of the flattened tensor."""

    def __init__(self, lo: int, hi: int) -> None:
        super().__init__()
        self.lo = lo
        self.hi = hi

    def __eq__(self, other: object) -> bool:
        """Compare the ranges."""
        return isinstance(other, Ragged) and (self.lo, self.hi) == (other.lo, other.hi)

    def __hash__(self) -> int:
        """Hash the range."""
        return hash(("Ragged", self.lo, self.hi))

    def __repr__(self) -> str:
        """Show the range."""
        return f"Ragged({self.lo}, {self.hi})"


@dataclass(frozen=True, eq=False)
class Cut:
    """The cut of one tensor: parameter ``index`` of ``layout``; no layout means replicated.

    - ``shape``: of the whole tensor. ``local_shape``: of this rank's elements.
    - ``lo``, ``hi``: this rank's elements [lo, hi) of the flattened `piece`.
    - ``placements``: DTensor's description, one for each axis of `mesh`.
    - ``specs``: a cache of `spec`.
    - ``outer``: the spec of a tensor that was a DTensor before sharding; see `PieceCut`.
    - ``name``: the parameter's name, for errors.
    """

    kind = "range"  # of elements of the flattened tensor; cuts of different kinds never match

    shape: tuple[int, ...]
    layout: Layout | None
    index: int
    comm: Comm
    lo: int
    hi: int
    local_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)
    outer: DTensorSpec | None = None
    name: str = ""

    @property
    def piece(self) -> Region:
        """The box of the tensor whose flattened elements [lo, hi) are this rank's; here all."""
        return full_region(self.shape)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the placements."""
        return self.comm.axes.mesh

    @property
    def outer_axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh that the tensor was on before; see `PieceCut`."""
        return ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes over which the elements are spread."""
        return () if self.layout is None else self.comm.axes.sharded

    @property
    def gather_site(self) -> CollectiveId:
        """The id of a gather of the whole tensor, with the parameter's name."""
        about = f"like '{self.name}'," if self.name else ""
        return replace(GATHER_SITE, about=about)

    @property
    def is_replicated(self) -> bool:
        """Tell whether every rank has all elements."""
        return self.layout is None

    @property
    def owner(self) -> int | None:
        """The rank of the shard axis that has all elements, if its layout says so."""
        return None if self.layout is None else self.layout.owner(self.index)

    def over(self, comm: Comm) -> "Cut":
        """Return the same cut over other groups of the same ranks."""
        return replace(self, comm=comm, specs={})

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return DTensor's description of the cut."""
        if dtype not in self.specs:
            meta = TensorMeta(torch.Size(self.shape), contiguous_stride(self.shape), dtype)
            self.specs[dtype] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return self.specs[dtype]

    def matches(self, other: "Cut") -> bool:
        """Tell whether two tensors have the same elements on every rank; all ranks agree on it."""
        if self is other or self.shape != other.shape or self.kind != other.kind:
            return self is other
        if self.layout is None or other.layout is None:
            return self.layout is other.layout
        return self.ranges == other.ranges

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements [lo, hi) of every rank, in rank order."""
        assert self.layout is not None
        pieces = [self.layout.piece(self.index, r) for r in range(self.layout.num_ranks)]
        return tuple((p.lo, p.hi) for p in pieces)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a full (or broadcastable) tensor, in local shape."""
        return self.expand(full).reshape(-1)[self.lo : self.hi].view(self.local_shape)

    def expand(self, full: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor's shape. **Raises** ShardError if ``full`` does not fit."""
        try:
            return full.expand(self.shape)
        except StateError:  # of a gradient that is not reduced
            raise
        except RuntimeError as error:
            raise CutMismatch(
                f"a tensor of shape {tuple(full.shape)} was combined with a ShardTensor of shape "
                f"{self.shape}; give it the global shape, or one that broadcasts to it"
            ) from error

    def piece_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the piece of a full tensor that the shard axis cuts: here all."""
        return full

    def slice_of_piece(self, piece: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of the piece that the shard axis cuts."""
        return self.slice_of(piece)

    def gather_piece(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the piece that the shard axis cuts."""
        return self.gather(local)

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """Return a full tensor of this rank's elements and zeros."""
        full = local.new_zeros(prod(self.shape))
        full[self.lo : self.hi] = local.reshape(-1)
        return full.view(self.shape)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor. **Cost** one collective; ranks x the largest slice of memory.

        A tensor with an owner costs a broadcast and its memory once.
        """
        if self.layout is None or self.layout.num_ranks == 1:
            return local.detach().clone().view(self.shape)
        if self.owner is not None:
            axis = self.comm.axes.shard
            values = local.detach().reshape(-1)
            if axis.rank != self.owner:
                values = values.new_empty(prod(self.shape))
            return self.comm.broadcast_from_owner(values, axis, self.owner, self.gather_site).view(
                self.shape
            )
        pieces = [self.layout.piece(self.index, r) for r in range(self.layout.num_ranks)]
        padded = local.new_zeros(max(p.numel for p in pieces))
        padded[: local.numel()].copy_(local.detach().reshape(-1))
        rows = self.comm.gather_rows(padded, self.comm.axes.shard, self.gather_site)
        parts = [row[: p.numel] for row, p in zip(rows, pieces, strict=True)]
        return torch.cat(parts).view(self.shape)


def make_cut(
    shape: tuple[int, ...], layout: Layout | None, index: int, comm: Comm, name: str = ""
) -> Cut:
    """Describe this rank's cut of parameter ``index`` of ``layout``."""
    if layout is None:
        numel = prod(shape)
        placements: list[Placement] = [Replicate()] * len(comm.axes.all)
        return Cut(shape, None, index, comm, 0, numel, shape, tuple(placements), name=name)
    piece = layout.piece(index, comm.axes.shard.rank)
    placement: Placement = Ragged(piece.lo, piece.hi)
    local_shape = layout.local_shape(index, comm.axes.shard.rank)
    if layout.kind == "rows" and shape:
        placement = Shard(0)
    before = [Replicate()] if comm.axes.replicate else []
    placements = [*before, placement]
    bounds = piece.lo, piece.hi
    return Cut(shape, layout, index, comm, *bounds, local_shape, tuple(placements), name=name)


def placed_inside(own: DTensorSpec, dim: int) -> Placement:
    """Return the placement of a further cut of dim ``dim`` inside a tensor placed as ``own``."""
    pieces = own.num_shards_map[dim]
    return _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap ``local`` in a DTensor of its dtype without a copy."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=local.requires_grad)


def dtensor_axes_of(tensors: Iterable[torch.Tensor]) -> tuple[Axis, ...]:
    """Return the axes of the meshes of the DTensors among tensors, each once."""
    meshes = dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor))
    axes = [axis for mesh in meshes for axis in axes_of_mesh(mesh)]
    return tuple({id(axis.group): axis for axis in axes}.values())


def axes_of_mesh(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """Return the axes of a mesh that is not a data-parallel one."""
    names = mesh.mesh_dim_names or [f"model{dim}" for dim in range(mesh.ndim)]
    return tuple(axis_of(mesh, dim, names[dim]) for dim in range(mesh.ndim))


@dataclass(frozen=True, eq=False)
class DimCut(Cut):
    """An even cut along another dim than the first; ``layout`` has one row per rank."""

    kind = "dim"
    dim: int = field(kw_only=True)

    @property
    def piece(self) -> Region:
        """The box of the tensor whose flattened elements [lo, hi) are this rank's; here all."""
        at = [0] * len(self.shape)
        at[self.dim] = self.comm.axes.shard.rank * self.local_shape[self.dim]
        return Region(tuple(at), self.local_shape)

    def matches(self, other: Cut) -> bool:
        """Tell whether two tensors have the same elements on every rank; all ranks agree on it."""
        return isinstance(other, DimCut) and self.dim == other.dim and super().matches(other)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a full (or broadcastable) tensor, in local shape."""
        return _box(self.expand(full), self.piece)

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """Return a full tensor of this rank's elements and zeros."""
        full = local.new_zeros(self.shape)
        _box(full, self.piece).copy_(local)
        return full

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor. **Cost** one collective; twice the tensor of memory."""
        rows = self.comm.gather_rows(local.detach(), self.comm.axes.shard, self.gather_site)
        return torch.cat(list(rows), dim=self.dim)


@dataclass(frozen=True, eq=False)
class PieceCut(Cut):
    """The cut of a tensor of which ``outer`` gives this rank a piece, which ``inner`` cuts.

    ``layout``, ``index``, ``lo``, ``hi`` and ``local_shape`` are those of the piece.
    """

    kind = "piece"
    outer: DTensorSpec = field(kw_only=True)
    inner: Cut = field(kw_only=True)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of the placements: the data-parallel one, then that of ``outer``."""
        return DeviceMesh._concatenate([self.inner.mesh, self.outer.mesh])

    @cached_property
    def outer_axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh that the tensor was on before."""
        return axes_of_mesh(self.outer.mesh)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes over which the elements are spread."""
        placed = zip(self.outer_axes, self.outer.placements, strict=True)
        return (*self.inner.axes, *(axis for axis, at in placed if not at.is_replicate()))

    @property
    def is_replicated(self) -> bool:
        """Tell whether every rank has all elements."""
        return not self.axes

    @cached_property
    def piece(self) -> Region:
        """The box of the tensor whose flattened elements [lo, hi) are this rank's."""
        inner, at = self.inner.piece, self._at
        begins = tuple(a + b for a, b in zip(at, inner.at, strict=True))
        return Region(begins, inner.shape)

    @cached_property
    def _at(self) -> tuple[int, ...]:
        placements = self.outer.placements
        return tuple(
            compute_local_shape_and_global_offset(self.shape, self.outer.mesh, placements)[1]
        )

    def over(self, comm: Comm) -> "Cut":
        """Return the same cut over other groups of the same ranks."""
        return replace(self, comm=comm, inner=self.inner.over(comm), specs={})

    def matches(self, other: Cut) -> bool:
        """Tell whether two tensors have the same elements on every rank; all ranks agree on it."""
        if not isinstance(other, PieceCut):
            return False
        ours, theirs = self.outer, other.outer
        has_same_outer = (ours.mesh, ours.placements) == (theirs.mesh, theirs.placements)
        return has_same_outer and self.shape == other.shape and self.inner.matches(other.inner)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a full (or broadcastable) tensor, in local shape."""
        return self.inner.slice_of(self.piece_of(self.expand(full)))

    def piece_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the piece of a full tensor that the shard axis cuts, as a view."""
        return _box(full, Region(self._at, self.inner.shape))

    def slice_of_piece(self, piece: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of the piece that the shard axis cuts."""
        return self.inner.slice_of(piece)

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """Return a full tensor of this rank's elements and zeros."""
        full = local.new_zeros(self.shape)
        self.piece_of(full).copy_(self.inner.place(local))
        return full

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor. **Cost** one collective for each axis that it is cut over."""
        found: torch.Tensor = as_dtensor(self.gather_piece(local), self.outer).full_tensor()
        return found

    def gather_piece(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the piece that the shard axis cuts."""
        return self.inner.gather(local)


def _box(full: torch.Tensor, piece: Region) -> torch.Tensor:
    return full[full_region(tuple(full.shape)).inside(piece)]


def cut_piece(inner: Cut, outer: DTensorSpec) -> PieceCut:
    """Describe the cut of a former DTensor whose local tensor ``inner`` cuts."""
    assert outer.tensor_meta is not None
    placements: list[Placement] = []
    for placed in inner.placements:
        is_shard = isinstance(placed, Shard)
        placements.append(placed_inside(outer, placed.dim) if is_shard else placed)  # type: ignore[attr-defined]
    return PieceCut(
        tuple(outer.tensor_meta.shape),
        inner.layout,
        inner.index,
        inner.comm,
        inner.lo,
        inner.hi,
        inner.local_shape,
        (*placements, *outer.placements),
        name=inner.name,
        inner=inner,
        outer=outer,
    )


def cut_along(
    shape: tuple[int, ...], layout: Layout | None, index: int, comm: Comm, dim: int, name: str
) -> Cut:
    """Describe parameter ``index`` of ``layout``, which has one row per rank unless dim is 0."""
    if dim == 0:
        return make_cut(shape, layout, index, comm, name)
    local_shape = list(shape)
    local_shape[dim] //= comm.axes.shard.size
    placements: list[Placement] = [Replicate()] if comm.axes.replicate else []
    return DimCut(
        shape,
        layout,
        index,
        comm,
        lo=0,
        hi=prod(local_shape),
        local_shape=tuple(local_shape),
        placements=(*placements, Shard(dim)),
        name=name,
        dim=dim,
    )
