"""Where the bytes of one rank are, line by line, and a played step."""

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
        return {name: num_bytes for name, num_bytes in self.lines().items() if name in ENGINES}


ENGINES = (
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
