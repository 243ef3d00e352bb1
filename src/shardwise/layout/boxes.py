"""Flat ranges as boxes of a tensor, and the owners of a flat range, for checkpoints.

A rank owns one contiguous range of a parameter's flattened elements. The formats of checkpoints
hold only *boxes* (one offset and one length for each dim). `boxes_of_range` converts a range to
boxes. `owners_of` finds the ranks that wrote a range of another layout. A `Region` is any box, such
as a cut of tensor parallelism.

Note [Taking the longest box first gives the fewest boxes]
A *block* of dim d is all elements with the same indices in dims 0 to d. A box with contiguous
elements is a run of whole blocks of one dim d, inside one block of dim d - 1. Take the longest box
at ``lo``, and call its end e. Either a block of dim d - 1 ends at e: a box that crosses e consists
of such blocks, or of larger ones, and begins where one begins, so not between lo and e. Or ``hi``
is less than one block of dim d after e: a box that crosses e would have to end inside that block,
and so to begin in it. In both cases every partition of the range has a border at e, so taking the
longest box never costs an additional box.

Along the range the blocks first grow and then shrink, dim by dim. So a range has at most
``2 * (ndim - 1) + 1`` boxes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import add
from typing import NamedTuple

from shardwise.layout.segments import Layout


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor whose elements are the contiguous flat range ``[lo, hi)``."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Elements ``[lo, hi)`` of a parameter, all owned by ``rank``."""

    rank: int
    lo: int
    hi: int


@lru_cache(maxsize=4096)
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, equal to torch's also for empty tensors."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def boxes_of_range(shape: Sequence[int], lo: int, hi: int) -> tuple[Box, ...]:
    """Cut elements ``[lo, hi)`` of a tensor into as few boxes as possible, in flat order.

    Whole rows give one box, an empty range gives none.
    See Note [Taking the longest box first gives the fewest boxes].

    **Cost** O(ndim) for each box; at most ``2 * (ndim - 1) + 1`` boxes.
    **Raises** ValueError when the range is not inside the tensor.
    """
    numel = prod(shape)
    _check_range(lo, hi, numel)
    boxes = []
    while lo < hi:
        box = _longest_box(shape, numel, lo, hi)
        boxes.append(box)
        lo = box.hi
    return tuple(boxes)


def owners_of(layout: Layout, index: int, lo: int, hi: int) -> list[OwnedRange]:
    """Return the ranges that make up elements ``[lo, hi)`` of parameter ``index``, by owner.

    They are in flat order, which is rank order. An empty range has none.

    **Cost** O(ranges), whatever the number of ranks: the shares of a segment are equal, so the
    first and the last rank follow by division.
    **Raises** ValueError when the range is not inside the parameter.
    """
    placed = layout.params[index]
    _check_range(lo, hi, placed.numel)
    if lo == hi:
        return []
    segment = layout.segments[placed.segment]
    if segment.owner is not None:
        return [OwnedRange(segment.owner, lo, hi)]
    first = (placed.offset + lo) // segment.shard_numel
    last = (placed.offset + hi - 1) // segment.shard_numel
    ranges = []
    for rank in range(first, last + 1):
        piece = layout.piece(index, rank)
        ranges.append(OwnedRange(rank, max(lo, piece.lo), min(hi, piece.hi)))
    return ranges


def _longest_box(shape: Sequence[int], numel: int, lo: int, hi: int) -> Box:
    """Return the longest box that starts at ``lo`` and ends at ``hi`` or before."""
    offsets: list[int] = []
    block = numel  # elements of a block of the present dim
    remainder = lo  # offset of ``lo`` in its block
    for dim, size in enumerate(shape):
        block //= size
        offset, remainder = divmod(remainder, block)
        offsets.append(offset)
        if not remainder and block <= hi - lo:
            count = min((hi - lo) // block, size - offset)
            inner_shape = tuple(shape[dim + 1 :])
            return Box(
                offsets=tuple(offsets) + (0,) * len(inner_shape),
                lengths=(1,) * dim + (count,) + inner_shape,
                lo=lo,
                hi=lo + count * block,
            )
    return Box((), (), lo, hi)  # no dims: the one element of a scalar


def _check_range(lo: int, hi: int, numel: int) -> None:
    if not 0 <= lo <= hi <= numel:
        raise ValueError(f"range: expected 0 <= lo <= hi <= {numel}, got lo {lo} and hi {hi}")


class Region(NamedTuple):
    """A box of a tensor: its offset ``at`` and its size ``shape`` in each dim."""

    at: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def common(self, other: "Region") -> "Region | None":
        """Return the intersection with another box; None if it is empty."""
        at = tuple(map(max, self.at, other.at))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - begin for begin, end in zip(at, ends, strict=True))
        return Region(at, shape) if all(n > 0 for n in shape) else None

    def shift_from(self, other: "Region") -> int | None:
        """Return the flat offset of an element in ``other`` minus its flat offset in this box.

        Return None if the difference is not the same for all elements.
        """
        if self.at[1:] != other.at[1:] or self.shape[1:] != other.shape[1:]:
            return None
        return (self.at[0] - other.at[0]) * prod(self.shape[1:]) if self.at else 0

    def flat(self, inner: "Region") -> tuple[int, int]:
        """Return the flat range in this box from the first to the last element of ``inner``."""
        first = last = 0
        for begin, size, at, count in zip(*self, *inner, strict=True):
            first = first * size + at - begin
            last = last * size + at - begin + count - 1
        return first, last + 1

    def parts(self, lo: int, hi: int) -> list[tuple["Region", int, int]]:
        """Return flat elements [lo, hi) of this box as (box of the tensor, begin, end)."""
        return [
            (Region(tuple(map(add, self.at, box.offsets)), box.lengths), box.lo, box.hi)
            for box in boxes_of_range(self.shape, lo, hi)
        ]

    def inside(self, part: "Region") -> tuple[slice, ...]:
        """Return the index of ``part`` in an array of this box, one slice per dim."""
        return tuple(
            slice(offset - begin, offset - begin + size)
            for offset, size, begin in zip(part.at, part.shape, self.at, strict=True)
        )


def full_region(shape: tuple[int, ...]) -> Region:
    """Return the box that is all of a tensor."""
    return Region((0,) * len(shape), shape)
