"""The footprint of one unit under a candidate: the bytes that its parameters take and send.

Note [The largest rank]
All figures are those of rank 0 of its axes, unless another rank is given. Rank 0 owns the most:
``rows`` cuts as ``torch.chunk`` does and ``flat`` fills the first shares, so no rank holds more.
With ``matrices`` any rank may own the most. In this file that rank and rank 0 swap their numbers.

Note [Parameters without a gradient]
A trained parameter that no backward pass reaches is part of the shards and of the buffers of the
reduction, where it contributes zeros. Its ``p.grad`` stays None, so the norm leaves it out, and the
optimizer makes no state for it. A unit whose parameters are all of this kind is reduced only if it
runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwise.layout.memory import StorageMemory, group_by_dtypes
from shardwise.layout.segments import Segment, balance_costs, build_layout, even_segment
from shardwise.layout.wire import SentSlice, is_coded
from shardwise.outer import BLOCK
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import TapeUnit
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, DtypeName
from shardwise.plan.step.messages import (
    Message,
    coded_mean_message,
    coding_message,
    gather_message,
    merge,
    pack,
    packed_message,
    parcelled_message,
    ranges_of,
    replica_message,
    scattered_message,
)
from shardwise.precisions import PRECISION_DTYPES
from shardwise.stages import STAGES

_FLOAT = DTYPE_BYTES["float32"]
# Shape, dtype, is trained, gets a gradient, owner.
ParamKey = tuple[tuple[int, ...], DtypeName, bool, bool, int | None]


@dataclass(frozen=True)
class ReduceBytes:
    """Bytes of the reduction of a unit.

    ``grads`` are full gradients in the dtype in which they are sent. ``out`` are the buffers of the
    means. ``replicas`` has one all-reduce per buffer, ``means`` one all-gather per storage (stage
    0). ``encoded`` replaces ``message`` in a bucket with encoded gradients; None if reductions are
    not encoded.
    """

    message: Message
    grads: int
    out: int
    replicas: tuple[Message, ...]
    means: tuple[Message, ...]
    encoded: Message | None


def bucket_of(units: Sequence[ReduceBytes]) -> Message:
    """Describe the reduction of a bucket; if one gradient is encoded, all are sent as bytes."""
    encoded = merge([unit.encoded for unit in units if unit.encoded is not None])
    if encoded.parcels is not None and encoded.parcels.has_codes:
        return pack(encoded)
    return pack(merge([unit.message for unit in units]))


class StorageParams(NamedTuple):
    """The parameters of one storage and their memory.

    ``trained`` and ``updated`` have one flag for each parameter. ``reduce`` are the bytes of an
    element of a reduced gradient.
    """

    memory: StorageMemory
    trained: tuple[bool, ...]
    updated: tuple[bool, ...]
    master_name: DtypeName
    reduce: int

    @property
    def updated_numels(self) -> list[int]:
        """Numbers of elements of the parameters that the optimizer updates."""
        params = self.memory.layout.params
        return [p.numel for p, updated in zip(params, self.updated, strict=True) if updated]


class Footprint:
    """The bytes of one unit on one of the ``num_shards`` ranks that share it.

    If the unit ``is_offloaded``, its slices are kept off the device. Of them ``copy_bytes`` stay on
    the device, and reduced gradients take ``means_bytes`` off it. A gather fetches
    ``fetched_bytes``. The first gather after a step fetches ``copied_bytes`` too. Fetches take
    ``fetch_staging`` bytes on the device.
    """

    def __init__(
        self,
        params: tuple[ParamKey, ...],
        candidate: Candidate,
        num_shards: int,
        is_offloaded: bool,
        rank: int,
    ) -> None:
        self._candidate = candidate
        self._num_shards = num_shards
        self._rank = rank
        self._stage = STAGES[candidate.stage]
        self._on_cpu = candidate.transport == "point_to_point"  # so the device is the CPU
        self.is_offloaded = is_offloaded
        keeps_compute_shard = candidate.dtypes.keeps_compute_shard
        optimizer = OPTIMIZERS[candidate.optimizer]
        groups = self._groups(params)
        memories = [g.memory for g in groups]
        trains = [g for g in groups if any(g.trained)]
        # Groups whose full copies a step makes stale, or which are freed after use.
        stale = [g for g in groups if g.memory.frees or any(g.updated)]
        if not self._stage.shards_state or num_shards == 1:
            stale = [g for g in stale if not g.memory.aliased]
        owned = [
            (g.memory.layout.local_shape(n, rank), g.memory.layout.params[n].shape, g)
            for g in trains
            for n, is_updated in enumerate(g.updated)
            if is_updated
        ]
        slices = [(local if self._stage.shards_state else full, g) for local, full, g in owned]
        # A full copy with padding, the master slices, and a shard in the compute dtype.
        self.full_bytes = sum(m.full_bytes for m in memories)
        self.shard_bytes = sum(m.shard_bytes for m in memories)
        self.compute_shard_bytes = sum(
            m.local_numel * m.full_size for m in memories if keeps_compute_shard and m.frees
        )
        # Full copies beside the slices: persistent ones, and those that are freed after use.
        self.kept_bytes = sum(m.additional_bytes for m in memories if not m.frees)
        self.freed_bytes = sum(m.full_bytes for m in memories if m.frees)
        self.padding_bytes = sum(map(_padding, memories)) if self._stage.shards_state else 0
        self.largest_shard = max((m.shard_bytes for m in memories), default=0)  # of one dtype
        # Elements and dtype of each slice that the optimizer steps, and its state.
        self.updated = tuple((prod(shape), g.master_name) for shape, g in slices)
        self.local_numel = sum(numel for numel, _ in self.updated)
        self.state_bytes = sum(optimizer.tensor_bytes(shape, g.master_name) for shape, g in slices)
        # What the rank writes into a checkpoint, at every stage its own slices.
        self.saved_bytes = sum(
            g.memory.layout.shard_numel(rank) * g.memory.master_size for g in groups
        ) + sum(optimizer.tensor_bytes(local, g.master_name) for local, _, g in owned)
        # Gradients as the autograd of a micro-batch writes them. When they are added to the
        # window's sum: (bytes that are added, the most bytes that are added meanwhile).
        grads = [n * g.memory.full_size for g in trains for n in g.updated_numels]
        self.written_grads, self.largest_grad = sum(grads), max(grads, default=0)
        self.sums_in_other_dtype = any(g.memory.full_size != g.reduce for g in trains)
        self.keep_first = self._casting(trains, True) if self.sums_in_other_dtype else (0, 0)
        self.keep_next = self._casting(trains, False) if self.sums_in_other_dtype else (0, 0)
        # None if full copies never get stale; None if nothing is trained.
        self.gather = self._gather([g.memory for g in stale]) if stale else None
        self.reduce = self._reduce(trains, False) if trains else None
        self.reduce_sums = self._reduce(trains, True) if trains else None
        self.outer_bytes, self.outer_staging, self.outer = self._synchronize(trains)
        self.copy_bytes = sum(m.copy_bytes for m in memories)
        self.means_bytes = sum(
            g.memory.local_numel * (g.reduce if keeps_compute_shard else g.memory.master_size)
            for g in trains
        )
        self._count_fetches(stale if is_offloaded else [])

    def _count_fetches(self, offloaded: Sequence[StorageParams]) -> None:
        """Count the bytes of the copies from offloaded slices, whose full copies get stale."""
        keeps_compute_shard = self._candidate.dtypes.keeps_compute_shard
        fetched_bytes = read_bytes = copied_bytes = 0
        for group in offloaded:
            memory = group.memory
            size = memory.full_size if keeps_compute_shard else memory.master_size
            num_bytes = memory.local_numel * size
            if not memory.copy_bytes:
                read_bytes += num_bytes
                fetched_bytes += num_bytes if memory.wire is None else memory.wire.share_bytes
            elif any(group.updated):
                copied_bytes += num_bytes
        self.fetched_bytes = fetched_bytes
        self.read_bytes = read_bytes
        self.copied_bytes = copied_bytes
        self.fetch_staging = 0
        if not keeps_compute_shard:
            self.fetch_staging = max((_fetch_staging(g.memory) for g in offloaded), default=0)
        self.is_mirrored = not any(_is_fetched(g) for g in offloaded)

    def _groups(self, params: tuple[ParamKey, ...]) -> list[StorageParams]:
        """Group parameters by dtypes and by being trained, as `unit.materialize` does."""
        candidate = self._candidate
        dtypes = candidate.dtypes
        keeps_dtypes = PRECISION_DTYPES.get(candidate.precision) == (None, None, None)
        wanted = (None, None) if keeps_dtypes else (dtypes.master, dtypes.compute)
        keys = ((dtype, "float" in dtype, trained) for _, dtype, trained, *_ in params)
        keeps_device_copy = self.is_offloaded and candidate.offload.params == "device"
        groups = []
        for ((master, compute), _), members in group_by_dtypes(params, keys, *wanted).items():
            shapes, owners = [m[0] for m in members], [m[4] for m in members]
            layout = build_layout(candidate.layout, shapes, self._num_shards, owners)
            memory = StorageMemory(
                layout,
                self._stage,
                master_size=DTYPE_BYTES[master],
                full_size=DTYPE_BYTES[compute],
                casts=master != compute,
                is_offloaded=self.is_offloaded,
                keeps_device_copy=keeps_device_copy,
                coding=candidate.coding if "float" in compute else None,
                rank=self._rank,
            )
            trained = tuple(m[2] for m in members)
            updated = tuple(m[2] and m[3] for m in members)
            summed = master if keeps_dtypes else dtypes.reduce
            if candidate.reduce_coding:
                summed = "float32"
            groups.append(StorageParams(memory, trained, updated, master, DTYPE_BYTES[summed]))
        return groups

    def _casting(self, groups: Sequence[StorageParams], first: bool) -> tuple[int, int]:
        """Return the bytes that adding gradients to the window's sums takes: (after it, at most).

        The first gradients are cast one by one. Later ones are added; the CPU casts a copy for it.
        """
        held = most = 0
        for group in groups:
            for numel in group.updated_numels:
                cast = numel * group.reduce
                if first or self._on_cpu:
                    most = max(most, held + cast)
                held += (cast if first else 0) - numel * group.memory.full_size
        return held, most

    def _gather(self, memories: Sequence[StorageMemory]) -> Message:
        """Describe the gather of a unit: casts, copies, encoding, messages."""
        works = [coding_message(memory, self._on_cpu, self.is_offloaded) for memory in memories]
        casts = [m for m in memories if m.casts and not m.copy_bytes and m.wire is None]
        moved = sum(m.local_numel * (m.master_size + m.full_size) for m in casts)
        work = merge([*works, Message(before=moved)])
        if not self._stage.shards_state or self._num_shards == 1:
            return work._replace(before=work.before + work.after, after=0)
        items = [(s, n, m.gathers_in_place) for m in memories for s, n in m.gathered_segments]
        return merge([gather_message(items, self._num_shards, self._on_cpu), work])

    # -- the reduction, as `comm.shares` describes it
    def _reduce(self, groups: Sequence[StorageParams], local_sum: bool) -> ReduceBytes:
        """Describe the reduction of a unit's gradients, or of its sums over micro-batches."""
        num_ranks, sharded = self._num_shards, self._stage.shards_state
        num_replicas = self._candidate.summed_replicas
        is_alone = num_ranks * self._candidate.num_replicas == 1
        messages, replicas, means = [], list[Message](), []
        encoded = list[tuple[Segment, list[SentSlice]]]()
        out = grads = beside = 0
        for group in groups:
            layout, reduce = group.memory.layout, group.reduce
            wire = reduce if local_sum else group.memory.full_size
            out += group.memory.local_numel * reduce
            trained = tuple(index for index, trains in enumerate(group.trained) if trains)
            grads += sum(layout.params[index].numel for index in trained) * wire
            segments = [
                (segment, [self._part(group, index, wire) for index in inside])
                for segment, inside in layout.segments_of(trained)
            ]
            encoded += segments
            messages += [self._plain(segment, parts, wire, reduce) for segment, parts in segments]
            num_counts = 0 if is_alone else len(trained)
            if num_counts and num_ranks > 1:
                counted = even_segment(num_counts * num_ranks, num_ranks)
                parts = [SentSlice(0, counted.numel, reduce, None)]
                encoded.append((counted, parts))
                # With replicas, the sums of the counts are in the buffer of the means.
                has_room = sharded and num_replicas > 1
                more = (counted.numel + (0 if has_room else num_counts)) * reduce
                messages += [self._plain(counted, parts, reduce, reduce), Message(staging=more)]
                beside += more
            if num_replicas > 1:
                replicas += self._over_replicas(group, segments, num_counts)
            if not sharded and segments:
                items = [(s, reduce, True) for s, _ in segments]
                means.append(gather_message(items, num_ranks, self._on_cpu))
        parcelled = None
        if self._candidate.reduce_coding is not None:
            parcelled = parcelled_message(encoded, num_ranks, self._on_cpu)
            parcelled = parcelled._replace(staging=beside)
        return ReduceBytes(merge(messages), grads, out, tuple(replicas), tuple(means), parcelled)

    def _synchronize(self, groups: Sequence[StorageParams]) -> tuple[int, int, tuple[Message, ...]]:
        """Return the bytes of replicas that step locally: state, staging, and their messages.

        The messages are those of one synchronisation. The first goes over the replicate axis; the
        second, at stage 0, to the other shards.
        """
        windows, num_shards = self._candidate.local_steps, self._num_shards
        if windows is None:
            return 0, 0, ()
        spread = self._stage.shards_state
        shapes = [
            g.memory.layout.local_shape(n, self._rank)
            if spread
            else g.memory.layout.params[n].shape
            for g in groups
            for n, trains in enumerate(g.trained)
            if trains
        ]
        numel = sum(map(prod, shapes))
        values, outer = numel * _FLOAT, windows.outer
        share = numel if spread else even_segment(numel, num_shards).shard_numel
        ranks = self._candidate.num_replicas
        if outer is not None and outer.send == "int8":
            message = coded_mean_message(share, ranks, BLOCK, self._on_cpu)
        else:
            message = replica_message(share, _FLOAT, ranks, self._on_cpu)
        messages = [message] if numel else []
        if not spread and num_shards > 1 and numel:
            segment = even_segment(share * num_shards, num_shards)
            messages.append(gather_message([(segment, _FLOAT, True)], num_shards, self._on_cpu))
        momentum = values if outer is not None and outer.momentum else 0
        staging = values + max([momentum, *(message.staging for message in messages)])
        return windows.state_bytes(numel), staging, tuple(messages)

    def _part(self, group: StorageParams, index: int, size: int) -> SentSlice:
        """Describe one parameter's gradient in its segment, of elements of ``size`` bytes."""
        placed = group.memory.layout.params[index]
        coding = self._candidate.reduce_coding if is_coded(placed.shape) else None
        return SentSlice(placed.offset, placed.offset + placed.numel, size, coding)

    def _plain(
        self, segment: Segment, parts: Sequence[SentSlice], wire: int, reduce: int
    ) -> Message:
        """Describe the part of a reduce-scatter without encoding that is one segment's."""
        if self._num_shards == 1:
            return Message(after=sum(part.hi - part.lo for part in parts) * (wire + reduce))
        describe = scattered_message if self._on_cpu else packed_message
        return describe(segment, ranges_of(parts), self._num_shards, wire, reduce)

    def _over_replicas(
        self,
        group: StorageParams,
        segments: Sequence[tuple[Segment, Sequence[SentSlice]]],
        num_counts: int,
    ) -> list[Message]:
        """Describe the all-reduce of each buffer: all slices, or at stage 0 those of a segment."""
        layout, coding = group.memory.layout, self._candidate.reduce_coding
        trained = {index for index, trains in enumerate(group.trained) if trains}
        coded = {i for i in trained if coding and is_coded(layout.params[i].shape)}
        pieces = {i: layout.piece(i, self._rank) for i in coded}
        if self._stage.shards_state:
            buffers = [(layout.shard_numel(self._rank) + num_counts, 0, set(coded))]
        else:
            buffers = [
                (s.bounds(0)[1], s.shard_offset, coded & set(inside))
                for s, inside in layout.segments_of(tuple(sorted(trained)))
            ]
            buffers.append((num_counts, 0, set()))
        messages = []
        ranks, on_cpu = self._candidate.num_replicas, self._on_cpu
        for numel, first, inside in buffers:
            ranges = sorted((pieces[i].shard_offset - first, pieces[i].numel) for i in inside)
            parts, at = list[SentSlice](), 0
            for begin, length in (*(item for item in ranges if item[1] > 0), (numel, 0)):
                end = begin + length
                parts += [SentSlice(at, begin, group.reduce, None)] if begin > at else []
                parts += [SentSlice(begin, end, group.reduce, coding)] if length else []
                at = end
            encoded = None
            if any(part.coding is not None for part in parts):
                encoded = parcelled_message([(even_segment(numel, ranks), parts)], ranks, on_cpu)
            messages.append(replica_message(numel, group.reduce, ranks, on_cpu, encoded))
        return messages


def _is_fetched(group: StorageParams) -> bool:
    """True if a gather fetches offloaded slices; a step on the device leaves a copy there."""
    memory = group.memory
    return bool(memory.frees or memory.needs_gather or memory.wire)


_footprint = lru_cache(maxsize=1024)(Footprint)


def footprints_of(
    units: Sequence[TapeUnit], candidate: Candidate, rank: int | None = None
) -> list[Footprint]:
    """Return the footprint of each unit; the candidate sets how many of the last are offloaded.

    ``rank`` None: the one that has the most; see Note [The largest rank].

    **Cost** 0.1 ms for a dozen parameters; equal units are computed once.
    """
    stay = candidate.offload.num_staying([unit.numel for unit in units])
    state_key = candidate.state_key
    weights = []
    for number, (unit, owners) in enumerate(
        zip(units, _owners_in(units, candidate, rank), strict=True)
    ):
        params = tuple(
            (p.shape, p.dtype, p.requires_grad, p.gets_grad, owner)
            for p, owner in zip(unit.params, owners, strict=True)
        )
        num_shards = int(candidate.num_shards * (unit.experts_over or 1))
        weights.append(_footprint(params, state_key, num_shards, number >= stay, rank or 0))
    return weights


def _fetch_staging(memory: StorageMemory) -> int:
    """Return the bytes on the device for casting fetched slices: one piece and the next one."""
    if not memory.casts or memory.wire is not None:
        return 0
    pieces = [segment.share_numel(memory.rank) for segment in memory.layout.segments]
    if memory.copy_bytes or not memory.stage.shards_state:
        pieces = [memory.local_numel]
    return max(map(sum, zip(pieces, [*pieces[1:], 0], strict=True)), default=0) * memory.master_size


def _padding(memory: StorageMemory) -> int:
    """Return the bytes of padding in a rank's slices, on average and rounded up."""
    layout = memory.layout
    padding = sum(layout.shard_numels) - layout.numel
    return -(-padding // layout.num_ranks) * memory.master_size


def _owners_in(
    units: Sequence[TapeUnit], candidate: Candidate, rank: int | None
) -> list[list[int | None]]:
    """Return the owner of each parameter, as `layout.placements` has it.

    With ``rank`` None, the rank that owns the most is numbered 0. Pieces of tensors and experts,
    which have other axes, have no owner.
    """
    owners_of: list[list[int | None]] = [[None] * len(unit.params) for unit in units]
    if candidate.layout != "matrices" or candidate.tp > 1:
        return owners_of
    places = [
        (number, place)
        for number, unit in enumerate(units)
        for place, p in enumerate(unit.params)
        if unit.experts_over is None and len(p.shape) == 2 and p.requires_grad
    ]
    numels = [prod(units[number].params[place].shape) for number, place in places]
    owners = balance_costs(numels, candidate.num_shards)
    loads = [0] * candidate.num_shards
    for owner, numel in zip(owners, numels, strict=True):
        loads[owner] += numel
    most = loads.index(max(loads)) if rank is None else 0
    swapped = {0: most, most: 0}
    for (number, place), owner in zip(places, owners, strict=True):
        owners_of[number][place] = swapped.get(owner, owner)
    return owners_of
