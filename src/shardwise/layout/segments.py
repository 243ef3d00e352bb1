"""Offsets of a unit's elements in the full buffer, and the rank that owns each element.

A *segment* is one all-gather: rank r's share is the r-th of ``num_ranks`` equal shares, which are
gathered in rank order into the memory that layers read. A segment may have an *owner*, a rank whose
share is all of it: the gather is then a broadcast, and the reduction is to that rank. Layouts:

- ``rows``: one segment per parameter, cut along dim 0 as ``torch.chunk`` cuts, so that the
  shards are DTensor ``Shard(0)`` shards.
- ``flat``: one segment for all parameters, one after the other; every rank owns an equal range of
  elements, whatever the shapes are.
- ``matrices``: as ``flat``, but parameters with an owner (see `placements`) have a segment each.

In every layout a rank owns one contiguous range of a parameter's elements (`Piece`), and the shard
buffer of a rank has its shares one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from math import prod

from shardwise.stages import LayoutName

ALIGNMENT = 32  # elements: 64 bytes at two bytes each, torch's alignment of CPU memory


@dataclass(frozen=True)
class Segment:
    """One all-gather: ``numel`` elements in ``num_ranks`` shares of ``shard_numel``.

    ``full_offset`` is its begin in the full buffer, ``shard_offset`` the begin of a rank's share in
    the shard buffer. With an ``owner``, the share of that rank is the whole segment, and the shares
    of other ranks are empty.
    """

    numel: int
    shard_numel: int
    full_offset: int
    shard_offset: int
    owner: int | None = None

    def share(self, rank: int) -> tuple[int, int]:
        """Return the begin and end of a rank's share in the segment, padding included."""
        if self.owner is None:
            return rank * self.shard_numel, (rank + 1) * self.shard_numel
        if rank == self.owner:
            return 0, self.numel
        return (0, 0) if rank < self.owner else (self.numel, self.numel)

    def share_numel(self, rank: int) -> int:
        """Return the number of elements of a rank's share, padding included."""
        begin, end = self.share(rank)
        return end - begin

    def full_numel(self, num_ranks: int) -> int:
        """Return the number of elements of all shares, padding included."""
        return self.numel if self.owner is not None else num_ranks * self.shard_numel

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the begin and end of a rank's share in the segment, without padding."""
        begin, end = self.share(rank)
        return min(begin, self.numel), min(end, self.numel)


def even_segment(numel: int, num_ranks: int) -> Segment:
    """Return a segment of ``numel`` elements in equal shares, padded at the end."""
    return Segment(numel, -(-numel // num_ranks), 0, 0)


@dataclass(frozen=True)
class Piece:
    """The elements ``[lo, hi)`` of a parameter that one rank owns, at ``shard_offset``."""

    lo: int
    hi: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """Number of elements in the piece."""
        return self.hi - self.lo


@dataclass(frozen=True)
class PlacedParam:
    """One parameter: its segment's index, and its offset among the segment's elements."""

    shape: tuple[int, ...]
    segment: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The layout of one storage: P elements in the full buffer, S in the shard buffer of a rank."""

    kind: LayoutName
    num_ranks: int
    params: tuple[PlacedParam, ...]
    segments: tuple[Segment, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(p.numel for p in self.params)

    def shard_numel(self, rank: int) -> int:
        """Return S: elements in a rank's shard buffer, padding included."""
        shares = ((s.shard_offset, s.share_numel(rank)) for s in self.segments)
        return max((offset + numel for offset, numel in shares if numel), default=0)

    @cached_property
    def full_numel(self) -> int:
        """P: elements in the full buffer, padding included."""
        return max((s.full_offset + s.full_numel(self.num_ranks) for s in self.segments), default=0)

    @cached_property
    def shard_numels(self) -> tuple[int, ...]:
        """S of every rank."""
        numels = [self.shard_numel(-1)] * self.num_ranks  # of a rank without owned segments
        for owner in {s.owner for s in self.segments if s.owner is not None}:
            numels[owner] = self.shard_numel(owner)
        return tuple(numels)

    def full_offset(self, index: int) -> int:
        """Return the offset of parameter ``index`` in the full buffer."""
        placed = self.params[index]
        return self.segments[placed.segment].full_offset + placed.offset

    def piece(self, index: int, rank: int) -> Piece:
        """Return the piece of parameter ``index`` that ``rank`` owns; it may be empty."""
        placed = self.params[index]
        segment = self.segments[placed.segment]
        begin, end = segment.bounds(rank)
        lo = min(max(begin - placed.offset, 0), placed.numel)
        hi = max(min(end - placed.offset, placed.numel), lo)
        if segment.owner not in (None, rank):
            return Piece(lo, hi, 0)
        inside = max(placed.offset + lo - begin, 0) if hi > lo else 0
        return Piece(lo, hi, segment.shard_offset + inside)

    def owner(self, index: int) -> int | None:
        """Return the rank that owns all of parameter ``index``; None if it is spread."""
        return self.segments[self.params[index].segment].owner

    @cached_property
    def spread(self) -> tuple[int, ...]:
        """The indices of the parameters that have no owner; their elements are on all ranks."""
        return tuple(i for i in range(len(self.params)) if self.owner(i) is None)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Return the shape of the piece of ``index`` that ``rank`` owns: some rows, or flat."""
        shape, numel = self.params[index].shape, self.piece(index, rank).numel
        owner = self.owner(index)
        if owner is not None:
            return shape if rank == owner else (0, *shape[1:])
        if self.kind != "rows" or not shape:
            return (numel,)
        share = -(-shape[0] // self.num_ranks)
        return (max(min(share, shape[0] - rank * share), 0), *shape[1:])

    def segments_of(self, indices: tuple[int, ...]) -> Sequence[tuple[Segment, Sequence[int]]]:
        """Return the segments of some parameters, each with their indices, without empty segments.

        **Cost** the result is cached, as each step asks for the same parameters.
        """
        if indices not in self._segments_by_indices:
            by_segment: dict[int, list[int]] = {}
            for index in indices:
                by_segment.setdefault(self.params[index].segment, []).append(index)
            self._segments_by_indices[indices] = [
                (self.segments[number], inside)
                for number, inside in sorted(by_segment.items())
                if self.segments[number].numel
            ]
        return self._segments_by_indices[indices]

    @cached_property
    def _segments_by_indices(
        self,
    ) -> dict[tuple[int, ...], Sequence[tuple[Segment, Sequence[int]]]]:
        return {}


def rows_layout(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Layout:
    """Cut every parameter along dim 0 as ``torch.chunk`` does: ceil(rows / ranks) each."""
    params, segments = [], []
    full_offset = shard_offset = 0
    for index, shape in enumerate(shapes):
        rows = shape[0] if shape else 1
        row_numel = prod(shape[1:])
        share = -(-rows // num_ranks) * row_numel
        params.append(PlacedParam(shape, index, 0))
        segments.append(Segment(prod(shape), share, full_offset, shard_offset))
        full_offset += share * num_ranks
        shard_offset += share
    return Layout("rows", num_ranks, tuple(params), tuple(segments))


def flat_layout(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Layout:
    """Put the parameters one after the other and cut all elements into equal ranges."""
    params = []
    offset = 0
    for shape in shapes:
        params.append(PlacedParam(shape, 0, offset))
        offset += prod(shape)
    return Layout("flat", num_ranks, tuple(params), (even_segment(offset, num_ranks),))


def matrices_layout(
    shapes: Sequence[tuple[int, ...]], num_ranks: int, owners: Sequence[int | None]
) -> Layout:
    """Put parameters that have an owner whole on that rank, and all others as `flat_layout` does.

    Parameters without an owner come first in every shard, at the same offset on all ranks. Matrices
    begin at multiples of `ALIGNMENT` elements, as in separate memory; at other offsets matrix
    products may round differently.
    """
    unowned = [shape for shape, owner in zip(shapes, owners, strict=True) if owner is None]
    flat = flat_layout(unowned, num_ranks)
    params = list(flat.params)
    segments = list(flat.segments)
    full_offset = _aligned(flat.full_numel)
    shard_offsets = [_aligned(flat.shard_numel(0))] * num_ranks  # the end of each rank's shard
    for index, (shape, owner) in enumerate(zip(shapes, owners, strict=True)):
        if owner is None:
            continue
        params.insert(index, PlacedParam(shape, len(segments), 0))
        numel = prod(shape)
        segments.append(
            Segment(
                numel,
                shard_numel=numel,
                # An empty segment is at 0, which is inside any buffer.
                full_offset=full_offset if numel else 0,
                shard_offset=shard_offsets[owner] if numel else 0,
                owner=owner,
            )
        )
        full_offset += _aligned(numel)
        shard_offsets[owner] += _aligned(numel)
    return Layout("matrices", num_ranks, tuple(params), tuple(segments))


def balance_costs(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each cost: the largest cost first, each to the least loaded rank.

    All ranks get the same result: among equal costs the first wins, among equal ranks the lowest.
    The largest load is at most 4/3 of the best assignment's largest.

    **Cost** O(n log(n x ranks)).
    """
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        owners[index] = rank
        heapreplace(loads, (load + costs[index], rank))
    return owners


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def build_layout(
    kind: LayoutName,
    shapes: Sequence[tuple[int, ...]],
    num_ranks: int,
    owners: Sequence[int | None] | None = None,
) -> Layout:
    """Build the layout of the given kind; ``owners`` are those of ``matrices``, by parameter."""
    if kind == "matrices":
        return matrices_layout(shapes, num_ranks, owners or [None] * len(shapes))
    if kind == "rows":
        return rows_layout(shapes, num_ranks)
    return flat_layout(shapes, num_ranks)
