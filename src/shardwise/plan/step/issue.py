"""Writes a program down as the host issues it: which operation waits for which."""

from collections import Counter
from collections.abc import Sequence

from shardwise.plan.model.tape import Cost
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.messages import Message
from shardwise.plan.step.program import (
    AxisName,
    Collective,
    Compute,
    Op,
    OpPhase,
    Program,
    Stream,
    Transfer,
)

_ENGINES_NAME = {"efsdp": "shard"}  # the engine's counts are by what an axis is for
_STREAM_OF_LINK = {
    "to_device": "to_device",
    "to_host": "to_host",
    "disk_read": "disk",
    "disk_write": "disk",
}


class Issuer:
    """Collects operations and counts what is sent.

    A collective begins no earlier than the compute issued before it, since it waits for the stream
    that made its input; compute issued after ``wait`` begins no earlier than what was waited for.
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
        """Issue operations of the device; nothing where there is nothing to do."""
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
        kind: str,
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
        name = f"{_ENGINES_NAME.get(axis, axis)}.{label or kind}"
        self.sent[name] += message.sent
        self.num[name] += counts
        if not message.num_messages:
            return None
        work = Collective(kind, axis, message.payload, message.sent, message.num_messages)  # type: ignore[arg-type]
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
        """Let the compute from now on wait for what no collective has waited for."""
        self._waits += self._fetched
        self._fetched = ()

    def transfer(self, link: str, num_bytes: int, unit: int, after: Sequence[int]) -> int:
        """Issue a copy between device, host and disk."""
        work = Transfer(link, num_bytes)  # type: ignore[arg-type]
        stream = _STREAM_OF_LINK[link]
        self.copied[link] += num_bytes
        self.ops.append(Op(stream, work, unit, "offload", self.micro_batch, tuple(after)))  # type: ignore[arg-type]
        return len(self.ops) - 1

    def on_cpu(self, costs: tuple[Cost, ...], unit: int, after: Sequence[int]) -> int:
        """Issue work of the host's cores."""
        op = Op("cpu", Compute(costs), unit, "optimizer", self.micro_batch, tuple(after))
        self.ops.append(op)
        return len(self.ops) - 1

    @property
    def inputs(self) -> tuple[int, ...]:
        """What an operation that needs all compute so far has to wait for."""
        return self._last_compute + self._waits

    def program(self, unit_names: tuple[str, ...]) -> Program:
        """Return what was issued."""
        counts = dict(self.sent), dict(self.num), dict(self.copied)
        return Program(unit_names, tuple(self.ops), *counts)
