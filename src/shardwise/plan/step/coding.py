"""What encoding and decoding takes, of gathers and of reductions: bytes moved, memory meanwhile.

Counted from the passes of `comm.encoded` over float32: a block's magnitudes, their largest,
quotients and roundings; codes to numbers, times scales. It runs on a few elements at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.comm.shares import BLOCK_NUMEL, owned_ranges
from shardwise.layout.memory import Memory
from shardwise.layout.segments import Segment
from shardwise.layout.wire import AT_A_TIME, ON_CPU_AT_A_TIME, MessageSize, Slice, size_of
from shardwise.plan.step.messages import Message
from shardwise.precisions import GATHER_BITS, Coding

_FLOAT, _BF16 = 4, 2
_RANKS_APART = 64  # of more ranks, what each of the others is sent is taken to be their mean


class CodingWork(NamedTuple):
    """``before`` and ``after`` are bytes moved on the device to encode and to decode.

    ``staging`` are the bytes that all ranks' shares arrive in; ``working`` is the most memory that
    either takes beside them.
    """

    before: int
    after: int
    staging: int
    working: int


def coding_work(memory: Memory, on_cpu: bool, is_away: bool) -> CodingWork:
    """Describe the coding of one storage, whose slices are encoded where they rest."""
    wire = memory.wire
    if wire is None:
        return CodingWork(0, 0, 0, 0)
    most = ON_CPU_AT_A_TIME if on_cpu else AT_A_TIME
    bits = GATHER_BITS[wire.coding.format]
    numel = memory.layout.full_numel
    casts = memory.master_size != _FLOAT
    encoded = max(memory.own_numel, 1) * _encoded_bytes(wire.coding, memory.master_size)
    size = memory.full_size
    apart = _FLOAT + size if on_cpu and size != _FLOAT else 0  # cast once, in the end
    decoded = numel * (3 * (_FLOAT if apart else size) + apart) + numel * bits // 8
    largest = (min(n, most) * _FLOAT for n in wire.largest_runs(0))
    encoding, decoding = next(largest) * (1 + casts), next(largest)
    halves = decoding // 2 if on_cpu and wire.coding.format == "fp8" else 0
    return CodingWork(
        0 if is_away else int(encoded),
        decoded,
        wire.num_bytes,
        max(decoding * bool(apart) + halves, 0 if is_away else encoding),
    )


def _encoded_bytes(coding: Coding, size: int) -> float:
    """Return the bytes that are moved to encode one element of ``size`` bytes."""
    casts = size != _FLOAT
    roundings = 0 if coding.format == "fp8" else 2 * _FLOAT
    # read to magnitudes, to their largest, to quotients, rounded, and to codes
    passes = (size + _FLOAT) * casts + 2 * _FLOAT + _FLOAT + 2 * _FLOAT + roundings
    return passes + _FLOAT + GATHER_BITS[coding.format] / 8


class ReducedPart(NamedTuple):
    """A gradient, or a range of one buffer: elements of ``size`` bytes from ``offset`` on."""

    offset: int
    numel: int
    size: int
    coding: Coding | None


class Parcels(NamedTuple):
    """What a unit adds to an encoded reduction, as rank 0 of ``num_ranks`` sees it.

    ``sizes`` are those of the parcels, rank 0's first. ``packing`` and ``summing`` are the most
    memory that encoding, and decoding, takes beside them; ``beside`` is held as long as they are.
    """

    sizes: tuple[MessageSize, ...]
    num_ranks: int
    on_cpu: bool
    has_codes: bool
    before: int
    after: int
    packing: int
    summing: int
    beside: int = 0

    @property
    def received(self) -> int:
        """Bytes that arrive from the others."""
        return self.sizes[0].num_bytes * (self.num_ranks - 1)

    @property
    def message(self) -> Message:
        """The all-to-all of bytes."""
        own, *others = (size.num_bytes for size in self.sizes)
        sent = sum(others) * (self.num_ranks - 1) // max(len(others), 1)
        num_messages = (self.num_ranks - 1 if self.on_cpu else 1) if sent else 0
        staging = sent + own + self.received + self.beside
        return Message(sent + own, sent, num_messages, staging, self.before, self.after)


def parcels_of(
    segments: Sequence[tuple[Segment, Sequence[ReducedPart]]], num_ranks: int, on_cpu: bool
) -> Parcels:
    """Describe an encoded reduction of segments over ``num_ranks``.

    **Cost** a few microseconds for each part and rank.
    """
    sizes, own = list[MessageSize](), list[Slice]()
    before, packing, largest = 0.0, 0, 0
    most = ON_CPU_AT_A_TIME if on_cpu else AT_A_TIME
    for rank in range(num_ranks):
        slices = [
            Slice(lo - part.offset, hi - part.offset, _wire_size(part), part.coding)
            for segment, parts in segments
            for number, lo, hi in owned_ranges(segment, [part[:2] for part in parts], rank)
            for part in [parts[number]]
        ]
        own = slices if rank == 0 else own
        sizes.append(size_of(slices))
        largest = max([largest, *(each.hi - each.lo for each in slices if each.codes)])
    parts = [part for _, parts in segments for part in parts]
    for part in parts:
        coding = part.coding
        if coding is not None and coding.has_scales:
            before += part.numel * _encoded_bytes(coding, part.size)
            packing = min(largest, most) * _FLOAT * (1 + (part.size != _FLOAT))
        else:
            before += part.numel * (part.size + _wire_size(part))
    if num_ranks > _RANKS_APART:
        others = zip(*sizes[1:], strict=True)
        sizes = [sizes[0], MessageSize(*(-(-sum(each) // (num_ranks - 1)) for each in others))]
    has_codes = any(part.coding is not None for part in parts)
    after, summing = 0.0, 0
    for each in own:
        numel = each.hi - each.lo
        if each.codes is None:
            casts = on_cpu and num_ranks > 1 and each.size != _FLOAT
            size, held = float(each.size), min(numel, BLOCK_NUMEL) * _FLOAT * casts
        else:
            size = 3 * _FLOAT + GATHER_BITS[each.codes.format] / 8
            halves = _BF16 * (on_cpu and each.codes.format == "fp8")
            held = min(numel, most) * (_FLOAT + halves)
        summing = max(summing, held)
        after += numel * (num_ranks * size + (num_ranks - 1) * 3 * _FLOAT + 2 * _FLOAT)
    return Parcels(
        *(tuple(sizes), num_ranks, on_cpu, has_codes),
        *(int(before), int(after), packing, summing),
    )


def merge_parcels(units: Sequence[Parcels]) -> Parcels | None:
    """Describe the one reduction that several units share; None for none."""
    if not units:
        return None
    sizes = zip(*(unit.sizes for unit in units), strict=True)
    return Parcels(
        tuple(MessageSize(*map(sum, zip(*of_rank, strict=True))) for of_rank in sizes),
        *units[0][1:3],
        any(unit.has_codes for unit in units),
        sum(unit.before for unit in units),
        sum(unit.after for unit in units),
        max(unit.packing for unit in units),
        max(unit.summing for unit in units),
        sum(unit.beside for unit in units),
    )


def _wire_size(part: ReducedPart) -> int:
    return part.size if part.coding is None else _BF16
