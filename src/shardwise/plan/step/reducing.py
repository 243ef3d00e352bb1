"""What reducing the gradients of a unit sends and takes, as `unit.rank_order` does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.comm.shares import BLOCK_NUMEL
from shardwise.layout.segments import Segment, even_segment
from shardwise.layout.wire import is_coded
from shardwise.plan.step.coding import Parcels, ReducedPart, merge_parcels, parcels_of
from shardwise.plan.step.groups import Group, Setting
from shardwise.plan.step.messages import (
    Message,
    gather_message,
    merge,
    packed_message,
    replica_message,
    scattered_message,
    whole,
)


@dataclass(frozen=True)
class Reduce:
    """What reducing a unit takes. ``grads`` are bytes of full gradients on the wire.

    ``out`` are the buffers of the means; ``temporary`` are bytes that the sums allocate in between.
    ``replicas`` has one all-reduce per buffer, ``means`` one all-gather per storage (stage 0).
    ``parcels`` stand in for ``message`` and ``temporary`` in a bucket with encoded gradients; None
    where reductions are not encoded.
    """

    message: Message
    grads: int
    out: int
    temporary: int
    replicas: tuple[Message, ...]
    means: tuple[Message, ...]
    parcels: Parcels | None


class Bucket(NamedTuple):
    """One collective for several units: ``packing`` and ``summing`` are bytes held meanwhile."""

    message: Message
    is_encoded: bool
    packing: int
    summing: int


def bucket_of(units: Sequence[Reduce]) -> Bucket:
    """Describe the collective that units share: all travel as bytes if any gradient is encoded."""
    parcels = merge_parcels([unit.parcels for unit in units if unit.parcels is not None])
    if parcels is not None and parcels.has_codes:
        # What arrives has memory only when all is encoded.
        packing = max(parcels.packing - parcels.received, 0)
        return Bucket(parcels.message, True, packing, parcels.summing)
    temporary = max(unit.temporary for unit in units)
    return Bucket(whole([unit.message for unit in units]), False, 0, temporary)


def reduce_of(groups: Sequence[Group], setting: Setting, local_sum: bool) -> Reduce:
    """Describe the reduction of a unit's gradients, or of its sums over micro-batches."""
    num_ranks, sharded = setting.num_shards, setting.stage.shards_state
    messages, replicas, means = [], list[Message](), []
    encoded = list[tuple[Segment, list[ReducedPart]]]()
    out = grads = temporary = beside = 0
    for group in groups:
        layout, reduce = group.memory.layout, group.reduce
        wire = reduce if local_sum else group.memory.full_size
        out += group.memory.own_numel * reduce
        trained = [index for index, trains in enumerate(group.trained) if trains]
        grads += sum(layout.params[index].numel for index in trained) * wire
        segments = [
            (segment, [_part(group, index, wire, setting) for index in inside])
            for segment, inside in layout.segments_of(trained)
        ]
        encoded += segments
        for segment, parts in segments:
            messages.append(_plain(segment, parts, wire, reduce, setting))
            if num_ranks > 1 and setting.on_cpu and wire != reduce:
                temporary = max(temporary, min(segment.share_numel(0), BLOCK_NUMEL) * reduce)
        num_counts = len(trained) if num_ranks * setting.num_replicas > 1 else 0
        if num_counts and num_ranks > 1:
            counted = even_segment(num_counts * num_ranks, num_ranks)
            parts = [ReducedPart(0, counted.numel, reduce, None)]
            encoded.append((counted, parts))
            behind = sharded and setting.num_replicas > 1  # the sums lie behind the means
            more = (counted.numel + (0 if behind else num_counts)) * reduce
            messages += [_plain(counted, parts, reduce, reduce, setting), Message(staging=more)]
            beside += more
        if setting.num_replicas > 1:
            replicas += _over_replicas(group, segments, num_counts, setting)
        if not sharded and segments:
            items = [(s, reduce, True) for s, _ in segments]
            means.append(gather_message(items, num_ranks, setting.on_cpu))
    parcels = None
    if setting.reduce_coding is not None:
        parcels = parcels_of(encoded, num_ranks, setting.on_cpu)._replace(beside=beside)
    plain = merge(messages)
    return Reduce(plain, grads, out, temporary, tuple(replicas), tuple(means), parcels)


def _part(group: Group, index: int, size: int, setting: Setting) -> ReducedPart:
    """Describe one parameter's gradient in its segment, of elements of ``size`` bytes."""
    placed = group.memory.layout.params[index]
    coding = setting.reduce_coding if is_coded(placed.shape) else None
    return ReducedPart(placed.offset, placed.numel, size, coding)


def _plain(
    segment: Segment, parts: Sequence[ReducedPart], wire: int, reduce: int, setting: Setting
) -> Message:
    """Describe what one segment adds to a reduce-scatter of numbers."""
    if setting.num_shards == 1:
        return Message(after=sum(part.numel for part in parts) * (wire + reduce))
    places = [(part.offset, part.numel) for part in parts]
    describe = scattered_message if setting.on_cpu else packed_message
    return describe(segment, places, setting.num_shards, wire, reduce)


def _over_replicas(
    group: Group,
    segments: Sequence[tuple[Segment, Sequence[ReducedPart]]],
    num_counts: int,
    setting: Setting,
) -> list[Message]:
    """Describe the all-reduce of each buffer: all slices, or at stage 0 those of a segment."""
    layout, coding = group.memory.layout, setting.reduce_coding
    trained = {index for index, trains in enumerate(group.trained) if trains}
    coded = {i for i in trained if coding and is_coded(layout.params[i].shape)}
    pieces = {i: layout.piece(i, setting.rank) for i in coded}
    if setting.stage.shards_state:
        buffers = [(layout.shard_numel(setting.rank) + num_counts, 0, set(coded))]
    else:
        buffers = [
            (s.bounds(0)[1], s.shard_offset, coded & set(inside))
            for s, inside in layout.segments_of(sorted(trained))
        ]
        buffers.append((num_counts, 0, set()))
    found = []
    for numel, first, inside in buffers:
        ranges = sorted((pieces[i].shard_offset - first, pieces[i].numel) for i in inside)
        parts, at = list[ReducedPart](), 0
        for begin, length in (*(each for each in ranges if each[1]), (numel, 0)):
            parts += [ReducedPart(at, begin - at, group.reduce, None)] if begin > at else []
            parts += [ReducedPart(begin, length, group.reduce, coding)] if length else []
            at = begin + length
        ranks, on_cpu = setting.num_replicas, setting.on_cpu
        encoded = parcels_of([(even_segment(numel, ranks), parts)], ranks, on_cpu)
        message = encoded.message if encoded.has_codes else None
        if message is not None:
            meanwhile = max(encoded.summing, encoded.packing - encoded.received)
            message = message._replace(staging=message.staging + meanwhile)
        found.append(replica_message(numel, group.reduce, ranks, on_cpu, message))
    return found
