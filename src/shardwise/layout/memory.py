"""Bytes of the parameters of one layout, for `unit.storage` and for plans.

Note [Where the shard is]
If the full copy is kept and has the master dtype (stages 0 to 2 in fp32, and any stage on one
rank), the shard *is* a slice of the full buffer. Otherwise the shard has a separate buffer, and the
gather first copies or casts this rank's share into the full buffer. A separate low-precision shard
exists only if the masters are offloaded and a device copy of them is kept. If gathers are encoded,
the full copy has other values than the shard, on one rank too, so the shard is separate.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from shardwise.layout.segments import Layout, Segment
from shardwise.layout.wire import Wire
from shardwise.precisions import Coding
from shardwise.stages import Stage

P = TypeVar("P")
D = TypeVar("D")


def group_by_dtypes(
    params: Iterable[P], facts: Iterable[tuple[D, bool, bool]], master: D | None, compute: D | None
) -> dict[tuple[tuple[D, D], bool], list[P]]:
    """Group parameters by storage; keys are ((master, computing) dtype, is trained).

    ``facts`` are each parameter's (dtype, is floating-point, is trained). ``master`` and
    ``compute`` are the dtypes of the setting; None keeps the parameter's. Frozen parameters have a
    separate storage: they need no gradients and never become stale.
    """
    groups: dict[tuple[tuple[D, D], bool], list[P]] = {}
    for param, (dtype, is_floating, is_trained) in zip(params, facts, strict=True):
        master_dtype = (master or dtype) if is_floating and is_trained else dtype
        compute_dtype = (compute or dtype) if is_floating else dtype
        groups.setdefault(((master_dtype, compute_dtype), is_trained), []).append(param)
    return groups


@dataclass(frozen=True)
class StorageMemory:
    """The memory of a `Storage`: parameters of one pair of dtypes, master and computing.

    - ``master_size``, ``full_size``: bytes of an element of the slices and of the full copy.
    - ``casts``: the two dtypes differ.
    - ``is_offloaded``: the slices are offloaded.
    - ``keeps_device_copy``: a copy of the offloaded slices in the computing dtype stays on the
      device.
    - ``coding``: the coding of gathers.
    - ``rank``: the rank whose memory it is, as shares may differ.
    """

    layout: Layout
    stage: Stage
    master_size: int
    full_size: int
    casts: bool
    is_offloaded: bool = False
    keeps_device_copy: bool = False
    coding: Coding | None = None
    rank: int = 0

    @cached_property
    def wire(self) -> Wire | None:
        """The encoded gather; None if no parameter is encoded."""
        if self.coding is None:
            return None
        wire = Wire(self.layout, self.coding, self.full_size)
        return wire if wire.has_codes else None

    @property
    def gathered_segments(self) -> list[tuple[Segment, int]]:
        """The segments that are gathered, with the bytes of an element."""
        if self.wire is not None:
            return [(segment, 1) for segment in self.wire.segments]
        return [(segment, self.full_size) for segment in self.layout.segments]

    @cached_property
    def aliased(self) -> bool:
        """Tell whether the slices are inside the full copy; see Note [Where the shard is]."""
        keeps_full = not self.stage.frees_after_backward or self.layout.num_ranks == 1
        return keeps_full and not self.casts and not self.is_offloaded and self.wire is None

    @cached_property
    def frees(self) -> bool:
        """Tell whether the full copy is freed after use."""
        # On one rank the full copy serves as the device copy of the slices.
        is_device_copy = self.keeps_device_copy and self.layout.num_ranks == 1
        return not self.aliased and self.stage.frees_after_backward and not is_device_copy

    @cached_property
    def needs_gather(self) -> bool:
        """Tell whether a gather sends data between ranks."""
        return self.stage.shards_state and self.layout.num_ranks > 1

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of the device copy of offloaded slices, which gathers read."""
        return self.local_numel * self.full_size if self.keeps_device_copy and self.frees else 0

    @cached_property
    def fills_before_gather(self) -> bool:
        """Tell whether this rank's share is cast or fetched into the full copy before a gather."""
        needs_copy = (self.casts or self.is_offloaded) and self.wire is None
        return not self.aliased and needs_copy and not self.copy_bytes

    @cached_property
    def gathers_in_place(self) -> bool:
        """Tell whether this rank's share is at its offset in the full copy before the gather."""
        return self.aliased or self.fills_before_gather or self.wire is not None

    @cached_property
    def local_numel(self) -> int:
        """Elements of this rank's slices and of their gradients: S, or P at stage 0."""
        if not self.stage.shards_state:
            return self.layout.full_numel
        return self.layout.shard_numel(self.rank)

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of a full copy, padding included."""
        return self.layout.full_numel * self.full_size

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's slices, padding included, offloaded or not."""
        return self.local_numel * self.master_size

    @property
    def gather_bytes(self) -> tuple[int, int]:
        """Bytes that a rank sends to each other rank in a gather: as sent, and if not encoded."""
        if not self.needs_gather:
            return 0, 0
        sent = sum(
            segment.share_numel(self.rank) * size for segment, size in self.gathered_segments
        )
        return sent, self.layout.shard_numel(self.rank) * self.full_size

    @property
    def additional_bytes(self) -> int:
        """Bytes that an allocated full copy adds to the slices."""
        return self.full_bytes - (self.shard_bytes if self.aliased else 0)
