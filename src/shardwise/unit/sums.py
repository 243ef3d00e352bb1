"""Sums of gradients over the ranks, from autograd's gradients to slices of their mean.

Addends are summed in rank order, so the bits depend neither on timing nor on the stage nor on the
transport of the slices. A user's own reduce-scatter chooses its order.

Note [Gradients of some ranks only]
A parameter may get a gradient on one rank and none on another. Every rank reduces every unit that
ran, with zeros for missing gradients. A few more numbers in the same collective count the ranks on
which each parameter had a gradient. If the count is 0, the parameter keeps ``grad`` None, and so
its value and its optimizer state. Only a rank that misses a gradient reads the counts and waits for
the unit's sum, so usually the host does not synchronise with the device.

Note [Sums over replicas]
The gradients of a micro-batch before a window's last are summed over shards only, into the
storage's `Unreduced`, in the masters' dtype. They take as much memory as ``p.grad``. The last
micro-batch adds these sums to its own, and the total is summed over replicas once. If reduced
gradients are offloaded, there is no memory for these sums on the device, so every micro-batch is
summed over shards and replicas.

Note [Dtype of a sum]
Gradients of one micro-batch are sent in the dtype of the layers, or in the dtype of the sum if that
is narrower. A local sum of several micro-batches is sent in the dtype of the sum, because fewer
bits would round it. Without `Precision.reduce` the dtype of the sum is the widest of the gradients.
All ranks must send one dtype. So after a pass that kept gradients on the ranks, ``has_local_sum``
is True on all ranks, even on one without gradients, until the next reduction is sent.
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


class UserReduceScatter(Protocol):
    """Interface of sums by a user's collective, see `surface.packed`."""

    @property
    def reduce_scatter(self) -> object:
        """The user's function. Units with the same function share a collective."""

    def start(
        self,
        items: Sequence[ReduceItem],
        axis: Axis,
        collective: CollectiveId,
        traffic: Traffic,
        divisor: float,
    ) -> Pending:
        """Start reducing segments of one dtype along ``axis``; divide the sums."""


@dataclass(frozen=True)
class SumSettings:
    """The settings of a unit's sums. Units with an equal `key` share a collective.

    - ``divisor`` turns the sums into means: the number of ranks whose batches they contain.
    - ``zero_fill``: a parameter without a gradient on any rank gets zeros.
    - ``in_param_dtype``: unless `Precision.reduce` names a dtype, sums have the dtype of the
      sharded parameter, else the dtype of the gradients.
    - ``all_reduces``: outside an accumulation window every micro-batch is summed over replicas.
    - ``over_replicas``: if False, sums are over the shard axis alone, and ``divisor`` is its size.
    - ``user_reduce_scatter``: a user's collective that makes the sums.
    - ``after_reduce``: a user's function that is called with the means before they are used.
    """

    divisor: float
    zero_fill: bool = False
    in_param_dtype: bool = True
    all_reduces: bool = True
    over_replicas: bool = True
    user_reduce_scatter: UserReduceScatter | None = None
    after_reduce: Callable[[torch.Tensor], object] | None = None

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The settings, with a user's functions by identity: they may not be comparable."""
        user = self.user_reduce_scatter
        return (
            self.divisor,
            self.zero_fill,
            self.in_param_dtype,
            self.all_reduces,
            self.over_replicas,
            _identity_of(None if user is None else user.reduce_scatter),
            _identity_of(self.after_reduce),
        )

    def replicate_of(self, axes: DataAxes) -> Axis | None:
        """Return the replicate axis if sums are taken over it too, else None."""
        return axes.replicate if self.over_replicas else None


@dataclass(frozen=True, eq=False)
class GradientRows:
    """The layout of gradients of parameters that are in no storage.

    Sums use it in place of a `Storage`. ``params`` are of one dtype; ``layout`` has them by rows,
    in this order. ``compute_dtype`` is the dtype of their full gradients.
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
        """The memory of the means [S], on the computing device."""
        return MeansMemory(self.layout.shard_numel(self.rank), self.master_dtype, self.device)

    def shard_offset_of(self, index: int) -> int:
        """Return the offset in [S] of this rank's rows of a parameter."""
        return self.layout.piece(index, self.rank).shard_offset


@dataclass(frozen=True)
class BuffersInFlight:
    """The memory of a sum in flight, by what is in it.

    ``grads`` are gradients that are sent without a copy. ``staging`` is any structure of tensors.
    """

    units: tuple[str, ...]
    means: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    staging: object


@dataclass
class _StorageSum:
    """The sum of one storage: its parameters, and the memory of their means.

    - ``out``: the buffer of this rank's slices [S], or of all elements [P] if state is replicated.
    - ``counts``: the number of ranks with a gradient, one count per parameter.
      See Note [Gradients of some ranks only].
    - ``full_segments``: if state is replicated, each segment with its part of ``out``; it is
      gathered.
    - ``eviction``: the copy of the means to the home of the slices, when it was started.
    """

    unit: "Unit"
    storage: Storage | GradientRows
    params: list[ShardedParam]
    out: torch.Tensor
    counts: torch.Tensor
    full_segments: list[tuple[Segment, torch.Tensor]]
    eviction: tuple[torch.Tensor, Pending] | None = None

    @property
    def means(self) -> list[torch.Tensor]:
        """This rank's share of the means."""
        if self.storage.shards_state:
            return [self.out]
        return [
            full[slice(*segment.bounds(self.storage.rank))] for segment, full in self.full_segments
        ]

    def start_evict(self) -> None:
        """Start copying the means to the home of the slices, if they are offloaded; only once."""
        if self.eviction is not None:
            return
        self.eviction = self.storage.mean_memory.start_evict(self.out)
        at_home, _ = self.eviction
        if at_home is not self.out:
            self.out = at_home
            self.counts = self.counts.clone()  # a view of the buffer of the means, which is freed

    def wait_evicted(self) -> torch.Tensor:
        """Wait for the copy, if there is one; return the means at the home of the slices."""
        assert self.eviction is not None
        at_home, copy = self.eviction
        copy.wait()
        return at_home


class RunningSum:
    """The sum of one bucket, from its start to `finish`."""

    def __init__(self, units: Sequence["Unit"], settings: SumSettings) -> None:
        self._settings = settings
        self._comm = units[0].comm
        self._replicate = settings.replicate_of(self._comm.axes)
        # Addends are divided by the first, the sum by the second; see Note [Half precision].
        is_half = any(_sums_in_half(unit) for unit in units)
        self._predivisor = _choose_predivisor(settings.divisor) if is_half else 1.0
        self._divisor = settings.divisor / self._predivisor
        self._parts: list[_StorageSum] = []
        self._gathers: list[Pending] = []
        self._used_locally: set[ShardedParam] = set()  # parameters with a gradient on this rank
        self._defers = _may_defer(units)  # see Note [Sums over replicas]
        items: list[ReduceItem] = []
        self._items = items  # kept for `buffers_in_flight`
        for unit in units:
            for storage in unit.storages:
                stored = [param for param in unit.params if param.is_stored_in(storage)]
                params = [param for param in stored if param.gradient.gets_mean]
                if storage.unreduced is not None and not self._defers:
                    used = storage.unreduced.used
                    self._used_locally.update(param for param in params if param in used)
                items += self._start_storage(unit, storage, params)
            for rows in unit.grads.gradient_rows:
                params = [param for param in rows.params if param.is_trained]
                items += self._start_storage(unit, rows, params)
        collective = self._comm.collective_id("reduce_scatter", units[0].name, units[0].index)
        self._pendings = self._start(items, collective, 1 if self._replicate else self._divisor)

    def _start(
        self, items: list[ReduceItem], collective: CollectiveId, divisor: float
    ) -> list[Pending]:
        """Start the collectives: one, or the user's and one for the items that it cannot take.

        A user's collective gets gradients without their counts, because it may scale all numbers by
        the largest one, to send fewer bits.
        """
        axis = self._comm.axes.shard
        user = self._settings.user_reduce_scatter
        pendings: list[Pending] = []
        if user is not None and axis.size > 1:
            by_dtype: dict[torch.dtype, list[ReduceItem]] = {}
            rest: list[ReduceItem] = []
            for item in items:
                if item.counts or item.segment.owner is not None:
                    rest.append(item)
                else:
                    by_dtype.setdefault(item.out.dtype, []).append(item)
            items = rest
            for same_dtype in by_dtype.values():
                pending = user.start(same_dtype, axis, collective, self._comm.traffic, divisor)
                pendings.append(self._comm.follow(pending, axis, collective))
        if items or not pendings:
            pendings.append(self._comm.start_reduce_scatter(items, axis, collective, divisor))
        return pendings

    def _start_storage(
        self, unit: "Unit", storage: Storage | GradientRows, params: list[ShardedParam]
    ) -> list[ReduceItem]:
        """Take the gradients of a storage's parameters; return the items to reduce."""
        if not params:
            return []
        grads = [param.gradient.take_partial() for param in params]
        reduce_dtype = params[0].gradient.reduce_dtype
        dtypes = [grad.dtype for grad in grads if grad is not None]
        dtype = reduce_dtype or reduce(promote_types, dtypes, storage.compute_dtype)
        # see Note [Dtype of a sum]
        sends_sum = reduce_dtype is None or dtype.itemsize < storage.compute_dtype.itemsize
        wire_dtype = dtype if sends_sum or unit.grads.has_local_sum else storage.compute_dtype
        is_replicated = not storage.shards_state
        layout = storage.layout
        num_counts = len(params) if self._comm.axes.num_ranks > 1 else 0
        # If counts are summed over replicas with the slices, one buffer has both: slices, counts.
        num_extra = num_counts if self._replicate and not is_replicated else 0
        buffer = storage.mean_memory.take_buffer(dtype, num_extra=num_extra)
        out, counts = buffer.split([buffer.numel() - num_extra, num_extra])
        if self._defers and len(params) < len(layout.params):
            out.zero_()  # so that the window's sums start at 0 for parameters trained later
        if num_counts != num_extra:
            counts = buffer.new_empty(num_counts)
        addends = {
            param.index: self._make_addend(param, grad, wire_dtype)
            for param, grad in zip(params, grads, strict=True)
        }
        items: list[ReduceItem] = []
        full_segments: list[tuple[Segment, torch.Tensor]] = []
        is_encoded = unit.precision.reduce_coding is not None
        for segment, indices in layout.segments_of(tuple(addends)):
            begin = segment.shard_offset
            if is_replicated:
                begin = segment.full_offset + segment.share(storage.rank)[0]
                full_numel = segment.full_numel(layout.num_ranks)
                full_segments.append((segment, out[segment.full_offset :][:full_numel]))
            share = out[begin : begin + segment.share_numel(storage.rank)]
            parts = tuple((layout.params[index].offset, addends[index]) for index in indices)
            codings: tuple[Coding | None, ...] = ()
            if is_encoded:
                codings = tuple(_coding_of(unit, layout.params[i].shape) for i in indices)
            items.append(ReduceItem(segment, parts, share, codings))
        if num_counts:
            items.append(self._count_item(params, counts))
        self._parts.append(_StorageSum(unit, storage, params, out, counts, full_segments))
        return items

    def _make_addend(
        self, param: ShardedParam, grad: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return this rank's flat addend for a parameter, in rank order; zeros if it has none."""
        if grad is None:
            return torch.zeros(prod(param.shape), dtype=dtype, device=self._comm.device)
        self._used_locally.add(param)
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        if self._predivisor != 1:
            grad = grad / self._predivisor
        return param.encoding.order_by_rank(grad).contiguous().view(-1)

    def _count_item(self, params: list[ShardedParam], counts: torch.Tensor) -> ReduceItem:
        """Return the item that counts the ranks with a gradient of each parameter.

        The same row of ones and zeros is sent to every rank, so that every rank gets the counts.
        """
        num_ranks = self._comm.axes.shard.size
        rows = counts.new_ones(num_ranks * len(params))
        missing = [i for i, param in enumerate(params) if param not in self._used_locally]
        if missing:
            rows.view(num_ranks, -1)[:, missing] = 0
        segment = even_segment(rows.numel(), num_ranks)
        return ReduceItem(segment, ((0, rows),), counts, counts=True)

    def buffers_in_flight(self, units: tuple[str, ...]) -> BuffersInFlight:
        """Return the sum's memory; ``units`` are the names of the bucket's units."""
        grads: list[torch.Tensor] = []
        count_rows: list[torch.Tensor] = []
        for item in self._items:
            addends = count_rows if item.counts else grads
            addends += [addend for _, addend in item.parts]
        staging = (
            [pending.holds for pending in self._pendings],
            [part.counts for part in self._parts],
            count_rows,
            [gather.holds for gather in self._gathers],
        )
        return BuffersInFlight(units, [part.out for part in self._parts], grads, staging)

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
        self._pendings = []
        self._items = []
        if self._defers:
            self._add_to_window()
            return
        for part in self._parts:
            if self._replicate is not None:
                self._sum_over_replicas(part)
            if self._settings.after_reduce is not None:
                for mean in part.means:
                    self._settings.after_reduce(mean)
            if part.full_segments:
                self._gathers.append(self._start_gather(part))
            else:
                part.start_evict()
                part.wait_evicted()  # so that the device holds the means of a few buckets only

    @torch.no_grad()
    def finish(self) -> dict[ShardedParam, torch.Tensor]:
        """Wait; return this rank's slices of the means."""
        self.wait()
        for gather in self._gathers:
            gather.wait()
        self._gathers = []
        for part in self._parts:
            part.start_evict()
        means: dict[ShardedParam, torch.Tensor] = {}
        for part in self._parts:
            means.update(self._means_of(part))
        return means

    def _sum_over_replicas(self, part: _StorageSum) -> None:
        axis = self._replicate
        assert axis is not None
        if isinstance(part.storage, Storage) and part.storage.unreduced is not None:
            torch.add(part.storage.unreduced.sums, part.out, out=part.out)
            part.storage.unreduced = None
            part.storage.mean_memory.drop_kept()
        collective = self._comm.collective_id("all_reduce", part.unit.name, part.unit.index)
        if not part.storage.shards_state:
            buffers = [*part.means, part.counts]
        else:  # the slices and their counts, which follow them in one buffer
            buffers = [part.out.as_strided((part.out.numel() + part.counts.numel(),), (1,))]
        for number, buffer in enumerate(buffers):
            codings = _codings_between(part, number)
            self._comm.all_reduce(buffer, axis, collective, self._divisor, codings)

    def _add_to_window(self) -> None:
        """Add the sums over shards to the unreduced sums of the window."""
        for part in self._parts:
            assert isinstance(part.storage, Storage)
            used = self._used_locally.intersection(part.params)
            unreduced = part.storage.unreduced
            if unreduced is None:
                sums = part.out.to(part.storage.master_dtype)
                part.storage.unreduced = Unreduced(sums, set(part.params), {*used})
                continue
            unreduced.sums.add_(part.out)
            unreduced.params.update(part.params)
            unreduced.used |= used
            # The sum is in other memory, so the buffer of these means need not stay.
            part.storage.mean_memory.drop_kept()
        self._parts = []

    def _start_gather(self, part: _StorageSum) -> Pending:
        """Start gathering the means to all ranks (stage 0)."""
        axis = self._comm.axes.shard
        items = []
        for segment, full in part.full_segments:
            share = full[slice(*segment.share(axis.rank))]
            items.append(GatherItem(segment, share, full, in_place=True))
        collective = self._comm.collective_id("all_gather", part.unit.name, part.unit.index)
        return self._comm.start_all_gather(items, axis, collective)

    def _means_of(self, part: _StorageSum) -> dict[ShardedParam, torch.Tensor]:
        """Return this rank's slices of the means of parameters that get one."""
        means = {}
        dtype = part.storage.master_dtype
        out = part.wait_evicted()
        counts = part.counts if part.counts.numel() else None
        used = _used_on_any_rank(part.params, self._used_locally, counts)
        if self._settings.zero_fill:
            used = set(part.params)
        for param in part.params:
            if param in used:
                shape = param.sharded._local_tensor.shape
                begin = out.storage_offset() + part.storage.shard_offset_of(param.index)
                mean = out.as_strided(shape, contiguous_stride(shape), begin)
                means[param] = mean if mean.dtype == dtype else mean.to(dtype)
        return means

    @property
    def nbytes(self) -> int:
        """Bytes of the means."""
        return sum(part.out.nbytes for part in self._parts)


def _identity_of(function: object) -> tuple[object, ...]:
    """Return the identity of a function or a bound method, whose object is made by each access."""
    return id(getattr(function, "__self__", function)), getattr(function, "__func__", None)


def _sums_in_half(unit: "Unit") -> bool:
    """Tell whether gradients of a unit are summed in float16."""
    parts: list[Storage | GradientRows] = [*unit.storages, *unit.grads.gradient_rows]
    dtypes = (unit.reduce_dtype_of(part.master_dtype) or part.compute_dtype for part in parts)
    return torch.float16 in dtypes


def _choose_predivisor(divisor: float) -> float:
    """Return the power of two by which addends in half precision are divided.

    Note [Half precision]
    A sum of float16 may overflow before it is divided. So the addends are divided by about the root
    of the divisor, and the sum by the rest. Source: ``_get_gradient_divide_factors`` in
    ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``.
    """
    predivisor = 1.0
    while divisor % predivisor == 0 and divisor / predivisor > predivisor:
        predivisor *= 2
    return predivisor


def _may_defer(units: Sequence["Unit"]) -> bool:
    """Tell whether sums over replicas may wait for a later micro-batch of the window."""
    first = units[0]
    replicate = first.grads.sum_settings.replicate_of(first.comm.axes)
    if replicate is None or replicate.size == 1 or first.engine is None:
        return False
    if first.engine.is_last_micro_batch:
        return False
    if first.settings.full_between_calls and first.grads.sum_settings.all_reduces:
        return False
    return all(unit.home is None and not unit.grads.gradient_rows for unit in units)


def _coding_of(unit: "Unit", shape: tuple[int, ...]) -> Coding | None:
    """Return the coding of a parameter's gradient; None for vectors, see Note [Blocks of codes]."""
    return unit.precision.reduce_coding if is_coded(shape) else None


def _codings_between(part: _StorageSum, number: int) -> list[tuple[int, int, Coding]]:
    """Return the ranges that replicas encode in the slices, or in segment ``number`` at stage 0.

    A range is (begin, end, coding); ranges ascend. The counts follow the last segment.
    """
    layout, rank = part.storage.layout, part.storage.rank
    segments = [segment for segment, _ in part.full_segments[number : number + 1]]
    ranges: list[tuple[int, int, Coding]] = []
    for param in part.params:
        coding = _coding_of(part.unit, layout.params[param.index].shape)
        piece = layout.piece(param.index, rank)
        segment = layout.segments[layout.params[param.index].segment]
        is_in_buffer = segment in segments or part.storage.shards_state
        if coding is not None and piece.numel and is_in_buffer:
            begin = piece.shard_offset - (segment.shard_offset if segments else 0)
            ranges.append((begin, begin + piece.numel, coding))
    return sorted(ranges, key=lambda coded_range: coded_range[0])


def _used_on_any_rank(
    params: Sequence[ShardedParam], used_locally: set[ShardedParam], counts: torch.Tensor | None
) -> set[ShardedParam]:
    """Return the ``params`` that had a gradient on any rank, by their counts."""
    if counts is None or used_locally.issuperset(params):
        return used_locally
    counted = zip(params, counts.tolist(), strict=True)
    return used_locally.union(param for param, count in counted if count)
