"""What one unit's parameters weigh and send under a candidate, as the engine lays them out.

Note [The largest rank]
Everything is that of rank 0 of its axes. In both layouts rank 0 owns the most: ``rows`` cuts as
``torch.chunk`` does and ``flat`` fills the first shares, so no rank holds more.

Note [Parameters without a gradient]
A trained parameter that no backward pass reaches has its place in the shards and in the buffers of
the reduction, where it contributes zeros. Its ``p.grad`` stays None, so the norm leaves it out, and
the optimizer makes no state for it. A unit with none but such is not reduced unless it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from shardwise.layout.segments import Layout, Segment, build_layout
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import UnitFacts
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, DtypeName
from shardwise.plan.step.messages import (
    BLOCK_NUMEL,
    Message,
    gather_message,
    merge,
    packed_message,
    replica_message,
    scattered_message,
)
from shardwise.stages import STAGES, Stage

ParamKey = tuple[tuple[int, ...], DtypeName, bool, bool]  # trained, and gets a gradient


@dataclass(frozen=True)
class Setting:
    """What of a candidate decides the bytes of a unit."""

    stage: Stage
    num_shards: int
    num_replicas: int
    precision: str
    layout: Literal["rows", "flat"]
    on_cpu: bool  # the transport is point to point, and so the device is the CPU
    params_away: bool  # the slices rest elsewhere, and full copies are made from them
    optimizer: str


def setting_of(candidate: Candidate) -> Setting:
    """Take from a candidate what decides the bytes of a unit."""
    return Setting(
        STAGES[candidate.stage],
        candidate.num_shards,
        candidate.num_replicas,
        candidate.precision,
        candidate.layout,
        candidate.transport == "point_to_point",
        candidate.offload.params != "device",
        candidate.optimizer,
    )


@dataclass(frozen=True)
class Reduce:
    """What reducing a unit takes. ``grads`` are bytes of full gradients on the wire.

    ``out`` are the buffers of the means; ``temporary`` are bytes that the sums allocate in between.
    ``replicas`` has one all-reduce per buffer, ``means`` one all-gather per storage (stage 0).
    """

    message: Message
    grads: int
    out: int
    temporary: int
    replicas: tuple[Message, ...]
    means: tuple[Message, ...]


@dataclass(frozen=True)
class Footprint:
    """The bytes of one unit.

    ``full_bytes`` are a full copy with padding, ``shard_bytes`` the master slices, and
    ``compute_shard_bytes`` a second shard in the computing dtype, which other systems keep.
    ``kept_bytes`` are full copies beyond the slices that never go, ``freed_bytes`` those that come
    and go. ``gather`` is None where the full copy always holds present values. ``sums_apart``: sums
    over micro-batches have another dtype than gradients; ``keep_first`` and ``keep_next`` are then
    (bytes held more afterwards, most bytes held more meanwhile) when gradients join such a sum.
    ``keeps_buffer``: the memory of the means is used again in the next step.
    ``written_grads`` are bytes of gradients as a micro-batch's autograd writes them.
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


def footprint(unit: UnitFacts, setting: Setting) -> Footprint:
    """Weigh one unit; alike units are weighed once. **Cost** 0.1 ms for a dozen parameters."""
    key = tuple((p.shape, p.dtype, p.requires_grad, p.gets_grad) for p in unit.params)
    return _footprint(key, setting)


class _Group(NamedTuple):
    """The parameters of one storage: those of one (master, compute) pair of dtypes."""

    layout: Layout
    trained: tuple[bool, ...]
    updated: tuple[bool, ...]
    master_name: DtypeName
    master: int
    compute: int
    reduce: int
    casts: bool
    aliased: bool
    frees: bool


def _groups(params: tuple[ParamKey, ...], setting: Setting) -> list[_Group]:
    """Group parameters by dtypes, frozen ones apart, as `unit.materialize` does."""
    row = PRECISIONS[setting.precision]
    own = setting.precision == "fp32"  # keeps each parameter's own dtype
    found: dict[tuple[DtypeName, DtypeName, bool], list[ParamKey]] = {}
    for param in params:
        _, dtype, requires_grad, _ = param
        floating = "float" in dtype and not own
        master = row.master if floating and requires_grad else dtype
        compute = row.compute if floating else dtype
        found.setdefault((master, compute, requires_grad), []).append(param)
    groups = []
    for (master, compute, _), members in found.items():
        layout = build_layout(setting.layout, [m[0] for m in members], setting.num_shards)
        keeps = not setting.stage.frees_after_backward
        keeps |= setting.num_shards == 1 and not setting.params_away
        aliased = keeps and master == compute
        groups.append(
            _Group(
                layout,
                tuple(m[2] for m in members),
                tuple(m[2] and m[3] for m in members),
                master,
                DTYPE_BYTES[master],
                DTYPE_BYTES[compute],
                DTYPE_BYTES[master if own else row.reduce],
                master != compute,
                aliased,
                not aliased and setting.stage.frees_after_backward,
            )
        )
    return groups


@cache
def _footprint(params: tuple[ParamKey, ...], setting: Setting) -> Footprint:
    groups = _groups(params, setting)
    sharded = setting.stage.shards_state
    exchanges = sharded and setting.num_shards > 1
    stale = [g for g in groups if (exchanges or not g.aliased) and (g.frees or any(g.updated))]
    full = {id(g): g.layout.full_numel * g.compute for g in groups}
    shard = {
        id(g): (g.layout.shard_numel if sharded else g.layout.full_numel) * g.master for g in groups
    }
    trains = [g for g in groups if any(g.trained)]
    locals_ = [(g, shape) for g in trains for shape in _local_shapes(g, sharded)]
    numels = [prod(shape) for _, shape in locals_]
    table = OPTIMIZERS[setting.optimizer]
    sums_apart = any(g.compute != g.reduce for g in trains)
    row = PRECISIONS[setting.precision]
    return Footprint(
        num_trained=sum(p[2] for p in params),
        num_updated=sum(p[2] and p[3] for p in params),
        full_bytes=sum(full.values()),
        shard_bytes=sum(shard.values()),
        compute_shard_bytes=sum(
            g.layout.shard_numel * g.compute for g in groups if row.keeps_compute_shard and g.frees
        ),
        kept_bytes=sum(
            full[id(g)] - (shard[id(g)] if g.aliased else 0) for g in groups if not g.frees
        ),
        freed_bytes=sum(full[id(g)] for g in groups if g.frees),
        padding_bytes=sum(_padding(g) * g.master for g in groups) if sharded else 0,
        state_bytes=sum(table.tensor_bytes(s, g.master_name) for g, s in locals_),
        largest_local=max(
            (n * g.master for n, (g, _) in zip(numels, locals_, strict=True)), default=0
        ),
        local_numel=sum(numels),
        written_grads=sum(n * g.compute for g in trains for n in _updated_numels(g)),
        largest_grad=max((n * g.compute for g in trains for n in _updated_numels(g)), default=0),
        gather=_gather(stale, setting) if stale else None,
        reduce=_reduce(trains, setting, False) if trains else None,
        reduce_sums=_reduce(trains, setting, True) if trains else None,
        sums_apart=sums_apart,
        keeps_buffer=setting.on_cpu and not setting.stage.frees_after_backward,
        keep_first=_casting(trains, True, setting.on_cpu) if sums_apart else (0, 0),
        keep_next=_casting(trains, False, setting.on_cpu) if sums_apart else (0, 0),
    )


def _padding(group: _Group) -> int:
    """Return the elements of padding in a rank's slices, on average and rounded up."""
    layout = group.layout
    num_params = sum(p.numel for p in layout.params)
    return layout.shard_numel - num_params // layout.num_ranks


def _updated_numels(group: _Group) -> list[int]:
    return [p.numel for p, t in zip(group.layout.params, group.updated, strict=True) if t]


def _local_shapes(group: _Group, sharded: bool) -> list[tuple[int, ...]]:
    """Return the shapes of rank 0's slices of the parameters that the optimizer updates."""
    layout, found = group.layout, []
    for index, (placed, updated) in enumerate(zip(layout.params, group.updated, strict=True)):
        if not updated:
            continue
        numel = layout.piece(index, 0).numel if sharded else placed.numel
        rows = prod(placed.shape[1:])
        by_rows = placed.shape and (layout.kind == "rows" or not sharded) and rows
        found.append((numel // rows, *placed.shape[1:]) if by_rows else (numel,))
    return found


def _casting(groups: Sequence[_Group], first: bool, on_cpu: bool) -> tuple[int, int]:
    """Return (bytes held more, at most meanwhile) when gradients join the window's sums.

    The first are cast one by one; later ones are added, for which the CPU casts a copy.
    """
    held = most = 0
    for group in groups:
        for numel in _updated_numels(group):
            cast = numel * group.reduce
            if first or on_cpu:
                most = max(most, held + cast)
            held += (cast if first else 0) - numel * group.compute
    return held, most


def _gather(groups: Sequence[_Group], setting: Setting) -> Message:
    """Describe the gather of a unit: casts, copies, messages."""
    sharded, num_ranks = setting.stage.shards_state, setting.num_shards
    before = 0
    for group in groups:
        if group.casts:
            numel = group.layout.shard_numel if sharded else group.layout.full_numel
            before += numel * (group.master + group.compute)
    if not sharded or num_ranks == 1:
        return Message(before=before)
    items = [
        (segment, group.compute, group.aliased or group.casts)
        for group in groups
        for segment in group.layout.segments
    ]
    message = gather_message(items, num_ranks, setting.on_cpu)
    return message._replace(before=message.before + before)


def _reduce(groups: Sequence[_Group], setting: Setting, local_sum: bool) -> Reduce:
    """Describe the reduction of a unit's gradients, or of its sums over micro-batches."""
    num_ranks, sharded = setting.num_shards, setting.stage.shards_state
    messages, replicas, means = [], [], []
    out = grads = temporary = 0
    for group in groups:
        layout, wire = group.layout, group.reduce if local_sum else group.compute
        out += (layout.shard_numel if sharded else layout.full_numel) * group.reduce
        parts: dict[int, list[tuple[int, int]]] = {}
        for placed, trained in zip(layout.params, group.trained, strict=True):
            if trained:
                grads += placed.numel * wire
                parts.setdefault(placed.segment, []).append((placed.offset, placed.numel))
        segments = [(layout.segments[n], p) for n, p in parts.items() if layout.segments[n].numel]
        for segment, places in segments:
            if num_ranks == 1:
                moved = sum(n for _, n in places) * (wire + group.reduce)
                messages.append(Message(after=moved))
            elif setting.on_cpu:
                messages.append(scattered_message(segment, places, num_ranks, wire, group.reduce))
                if wire != group.reduce:
                    numel = min(segment.shard_numel, BLOCK_NUMEL)
                    temporary = max(temporary, numel * group.reduce)
            else:
                messages.append(packed_message(segment, places, num_ranks, wire, group.reduce))
        num_counts = sum(group.trained) if num_ranks * setting.num_replicas > 1 else 0
        if num_counts and num_ranks > 1:
            messages.append(_counting(num_counts, group.reduce, setting))
        buffers = [layout.shard_numel + num_counts]
        if not sharded:
            buffers = [*(s.bounds(0)[1] for s, _ in segments), num_counts]
        if setting.num_replicas > 1:
            replicas += [
                replica_message(b, group.reduce, setting.num_replicas, setting.on_cpu)
                for b in buffers
            ]
        if not sharded and segments:
            items = [(s, group.reduce, True) for s, _ in segments]
            means.append(gather_message(items, num_ranks, setting.on_cpu))
    return Reduce(merge(messages), grads, out, temporary, tuple(replicas), tuple(means))


def _counting(num_counts: int, size: int, setting: Setting) -> Message:
    """Describe what tells on how many ranks each parameter had a gradient; see `unit.sums`."""
    num_ranks = setting.num_shards
    segment = Segment(num_counts * num_ranks, num_counts, 0, 0)
    describe = scattered_message if setting.on_cpu else packed_message
    message = describe(segment, [(0, segment.numel)], num_ranks, size, size)
    return message._replace(staging=message.staging + segment.numel * size)
