"""A user's own collectives, on one packed buffer per unit, as FSDP2 calls them.

`set_custom_all_gather` and `set_custom_reduce_scatter` set them. Shares are packed into one buffer
before the collective and unpacked after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm.coalesced import even_inputs
from shardwise.comm.pending import (
    CollectiveId,
    GatherItem,
    Pending,
    ReduceItem,
    collective_errors,
    key_of,
)
from shardwise.mesh import Axis
from shardwise.trace import Traffic


class _Allocator(Protocol):
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory to send or receive."""


class AllGather(_Allocator, Protocol):
    """torch's ``AllGather`` of FSDP2."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start the collective; return its work, or None when it is done."""


class ReduceScatter(_Allocator, Protocol):
    """torch's ``ReduceScatter`` of FSDP2."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
    ) -> dist.Work | None:
        """Start the collective; return its work, or None when it is done."""


@dataclass(frozen=True)
class Packed:
    """The transport of one unit's gathers by a user's all-gather."""

    all_gather: AllGather

    def start_all_gather(
        self, items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
    ) -> Pending:
        """Gather the segments along ``axis`` into place.

        **Cost** (ranks - 1) x the shares; two more copies of the segments. Segments of several
        dtypes travel as bytes.
        """
        items = [item for item in items if item.segment.shard_numel]
        key = key_of(collective, axis)
        if not items:
            return Pending(key, ())
        as_bytes = len({item.full.dtype for item in items}) > 1
        sources = [_flat(item.source, as_bytes) for item in items]
        dtype = sources[0].dtype
        device = sources[0].device
        packed = self.all_gather.allocate(
            (sum(s.numel() for s in sources),), dtype=dtype, device=device
        )
        torch.cat(sources, out=packed)
        output = self.all_gather.allocate((packed.numel() * axis.size,), dtype=dtype, device=device)
        traffic.add(
            f"{axis.name}.{collective.kind}", collective.unit, packed.nbytes * (axis.size - 1)
        )
        with collective_errors(key):
            work = self.all_gather(
                output_tensor=output, input_tensor=packed, group=axis.group, async_op=True
            )

        def unpack() -> None:
            rows = output.view(axis.size, -1).split([s.numel() for s in sources], dim=1)
            places = [_flat(item.full, as_bytes).view(axis.size, -1) for item in items]
            torch._foreach_copy_(places, list(rows))

        return Pending(key, [work] if work else [], unpack, (packed, output))


@dataclass(frozen=True)
class PackedSum:
    """The transport of sums by a user's reduce-scatter; see `unit.sums.UserReduceScatter`."""

    reduce_scatter: ReduceScatter

    def start(
        self,
        items: Sequence[ReduceItem],
        axis: Axis,
        collective: CollectiveId,
        traffic: Traffic,
        divisor: float,
    ) -> Pending:
        """Reduce segments of one dtype along ``axis``; divide the sums.

        **Cost** (ranks - 1) x the shares, padding included; a packed copy of the gradients.
        """
        widths = [item.segment.shard_numel for item in items]
        dtype = items[0].out.dtype
        device = items[0].out.device
        rows = [values.view(axis.size, -1) for values in even_inputs(items, axis.size)]
        packed = self.reduce_scatter.allocate(
            (sum(widths) * axis.size,), dtype=dtype, device=device
        )
        torch.cat(rows, dim=1, out=packed.view(axis.size, -1))
        out = self.reduce_scatter.allocate((sum(widths),), dtype=dtype, device=device)
        traffic.add(f"{axis.name}.{collective.kind}", collective.unit, out.nbytes * (axis.size - 1))
        key = key_of(collective, axis)
        with collective_errors(key):
            work = self.reduce_scatter(
                output_tensor=out, input_tensor=packed, group=axis.group, op=dist.ReduceOp.SUM
            )

        def unpack() -> None:
            for item, sums in zip(items, out.split(widths), strict=True):
                torch.div(sums[: item.out.numel()], divisor, out=item.out)

        return Pending(key, [work] if work else [], unpack, (packed, out))


def _flat(tensor: torch.Tensor, as_bytes: bool) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8) if as_bytes else tensor.view(-1)
