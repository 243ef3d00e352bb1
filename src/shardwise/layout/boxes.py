"""Flat ranges as boxes of a tensor, and which ranks own a flat range: what checkpoints ask.

A rank owns one contiguous range of a parameter's flattened elements; the formats of checkpoints
hold only *boxes* (one offset and one length for each dim). `boxes_of_range` goes from the first
to the second. `owners_of` finds who wrote a range that another layout wants.

Note [The longest box first is the fewest boxes]
A *block* of dim d is all elements behind one index of dims 0 to d. A box whose elements are
contiguous is a run of whole blocks of one dim d, inside one block of dim d - 1. Take the longest
one at ``lo``, and call its end e. Either a block of dim d - 1 ends at e: a box that crosses e
consists of such blocks, or of larger ones, and begins where one begins, so not between lo and e.
Or ``hi`` is less than one block of dim d behind e: a box that crosses e would have to end inside
that block, and so to begin in it. Either way every cut of the range has a border at e, and the
longest box never costs one more.

Along the range the blocks first grow and then shrink, dim by dim, so that there are at most
``2 * (ndim - 1) + 1`` boxes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwise.layout.segments import Layout


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor whose elements are the contiguous flat range ``[lo, hi)``."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements ``[lo, hi)`` of a parameter, all owned by ``rank``."""

    rank: int
    lo: int
    hi: int


def boxes_of_range(shape: Sequence[int], lo: int, hi: int) -> tuple[Box, ...]:
    """Cut elements ``[lo, hi)`` of a tensor into as few boxes as possible, in flat order.

    Whole rows give one box, an empty range none.
    See Note [The longest box first is the fewest boxes].

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


def owners_of(layout: Layout, index: int, lo: int, hi: int) -> list[Overlap]:
    """Return which ranks own which parts of elements ``[lo, hi)`` of parameter ``index``.

    In flat order, which is rank order; every element once; nothing for an empty range.

    **Cost** O(overlaps), whatever the number of ranks: the slots of a segment are equal, so the
    first and the last rank are found by division.
    **Raises** ValueError when the range is not inside the parameter.
    """
    placed = layout.params[index]
    _check_range(lo, hi, placed.numel)
    if lo == hi:
        return []
    slot = layout.segments[placed.segment].slot_numel
    first, last = (placed.offset + lo) // slot, (placed.offset + hi - 1) // slot
    overlaps = []
    for rank in range(first, last + 1):
        piece = layout.piece(index, rank)
        overlaps.append(Overlap(rank, max(lo, piece.lo), min(hi, piece.hi)))
    return overlaps


def _longest_box(shape: Sequence[int], numel: int, lo: int, hi: int) -> Box:
    """Return the longest box that starts at ``lo`` and ends at ``hi`` or before."""
    offsets: tuple[int, ...] = ()
    block, inside = numel, lo
    for dim, size in enumerate(shape):
        block //= size
        offset, inside = divmod(inside, block)
        offsets += (offset,)
        if not inside and block <= hi - lo:
            count = min((hi - lo) // block, size - offset)
            behind = shape[dim + 1 :]
            lengths = (*(1,) * dim, count, *behind)
            return Box(offsets + (0,) * len(behind), lengths, lo, lo + count * block)
    return Box((), (), lo, hi)  # no dims: the one element of a scalar


def _check_range(lo: int, hi: int, numel: int) -> None:
    if not 0 <= lo <= hi <= numel:
        raise ValueError(f"range: expected 0 <= lo <= hi <= {numel}, got lo {lo} and hi {hi}")
