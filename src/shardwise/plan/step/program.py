"""A step as operations on streams, in the order in which the host issues them.

Each stream runs its operations one after the other, in this order; an operation begins when its
stream is free and all operations in ``after`` have ended. So the order of the list is an order in
which the times can be computed, and a `Program` needs no clock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.plan.model.tape import Cost
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.messages import Message

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


class Issuer:
    """Collects operations in the order in which the host issues them, and counts bytes sent.

    A collective begins no earlier than the compute issued before it, since it waits for the stream
    that made its input; compute issued after ``wait`` begins after the operation waited for.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.micro_batch = 0
        self.sent: Counter[str] = Counter()
        self.num: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self._last_compute: tuple[int, ...] = ()
        self._waits: tuple[int, ...] = ()
        self._fetched: tuple[int, ...] = ()

    def compute(self, costs: tuple[Cost, ...], unit: int, phase: OpPhase) -> int:
        """Issue operations of the device, if there are any."""
        if not costs:
            return self._last_compute[0] if self._last_compute else -1
        op = Op("compute", Compute(costs), unit, phase, self.micro_batch, self._waits)
        self.ops.append(op)
        self._last_compute, self._waits = (len(self.ops) - 1,), ()
        return len(self.ops) - 1

    def move(self, num_bytes: int, dtype: DtypeName, unit: int, phase: OpPhase) -> None:
        """Issue copies, casts or sums of so many bytes read and written."""
        if num_bytes:
            self.compute((Cost("memory", dtype, 0, num_bytes, 1),), unit, phase)

    def collective(
        self,
        kind: CollectiveKind,
        axis: AxisName,
        message: Message,
        unit: int,
        phase: OpPhase,
        *,
        counts: int = 1,
        label: str | None = None,
    ) -> int | None:
        """Issue a collective; return its index, None where nothing is sent (one rank).

        ``label`` is the engine's name of it, where that is another than ``kind``.
        """
        # The engine counts the collectives of experts' state under the shard axis.
        name = f"{'shard' if axis == 'efsdp' else axis}.{label or kind}"
        self.sent[name] += message.sent
        self.num[name] += counts
        if not message.num_messages:
            return None
        work = Collective(kind, axis, message.payload, message.sent, message.num_messages)
        after = self._last_compute + self._waits + self._fetched
        self._fetched = ()
        # Experts' collectives have the links of the shards', and so come after one another.
        stream: Stream = "replicate" if axis == "replicate" else "shard"
        self.ops.append(Op(stream, work, unit, phase, self.micro_batch, after))
        return len(self.ops) - 1

    def wait(self, op: int | None) -> None:
        """Let the compute that is issued from now on wait for an operation."""
        if op is not None:
            self._waits += (op,)

    def before_collective(self, op: int) -> None:
        """Let the next collective wait for an operation."""
        self._fetched += (op,)

    def wait_for_fetched(self) -> None:
        """Let the compute from now on wait for fetches that no collective has waited for."""
        self._waits += self._fetched
        self._fetched = ()

    def transfer(self, link: Link, num_bytes: int, unit: int, after: Sequence[int]) -> int:
        """Issue a copy between device, host and disk."""
        stream: Stream = "disk" if link == "disk_read" or link == "disk_write" else link
        work = Transfer(link, num_bytes)
        self.copied[link] += num_bytes
        self.ops.append(Op(stream, work, unit, "offload", self.micro_batch, tuple(after)))
        return len(self.ops) - 1

    def on_cpu(self, costs: tuple[Cost, ...], unit: int, after: Sequence[int]) -> int:
        """Issue work of the host's cores."""
        op = Op("cpu", Compute(costs), unit, "optimizer", self.micro_batch, tuple(after))
        self.ops.append(op)
        return len(self.ops) - 1

    @property
    def inputs(self) -> tuple[int, ...]:
        """The operations that one needing all compute so far has to wait for."""
        return self._last_compute + self._waits

    def program(self, unit_names: tuple[str, ...]) -> Program:
        """Return the operations so far."""
        counts = dict(self.sent), dict(self.num), dict(self.copied)
        return Program(unit_names, tuple(self.ops), *counts)
