"""Plan one candidate on a cluster: memory and time, with a verdict.

Note [What a plan composes]
The model's tape (`tracing` or `shaped`) is played under the candidate by the engine's own
schedule (``play``), which gives the ledger and the program; every operation is priced on the
cluster (``pricing``), and the program simulated (``simulate``). Margins widen the ledger's total to
an interval, since an allocator, a driver and a library hold bytes that no ledger of tensors sees.

Note [Pipelines]
A pipeline of p stages is filled and emptied once a step. With m micro-batches it takes the time of
m + p - 1 of them on the slowest stage (Narayanan et al. 2021, section 2.2.1, without interleaving);
clipping and the optimizer's step come once, after that. The first stage keeps most micro-batches in
flight, the last one has the head and the loss, and one in the middle may have more experts: all
that differ are planned, and of each figure the largest counts. GPipe has all micro-batches of a
step in flight on every stage, and takes as long. A micro-batch is sent forward, and its gradient
back; both sends are counted in full, as nothing hides them under 1F1B in the benchmark of published
runs.

Note [Context ranks are shard ranks]
The ranks of a context group have the same parameters and different tokens, so gradients are reduced
and state is sharded over shard x context ranks, as FSDP does it: a step is played with that many
shards.

Note [Long windows]
All micro-batches of an accumulation window are equal except the first and the last. A window
longer than three is played with two and with three, and each further one adds the difference. Reads
from disks begin with the step and overlap with the whole window, not with each of its
micro-batches. So with state on disks up to 32 micro-batches are played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.pricing import Pricer, Prices, place, send_seconds
from shardwise.plan.margins import (
    UNSEEN_MEMORY,
    UNSEEN_TIME,
    MemoryInterval,
    NodeRoom,
    memory_interval,
    node_room,
)
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.tape import DEGREE_KINDS, CostKind, Tape, UnitWork
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.play import play
from shardwise.plan.step.program import Collective, Compute, Op, Played, Program, Stream
from shardwise.plan.timing.simulate import COMMUNICATING, OFFLOADING, Simulated, simulate

if TYPE_CHECKING:
    from shardwise.plan.model.models import TracedModel

    Model = ShapedModel | TracedModel  # where tapes come from: formulas of a decoder, or a trace

_LONGEST_PLAYED = 3
_LONGEST_WITH_DISKS = 32


class PlannedMemory(NamedTuple):
    """The memory of a candidate's step, played without times on each pipeline stage that differs.

    ``stage`` is the stage with the most memory, and ``device`` are its bytes.
    """

    tapes: Mapping[int, Tape]
    played: Mapping[int, Played]
    stage: int
    device: MemoryInterval
    room: NodeRoom


def plan_memory(
    model: Model, cluster: Cluster, candidate: Candidate, tape: Tape | None = None
) -> PlannedMemory:
    """Play one candidate's step; ``tape`` is the model's, if it is known.

    **Cost** half that of a plan.

    **Raises** ConfigError where the candidate's ranks are not the cluster's.
    """
    if candidate.world_size != cluster.num_ranks:
        raise ConfigError(
            f"the candidate has {candidate.world_size} ranks ({candidate.num_shards} shards x "
            f"{candidate.num_replicas} replicas x degrees), the cluster {cluster.num_ranks}"
        )
    if candidate.pp > 1 and isinstance(model, ShapedModel):
        stages = model.stages(candidate)
    else:
        stages = {0: tape or model.tape(candidate)}
    # See Note [Context ranks are shard ranks].
    played_as, chip = candidate.with_context_shards, cluster.node.accelerator
    shown = replace(played_as, accumulation=_num_shown(candidate))
    played = {number: play(stage_tape, shown) for number, stage_tape in stages.items()}
    stage = max(played, key=lambda number: played[number].peak.ledger.total)
    largest = played[stage]
    # The allocator still holds the blocks of gradients that are freed before the peak.
    most = max(peak.ledger.grad_shards for peak in largest.peaks)
    cached = max(0, most - largest.peak.ledger.grad_shards)
    groups, ledger = num_groups(candidate), largest.peak.ledger
    device = memory_interval(ledger, groups, chip.asynchronous, cached)
    off_device = {}
    for number, step in played.items():
        on_host = step.host.total
        if on_host and not chip.asynchronous:  # a CPU: the device's bytes are in host memory too
            on_host += step.peak.ledger.total
        off_device[number] = on_host, step.files.total
    room = node_room(cluster, candidate, off_device)
    return PlannedMemory(stages, played, stage, device, room)


def plan(
    model: Model,
    cluster: Cluster,
    candidate: Candidate,
    *,
    prices: Pricer | None = None,
    memory: PlannedMemory | None = None,
    straggler: float = 1.0,
    slow_link: float = 1.0,
) -> Plan:
    """Plan one candidate; ``prices`` are those of the catalogue unless a calibration gives others.

    ``memory`` is the result of `plan_memory`, if it was called before. The slowest device takes
    ``straggler`` times as long, and the slowest link ``slow_link`` times; all ranks wait for them,
    see Note [One rank is simulated].

    **Cost** about 20 ms for 32 layers, beside the tape.

    **Raises** ConfigError where the candidate's ranks are not the cluster's.
    """
    memory = memory or plan_memory(model, cluster, candidate)
    prices = prices or Prices(cluster, candidate)
    slow = {Compute: straggler, Collective: slow_link}  # copies and disks are as fast as usual

    def seconds(op: Op) -> float:
        return prices.seconds(op) * slow.get(type(op.work), 1.0)

    windows = {
        number: time_window(tape, candidate.with_context_shards, played, seconds, prices.overlap)
        for (number, tape), played in zip(memory.tapes.items(), memory.played.values(), strict=True)
    }
    others = candidate.pp - 1
    last = max(windows, key=lambda n: windows[n].window_s + others * windows[n].micro_batch_s)
    slowest, in_memory, in_time = windows[last], memory.tapes[memory.stage], memory.tapes[last]
    largest = windows[memory.stage]
    sends_s, program = _sends(model, cluster, candidate, largest.played.program)
    fill_s = others * slowest.micro_batch_s
    return Plan(
        model=model.name,
        cluster=cluster,
        candidate=candidate,
        num_params=model.num_params,
        seq=model.seq,
        played=replace(largest.played, program=program),
        memory=memory.device,
        room=memory.room,
        simulated=slowest.simulated,
        step_s=slowest.window_s + fill_s + sends_s,
        matmul_dtype=in_time.matmul_dtype,
        flops_per_step=_flops_per_step(model, candidate, in_memory),
        assumptions=prices.assumptions(),
        notes=(
            *model.notes,
            *_pipeline_notes(memory.tapes, in_memory, in_time),
            *(_UNCERTAINTY if cluster.node.accelerator.asynchronous else ()),
        ),
        fill_s=fill_s,
        sends_s=sends_s,
        model_parallel_s=_model_parallel(slowest.simulated, seconds),
    )


_UNCERTAINTY = (
    "of published runs that nothing here was fitted to, 90 % needed "
    f"{UNSEEN_MEMORY.low} to {UNSEEN_MEMORY.high} times the planned memory and "
    f"{UNSEEN_TIME.low} to {UNSEEN_TIME.high} times the planned time",
)


def _sends(
    model: Model, cluster: Cluster, candidate: Candidate, program: Program
) -> tuple[float, Program]:
    """Return the seconds of a step's sends between stages, and the program with their counts.

    The counts are those of the first or the last stage.
    """
    stages = candidate.pp
    if stages == 1 or not isinstance(model, ShapedModel):
        return 0.0, program
    node, num_bytes = cluster.node, model.boundary_bytes(candidate)
    group = place(stages, candidate.world_size // stages, node.num_accelerators)
    send_s = 2 * send_seconds(num_bytes, group.num_nodes > 1, node)
    num = candidate.accumulation
    sent = {**program.sent_bytes, "pp.send": num * num_bytes}
    counts = {**program.num_collectives, "pp.send": num}
    counted = replace(program, sent_bytes=sent, num_collectives=counts)
    return (num + stages - 1) * send_s, counted


def _model_parallel(simulated: Simulated, seconds: Callable[[Op], float]) -> dict[str, float]:
    """Return the seconds, by axis, that the compute stream spends in the degrees' collectives."""
    ops = [op for op in simulated.program.ops if op.stream == "compute"]
    alone: dict[CostKind, float] = dict.fromkeys(DEGREE_KINDS, 0.0)
    for op in ops:
        costs = op.work.costs if isinstance(op.work, Compute) else ()
        for kind in dict.fromkeys(c.kind for c in costs if c.kind in DEGREE_KINDS):
            work = Compute(tuple(c for c in costs if c.kind == kind))
            alone[kind] += seconds(replace(op, work=work))
    by_axis: dict[str, float] = {}
    for kind, (axis, _) in DEGREE_KINDS.items():
        by_axis[axis] = by_axis.get(axis, 0.0) + alone[kind]
    if not any(by_axis.values()):
        return {}
    computing = sum(map(seconds, ops))
    return {axis: simulated.compute_s * s / computing for axis, s in by_axis.items() if s}


def _pipeline_notes(stages: Mapping[int, Tape], in_memory: Tape, in_time: Tape) -> tuple[str, ...]:
    """Name the pipeline stages that the figures are from."""
    if len(stages) == 1:
        return ()
    last = max(stages)
    ends = {0: "the first pipeline stage", last: "the last pipeline stage"}
    names = {
        id(tape): ends.get(number, f"pipeline stage {number + 1} of {last + 1}")
        for number, tape in stages.items()
    }
    memory, time = names[id(in_memory)], names[id(in_time)]
    whose = f"memory and traffic are those of {memory}, time that of {time}"
    if memory == time:
        whose = f"memory, traffic and time are those of {memory}"
    return (f"{whose}; filling the pipeline and sends between stages are added",)


def _flops_per_step(model: Model, candidate: Candidate, tape: Tape) -> int:
    """Return the model's FLOPs on all ranks; FLOPs that several ranks repeat count once."""
    alone = replace(candidate, pp=1, tp=1, ep=1)
    if alone != candidate:
        tape = model.tape(alone)
    works = (e for e in tape.events if isinstance(e, UnitWork) and e.phase != "recompute")
    flops = sum(cost.flops for work in works for cost in work.costs)
    return flops * candidate.accumulation * candidate.data_parallel * candidate.cp


def num_groups(candidate: Candidate) -> int:
    """Count the process groups of a rank that have communicators on the device."""
    shards = candidate.num_shards * candidate.cp
    sizes = [shards, candidate.num_replicas, *candidate.degrees]
    if candidate.ep > 1:
        sizes += [candidate.ep, shards * candidate.tp // candidate.ep]
    return sum(size > 1 for size in sizes)


# -- accumulation windows
@dataclass(frozen=True)
class Window:
    """One stage's step, without sends to other stages.

    ``played`` counts the traffic of all micro-batches; ``simulated`` has those that were played.
    ``window_s`` are the seconds of the whole step, ``micro_batch_s`` those of one more micro-batch.
    """

    played: Played
    simulated: Simulated
    window_s: float
    micro_batch_s: float


def _num_shown(candidate: Candidate) -> int:
    """Return the micro-batches of a step that are played; see Note [Long windows]."""
    disks = "nvme" in candidate.offload.tiers
    return min(candidate.accumulation, _LONGEST_WITH_DISKS if disks else _LONGEST_PLAYED)


def time_window(
    tape: Tape,
    candidate: Candidate,
    played: Played,
    seconds: Callable[[Op], float],
    overlap: float,
) -> Window:
    """Simulate a step of one stage, of which some micro-batches were ``played``.

    **Cost** one more play.

    **Source** see Note [Long windows].
    """

    def time(played: Played) -> Simulated:
        return simulate(played.program, seconds, overlap=overlap)

    shown, simulated = _num_shown(candidate), time(played)
    more = candidate.accumulation - shown
    if not more and candidate.pp == 1:
        return Window(played, simulated, simulated.step_s, simulated.step_s / shown)
    # A window of one is compared with a window of two.
    other = play(tape, replace(candidate, accumulation=shown - 1 if shown > 1 else 2))
    micro_batch_s = abs(simulated.step_s - time(other).step_s)
    window_s = simulated.step_s + more * micro_batch_s
    if more:
        program, less = played.program, other.program
        program = replace(
            program,
            sent_bytes=_extend(program.sent_bytes, less.sent_bytes, more),
            num_collectives=_extend(program.num_collectives, less.num_collectives, more),
            copied_bytes=_extend(program.copied_bytes, less.copied_bytes, more),
        )
        played = replace(played, program=program)
    return Window(played, simulated, window_s, micro_batch_s)


def _extend(longer: Mapping[str, int], shorter: Mapping[str, int], more: int) -> dict[str, int]:
    """Add the difference of the two ``more`` times to the longer one."""
    return {key: value + more * (value - shorter.get(key, 0)) for key, value in longer.items()}


# -- a plan as values
Verdict = Literal["fits", "tight", "will not fit"]


@dataclass(frozen=True)
class Plan:
    """The cost of a candidate on a cluster; ``memory`` is an interval of one rank's device bytes.

    ``flops_per_step`` are those of the model on all ranks, recomputation left out, as for the MFU.
    ``step_s`` holds ``fill_s``, in which the pipeline is filled and emptied, and ``sends_s``, in
    which its stages send. ``model_parallel_s`` is the part of a rank's computing, by axis,
    that is collectives of tensor, context and expert parallelism; ``simulated`` counts it as
    computing.
    """

    model: str
    cluster: Cluster
    candidate: Candidate
    num_params: int
    seq: int
    played: Played
    memory: MemoryInterval
    simulated: Simulated
    step_s: float
    flops_per_step: int
    matmul_dtype: DtypeName
    room: NodeRoom
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    fill_s: float = 0.0
    sends_s: float = 0.0
    model_parallel_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of a rank's device."""
        return self.cluster.node.accelerator.memory_bytes

    @property
    def verdict(self) -> Verdict:
        """Compare the interval with the device: all of it below, all above, or in between.

        Offloaded state has to have room on a node.
        """
        if self.room.missing is not None:
            return "will not fit"
        if self.memory.high_bytes <= self.capacity_bytes:
            return "fits"
        return "will not fit" if self.memory.low_bytes > self.capacity_bytes else "tight"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        candidate = self.candidate
        windows = candidate.micro_batch * candidate.accumulation * candidate.data_parallel
        return windows * self.seq

    @property
    def exposed_s(self) -> float:
        """Seconds of the whole step in which a rank does nothing but communicate."""
        run = self.simulated
        exposed = run.exposed_s + sum(self.model_parallel_s.values())
        rest = self.step_s - self.fill_s - self.sends_s
        return self.sends_s + (rest * exposed / run.step_s if run.step_s > 0 else 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation against the device's peak in the products' dtype, if known."""
        peak = self.cluster.node.accelerator.peak_flops(self.matmul_dtype)
        ranks = self.candidate.world_size
        return self.flops_per_step / (self.step_s * ranks * peak) if peak else None

    def unit_name(self, unit: int) -> str:
        """Return the name of a unit; the root's is ``(root)``."""
        return self.played.program.unit_names[unit] or "(root)"


class TimeRow(NamedTuple):
    """A line of the table; ``is_part``: it is a part of an earlier line."""

    name: str
    seconds: float
    is_part: bool = False


def time_rows(plan: Plan) -> list[TimeRow]:
    """Return the lines: computing, waiting and idle add up to the simulated time.

    A stream's phases follow its line; they are busy time, hidden or not.
    """
    run = plan.simulated
    rows = [TimeRow("computing", run.compute_s), *_phases(plan, ("compute",))]
    rows += [
        TimeRow(f"of it, {axis} parallel collectives", seconds, True)
        for axis, seconds in plan.model_parallel_s.items()
    ]
    rows.append(TimeRow("waiting for communication", run.exposed_s))
    offloading = _phases(plan, OFFLOADING)
    if offloading:
        rows.append(TimeRow("waiting for offload", run.exposed_offload_s))
    rows += [TimeRow("idle", run.idle_s), TimeRow("all of it", run.step_s)]
    rows.append(TimeRow("communicating, hidden or not", run.communication_s))
    rows += _phases(plan, COMMUNICATING)
    if offloading:
        seconds = sum(row.seconds for row in offloading)
        rows += [TimeRow("offloading, hidden or not, summed", seconds), *offloading]
    if plan.candidate.pp > 1:
        rows.append(TimeRow("filling and emptying the pipeline, a step", plan.fill_s))
        rows.append(TimeRow("sends between its stages, a step", plan.sends_s))
    return rows


def _phases(plan: Plan, streams: Iterable[Stream]) -> list[TimeRow]:
    """Return the busy seconds of streams by phase."""
    phase_s: Counter[str] = Counter()
    busy = plan.simulated.stream_phase_s
    for stream in streams:
        for phase, seconds in busy.get(stream, {}).items():
            phase_s[phase] += seconds  # type: ignore[assignment]
    return [TimeRow(phase, seconds, True) for phase, seconds in phase_s.items()]
