"""The gradients of one ``fully_shard`` call on their way to ``param.grad``.

Note [What is reduced]
All parameters of the unit that are trained, packed into one buffer, by one reduce-scatter; one
without a gradient on this rank takes part with zeros, as another rank may have one. Who has had
one is told by flags, once per pass, as in `engine.reductions`: where no rank had a gradient,
``param.grad`` stays None, unless ``set_reduce_scatter_unused_params`` asks for zeros. FSDP2 packs
what this rank has, and mixes up parameters where ranks differ.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.pending import Pending, Site
from shardwise.engine.schedule import ReduceQueue
from shardwise.errors import CollectiveError
from shardwise.interop.fsdp2.group import GroupUnit
from shardwise.interop.fsdp2.slot import GroupSlot
from shardwise.trace import span
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit


class GroupReductions:
    """What the engine gives units to when their backward has passed."""

    def __init__(
        self,
        max_in_flight: int,
        units: Callable[[], Sequence[GroupUnit]],
        is_last: Callable[[], bool],
    ) -> None:
        self._units = units
        self._queue: ReduceQueue[GroupUnit, GroupReduction] = ReduceQueue(
            lambda units: GroupReduction(units[0], is_last),
            0,
            max_in_flight,
            settles_at_close=True,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the means that are not in ``param.grad`` yet."""
        return sum(r.out.nbytes for r in self._queue.in_flight if r.out is not None)

    def is_waiting(self, unit: Unit) -> bool:
        """Tell that no unit waits for others: each is reduced alone, at once."""
        return False

    def add(self, unit: Unit) -> None:
        """Reduce a unit's gradients, which may wait for an earlier reduction."""
        assert isinstance(unit, GroupUnit)
        is_shared = unit.comm.axes.num_ranks > 1  # another rank may have a gradient
        if is_shared or any(s.has_grad for s in unit.slots) or unit.settings.zero_fill:
            self._queue.add(unit)

    def keep(self, unit: Unit) -> None:
        """Keep a unit's gradients on this rank, added to those of the window so far."""
        assert isinstance(unit, GroupUnit)
        for slot in unit.slots:
            slot.keep_grad(slot.reduce_dtype)
        unit.enter_grad_state(GradState.PARTIAL)
        unit.has_local_sum = True

    def close(self) -> None:
        """Complete what is under way, at the end of a backward pass: ``param.grad`` is there."""
        self._queue.close()
        reductions, self._queue.settled = self._queue.settled, []
        if not reductions:
            return
        groups: dict[tuple[int, ...], list[GroupUnit]] = {}
        for unit in self._units():
            groups.setdefault(tuple(id(a.group) for a in unit.spread.axes.all), []).append(unit)
        for units in groups.values():
            _deliver_unsure([r for r in reductions if r.unit in units], units)

    def finish(self) -> None:
        """Complete every reduction."""
        self.close()

    def drop(self) -> None:
        """Complete every reduction and forget the results, after a pass that was cut short."""
        for reduction in self._queue.in_flight:
            reduction.is_dropped = True
        for reduction in self._queue.settled:
            reduction.unsure.clear()
            for slot in reduction.first_grads:
                slot.param.grad = None
        self.close()


class GroupReduction:
    """One unit's gradients, from where autograd wrote them to ``param.grad``."""

    def __init__(self, unit: GroupUnit, is_last: Callable[[], bool]) -> None:
        self.unit = unit
        self._is_last = is_last  # micro-batch of a window, whatever its settings say
        self.first_grads: list[GroupSlot] = []  # that had none before this reduction
        self.out: torch.Tensor | None = None
        self.is_dropped = False
        self.slots: list[GroupSlot] = []
        self.used_here: set[GroupSlot] = set()
        self.unsure: dict[GroupSlot, torch.Tensor] = {}  # used elsewhere, or nowhere
        self._pending: Pending | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Pack the gradients and hand them to the transport. **State** PARTIAL -> REDUCING."""
        unit, settings = self.unit, self.unit.settings
        for state in (GradState.PARTIAL, GradState.REDUCING):
            unit.enter_grad_state(state)
        takes_zeros = settings.zero_fill or unit.comm.axes.num_ranks > 1
        for slot in unit.slots:
            wanted = slot.has_grad or (takes_zeros and slot.param.requires_grad)
            if wanted and slot.leaf is not None:
                self.slots.append(slot)
        unit.has_local_sum = False
        self.used_here = {slot for slot in self.slots if slot.has_grad or settings.zero_fill}
        if not self.slots:
            return
        axis = unit.spread.axes.shard
        with span("reduce", unit.name):
            packed = self._pack(axis.size)
            self._before, self._after, op = _division(unit, packed.dtype)
            if self._before != 1:
                packed.div_(self._before)
            if axis.size == 1:
                self.out = packed
                return
            self.out = self._allocate(packed.numel() // axis.size, packed.dtype)
            site = unit.comm.site("reduce_scatter", unit.name, unit.index)
            self._pending = unit.comm.scatter_packed(
                packed, self.out, axis, site, op, settings.reduce_scatter
            )

    def _pack(self, num_ranks: int) -> torch.Tensor:
        """Return the gradients, chunk by chunk, in the dtype that they are reduced in."""
        grads = [slot.take_grad() for slot in self.slots]
        dtypes = [s.reduce_dtype or g.dtype for s, g in zip(self.slots, grads, strict=True)]
        dtype = reduce(torch.promote_types, dtypes)
        widths = [prod(slot.padded_size) for slot in self.slots]
        packed = self._allocate(sum(widths) * num_ranks, dtype)
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        columns = packed.view(num_ranks, -1).split(widths, dim=1)
        for slot, grad, column in zip(self.slots, grads, columns, strict=True):
            for rank, chunk in enumerate(_chunks(grad, num_ranks, slot)):
                place = column[rank]
                if chunk.numel():
                    places.append(place[: chunk.numel()].view(chunk.shape))
                    sources.append(chunk)
                place[chunk.numel() :].zero_()
        torch._foreach_copy_(places, sources)
        return packed

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        transfer = self.unit.settings.reduce_scatter
        if transfer is None:
            return torch.empty(numel, dtype=dtype, device=self.unit.device)
        return transfer.allocate((numel,), dtype=dtype, device=self.unit.device)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait; sum over replicas; divide; set ``param.grad``. **State** REDUCING -> REDUCED."""
        unit = self.unit
        if self._pending is not None:
            with span("wait_reduce", unit.name):
                self._pending.wait()
            self._pending = None
        if self.out is not None and not self.is_dropped:
            values = self._over_replicas(self.out)
            if values is not None:
                self._deliver(values)
        self.out = None
        if unit.grad_state is GradState.REDUCING:
            unit.enter_grad_state(GradState.REDUCED)
            unit.enter_grad_state(GradState.EMPTY)

    def _over_replicas(self, values: torch.Tensor) -> torch.Tensor | None:
        """Complete the sum over the replicate axis; None while only shards are to be summed."""
        unit = self.unit
        axis = unit.spread.axes.replicate
        if axis is None:
            return values
        if unit.unreduced is not None:
            values += unit.unreduced
            unit.unreduced = None
        if not unit.settings.all_reduces and not self._is_last():
            unit.unreduced = values
            return None
        site = unit.comm.site("all_reduce", unit.name, unit.index)
        _, _, op = _division(unit, values.dtype)
        unit.comm.sum_replicas(
            values, axis, site, dist.ReduceOp.SUM if unit.settings.divisor else op
        )
        return values

    def _deliver(self, values: torch.Tensor) -> None:
        if self.unit.settings.after_reduce is not None:
            self.unit.settings.after_reduce(values)
        if self._after != 1:
            values.div_(self._after)
        pieces = self.unit.bring_home(values).split([prod(s.padded_size) for s in self.slots])
        for slot, piece in zip(self.slots, pieces, strict=True):
            mean = piece[: prod(slot.local_shape)].to(slot.param.dtype)
            if slot in self.used_here:
                if slot.param.grad is None:
                    self.first_grads.append(slot)
                slot.deliver(mean)
            else:
                self.unsure[slot] = mean


def _deliver_unsure(reductions: list[GroupReduction], units: Sequence[GroupUnit]) -> None:
    """Ask who has had a gradient; give what other ranks had to this rank's parameters too.

    ``units`` are all that share the reductions' mesh, whether they ran or not, so that the flags
    are as many on all ranks.

    **Raises** CollectiveError where ranks have reduced different units, which the backend matches
    by their order: on the CPU only, as elsewhere the host would wait for the device.
    """
    comm, device = units[0].comm, units[0].device
    if comm.axes.num_ranks == 1:
        return
    reduced = {id(reduction.unit) for reduction in reductions}
    used = set().union(*(reduction.used_here for reduction in reductions))
    slots = [slot for unit in units for slot in unit.slots]
    here = [id(unit) in reduced for unit in units]
    said = [*here, *(not was for was in here), *(slot in used for slot in slots)]
    flags = torch.tensor(said, dtype=torch.uint8, device=device)
    for pending in comm.start_any(flags, Site("flags", "(all)", 0)):
        pending.wait()
    unsure = {slot: mean for r in reductions for slot, mean in r.unsure.items()}
    if not unsure and device.type != "cpu":
        return  # and nothing waits for the device
    found = flags.tolist()
    some, not_all, anywhere = found[: len(units)], found[len(units) :], found[2 * len(units) :]
    differ = [u.name or "(root)" for u, a, b in zip(units, some, not_all, strict=False) if a and b]
    if differ:
        raise CollectiveError(
            f"rank {dist.get_rank()}: the gradients of {', '.join(map(repr, differ))} were reduced "
            "on some ranks only, and have met those of other modules: all gradients of this pass "
            "are wrong. Every rank must run the same modules of fully_shard, in the same order"
        )
    for slot, flag in zip(slots, anywhere, strict=True):
        if flag and slot in unsure:
            slot.deliver(unsure[slot])


def _chunks(grad: torch.Tensor, num_ranks: int, slot: GroupSlot) -> list[torch.Tensor]:
    """Return every rank's part of a full gradient."""
    rows = slot.padded_size[slot.dim]
    found = list(grad.split(rows, dim=slot.dim)) if rows else []
    return found + [grad.new_empty(0)] * (num_ranks - len(found))


def _division(unit: GroupUnit, dtype: torch.dtype) -> tuple[float, float, Any]:
    """Return what the addends and the sums are divided by, and the operation of the collective.

    In fp32 and bf16 the backend takes the mean. Half precision divides by about the root of the
    number of ranks before and after, so that neither addends nor sums leave its range.
    """
    sizes = [axis.size for axis in unit.spread.axes.all]
    divisor = unit.settings.divisor
    is_wide = dtype in (torch.float32, torch.bfloat16)
    if divisor is None and is_wide and not unit.settings.sums_only and prod(sizes) > 1:
        return 1, 1, dist.ReduceOp.AVG
    if prod(sizes) == 1:
        return 1, divisor or 1, dist.ReduceOp.SUM
    divisor = float(prod(sizes)) if divisor is None else divisor
    if is_wide:
        return 1, divisor, dist.ReduceOp.SUM
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, divisor / before, dist.ReduceOp.SUM
