"""How one tensor is cut: which elements each rank owns, and how DTensor describes that."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId
from shardwise.errors import ShardError
from shardwise.layout.boxes import Region, full_region
from shardwise.layout.segments import Layout
from shardwise.mesh import Axis

GATHER_SITE = CollectiveId("gather", "(tensor)", 0)


class Ragged(Placement):
    """The placement of ours: this rank owns elements [lo, hi) of the flattened tensor."""

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
    """How one tensor is cut: parameter ``index`` of ``layout``; no layout means replicated.

    ``outer``: the tensor was a DTensor before, placed so, and a piece of it is cut here; see
    `pieces.PieceCut`. ``name`` is the parameter's that is cut so.
    """

    kind = "range"  # of elements of the flattened tensor; two of one kind may be alike

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
    def own_axes(self) -> tuple[Axis, ...]:
        """The axes of a mesh that the tensor was on before; see `pieces`."""
        return ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes over which the elements are spread."""
        return () if self.layout is None else self.comm.axes.sharded

    @property
    def gather_site(self) -> CollectiveId:
        """The gather of a whole tensor, by a name that other parameters' gathers do not have."""
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
            stride = torch.empty(self.shape, device="meta").stride()
            meta = TensorMeta(torch.Size(self.shape), stride, dtype)
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
        """The elements [lo, hi) of every rank in turn."""
        assert self.layout is not None
        pieces = [self.layout.piece(self.index, r) for r in range(self.layout.num_ranks)]
        return tuple((p.lo, p.hi) for p in pieces)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a full (or broadcastable) tensor, in local shape."""
        return self.expand(full).reshape(-1)[self.lo : self.hi].view(self.local_shape)

    def expand(self, full: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor's shape. **Raises** ShardError for what does not fit."""
        try:
            return full.expand(self.shape)
        except RuntimeError as error:
            raise ShardError(
                f"a tensor of shape {tuple(full.shape)} was combined with a ShardTensor of shape "
                f"{self.shape}; give it the global shape, or one that broadcasts to it"
            ) from error

    def piece_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return what the shard axis cuts of a full tensor: here all."""
        return full

    def slice_of_piece(self, piece: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of what the shard axis cuts."""
        return self.slice_of(piece)

    def gather_piece(self, local: torch.Tensor) -> torch.Tensor:
        """Return what the shard axis cuts, in full."""
        return self.gather(local)

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """Return a full tensor of zeros but for this rank's elements."""
        full = local.new_zeros(prod(self.shape))
        full[self.lo : self.hi] = local.reshape(-1)
        return full.view(self.shape)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor. **Cost** one collective; ranks x the largest slice of memory.

        Of one with an owner a broadcast of it, and its memory once.
        """
        if self.layout is None or self.layout.num_ranks == 1:
            return local.detach().clone().view(self.shape)
        if self.owner is not None:
            axis, own = self.comm.axes.shard, local.detach().reshape(-1)
            own = own if axis.rank == self.owner else own.new_empty(prod(self.shape))
            return self.comm.from_owner(own, axis, self.owner, self.gather_site).view(self.shape)
        pieces = [self.layout.piece(self.index, r) for r in range(self.layout.num_ranks)]
        padded = local.new_zeros(max(p.numel for p in pieces))
        padded[: local.numel()].copy_(local.detach().reshape(-1))
        rows = self.comm.gather_rows(padded, self.comm.axes.shard, self.gather_site)
        parts = [row[: p.numel] for row, p in zip(rows, pieces, strict=True)]
        return torch.cat(parts).view(self.shape)


def make_cut(
    shape: tuple[int, ...], layout: Layout | None, index: int, comm: Comm, name: str = ""
) -> Cut:
    """Describe parameter ``index`` of ``layout``, of this name, as this rank sees it."""
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
