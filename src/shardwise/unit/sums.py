"""Protocols for the sum of a bucket's gradients over the ranks.

`rank_order` and `backend_sum` implement them. A unit holds one of the two as a value.

Note [Gradients of some ranks only]
A parameter may get a gradient on one rank and none on another. Every rank reduces every unit that
ran, with zeros for missing gradients. A few more numbers in the same collective count the ranks on
which each parameter had a gradient. If the count is 0, the parameter keeps ``grad`` None, and so
its value and its optimizer state. Only a rank that misses a gradient reads the counts and waits for
the unit's sum, so usually the host does not synchronise with the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.comm.pending import Pending
from shardwise.layout.segments import Layout
from shardwise.unit.param import ShardedParam


@dataclass(frozen=True, eq=False)
class RowsApart:
    """The part of a `Storage` that sums of gradients use, without memory for parameters.

    ``params`` are of one dtype; ``layout`` has them by rows, in this order. ``compute_dtype`` is
    the dtype of their gradients.
    """

    layout: Layout
    rank: int
    params: tuple[Any, ...]
    master_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    shards_state = True

    def grad_buffer(self, dtype: torch.dtype, behind: int = 0) -> torch.Tensor:
        """Return uninitialised memory for the means, and ``behind`` elements more."""
        return torch.empty(
            self.layout.shard_numel(self.rank) + behind, dtype=dtype, device=self.device
        )

    def start_evict(self, means: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Return the means unchanged: the parameters live on the computing device."""
        return means, Pending.of_copies()

    def place_in_shards(self, index: int) -> int:
        """Return the offset of this rank's rows of a parameter among its rows of all."""
        return self.layout.piece(index, self.rank).shard_offset


@dataclass(frozen=True)
class Held:
    """The memory of sums in flight: means, gradients that are sent without a copy, buffers."""

    units: tuple[str, ...]
    means: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    staging: object


class Running(Protocol):
    """One sum in flight."""

    def held(self, units: tuple[str, ...]) -> Held:
        """Return the sum's memory, labelled with ``units``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the means while the sum is in flight."""

    def wait(self) -> None:
        """Wait for the sums over shards; start or complete the sums over replicas and gathers."""

    def finish(self) -> dict[ShardedParam, torch.Tensor]:
        """Return this rank's slice of the mean of each parameter with a gradient on any rank."""

    def drop(self) -> None:
        """Wait for the collectives in flight and drop the sum."""


class Sum(Protocol):
    """The method of summing gradients."""

    @property
    def in_param_dtype(self) -> bool:
        """Tell if the default dtype of sums is the sharded parameter's, not the gradient's."""

    @property
    def zero_fill(self) -> bool:
        """Tell if a parameter without a gradient on any rank gets zeros."""

    @property
    def divisor(self) -> float | None:
        """The divisor of the sum; None means the number of ranks."""

    def start(self, units: Sequence[Any]) -> Running:
        """Take the units' gradients and pass them to the transport."""


def counted_anywhere(
    params: Sequence[ShardedParam], used_here: set[ShardedParam], counts: torch.Tensor | None
) -> set[ShardedParam]:
    """Return the ``params`` that had a gradient on any rank, as counted."""
    if counts is None or used_here.issuperset(params):
        return used_here
    found = zip(params, counts.tolist(), strict=True)
    return used_here.union(param for param, count in found if count)
