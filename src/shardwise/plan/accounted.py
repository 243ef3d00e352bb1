"""An accounting as values: how a model is trained, bytes of one rank by place, what it sends."""

from dataclasses import dataclass, field

from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.plan.candidate import planned_offload
from shardwise.plan.sizes import OPTIMIZERS, PRECISIONS, row_of
from shardwise.precisions import plain_precision
from shardwise.quantities import check_whole
from shardwise.stages import STAGES, ReduceEvery

MAX_RANKS = 10**7


@dataclass(frozen=True)
class Setup:
    """How a model is trained, as far as the formulas ask.

    ``ranks`` share one copy of the state; ``replicas`` such groups hold the same (hybrid sharding).
    ``accumulation`` is micro-batches per step; ``reduce_every`` None: as the stage says.
    """

    ranks: int
    stage: int = 3
    replicas: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    offload: Offload = field(default_factory=Offload)
    accumulation: int = 1
    reduce_every: ReduceEvery | None = None
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", plain_precision(self.precision))
        object.__setattr__(self, "offload", planned_offload(self.offload))

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.ranks * self.replicas


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank by where they are."""

    device: int = 0
    host: int = 0
    nvme: int = 0

    @property
    def total(self) -> int:
        """Sum over the places."""
        return self.device + self.host + self.nvme

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host, self.nvme + other.nvme)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends and copies in one step, padding and counts of gradients left out.

    ``shard_sent_elements`` go to the ranks that share a copy, ``replica_sent_elements`` to other
    copies; bytes likewise. A gather and a reduction are one collective each over the whole model;
    an all-reduce is both. Gradients travel in the dtype of the reduction (over gloo, without
    accumulation, in the computing dtype). The last unit and the root are gathered once per
    micro-batch, which at stage 3 makes for a little less than this. The rest are copies between the
    rank's device and its host, and between host and disk.

    **Source** ZeRO, section 7; between copies FSDP (arXiv 2304.11277), section 3.2.2.
    """

    num_gathers: int
    num_reductions: int
    shard_sent_elements: int
    shard_sent_bytes: int
    replica_sent_elements: int
    replica_sent_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    nvme_read_bytes: int
    nvme_written_bytes: int


@dataclass(frozen=True)
class Accounting:
    """The bytes of one rank; see Note [What the lines mean]. The four lines add up to ``total``."""

    params: int
    setup: Setup
    parameters: Bytes
    master_weights: Bytes
    gradients: Bytes
    optimizer_state: Bytes
    traffic: Traffic
    left_out: tuple[str, ...]

    @property
    def lines(self) -> dict[str, Bytes]:
        """The four lines by name."""
        return {
            "parameters": self.parameters,
            "master_weights": self.master_weights,
            "gradients": self.gradients,
            "optimizer_state": self.optimizer_state,
        }

    @property
    def total(self) -> Bytes:
        """Sum of the lines."""
        return sum(self.lines.values(), Bytes())

    @property
    def between_steps(self) -> Bytes:
        """What stays when the gradients are gone; their memory on the host does, too."""
        kept = Bytes(host=self.gradients.host)
        return self.parameters + self.master_weights + self.optimizer_state + kept

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at the end of backward."""
        return self.total.device

    @property
    def host_bytes(self) -> int:
        """Bytes on the host, of this rank."""
        return self.total.host

    @property
    def nvme_bytes(self) -> int:
        """Bytes on disk, of this rank."""
        return self.total.nvme

    @property
    def host_bytes_per_node(self) -> int:
        """Host memory that the ranks of one node take together."""
        return self.total.host * min(self.setup.ranks_per_node, self.setup.world_size)


def check_setup(setup: Setup) -> None:
    """Check every field. **Raises** ConfigError, naming the field and what would do."""
    for name in ("ranks", "replicas", "accumulation", "ranks_per_node"):
        check_whole(getattr(setup, name), name, MAX_RANKS)
    check_whole(setup.world_size, "ranks x replicas", MAX_RANKS)
    if repr(setup.stage) not in map(str, range(len(STAGES))):  # nor True, nor 2.0
        raise ConfigError(f"stage={setup.stage!r}: expected 0, 1, 2 or 3")
    row_of(PRECISIONS, setup.precision, "precision")
    row_of(OPTIMIZERS, setup.optimizer, "optimizer")
    if setup.reduce_every not in (None, "step", "micro_batch"):
        raise ConfigError(f"reduce_every={setup.reduce_every!r}: expected 'step' or 'micro_batch'")
