"""A played step: operations on streams, bytes by line, and the recorder of both.

Operations are in the order in which the host issues them. Each stream runs its operations one after
the other, in this order. An operation begins when its stream is free and all operations in
``after`` have ended. So times can be computed in the order of the list, and a `Program` needs no
clock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.plan.model.tape import DEGREE_KINDS, Cost, Lines
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.messages import Message

Stream = Literal["compute", "shard", "replicate", "to_device", "to_host", "cpu", "disk"]
AxisName = Literal["shard", "replicate", "efsdp", "ep"]  # the last two are axes of experts
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

    ``payload_bytes`` are those of the full buffer: after an all-gather, or before a reduce-scatter
    or an all-to-all. ``sent_bytes`` are those that one rank sends, as the engine counts them.
    ``num_messages`` is the number of separate messages or segments.
    """

    kind: CollectiveKind
    axis: AxisName
    payload_bytes: int
    sent_bytes: int
    num_messages: int = 1


@dataclass(frozen=True)
class LinkTransfer:
    """A copy between device and host, or between host and disk."""

    link: Link
    num_bytes: int


@dataclass(frozen=True)
class Op:
    """One operation; ``after`` are indices of earlier operations in the program."""

    stream: Stream
    work: Compute | Collective | LinkTransfer
    unit: int
    phase: OpPhase
    micro_batch: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """One steady-state step (not the first one) of one rank.

    ``sent_bytes`` and ``num_collectives`` have the keys ``axis.kind`` and the numbers that
    `debug.stats` counts for one step. ``copied_bytes`` has the copies between device, host and disk
    by link.
    """

    unit_names: tuple[str, ...]
    ops: tuple[Op, ...]
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    num_collectives: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)


# -- bytes
@dataclass(frozen=True)
class Ledger(Lines):
    """Bytes that one rank's device allocator holds for tensors; lines add up to ``total``.

    ``param_shards`` are the persistent slices with padding. ``param_full`` are full copies in
    memory of their own. ``gather_staging`` and ``reduce_staging`` are buffers of collectives in
    flight. ``grad_full`` are gradients of full parameters that are not reduced yet, ``grad_shards``
    reduced ones. ``state_staging`` are buffers for offloaded state that is stepped on the device.
    """

    param_shards: int = 0
    param_full: int = 0
    grad_full: int = 0
    grad_shards: int = 0
    optimizer_state: int = 0
    optimizer_temporary: int = 0
    state_staging: int = 0
    gather_staging: int = 0
    reduce_staging: int = 0
    activations: int = 0
    temporary: int = 0
    logits: int = 0
    inputs: int = 0
    buffers: int = 0

    def engine_lines(self) -> dict[str, int]:
        """Return the lines of bytes that the engine allocates; a run measures the same lines."""
        return {name: num_bytes for name, num_bytes in self.lines().items() if name in ENGINE_LINES}


ENGINE_LINES = (
    "param_shards",
    "param_full",
    "grad_full",
    "grad_shards",
    "optimizer_state",
    "state_staging",
    "gather_staging",
    "reduce_staging",
)


@dataclass(frozen=True)
class OffDeviceBytes(Lines):
    """Bytes of one rank off the device, on the host or in files; lines add up to ``total``.

    ``grad_shards`` are reduced gradients. ``more_grads`` are those of a further micro-batch if each
    is reduced separately. ``inputs`` are those of checkpointed blocks. ``disk_buffers`` are buffers
    for reading and writing the files. ``checkpoint_copies`` are the copies of the state from which
    checkpoints are written, and the copies in shared memory.
    """

    param_shards: int = 0
    grad_shards: int = 0
    more_grads: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    disk_buffers: int = 0
    checkpoint_copies: int = 0


@dataclass(frozen=True)
class BytesBetweenSteps:
    """Bytes that one rank holds between two steps; ``host`` and ``files`` are upper bounds."""

    device: Ledger
    host: OffDeviceBytes
    files: OffDeviceBytes

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """The bytes by place, as `debug.stats` of a run has them under this name, without zeros.

        Only persistent bytes count: neither buffers of the disk, nor gradients in files.
        """
        device, host, files = self.device, self.host, self.files
        by_place = {
            "device": device.param_shards
            + device.param_full
            + device.optimizer_state
            + device.state_staging,
            "host": host.param_shards + host.grad_shards + host.optimizer_state + host.inputs,
            "files": files.param_shards + files.optimizer_state,
        }
        return {place: num_bytes for place, num_bytes in by_place.items() if num_bytes}


@dataclass(frozen=True)
class Peak:
    """The ledger at a peak, with the phase, the unit and the micro-batch in which it occurs."""

    phase: OpPhase
    unit: int
    micro_batch: int
    ledger: Ledger


@dataclass(frozen=True)
class Played(BytesBetweenSteps):
    """One steady-state step, played: its peak, the peak of each phase, and its operations.

    ``engine_peak`` is the largest total of the engine's lines at the moments that `observe`
    samples: the begin and end of each unit's forward and backward, and of the optimizer's step.

    ``device`` is the ledger after ``zero_grad``. Of the ``param_shards`` on device, host and in
    files, ``padding_bytes`` are padding, on average over the ranks.
    """

    peak: Peak
    peaks: tuple[Peak, ...]
    engine_peak: Peak
    program: Program
    padding_bytes: int = 0


# -- recording
class StepRecorder:
    """Records a step: bytes by line, and operations in the order in which the host issues them.

    ``phase``, ``unit`` and ``micro_batch`` describe the present moment; the player sets them. The
    peak of each phase is kept.

    A collective begins after the compute that is issued before it, since it waits for the stream
    that made its input. Compute that is issued after ``wait`` begins after that operation has
    ended.
    """

    def __init__(self, initial: Ledger, dtype: DtypeName) -> None:
        self.phase: OpPhase = "forward"
        self.unit = 0
        self.micro_batch = 0
        self.engine_peak = Peak("forward", 0, 0, Ledger())
        self._lines = initial.lines()
        self._total = initial.total
        self._dtype = dtype
        self._peaks: dict[OpPhase, tuple[int, int, int, dict[str, int]]] = {}
        self._engine_most = -1
        self._ops: list[Op] = []
        self._sent_bytes = Counter[str]()
        self._num_collectives = Counter[str]()
        self._copied_bytes = Counter[str]()
        self._last_compute: tuple[int, ...] = ()
        self._waits: tuple[int, ...] = ()
        self._fetched: tuple[int, ...] = ()

    def enter(self, phase: OpPhase) -> OpPhase:
        """Set the phase; return the previous one, for the caller to set again."""
        before, self.phase = self.phase, phase
        return before

    # -- bytes
    def add(self, line: str, num_bytes: int) -> None:
        """Add bytes to a line; a negative number frees them."""
        self._lines[line] += num_bytes
        self._total += num_bytes
        if num_bytes > 0:
            self.record_temporary({})

    def record_temporary(self, more: Mapping[str, int]) -> None:
        """Record bytes by line that are allocated and freed at once."""
        total, phase = self._total + sum(more.values()), self.phase
        if phase in self._peaks and total <= self._peaks[phase][0]:
            return
        lines = dict(self._lines)
        for line, num_bytes in more.items():
            lines[line] += num_bytes
        self._peaks[phase] = total, self.unit, self.micro_batch, lines

    def sample_engine_lines(self) -> None:
        """Record the present moment if the engine's lines are larger than in all samples before."""
        num_bytes = sum(self._lines[name] for name in ENGINE_LINES)
        if num_bytes > self._engine_most:
            self._engine_most = num_bytes
            self.engine_peak = Peak(self.phase, self.unit, self.micro_batch, self.ledger())

    def ledger(self) -> Ledger:
        """Return the present lines."""
        return Ledger(**self._lines)

    def peaks(self) -> tuple[Peak, ...]:
        """Return the peak of each phase, in the order of a step."""
        return tuple(
            Peak(phase, unit, micro_batch, Ledger(**lines))
            for phase, (_, unit, micro_batch, lines) in self._peaks.items()
        )

    # -- operations
    def _issue(
        self,
        stream: Stream,
        work: Compute | Collective | LinkTransfer,
        unit: int,
        phase: OpPhase,
        after: tuple[int, ...],
    ) -> int:
        self._ops.append(Op(stream, work, unit, phase, self.micro_batch, after))
        return len(self._ops) - 1

    def compute(self, costs: tuple[Cost, ...], unit: int) -> int:
        """Issue operations of the device, if there are any; return their index, or -1."""
        if not costs:
            return -1
        for cost in costs:
            if cost.kind in DEGREE_KINDS:
                self._sent_bytes[DEGREE_KINDS[cost.kind][1]] += cost.moved_bytes
                self._num_collectives[DEGREE_KINDS[cost.kind][1]] += cost.num_ops
        op = self._issue("compute", Compute(costs), unit, self.phase, self._waits)
        self._last_compute, self._waits = (op,), ()
        return op

    def move(self, num_bytes: int, unit: int) -> None:
        """Issue copies, casts or sums of so many bytes read and written."""
        if num_bytes:
            self.compute((Cost("memory", self._dtype, 0, num_bytes, 1),), unit)

    def start_collective(
        self,
        kind: CollectiveKind,
        axis: AxisName,
        message: Message,
        unit: int,
        *,
        counts: int = 1,
        label: str | None = None,
    ) -> int | None:
        """Issue a collective; return its index, or None if nothing is sent (one rank).

        ``label`` is the engine's name for it, if that differs from ``kind``.
        """
        self.move(message.before, unit)
        # The engine counts the collectives of experts' state under the shard axis.
        name = f"{'shard' if axis == 'efsdp' else axis}.{label or kind}"
        self._sent_bytes[name] += message.sent
        self._num_collectives[name] += counts
        if not message.num_messages:
            return None
        work = Collective(kind, axis, message.payload, message.sent, message.num_messages)
        after = self.compute_dependencies + self._fetched
        self._fetched = ()
        # Collectives of experts use the links of those of shards, so they share a stream.
        stream: Stream = "replicate" if axis == "replicate" else "shard"
        return self._issue(stream, work, unit, self.phase, after)

    def finish_collective(self, op: int | None, message: Message, unit: int) -> None:
        """Wait for a collective and unpack its result."""
        self.wait(op)
        self.move(message.after, unit)

    def wait(self, op: int | None) -> None:
        """Make the compute that is issued from now on wait for an operation."""
        if op is not None:
            self._waits += (op,)

    def delay_next_collective(self, op: int) -> None:
        """Make the next collective wait for an operation, such as the fetch of its input."""
        self._fetched += (op,)

    def wait_for_fetches(self) -> None:
        """Make the compute from now on wait for fetches that no collective waits for."""
        self._waits += self._fetched
        self._fetched = ()

    def transfer(self, link: Link, num_bytes: int, unit: int, after: Sequence[int]) -> int:
        """Issue a copy between device, host and disk."""
        stream: Stream = "disk" if link == "disk_read" or link == "disk_write" else link
        self._copied_bytes[link] += num_bytes
        return self._issue(stream, LinkTransfer(link, num_bytes), unit, "offload", tuple(after))

    def compute_on_host(self, costs: tuple[Cost, ...], unit: int, after: Sequence[int]) -> int:
        """Issue operations of the host's cores."""
        return self._issue("cpu", Compute(costs), unit, "optimizer", tuple(after))

    @property
    def compute_dependencies(self) -> tuple[int, ...]:
        """The operations to wait for if an operation needs all compute so far."""
        return self._last_compute + self._waits

    def program(self, unit_names: tuple[str, ...]) -> Program:
        """Return the operations so far."""
        return Program(
            unit_names,
            tuple(self._ops),
            sent_bytes=dict(self._sent_bytes),
            num_collectives=dict(self._num_collectives),
            copied_bytes=dict(self._copied_bytes),
        )
