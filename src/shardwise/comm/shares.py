"""The parts of a segment that ranks send, and the parts that share a message: integers only.

The transports and the planner use the same functions, so that plans count the messages of runs.
"""

from collections.abc import Iterator, Sequence

from shardwise.layout.segments import Segment

SMALL_BYTES = 32 << 10  # a tensor up to this size shares a message with others for the same peer
BLOCK_NUMEL = 1 << 16  # elements that are summed at a time


def is_small(num_bytes: int) -> bool:
    """Tell whether a tensor shares a message with others that are small, for the same peer."""
    return num_bytes <= SMALL_BYTES


def packed_segments(share_bytes: Sequence[int]) -> list[int]:
    """Return the numbers of the segments of a gather that share one message to each peer.

    A single small segment is sent without packing.
    """
    small = [number for number, size in enumerate(share_bytes) if is_small(size)]
    return small if len(small) > 1 else []


def owned_ranges(
    segment: Segment, parts: Sequence[tuple[int, int]], rank: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of the segment that ``rank`` owns as (number of the part, lo, hi).

    ``parts`` are (offset in the segment, number of elements).
    """
    begin, end = segment.bounds(rank)
    for number, (offset, numel) in enumerate(parts):
        lo, hi = max(offset, begin), min(offset + numel, end)
        if hi > lo:
            yield number, lo, hi


def receives_into_mean(num_bytes: int, casts: bool, peer: int, rank: int) -> bool:
    """Tell whether a peer's addend is received into the memory of the mean.

    This saves a buffer for one addend, the lowest peer's, unless it is small or of another dtype
    than the sum.
    """
    return not casts and not is_small(num_bytes) and peer == (1 if rank == 0 else 0)


def sends_without_packing(numels: Sequence[int], full_numel: int, casts: bool) -> bool:
    """Tell whether a coalesced reduction sends a gradient itself, not a packed copy of all parts.

    It does if one part is the whole segment, padding included, in the dtype of the sum.
    """
    return not casts and list(numels) == [full_numel]
