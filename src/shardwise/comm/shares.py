"""The part of a segment that each rank sends, and which parts share a message: integers only.

The transports send by these functions, and plans count by them.
"""

from collections.abc import Iterator, Sequence

from shardwise.layout.segments import Segment

SMALL_BYTES = 32 << 10  # a tensor up to this size shares a message with others for the same peer
BLOCK_NUMEL = 1 << 16  # elements that are summed at a time


def is_small(num_bytes: int) -> bool:
    """Tell whether a tensor shares a message with others that are small, for the same peer."""
    return num_bytes <= SMALL_BYTES


def gathered_together(share_bytes: Sequence[int]) -> list[int]:
    """Return which segments of a gather travel as one message to each peer; one alone does not."""
    small = [number for number, size in enumerate(share_bytes) if is_small(size)]
    return small if len(small) > 1 else []


def owned_ranges(
    segment: Segment, parts: Sequence[tuple[int, int]], rank: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (number of the part, lo, hi): which elements of the segment ``rank`` owns, by part.

    ``parts`` are (offset, number of elements) in the segment.
    """
    begin, end = segment.bounds(rank)
    for number, (offset, numel) in enumerate(parts):
        lo, hi = max(offset, begin), min(offset + numel, end)
        if hi > lo:
            yield number, lo, hi


def lands_in_mean(num_bytes: int, casts: bool, peer: int, rank: int) -> bool:
    """Tell whether a peer's addend is received where the mean will be, so that it takes no memory.

    That is the lowest peer's, unless it is small or of another dtype than the sum.
    """
    return not casts and not is_small(num_bytes) and peer == (1 if rank == 0 else 0)


def goes_as_it_lies(numels: Sequence[int], full_numel: int, casts: bool) -> bool:
    """Tell whether a coalesced reduction sends a gradient itself, not a packed copy of all parts.

    It does where one part is the whole segment, padding included, in the dtype of the sum.
    """
    return not casts and list(numels) == [full_numel]
