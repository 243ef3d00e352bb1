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
from shardwise.layout.wire import (
    AT_A_TIME,
    ON_CPU_AT_A_TIME,
    SCALE_BYTES,
    MessageSize,
    Slice,
    share_numel,
    size_of,
)
from shardwise.precisions import GATHER_BITS, Coding

_FLOAT, _BF16 = 4, 2
_RANKS_APART = 64  # of more ranks, each of the others is taken to be sent their mean


class Parcels(NamedTuple):
    """Sizes of the encoded messages to each of ``num_ranks``, rank 0's first."""

    sizes: tuple[MessageSize, ...]
    num_ranks: int
    on_cpu: bool
    has_codes: bool


class Message(NamedTuple):
    """One collective of a unit, or what a unit adds to the collective of a bucket.

    ``staging`` are buffers held until it is waited for, ``before`` and ``after`` bytes that are
    moved on the device to pack, cast, encode or copy, and to unpack, decode or sum; ``packing`` and
    ``summing`` the most memory that these take beside the buffers. ``num_messages`` 0: nothing to
    send. ``small`` is (count, bytes) per peer of what shares a message with other small tensors.
    ``parcels`` are those of a reduction that may be encoded; `whole` adds their bytes.
    """

    payload: int = 0
    sent: int = 0
    num_messages: int = 0
    staging: int = 0
    before: int = 0
    after: int = 0
    packing: int = 0
    summing: int = 0
    small: tuple[tuple[int, int], ...] = ()
    parcels: Parcels | None = None


def merge(messages: Sequence[Message]) -> Message:
    """Describe the one collective that several units or segments share.

    Small tensors for one peer travel together, and so do parcels: `whole` packs them.
    """
    if len(messages) == 1:
        return messages[0]
    small: list[tuple[int, int]] = []
    for peer in range(max((len(m.small) for m in messages), default=0)):
        of_peer = [m.small[peer] for m in messages if len(m.small) > peer]
        small.append((sum(c for c, _ in of_peer), sum(b for _, b in of_peer)))
    parcels = [m.parcels for m in messages if m.parcels is not None]
    merged = None
    if parcels:
        by_rank = zip(*(each.sizes for each in parcels), strict=True)
        sizes = tuple(MessageSize(*map(sum, zip(*rank, strict=True))) for rank in by_rank)
        has_codes = any(each.has_codes for each in parcels)
        merged = parcels[0]._replace(sizes=sizes, has_codes=has_codes)
    return Message(
        sum(m.payload for m in messages),
        sum(m.sent for m in messages),
        sum(m.num_messages for m in messages),
        sum(m.staging for m in messages),
        sum(m.before for m in messages),
        sum(m.after for m in messages),
        max((m.packing for m in messages), default=0),
        max((m.summing for m in messages), default=0),
        tuple(small),
        merged,
    )


def whole(message: Message) -> Message:
    """Describe a collective as it is sent: small tensors packed, one alone is not; or parcels."""
    if message.parcels is None:
        return message._replace(
            staging=message.staging + sum(size for count, size in message.small if count > 1),
            num_messages=message.num_messages + sum(count > 0 for count, _ in message.small),
            small=(),
        )
    sizes, num_ranks, on_cpu, _ = message.parcels
    own, *others = (size.num_bytes for size in sizes)
    sent, received = sum(others) * (num_ranks - 1) // max(len(others), 1), own * (num_ranks - 1)
    return message._replace(
        payload=sent + own,
        sent=sent,
        num_messages=(num_ranks - 1 if on_cpu else 1) if sent else 0,
        staging=message.staging + sent + own + received,
        # Arriving parcels have memory only after all parcels are encoded.
        packing=max(message.packing - received, 0),
    )


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
    summing = min(segment.share_numel(0), BLOCK_NUMEL) * reduce * casts
    return Message(payload, sent, num, staging, 0, after, 0, summing, tuple(small))


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
    reduced = encoded or describe(segment, [(0, padded or numel)], ranks, size, size)
    reduced, gathered = whole(reduced), gather_message([(segment, size, True)], ranks, on_cpu)
    return reduced._replace(
        payload=(reduced.payload + gathered.payload) // 2 if encoded else reduced.payload,
        sent=reduced.sent + gathered.sent,
        num_messages=reduced.num_messages + gathered.num_messages,
        staging=reduced.staging
        + max(reduced.packing, reduced.summing)
        + segment.shard_numel * size
        + padded * size,
        before=reduced.before + padded * size,
        after=reduced.after + 2 * share + padded * size,
    )


def coded_mean_message(numel: int, ranks: int, block: int, on_cpu: bool) -> Message:
    """Describe `codes.means.coded_mean` of float32 elements in int8: a mean, then its bytes."""
    share = share_numel(numel, ranks, block)
    coding = Coding("int8", block)
    segment = even_segment(share * ranks, ranks)
    parts = [Slice(0, share * ranks, _FLOAT, coding)]
    reduced = whole(parcelled_message([(segment, parts)], ranks, on_cpu))
    box = share + share // block * SCALE_BYTES
    gathered = gather_message([(even_segment(box * ranks, ranks), 1, True)], ranks, on_cpu)
    return reduced._replace(
        payload=(reduced.payload + gathered.payload) // 2,
        sent=reduced.sent + gathered.sent,
        num_messages=reduced.num_messages + gathered.num_messages,
        staging=reduced.staging + share * (ranks + 1) * _FLOAT + box * ranks,
        after=reduced.after + share * ranks * 2 * _FLOAT,
    )


# -- encoded collectives
def coding_message(memory: Memory, on_cpu: bool, is_away: bool) -> Message:
    """Describe the coding in a gather of one storage, whose slices are encoded where they rest."""
    wire = memory.wire
    if wire is None:
        return Message()
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
    return Message(
        staging=wire.num_bytes,
        before=0 if is_away else int(encoded),
        after=decoded,
        packing=max(decoding * bool(apart) + halves, 0 if is_away else encoding),
    )


def _encoded_bytes(coding: Coding, size: int) -> float:
    """Return the bytes that are moved to encode one element of ``size`` bytes."""
    casts = size != _FLOAT
    roundings = 0 if coding.format == "fp8" else 2 * _FLOAT
    # read to magnitudes, to their largest, to quotients, rounded, and to codes
    passes = (size + _FLOAT) * casts + 2 * _FLOAT + _FLOAT + 2 * _FLOAT + roundings
    return passes + _FLOAT + GATHER_BITS[coding.format] / 8


def parcelled_message(
    segments: Sequence[tuple[Segment, Sequence[Slice]]], num_ranks: int, on_cpu: bool
) -> Message:
    """Describe an encoded reduction of slices of segments over ``num_ranks``, as rank 0 sees it.

    **Cost** a few microseconds for each slice and rank.
    """
    sizes, own = list[MessageSize](), list[Slice]()
    before, packing, largest = 0.0, 0, 0
    most = ON_CPU_AT_A_TIME if on_cpu else AT_A_TIME
    ranges = [ranges_of(parts) for _, parts in segments]
    for rank in range(num_ranks):
        slices = [
            Slice(lo - part.lo, hi - part.lo, _wire_size(part), part.coding)
            for (segment, parts), inside in zip(segments, ranges, strict=True)
            for number, lo, hi in owned_ranges(segment, inside, rank)
            for part in [parts[number]]
        ]
        own = slices if rank == 0 else own
        sizes.append(size_of(slices))
        largest = max([largest, *(each.hi - each.lo for each in slices if each.codes)])
    parts = [part for _, parts in segments for part in parts]
    for part in parts:
        numel = part.hi - part.lo
        if part.codes is not None:
            before += numel * _encoded_bytes(part.codes, part.size)
            packing = min(largest, most) * _FLOAT * (1 + (part.size != _FLOAT))
        else:
            before += numel * (part.size + _wire_size(part))
    if num_ranks > _RANKS_APART:
        others = zip(*sizes[1:], strict=True)
        sizes = [sizes[0], MessageSize(*(-(-sum(each) // (num_ranks - 1)) for each in others))]
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
    return Message(
        before=int(before),
        after=int(after),
        packing=packing,
        summing=summing,
        parcels=Parcels(tuple(sizes), num_ranks, on_cpu, any(p.coding is not None for p in parts)),
    )


def ranges_of(parts: Sequence[Slice]) -> list[tuple[int, int]]:
    """Return the offset and the number of elements of each part of a segment."""
    return [(part.lo, part.hi - part.lo) for part in parts]


def _wire_size(part: Slice) -> int:
    return part.size if part.coding is None else _BF16
