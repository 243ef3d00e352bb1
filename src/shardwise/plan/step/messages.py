"""What one collective of the engine sends, stages and moves, on either transport.

Which elements go to whom, what travels together and what needs no memory is asked of `comm.shares`,
as the transports ask it. ``on_cpu`` means sends and receives, see `comm.point_to_point`; elsewhere
it is `comm.coalesced`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.comm.shares import (
    gathered_together,
    goes_as_it_lies,
    is_small,
    lands_in_mean,
    owned_ranges,
)
from shardwise.layout.segments import Segment, even_segment


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
