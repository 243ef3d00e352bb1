"""A step as operations on streams, in the order in which the host issues them.

Each stream runs its operations one after the other, in this order; an operation begins when its
stream is free and all operations in ``after`` have ended. So the order of the list is an order in
which the times can be computed, and a `Program` needs no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.plan.model.tape import Cost

Stream = Literal["compute", "shard", "replicate", "to_device", "to_host", "cpu", "disk"]
AxisName = Literal["shard", "replicate", "efsdp", "ep"]  # the last two: of experts
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Link = Literal["to_device", "to_host", "disk_read", "disk_write"]
OpPhase = Literal[
    "forward", "loss", "recompute", "backward", "unshard", "reduce", "clip", "optimizer", "offload"
]


@dataclass(frozen=True)
class Compute:
    """Operations of the device (stream compute) or of the host's cores (stream cpu)."""

    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Collective:
    """One collective along an axis: every rank of the group takes part, and waits for the last.

    ``payload_bytes`` is the whole: what each rank has after an all-gather, and before a
    reduce-scatter or an all-to-all. ``sent_bytes`` is what one rank sends, as the engine counts it;
    ``num_messages`` how many separate messages or segments it consists of.
    """

    kind: CollectiveKind
    axis: AxisName
    payload_bytes: int
    sent_bytes: int
    num_messages: int = 1


@dataclass(frozen=True)
class Transfer:
    """A copy between device and host, or between host and disk."""

    link: Link
    num_bytes: int


@dataclass(frozen=True)
class Op:
    """One operation; ``after`` are indices of earlier operations in the program."""

    stream: Stream
    work: Compute | Collective | Transfer
    unit: int
    phase: OpPhase
    micro_batch: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """One steady-state step (not the first one) of one rank.

    ``sent_bytes`` and ``num_collectives`` are by ``axis.kind``, the very numbers that
    `debug.stats` counts for one step; ``copied_bytes`` between device, host and disk by link.
    """

    unit_names: tuple[str, ...]
    ops: tuple[Op, ...]
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    num_collectives: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
