"""The ZeRO formulas: bytes and traffic of one rank, from a number of parameters alone.

Note [What the lines mean]
The lines are the bytes on one rank's device at the end of backward, before the optimizer's step.
Between steps there are no gradients. If the compute and the master dtype are the same, there are no
master weights: the shard is a slice of the full copy, or at stage 3 the only copy. If they differ,
this engine keeps no shard in the compute dtype: the gather casts the master. Gradients that are
reduced once per step are counted in full, as an accumulation window holds them.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property

from shardwise.errors import ConfigError
from shardwise.layout.segments import flat_layout
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, row_of
from shardwise.precisions import plain_precision
from shardwise.quantities import check_whole, parse_count
from shardwise.stages import STAGES, ReduceEvery

MAX_PARAMS = 10**18
MAX_RANKS = 10**7


def account(
    params: int | float | str,
    ranks: int,
    stage: int = 3,
    precision: str = "bf16",
    optimizer: str = "adamw",
    replicas: int = 1,
    accumulation: int = 1,
    reduce_every: ReduceEvery | None = None,
) -> "Accounting":
    """Return the bytes and the traffic of one rank; the arguments are fields of an `Accounting`.

    **Cost** some microseconds. **Raises** ConfigError naming the field that is wrong.
    """
    count = parse_count(params)
    return Accounting(
        params=count,
        ranks=ranks,
        stage=stage,
        replicas=replicas,
        precision=precision,
        optimizer=optimizer,
        accumulation=accumulation,
        reduce_every=reduce_every,
    )


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one rank sends in one step, without padding and counts of gradients.

    ``shard_sent_elements`` go to the ranks that share a copy, ``replica_sent_elements`` to other
    copies; bytes likewise. A gather and a reduction are one collective each over the whole model;
    an all-reduce is both. Gradients travel in the dtype of the reduction (over gloo, without
    accumulation, in the computing dtype). The last unit and the root are gathered once per
    micro-batch, which at stage 3 makes for a little less than this.

    **Source** ZeRO, section 7; between copies FSDP (arXiv 2304.11277), section 3.2.2.
    """

    num_gathers: int
    num_reductions: int
    shard_sent_elements: int
    shard_sent_bytes: int
    replica_sent_elements: int
    replica_sent_bytes: int


@dataclass(frozen=True)
class Accounting:
    """The bytes of one rank; see Note [What the lines mean].

    ``ranks`` share one copy of the state; ``replicas`` such groups hold the same (hybrid sharding).
    ``accumulation`` is micro-batches per step; ``reduce_every`` None: as the stage says.

    **Raises** ConfigError, naming the field and what would do.
    """

    params: int
    ranks: int
    stage: int = 3
    replicas: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    accumulation: int = 1
    reduce_every: ReduceEvery | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", plain_precision(self.precision))
        check_whole(self.params, "params", MAX_PARAMS)
        for name in ("ranks", "replicas", "accumulation"):
            check_whole(getattr(self, name), name, MAX_RANKS)
        check_whole(self.world_size, "ranks x replicas", MAX_RANKS)
        if repr(self.stage) not in map(str, range(len(STAGES))):  # nor True, nor 2.0
            raise ConfigError(f"stage={self.stage!r}: expected 0, 1, 2 or 3")
        row_of(PRECISIONS, self.precision, "precision")
        row_of(OPTIMIZERS, self.optimizer, "optimizer")
        if self.reduce_every not in (None, "step", "micro_batch"):
            raise ConfigError(
                f"reduce_every={self.reduce_every!r}: expected 'step' or 'micro_batch'"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.ranks * self.replicas

    @cached_property
    def lines(self) -> dict[str, int]:
        """The four lines by name, of one rank's device.

        ``parameters`` are those that layers compute with, and slices that gathers read.
        ``master_weights`` are separate copies that the optimizer updates. ``gradients`` are reduced
        ones.
        """
        stage, dtypes = STAGES[self.stage], PRECISIONS[self.precision]
        master, reduce = DTYPE_BYTES[dtypes.master], DTYPE_BYTES[dtypes.reduce]
        updated = self._shard if stage.shards_state else self.params  # by the optimizer
        kept = self.params
        if stage.frees_after_backward:
            # The slices in the compute dtype; without them gathers read the masters.
            kept = 0 if dtypes.has_master and not dtypes.keeps_compute_shard else updated
        gradients = (self.params if self._reduces_by_step else updated) * reduce
        if dtypes.optimizer_grad is not None:
            gradients += updated * DTYPE_BYTES[dtypes.optimizer_grad]
        return {
            "parameters": kept * DTYPE_BYTES[dtypes.compute],
            "master_weights": updated * master * dtypes.has_master,
            "gradients": gradients,
            "optimizer_state": OPTIMIZERS[self.optimizer].state_bytes(updated, dtypes.master),
        }

    @property
    def _shard(self) -> int:
        """Elements of a slice."""
        return flat_layout(((self.params,),), self.ranks).piece(0, 0).numel

    @property
    def _uses(self) -> int:
        """Gathers per step of parameters that are freed after use."""
        stage = STAGES[self.stage]
        return (stage.frees_after_forward + stage.frees_after_backward) * self.accumulation

    @property
    def _reduces_by_step(self) -> bool:
        return (self.reduce_every or STAGES[self.stage].reduce_every) == "step"

    @property
    def device_bytes(self) -> int:
        """Bytes at the end of backward: the sum of the lines."""
        return sum(self.lines.values())

    @property
    def between_steps(self) -> int:
        """Bytes that stay when the gradients are freed."""
        return self.device_bytes - self.lines["gradients"]

    def of_all_stages(self) -> "list[Accounting]":
        """Return the same accounting for every stage."""
        return [replace(self, stage=stage.number) for stage in STAGES]

    @property
    def traffic(self) -> StepTraffic:
        """Bytes that the rank sends in one step."""
        dtypes, shards_state = PRECISIONS[self.precision], STAGES[self.stage].shards_state
        reduced, gathered = DTYPE_BYTES[dtypes.reduce], DTYPE_BYTES[dtypes.compute]
        reductions = 1 if self._reduces_by_step else self.accumulation
        gathers = self._uses or 1  # a kept copy: once, after the step
        if not shards_state:  # a reduction and a gather of the mean: an all-reduce
            gathers = reductions
            gathered = reduced
        once = _share(self.params, self.ranks)
        replica_sent_elements = 2 * reductions * _share(self._shard, self.replicas)
        return StepTraffic(
            num_gathers=gathers,
            num_reductions=reductions,
            shard_sent_elements=(gathers + reductions) * once,
            shard_sent_bytes=(gathers * gathered + reductions * reduced) * once,
            replica_sent_elements=replica_sent_elements,
            replica_sent_bytes=replica_sent_elements * reduced,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences on the memory that no line counts, general ones first."""
        optimizer = OPTIMIZERS[self.optimizer]
        by_step = self._reduces_by_step
        note = optimizer.note
        sentences = {
            "Activations, logits, inputs, module buffers and temporary tensors of any kind.": True,
            "The device's context, communicators, staging of collectives, padding, fragmentation. "
            "In Table 2 of the ZeRO paper the largest models that trained had 65 % (stage 0) to "
            "82 % (stage 1) of the parameters that such formulas allow.": True,
            "Full parameters of the units in use or gathered ahead.": self._uses > 0,
            "Full gradients of units that are not reduced yet.": not by_step,
            "Gradients are counted in full, as an accumulation window holds them; with one "
            "micro-batch per step they are reduced unit by unit, and fewer are held.": (
                by_step and STAGES[self.stage].shards_state and self.accumulation == 1
            ),
            "One step counter of 4 bytes per tensor.": optimizer.has_step,
            f"{note[:1].upper()}{note[1:]}.": bool(note),
            f"Precision {self.precision!r} is how another system keeps its state; the engine does "
            "not run it.": not PRECISIONS[self.precision].engine_runs_it,
        }
        return tuple(sentence for sentence, holds in sentences.items() if holds)


def _share(numel: int, ranks: int) -> int:
    """Return the elements that a rank sends in an even all-gather or reduce-scatter: (N - 1)/N."""
    return numel - numel // ranks


def accounting_facts(chosen: Accounting) -> dict[str, object]:
    """Return an accounting of every stage as plain data; bytes are integers, of one rank."""
    return {
        "kind": "accounting",
        **asdict(chosen),
        "world_size": chosen.world_size,
        "stages": [
            {
                "stage": row.stage,
                "total_device_bytes": row.device_bytes,
                "between_steps_device_bytes": row.between_steps,
                **{f"{name}_device_bytes": num_bytes for name, num_bytes in row.lines.items()},
                "per_step": asdict(row.traffic),
            }
            for row in chosen.of_all_stages()
        ],
        "left_out": list(chosen.left_out),
        "sources": {
            "precision": PRECISIONS[chosen.precision].source,
            "optimizer": OPTIMIZERS[chosen.optimizer].source,
        },
    }
