"""Sums by one reduce-scatter of the backend on one packed buffer per unit, as in FSDP2.

Note [Units of one size]
gloo matches reductions by their order alone. So a unit's number is sent with its gradients, one
element per bit, beside an element that is one on every rank. A bit that only some ranks have set
shows that they have reduced different units. A user's reduce-scatter gets the gradients alone, as
from FSDP2, because it may send fewer bits, scaled by the largest number. The counts are then summed
separately.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.packed import (
    Transfer,
    allocate,
    sends_as_told,
    start_counts,
    start_sum,
    sum_replicas,
)
from shardwise.comm.pending import Pending
from shardwise.errors import CollectiveError
from shardwise.unit.param import ShardedParam
from shardwise.unit.sums import Held, counted_anywhere

_NUMBER_BITS = 12  # of a unit's number; distinguishes 1 << 12 units, as in comm.collectives
_COUNTS_ROUND_TO = 32  # so that units of equal size have the same number of counts


@dataclass(frozen=True)
class BackendSum:
    """A reduction of one unit's gradients.

    ``reduce_scatter`` is a user's collective. ``divisor`` divides the sum; None means the number of
    ranks. ``sums_only``: the collective sums, and a separate operation divides. ``all_reduces``:
    every micro-batch is reduced over the replicate axis too. ``after_reduce`` is called with the
    reduced values before their division.
    """

    reduce_scatter: Transfer | None = None
    divisor: float | None = None
    sums_only: bool = False
    zero_fill: bool = False
    all_reduces: bool = True
    in_param_dtype: bool = False
    after_reduce: Callable[[torch.Tensor], Any] | None = None

    def start(self, units: Sequence[Any]) -> "_Running":
        """Pack the gradients and pass them to the transport."""
        (unit,) = units
        return _Running(unit, self)


class _Running:
    """The sum of one unit."""

    def __init__(self, unit: Any, how: BackendSum) -> None:
        self._unit = unit
        self._how = how
        self._comm = unit.comm
        self._completes = how.all_reduces or unit.scheduler.is_last_micro_batch
        self._out: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._counted: tuple[torch.Tensor, Pending] | None = None  # apart from the gradients
        self._is_shared = self._comm.axes.num_ranks > 1  # another rank may have a gradient
        takes_zeros = how.zero_fill or self._is_shared
        self._params: list[ShardedParam] = []
        for param in unit.params:
            wanted = param.has_partial or (takes_zeros and param.is_trained)
            if wanted and param.full is not None:
                self._params.append(param)
        self._used_here = {s for s in self._params if s.has_partial or how.zero_fill}
        if self._params:
            self._start()

    def _start(self) -> None:
        axis, counts = self._comm.axes.shard, self._counts()
        apart = axis.size > 1 and not sends_as_told(self._how.reduce_scatter)
        packed = self._pack(axis.size, [] if apart else counts)
        self._before, self._after, self._op = _division(self._how, self._comm.axes, packed.dtype)
        if self._before != 1:
            packed.div_(self._before)
        if axis.size == 1:
            self._out = packed
            return
        self._out = self._allocate(packed.numel() // axis.size, packed.dtype)
        collective = self._comm.collective_id("reduce_scatter", self._unit.name, self._unit.index)
        pending = start_sum(
            packed,
            self._out,
            axis,
            collective,
            self._comm.traffic,
            self._op,
            self._how.reduce_scatter,
        )
        self._pending = self._comm.follow(pending, axis, collective)
        if apart:
            said = torch.tensor(counts, dtype=packed.dtype, device=packed.device)
            collective = self._comm.collective_id("counts", self._unit.name, self._unit.index)
            pending = start_counts(said, axis, collective, self._comm.traffic)
            self._counted = said, pending

    def _pack(self, num_ranks: int, counts: list[float]) -> torch.Tensor:
        """Return gradients and counts, packed chunk by chunk in the dtype of the reduction."""
        grads = [param.take_partial() for param in self._params]
        dtypes = [
            param.reduce_dtype or (param.full if grad is None else grad).dtype
            for param, grad in zip(self._params, grads, strict=True)
        ]
        dtype = reduce(torch.promote_types, dtypes)
        widths = [*self._widths(), len(counts)]
        packed = self._allocate(sum(widths) * num_ranks, dtype)
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        *columns, behind = packed.view(num_ranks, -1).split(widths, dim=1)
        for param, grad, column in zip(self._params, grads, columns, strict=True):
            if grad is None:
                column.zero_()
                continue
            for rank, chunk in enumerate(_chunks(grad, num_ranks, param)):
                place = column[rank]
                if chunk.numel():
                    places.append(place[: chunk.numel()].view(chunk.shape))
                    sources.append(chunk)
                place[chunk.numel() :].zero_()
        if places:
            torch._foreach_copy_(places, sources)
        if counts:
            behind.copy_(torch.tensor(counts, dtype=dtype), non_blocking=True)
        return packed

    def _widths(self) -> list[int]:
        return [prod(param.padded_size) for param in self._params]

    def _counts(self) -> list[float]:
        """Return one, the bits of the unit's number, and one or zero per parameter: used or not."""
        if not self._is_shared:
            return []
        number = [self._unit.index >> bit & 1 for bit in range(_NUMBER_BITS)]
        counts = [1.0, *number, *(param in self._used_here for param in self._params)]
        return counts + [0.0] * (-len(counts) % _COUNTS_ROUND_TO)

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(self._how.reduce_scatter, numel, dtype, self._comm.device)

    def held(self, units: tuple[str, ...]) -> Held:
        """Return the sum's memory."""
        means = [] if self._out is None else [self._out]
        return Held(units, means, [], None if self._pending is None else self._pending.holds)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the sums over shards."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._counted is not None and self._out is not None:
            counts, pending = self._counted
            pending.wait()
            self._out, self._counted = torch.cat([self._out, counts]), None

    @torch.no_grad()
    def finish(self) -> dict[ShardedParam, torch.Tensor]:
        """Complete the sum and divide; return this rank's slices of the means.

        **Raises** CollectiveError if ranks have reduced different units. It checks on the CPU only;
        elsewhere the host would wait for the device.
        """
        self.wait()
        values, self._out = self._out, None
        if values is None or not self._over_replicas(values):
            return {}
        widths = self._widths()
        values, counts = values.split([sum(widths), values.numel() - sum(widths)])
        if self._how.after_reduce is not None:
            self._how.after_reduce(values)
        if self._after != 1:
            values.div_(self._after)
        used = self._used_here
        if counts.numel():
            if counts.device.type == "cpu":
                self._check_number(counts.tolist())
            first = 1 + _NUMBER_BITS
            counts = counts[first : first + len(self._params)]
            used = counted_anywhere(self._params, used, counts)
        pieces = self._at_home(values).split(widths)
        return {
            param: _mean(param, piece)
            for param, piece in zip(self._params, pieces, strict=True)
            if param in used
        }

    def drop(self) -> None:
        """Wait, without completing the sum over replicas."""
        self.wait()
        self._out = None

    def _over_replicas(self, values: torch.Tensor) -> bool:
        """Complete the sum over the replicate axis; return False if only shards are summed yet."""
        unit = self._unit
        axis = self._comm.axes.replicate
        if axis is None:
            return True
        if unit.unreduced is not None:
            values += unit.unreduced
            unit.unreduced = None
        if not self._completes:
            unit.unreduced = values
            return False
        collective = self._comm.collective_id("all_reduce", unit.name, unit.index)
        op = dist.ReduceOp.SUM if self._how.divisor else self._op
        sum_replicas(values, axis, collective, self._comm.traffic, op)
        return True

    def _check_number(self, counts: list[float]) -> None:
        """Refuse a sum of different units. See Note [Units of one size]."""
        one, *number = counts[: 1 + _NUMBER_BITS]
        if any(bit not in (0, one) for bit in number):
            name = self._unit.name or "(root)"
            raise CollectiveError(
                f"rank {dist.get_rank()}: the gradients of '{name}' have met those of another "
                "module, which other ranks reduced meanwhile: all gradients of this pass are "
                "wrong. Every rank must run the same modules of fully_shard, in the same order"
            )

    def _at_home(self, values: torch.Tensor) -> torch.Tensor:
        home = self._unit.home
        if home is None:
            return values
        brought, arrival = home.start_evict(values, values.dtype)
        arrival.wait()
        found: torch.Tensor = brought
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the means."""
        return 0 if self._out is None else self._out.nbytes


def _mean(param: ShardedParam, piece: torch.Tensor) -> torch.Tensor:
    local_shape = param.sharded._local_tensor.shape
    return piece[: local_shape.numel()].to(param.sharded.dtype).view(local_shape)


def _chunks(grad: torch.Tensor, num_ranks: int, param: ShardedParam) -> list[torch.Tensor]:
    """Return every rank's part of a full gradient."""
    rows = param.padded_size[param.dim]
    found = list(grad.split(rows, dim=param.dim)) if rows else []
    return found + [grad.new_empty(0)] * (num_ranks - len(found))


def _division(how: BackendSum, axes: Any, dtype: torch.dtype) -> tuple[float, float, Any]:
    """Return the divisors of the addends and of the sums, and the operation of the collective.

    In fp32 and bf16 the backend takes the mean. In half precision the addends and the sums are each
    divided by about the root of the number of ranks, so that neither leaves the range.
    """
    num_ranks, divisor = axes.num_ranks, how.divisor
    is_wide = dtype in (torch.float32, torch.bfloat16)
    if divisor is None and is_wide and not how.sums_only and num_ranks > 1:
        return 1, 1, dist.ReduceOp.AVG
    if num_ranks == 1:
        return 1, divisor or 1, dist.ReduceOp.SUM
    divisor = float(num_ranks) if divisor is None else divisor
    if is_wide:
        return 1, divisor, dist.ReduceOp.SUM
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, divisor / before, dist.ReduceOp.SUM
