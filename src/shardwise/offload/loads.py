"""Integers: what passes the device together in a step that is taken there."""

from collections.abc import Iterator, Sequence

from shardwise.homes import LOAD_BYTES

MULTIPLE = 1 << 12  # elements: more than any kernel works on at once, so no rounding depends on it
_ALIGNMENT = 256  # bytes; as the allocators of accelerators have it


def room_of(num_bytes: int) -> int:
    """Return what a tensor takes of a buffer on the device."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def cut(
    rows: Sequence[tuple[int, int, int]], multiple: int, num_bytes: int = LOAD_BYTES
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield, for each load, its (row, lo, hi): elements [lo, hi) of a row, in the rows' order.

    ``rows`` are (elements, bytes of each, the number that the first one has); where a row is cut,
    the number of the element is a ``multiple``. A load has about ``num_bytes`` at most. Each row
    is in a load, also one without elements.
    """
    load: list[tuple[int, int, int]] = []
    room = num_bytes
    for row, (numel, size, first) in enumerate(rows):
        lo = 0
        while True:
            hi = numel
            if (numel - lo) * size > room:
                hi = (first + lo + room // size) // multiple * multiple - first
                if hi <= lo and load:
                    yield load
                    load, room = [], num_bytes
                    continue
                if hi <= lo:
                    hi = min(numel, ((first + lo) // multiple + 1) * multiple - first)
            load.append((row, lo, hi))
            room -= (hi - lo) * size
            lo = hi
            if lo == numel:
                break
    if load:
        yield load
