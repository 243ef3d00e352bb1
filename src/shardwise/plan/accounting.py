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

from dataclasses import dataclass

from shardwise.homes import OffloadLike, tier_of
from shardwise.layout.segments import flat_layout
from shardwise.plan.accounted import Accounting, Bytes, Setup, Traffic, check_setup
from shardwise.plan.candidate import planned_offload
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, Dtypes, Optimizer
from shardwise.quantities import check_whole, parse_count
from shardwise.stages import STAGES, ReduceEvery, Stage

MAX_PARAMS = 10**18


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
    def params_away(self) -> bool:
        """Tell whether parameters come and go between their place and the device."""
        return self.stage.frees_after_backward and self.setup.offload.params != "device"

    @property
    def masters(self) -> str:
        """Where master weights are that the optimizer does not update on the device."""
        offload = self.setup.offload
        in_papers = self.dtypes.keeps_compute_shard
        tier = tier_of(offload.optimizer if in_papers else offload.params)
        return "cpu" if tier == "device" else tier

    @property
    def fetched_size(self) -> int:
        """Bytes of an element that is fetched."""
        dtypes = self.dtypes
        return DTYPE_BYTES[dtypes.compute if dtypes.keeps_compute_shard else dtypes.master]

    @property
    def grad_size(self) -> int:
        """Bytes of an element of reduced gradients that are not on the device."""
        dtypes = self.dtypes
        return DTYPE_BYTES[dtypes.reduce if dtypes.keeps_compute_shard else dtypes.master]

    @property
    def num_reductions(self) -> int:
        """How often per step gradients are reduced."""
        return self.setup.accumulation if self.reduce_every == "micro_batch" else 1

    @property
    def num_fetches(self) -> int:
        """How often per step what is away is fetched: for each use, or once after the step.

        After a step on the device its copy there has the new values.
        """
        if self.params_away:
            return self.uses
        has_copy = self.stage.frees_after_backward or not self.stage.shards_state
        stepped_there = self.setup.offload.step_on == "device" and self.optimizer.by
        return 0 if stepped_there and (has_copy or self.setup.ranks == 1) else 1

    @property
    def uses(self) -> int:
        """How often per step parameters are gathered to be used, where they are freed after."""
        stage = self.stage
        return (stage.frees_after_forward + stage.frees_after_backward) * self.setup.accumulation


def _at(tier: str, num_bytes: int) -> Bytes:
    """Return bytes at a place."""
    return Bytes(**{"host" if tier == "cpu" else tier: num_bytes})


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
) -> Accounting:
    """Return the bytes and the traffic of one rank; the arguments are the fields of a `Setup`.

    **Cost** some microseconds. **Raises** ConfigError naming the field that is wrong.
    """
    how = (ranks, stage, replicas, precision, optimizer, planned_offload(offload), accumulation)
    return account_setup(params, Setup(*how, reduce_every, ranks_per_node))


def account_setup(params: int | float | str, setup: Setup) -> Accounting:
    """Return the bytes and the traffic of one rank, as `account` does."""
    count = parse_count(params)
    check_whole(count, "params", MAX_PARAMS)
    check_setup(setup)
    stage, offload = STAGES[setup.stage], setup.offload
    shard = flat_layout(((count,),), setup.ranks).piece(0, 0).numel
    state = shard if stage.shards_state else count
    numerator, denominator = float(offload.fraction).as_integer_ratio()
    moved = -(-state * numerator // denominator) if offload.moves_state else 0
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
    here, size = state - moved, DTYPE_BYTES[sums.dtypes.master]
    return Accounting(
        params=count,
        setup=setup,
        parameters=_parameters(sums),
        master_weights=Bytes(device=here * size * sums.dtypes.has_master)
        + _at(sums.masters, sums.moved * size),
        gradients=_gradients(sums),
        optimizer_state=Bytes(device=sums.optimizer.state_bytes(here, sums.dtypes.master))
        + _at(_state_tier(sums), _state_of_moved(sums)),
        traffic=_traffic(sums),
        left_out=_left_out(sums),
    )


def _parameters(sums: _Sums) -> Bytes:
    size, papers = DTYPE_BYTES[sums.dtypes.compute], sums.dtypes.keeps_compute_shard
    if not sums.stage.frees_after_backward:
        return Bytes(device=sums.params * size)
    # Without masters, or beside them in papers, slices are there; else the master is gathered.
    here = 0 if sums.dtypes.has_master and not papers else sums.shard - sums.moved
    if not sums.params_away:
        return Bytes(device=(here + sums.moved) * size)
    away = _at(tier_of(sums.setup.offload.params), sums.moved * size if papers else 0)
    return Bytes(device=here * size) + away


def _gradients(sums: _Sums) -> Bytes:
    size, extra = DTYPE_BYTES[sums.dtypes.reduce], sums.dtypes.optimizer_grad
    resting = sums.params if sums.reduce_every == "step" else sums.state - sums.moved
    beside = DTYPE_BYTES[extra] if extra is not None else 0
    here = resting * size + (sums.state - sums.moved) * beside
    away = sums.moved * (sums.grad_size + beside)
    return Bytes(device=here) + _at(tier_of(sums.setup.offload.grads), away)


def _state_tier(sums: _Sums) -> str:
    tier = tier_of(sums.setup.offload.optimizer)
    in_files = bool(sums.optimizer.by) or sums.dtypes.keeps_compute_shard
    return tier if in_files or tier == "device" else "cpu"


def _state_of_moved(sums: _Sums) -> int:
    return sums.optimizer.state_bytes(sums.moved, sums.dtypes.master)


def _share(numel: int, ranks: int) -> int:
    """Return what one rank sends of an even all-gather or reduce-scatter: (N - 1)/N of it."""
    return numel - numel // ranks


def _traffic(sums: _Sums) -> Traffic:
    setup, stage, dtypes = sums.setup, sums.stage, sums.dtypes
    compute, reduced = DTYPE_BYTES[dtypes.compute], DTYPE_BYTES[dtypes.reduce]
    num_reductions = sums.num_reductions
    num_gathers, gathered = sums.uses or 1, compute  # a kept copy is gathered after the step
    if not stage.shards_state:  # the mean is gathered: with the reduction, an all-reduce
        num_gathers, gathered = num_reductions, reduced
    once = _share(sums.params, setup.ranks)
    replica_sent_elements = 2 * num_reductions * _share(sums.shard, setup.replicas)
    to_host = num_reductions * sums.moved * sums.grad_size
    to_device = sums.num_fetches * sums.moved * sums.fetched_size
    if setup.offload.step_on == "device" and sums.optimizer.by:
        taken_back = _state_of_moved(sums) + sums.moved * DTYPE_BYTES[dtypes.master]
        to_device += taken_back + sums.moved * sums.grad_size
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
    """Return the bytes read and written: for the step once, parameters for each fetch as well.

    Gradients of a further micro-batch are read with the first, and their sum is written.
    """
    offload = sums.setup.offload
    read = written = _state_of_moved(sums) if _state_tier(sums) == "nvme" else 0
    if sums.masters == "nvme":
        read += sums.moved * DTYPE_BYTES[sums.dtypes.master]
        written = read
    if tier_of(offload.params) == "nvme" and (sums.params_away or sums.masters == "nvme"):
        read += sums.num_fetches * sums.moved * sums.fetched_size
        if sums.dtypes.keeps_compute_shard:
            written += sums.moved * sums.fetched_size
    if tier_of(offload.grads) == "nvme":
        times = 2 * sums.num_reductions - 1
        read += times * sums.moved * sums.grad_size
        written += times * sums.moved * sums.grad_size
    return read, written


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
        "Buffers between files and memory, and those that a step on the device passes; a run moves "
        "whole units of a model.": sums.moved > 0,
        f"Precision {setup.precision!r} is how another system keeps its state; the engine does not "
        "run it.": not sums.dtypes.engine_runs_it,
    }
    return tuple(sentence for sentence, holds in said.items() if holds)
