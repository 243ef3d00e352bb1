"""How one tensor is cut: which elements each rank owns, and how DTensor describes that."""

from dataclasses import dataclass, field
from math import prod

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import Site
from shardwise.errors import ShardError
from shardwise.layout.segments import Layout

GATHER_SITE = Site("gather", "(tensor)", 0)


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
    """How one tensor is cut: parameter ``index`` of ``layout``; no layout means replicated."""

    shape: tuple[int, ...]
    layout: Layout | None
    index: int
    comm: Comm
    lo: int
    hi: int
    local_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return DTensor's description of the cut."""
        if dtype not in self.specs:
            stride = torch.empty(self.shape, device="meta").stride()
            meta = TensorMeta(torch.Size(self.shape), stride, dtype)
            self.specs[dtype] = DTensorSpec(self.comm.axes.mesh, self.placements, tensor_meta=meta)
        return self.specs[dtype]

    def matches(self, other: "Cut") -> bool:
        """Tell whether two tensors have the same elements on every rank; all ranks agree on it."""
        if self is other or self.shape != other.shape:
            return self is other
        if self.layout is None or other.layout is None:
            return self.layout is other.layout
        ranks = range(self.layout.num_ranks)
        ours = [self.layout.piece(self.index, r) for r in ranks]
        theirs = [other.layout.piece(other.index, r) for r in ranks]
        return [(p.lo, p.hi) for p in ours] == [(p.lo, p.hi) for p in theirs]

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a full (or broadcastable) tensor, in local shape."""
        try:
            expanded = full.expand(self.shape)
        except RuntimeError as error:
            raise ShardError(
                f"a tensor of shape {tuple(full.shape)} was combined with a ShardTensor of shape "
                f"{self.shape}; give it the global shape, or one that broadcasts to it"
            ) from error
        return expanded.reshape(-1)[self.lo : self.hi].view(self.local_shape)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor. **Cost** one collective; ranks x the largest slice of memory."""
        if self.layout is None or self.layout.num_ranks == 1:
            return local.detach().clone().view(self.shape)
        pieces = [self.layout.piece(self.index, r) for r in range(self.layout.num_ranks)]
        padded = local.new_zeros(max(p.numel for p in pieces))
        padded[: local.numel()].copy_(local.detach().reshape(-1))
        rows = self.comm.gather_rows(padded, self.comm.axes.shard, GATHER_SITE)
        parts = [row[: p.numel] for row, p in zip(rows, pieces, strict=True)]
        return torch.cat(parts).view(self.shape)


def make_cut(shape: tuple[int, ...], layout: Layout | None, index: int, comm: Comm) -> Cut:
    """Describe parameter ``index`` of ``layout`` as this rank sees it."""
    if layout is None:
        numel = prod(shape)
        placements: list[Placement] = [Replicate()] * len(comm.axes.all)
        return Cut(shape, None, index, comm, 0, numel, shape, tuple(placements))
    piece = layout.piece(index, comm.axes.shard.rank)
    placement: Placement = Ragged(piece.lo, piece.hi)
    local_shape: tuple[int, ...] = (piece.numel,)
    if layout.kind == "rows" and shape:
        slot_rows = -(-shape[0] // layout.num_ranks)
        begin = min(comm.axes.shard.rank * slot_rows, shape[0])
        rows = min(slot_rows, shape[0] - begin)
        placement, local_shape = Shard(0), (rows, *shape[1:])
    before = [Replicate()] if comm.axes.replicate else []
    return Cut(shape, layout, index, comm, piece.lo, piece.hi, local_shape, (*before, placement))
