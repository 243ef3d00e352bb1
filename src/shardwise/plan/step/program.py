"""A played step: operations on streams in the order in which the host issues them, and bytes.

Each stream runs its operations one after the other, in this order; an operation begins when its
stream is free and all operations in ``after`` have ended. So the order of the list is an order in
which the times can be computed, and a `Program` needs no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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


# -- bytes
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
