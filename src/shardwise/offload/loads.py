"""Integers: the cut of a step on the device into loads."""

from collections.abc import Iterator, Sequence

from shardwise.homes import LOAD_BYTES

MULTIPLE = 1 << 12  # elements; above any kernel's vector, so that no rounding depends on it
_ALIGNMENT = 256  # bytes; that of accelerators' allocators


def padded_bytes(num_bytes: int) -> int:
    """Return the bytes that a tensor takes in a buffer on the device."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def cut_into_loads(
    rows: Sequence[tuple[int, int, int]], multiple: int, num_bytes: int = LOAD_BYTES
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield each load as a list of (row, lo, hi): elements [lo, hi) of a row, in the rows' order.

    ``rows`` are (elements, bytes per element, number of the first element). Rows are cut at element
    numbers that are multiples of ``multiple``. A load has about ``num_bytes`` at most. Every row is
    in a load, also a row without elements.
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
                    load = []
                    room = num_bytes
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
