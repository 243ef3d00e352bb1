"""Differentiable collectives on activations: parts of sequences, tokens of experts."""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm.pending import CollectiveId, blocking_collective, key_of
from shardwise.mesh import Axis
from shardwise.trace import Traffic

# The old name warns in torch 2.13; 2.11 has no other.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Collectives of one axis in forward, and those of their gradients in backward.

    A module keeps it as an attribute, so that `stats()` counts its `traffic`. ``name`` describes
    the content for errors, in parentheses. ``replicas`` is the exchange over the ranks that have
    the same rows to send, if there are several; both count in one `traffic`.
    """

    def __init__(self, axis: Axis, name: str, replicas: "Exchange | None" = None) -> None:
        self.axis = axis
        self.name = name
        self.replicas = replicas
        self.traffic: Traffic = Traffic() if replicas is None else replicas.traffic

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an exchange over the same ranks for a copy of the module, with its own counts."""
        return type(self)(self.axis, self.name, copy.deepcopy(self.replicas, memo))

    def all_gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts, which have one shape, stacked in rank order.

        **Cost** sends numel x (ranks - 1); its gradient, summed in rank order in fp32, as much.
        """
        if self.axis.size == 1:
            return part[None]
        gathered: Tensor = _Gather.apply(part, self)
        return gathered

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``sent[r]`` rows to each rank r, in this order; return what all sent to this one.

        **Cost** sends all rows that are for other ranks; the gradient takes the reverse path.
        """
        if self.axis.size == 1:
            return rows
        arrived: Tensor = _AllToAll.apply(rows, self, sent, received)
        return arrived

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's share of rows that are equal on all ranks; the last may have fewer.

        **Cost** nothing is sent in forward; the gradient is gathered to all ranks.
        """
        if self.axis.size == 1:
            return whole
        part: Tensor = _TakeShare.apply(whole, self)
        return part

    def whole(self, part: Tensor, num_rows: int) -> Tensor:
        """Return on all ranks the ``num_rows`` rows of which each has its `part`.

        **Cost** an all-gather; of the gradient, equal on all ranks, each takes its share.
        """
        if self.axis.size == 1:
            return part
        whole: Tensor = _JoinShares.apply(part, self, num_rows)
        return whole

    @torch.no_grad()
    def total(self, counts: Tensor) -> Tensor:
        """Return the sum of all ranks' integers. **Cost** one all-reduce of them; no gradient."""
        if self.axis.size == 1:
            return counts
        total = counts.clone()
        self.count("all_reduce", counts.nbytes)
        with blocking_collective(key_of(CollectiveId("all-reduce", self.name, 0), self.axis)):
            dist.all_reduce(total, group=self.axis.group)
        return total

    def _share(self, num_rows: int) -> tuple[int, slice]:
        """Return the largest number of rows of a rank, and the slice of this rank's rows."""
        share = -(-num_rows // self.axis.size)
        return share, slice(share * self.axis.rank, share * (self.axis.rank + 1))

    def _joined(self, part: Tensor, num_rows: int) -> Tensor:
        share, _ = self._share(num_rows)
        if not share:
            return part
        if len(part) < share:
            part = torch.cat([part, part.new_zeros(share - len(part), *part.shape[1:])])
        return self._gather(part).flatten(0, 1)[:num_rows]

    def _gather(self, part: Tensor) -> Tensor:
        gathered = part.new_empty(self.axis.size, *part.shape)
        self.count("all_gather", part.nbytes * (self.axis.size - 1))
        with blocking_collective(key_of(CollectiveId("all-gather", self.name, 0), self.axis)):
            _ALL_GATHER(gathered.view(-1), part.contiguous().view(-1), group=self.axis.group)
        return gathered

    def _swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        row_bytes = rows.element_size() * rows.shape[1:].numel()
        self.count("all_to_all", row_bytes * (sum(sent) - sent[self.axis.rank]))
        with blocking_collective(key_of(CollectiveId("all-to-all", self.name, 0), self.axis)):
            dist.all_to_all_single(
                arrived, rows.contiguous(), list(received), list(sent), self.axis.group
            )
        return arrived

    def count(self, kind: str, num_bytes: int) -> None:
        """Count what this rank sends over the axis."""
        self.traffic.add(f"{self.axis.name}.{kind}", self.name, num_bytes)


class _Gather(torch.autograd.Function):
    """All-gather; backward sums all ranks' gradients of this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._gather(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ones = [1] * len(grad)
        arrived = ctx.exchange._swap(grad, ones, ones)
        summed = torch.promote_types(grad.dtype, torch.float32)
        return arrived.sum(0, dtype=summed).to(grad.dtype), None


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows; backward sends the gradients of the rows back to where they came from."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, exchange: Exchange, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.sent = sent
        ctx.received = received
        return exchange._swap(rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange._swap(grad, ctx.received, ctx.sent), None, None, None


class _TakeShare(torch.autograd.Function):
    """This rank's share of equal rows; backward gathers each rank's gradient of its share."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.num_rows = len(whole)
        return whole[exchange._share(len(whole))[1]].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange._joined(grad, ctx.num_rows), None


class _JoinShares(torch.autograd.Function):
    """All ranks' rows; backward takes this rank's share of the gradient, equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: Exchange, num_rows: int) -> Tensor:
        _, ctx.share = exchange._share(num_rows)
        return exchange._joined(part, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.share].contiguous(), None, None
