"""Where every element of a unit's parameters lies: in the full buffer and on which rank.

A *segment* is an even all-gather by itself: rank r's share is the r-th of ``num_ranks`` equal
shares, and lands contiguous and in rank order where the layers read it. Two layouts:

- ``rows``: one segment per parameter, cut along dim 0 as ``torch.chunk`` cuts, so that the
  shards are DTensor ``Shard(0)`` shards.
- ``flat``: one segment for all parameters, laid one after the other; every rank owns an equal
  range of the index space whatever the shapes are.

In both, what a rank owns of one parameter is one contiguous range of its elements (`Piece`), and
a rank's shares lie one after the other in its shard buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config import LayoutName


@dataclass(frozen=True)
class Segment:
    """One even all-gather: ``numel`` elements in ``num_ranks`` shares of ``shard_numel``."""

    numel: int
    shard_numel: int
    full_offset: int
    shard_offset: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return rank's range ``[lo, hi)`` of the segment's elements, padding left out."""
        lo = min(rank * self.shard_numel, self.numel)
        return lo, min(lo + self.shard_numel, self.numel)


def even_segment(numel: int, num_ranks: int) -> Segment:
    """Return ``numel`` elements, cut into shares that are as even as can be."""
    return Segment(numel, -(-numel // num_ranks), 0, 0)


@dataclass(frozen=True)
class Piece:
    """What one rank owns of one parameter: elements ``[lo, hi)``, at ``shard_offset``."""

    lo: int
    hi: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """Number of elements in the piece."""
        return self.hi - self.lo


@dataclass(frozen=True)
class PlacedParam:
    """One parameter in its segment: which one, and its offset among the segment's elements."""

    shape: tuple[int, ...]
    segment: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The layout of one buffer: ``full_numel`` P elements full, ``shard_numel`` S per rank."""

    kind: LayoutName
    num_ranks: int
    params: tuple[PlacedParam, ...]
    segments: tuple[Segment, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(p.numel for p in self.params)

    @cached_property
    def shard_numel(self) -> int:
        """S: elements in one rank's shard buffer, padding included."""
        return sum(s.shard_numel for s in self.segments)

    @cached_property
    def full_numel(self) -> int:
        """P: elements in the full buffer, padding included; always ``num_ranks * S``."""
        return self.num_ranks * self.shard_numel

    def full_offset(self, index: int) -> int:
        """Return where parameter ``index`` begins in the full buffer."""
        placed = self.params[index]
        return self.segments[placed.segment].full_offset + placed.offset

    def piece(self, index: int, rank: int) -> Piece:
        """Return what ``rank`` owns of parameter ``index``; possibly nothing."""
        placed = self.params[index]
        segment = self.segments[placed.segment]
        begin, end = segment.bounds(rank)
        lo = min(max(begin - placed.offset, 0), placed.numel)
        hi = max(min(end - placed.offset, placed.numel), lo)
        inside = max(placed.offset + lo - begin, 0) if hi > lo else 0
        return Piece(lo, hi, segment.shard_offset + inside)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Return the shape of what ``rank`` owns of parameter ``index``: rows of it, or flat."""
        shape, numel = self.params[index].shape, self.piece(index, rank).numel
        if self.kind == "flat" or not shape:
            return (numel,)
        share = -(-shape[0] // self.num_ranks)
        return (max(min(share, shape[0] - rank * share), 0), *shape[1:])

    def segments_of(self, indices: Iterable[int]) -> Iterator[tuple[Segment, list[int]]]:
        """Yield the segments in which parameters lie, each with them; none that is empty."""
        found: dict[int, list[int]] = {}
        for index in indices:
            found.setdefault(self.params[index].segment, []).append(index)
        for number, inside in sorted(found.items()):
            if self.segments[number].numel:
                yield self.segments[number], inside


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
    """Lay the parameters one after the other and cut the index space into equal ranges."""
    params = []
    offset = 0
    for shape in shapes:
        params.append(PlacedParam(shape, 0, offset))
        offset += prod(shape)
    return Layout("flat", num_ranks, tuple(params), (even_segment(offset, num_ranks),))


def build_layout(kind: LayoutName, shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Layout:
    """Build the layout of the given kind."""
    return (rows_layout if kind == "rows" else flat_layout)(shapes, num_ranks)
