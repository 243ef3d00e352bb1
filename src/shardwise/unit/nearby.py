"""Full parameters that stay spread over a few ranks between forward and backward.

Note [Spread over fewer ranks]
A rank keeps one of as many equal parts of the unit's full memory as there are neighbours, and
backward gathers over these only. A part is dropped when the parameters have changed. Source: FSDP2,
``fully_shard(reshard_after_forward=<int>)``; ZeRO++ (Wang et al. 2023), section 3.2, hpZ.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.comm.pending import GatherItem
from shardwise.layout.segments import Segment
from shardwise.mesh import Axis
from shardwise.unit.storage import Storage


class Nearby:
    """The parts that this rank keeps of one unit, over the ranks of ``axis``."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._leaves = False
        self._parts: list[torch.Tensor] = []
        self._versions: list[int] = []

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """End a forward pass: what is freed inside leaves its parts, if backward will need them."""
        self._leaves = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._leaves = False

    @torch.no_grad()
    def leave(self, storages: Iterable[Storage], versions: list[int]) -> None:
        """Keep this rank's parts of full storages, which are about to be freed."""
        if self._leaves:
            axis = self.axis
            self._versions = versions
            self._parts = [s.full.data.chunk(axis.size)[axis.rank].clone() for s in storages]

    def forget(self) -> None:
        """Drop the parts, as other parameters have come in the place of these."""
        self._parts = []

    def take(self, storages: Sequence[Storage], versions: list[int]) -> list[GatherItem]:
        """List the parts, to be gathered over the axis; none when they are stale."""
        parts, self._parts = self._parts, []
        if not parts or self._versions != versions:
            return []
        items = []
        for storage, part in zip(storages, parts, strict=True):
            storage.allocate()
            segment = Segment(storage.full.numel(), part.numel(), 0, 0)
            items.append(GatherItem(segment, part, storage.full.data, False))
        return items
