"""Where codes and scales lie in what one rank is sent of an encoded reduction: integers.

Note [Parcels]
A rank is sent its slices of all gradients as one message from every peer: first what travels as
numbers, then all scales (float32, one a block), then all codes. Blocks are those of a gather: they
are counted from the first element of a parameter, and one that a cut between two ranks goes through
is two. All ranks lay out a rank's parcel alike, so only bytes travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.layout.wire import SCALE_BYTES, blocks_of
from shardwise.precisions import Coding

_ALIGNMENT = 16  # of a parcel, and of each part of it that is numbers


@dataclass(frozen=True)
class Slice:
    """Elements [lo, hi) of a parameter; ``size`` are bytes of one that travels as a number.

    ``coding`` None, or one without scales, is for elements that travel as numbers.
    """

    lo: int
    hi: int
    size: int
    coding: Coding | None

    @property
    def codes(self) -> Coding | None:
        """How the elements are encoded; None if they travel as numbers."""
        return self.coding if self.coding is not None and self.coding.has_scales else None


@dataclass(frozen=True)
class Packet:
    """``num`` blocks of ``width`` elements of a slice, from its element ``begin`` on.

    ``codes`` and ``scales`` are where theirs begin in the parcel, in bytes. Without ``coding`` the
    elements travel as numbers.
    """

    number: int
    begin: int
    num: int
    width: int
    codes: int
    scales: int
    coding: Coding | None


class ParcelSize(NamedTuple):
    """Bytes of a parcel's numbers (with what aligns them), scales and codes; sizes add up."""

    numbers: int
    scales: int
    codes: int

    @property
    def first_code(self) -> int:
        """Where codes begin in the parcel."""
        return _aligned(self.numbers + self.scales)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parcel."""
        return _aligned(self.first_code + self.codes)


@dataclass(frozen=True)
class Parcel:
    """What one rank is sent by each other."""

    packets: tuple[Packet, ...]
    num_bytes: int


def size_of(slices: Sequence[Slice]) -> ParcelSize:
    """Return the size of the parcel with a rank's slices."""
    numbers = scales = codes = 0
    for each in slices:
        if each.codes is None:
            numbers += _aligned((each.hi - each.lo) * each.size)
            continue
        for _, num, width in blocks_of(each.lo, each.hi, each.codes.block):
            scales += num * SCALE_BYTES
            codes += num * each.codes.code_bytes(width)
    return ParcelSize(numbers, scales, codes)


def parcel_of(slices: Sequence[Slice]) -> Parcel:
    """Lay out a rank's slices; see Note [Parcels]."""
    size = size_of(slices)
    packets, at, scales, codes = [], 0, size.numbers, size.first_code
    for number, each in enumerate(slices):
        if each.codes is None:
            numel = each.hi - each.lo
            packets.append(Packet(number, 0, 1, numel, at, at, None))
            at += _aligned(numel * each.size)
            continue
        for lo, num, width in blocks_of(each.lo, each.hi, each.codes.block):
            packets.append(Packet(number, lo - each.lo, num, width, codes, scales, each.codes))
            scales += num * SCALE_BYTES
            codes += num * each.codes.code_bytes(width)
    return Parcel(tuple(packets), size.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
