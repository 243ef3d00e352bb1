"""A candidate: a configuration of a model's run with all settings that a search may vary."""

from collections.abc import Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Literal

from shardwise.homes import Offload, OffloadLike, check_coded, resolve_offload
from shardwise.outer import Windows
from shardwise.plan.sizes import OPTIMIZERS, PRECISIONS, Dtypes, row_of
from shardwise.precisions import REDUCE_FORMATS, Coding, GatherName, ReduceName, plain_precision
from shardwise.quantities import format_bytes
from shardwise.stages import STAGES, LayoutName, ReduceEvery

Transport = Literal["coalesced", "point_to_point"]  # NCCL-like, gloo-like
PipelineSchedule = Literal["1f1b", "gpipe"]
ContextMethod = Literal["gather", "heads", "ring"]
Kernels = Literal["eager", "compiled"]
LossKind = Literal[
    "eager",
    "held",
    "freed",
    "transformers",
    "transformers_autocast",
    "chunked",
    "compiled",
    "vocab_parallel",
    "loss_parallel",
    "fused",
]
Checkpointing = Literal["none", "selective", "per_op", "full"]
ALL_DEGREES = ("tp", "pp", "cp", "ep")  # a run has them under the same names


@dataclass(frozen=True)
class Candidate:
    """The sharding of a model, its batch and its kernels.

    ``num_shards x num_replicas`` data-parallel ranks; with tensor, pipeline and context degrees
    the world is their product. ``ep`` ranks, cut out of shards x context x tensor ranks, share the
    experts. ``pp_schedule`` and ``cp_method`` are the keys of `shardwise train`.
    ``activation_checkpointing`` is a `Checkpointing`; ``kernels`` are those of PyTorch, or compiled
    by torch.compile. ``loss`` is the implementation of cross-entropy: eager from all logits in
    float32; held, if the caller keeps the logits until backward ends; in chunks, compiled, or fused
    with the head.
    ``prefetch_bytes`` None: the largest unit, as the engine does. ``offload`` is that of `shard()`;
    "nvme" needs no folder here. Its defaults are filled in.
    ``reduce_every`` None: as the stage says. ``optimizer`` names a row of ``sizes.OPTIMIZERS``.
    ``save_every`` and ``memory_every`` are steps between checkpoints, on disk and in the hosts'
    memory; 0: none. ``copies`` further hosts keep what a rank has in memory. ``local_steps``:
    replicas step locally, and are synchronised once in a window; None: in every step.

    **Raises** ConfigError for a precision or an optimizer that is in no table, and for settings
    that contradict each other.
    """

    stage: int = 3
    num_shards: int = 1
    num_replicas: int = 1
    precision: str = "bf16"
    gather: GatherName | None = None
    reduce: ReduceName | None = None
    gather_block: int = 256
    layout: LayoutName = "rows"
    units: tuple[str, ...] | None = None
    reduce_every: ReduceEvery | None = None
    prefetch_bytes: int | None = None
    bucket_bytes: int = 1 << 20
    reduces_in_flight: int = 2
    micro_batch: int = 1
    accumulation: int = 1
    activation_checkpointing: str = "none"
    kernels: Kernels = "eager"
    loss: LossKind = "eager"
    optimizer: str = "adamw"
    optimizer_kernel: Literal["fused", "foreach", "loop"] = "fused"
    offload: Offload = field(default_factory=Offload)
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    pp_schedule: PipelineSchedule = "1f1b"
    cp_method: ContextMethod = "gather"
    transport: Transport = "coalesced"
    save_every: int = 0
    memory_every: int = 0
    copies: int = 0
    local_steps: Windows | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", plain_precision(self.precision))
        row_of(PRECISIONS, self.precision, "precision")
        row_of(OPTIMIZERS, self.optimizer, "optimizer")
        if self.local_steps is not None and not isinstance(self.local_steps, Windows):
            object.__setattr__(self, "local_steps", Windows.of_fields(self.local_steps))
        object.__setattr__(self, "offload", planned_offload(self.offload))
        if self.gather is not None:
            check_coded(self.gather, STAGES[self.stage], self.offload, self.layout)

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of each kind of tensor."""
        return PRECISIONS[self.precision]

    @property
    def coding(self) -> Coding | None:
        """The encoding of gathers; None if parameters are sent in the compute dtype."""
        return None if self.gather is None else Coding(self.gather, self.gather_block)

    @property
    def reduce_coding(self) -> Coding | None:
        """The encoding of reductions; None if gradients are sent in their own dtype."""
        if self.reduce is None:
            return None
        return Coding(REDUCE_FORMATS[self.reduce], self.gather_block)

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks."""
        return self.num_shards * self.num_replicas

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.data_parallel * prod(self.degrees)

    @property
    def summed_replicas(self) -> int:
        """Number of replicas over which gradients are summed."""
        return 1 if self.local_steps is not None else self.num_replicas

    @property
    def with_context_shards(self) -> "Candidate":
        """The candidate with context ranks as shard ranks, over which the state is sharded."""
        return replace(self, num_shards=self.num_shards * self.cp, cp=1)

    @property
    def state_key(self) -> "Candidate":
        """The candidate without settings that do not affect the memory between steps.

        It is the key of caches.
        """
        return replace(
            self,
            micro_batch=1,
            accumulation=1,
            kernels="eager",
            loss="eager",
            prefetch_bytes=None,
            activation_checkpointing="none",
        )

    @property
    def degrees(self) -> tuple[int, int, int]:
        """The degrees of tensor, pipeline and context parallelism."""
        return self.tp, self.pp, self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which the experts that a rank has are sharded (efsdp)."""
        return self.num_shards * self.cp * self.tp // self.ep

    @cached_property
    def label(self) -> str:
        """Describe the candidate in one line: its settings by name, without defaults."""
        first = [f"stage {self.stage}", f"micro-batch {self.micro_batch}"]
        left_out = {"stage", "micro_batch", "transport", "copies"}
        if self.num_replicas == 1:
            left_out.add("num_shards")
        return ", ".join(first + _describe_changes(self, left_out))


def planned_offload(offload: OffloadLike) -> Offload:
    """Return the offload with all fields. **Raises** ConfigError as `shard()` does."""
    return resolve_offload(offload, names_folders=False) or Offload()


def _describe_changes(settings: Candidate | Offload, left_out: Set[str] = frozenset()) -> list[str]:
    """List the settings that differ from the default, except those in ``left_out``."""
    descriptions: list[str] = []
    default = type(settings)()
    for key in (setting.name for setting in fields(settings)):
        value, name = getattr(settings, key), key.replace("_", " ")
        if key in left_out or value == getattr(default, key):
            continue
        if isinstance(value, Offload):
            descriptions.append(f"offload ({', '.join(_describe_changes(value))})")
        elif isinstance(value, tuple):
            descriptions.append(f"{name} {' '.join(value) or 'none'}")
        elif key.endswith("_bytes"):
            descriptions.append(f"{name.removesuffix(' bytes')} {format_bytes(value)}")
        else:
            descriptions.append(name if value is True else f"{name} {value}")
    return descriptions
