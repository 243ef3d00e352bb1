"""Records a step as it is played: bytes by line of the ledger, and operations."""

from collections import Counter
from collections.abc import Mapping, Sequence

from shardwise.plan.model.tape import Cost
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.messages import Message
from shardwise.plan.step.program import (
    ENGINES,
    AxisName,
    Collective,
    CollectiveKind,
    Compute,
    Ledger,
    Link,
    Moment,
    Op,
    OpPhase,
    Program,
    Stream,
    Transfer,
)


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
