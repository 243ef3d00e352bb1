"""What one collective of the engine sends, stages and moves, on either transport.

Note [Two transports]
``coalesced`` (NCCL) sends padded shares in place and packs gradients that are not even.
``point_to_point`` (gloo) sends what each rank owns without padding, packs small tensors into one
message per peer, and receives addends beside this rank's own; see `comm.point_to_point`. What this
file says of either is what those two files allocate and count.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.layout.segments import Segment

SMALL_BYTES = 32 << 10  # comm.point_to_point.SMALL_BYTES, which imports torch
BLOCK_NUMEL = 1 << 16  # elements that it sums at a time


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
    """Describe an all-gather of (segment, element size, in place); see Note [Two transports]."""
    payload = sum(s.shard_numel * num_ranks * size for s, size, _ in items)
    if not on_cpu:
        sent = sum(s.shard_numel * size for s, size, _ in items) * (num_ranks - 1)
        return Message(payload, sent, len(items))
    owned = [(s.bounds(0)[1] * size, s, size) for s, size, _ in items]
    small = [i for i in owned if i[1].shard_numel * i[2] <= SMALL_BYTES]
    small = small if len(small) > 1 else []
    return Message(
        payload,
        sum(own for own, _, _ in owned) * (num_ranks - 1),
        (len(owned) - len(small) + bool(small)) * (num_ranks - 1),
        staging=sum(s.numel * size for _, s, size in small),
        before=sum(2 * s.bounds(0)[1] * size for s, size, in_place in items if not in_place)
        + sum(2 * own for own, _, _ in small),
        after=sum(2 * (s.numel * size - own) for own, s, size in small),
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
    sent = num = own = staging = 0
    small = []
    for rank in range(num_ranks):
        lo, hi = segment.bounds(rank)
        count = packed = 0
        for offset, numel in parts:
            num_bytes = (min(offset + numel, hi) - max(offset, lo)) * wire
            if num_bytes <= 0:
                continue
            if rank == 0:
                own += num_bytes
                peers = num_ranks - 1
                if num_bytes > SMALL_BYTES and wire == reduce:
                    peers -= 1  # one addend is received where the mean will be
                staging += peers * num_bytes
                continue
            sent += num_bytes
            if num_bytes <= SMALL_BYTES:
                count, packed = count + 1, packed + num_bytes
            else:
                num += 1
        if rank:
            small.append((count, packed))
    after = own * num_ranks + own // wire * reduce
    payload = sum(n for _, n in parts) * wire
    return Message(payload, sent, num, staging, 0, after, tuple(small))


def packed_message(
    segment: Segment, parts: Sequence[tuple[int, int]], num_ranks: int, wire: int, reduce: int
) -> Message:
    """Describe what one segment adds to a coalesced reduce-scatter."""
    full = segment.shard_numel * num_ranks
    fits = len(parts) == 1 and parts[0][1] == full and wire == reduce
    sent = segment.shard_numel * reduce * (num_ranks - 1)
    covered = sum(n for _, n in parts)
    moved = 0 if fits else covered * (wire + reduce) + (full * reduce if covered < full else 0)
    divided = 2 * segment.shard_numel * reduce
    return Message(full * reduce, sent, 1, 0 if fits else full * reduce, moved, divided)


def replica_message(numel: int, size: int, ranks: int, on_cpu: bool) -> Message:
    """Describe `Comm.all_reduce` of one flat buffer over the replicate axis, rank 0 of it."""
    share = -(-numel // ranks)
    if not on_cpu:
        padded = 0 if share * ranks == numel else share * ranks * size
        sent = 2 * share * size * (ranks - 1)
        return Message(share * ranks * size, sent, 2, share * size + padded, padded, padded)
    own = min(share, numel)
    peers = ranks - 1 if own * size <= SMALL_BYTES else ranks - 2
    sent = (numel - own) * size + own * size * (ranks - 1)
    staging = share * size + peers * own * size
    return Message(numel * size, sent, 2 * (ranks - 1), staging, 0, own * size * (ranks + 2))
