"""Where the bytes of one rank are, line by line: at one moment of a step, and as it is played."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwise.plan.step.program import OpPhase, Program


@dataclass(frozen=True)
class _Lines:
    """Bytes line by line: each field is one."""

    @property
    def total(self) -> int:
        """Sum of all lines."""
        return sum(self.lines().values())

    def lines(self) -> dict[str, int]:
        """Return the lines by name, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Ledger(_Lines):
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
        return {name: num_bytes for name, num_bytes in self.lines().items() if name in _ENGINES}


_ENGINES = (
    *("param_shards", "param_full", "grad_full", "grad_shards", "optimizer_state"),
    *("state_staging", "gather_staging", "reduce_staging"),
)


@dataclass(frozen=True)
class Away(_Lines):
    """Bytes of one rank off the device, on the host or in files; lines add up to ``total``.

    ``grad_shards`` are the memory of reduced gradients, ``more_grads`` what those of a further
    micro-batch take that is reduced by itself, ``inputs`` those of checkpointed blocks,
    ``disk_buffers`` what passes to and from the files.
    """

    param_shards: int = 0
    grad_shards: int = 0
    more_grads: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    disk_buffers: int = 0


@dataclass(frozen=True)
class Rest:
    """Bytes that one rank holds between two steps, on the device and off it."""

    device: Ledger
    host: Away
    files: Away

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """Return what `debug.stats` of a run has under this name, without places of nothing.

        It counts what lasts: neither buffers of the disk, nor gradients in files.
        """
        device, host, files = self.device, self.host, self.files
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
class Played:
    """One steady-state step, played: its peak, the peak of each phase, and its operations.

    ``engines_peak`` is where the engine's own lines are most, of the moments at which `observe`
    looks: as forward and backward passes of units begin and end, and as the optimizer's step does.

    ``resting`` is the ledger between steps, after ``zero_grad``; ``host`` and ``files`` are what
    offloading puts there at most. ``padding_bytes`` of the resting ``param_shards``, wherever they
    are, are padding, on average over the ranks.
    """

    peak: Moment
    peaks: tuple[Moment, ...]
    engines_peak: Moment
    resting: Ledger
    host: Away
    files: Away
    program: Program
    padding_bytes: int = 0

    @property
    def at_rest(self) -> Rest:
        """Bytes by place between two steps."""
        return Rest(self.resting, self.host, self.files)


class Meter:
    """Adds bytes to lines of the ledger and takes them away; remembers the largest moments.

    ``phase``, ``unit`` and ``micro_batch`` describe the present operation; the player sets them.
    """

    def __init__(self, resting: Ledger) -> None:
        self.lines = resting.lines()
        self.total = resting.total
        self.phase: OpPhase = "forward"
        self.unit = 0
        self.micro_batch = 0
        self._peaks: dict[OpPhase, tuple[int, int, int, dict[str, int]]] = {}
        self._highest: dict[OpPhase, int] = {}
        self._engines_most = -1
        self._engines_peak = Moment("forward", 0, 0, Ledger())

    def add(self, line: str, num_bytes: int) -> None:
        """Add bytes to a line, or take them away."""
        self.lines[line] += num_bytes
        self.total += num_bytes
        if num_bytes > 0 and self.total > self._highest.get(self.phase, -1):
            self._note({})

    def touch(self, more: Mapping[str, int]) -> None:
        """Note a moment at which so many more bytes are alive, by line."""
        if self.total + sum(more.values()) > self._highest.get(self.phase, -1):
            self._note(more)

    def _note(self, more: Mapping[str, int]) -> None:
        lines = dict(self.lines)
        for line, num_bytes in more.items():
            lines[line] += num_bytes
        total = self.total + sum(more.values())
        self._highest[self.phase] = total
        self._peaks[self.phase] = (total, self.unit, self.micro_batch, lines)

    def look(self) -> None:
        """Note this moment if the engine's own lines are larger than at all that were looked at."""
        engines = sum(self.lines[name] for name in _ENGINES)
        if engines > self._engines_most:
            self._engines_most = engines
            self._engines_peak = Moment(self.phase, self.unit, self.micro_batch, self.ledger())

    @property
    def engines_peak(self) -> Moment:
        """The largest moment that `look` has seen."""
        return self._engines_peak

    def ledger(self) -> Ledger:
        """Return the present lines."""
        return Ledger(**self.lines)

    def peaks(self) -> tuple[Moment, ...]:
        """Return the largest moment of each phase, in the order of a step."""
        return tuple(
            Moment(phase, unit, micro_batch, Ledger(**lines))
            for phase, (_, unit, micro_batch, lines) in self._peaks.items()
        )
