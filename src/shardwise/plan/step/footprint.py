"""Bytes that one unit's parameters take and send under a candidate, as the engine lays them out.

Note [The largest rank]
Everything is that of rank 0 of its axes, unless another one is asked for. Rank 0 owns the most:
``rows`` cuts as ``torch.chunk`` does and ``flat`` fills the first shares, so no rank holds more.
With ``matrices`` that is whichever rank the owners are dealt most to; it is called 0 here, and rank
0 goes by its number.

Note [Parameters without a gradient]
A trained parameter that no backward pass reaches has its place in the shards and in the buffers of
the reduction, where it contributes zeros. Its ``p.grad`` stays None, so the norm leaves it out, and
the optimizer makes no state for it. A unit with none but such is not reduced unless it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from shardwise.comm.shares import BLOCK_NUMEL
from shardwise.layout.memory import Memory, group_by_dtypes
from shardwise.layout.segments import Segment, balanced, build_layout, even_segment
from shardwise.layout.wire import is_coded
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import TapeUnit
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, DtypeName, row_of
from shardwise.plan.step.messages import (
    CodingWork,
    Message,
    Parcels,
    ReducedPart,
    coding_work,
    gather_message,
    merge,
    merge_parcels,
    packed_message,
    parcels_of,
    replica_message,
    scattered_message,
    whole,
)
from shardwise.precisions import PRECISION_DTYPES, Coding
from shardwise.stages import STAGES, Stage

# Shape, dtype, whether it is trained, whether it gets a gradient, owner.
ParamKey = tuple[tuple[int, ...], DtypeName, bool, bool, int | None]


@dataclass(frozen=True)
class Reduce:
    """Bytes of the reduction of a unit. ``grads`` are bytes of full gradients on the wire.

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
        # Arriving parcels have memory only after all parcels are encoded.
        packing = max(parcels.packing - parcels.received, 0)
        return Bucket(parcels.message, True, packing, parcels.summing)
    temporary = max(unit.temporary for unit in units)
    return Bucket(whole([unit.message for unit in units]), False, 0, temporary)


@dataclass(frozen=True)
class Setting:
    """The settings of a candidate that decide the bytes of a unit."""

    stage: Stage
    num_shards: int
    num_replicas: int
    precision: str
    layout: Literal["rows", "flat", "matrices"]
    on_cpu: bool  # the transport is point to point, and so the device is the CPU
    optimizer: str
    rank: int
    stays: bool  # where the slices rest elsewhere, a copy of them stays on the device
    is_away: bool = False
    coding: Coding | None = None  # how gathers are encoded
    reduce_coding: Coding | None = None


class Group(NamedTuple):
    """The parameters of one storage: which of them are trained and updated, and their memory."""

    memory: Memory
    trained: tuple[bool, ...]
    updated: tuple[bool, ...]
    master_name: DtypeName
    reduce: int

    @property
    def updated_numels(self) -> list[int]:
        """Elements of each parameter that the optimizer updates."""
        params = self.memory.layout.params
        return [p.numel for p, updated in zip(params, self.updated, strict=True) if updated]


def groups_of(params: tuple[ParamKey, ...], setting: Setting) -> list[Group]:
    """Group parameters by dtypes, frozen ones apart, as `unit.materialize` does."""
    row = PRECISIONS[setting.precision]
    own = PRECISION_DTYPES.get(setting.precision) == (None, None, None)
    wanted = (None, None) if own else (row.master, row.compute)
    keys = ((dtype, "float" in dtype, trained) for _, dtype, trained, *_ in params)
    groups = []
    for ((master, compute), _), members in group_by_dtypes(params, keys, *wanted).items():
        owners = [m[4] for m in members]
        layout = build_layout(setting.layout, [m[0] for m in members], setting.num_shards, owners)
        sizes = DTYPE_BYTES[master], DTYPE_BYTES[compute]
        place = setting.is_away, setting.is_away and setting.stays
        whose = setting.coding if "float" in compute else None, setting.rank
        memory = Memory(layout, setting.stage, *sizes, master != compute, *place, *whose)
        trained = tuple(m[2] for m in members)
        updated = tuple(m[2] and m[3] for m in members)
        summed = "float32" if setting.reduce_coding else master if own else row.reduce
        groups.append(Group(memory, trained, updated, master, DTYPE_BYTES[summed]))
    return groups


@dataclass(frozen=True)
class Footprint:
    """The bytes of one unit.

    ``full_bytes`` are a full copy with padding, ``shard_bytes`` the master slices, and
    ``compute_shard_bytes`` a second shard in the computing dtype, which other systems keep.
    ``kept_bytes`` are full copies beyond the slices that never go, ``freed_bytes`` those that come
    and go. ``gather`` is None if the full copy always holds present values. ``sums_apart``: sums
    over micro-batches have another dtype than gradients; ``keep_first`` and ``keep_next`` are then
    (bytes held more afterwards, most bytes held more meanwhile) when gradients join such a sum.
    ``keeps_buffer``: the memory of the means is used again in the next step.
    ``written_grads`` are bytes of gradients as a micro-batch's autograd writes them.
    ``largest_shard`` are the slices of one dtype. ``is_away``: they rest elsewhere. Then
    ``copy_bytes`` are what stays of them on the device, ``means_bytes`` what reduced gradients take
    beside them; a gather fetches ``fetched_bytes``, the first one after a step ``copied_bytes`` as
    well, through ``fetch_staging`` on the device; ``is_mirrored``: a step on the device leaves
    nothing to fetch. ``coding_bytes`` are held while an encoded gather is encoded or decoded.
    ``updated`` are the elements and the dtype of each slice that the optimizer steps.
    ``num_updated`` of the ``num_trained`` parameters get a gradient, and so what the optimizer
    holds and steps, ``local_numel`` and the like, is theirs; ``padding_bytes`` are what a rank's
    slices hold beyond their part of the parameters, on average over the ranks.
    """

    num_trained: int
    num_updated: int
    full_bytes: int
    shard_bytes: int
    compute_shard_bytes: int
    kept_bytes: int
    freed_bytes: int
    padding_bytes: int
    state_bytes: int
    largest_local: int
    local_numel: int
    written_grads: int
    largest_grad: int
    gather: Message | None
    reduce: Reduce | None
    reduce_sums: Reduce | None
    sums_apart: bool
    keeps_buffer: bool
    keep_first: tuple[int, int]
    keep_next: tuple[int, int]
    is_away: bool
    largest_shard: int
    copy_bytes: int
    means_bytes: int
    fetched_bytes: int
    read_bytes: int
    copied_bytes: int
    fetch_staging: int
    coding_bytes: int
    is_mirrored: bool
    updated: tuple[tuple[int, DtypeName], ...]


def weigh(
    units: Sequence[TapeUnit], candidate: Candidate, rank: int | None = None
) -> list[Footprint]:
    """Weigh all units of a model; the candidate says how many, from the last, are offloaded.

    ``rank`` None: the one that has the most; see Note [The largest rank].
    """
    setting = Setting(
        STAGES[candidate.stage],
        candidate.num_shards,
        candidate.num_replicas,
        candidate.precision,
        candidate.layout,
        candidate.transport == "point_to_point",
        candidate.optimizer,
        rank or 0,
        candidate.offload.params == "device",
        coding=candidate.coding,
        reduce_coding=candidate.reduce_coding,
    )
    numels = [sum(prod(p.shape) for p in unit.params) for unit in units]
    stay = candidate.offload.num_staying(numels)
    owners = _owners_in(units, candidate, rank)
    return [
        _weigh_unit(unit, of_unit, replace(setting, is_away=number >= stay))
        for number, (unit, of_unit) in enumerate(zip(units, owners, strict=True))
    ]


def _weigh_unit(unit: TapeUnit, owners: Sequence[int | None], setting: Setting) -> Footprint:
    """Weigh one unit; equal units are weighed once. **Cost** 0.1 ms for a dozen parameters."""
    facts = ((p.shape, p.dtype, p.requires_grad, p.gets_grad) for p in unit.params)
    key = tuple((*fact, owner) for fact, owner in zip(facts, owners, strict=True))
    if unit.experts_over is not None:
        setting = replace(setting, num_shards=int(setting.num_shards * unit.experts_over))
    return _footprint(key, setting)


@cache
def _footprint(params: tuple[ParamKey, ...], setting: Setting) -> Footprint:
    groups = groups_of(params, setting)
    exchanges = setting.stage.shards_state and setting.num_shards > 1
    memories = [g.memory for g in groups]
    stale = [g for g in groups if g.memory.frees or any(g.updated)]
    stale = [g for g in stale if exchanges or not g.memory.aliased]
    works = [coding_work(g.memory, setting.on_cpu, setting.is_away) for g in stale]
    trains = [g for g in groups if any(g.trained)]
    locals_ = [(g, shape) for g in trains for shape in _local_shapes(g, setting.rank)]
    numels = [prod(shape) for _, shape in locals_]
    grads = [n * g.memory.full_size for g in trains for n in g.updated_numels]
    table = row_of(OPTIMIZERS, setting.optimizer, "optimizer")
    sums_apart = any(g.memory.full_size != g.reduce for g in trains)
    keeps_compute_shard = PRECISIONS[setting.precision].keeps_compute_shard
    away = stale if setting.is_away else []
    sizes = [(g, g.memory.full_size if keeps_compute_shard else g.memory.master_size) for g in away]
    return Footprint(
        num_trained=sum(p[2] for p in params),
        num_updated=sum(p[2] and p[3] for p in params),
        full_bytes=sum(m.full_bytes for m in memories),
        shard_bytes=sum(m.shard_bytes for m in memories),
        compute_shard_bytes=sum(
            m.own_numel * m.full_size for m in memories if keeps_compute_shard and m.frees
        ),
        kept_bytes=sum(m.beside_bytes for m in memories if not m.frees),
        freed_bytes=sum(m.full_bytes for m in memories if m.frees),
        padding_bytes=sum(map(_padding, memories)) if setting.stage.shards_state else 0,
        state_bytes=sum(table.tensor_bytes(s, g.master_name) for g, s in locals_),
        largest_local=max(
            (n * g.memory.master_size for n, (g, _) in zip(numels, locals_, strict=True)), default=0
        ),
        local_numel=sum(numels),
        written_grads=sum(grads),
        largest_grad=max(grads, default=0),
        gather=_gather(stale, works, setting) if stale else None,
        reduce=reduce_of(trains, setting, False) if trains else None,
        reduce_sums=reduce_of(trains, setting, True) if trains else None,
        sums_apart=sums_apart,
        keeps_buffer=setting.on_cpu and not setting.stage.frees_after_backward,
        keep_first=_casting(trains, True, setting.on_cpu) if sums_apart else (0, 0),
        keep_next=_casting(trains, False, setting.on_cpu) if sums_apart else (0, 0),
        is_away=setting.is_away,
        largest_shard=max((m.shard_bytes for m in memories), default=0),
        copy_bytes=sum(m.copy_bytes for m in memories),
        means_bytes=sum(
            g.memory.own_numel * (g.reduce if keeps_compute_shard else g.memory.master_size)
            for g in trains
        ),
        fetched_bytes=sum(_fetched(g.memory, n) for g, n in sizes if not g.memory.copy_bytes),
        read_bytes=sum(g.memory.own_numel * n for g, n in sizes if not g.memory.copy_bytes),
        copied_bytes=sum(
            g.memory.own_numel * n for g, n in sizes if g.memory.copy_bytes and any(g.updated)
        ),
        fetch_staging=0 if keeps_compute_shard else max(map(_fetch_staging, away), default=0),
        coding_bytes=max((work.working for work in works), default=0),
        is_mirrored=not any(g.memory.frees or g.memory.needs_gather or g.memory.wire for g in away),
        updated=tuple((n, g.master_name) for n, (g, _) in zip(numels, locals_, strict=True)),
    )


def _fetched(memory: Memory, size: int) -> int:
    """Return what a fetch brings: slices of elements of ``size`` bytes, or their encoded share."""
    return memory.own_numel * size if memory.wire is None else memory.wire.share_bytes


def _fetch_staging(group: Group) -> int:
    """Return what a fetch takes on the device to be cast there: one piece, and the next one."""
    memory = group.memory
    if not memory.casts or memory.wire is not None:
        return 0
    pieces = [segment.share_numel(memory.rank) for segment in memory.layout.segments]
    if memory.copy_bytes or not memory.stage.shards_state:
        pieces = [memory.own_numel]
    return max(map(sum, zip(pieces, [*pieces[1:], 0], strict=True)), default=0) * memory.master_size


def _padding(memory: Memory) -> int:
    """Return the bytes of padding in a rank's slices, on average and rounded up."""
    layout = memory.layout
    padding = sum(layout.shard_numels) - layout.numel
    return -(-padding // layout.num_ranks) * memory.master_size


def _local_shapes(group: Group, rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of a rank's slices of the parameters that the optimizer updates."""
    layout, sharded = group.memory.layout, group.memory.stage.shards_state
    return [
        layout.local_shape(index, rank) if sharded else layout.params[index].shape
        for index, updated in enumerate(group.updated)
        if updated
    ]


def _casting(groups: Sequence[Group], first: bool, on_cpu: bool) -> tuple[int, int]:
    """Return (bytes held more, at most meanwhile) when gradients join the window's sums.

    The first are cast one by one; later ones are added, for which the CPU casts a copy.
    """
    held = most = 0
    for group in groups:
        for numel in group.updated_numels:
            cast = numel * group.reduce
            if first or on_cpu:
                most = max(most, held + cast)
            held += (cast if first else 0) - numel * group.memory.full_size
    return held, most


def _gather(groups: Sequence[Group], works: Sequence[CodingWork], setting: Setting) -> Message:
    """Describe the gather of a unit: casts, copies, messages; encoding, where it is."""
    memories = [group.memory for group in groups]
    casts = [m for m in memories if m.casts and not m.copy_bytes and m.wire is None]
    before = sum(m.own_numel * (m.master_size + m.full_size) for m in casts)
    before += sum(work.before for work in works)
    after, staging = sum(work.after for work in works), sum(work.staging for work in works)
    if not setting.stage.shards_state or setting.num_shards == 1:
        return Message(before=before + after, staging=staging)
    items = [(s, n, m.gathers_in_place) for m in memories for s, n in m.gathered_segments]
    message = gather_message(items, setting.num_shards, setting.on_cpu)
    return merge([message, Message(before=before, after=after, staging=staging)])


def _owners_in(
    units: Sequence[TapeUnit], candidate: Candidate, rank: int | None
) -> list[list[int | None]]:
    """Return who owns each parameter, as `layout.placements` has it; the rank with most may be 0.

    Pieces of tensors have no owner; nor have experts, which have other axes.
    """
    found: list[list[int | None]] = [[None] * len(unit.params) for unit in units]
    if candidate.layout != "matrices" or candidate.tp > 1:
        return found
    places = [
        (number, place)
        for number, unit in enumerate(units)
        for place, p in enumerate(unit.params)
        if unit.experts_over is None and len(p.shape) == 2 and p.requires_grad
    ]
    numels = [prod(units[number].params[place].shape) for number, place in places]
    owners = balanced(numels, candidate.num_shards)
    loads = [0] * candidate.num_shards
    for owner, numel in zip(owners, numels, strict=True):
        loads[owner] += numel
    most = loads.index(max(loads)) if rank is None else 0
    swapped = {0: most, most: 0}
    for (number, place), owner in zip(places, owners, strict=True):
        found[number][place] = swapped.get(owner, owner)
    return found


# -- the reduction of a unit, as `unit.rank_order` does it
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
