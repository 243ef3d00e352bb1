"""Bytes of the parameters of one layout, for `unit.storage` and for plans.

Note [Where the shard lies]
If the full copy is kept and has the master dtype (stages 0 to 2 in fp32, and any stage on one
rank), the shard *is* a slice of the full buffer. Otherwise the shard has a separate buffer, and the
gather copies or casts this rank's share into the full buffer first. A separate low-precision shard
exists only if the masters are offloaded and the parameters are to stay. If gathers are encoded, the
full copy has other values than the shard, on one rank too, so the shard is separate.
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
    found: dict[tuple[tuple[D, D], bool], list[P]] = {}
    for param, (own, is_floating, is_trained) in zip(params, facts, strict=True):
        dtypes = own, own
        if is_floating:
            dtypes = (master or own) if is_trained else own, compute or own
        found.setdefault((dtypes, is_trained), []).append(param)
    return found


@dataclass(frozen=True)
class Memory:
    """The memory of the parameters of one pair of dtypes, master and computing.

    ``master_size`` and ``full_size`` are bytes per element. ``casts``: the two dtypes differ.
    ``is_away``: the slices are offloaded. ``stays``: a copy of the offloaded slices, in the full
    copy's dtype, stays on the device. ``coding`` is that of gathers. ``rank`` is the rank whose
    memory it is, as shares may differ.
    """

    layout: Layout
    stage: Stage
    master_size: int
    full_size: int
    casts: bool
    is_away: bool = False
    stays: bool = False
    coding: Coding | None = None
    rank: int = 0

    @cached_property
    def wire(self) -> Wire | None:
        """The encoded gather; None if no parameter is encoded."""
        made = None if self.coding is None else Wire(self.layout, self.coding, self.full_size)
        return made if made is not None and made.has_codes else None

    @property
    def gathered_segments(self) -> list[tuple[Segment, int]]:
        """The segments that are gathered, each with the bytes of its elements."""
        if self.wire is not None:
            return [(segment, 1) for segment in self.wire.segments]
        return [(segment, self.full_size) for segment in self.layout.segments]

    @cached_property
    def aliased(self) -> bool:
        """Tell whether the slices lie inside the full copy; see Note [Where the shard lies]."""
        keeps = not self.stage.frees_after_backward or self.layout.num_ranks == 1
        return keeps and not self.casts and not self.is_away and self.wire is None

    @cached_property
    def frees(self) -> bool:
        """Tell whether the full copy is freed after use."""
        stays = self.stays and self.layout.num_ranks == 1  # the full copy is the slices' copy
        return not self.aliased and self.stage.frees_after_backward and not stays

    @cached_property
    def needs_gather(self) -> bool:
        """Tell whether a gather sends data between ranks."""
        return self.stage.shards_state and self.layout.num_ranks > 1

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of the copy of the slices that gathers read while the slices are offloaded."""
        return self.own_numel * self.full_size if self.stays and self.frees else 0

    @cached_property
    def fills_first(self) -> bool:
        """Tell whether a gather casts or fetches this rank's share into the full copy first."""
        casts = (self.casts or self.is_away) and self.wire is None
        return not self.aliased and casts and not self.copy_bytes

    @cached_property
    def gathers_in_place(self) -> bool:
        """Tell whether this rank's share is in its place before the gather."""
        return self.aliased or self.fills_first or self.wire is not None

    @cached_property
    def own_numel(self) -> int:
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
        return self.own_numel * self.master_size

    @property
    def gather_bytes(self) -> tuple[int, int]:
        """Bytes that a rank sends to each other rank in a gather, and their number unencoded."""
        if not self.needs_gather:
            return 0, 0
        sent = sum(each.share_numel(self.rank) * size for each, size in self.gathered_segments)
        return sent, self.layout.shard_numel(self.rank) * self.full_size

    @property
    def beside_bytes(self) -> int:
        """Bytes of an allocated full copy beyond the slices."""
        return self.full_bytes - (self.shard_bytes if self.aliased else 0)
