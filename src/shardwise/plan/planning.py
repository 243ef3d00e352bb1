"""One plan: what a candidate costs on a cluster, in memory and time, with a verdict.

Note [What a plan composes]
The model's tape (``tracing`` or ``shape_tape``) is played under the candidate by the engine's own
schedule (``play``), which gives the ledger and the program; every operation is priced on the
cluster (``pricing``), and the program simulated (``simulate``). Margins widen the ledger's total to
an interval, since an allocator, a driver and a library hold bytes that no ledger of tensors sees.

Note [Long windows]
The micro-batches of an accumulation window are alike but for the first and the last. A window
longer than three is played with two and with three, and each further one adds the difference. What
is read from disks from the step's begin on hides behind the whole window, not behind each of its
micro-batches: there the window is played up to 32 of them.

Note [Pipelines]
A pipeline of p stages is filled and emptied once a step: with m micro-batches a step takes
(m + p - 1) / m times as long (Narayanan et al. 2021, section 2.2.1, without interleaving).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.pricing import Assumption, Pricer, Prices
from shardwise.plan.margins import MemoryInterval, memory_interval
from shardwise.plan.model.tape import Tape, Work
from shardwise.plan.sizes import PRECISIONS, row_of
from shardwise.plan.step.ledger import Played
from shardwise.plan.step.play import play
from shardwise.plan.timing.scenario import Scenario
from shardwise.plan.timing.simulate import Simulated, simulate

Verdict = Literal["fits", "tight", "will not fit"]
_LONGEST_PLAYED = 3
_LONGEST_WITH_DISKS = 32


class Model(Protocol):
    """Where tapes come from: a module that was traced, or the formulas of a decoder."""

    @property
    def name(self) -> str:
        """What the user called the model."""

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""

    @property
    def seq(self) -> int:
        """Tokens in a window."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the tapes are made."""

    def tape(self, candidate: Candidate) -> Tape:
        """Return one rank's micro-batch under the candidate's batch, precision and degrees."""


@dataclass(frozen=True)
class Plan:
    """What a candidate costs on a cluster; ``memory`` is an interval of one rank's device bytes.

    ``flops_per_step`` are those of the model on all ranks, recomputation left out, as for the MFU.
    """

    model: str
    cluster: Cluster
    candidate: Candidate
    num_params: int
    seq: int
    unit_names: tuple[str, ...]
    played: Played
    memory: MemoryInterval
    capacity_bytes: int
    simulated: Simulated
    step_s: float
    flops_per_step: int
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Compare the interval with the device: all of it below, all above, or in between."""
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
    def num_simulated(self) -> int:
        """Micro-batches in what was simulated; see Note [Long windows]."""
        return 1 + max((op.micro_batch for op in self.simulated.program.ops), default=0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation against the device's peak in the compute dtype, if known."""
        compute = row_of(PRECISIONS, self.candidate.precision, "precision").compute
        peak = self.cluster.node.accelerator.peak_flops(compute)
        ranks = self.candidate.world_size
        return self.flops_per_step / (self.step_s * ranks * peak) if peak else None

    @property
    def label(self) -> str:
        """Write what tells this candidate from others in one line."""
        return self.candidate.label

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        from shardwise.plan.report.page import plan_html

        return plan_html(self)

    def unit_name(self, unit: int) -> str:
        """Return the name of a unit; the root's is ``(root)``."""
        return self.unit_names[unit] or "(root)"


def plan(
    model: Model,
    cluster: Cluster,
    candidate: Candidate,
    *,
    prices: Pricer | None = None,
    tape: Tape | None = None,
    scenario: Scenario | None = None,
) -> Plan:
    """Plan one candidate; ``prices`` are the cluster's own unless a calibration gave others.

    **Cost** about 20 ms for 32 layers, beside the tape.

    **Raises** ConfigError where the candidate's ranks are not the cluster's.
    """
    if candidate.world_size != cluster.num_ranks:
        raise ConfigError(
            f"the candidate has {candidate.world_size} ranks ({candidate.num_shards} shards x "
            f"{candidate.num_replicas} replicas x degrees), the cluster {cluster.num_ranks}"
        )
    tape = tape or model.tape(candidate)
    prices = prices or Prices(cluster, candidate)
    played, simulated, window_s = _play_window(tape, candidate, prices, scenario)
    stages = candidate.pipeline_parallel
    fill = (candidate.accumulation + stages - 1) / candidate.accumulation
    accelerator = cluster.node.accelerator
    return Plan(
        model=model.name,
        cluster=cluster,
        candidate=candidate,
        num_params=model.num_params,
        seq=tape.seq,
        unit_names=tuple(u.name for u in tape.units),
        played=played,
        memory=memory_interval(
            played.peak.ledger,
            num_groups=_num_groups(candidate),
            allocator="caching" if accelerator.asynchronous else "malloc",
        ),
        capacity_bytes=accelerator.memory_bytes,
        simulated=simulated,
        step_s=window_s * fill,
        flops_per_step=_model_flops(tape) * candidate.accumulation * candidate.world_size,
        assumptions=tuple(_sentence(a) for a in prices.assumptions()),
        notes=model.notes,
    )


def _num_groups(candidate: Candidate) -> int:
    """Count the process groups of a rank that have communicators on the device."""
    degrees = (
        candidate.num_shards,
        candidate.num_replicas,
        candidate.tensor_parallel,
        candidate.pipeline_parallel,
        candidate.context_parallel,
    )
    return sum(degree > 1 for degree in degrees)


def _sentence(assumption: Assumption) -> str:
    value = f"{assumption.value:.4g} {assumption.unit}".strip()
    return f"{assumption.name}: {value}, {assumption.meaning} ({assumption.source})"


def _play_window(
    tape: Tape, candidate: Candidate, prices: Pricer, scenario: Scenario | None
) -> tuple[Played, Simulated, float]:
    """Play and simulate the step; see Note [Long windows]."""

    def run(accumulation: int) -> tuple[Played, Simulated]:
        played = play(tape, replace(candidate, accumulation=accumulation))
        return played, simulate(played.program, prices.seconds, scenario, overlap=prices.overlap)

    disks = "nvme" in (candidate.offload.params, candidate.offload.optimizer)
    shown = min(candidate.accumulation, _LONGEST_WITH_DISKS if disks else _LONGEST_PLAYED)
    played, simulated = run(shown)
    more = candidate.accumulation - shown
    if not more:
        return played, simulated, simulated.step_s
    shorter, its_step = run(shown - 1)
    program = replace(
        played.program,
        sent_bytes=_extend(played.program.sent_bytes, shorter.program.sent_bytes, more),
        num_collectives=_extend(
            played.program.num_collectives, shorter.program.num_collectives, more
        ),
    )
    window_s = simulated.step_s + more * (simulated.step_s - its_step.step_s)
    return replace(played, program=program), simulated, window_s


def _extend(longer: Mapping[str, int], shorter: Mapping[str, int], more: int) -> dict[str, int]:
    """Add ``more`` times what one more micro-batch added."""
    return {key: value + more * (value - shorter.get(key, 0)) for key, value in longer.items()}


def _model_flops(tape: Tape) -> int:
    """FLOPs of one rank's micro-batch without recomputation."""
    works = (e for e in tape.events if isinstance(e, Work) and e.phase != "recompute")
    return sum(cost.flops for work in works for cost in work.costs)
