"""Where codes and scales lie in what one rank is sent of an encoded reduction: integers.

Note [Parcels]
A rank is sent its slices of all gradients as one message from every peer: first what travels as
numbers, then all scales (float32, one a block), then all codes. Blocks are those of a gather: they
are counted from the first element of a parameter, and one that a cut between two ranks goes through
is two. All ranks lay out a rank's parcel alike, so only bytes travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Packet:
    """``num`` blocks of ``width`` elements of a slice, from its element ``begin`` on.

    ``codes`` and ``scales`` are where theirs begin in the parcel, in bytes. One without ``scales``
    are elements that travel as numbers.
    """

    number: int
    begin: int
    num: int
    width: int
    codes: int
    scales: int | None


@dataclass(frozen=True)
class Parcel:
    """What one rank is sent by each other."""

    packets: tuple[Packet, ...]
    num_bytes: int


def parcel_of(slices: Sequence[Slice]) -> Parcel:
    """Lay out a rank's slices; see Note [Parcels]."""
    packets, at = [], 0
    cuts: list[tuple[int, int, int, int]] = []
    for number, each in enumerate(slices):
        if each.coding is None or not each.coding.has_scales:
            numel = each.hi - each.lo
            packets.append(Packet(number, 0, 1, numel, at, None))
            at = _aligned(at + numel * each.size)
        else:
            cuts += [(number, *block) for block in _blocks(each)]
    scales = at
    codes = _aligned(scales + SCALE_BYTES * sum(num for _, _, num, _ in cuts))
    for number, begin, num, width in cuts:
        coding = slices[number].coding
        assert coding is not None
        packets.append(Packet(number, begin, num, width, codes, scales))
        scales += num * SCALE_BYTES
        codes += num * coding.code_bytes(width)
    return Parcel(tuple(packets), _aligned(codes) if cuts else at)


def _blocks(each: Slice) -> Iterator[tuple[int, int, int]]:
    assert each.coding is not None
    for lo, num, width in blocks_of(each.lo, each.hi, each.coding.block):
        yield lo - each.lo, num, width


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
