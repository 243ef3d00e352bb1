"""One collective of the process group for all tensors of a unit, as in FSDP2.

Tools and tests that count FSDP2's collectives, or replace them (`set_custom_all_gather`), expect
one all-gather and one reduce-scatter per group of parameters. So a unit's shares are packed into
one buffer before, and unpacked after.

Note [Gathers with the unit's number]
gloo matches collectives by their order alone: ranks that run different units of one size would
take each other's parameters, and with different sizes gloo would abort the process. So on gloo,
unless a tool counts or replaces collectives, a gather consists of messages that carry the unit's
number, straight into place. Ranks that run different units then wait, and `hangs` names them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from shardwise.comm import point_to_point
from shardwise.comm.pending import (
    CollectiveId,
    GatherItem,
    Pending,
    blocking_collective,
    collective_errors,
    key_of,
)
from shardwise.comm.torch_collectives import CountedCollectives
from shardwise.mesh import Axis
from shardwise.trace import Traffic

Reduction = dist.ReduceOp | dist.ReduceOp.RedOpType


class Transfer(Protocol):
    """A user's own collective: torch's ``AllGather`` or ``ReduceScatter``."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory to send or receive."""

    def __call__(self, *args: object, **kwargs: object) -> dist.Work | None:
        """Start the collective; return its work, or None when it is done."""


@dataclass(frozen=True)
class Packed:
    """The transport of one unit: each gather on one packed buffer, by torch's or the user's own."""

    all_gather: Transfer | None = None

    def start_all_gather(
        self, items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
    ) -> Pending:
        """Gather the segments along ``axis`` into place.

        **Cost** (ranks - 1) x the shares; two more copies of the segments, unless there is
        only one. Segments of several dtypes travel as bytes.
        """
        transfer = self.all_gather
        items = [item for item in items if item.segment.shard_numel]
        if not items:
            return Pending(key_of(collective, axis), ())
        is_gloo = "gloo" in axis.backend
        if is_gloo and transfer is None and _GATHER is gather_function() and not _is_traced():
            return point_to_point.start_all_gather(items, axis, collective, traffic)
        as_bytes = len({item.full.dtype for item in items}) > 1
        sources = [_flat(item.source, as_bytes) for item in items]
        dtype, device = sources[0].dtype, sources[0].device
        if len(items) == 1 and transfer is None:
            packed, output = sources[0], items[0].full
        else:
            packed = allocate(transfer, sum(s.numel() for s in sources), dtype, device)
            torch.cat(sources, out=packed)
            output = allocate(transfer, packed.numel() * axis.size, dtype, device)
        traffic.add(
            f"{axis.name}.{collective.kind}", collective.unit, packed.nbytes * (axis.size - 1)
        )
        key = key_of(collective, axis)
        with collective_errors(key):
            work = _all_gather(transfer, output, packed, axis.group)

        def unpack() -> None:
            rows = output.view(axis.size, -1).split([s.numel() for s in sources], dim=1)
            places = [_flat(item.full, as_bytes).view(axis.size, -1) for item in items]
            torch._foreach_copy_(places, list(rows))

        finish = None if output is items[0].full else unpack
        return Pending(key, [work] if work else [], finish, (packed, output))


def start_sum(
    packed: torch.Tensor,
    out: torch.Tensor,
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    op: Reduction,
    transfer: Transfer | None,
) -> Pending:
    """Reduce ``packed`` (ranks x numel) to this rank's ``out`` along ``axis``."""
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, out.nbytes * (axis.size - 1))
    key = key_of(collective, axis)
    with collective_errors(key):
        if transfer is not None:
            work = transfer(output_tensor=out, input_tensor=packed, group=axis.group, op=op)
        else:
            work = _reduce_scatter()(
                output=out, input=packed, group=axis.group, op=op, async_op=True
            )
    return Pending(key, [work] if work else [], keep=(packed, out))


def sum_replicas(
    values: torch.Tensor, axis: Axis, collective: CollectiveId, traffic: Traffic, op: Reduction
) -> None:
    """Reduce a buffer over ``axis`` in place, with one all-reduce of the backend."""
    traffic.add(f"{axis.name}.all_reduce", collective.unit, 2 * values.nbytes)
    with blocking_collective(key_of(collective, axis)):
        dist.all_reduce(values, group=axis.group, op=op)


def sends_as_told(transfer: Transfer | None) -> bool:
    """Tell whether a reduce-scatter takes any numbers, as torch's own does, and not a user's.

    A user's may send fewer bits, by the largest number, or look at how much is sent.
    """
    return transfer is None and _reduce_scatter() is _REDUCE_SCATTER


def start_counts(
    counts: torch.Tensor, axis: Axis, collective: CollectiveId, traffic: Traffic
) -> Pending:
    """Sum a few numbers over ``axis``, in place, beside gradients that a user's own sums."""
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, 2 * counts.nbytes)
    key = key_of(collective, axis)
    with collective_errors(key):
        work = dist.all_reduce(counts, group=axis.group, async_op=True)
    return Pending(key, [work] if work else [], keep=(counts,))


def waited_for(tensor: Any) -> Any:
    """Return a tensor that a functional collective is not writing any more."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _flat(tensor: torch.Tensor, as_bytes: bool) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8) if as_bytes else tensor.view(-1)


def allocate(
    transfer: Transfer | None, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return memory for a collective, from the user's ``transfer`` if there is one."""
    if transfer is None:
        return torch.empty(numel, dtype=dtype, device=device)
    return transfer.allocate((numel,), dtype=dtype, device=device)


def _all_gather(
    transfer: Transfer | None, output: torch.Tensor, packed: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    if transfer is not None:
        return transfer(output_tensor=output, input_tensor=packed, group=group, async_op=True)
    return gather_function()(output, packed, group=group, async_op=True)


def gather_function() -> Callable[..., dist.Work | None]:
    """Return torch's all-gather into one tensor; the old name warns in 2.13, 2.11 has no other."""
    found: Callable[..., dist.Work | None] = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )
    return found


_GATHER = gather_function()  # another one at run time belongs to a tool that counts


def _is_traced() -> bool:
    """Tell whether a mode looks at every operation, as torch's `CommDebugMode` does.

    The mode of `debug.counting` does not count collectives of this room.
    """
    num = torch._C._len_torch_dispatch_stack()
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(num))
    return any(not isinstance(mode, CountedCollectives) for mode in modes)


def _reduce_scatter() -> Callable[..., dist.Work | None]:
    found: Callable[..., dist.Work | None] = (
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    )
    return found


_REDUCE_SCATTER = _reduce_scatter()  # another one at run time belongs to a tool that counts
