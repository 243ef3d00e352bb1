"""What it takes to sum the gradients of a bucket of units over the ranks.

`rank_order` and `backend_sum` are the two ways. A unit holds one of them as a value.

Note [Gradients of some ranks only]
A parameter may get a gradient on one rank and none on another. Every rank reduces every unit that
ran, with zeros where it has nothing; a few numbers more in the same collective count the ranks on
which each parameter had a gradient. A parameter that had none anywhere keeps ``grad`` None, and so
its value and its optimizer state. The counts are read only by a rank that missed a gradient, so
there is no synchronisation with the device in the usual case; such a rank waits for the unit's sum.
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
    """The part of a `Storage` that sums of gradients ask for, without memory for parameters.

    ``params`` are of one dtype, ``layout`` has them by rows, in this order. ``compute_dtype`` is
    that of their gradients.
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
        """Return the means as they are: the parameters live where they are computed with."""
        return means, Pending.of_copies()

    def place_in_shards(self, index: int) -> int:
        """Return where this rank's rows of a parameter begin among its rows of all."""
        return self.layout.piece(index, self.rank).shard_offset


@dataclass(frozen=True)
class Held:
    """The memory of sums under way: means, gradients that are sent as they lie, buffers."""

    units: tuple[str, ...]
    means: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    staging: object


class Running(Protocol):
    """One sum under way."""

    def held(self, units: tuple[str, ...]) -> Held:
        """Return the memory that it takes; ``units`` are theirs."""

    @property
    def nbytes(self) -> int:
        """Bytes of the means, as long as the sum is under way."""

    def wait(self) -> None:
        """Wait for the sums over shards; start, or complete, what comes second."""

    def finish(self) -> dict[ShardedParam, torch.Tensor]:
        """Return this rank's slice of the mean of every parameter that had a gradient anywhere."""

    def drop(self) -> None:
        """Wait for what is under way, and forget it."""


class Sum(Protocol):
    """How gradients are summed.

    ``in_param_dtype``: in the sharded parameter's dtype where none is asked for, else in that in
    which they come. ``zero_fill``: a parameter without any gradient gets zeros. ``divisor``: of the
    sum; None is the number of ranks.
    """

    @property
    def in_param_dtype(self) -> bool:
        """Tell in which dtype they are summed where none is asked for."""

    @property
    def zero_fill(self) -> bool:
        """Tell what becomes of a parameter without a gradient on any rank."""

    @property
    def divisor(self) -> float | None:
        """Return what the sum is divided by, if that is not the number of ranks."""

    def start(self, units: Sequence[Any]) -> Running:
        """Take the units' gradients and hand them to the transport."""


def counted_anywhere(
    params: Sequence[ShardedParam], used_here: set[ShardedParam], counts: torch.Tensor | None
) -> set[ShardedParam]:
    """Return the parameters that had a gradient on any rank, of ``params``, which were counted."""
    if counts is None or used_here.issuperset(params):
        return used_here
    found = zip(params, counts.tolist(), strict=True)
    return used_here.union(param for param, count in found if count)
