"""Sums of gradients over the ranks, from autograd's gradients to slices of their mean.

Addends are summed in rank order, so the bits depend neither on timing nor on the stage nor on the
transport of the slices. A user's own reduce-scatter sums as it likes.

Note [Gradients of some ranks only]
A parameter may get a gradient on one rank and none on another. Every rank reduces every unit that
ran, with zeros for missing gradients. A few more numbers in the same collective count the ranks on
which each parameter had a gradient. If the count is 0, the parameter keeps ``grad`` None, and so
its value and its optimizer state. Only a rank that misses a gradient reads the counts and waits for
the unit's sum, so usually the host does not synchronise with the device.

Note [Sums over replicas]
The gradients of a micro-batch before a window's last are summed over shards only, into the
storage's `Unreduced`, in the masters' dtype, which takes the memory of ``p.grad``. The last
micro-batch adds these sums to its own, and the total is summed over replicas once. If means of
gradients live on the host, that memory is missing, so every micro-batch is summed over both.

Note [Dtype of a sum]
Gradients of one micro-batch are sent in the layers' dtype, or in that of the sum if it is narrower.
A sum of several is sent in its own, as fewer bits would round it. Without `Precision.reduce` that
is the gradients' widest. All ranks must send one dtype, so all set ``has_local_sum`` if a pass has
kept its gradients on the ranks since the last reduction, even if this rank had none to keep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import promote_types

from shardwise.comm.pending import CollectiveId, GatherItem, Pending, ReduceItem
from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.segments import Layout, Segment, even_segment
from shardwise.layout.wire import is_coded
from shardwise.mesh import Axis, DataAxes
from shardwise.precisions import Coding
from shardwise.trace import Traffic
from shardwise.unit.param import ShardedParam
from shardwise.unit.partial import Unreduced
from shardwise.unit.storage import MeansMemory, Storage

if TYPE_CHECKING:
    from shardwise.unit.unit import Unit


class OwnSum(Protocol):
    """Makes sums by the ``reduce_scatter`` of a user."""

    @property
    def reduce_scatter(self) -> object:
        """The user's function: units with one of them share a collective."""

    def start(
        self,
        items: Sequence[ReduceItem],
        axis: Axis,
        collective: CollectiveId,
        traffic: Traffic,
        divisor: float,
    ) -> Pending:
        """Reduce segments of one dtype along ``axis``; divide the sums."""


@dataclass(frozen=True)
class Sum:
    """The settings of a unit's sums. Units with an equal `key` share a collective.

    ``divisor`` turns the sums into means: the number of ranks whose batches they contain.
    ``zero_fill``: a parameter without a gradient on any rank gets zeros. ``in_param_dtype``: unless
    `Precision.reduce` names a dtype, sums have that of the sharded parameter, else that of the
    gradients. ``all_reduces``: outside an accumulation window every micro-batch is summed over
    replicas. If not ``over_replicas``, sums are over the shard axis alone, whose ranks ``divisor``
    counts. ``own`` makes sums by a user's own collective. ``after_reduce`` is called with the
    means, before anything else reads them.
    """

    divisor: float
    zero_fill: bool = False
    in_param_dtype: bool = True
    all_reduces: bool = True
    over_replicas: bool = True
    own: OwnSum | None = None
    after_reduce: Callable[[torch.Tensor], object] | None = None

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The settings, with a user's functions by identity: they may not be comparable."""
        own = (self.own and self.own.reduce_scatter, self.after_reduce)
        same = ((id(getattr(f, "__self__", f)), getattr(f, "__func__", None)) for f in own)
        settings = (self.zero_fill, self.in_param_dtype, self.all_reduces, self.over_replicas)
        return (self.divisor, *settings, *same)

    def replicate_of(self, axes: DataAxes) -> Axis | None:
        """Return the replicate axis if sums are taken over it too, else None."""
        return axes.replicate if self.over_replicas else None


@dataclass(frozen=True, eq=False)
class GradientRows:
    """The part of a `Storage` that sums of gradients use, without memory for parameters.

    ``params`` are of one dtype; ``layout`` has them by rows, in this order. ``compute_dtype`` is
    the dtype of their gradients.
    """

    layout: Layout
    rank: int
    params: tuple[ShardedParam, ...]
    master_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    shards_state = True

    @cached_property
    def mean_memory(self) -> MeansMemory:
        """The memory of the means, on the computing device."""
        return MeansMemory(self.layout.shard_numel(self.rank), self.master_dtype, self.device)

    def shard_offset_of(self, index: int) -> int:
        """Return the offset of this rank's rows of a parameter among its rows of all."""
        return self.layout.piece(index, self.rank).shard_offset


@dataclass(frozen=True)
class Held:
    """The memory of sums in flight: means, gradients that are sent without a copy, buffers."""

    units: tuple[str, ...]
    means: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    staging: object


@dataclass
class _Part:
    """The sum of one storage: its parameters, and the memory of their means.

    ``out`` is the buffer of this rank's slices ([S]), or of all elements if state is replicated
    ([P]); ``full_segments`` are then its segments, each to be gathered. ``counts`` are those of
    Note [Gradients of some ranks only].
    """

    unit: "Unit"
    storage: Storage | GradientRows
    params: list[ShardedParam]
    out: torch.Tensor
    counts: torch.Tensor
    full_segments: list[tuple[Segment, torch.Tensor]]
    brought: tuple[torch.Tensor, Pending] | None = None  # the copy to the slices' home

    @property
    def means(self) -> list[torch.Tensor]:
        """This rank's share of the means."""
        if self.storage.shards_state:
            return [self.out]
        return [
            full[slice(*segment.bounds(self.storage.rank))] for segment, full in self.full_segments
        ]

    def start_evict(self) -> None:
        """Start copying the means to the slices' home if that is elsewhere; do it only once."""
        if self.brought is None:
            self.brought = self.storage.mean_memory.start_evict(self.out)
            if self.brought[0] is not self.out:
                self.out, self.counts = self.brought[0], self.counts.clone()  # a view of one buffer

    def evicted(self) -> torch.Tensor:
        """Wait for the copy, if there is one; return the means at the slices' home."""
        assert self.brought is not None
        self.brought[1].wait()
        return self.brought[0]


class RunningSum:
    """The sum of one bucket."""

    def __init__(self, units: Sequence["Unit"], how: Sum) -> None:
        self._how = how
        self._comm = units[0].comm
        self._replicate = how.replicate_of(self._comm.axes)
        is_half = any(_sums_in_half(unit) for unit in units)
        self._before = _division_before(how.divisor) if is_half else 1.0
        self._divisor = how.divisor / self._before
        self._parts: list[_Part] = []
        self._gathers: list[Pending] = []
        self._used_here: set[ShardedParam] = set()
        self._defers = _may_defer(units)  # see Note [Sums over replicas]
        self._items = items = list[ReduceItem]()
        for unit in units:
            for storage in unit.storages:
                params = [
                    s for s in unit.params if s.is_stored_in(storage) and s.gradient.gets_mean
                ]
                if storage.unreduced is not None and not self._defers:
                    self._used_here.update(p for p in params if p in storage.unreduced.used)
                items += self._start_storage(unit, storage, params)
            for rows in unit.grads.gradient_rows:
                params = [param for param in rows.params if param.is_trained]
                items += self._start_storage(unit, rows, params)
        collective = self._comm.collective_id("reduce_scatter", units[0].name, units[0].index)
        self._pendings = self._start(items, collective, 1 if self._replicate else self._divisor)

    def _start(
        self, items: list[ReduceItem], collective: CollectiveId, divisor: float
    ) -> list[Pending]:
        """Start the collectives: one, or the user's and another for what it does not take.

        A user's collective gets gradients alone, without counts: it may send fewer bits, scaled by
        the largest number.
        """
        axis, own = self._comm.axes.shard, self._how.own
        theirs: list[ReduceItem] = []
        if own is not None and axis.size > 1:
            theirs = [i for i in items if not i.counts and i.segment.owner is None]
            items = [i for i in items if not any(i is each for each in theirs)]
        by_dtype: dict[torch.dtype, list[ReduceItem]] = {}
        for item in theirs:
            by_dtype.setdefault(item.out.dtype, []).append(item)
        traffic, pendings = self._comm.traffic, list[Pending]()
        for each in by_dtype.values():
            assert own is not None
            pending = own.start(each, axis, collective, traffic, divisor)
            pendings.append(self._comm.follow(pending, axis, collective))
        if items or not pendings:
            pendings.append(self._comm.start_reduce_scatter(items, axis, collective, divisor))
        return pendings

    def _start_storage(
        self, unit: "Unit", storage: Storage | GradientRows, params: list[ShardedParam]
    ) -> list[ReduceItem]:
        if not params:
            return []
        grads = [param.gradient.take_partial() for param in params]
        found = [grad.dtype for grad in grads if grad is not None]
        asked = params[0].gradient.reduce_dtype
        dtype = asked or reduce(promote_types, found, storage.compute_dtype)
        # see Note [Dtype of a sum]
        sends_sum = asked is None or dtype.itemsize < storage.compute_dtype.itemsize
        wire_dtype = dtype if sends_sum or unit.grads.has_local_sum else storage.compute_dtype
        sent = [self._to_send(p, grad, wire_dtype) for p, grad in zip(params, grads, strict=True)]
        replicated = not storage.shards_state
        layout = storage.layout
        num_counts = len(params) if self._comm.axes.num_ranks > 1 else 0
        # The counts are summed over replicas with the slices, so they lie behind them.
        behind = num_counts if self._replicate and not replicated else 0
        buffer = storage.mean_memory.take_buffer(dtype, num_extra=behind)
        out, counts = buffer.split([buffer.numel() - behind, behind])
        if self._defers and len(params) < len(layout.params):
            out.zero_()  # so that the window's sums start at 0 for parameters trained later
        if num_counts != behind:
            counts = buffer.new_empty(num_counts)
        by_index = {param.index: grad for param, grad in zip(params, sent, strict=True)}
        items, full_segments = [], []
        is_coded_here = unit.precision.reduce_coding is not None
        for segment, inside in layout.segments_of(tuple(by_index)):
            begin, numel = segment.shard_offset, segment.share_numel(storage.rank)
            if replicated:
                begin = segment.full_offset + segment.share(storage.rank)[0]
                full = segment.full_numel(layout.num_ranks)
                full_segments.append((segment, out[segment.full_offset :][:full]))
            parts = tuple((layout.params[index].offset, by_index[index]) for index in inside)
            codings: tuple[Coding | None, ...] = ()
            if is_coded_here:
                codings = tuple(_coding_of(unit, layout.params[i].shape) for i in inside)
            items.append(ReduceItem(segment, parts, out[begin : begin + numel], codings))
        if num_counts:
            items.append(self._count(params, counts))
        self._parts.append(_Part(unit, storage, params, out, counts, full_segments))
        return items

    def _to_send(
        self, param: ShardedParam, grad: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if grad is None:
            return torch.zeros(prod(param.shape), dtype=dtype, device=self._comm.device)
        self._used_here.add(param)
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        if self._before != 1:
            grad = grad / self._before
        return param.encoding.order_by_rank(grad).contiguous().view(-1)

    def _count(self, params: list[ShardedParam], counts: torch.Tensor) -> ReduceItem:
        """Return the item that counts the ranks with a gradient of each parameter.

        Every rank's share of the segment is the same row, so that every rank gets the counts.
        """
        num_ranks = self._comm.axes.shard.size
        here = counts.new_ones(num_ranks * len(params))
        missing = [i for i, param in enumerate(params) if param not in self._used_here]
        if missing:
            here.view(num_ranks, -1)[:, missing] = 0
        segment = even_segment(here.numel(), num_ranks)
        return ReduceItem(segment, ((0, here),), counts, counts=True)

    def held(self, units: tuple[str, ...]) -> Held:
        """Return the sum's memory."""
        means, counts = [part.out for part in self._parts], [part.counts for part in self._parts]
        gathers = [gather.holds for gather in self._gathers]
        grads = [g for item in self._items if not item.counts for _, g in item.parts]
        counted = [g for item in self._items if item.counts for _, g in item.parts]
        holds = [pending.holds for pending in self._pendings]
        return Held(units, means, grads, (holds, counts, counted, gathers))

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the addends and sum them; then sum over replicas and start gathers and copies.

        Slices are summed over a replicate axis. At stage 0 the mean is gathered, so that every rank
        has all of it.
        """
        if not self._pendings:
            return
        for pending in self._pendings:
            pending.wait()
        self._pendings, self._items = [], []
        if self._defers:
            self._keep()
            return
        for part in self._parts:
            if self._replicate is not None:
                self._sum_over_replicas(part)
            if self._how.after_reduce is not None:
                for mean in part.means:
                    self._how.after_reduce(mean)
            if part.full_segments:
                self._gathers.append(self._start_gather(part))
            else:
                part.start_evict()
                part.evicted()  # so that the device holds the means of a few buckets only

    @torch.no_grad()
    def finish(self) -> dict[ShardedParam, torch.Tensor]:
        """Wait; return this rank's slices of the means."""
        self.wait()
        for gather in self._gathers:
            gather.wait()
        self._gathers = []
        for part in self._parts:
            part.start_evict()
        found: dict[ShardedParam, torch.Tensor] = {}
        for part in self._parts:
            found.update(self._means(part))
        return found

    def _sum_over_replicas(self, part: _Part) -> None:
        axis = self._replicate
        assert axis is not None
        if isinstance(part.storage, Storage) and part.storage.unreduced is not None:
            torch.add(part.storage.unreduced.sums, part.out, out=part.out)
            part.storage.unreduced = None
            part.storage.mean_memory.drop_kept()
        collective = self._comm.collective_id("all_reduce", part.unit.name, part.unit.index)
        if not part.storage.shards_state:
            summed = [*part.means, part.counts]
        else:  # the counts lie behind the slices
            summed = [part.out.as_strided((part.out.numel() + part.counts.numel(),), (1,))]
        for number, each in enumerate(summed):
            codings = _codings_between(part, number)
            self._comm.all_reduce(each, axis, collective, self._divisor, codings)

    def _keep(self) -> None:
        """Add the sums over shards to the window's."""
        for part in self._parts:
            assert isinstance(part.storage, Storage)
            used, kept = self._used_here.intersection(part.params), part.storage.unreduced
            if kept is None:
                sums = part.out.to(part.storage.master_dtype)
                part.storage.unreduced = Unreduced(sums, set(part.params), {*used})
                continue
            kept.sums.add_(part.out)
            kept.params.update(part.params)
            kept.used |= used
            part.storage.mean_memory.drop_kept()  # the sum lies elsewhere; do not keep two
        self._parts = []

    def _start_gather(self, part: _Part) -> Pending:
        axis = self._comm.axes.shard
        items = []
        for segment, full in part.full_segments:
            own = full[slice(*segment.share(axis.rank))]
            items.append(GatherItem(segment, own, full, True))
        collective = self._comm.collective_id("all_gather", part.unit.name, part.unit.index)
        return self._comm.start_all_gather(items, axis, collective)

    def _means(self, part: _Part) -> dict[ShardedParam, torch.Tensor]:
        means = {}
        dtype = part.storage.master_dtype
        out = part.evicted()
        first = out.storage_offset()
        counts = part.counts if part.counts.numel() else None
        used = _counted_anywhere(part.params, self._used_here, counts)
        if self._how.zero_fill:
            used = set(part.params)
        for param in part.params:
            if param in used:
                shape = param.sharded._local_tensor.shape
                begin = first + part.storage.shard_offset_of(param.index)
                mean = out.as_strided(shape, contiguous_stride(shape), begin)
                means[param] = mean if mean.dtype == dtype else mean.to(dtype)
        return means

    @property
    def nbytes(self) -> int:
        """Bytes of the means."""
        return sum(part.out.nbytes for part in self._parts)


def _sums_in_half(unit: "Unit") -> bool:
    """Tell whether gradients of a unit are summed in float16."""
    parts: list[Storage | GradientRows] = [*unit.storages, *unit.grads.gradient_rows]
    dtypes = (unit.reduce_dtype_of(part.master_dtype) or part.compute_dtype for part in parts)
    return torch.float16 in dtypes


def _division_before(divisor: float) -> float:
    """Return the power of two by which addends in half precision are divided.

    Note [Half precision]
    A sum of float16 may leave its range before it is divided. So the addends and the sum are each
    divided by about the root of the divisor. Source: ``_get_gradient_divide_factors`` in
    ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``.
    """
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return before


def _may_defer(units: Sequence["Unit"]) -> bool:
    """Tell whether sums over replicas may wait for a later micro-batch of the window."""
    first = units[0]
    replicate = first.grads.sums.replicate_of(first.comm.axes)
    if replicate is None or replicate.size == 1 or first.engine is None:
        return False
    if first.engine.is_last_micro_batch:
        return False
    if first.settings.stands_while_full and first.grads.sums.all_reduces:
        return False
    return all(unit.home is None and not unit.grads.gradient_rows for unit in units)


def _coding_of(unit: "Unit", shape: tuple[int, ...]) -> Coding | None:
    """Return the coding of a parameter's gradient: of matrices only, as in gathers.

    See Note [Blocks of codes].
    """
    return unit.precision.reduce_coding if is_coded(shape) else None


def _codings_between(part: _Part, number: int) -> list[tuple[int, int, Coding]]:
    """Return the ranges that replicas encode in the slices, or in segment ``number`` at stage 0.

    A range is (begin, end, coding); ranges ascend. The counts follow the last segment.
    """
    layout, rank = part.storage.layout, part.storage.rank
    inside = [segment for segment, _ in part.full_segments[number : number + 1]]
    found = []
    for param in part.params:
        coding = _coding_of(part.unit, layout.params[param.index].shape)
        piece = layout.piece(param.index, rank)
        segment = layout.segments[layout.params[param.index].segment]
        is_here = segment in inside or part.storage.shards_state
        if coding is not None and piece.numel and is_here:
            begin = piece.shard_offset - (segment.shard_offset if inside else 0)
            found.append((begin, begin + piece.numel, coding))
    return sorted(found, key=lambda each: each[0])


def _counted_anywhere(
    params: Sequence[ShardedParam], used_here: set[ShardedParam], counts: torch.Tensor | None
) -> set[ShardedParam]:
    """Return the ``params`` that had a gradient on any rank, as counted."""
    if counts is None or used_here.issuperset(params):
        return used_here
    found = zip(params, counts.tolist(), strict=True)
    return used_here.union(param for param, count in found if count)
