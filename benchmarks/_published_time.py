"""Predict a published run's step time with the planner's own parts: play, prices, simulate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from _published_memory import Setup, setup_of
from _published_rows import Row, Unmodelled

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.catalogue import make_cluster
from shardwise.plan.machine.efficiencies import Efficiency
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.links import collective_seconds, place, send_seconds
from shardwise.plan.machine.pricing import Prices
from shardwise.plan.model.shaped import shape_tape
from shardwise.plan.model.tape import Cost, Tape, Work
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.step.play import play
from shardwise.plan.step.program import Program
from shardwise.plan.timing.simulate import simulate

# Seconds per rank of a ZeRO-1 group whose parameters are broadcast rank by rank, on even rows of
# R354 .. R385 (InternEvo).
BROADCAST_S = 2.6e-3


@dataclass(frozen=True)
class Timed:
    """A row made ready: what is played on what, and what was published."""

    setup: Setup
    candidate: Candidate
    cluster: Cluster
    published_s: float

    @property
    def gpu(self) -> str:
        """The accelerator's family, by which efficiencies are calibrated."""
        return self.cluster.node.accelerator.family


def cluster_of(row: Row) -> Cluster:
    """Return the row's machines; the network as its notes tell, or as such machines usually have.

    **Raises** Unmodelled for an accelerator that is not in the catalogue.
    """
    name = re.sub(r"\(.*?\)|-\d+W", "", row.cell("gpu")).strip()
    notes, system = row.cell("notes"), row.cell("system").lower()
    network: str | None = None
    nics: int | None = None
    told = re.search(r"(\d+) ?x ?(\d+) ?Gb", notes)
    total = re.search(r"(\d+) ?Gbps node", notes)
    if told:
        network, nics = (
            {"100": "roce-100", "200": "roce-200"}.get(told[2], "roce-400"),
            int(told[1]),
        )
    elif total:
        network, nics = "roce-200", max(1, int(total[1]) // 200)
    elif "bigscience" in system or row.says("source", "bigscience"):
        network, nics = "infiniband-edr", 4  # Jean Zay: 4 Omni-Path of 100 Gb/s per node
    elif "vtrain" in system:
        network, nics = "infiniband-hdr", 4  # vTrain section 5: 4 HDR per node
    ranks = row.ranks
    try:
        # Jean Zay's V100 nodes have 4 GPUs; an NVL72 rack is filled by 64 of them.
        usual = 4 if row.says("source", "gpt2.md") else 64 if name.startswith("GB") else 8
        per_node = math.gcd(ranks, usual) if ranks >= usual else None
        return make_cluster(name, ranks, gpus_per_node=per_node, network=network, num_nics=nics)
    except ConfigError as error:
        raise Unmodelled(f"no such machine in the catalogue: {name}"[:60]) from error


def timed(row: Row) -> Timed:
    """Make a row ready for its time.

    **Raises** Unmodelled with the reason.
    """
    setup = setup_of(row)
    if row.number("seq_len") is None:
        raise Unmodelled("no seq_len given (time)")
    if setup.flags.away.any:
        raise Unmodelled("offload (time)")
    candidate = _candidate(setup)
    seconds = _published(row, setup, candidate)
    if not seconds > 0:
        raise Unmodelled("time column not understood")
    cluster = cluster_of(row)
    if candidate.world_size != cluster.num_ranks:
        raise Unmodelled("degrees do not multiply to the number of GPUs")
    seconds *= _copies_meant(row, setup, candidate, cluster, seconds)
    return Timed(setup, candidate, cluster, seconds)


def _copies_meant(
    row: Row, setup: Setup, candidate: Candidate, cluster: Cluster, seconds: float
) -> int:
    """Return by what the rate of a column is divided that does not say whether it is per GPU.

    Where a card would have to be faster than its peak, the rate is that of all ranks.

    **Raises** Unmodelled where even that is faster than the cards' peak.
    """
    per_param = 6 if setup.run.trained else 4
    tokens = candidate.micro_batch * candidate.accumulation * row.data_parallel * setup.run.seq
    flops = per_param * tokens * setup.shape.num_params
    if setup.shape.experts is not None:
        return 1
    dtype = setup.run.matmul_dtype or setup.run.dtype
    limit = 0.85 * cluster.node.accelerator.flops_per_s(dtype) * row.ranks
    if flops / seconds <= limit:
        return 1
    if row.ranks > 1 and flops / seconds <= limit * row.ranks:
        return row.ranks
    raise Unmodelled("faster than the card's peak")


def _candidate(setup: Setup) -> Candidate:
    row, run = setup.row, setup.run
    ranks = setup.row.data_parallel * run.cp
    # Who broadcasts parameters reduces gradients over all ranks, whatever the shard group.
    shards = ranks if setup.system.broadcasts else min(setup.shards, ranks)
    micro_num = re.search(r"micro_num (\d+)", row.cell("notes"))
    accum = re.search(r"grad(?:ient)? accum\w* (\d+)", row.cell("notes"))
    batch = row.number("global_batch")
    if micro_num:
        accumulation = int(micro_num[1])
    elif run.pipeline > 1 and "titan" in row.cell("system").lower():
        accumulation = run.micro_batches
    elif batch:  # of a pipeline, notes may count the schedules of a step and not its micro-batches
        accumulation = max(1, round(batch / (run.micro_batch * row.data_parallel)))
    elif accum:
        accumulation = int(accum[1])
    else:
        accumulation = 1
    return Candidate(
        stage=setup.stage,
        num_shards=shards,
        num_replicas=max(1, ranks // shards),
        precision={"float32": "fp32", "float16": "fp16"}.get(run.dtype, "bf16"),
        micro_batch=run.micro_batch,
        accumulation=accumulation,
        activation_checkpointing=run.activation_checkpointing,
        tp=run.tp,
        ep=run.ep,
        pp=run.pipeline,
        # The ranks of a context group are ranks of the shard group as well.
        cp=1,
    )


def _published(row: Row, setup: Setup, candidate: Candidate) -> float:
    """Return the published seconds per step."""
    run = setup.run
    windows = candidate.micro_batch * candidate.accumulation * row.data_parallel
    tokens = windows * run.seq
    rate, step = row.number("tok_s_gpu"), row.number("step_s")
    if rate:
        return tokens / (rate * row.ranks)
    if step:
        return step
    raise Unmodelled("no step time or throughput")


@dataclass(frozen=True)
class Played:
    """A row's programs: per pipeline stage, those of one and of two micro-batches (or one)."""

    row: Timed
    stages: tuple[tuple[Program, ...], ...]


def play_row(row: Timed) -> Played:
    """Play a row's first and last stage; what a micro-batch adds is known from two of them."""
    run, candidate = row.setup.run, row.candidate
    stages = []
    for position in sorted({0, run.pipeline - 1}):
        tape = _wasteful(shape_tape(row.setup.shape, replace(run, pipeline_rank=position)), row)
        windows = range(1, min(candidate.accumulation, 2) + 1)
        programs = (play(tape, replace(candidate, accumulation=n)).program for n in windows)
        stages.append(tuple(programs))
    return Played(row, tuple(stages))


def seconds_of(played: Played, overrides: Mapping[str, Efficiency]) -> float:
    """Return a row's step: its slowest stage, sends between stages, filling and emptying."""
    row = played.row
    run, candidate = row.setup.run, row.candidate
    cluster = row.cluster
    if row.setup.system.blocks_on_launches:
        chip = replace(cluster.node.accelerator, asynchronous=False)
        cluster = replace(cluster, node=replace(cluster.node, accelerator=chip))
    prices = Prices(cluster, candidate, overrides=overrides)
    slowest = 0.0
    for programs in played.stages:
        times = [simulate(program, prices.seconds).step_s for program in programs]
        more = candidate.accumulation - len(times)
        slowest = max(slowest, times[-1] + (more * (times[1] - times[0]) if more else 0.0))
    if run.pipeline > 1:
        node = row.cluster.node
        # A tensor parallel rank sends its part, which is gathered beyond: Megatron's scatter and
        # gather (arXiv:2104.04473, section 4.1), DeepSpeed's PartitionedTensor.
        sent = run.tokens * row.setup.shape.dim * DTYPE_BYTES[run.dtype] // run.tp
        crosses = candidate.world_size // run.pipeline >= node.num_accelerators
        slowest += 2 * candidate.accumulation * send_seconds(sent, crosses, node)
        fill = (run.pipeline - 1) / run.chunks
        slowest *= (candidate.accumulation + fill) / candidate.accumulation
    return slowest + _exposed(row)


def _exposed(row: Timed) -> float:
    """Return the seconds of reducing and gathering at the end, where nothing overlaps them."""
    candidate, run, system = row.candidate, row.setup.run, row.setup.system
    if system.broadcasts and row.setup.stage == 1:
        return BROADCAST_S * row.setup.shards
    if not system.reduces_at_end or candidate.data_parallel == 1:
        return 0.0
    shape, node = row.setup.shape, row.cluster.node
    params = (shape.layer_params() * run.layers_here(shape) + shape.embedding_params) / run.tp
    group = place(candidate.data_parallel, run.tp, node.num_accelerators)
    size = DTYPE_BYTES[run.dtype] * params
    reduced = collective_seconds("all_reduce", size, group, node)
    return reduced + collective_seconds("all_gather", size, group, node)


def _wasteful(tape: Tape, row: Timed) -> Tape:
    """Return the tape with the FLOPs that kernels waste, and collectives as far as they show.

    Batched products over heads whose width is no multiple of 8 do not use tensor cores (NVIDIA,
    matrix multiplication guide, requirements): they run at the rate of float32. Where collectives
    of tensor parallelism are cut in as many pieces as there are ranks and run beside the products,
    one piece shows.
    """
    system, run = row.setup.system, row.setup.run
    chip = row.cluster.node.accelerator
    aligned = run.flash or row.setup.shape.head_dim % 8 == 0
    waste = 1.0 if aligned else chip.flops_per_s(run.dtype) / chip.flops_per_s("float32")
    if waste == 1.0 and not system.hides_tensor_parallel:
        return tape

    def changed(cost: Cost) -> Cost:
        if cost.kind == "tensor_parallel" and system.hides_tensor_parallel:
            return replace(cost, moved_bytes=cost.moved_bytes // run.tp)
        of_scores = cost.kind == "matmul" and not run.flash and cost.num_ops in (2, 4)
        return replace(cost, flops=round(cost.flops * waste)) if of_scores else cost

    events = tuple(
        replace(e, costs=tuple(changed(c) for c in e.costs))
        if isinstance(e, Work) and e.unit > 0
        else e
        for e in tape.events
    )
    return replace(tape, events=events)


def predict_seconds(row: Timed, overrides: Mapping[str, Efficiency]) -> float:
    """Predict a row's step."""
    return seconds_of(play_row(row), overrides)
