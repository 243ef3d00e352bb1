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
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwise.layout.memory import Memory, group_by_dtypes
from shardwise.layout.segments import Segment, balanced, build_layout, even_segment
from shardwise.layout.wire import Slice, is_coded
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
    packed_message,
    parcelled_message,
    ranges_of,
    replica_message,
    scattered_message,
    whole,
)
from shardwise.precisions import PRECISION_DTYPES
from shardwise.stages import STAGES

_FLOAT = DTYPE_BYTES["float32"]
# Shape, dtype, whether it is trained, whether it gets a gradient, owner.
ParamKey = tuple[tuple[int, ...], DtypeName, bool, bool, int | None]


@dataclass(frozen=True)
class Reduce:
    """Bytes of the reduction of a unit. ``grads`` are bytes of full gradients on the wire.

    ``out`` are the buffers of the means. ``replicas`` has one all-reduce per buffer, ``means`` one
    all-gather per storage (stage 0). ``encoded`` stands in for ``message`` in a bucket with encoded
    gradients; None where reductions are not encoded.
    """

    message: Message
    grads: int
    out: int
    replicas: tuple[Message, ...]
    means: tuple[Message, ...]
    encoded: Message | None


def bucket_of(units: Sequence[Reduce]) -> Message:
    """Describe the collective that units share: all travel as bytes if any gradient is encoded."""
    encoded = merge([unit.encoded for unit in units if unit.encoded is not None])
    if encoded.parcels is not None and encoded.parcels.has_codes:
        return whole(encoded)
    return whole(merge([unit.message for unit in units]))


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


class Footprint:
    """The bytes of one unit on a rank of its shards, which are ``num_shards``.

    ``is_away``: its slices rest elsewhere. Then ``copy_bytes`` stay of them on the device, and
    ``means_bytes`` are what reduced gradients take beside them. A gather fetches ``fetched_bytes``,
    the first one after a step ``copied_bytes`` as well, through ``fetch_staging`` on the device.
    """

    def __init__(
        self,
        params: tuple[ParamKey, ...],
        candidate: Candidate,
        num_shards: int,
        is_away: bool,
        rank: int,
    ) -> None:
        self._candidate, self._num_shards, self._rank = candidate, num_shards, rank
        self._stage = STAGES[candidate.stage]
        self._on_cpu = candidate.transport == "point_to_point"  # so the device is the CPU
        self.is_away = is_away
        papers = candidate.dtypes.keeps_compute_shard
        optimizer = OPTIMIZERS[candidate.optimizer]
        groups = self._groups(params)
        memories = [g.memory for g in groups]
        trains = [g for g in groups if any(g.trained)]
        # Full copies that a step, or their freeing, makes stale.
        stale = [g for g in groups if g.memory.frees or any(g.updated)]
        if not self._stage.shards_state or num_shards == 1:
            stale = [g for g in stale if not g.memory.aliased]
        away = stale if is_away else []
        sizes = {id(g): g.memory.full_size if papers else g.memory.master_size for g in groups}
        owned = [
            (g.memory.layout.local_shape(n, rank), g.memory.layout.params[n].shape, g)
            for g in trains
            for n, is_updated in enumerate(g.updated)
            if is_updated
        ]
        slices = [(own if self._stage.shards_state else full, g) for own, full, g in owned]
        # A full copy with padding, the master slices, a shard in the computing dtype beside them.
        self.full_bytes = sum(m.full_bytes for m in memories)
        self.shard_bytes = sum(m.shard_bytes for m in memories)
        self.compute_shard_bytes = sum(
            m.own_numel * m.full_size for m in memories if papers and m.frees
        )
        # Full copies beyond the slices: those that never go, and those that come and go.
        self.kept_bytes = sum(m.beside_bytes for m in memories if not m.frees)
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
        ) + sum(optimizer.tensor_bytes(own, g.master_name) for own, _, g in owned)
        # Gradients as a micro-batch's autograd writes them, and when they join the window's sum:
        # (bytes held more afterwards, most bytes held more meanwhile).
        grads = [n * g.memory.full_size for g in trains for n in g.updated_numels]
        self.written_grads, self.largest_grad = sum(grads), max(grads, default=0)
        self.sums_apart = any(g.memory.full_size != g.reduce for g in trains)  # of another dtype
        self.keep_first = self._casting(trains, True) if self.sums_apart else (0, 0)
        self.keep_next = self._casting(trains, False) if self.sums_apart else (0, 0)
        # None: the full copy always holds present values; nothing is trained.
        self.gather = self._gather([g.memory for g in stale]) if stale else None
        self.reduce = self._reduce(trains, False) if trains else None
        self.reduce_sums = self._reduce(trains, True) if trains else None
        self.outer_bytes, self.outer_staging, self.outer = self._synchronize(trains)
        self.copy_bytes = sum(m.copy_bytes for m in memories)
        self.means_bytes = sum(
            g.memory.own_numel * (g.reduce if papers else g.memory.master_size) for g in trains
        )
        fetched = [(g.memory, sizes[id(g)]) for g in away if not g.memory.copy_bytes]
        self.read_bytes = sum(m.own_numel * size for m, size in fetched)
        self.fetched_bytes = sum(
            m.own_numel * size if m.wire is None else m.wire.share_bytes for m, size in fetched
        )
        self.copied_bytes = sum(
            g.memory.own_numel * sizes[id(g)]
            for g in away
            if g.memory.copy_bytes and any(g.updated)
        )
        staging = 0 if papers else max((_fetch_staging(g.memory) for g in away), default=0)
        self.fetch_staging = staging
        self.is_mirrored = not any(map(_is_fetched, away))

    def _groups(self, params: tuple[ParamKey, ...]) -> list[Group]:
        """Group parameters by dtypes, frozen ones apart, as `unit.materialize` does."""
        candidate, is_away = self._candidate, self.is_away
        row = candidate.dtypes
        own = PRECISION_DTYPES.get(candidate.precision) == (None, None, None)
        wanted = (None, None) if own else (row.master, row.compute)
        keys = ((dtype, "float" in dtype, trained) for _, dtype, trained, *_ in params)
        stays = is_away and candidate.offload.params == "device"
        groups = []
        for ((master, compute), _), members in group_by_dtypes(params, keys, *wanted).items():
            shapes, owners = [m[0] for m in members], [m[4] for m in members]
            layout = build_layout(candidate.layout, shapes, self._num_shards, owners)
            sizes = DTYPE_BYTES[master], DTYPE_BYTES[compute]
            whose = candidate.coding if "float" in compute else None, self._rank
            memory = Memory(layout, self._stage, *sizes, master != compute, is_away, stays, *whose)
            trained = tuple(m[2] for m in members)
            updated = tuple(m[2] and m[3] for m in members)
            summed = "float32" if candidate.reduce_coding else master if own else row.reduce
            groups.append(Group(memory, trained, updated, master, DTYPE_BYTES[summed]))
        return groups

    def _casting(self, groups: Sequence[Group], first: bool) -> tuple[int, int]:
        """Return (bytes held more, at most meanwhile) when gradients join the window's sums.

        The first are cast one by one; later ones are added, for which the CPU casts a copy.
        """
        held = most = 0
        for group in groups:
            for numel in group.updated_numels:
                cast = numel * group.reduce
                if first or self._on_cpu:
                    most = max(most, held + cast)
                held += (cast if first else 0) - numel * group.memory.full_size
        return held, most

    def _gather(self, memories: Sequence[Memory]) -> Message:
        """Describe the gather of a unit: casts, copies, messages; encoding, where it is."""
        works = [coding_message(memory, self._on_cpu, self.is_away) for memory in memories]
        casts = [m for m in memories if m.casts and not m.copy_bytes and m.wire is None]
        moved = sum(m.own_numel * (m.master_size + m.full_size) for m in casts)
        work = merge([*works, Message(before=moved)])
        if not self._stage.shards_state or self._num_shards == 1:
            return work._replace(before=work.before + work.after, after=0)
        items = [(s, n, m.gathers_in_place) for m in memories for s, n in m.gathered_segments]
        return merge([gather_message(items, self._num_shards, self._on_cpu), work])

    # -- the reduction, as `unit.rank_order` does it
    def _reduce(self, groups: Sequence[Group], local_sum: bool) -> Reduce:
        """Describe the reduction of a unit's gradients, or of its sums over micro-batches."""
        num_ranks, sharded = self._num_shards, self._stage.shards_state
        num_replicas = self._candidate.summed_replicas
        is_alone = num_ranks * self._candidate.num_replicas == 1
        messages, replicas, means = [], list[Message](), []
        encoded = list[tuple[Segment, list[Slice]]]()
        out = grads = beside = 0
        for group in groups:
            layout, reduce = group.memory.layout, group.reduce
            wire = reduce if local_sum else group.memory.full_size
            out += group.memory.own_numel * reduce
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
                parts = [Slice(0, counted.numel, reduce, None)]
                encoded.append((counted, parts))
                behind = sharded and num_replicas > 1  # the sums lie behind the means
                more = (counted.numel + (0 if behind else num_counts)) * reduce
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
        return Reduce(merge(messages), grads, out, tuple(replicas), tuple(means), parcelled)

    def _synchronize(self, groups: Sequence[Group]) -> tuple[int, int, tuple[Message, ...]]:
        """Return what replicas that step apart keep, allocate and send in a synchronisation.

        The first message goes over the replicate axis, the second, at stage 0, to the other shards.
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
        staging = values + max([momentum, *(each.staging for each in messages)])
        return windows.state_bytes(numel), staging, tuple(messages)

    def _part(self, group: Group, index: int, size: int) -> Slice:
        """Describe one parameter's gradient in its segment, of elements of ``size`` bytes."""
        placed = group.memory.layout.params[index]
        coding = self._candidate.reduce_coding if is_coded(placed.shape) else None
        return Slice(placed.offset, placed.offset + placed.numel, size, coding)

    def _plain(self, segment: Segment, parts: Sequence[Slice], wire: int, reduce: int) -> Message:
        """Describe what one segment adds to a reduce-scatter of numbers."""
        if self._num_shards == 1:
            return Message(after=sum(part.hi - part.lo for part in parts) * (wire + reduce))
        describe = scattered_message if self._on_cpu else packed_message
        return describe(segment, ranges_of(parts), self._num_shards, wire, reduce)

    def _over_replicas(
        self, group: Group, segments: Sequence[tuple[Segment, Sequence[Slice]]], num_counts: int
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
        found = []
        ranks, on_cpu = self._candidate.num_replicas, self._on_cpu
        for numel, first, inside in buffers:
            ranges = sorted((pieces[i].shard_offset - first, pieces[i].numel) for i in inside)
            parts, at = list[Slice](), 0
            for begin, length in (*(each for each in ranges if each[1]), (numel, 0)):
                end = begin + length
                parts += [Slice(at, begin, group.reduce, None)] if begin > at else []
                parts += [Slice(begin, end, group.reduce, coding)] if length else []
                at = end
            encoded = None
            if any(part.coding is not None for part in parts):
                encoded = parcelled_message([(even_segment(numel, ranks), parts)], ranks, on_cpu)
            found.append(replica_message(numel, group.reduce, ranks, on_cpu, encoded))
        return found


def _is_fetched(group: Group) -> bool:
    """Tell whether slices elsewhere are fetched after a step; one on the device leaves a copy."""
    memory = group.memory
    return bool(memory.frees or memory.needs_gather or memory.wire)


_footprint = lru_cache(maxsize=1024)(Footprint)


def weigh(
    units: Sequence[TapeUnit], candidate: Candidate, rank: int | None = None
) -> list[Footprint]:
    """Weigh all units of a model; the candidate says how many, from the last, are offloaded.

    ``rank`` None: the one that has the most; see Note [The largest rank].

    **Cost** 0.1 ms for a dozen parameters; equal units are weighed once.
    """
    stay = candidate.offload.num_staying([unit.numel for unit in units])
    plain, weights = candidate.at_rest, []
    for number, (unit, owners) in enumerate(
        zip(units, _owners_in(units, candidate, rank), strict=True)
    ):
        params = tuple(
            (p.shape, p.dtype, p.requires_grad, p.gets_grad, owner)
            for p, owner in zip(unit.params, owners, strict=True)
        )
        num_shards = int(candidate.num_shards * (unit.experts_over or 1))
        weights.append(_footprint(params, plain, num_shards, number >= stay, rank or 0))
    return weights


def _fetch_staging(memory: Memory) -> int:
    """Return what a fetch takes on the device to be cast there: one piece, and the next one."""
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
