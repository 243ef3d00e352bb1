"""Bytes that one collective of the engine sends, stages and moves, on either transport.

`comm.shares` says which elements each rank sends, which travel together and which need no memory,
here and for the transports. ``on_cpu`` means sends and receives, see `comm.point_to_point`;
otherwise the transport is `comm.coalesced`. The passes of encoding and decoding are those of
`comm.codes` over float32, a few elements at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.comm.shares import (
    BLOCK_NUMEL,
    gathered_together,
    goes_as_it_lies,
    is_small,
    lands_in_mean,
    owned_ranges,
)
from shardwise.layout.memory import Memory
from shardwise.layout.segments import Segment, even_segment
from shardwise.layout.wire import AT_A_TIME, ON_CPU_AT_A_TIME, MessageSize, Slice, size_of
from shardwise.precisions import GATHER_BITS, Coding

_FLOAT, _BF16 = 4, 2
_RANKS_APART = 64  # of more ranks, each of the others is taken to be sent their mean


class Message(NamedTuple):
    """One collective of a unit, or what a unit adds to the collective of a bucket.

    ``staging`` are buffers held until it is waited for, ``before`` and ``after`` bytes that are
    moved on the device to pack, cast or copy, and to unpack or sum; ``num_messages`` 0: nothing to
    send. ``small`` is (count, bytes) per peer of what shares a message with other small tensors.
    """

    payload: int = 0
    sent: int = 0
    num_messages: int = 0
    staging: int = 0
    before: int = 0
    after: int = 0
    small: tuple[tuple[int, int], ...] = ()


def gather_message(
    items: Sequence[tuple[Segment, int, bool]], num_ranks: int, on_cpu: bool
) -> Message:
    """Describe an all-gather of (segment, element size, in place).

    Sends go out at once, so the rank with the most decides how long an uneven one takes: the
    payload is that of an even one. Broadcasts from owners follow one another.
    """
    if not on_cpu:
        sent = sum(s.share_numel(0) * size for s, size, _ in items) * (num_ranks - 1)
        payload = sum(s.full_numel(num_ranks) * size for s, size, _ in items)
        return Message(payload, sent, len(items))
    most = max(sum(s.share_numel(r) * size for s, size, _ in items) for r in range(num_ranks))
    payload = most * num_ranks
    owned = [s.bounds(0)[1] * size for s, size, _ in items]
    small = gathered_together([s.shard_numel * size for s, size, _ in items])
    num_messages = sum(own > 0 for n, own in enumerate(owned) if n not in small)
    filled = sum(items[n][0].numel * items[n][1] for n in small)  # of all ranks
    packed = sum(owned[n] for n in small)
    copied = sum(own for own, item in zip(owned, items, strict=True) if not item[2])
    return Message(
        payload,
        sum(owned) * (num_ranks - 1),
        (num_messages + (packed > 0)) * (num_ranks - 1),
        staging=filled,
        before=2 * (copied + packed),
        after=2 * (filled - packed),
    )


def merge(messages: Sequence[Message]) -> Message:
    """Describe the one collective that several units or segments share.

    Small tensors for one peer travel together: `whole` packs them.
    """
    small: list[tuple[int, int]] = []
    for peer in range(max((len(m.small) for m in messages), default=0)):
        of_peer = [m.small[peer] for m in messages if len(m.small) > peer]
        small.append((sum(c for c, _ in of_peer), sum(b for _, b in of_peer)))
    return Message(
        sum(m.payload for m in messages),
        sum(m.sent for m in messages),
        sum(m.num_messages for m in messages),
        sum(m.staging for m in messages),
        sum(m.before for m in messages),
        sum(m.after for m in messages),
        tuple(small),
    )


def whole(messages: Sequence[Message]) -> Message:
    """Describe a bucket's collective as it is sent, small tensors packed; one alone is not."""
    message = merge(messages)
    return message._replace(
        staging=message.staging + sum(size for count, size in message.small if count > 1),
        num_messages=message.num_messages + sum(count > 0 for count, _ in message.small),
        small=(),
    )


def scattered_message(
    segment: Segment, parts: Sequence[tuple[int, int]], num_ranks: int, wire: int, reduce: int
) -> Message:
    """Describe what one segment adds to a reduce-scatter by sends and receives."""
    casts = wire != reduce
    sent = num = own = staging = 0
    small = []
    for rank in range(num_ranks):
        sizes = [(hi - lo) * wire for _, lo, hi in owned_ranges(segment, parts, rank)]
        if rank == 0:
            own = sum(sizes)
            staging = sum(
                size
                for peer in range(1, num_ranks)
                for size in sizes
                if not lands_in_mean(size, casts, peer, rank)
            )
            continue
        together = [size for size in sizes if is_small(size)]
        sent += sum(sizes)
        num += len(sizes) - len(together)
        small.append((len(together), sum(together)))
    after = own * num_ranks + own // wire * reduce
    payload = sum(n for _, n in parts) * wire
    return Message(payload, sent, num, staging, 0, after, tuple(small))


def packed_message(
    segment: Segment, parts: Sequence[tuple[int, int]], num_ranks: int, wire: int, reduce: int
) -> Message:
    """Describe what one segment adds to a coalesced reduce-scatter."""
    if segment.owner is not None:
        return _message_to_owner(segment, num_ranks, wire, reduce)
    full = segment.shard_numel * num_ranks
    numels = [numel for _, numel in parts]
    sent = segment.shard_numel * reduce * (num_ranks - 1)
    divided = 2 * segment.shard_numel * reduce
    if goes_as_it_lies(numels, full, wire != reduce):
        return Message(full * reduce, sent, 1, 0, 0, divided)
    zeros = full * reduce if sum(numels) < full else 0
    moved = sum(numels) * (wire + reduce) + zeros
    return Message(full * reduce, sent, 1, full * reduce, moved, divided)


def _message_to_owner(segment: Segment, num_ranks: int, wire: int, reduce: int) -> Message:
    """Describe a reduction to one rank, which casts its addend into the mean, as rank 0 sees it."""
    numel, mine = segment.numel, segment.share_numel(0)
    if num_ranks == 1:
        return Message(numel * reduce, after=numel * (wire + reduce))
    if mine:
        return Message(numel * reduce, 0, 1, 0, numel * (wire + reduce), 2 * numel * reduce)
    cast = numel * reduce if wire != reduce else 0
    return Message(numel * reduce, numel * reduce, 1, cast, cast and numel * (wire + reduce))


def replica_message(
    numel: int, size: int, ranks: int, on_cpu: bool, encoded: Message | None = None
) -> Message:
    """Describe `Comm.all_reduce` of one flat buffer over the replicate axis, rank 0 of it.

    It is the two others, one after the other, through a share beside the buffer, and through a
    padded copy of it where shares must be even. ``encoded`` is the first of them, if it is encoded.
    """
    segment = even_segment(numel, ranks)
    share = segment.bounds(0)[1] * size
    padded = 0 if on_cpu or segment.shard_numel * ranks == numel else segment.shard_numel * ranks
    describe = scattered_message if on_cpu else packed_message
    reduced = encoded or whole([describe(segment, [(0, padded or numel)], ranks, size, size)])
    gathered = gather_message([(segment, size, True)], ranks, on_cpu)
    return reduced._replace(
        payload=(reduced.payload + gathered.payload) // 2 if encoded else reduced.payload,
        sent=reduced.sent + gathered.sent,
        num_messages=reduced.num_messages + gathered.num_messages,
        staging=reduced.staging + segment.shard_numel * size + padded * size,
        before=reduced.before + padded * size,
        after=reduced.after + 2 * share + padded * size,
    )


# -- encoded collectives
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
    """A unit's part of an encoded reduction, as rank 0 of ``num_ranks`` sees it.

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
