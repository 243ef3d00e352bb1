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
gradients have separate memory on the host all the time, or are in files until the step.
Precisions of papers (``keeps_compute_shard``) have the masters with the optimizer's state, and
slices in the computing dtype where parameters rest, which are gathered from there (ZeRO-Offload,
arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857). A fraction is one of elements here, of whole
units in a run.
"""

from dataclasses import asdict, dataclass, field, replace

from shardwise.errors import ConfigError
from shardwise.homes import Offload, OffloadLike, tier_of
from shardwise.layout.segments import flat_layout
from shardwise.plan.candidate import planned_offload
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
    """Bytes that one rank sends and copies in one step, without padding and counts of gradients.

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


class Accounting:
    """The bytes of one rank; see Note [What the lines mean]. The four lines add up to ``total``.

    ``parameters`` are those that layers compute with, and slices that gathers read;
    ``master_weights`` those that the optimizer updates apart from them; ``gradients`` reduced ones.
    """

    def __init__(self, params: int, setup: Setup) -> None:
        self.params, self.setup = params, setup
        self._stage, self._dtypes = STAGES[setup.stage], PRECISIONS[setup.precision]
        self._optimizer, offload = OPTIMIZERS[setup.optimizer], setup.offload
        self._reduce_every = setup.reduce_every or self._stage.reduce_every
        dtypes, is_paper = self._dtypes, self._dtypes.keeps_compute_shard
        names = dtypes.compute, dtypes.master, dtypes.reduce
        self._compute, self._master, self._reduce = (DTYPE_BYTES[name] for name in names)
        # Bytes of an element that is fetched, and of a reduced gradient that is not on the device.
        self._fetched = self._compute if is_paper else self._master
        self._grad = self._reduce if is_paper else self._master
        # Elements of a slice; those that the optimizer updates, and those not on the device.
        self._shard = flat_layout(((params,),), setup.ranks).piece(0, 0).numel
        state = self._shard if self._stage.shards_state else params
        numerator, denominator = float(offload.fraction).as_integer_ratio()
        moved = -(-state * numerator // denominator) if offload.moves_state else 0
        self._moved, here = moved, state - moved
        # True if parameters move between their place and the device for each use.
        self._params_away = self._stage.frees_after_backward and offload.params != "device"
        # Places of the master weights and of the state that are not updated on the device.
        self._masters_at = tier_of(offload.optimizer if is_paper else offload.params)
        self._masters_at = "cpu" if self._masters_at == "device" else self._masters_at
        self._state_at = tier_of(offload.optimizer)
        if self._state_at != "device" and not self._optimizer.by and not is_paper:
            self._state_at = "cpu"
        self._moved_state = self._optimizer.state_bytes(moved, dtypes.master)
        # Gathers per step of parameters that are freed after use, and reductions.
        frees = self._stage.frees_after_forward + self._stage.frees_after_backward
        self._uses = frees * setup.accumulation
        self._reductions = setup.accumulation if self._reduce_every == "micro_batch" else 1

        if self._stage.frees_after_backward:
            # Without masters, or beside them in papers, slices are there; else masters are read.
            slices = 0 if dtypes.has_master and not is_paper else here
            self.parameters = Bytes((slices + (0 if self._params_away else moved)) * self._compute)
            if self._params_away and is_paper:
                self.parameters += _at(tier_of(offload.params), moved * self._compute)
        else:
            self.parameters = Bytes(params * self._compute)
        self.master_weights = Bytes(here * self._master * dtypes.has_master)
        self.master_weights += _at(self._masters_at, moved * self._master)
        beside = DTYPE_BYTES[dtypes.optimizer_grad] if dtypes.optimizer_grad is not None else 0
        resting = params if self._reduce_every == "step" else here
        self.gradients = Bytes(resting * self._reduce + here * beside)
        self.gradients += _at(tier_of(offload.grads), moved * (self._grad + beside))
        self.optimizer_state = Bytes(self._optimizer.state_bytes(here, dtypes.master))
        self.optimizer_state += _at(self._state_at, self._moved_state)

    @property
    def lines(self) -> dict[str, Bytes]:
        """The four lines by name."""
        names = "parameters", "master_weights", "gradients", "optimizer_state"
        return {name: getattr(self, name) for name in names}

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
        return [Accounting(self.params, replace(self.setup, stage=s.number)) for s in STAGES]

    @property
    def traffic(self) -> Traffic:
        """Bytes that the rank sends and copies in one step.

        The disks are read and written once for the step, parameters for each fetch as well.
        Gradients of a further micro-batch are read with the first, and their sum is written.
        """
        setup, stage, offload, moved = self.setup, self._stage, self.setup.offload, self._moved
        reductions = self._reductions
        gathers, gathered = self._uses or 1, self._compute  # a kept copy: once, after the step
        if not stage.shards_state:  # the mean is gathered: with the reduction, an all-reduce
            gathers, gathered = reductions, self._reduce
        once = _share(self.params, setup.ranks)
        replica_sent_elements = 2 * reductions * _share(self._shard, setup.replicas)
        # Fetches of parameters: one for each use, or one after the step; after a step on the device
        # its copy there has the new values.
        has_copy = stage.frees_after_backward or not stage.shards_state or setup.ranks == 1
        steps_there = offload.step_on == "device" and bool(self._optimizer.by)
        fetches = self._uses if self._params_away else int(not (steps_there and has_copy))
        fetched = fetches * moved * self._fetched
        taken_back = (self._moved_state + moved * self._master) * steps_there
        masters = moved * self._master if self._masters_at == "nvme" else 0
        both = masters + (self._moved_state if self._state_at == "nvme" else 0)
        if tier_of(offload.grads) == "nvme":
            both += (2 * reductions - 1) * moved * self._grad
        in_files = tier_of(offload.params) == "nvme" and (self._params_away or masters > 0)
        is_paper = self._dtypes.keeps_compute_shard
        return Traffic(
            num_gathers=gathers,
            num_reductions=reductions,
            shard_sent_elements=(gathers + reductions) * once,
            shard_sent_bytes=(gathers * gathered + reductions * self._reduce) * once,
            replica_sent_elements=replica_sent_elements,
            replica_sent_bytes=replica_sent_elements * self._reduce,
            to_host_bytes=reductions * moved * self._grad + taken_back,
            to_device_bytes=fetched + taken_back + moved * self._grad * steps_there,
            nvme_read_bytes=both + in_files * fetched,
            nvme_written_bytes=both + in_files * is_paper * moved * self._fetched,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences on the memory that no line holds, the general first."""
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


def _at(tier: str, num_bytes: int) -> Bytes:
    """Return bytes at a place."""
    return Bytes(**{"host" if tier == "cpu" else tier: num_bytes})


def _share(numel: int, ranks: int) -> int:
    """Return what one rank sends of an even all-gather or reduce-scatter: (N - 1)/N of it."""
    return numel - numel // ranks


def accounting_facts(chosen: Accounting) -> dict[str, object]:
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
