"""The ZeRO formulas: bytes and traffic of one rank, from a number of parameters alone.

Note [What the lines mean]
The lines are what one rank holds at the end of backward, before the optimizer's step; between
steps the gradients are gone. Where the computing and the master dtype are the same, there are no
master weights: the shard is a slice of the full copy, or all there is at stage 3. Where they
differ, this engine keeps no shard in the computing dtype: the gather casts the master. Gradients
that are reduced once per step are counted in full, as an accumulation window holds them.

Note [Where offloaded state lies]
As the engine has it: the master weights (or, without any, the slices) are where parameters are to
rest, on the host where these stay on the device. There a gather fetches them, and the device casts
them; of parameters that stay, stage 3 has a copy on the device, fetched once a step. Reduced
gradients have memory of their own on the host all the time, or are in files until the step.
Precisions of papers (``keeps_compute_shard``) have the masters with the optimizer's state, and
slices in the computing dtype where parameters rest, which are gathered from there (ZeRO-Offload,
arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857). A fraction is one of elements here, of whole
units in a run.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.errors import ConfigError
from shardwise.homes import Offload, OffloadLike, tier_of
from shardwise.layout.segments import flat_layout
from shardwise.plan.candidate import planned_offload
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, Dtypes, Optimizer, row_of
from shardwise.precisions import plain_precision
from shardwise.quantities import check_whole, parse_count
from shardwise.stages import STAGES, ReduceEvery, Stage

MAX_PARAMS = 10**18
MAX_RANKS = 10**7


def account(
    params: int | float | str,
    ranks: int,
    stage: int = 3,
    precision: str = "bf16",
    optimizer: str = "adamw",
    offload: OffloadLike = None,
    replicas: int = 1,
    accumulation: int = 1,
    reduce_every: ReduceEvery | None = None,
    ranks_per_node: int = 8,
) -> "Accounting":
    """Return the bytes and the traffic of one rank; the arguments are the fields of a `Setup`.

    **Cost** some microseconds. **Raises** ConfigError naming the field that is wrong.
    """
    count = parse_count(params)
    check_whole(count, "params", MAX_PARAMS)
    how = (ranks, stage, replicas, precision, optimizer, planned_offload(offload), accumulation)
    return Accounting(count, Setup(*how, reduce_every, ranks_per_node))


@dataclass(frozen=True)
class Setup:
    """How a model is trained, as far as the formulas ask.

    ``ranks`` share one copy of the state; ``replicas`` such groups hold the same (hybrid sharding).
    ``accumulation`` is micro-batches per step; ``reduce_every`` None: as the stage says.

    **Raises** ConfigError, naming the field and what would do.
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
        for name in ("ranks", "replicas", "accumulation", "ranks_per_node"):
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
        """Bytes that stay when the gradients are freed; their memory on the host stays too."""
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

    def of_all_stages(self) -> "list[Accounting]":
        """Return the same accounting for every stage."""
        return [replace(self, setup=replace(self.setup, stage=each.number)) for each in STAGES]

    # -- the four lines
    @property
    def parameters(self) -> Bytes:
        """Parameters as they are computed with, and slices that gathers read."""
        size, papers = DTYPE_BYTES[self._dtypes.compute], self._dtypes.keeps_compute_shard
        if not self._stage.frees_after_backward:
            return Bytes(device=self.params * size)
        # Without masters, or beside them in papers, slices are there; else the master is gathered.
        here = 0 if self._dtypes.has_master and not papers else self._shard - self._moved
        if not self._params_away:
            return Bytes(device=(here + self._moved) * size)
        away = _at(tier_of(self.setup.offload.params), self._moved * size if papers else 0)
        return Bytes(device=here * size) + away

    @property
    def master_weights(self) -> Bytes:
        """Weights that the optimizer updates, apart from what layers compute with."""
        here, size = self._state - self._moved, DTYPE_BYTES[self._dtypes.master]
        device = Bytes(device=here * size * self._dtypes.has_master)
        return device + _at(self._masters_tier, self._moved * size)

    @property
    def gradients(self) -> Bytes:
        """Reduced gradients."""
        size, extra = DTYPE_BYTES[self._dtypes.reduce], self._dtypes.optimizer_grad
        resting = self.params if self._reduce_every == "step" else self._state - self._moved
        beside = DTYPE_BYTES[extra] if extra is not None else 0
        here = resting * size + (self._state - self._moved) * beside
        away = self._moved * (self._grad_size + beside)
        return Bytes(device=here) + _at(tier_of(self.setup.offload.grads), away)

    @property
    def optimizer_state(self) -> Bytes:
        """State of the optimizer."""
        here = self._state - self._moved
        device = Bytes(device=self._optimizer.state_bytes(here, self._dtypes.master))
        return device + _at(self._state_tier, self._moved_state_bytes)

    @property
    def traffic(self) -> Traffic:
        """Bytes that the rank sends and copies in one step."""
        setup, stage, dtypes = self.setup, self._stage, self._dtypes
        compute, reduced = DTYPE_BYTES[dtypes.compute], DTYPE_BYTES[dtypes.reduce]
        num_reductions = self._num_reductions
        num_gathers, gathered = self._uses or 1, compute  # a kept copy is gathered after the step
        if not stage.shards_state:  # the mean is gathered: with the reduction, an all-reduce
            num_gathers, gathered = num_reductions, reduced
        once = _share(self.params, setup.ranks)
        replica_sent_elements = 2 * num_reductions * _share(self._shard, setup.replicas)
        to_host = num_reductions * self._moved * self._grad_size
        to_device = self._num_fetches * self._moved * self._fetched_size
        if setup.offload.step_on == "device" and self._optimizer.by:
            taken_back = self._moved_state_bytes + self._moved * DTYPE_BYTES[dtypes.master]
            to_device += taken_back + self._moved * self._grad_size
            to_host += taken_back
        nvme_read, nvme_written = self._disk_traffic()
        return Traffic(
            num_gathers=num_gathers,
            num_reductions=num_reductions,
            shard_sent_elements=(num_gathers + num_reductions) * once,
            shard_sent_bytes=(num_gathers * gathered + num_reductions * reduced) * once,
            replica_sent_elements=replica_sent_elements,
            replica_sent_bytes=replica_sent_elements * reduced,
            to_host_bytes=to_host,
            to_device_bytes=to_device,
            nvme_read_bytes=nvme_read,
            nvme_written_bytes=nvme_written,
        )

    def _disk_traffic(self) -> tuple[int, int]:
        """Return the bytes read and written: once for the step, parameters for each fetch as well.

        Gradients of a further micro-batch are read with the first, and their sum is written.
        """
        offload, moved = self.setup.offload, self._moved
        read = written = self._moved_state_bytes if self._state_tier == "nvme" else 0
        if self._masters_tier == "nvme":
            read += moved * DTYPE_BYTES[self._dtypes.master]
            written = read
        if tier_of(offload.params) == "nvme" and (
            self._params_away or self._masters_tier == "nvme"
        ):
            read += self._num_fetches * moved * self._fetched_size
            if self._dtypes.keeps_compute_shard:
                written += moved * self._fetched_size
        if tier_of(offload.grads) == "nvme":
            times = 2 * self._num_reductions - 1
            read += times * moved * self._grad_size
            written += times * moved * self._grad_size
        return read, written

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences on what no line holds, the general first."""
        setup, note = self.setup, self._optimizer.note
        by_step = self._reduce_every == "step"
        sentences = {
            "Activations, logits, inputs, module buffers and temporary tensors of any kind.": True,
            "The device's context, communicators, staging of collectives, padding, fragmentation. "
            "In Table 2 of the ZeRO paper the largest models that trained had 65 % (stage 0) to "
            "82 % (stage 1) of the parameters that such formulas allow.": True,
            "Full parameters of the units in use or gathered ahead.": self._uses > 0,
            "Full gradients of units that are not reduced yet.": not by_step,
            "Gradients are counted in full, as an accumulation window holds them; with one "
            "micro-batch per step they are reduced unit by unit, and fewer are held.": (
                by_step and self._stage.shards_state and setup.accumulation == 1
            ),
            "One step counter of 4 bytes per tensor.": self._optimizer.has_step,
            f"{note[:1].upper()}{note[1:]}.": bool(note),
            "Buffers between files and memory, and those that a step on the device passes; a run "
            "moves whole units of a model.": self._moved > 0,
            f"Precision {setup.precision!r} is how another system keeps its state; the engine does "
            "not run it.": not self._dtypes.engine_runs_it,
        }
        return tuple(sentence for sentence, holds in sentences.items() if holds)

    # -- rows of the tables, and numbers of elements
    @property
    def _stage(self) -> Stage:
        return STAGES[self.setup.stage]

    @property
    def _dtypes(self) -> Dtypes:
        return PRECISIONS[self.setup.precision]

    @property
    def _optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.setup.optimizer]

    @property
    def _reduce_every(self) -> ReduceEvery:
        return self.setup.reduce_every or self._stage.reduce_every

    @cached_property
    def _shard(self) -> int:
        return flat_layout(((self.params,),), self.setup.ranks).piece(0, 0).numel

    @property
    def _state(self) -> int:
        """Elements that the optimizer of one rank updates."""
        return self._shard if self._stage.shards_state else self.params

    @cached_property
    def _moved(self) -> int:
        """Elements of ``_state`` that are not updated on the device."""
        offload = self.setup.offload
        numerator, denominator = float(offload.fraction).as_integer_ratio()
        return -(-self._state * numerator // denominator) if offload.moves_state else 0

    @property
    def _params_away(self) -> bool:
        """Whether parameters come and go between their place and the device."""
        return self._stage.frees_after_backward and self.setup.offload.params != "device"

    @property
    def _masters_tier(self) -> str:
        """Place of the master weights that are not updated on the device."""
        offload = self.setup.offload
        in_papers = self._dtypes.keeps_compute_shard
        tier = tier_of(offload.optimizer if in_papers else offload.params)
        return "cpu" if tier == "device" else tier

    @property
    def _state_tier(self) -> str:
        """Place of the optimizer's state that is not updated on the device."""
        tier = tier_of(self.setup.offload.optimizer)
        in_files = bool(self._optimizer.by) or self._dtypes.keeps_compute_shard
        return tier if in_files or tier == "device" else "cpu"

    @property
    def _moved_state_bytes(self) -> int:
        return self._optimizer.state_bytes(self._moved, self._dtypes.master)

    @property
    def _fetched_size(self) -> int:
        """Bytes of an element that is fetched."""
        dtypes = self._dtypes
        return DTYPE_BYTES[dtypes.compute if dtypes.keeps_compute_shard else dtypes.master]

    @property
    def _grad_size(self) -> int:
        """Bytes of an element of reduced gradients that are not on the device."""
        dtypes = self._dtypes
        return DTYPE_BYTES[dtypes.reduce if dtypes.keeps_compute_shard else dtypes.master]

    @property
    def _num_reductions(self) -> int:
        return self.setup.accumulation if self._reduce_every == "micro_batch" else 1

    @property
    def _uses(self) -> int:
        """Gathers per step of parameters that are freed after use."""
        stage = self._stage
        return (stage.frees_after_forward + stage.frees_after_backward) * self.setup.accumulation

    @property
    def _num_fetches(self) -> int:
        """Fetches of offloaded parameters per step: one for each use, or one after the step.

        After a step on the device its copy there has the new values.
        """
        if self._params_away:
            return self._uses
        has_copy = self._stage.frees_after_backward or not self._stage.shards_state
        stepped_there = self.setup.offload.step_on == "device" and self._optimizer.by
        return 0 if stepped_there and (has_copy or self.setup.ranks == 1) else 1


def _at(tier: str, num_bytes: int) -> Bytes:
    """Return bytes at a place."""
    return Bytes(**{"host" if tier == "cpu" else tier: num_bytes})


def _share(numel: int, ranks: int) -> int:
    """Return what one rank sends of an even all-gather or reduce-scatter: (N - 1)/N of it."""
    return numel - numel // ranks


def accounting_facts(chosen: Accounting) -> dict[str, Any]:
    """Return an accounting of every stage as plain data; bytes are integers, of one rank."""
    setup = chosen.setup
    return {
        "kind": "accounting",
        "params": chosen.params,
        **asdict(setup),
        "world_size": setup.world_size,
        "stages": [
            {
                "stage": each.setup.stage,
                **{
                    f"{name}_{home}_bytes": num_bytes
                    for name, held in (
                        ("total", each.total),
                        ("between_steps", each.between_steps),
                        *each.lines.items(),
                    )
                    for home, num_bytes in asdict(held).items()
                },
                "host_bytes_per_node": each.host_bytes_per_node,
                "per_step": asdict(each.traffic),
            }
            for each in chosen.of_all_stages()
        ],
        "left_out": list(chosen.left_out),
        "sources": {
            "precision": PRECISIONS[setup.precision].source,
            "optimizer": OPTIMIZERS[setup.optimizer].source,
        },
    }
