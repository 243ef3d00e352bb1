"""Integers: offsets of one unit's tensors in its file."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 4096  # of file offsets, byte counts and memory, as O_DIRECT requires


def align(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Regions:
    """Bytes [begins[i], begins[i] + sizes[i]) of a unit's file hold its tensor i.

    Each begins at a multiple of `ALIGNMENT`, and ``num_bytes`` is one too. The tensors of a unit
    are one range of ``num_bytes``, which is read or written at once.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int


def regions_of(sizes: Sequence[int]) -> Regions:
    """Return the regions of tensors with these sizes in bytes, in order."""
    begins, end = [], 0
    for num_bytes in sizes:
        begins.append(end)
        end += align(num_bytes)
    return Regions(tuple(begins), tuple(sizes), end)
