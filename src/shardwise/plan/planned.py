"""A plan as values: the cost of a candidate on a cluster, and the parts of a step's time."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.margins import MemoryInterval, NodeRoom
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.ledger import Played
from shardwise.plan.step.program import Stream
from shardwise.plan.timing.breakdown import COMMUNICATING, OFFLOADING, Simulated

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
    """A line of the table; ``is_part``: it is a part of the line above, or beside it."""

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
    found: Counter[str] = Counter()
    busy = plan.simulated.stream_phase_s
    for stream in streams:
        for phase, seconds in busy.get(stream, {}).items():
            found[phase] += seconds  # type: ignore[assignment]
    return [TimeRow(phase, seconds, True) for phase, seconds in found.items()]
