"""Where the gradients of parameters are summed that lie in no storage: this rank's rows of each."""

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.pending import Pending
from shardwise.layout.segments import Layout


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
