"""From full gradients to slices of their mean: one reduction for one bucket of units."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import GatherItem, Pending, ReduceItem
from shardwise.layout.segments import Segment
from shardwise.trace import span
from shardwise.unit.states import GradState
from shardwise.unit.storage import Storage
from shardwise.unit.tensor import ShardTensor
from shardwise.unit.unit import Slot, Unit


@dataclass
class _Part:
    """The reduction of one storage: which slots take part, and where their means will lie.

    ``out`` is the buffer of this rank's slices ([S]), or of everything where state is replicated
    ([P]); ``wholes`` are then the segments in it, each to be gathered.
    """

    unit: Unit
    storage: Storage
    slots: list[Slot]
    out: torch.Tensor
    wholes: list[tuple[Segment, torch.Tensor]]
    brought: tuple[torch.Tensor, Pending] | None = None  # on their way to the slices' home

    def start_evict(self) -> None:
        """Start bringing the means to where the slices live, unless they are on their way."""
        if self.brought is None:
            self.brought = self.storage.start_evict(self.out)

    def evicted(self) -> torch.Tensor:
        """Return the means where the slices live, once they are there."""
        assert self.brought is not None
        self.brought[1].wait()
        return self.brought[0]


class Reduction:
    """Gradients of one or several units on their way to ``p.grad``."""

    def __init__(self, units: Sequence[Unit], comm: Comm, reduce_dtype: torch.dtype | None) -> None:
        self.units = list(units)
        self._names = [unit.name for unit in units]
        self.used_here: set[Slot] = set()
        self._comm = comm
        self._reduce_dtype = reduce_dtype
        self._parts: list[_Part] = []
        self._pending: Pending | None = None
        self._gathers: list[Pending] = []

    def start(self) -> None:
        """Hand the gradients to the transport, from where autograd wrote them.

        **State** PARTIAL -> REDUCING. A parameter without a gradient here contributes zeros, as
        other ranks may have one; whether any has is settled by the flags (see runtime).
        """
        items: list[ReduceItem] = []
        with span("reduce", *self._names), torch.no_grad():
            for unit in self.units:
                unit.enter_grad_state(GradState.PARTIAL)
                unit.enter_grad_state(GradState.REDUCING)
                for storage in unit.storages:
                    items += self._start_storage(unit, storage)
                unit.has_local_sum = False
            site = self._comm.site("reduce_scatter", self.units[0].name, self.units[0].index)
            axes = self._comm.axes
            divisor = 1 if axes.replicate else axes.num_ranks
            self._pending = self._comm.start_reduce_scatter(items, axes.shard, site, divisor)

    def _start_storage(self, unit: Unit, storage: Storage) -> list[ReduceItem]:
        slots = [s for s in unit.slots if s.storage is storage and s.leaf.requires_grad]
        if not slots:
            return []
        dtype = self._reduce_dtype or storage.master.dtype
        wire_dtype = dtype if unit.has_local_sum else storage.full.dtype
        grads = [self._take(slot, wire_dtype) for slot in slots]
        replicated = not storage.stage.shards_state
        layout = storage.layout
        out = storage.grad_buffer(dtype)
        parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for slot, grad in zip(slots, grads, strict=True):
            placed = layout.params[slot.index]
            parts.setdefault(placed.segment, []).append((placed.offset, grad))
        items, wholes = [], []
        for number, segment in enumerate(layout.segments):
            if number in parts and segment.numel:
                begin = segment.shard_offset
                if replicated:
                    begin = segment.full_offset + storage.rank * segment.slot_numel
                    end = segment.full_offset + segment.slot_numel * layout.num_ranks
                    wholes.append((segment, out[segment.full_offset : end]))
                place = out[begin : begin + segment.slot_numel]
                items.append(ReduceItem(segment, tuple(parts[number]), place))
        self._parts.append(_Part(unit, storage, slots, out, wholes))
        return items

    def _take(self, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        grad = slot.take_partial(dtype)
        if grad is not None:
            self.used_here.add(slot)
            return grad
        return torch.zeros(slot.leaf.numel(), dtype=dtype, device=slot.leaf.device)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the addends and sum them; start what comes second.

        Over a replicate axis the slices are summed second; at stage 0 the mean is gathered, so
        that every rank has all of it.
        """
        if self._pending is None:
            return
        with span("wait_reduce", *self._names):
            self._pending.wait()
            self._pending = None
            for part in self._parts:
                if self._comm.axes.replicate is not None:
                    self._sum_over_replicas(part)
                if part.wholes:
                    self._gathers.append(self._start_gather(part))
                else:
                    part.start_evict()

    def finish(self) -> dict[Slot, torch.Tensor]:
        """Wait; return this rank's slice of the mean for every parameter that took part."""
        self.settle()
        for gather in self._gathers:
            gather.wait()
        self._gathers = []
        for part in self._parts:
            part.start_evict()
        found: dict[Slot, torch.Tensor] = {}
        for part in self._parts:
            found.update(self._means(part))
        return found

    def _sum_over_replicas(self, part: _Part) -> None:
        axis = self._comm.axes.replicate
        assert axis is not None
        site = self._comm.site("all_reduce", part.unit.name, part.unit.index)
        slots = [whole[slice(*segment.bounds(part.storage.rank))] for segment, whole in part.wholes]
        for slot in slots or [part.out]:
            self._comm.all_reduce(slot, axis, site, self._comm.axes.num_ranks)

    def _start_gather(self, part: _Part) -> Pending:
        axis = self._comm.axes.shard
        items = []
        for segment, whole in part.wholes:
            begin = axis.rank * segment.slot_numel
            own = whole[begin : begin + segment.slot_numel]
            items.append(GatherItem(segment, own, whole, True))
        site = self._comm.site("all_gather", part.unit.name, part.unit.index)
        return self._comm.start_all_gather(items, axis, site)

    def _means(self, part: _Part) -> dict[Slot, torch.Tensor]:
        means = {}
        dtype = part.storage.master.dtype
        out = part.evicted()
        for slot in part.slots:
            begin = part.storage.place_in_shards(slot.index)
            mean = out[begin : begin + slot.cut.hi - slot.cut.lo].view(slot.cut.local_shape)
            means[slot] = mean if mean.dtype == dtype else mean.to(dtype)
        return means

    @property
    def nbytes(self) -> int:
        """Bytes of the means, as long as the reduction is under way."""
        return sum(part.out.nbytes for part in self._parts)


@torch.no_grad()
def add_to_grad(slot: Slot, mean: torch.Tensor) -> None:
    """Give ``p.grad`` the reduced mean, or add it to what is there, as autograd would."""
    slot.grad_hooks.is_due = True
    if slot.grad is None:
        slot.grad = ShardTensor.wrap(mean, slot.cut)
    else:
        slot.storage.forget_grad_buffer()  # the sum lies elsewhere; do not keep two
        grad = slot.grad
        (grad._local_tensor if isinstance(grad, ShardTensor) else grad).add_(mean)
