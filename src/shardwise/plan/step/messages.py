"""Messages of the engine's collectives: bytes sent, staged and moved, on either transport.

`comm.shares` decides, for plans and for the transports, which elements each rank sends, which share
a message and which need no memory. With ``on_cpu`` the transport is `comm.point_to_point`, without
it `comm.coalesced`. Encoding and decoding pass over float32, a few elements at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.comm.shares import (
    BLOCK_NUMEL,
    is_small,
    owned_ranges,
    packed_segments,
    receives_into_mean,
    sends_without_packing,
)
from shardwise.layout.memory import StorageMemory
from shardwise.layout.segments import Segment, even_segment
from shardwise.layout.wire import (
    CPU_CHUNK_NUMEL,
    DEVICE_CHUNK_NUMEL,
    SCALE_BYTES,
    MessageSize,
    SentSlice,
    share_numel,
    size_of,
)
from shardwise.precisions import GATHER_BITS, Coding

_FLOAT, _BF16 = 4, 2
_MOST_EXACT_RANKS = 64  # with more, each message counts as their mean


class Parcels(NamedTuple):
    """Sizes of the encoded messages to each of ``num_ranks``, rank 0's first."""

    sizes: tuple[MessageSize, ...]
    num_ranks: int
    on_cpu: bool
    has_codes: bool


class Message(NamedTuple):
    """One collective of a unit, or what a unit adds to the collective of a bucket.

    ``staging`` are buffers that are held until the collective ends. ``before`` are bytes that are
    moved on the device to pack, cast, encode or copy, ``after`` to unpack, decode or sum.
    ``packing`` and ``summing`` are the most memory that this takes beside the buffers.
    ``num_messages`` 0: nothing is sent. ``small`` is (count, bytes) per peer of tensors that share
    a message with other small ones. ``parcels`` are those of a reduction that may be encoded;
    `pack` adds their bytes.
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

    Small tensors for one peer share a message, and so do parcels; `pack` packs them.
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
        by_rank = zip(*(one.sizes for one in parcels), strict=True)
        sizes = tuple(MessageSize(*map(sum, zip(*rank, strict=True))) for rank in by_rank)
        has_codes = any(one.has_codes for one in parcels)
        merged = parcels[0]._replace(sizes=sizes, has_codes=has_codes)
    return Message(
        payload=sum(m.payload for m in messages),
        sent=sum(m.sent for m in messages),
        num_messages=sum(m.num_messages for m in messages),
        staging=sum(m.staging for m in messages),
        before=sum(m.before for m in messages),
        after=sum(m.after for m in messages),
        packing=max((m.packing for m in messages), default=0),
        summing=max((m.summing for m in messages), default=0),
        small=tuple(small),
        parcels=merged,
    )


def pack(message: Message) -> Message:
    """Describe a collective as it is sent, with parcels or small tensors in shared messages.

    A single small tensor is sent without packing.
    """
    if message.parcels is None:
        return message._replace(
            staging=message.staging + sum(size for count, size in message.small if count > 1),
            num_messages=message.num_messages + sum(count > 0 for count, _ in message.small),
            small=(),
        )
    sizes, num_ranks, on_cpu, _ = message.parcels
    local, *others = (size.num_bytes for size in sizes)
    sent = sum(others) * (num_ranks - 1) // max(len(others), 1)
    received = local * (num_ranks - 1)
    return message._replace(
        payload=sent + local,
        sent=sent,
        num_messages=(num_ranks - 1 if on_cpu else 1) if sent else 0,
        staging=message.staging + sent + local + received,
        # Memory for received parcels is allocated after all parcels are encoded.
        packing=max(message.packing - received, 0),
    )


def gather_message(
    items: Sequence[tuple[Segment, int, bool]], num_ranks: int, on_cpu: bool
) -> Message:
    """Describe an all-gather of (segment, element size, in place).

    All ranks send at once, so the rank with the most bytes decides the duration: the payload counts
    as many bytes for every rank. Broadcasts from owners follow one another.
    """
    if not on_cpu:
        sent = sum(s.share_numel(0) * size for s, size, _ in items) * (num_ranks - 1)
        payload = sum(s.full_numel(num_ranks) * size for s, size, _ in items)
        return Message(payload, sent, len(items))
    most = max(sum(s.share_numel(r) * size for s, size, _ in items) for r in range(num_ranks))
    payload = most * num_ranks
    owned = [s.bounds(0)[1] * size for s, size, _ in items]
    small = packed_segments([s.shard_numel * size for s, size, _ in items])
    num_messages = sum(size > 0 for n, size in enumerate(owned) if n not in small)
    filled = sum(items[n][0].numel * items[n][1] for n in small)  # of all ranks
    packed = sum(owned[n] for n in small)
    copied = sum(size for size, item in zip(owned, items, strict=True) if not item[2])
    return Message(
        payload,
        sent=sum(owned) * (num_ranks - 1),
        num_messages=(num_messages + (packed > 0)) * (num_ranks - 1),
        staging=filled,
        before=2 * (copied + packed),
        after=2 * (filled - packed),
    )


def scattered_message(
    segment: Segment, parts: Sequence[tuple[int, int]], num_ranks: int, wire: int, reduce: int
) -> Message:
    """Describe the part of a reduce-scatter by sends and receives that is one segment's."""
    casts = wire != reduce
    sent = num = local = staging = 0
    small = []
    for rank in range(num_ranks):
        sizes = [(hi - lo) * wire for _, lo, hi in owned_ranges(segment, parts, rank)]
        if rank == 0:
            local = sum(sizes)
            staging = sum(
                size
                for peer in range(1, num_ranks)
                for size in sizes
                if not receives_into_mean(size, casts, peer, rank)
            )
            continue
        small_sizes = [size for size in sizes if is_small(size)]
        sent += sum(sizes)
        num += len(sizes) - len(small_sizes)
        small.append((len(small_sizes), sum(small_sizes)))
    return Message(
        payload=sum(n for _, n in parts) * wire,
        sent=sent,
        num_messages=num,
        staging=staging,
        after=local * num_ranks + local // wire * reduce,
        summing=min(segment.share_numel(0), BLOCK_NUMEL) * reduce * casts,
        small=tuple(small),
    )


def packed_message(
    segment: Segment, parts: Sequence[tuple[int, int]], num_ranks: int, wire: int, reduce: int
) -> Message:
    """Describe the part of a coalesced reduce-scatter that is one segment's."""
    if segment.owner is not None:
        return _message_to_owner(segment, num_ranks, wire, reduce)
    full = segment.shard_numel * num_ranks
    numels = [numel for _, numel in parts]
    sent = segment.shard_numel * reduce * (num_ranks - 1)
    divided = 2 * segment.shard_numel * reduce
    if sends_without_packing(numels, full, wire != reduce):
        return Message(full * reduce, sent, num_messages=1, after=divided)
    zeros = full * reduce if sum(numels) < full else 0
    return Message(
        payload=full * reduce,
        sent=sent,
        num_messages=1,
        staging=full * reduce,
        before=sum(numels) * (wire + reduce) + zeros,
        after=divided,
    )


def _message_to_owner(segment: Segment, num_ranks: int, wire: int, reduce: int) -> Message:
    """Describe rank 0's part of a reduction to one rank, which casts its addend into the mean."""
    numel, is_owner = segment.numel, segment.share_numel(0) > 0
    if num_ranks == 1:
        return Message(numel * reduce, after=numel * (wire + reduce))
    if is_owner:
        return Message(
            payload=numel * reduce,
            num_messages=1,
            before=numel * (wire + reduce),
            after=2 * numel * reduce,
        )
    casts = wire != reduce
    return Message(
        payload=numel * reduce,
        sent=numel * reduce,
        num_messages=1,
        staging=numel * reduce if casts else 0,
        before=numel * (wire + reduce) if casts else 0,
    )


def replica_message(
    numel: int, size: int, ranks: int, on_cpu: bool, encoded: Message | None = None
) -> Message:
    """Describe rank 0's part of `Comm.all_reduce` of a flat buffer over the replicate axis.

    It is a reduce-scatter into a share beside the buffer, then an all-gather. If shares must be
    even, both run on a padded copy of the buffer. ``encoded`` is the reduce-scatter, if it is
    encoded.
    """
    segment = even_segment(numel, ranks)
    share = segment.bounds(0)[1] * size
    padded = 0 if on_cpu or segment.shard_numel * ranks == numel else segment.shard_numel * ranks
    describe = scattered_message if on_cpu else packed_message
    reduced = encoded or describe(segment, [(0, padded or numel)], ranks, size, size)
    reduced, gathered = pack(reduced), gather_message([(segment, size, True)], ranks, on_cpu)
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
    """Describe `codes.means.coded_mean` of float32 elements in int8: a reduction, then a gather."""
    share = share_numel(numel, ranks, block)
    coding = Coding("int8", block)
    segment = even_segment(share * ranks, ranks)
    parts = [SentSlice(0, share * ranks, _FLOAT, coding)]
    reduced = pack(parcelled_message([(segment, parts)], ranks, on_cpu))
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
def coding_message(memory: StorageMemory, on_cpu: bool, is_offloaded: bool) -> Message:
    """Describe the encoding and decoding in a gather of one storage.

    Slices are encoded in the memory in which they are kept, so off the device if the unit
    ``is_offloaded``.
    """
    wire = memory.wire
    if wire is None:
        return Message()
    most = CPU_CHUNK_NUMEL if on_cpu else DEVICE_CHUNK_NUMEL
    bits = GATHER_BITS[wire.coding.format]
    numel = memory.layout.full_numel
    casts = memory.master_size != _FLOAT
    encoded = max(memory.local_numel, 1) * _encoded_bytes(wire.coding, memory.master_size)
    size = memory.full_size
    casts_once = on_cpu and size != _FLOAT  # after all is decoded to float32
    decoded = numel * (3 * (_FLOAT if casts_once else size)) + numel * bits // 8
    decoded += numel * (_FLOAT + size) if casts_once else 0
    largest = (min(n, most) * _FLOAT for n in wire.largest_runs(0))
    encoding, decoding = next(largest) * (1 + casts), next(largest)
    halves = decoding // 2 if on_cpu and wire.coding.format == "fp8" else 0
    return Message(
        staging=wire.num_bytes,
        before=0 if is_offloaded else int(encoded),
        after=decoded,
        packing=max(decoding * casts_once + halves, 0 if is_offloaded else encoding),
    )


def _encoded_bytes(coding: Coding, size: int) -> float:
    """Return the bytes that are moved to encode one element of ``size`` bytes."""
    casts = size != _FLOAT
    roundings = 0 if coding.format == "fp8" else 2 * _FLOAT
    # Reads for magnitudes, for their maximum, for quotients, for rounding, and for codes.
    passes = (size + _FLOAT) * casts + 2 * _FLOAT + _FLOAT + 2 * _FLOAT + roundings
    return passes + _FLOAT + GATHER_BITS[coding.format] / 8


def parcelled_message(
    segments: Sequence[tuple[Segment, Sequence[SentSlice]]], num_ranks: int, on_cpu: bool
) -> Message:
    """Describe rank 0's part of an encoded reduction of slices of segments over ``num_ranks``.

    **Cost** a few microseconds for each slice and rank.
    """
    sizes: list[MessageSize] = []
    received: list[SentSlice] = []
    before, packing, largest = 0.0, 0, 0
    most = CPU_CHUNK_NUMEL if on_cpu else DEVICE_CHUNK_NUMEL
    ranges = [ranges_of(parts) for _, parts in segments]
    for rank in range(num_ranks):
        slices = [
            SentSlice(lo - part.lo, hi - part.lo, _wire_size(part), part.coding)
            for (segment, parts), inside in zip(segments, ranges, strict=True)
            for number, lo, hi in owned_ranges(segment, inside, rank)
            for part in [parts[number]]
        ]
        if rank == 0:
            received = slices
        sizes.append(size_of(slices))
        largest = max([largest, *(part.hi - part.lo for part in slices if part.codes)])
    parts = [part for _, parts in segments for part in parts]
    for part in parts:
        numel = part.hi - part.lo
        if part.codes is not None:
            before += numel * _encoded_bytes(part.codes, part.size)
            packing = min(largest, most) * _FLOAT * (1 + (part.size != _FLOAT))
        else:
            before += numel * (part.size + _wire_size(part))
    if num_ranks > _MOST_EXACT_RANKS:
        others = zip(*sizes[1:], strict=True)
        sizes = [sizes[0], MessageSize(*(-(-sum(field) // (num_ranks - 1)) for field in others))]
    after, summing = 0.0, 0
    for part in received:
        numel = part.hi - part.lo
        if part.codes is None:
            casts = on_cpu and num_ranks > 1 and part.size != _FLOAT
            size, held = float(part.size), min(numel, BLOCK_NUMEL) * _FLOAT * casts
        else:
            size = 3 * _FLOAT + GATHER_BITS[part.codes.format] / 8
            halves = _BF16 * (on_cpu and part.codes.format == "fp8")
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


def ranges_of(parts: Sequence[SentSlice]) -> list[tuple[int, int]]:
    """Return the offset and the number of elements of each part of a segment."""
    return [(part.lo, part.hi - part.lo) for part in parts]


def _wire_size(part: SentSlice) -> int:
    return part.size if part.coding is None else _BF16
