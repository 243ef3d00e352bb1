"""A played step, operations on streams and bytes by line, and its recorder.

The operations stand in the order in which the host issues them. Each stream runs its own one after
the other, in this order; an operation begins when its stream is free and all operations in
``after`` have ended. So the order of the list is an order in which the times can be computed, and a
`Program` needs no clock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.plan.model.tape import DEGREE_KINDS, Cost, Lines
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


# -- bytes
@dataclass(frozen=True)
class Ledger(Lines):
    """Bytes that one rank's device allocator holds for tensors; lines add up to ``total``.

    ``param_shards`` are the persistent slices with padding, ``param_full`` full copies beyond
    them, ``gather_staging`` and ``reduce_staging`` buffers of collectives under way,
    ``grad_full`` gradients of full parameters that are not reduced, ``grad_shards`` reduced ones,
    ``state_staging`` buffers that state on the host passes in its step.
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

    def engines(self) -> dict[str, int]:
        """Return the lines that are the engine's, which a run's own ledger has too."""
        return {name: num_bytes for name, num_bytes in self.lines().items() if name in ENGINES}


ENGINES = (
    *("param_shards", "param_full", "grad_full", "grad_shards", "optimizer_state"),
    *("state_staging", "gather_staging", "reduce_staging"),
)


@dataclass(frozen=True)
class Away(Lines):
    """Bytes of one rank off the device, on the host or in files; lines add up to ``total``.

    ``grad_shards`` are the memory of reduced gradients, ``more_grads`` what those of a further
    micro-batch take that is reduced by itself, ``inputs`` those of checkpointed blocks,
    ``disk_buffers`` what passes to and from the files, ``checkpoint_copies`` the copies of the
    state from which checkpoints are written, and those in shared memory.
    """

    param_shards: int = 0
    grad_shards: int = 0
    more_grads: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    disk_buffers: int = 0
    checkpoint_copies: int = 0


@dataclass(frozen=True)
class Rest:
    """Bytes that one rank holds between two steps: on the device, and off it at most."""

    resting: Ledger
    host: Away
    files: Away

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """Return what `debug.stats` of a run has under this name, without places of nothing.

        It counts what lasts: neither buffers of the disk, nor gradients in files.
        """
        device, host, files = self.resting, self.host, self.files
        found = {
            "device": device.param_shards + device.param_full + device.optimizer_state,
            "host": host.param_shards + host.grad_shards + host.optimizer_state + host.inputs,
            "files": files.param_shards + files.optimizer_state,
        }
        found["device"] += device.state_staging
        return {place: num_bytes for place, num_bytes in found.items() if num_bytes}


@dataclass(frozen=True)
class Moment:
    """The ledger at one moment: in which phase of which micro-batch, in which unit."""

    phase: OpPhase
    unit: int
    micro_batch: int
    ledger: Ledger


@dataclass(frozen=True)
class Played(Rest):
    """One steady-state step, played: its peak, the peak of each phase, and its operations.

    ``engines_peak`` is where the engine's own lines are most, of the moments at which `observe`
    looks: as forward and backward passes of units begin and end, and as the optimizer's step does.

    ``resting`` is the ledger after ``zero_grad``. ``padding_bytes`` of its ``param_shards``,
    wherever they are, are padding, on average over the ranks.
    """

    peak: Moment
    peaks: tuple[Moment, ...]
    engines_peak: Moment
    program: Program
    padding_bytes: int = 0


# -- recording
class Recorder:
    """Adds bytes to lines of the ledger, and operations in the order in which the host issues them.

    ``phase``, ``unit`` and ``micro_batch`` describe the present moment; the player sets them. The
    largest moment of each phase is kept.

    A collective begins no earlier than the compute issued before it, since it waits for the stream
    that made its input; compute issued after ``wait`` begins after the operation waited for.
    """

    def __init__(self, resting: Ledger, dtype: DtypeName) -> None:
        self.phase: OpPhase = "forward"
        self.unit = 0
        self.micro_batch = 0
        self.engines_peak = Moment("forward", 0, 0, Ledger())
        self._lines, self._total = resting.lines(), resting.total
        self._dtype = dtype
        self._peaks: dict[OpPhase, tuple[int, int, int, dict[str, int]]] = {}
        self._engines_most = -1
        self._ops: list[Op] = []
        self._sent, self._num, self._copied = Counter[str](), Counter[str](), Counter[str]()
        self._last_compute: tuple[int, ...] = ()
        self._waits: tuple[int, ...] = ()
        self._fetched: tuple[int, ...] = ()

    def enter(self, phase: OpPhase) -> OpPhase:
        """Set the phase; return the one before, which is set again afterwards."""
        before, self.phase = self.phase, phase
        return before

    # -- bytes
    def add(self, line: str, num_bytes: int) -> None:
        """Add bytes to a line, or take them away."""
        self._lines[line] += num_bytes
        self._total += num_bytes
        if num_bytes > 0:
            self.touch({})

    def touch(self, more: Mapping[str, int]) -> None:
        """Note a moment at which so many more bytes are alive, by line."""
        total, phase = self._total + sum(more.values()), self.phase
        if phase in self._peaks and total <= self._peaks[phase][0]:
            return
        lines = dict(self._lines)
        for line, num_bytes in more.items():
            lines[line] += num_bytes
        self._peaks[phase] = total, self.unit, self.micro_batch, lines

    def look(self) -> None:
        """Note this moment if the engine's own lines are larger than at all that were looked at."""
        engines = sum(self._lines[name] for name in ENGINES)
        if engines > self._engines_most:
            self._engines_most = engines
            self.engines_peak = Moment(self.phase, self.unit, self.micro_batch, self.ledger())

    def ledger(self) -> Ledger:
        """Return the present lines."""
        return Ledger(**self._lines)

    def peaks(self) -> tuple[Moment, ...]:
        """Return the largest moment of each phase, in the order of a step."""
        return tuple(
            Moment(phase, unit, micro_batch, Ledger(**lines))
            for phase, (_, unit, micro_batch, lines) in self._peaks.items()
        )

    # -- operations
    def _issue(
        self,
        stream: Stream,
        work: Compute | Collective | Transfer,
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
                self._sent[DEGREE_KINDS[cost.kind][1]] += cost.moved_bytes
                self._num[DEGREE_KINDS[cost.kind][1]] += cost.num_ops
        op = self._issue("compute", Compute(costs), unit, self.phase, self._waits)
        self._last_compute, self._waits = (op,), ()
        return op

    def move(self, num_bytes: int, unit: int) -> None:
        """Issue copies, casts or sums of so many bytes read and written."""
        if num_bytes:
            self.compute((Cost("memory", self._dtype, 0, num_bytes, 1),), unit)

    def start(
        self,
        kind: CollectiveKind,
        axis: AxisName,
        message: Message,
        unit: int,
        *,
        counts: int = 1,
        label: str | None = None,
    ) -> int | None:
        """Issue a collective; return its index, None where nothing is sent (one rank).

        ``label`` is the engine's name of it, where that is another than ``kind``.
        """
        self.move(message.before, unit)
        # The engine counts the collectives of experts' state under the shard axis.
        name = f"{'shard' if axis == 'efsdp' else axis}.{label or kind}"
        self._sent[name] += message.sent
        self._num[name] += counts
        if not message.num_messages:
            return None
        work = Collective(kind, axis, message.payload, message.sent, message.num_messages)
        after = self.inputs + self._fetched
        self._fetched = ()
        # Experts' collectives have the links of the shards', and so come after one another.
        stream: Stream = "replicate" if axis == "replicate" else "shard"
        return self._issue(stream, work, unit, self.phase, after)

    def finish(self, op: int | None, message: Message, unit: int) -> None:
        """Wait for a collective and unpack its result."""
        self.wait(op)
        self.move(message.after, unit)

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
        self._copied[link] += num_bytes
        return self._issue(stream, Transfer(link, num_bytes), unit, "offload", tuple(after))

    def on_cpu(self, costs: tuple[Cost, ...], unit: int, after: Sequence[int]) -> int:
        """Issue work of the host's cores."""
        return self._issue("cpu", Compute(costs), unit, "optimizer", tuple(after))

    @property
    def inputs(self) -> tuple[int, ...]:
        """The operations that one needing all compute so far has to wait for."""
        return self._last_compute + self._waits

    def program(self, unit_names: tuple[str, ...]) -> Program:
        """Return the operations so far."""
        counts = dict(self._sent), dict(self._num), dict(self._copied)
        return Program(unit_names, tuple(self._ops), *counts)
