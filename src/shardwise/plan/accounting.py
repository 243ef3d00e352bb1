"""The ZeRO formulas: bytes and traffic of one rank, from a number of parameters alone.

Note [What the lines mean]
The lines are what one rank's device holds at the end of backward, before the optimizer's step;
between steps the gradients are gone. Where the computing and the master dtype are the same, there
are no master weights: the shard is a slice of the full copy, or all there is at stage 3. Where they
differ, this engine keeps no shard in the computing dtype: the gather casts the master. Gradients
that are reduced once per step are counted in full, as an accumulation window holds them.
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
    how = (ranks, stage, replicas, precision, optimizer, accumulation, reduce_every)
    return Accounting(count, *how)


@dataclass(frozen=True)
class Traffic:
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

        Parameters are those that layers compute with, and slices that gathers read; master weights
        those that the optimizer updates apart from them; gradients are reduced ones.
        """
        stage, dtypes = STAGES[self.stage], PRECISIONS[self.precision]
        master, reduce = DTYPE_BYTES[dtypes.master], DTYPE_BYTES[dtypes.reduce]
        here = self._shard if stage.shards_state else self.params  # what the optimizer updates
        kept = self.params
        if stage.frees_after_backward:
            # Without masters, or beside them in papers, slices are there; else masters are read.
            kept = 0 if dtypes.has_master and not dtypes.keeps_compute_shard else here
        beside = DTYPE_BYTES[dtypes.optimizer_grad] if dtypes.optimizer_grad is not None else 0
        resting = self.params if self._reduces_by_step else here
        gradients = resting * reduce + here * beside
        return {
            "parameters": kept * DTYPE_BYTES[dtypes.compute],
            "master_weights": here * master * dtypes.has_master,
            "gradients": gradients,
            "optimizer_state": OPTIMIZERS[self.optimizer].state_bytes(here, dtypes.master),
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
    def traffic(self) -> Traffic:
        """Bytes that the rank sends in one step."""
        dtypes, shards_state = PRECISIONS[self.precision], STAGES[self.stage].shards_state
        reduced, gathered = DTYPE_BYTES[dtypes.reduce], DTYPE_BYTES[dtypes.compute]
        reductions = 1 if self._reduces_by_step else self.accumulation
        gathers = self._uses or 1  # a kept copy: once, after the step
        if not shards_state:  # the mean is gathered: with the reduction, an all-reduce
            gathers, gathered = reductions, reduced
        once = _share(self.params, self.ranks)
        replica_sent_elements = 2 * reductions * _share(self._shard, self.replicas)
        return Traffic(
            num_gathers=gathers,
            num_reductions=reductions,
            shard_sent_elements=(gathers + reductions) * once,
            shard_sent_bytes=(gathers * gathered + reductions * reduced) * once,
            replica_sent_elements=replica_sent_elements,
            replica_sent_bytes=replica_sent_elements * reduced,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences on the memory that no line holds, the general first."""
        optimizer, by_step = OPTIMIZERS[self.optimizer], self._reduces_by_step
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
    """Return what one rank sends of an even all-gather or reduce-scatter: (N - 1)/N of it."""
    return numel - numel // ranks


def accounting_facts(chosen: Accounting) -> dict[str, object]:
    """Return an accounting of every stage as plain data; bytes are integers, of one rank."""
    return {
        "kind": "accounting",
        **asdict(chosen),
        "world_size": chosen.world_size,
        "stages": [
            {
                "stage": each.stage,
                "total_device_bytes": each.device_bytes,
                "between_steps_device_bytes": each.between_steps,
                **{f"{name}_device_bytes": held for name, held in each.lines.items()},
                "per_step": asdict(each.traffic),
            }
            for each in chosen.of_all_stages()
        ],
        "left_out": list(chosen.left_out),
        "sources": {
            "precision": PRECISIONS[chosen.precision].source,
            "optimizer": OPTIMIZERS[chosen.optimizer].source,
        },
    }
