"""The ZeRO formulas: bytes and traffic of one rank, from a number of parameters alone.

Note [What the lines mean]
The lines are what one rank holds at the end of backward, before the optimizer's step; between
steps the gradients are gone. Where the computing and the master dtype are the same, there are no
master weights: the shard is a slice of the full copy, or all there is at stage 3. Where they
differ, this engine keeps no shard in the computing dtype: the gather casts the master. Gradients
that are reduced once per step are counted in full, as an accumulation window holds them.

Note [Where offloaded state lies]
The optimizer's state and the master weights (or, without any, a copy of the shard) are at its home,
with the reduced gradients on the host; the device is left with the parameters in the computing
dtype, at stage 3 a shard of them (ZeRO-Offload, arXiv 2101.06840). Offloaded parameters rest as
shards in the computing dtype and are gathered from there (ZeRO-Infinity, arXiv 2104.07857).
"""

from dataclasses import dataclass, field

from shardwise.errors import ConfigError
from shardwise.layout.segments import flat_layout
from shardwise.plan.candidate import Offload
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, Dtypes, Optimizer, row_of
from shardwise.precisions import plain_precision
from shardwise.quantities import check_whole, parse_count
from shardwise.stages import STAGES, ReduceEvery, Stage

MAX_PARAMS = 10**18
MAX_RANKS = 10**7
_HOMES = ("device", "host", "nvme")


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
        """What stays when the gradients are gone."""
        return self.parameters + self.master_weights + self.optimizer_state

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
    offload = setup.offload
    for name, home in (("params", offload.params), ("optimizer", offload.optimizer)):
        row_of(dict.fromkeys(_HOMES), home, f"offload.{name}")
    row_of(dict.fromkeys(_HOMES[:2]), offload.activations, "offload.activations")
    if offload.params != "device" and setup.stage != len(STAGES) - 1:
        raise ConfigError(
            f"offload.params={offload.params!r} with stage={setup.stage}: expected stage 3, where "
            "parameters are sharded"
        )
    fraction = offload.optimizer_fraction
    if not 0 <= fraction <= 1:  # NaN is not
        raise ConfigError(f"offload.optimizer_fraction={fraction!r}: expected a number of 0 to 1")


@dataclass(frozen=True, eq=False, repr=False)
class _Sums:
    """What all lines are made of: rows of the tables, and numbers of elements.

    ``state`` is how many elements the optimizer of one rank updates, ``moved`` how many of them it
    does not update on the device.
    """

    params: int
    setup: Setup
    stage: Stage
    dtypes: Dtypes
    optimizer: Optimizer
    reduce_every: ReduceEvery
    shard: int
    state: int
    moved: int

    @property
    def has_separate_home(self) -> bool:
        """Tell whether the optimizer's elements are elsewhere than the parameters."""
        return self.setup.offload.params != self.setup.offload.optimizer

    @property
    def uses(self) -> int:
        """How often per step parameters are gathered to be used, where they are freed after."""
        stage = self.stage
        return (stage.frees_after_forward + stage.frees_after_backward) * self.setup.accumulation


def account(
    params: int | float | str,
    ranks: int,
    stage: int = 3,
    precision: str = "bf16",
    optimizer: str = "adamw",
    offload: Offload | None = None,
    replicas: int = 1,
    accumulation: int = 1,
    reduce_every: ReduceEvery | None = None,
    ranks_per_node: int = 8,
) -> Accounting:
    """Return the bytes and the traffic of one rank; the arguments are the fields of a `Setup`.

    **Cost** some microseconds. **Raises** ConfigError naming the field that is wrong.
    """
    how = (ranks, stage, replicas, precision, optimizer, offload or Offload(), accumulation)
    return account_setup(params, Setup(*how, reduce_every, ranks_per_node))


def account_setup(params: int | float | str, setup: Setup) -> Accounting:
    """Return the bytes and the traffic of one rank, as `account` does."""
    count = parse_count(params)
    check_whole(count, "params", MAX_PARAMS)
    check_setup(setup)
    stage, offload = STAGES[setup.stage], setup.offload
    shard = flat_layout(((count,),), setup.ranks).piece(0, 0).numel
    state = shard if stage.shards_state else count
    numerator, denominator = float(offload.optimizer_fraction).as_integer_ratio()
    moved = 0 if offload.optimizer == "device" else -(-state * numerator // denominator)
    sums = _Sums(
        params=count,
        setup=setup,
        stage=stage,
        dtypes=PRECISIONS[setup.precision],
        optimizer=OPTIMIZERS[setup.optimizer],
        reduce_every=setup.reduce_every or stage.reduce_every,
        shard=shard,
        state=state,
        moved=moved,
    )
    return Accounting(
        params=count,
        setup=setup,
        parameters=_parameters(sums),
        master_weights=_master_weights(sums),
        gradients=_gradients(sums),
        optimizer_state=_optimizer_state(sums),
        traffic=_traffic(sums),
        left_out=_left_out(sums),
    )


def _parameters(sums: _Sums) -> Bytes:
    size, offload = DTYPE_BYTES[sums.dtypes.compute], sums.setup.offload
    if not sums.stage.frees_after_backward:
        return Bytes(device=sums.params * size)
    if offload.params != "device":
        return Bytes(**{offload.params: sums.shard * size})
    if sums.dtypes.has_master and not sums.dtypes.keeps_compute_shard:
        return Bytes(device=sums.moved * size)  # the master itself is what is gathered
    return Bytes(device=sums.shard * size)


def _master_weights(sums: _Sums) -> Bytes:
    size, home = DTYPE_BYTES[sums.dtypes.master], sums.setup.offload.optimizer
    resting = sums.state - sums.moved if sums.dtypes.has_master else 0
    away = sums.moved if sums.dtypes.has_master or sums.has_separate_home else 0
    return Bytes(device=resting * size) + Bytes(**{home: away * size})


def _gradients(sums: _Sums) -> Bytes:
    size, extra = DTYPE_BYTES[sums.dtypes.reduce], sums.dtypes.optimizer_grad
    resting = sums.params if sums.reduce_every == "step" else sums.state - sums.moved
    held = Bytes(device=resting * size, host=sums.moved * size)
    size = DTYPE_BYTES[extra] if extra is not None else 0
    return held + Bytes(device=(sums.state - sums.moved) * size, host=sums.moved * size)


def _optimizer_state(sums: _Sums) -> Bytes:
    master, home = sums.dtypes.master, sums.setup.offload.optimizer
    resting = sums.optimizer.state_bytes(sums.state - sums.moved, master)
    return Bytes(device=resting) + Bytes(**{home: _optimizer_state_of_moved(sums)})


def _optimizer_state_of_moved(sums: _Sums) -> int:
    return sums.optimizer.state_bytes(sums.moved, sums.dtypes.master)


def _share(numel: int, ranks: int) -> int:
    """Return what one rank sends of an even all-gather or reduce-scatter: (N - 1)/N of it."""
    return numel - numel // ranks


def _traffic(sums: _Sums) -> Traffic:
    setup, stage, dtypes = sums.setup, sums.stage, sums.dtypes
    compute, reduced = DTYPE_BYTES[dtypes.compute], DTYPE_BYTES[dtypes.reduce]
    num_reductions = setup.accumulation if sums.reduce_every == "micro_batch" else 1
    num_gathers, gathered = sums.uses or 1, compute  # a kept copy is gathered after the step
    if not stage.shards_state:  # the mean is gathered: with the reduction, an all-reduce
        num_gathers, gathered = num_reductions, reduced
    once = _share(sums.params, setup.ranks)
    replica_sent_elements = 2 * num_reductions * _share(sums.shard, setup.replicas)
    to_host, to_device = num_reductions * sums.moved * reduced, sums.moved * compute
    if setup.offload.params != "device":
        to_host += (sums.state - sums.moved) * compute  # what the device has updated
        to_device = sums.uses * sums.shard * compute
    if setup.offload.step_on == "device" and sums.moved:
        taken_back = _optimizer_state_of_moved(sums) + sums.moved * DTYPE_BYTES[dtypes.master]
        if setup.offload.params == "device":
            to_device = 0
        to_device += taken_back + sums.moved * reduced
        to_host += taken_back
    nvme_read, nvme_written = _disk_traffic(sums)
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


def _disk_traffic(sums: _Sums) -> tuple[int, int]:
    """Return the bytes read and written: the optimizer's elements once, parameters at each use."""
    offload = sums.setup.offload
    read = written = 0
    if offload.optimizer == "nvme":
        read = _optimizer_state(sums).nvme + sums.moved * DTYPE_BYTES[sums.dtypes.master]
        written = read
    stored = _parameters(sums).nvme
    is_master = not sums.dtypes.has_master and not sums.has_separate_home
    return read + sums.uses * stored, written + (0 if is_master else stored)


def _left_out(sums: _Sums) -> tuple[str, ...]:
    """Say in sentences what no line holds, the general first."""
    setup = sums.setup
    said = {
        "Activations, logits, inputs, module buffers and temporary tensors of any kind.": True,
        "The device's context, communicators, staging of collectives, padding, fragmentation. In "
        "Table 2 of the ZeRO paper the largest models that trained had 65 % (stage 0) to 82 % "
        "(stage 1) of the parameters that such formulas allow.": True,
        "Full parameters of the units in use or gathered ahead.": sums.uses > 0,
        "Full gradients of units that are not reduced yet.": sums.reduce_every == "micro_batch",
        "Gradients are counted in full, as an accumulation window holds them; with one micro-batch "
        "per step they are reduced unit by unit, and fewer are held.": (
            sums.reduce_every == "step" and sums.stage.shards_state and setup.accumulation == 1
        ),
        "One step counter of 4 bytes per tensor.": sums.optimizer.has_step,
        f"{sums.optimizer.note[:1].upper()}{sums.optimizer.note[1:]}.": bool(sums.optimizer.note),
        "Pinned buffers through which offloaded state is copied. Offloaded parameters have their "
        "masters beside them here; the engine casts the masters on the device instead.": (
            sums.moved > 0 or setup.offload.params != "device"
        ),
        f"Precision {setup.precision!r} is how another system keeps its state; the engine does not "
        "run it.": not sums.dtypes.engine_runs_it,
    }
    return tuple(sentence for sentence, holds in said.items() if holds)
