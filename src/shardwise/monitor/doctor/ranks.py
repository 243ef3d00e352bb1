"""Rules about ranks: late ones, waits for batches, uneven batches."""

from collections.abc import Sequence

from shardwise.monitor.doctor.evidence import (
    NotEnough,
    Which,
    check_cores,
    is_cpu,
    noise_s,
    same_rank,
    steady,
    steady_with,
    step_s,
    typical,
)
from shardwise.monitor.findings import Finding, make_finding
from shardwise.monitor.metrics import (
    COMPUTE_S,
    CORE_WAIT_S,
    DATA_S,
    OPTIMIZER_S,
    OUTSIDE_S,
    STALL_S,
    STEP_S,
    TOKENS,
    TOKENS_BEHIND_SHARE,
    WAITED_MS,
)
from shardwise.monitor.record import RunFacts, RunRecord, StepLine

_SKEW = 0.1  # of the step
_LATE_LINES, _LATE_SHARE = 3, 0.25  # of those judged: fewer may be chance
_EXPLAINS = 0.5  # of the skew, by the phase that takes longest on the rank
_TIMES_CORE_WAIT = 2.0
_DATA = 0.1  # of the step
_SLOW_LINES = 0.2  # of the lines
_CAUSES = {
    COMPUTE_S: "computing",
    DATA_S: "waiting for data",
    OUTSIDE_S: "outside of the model (the loop itself, logging, evaluation, garbage collection)",
    OPTIMIZER_S: "in the optimizer's step",
    STALL_S: "in saves",
    CORE_WAIT_S: "waiting for a core",
}


def _of_others(facts: RunFacts) -> tuple[Which, Which]:
    """Return which figures tell the longest and the usual value of all ranks but one."""
    return ("max", "min") if facts.num_ranks == 2 else ("median", "median")


def _has_unknown_axes(facts: RunFacts) -> bool:
    """Tell whether ranks differ by more than their data: by pipeline stages, experts and others."""
    return not set(facts.degrees) <= {"replicate", "shard"}


def straggler(run: RunRecord) -> Finding | None:
    """Find the rank that waits least while all others wait, in all steps or in some."""
    facts = run.facts
    others, usual = _of_others(facts)
    all_lines, lines, share = _late_lines(run, others)
    if not lines:
        return None
    whole_s, least_s = step_s(all_lines), typical(lines, WAITED_MS, "min") / 1e3
    skew_s = typical(lines, WAITED_MS, others) / 1e3 - least_s
    rank = same_rank(lines, WAITED_MS, "min")
    if rank is None or share * skew_s < max(_SKEW * whole_s, noise_s(facts)):
        return None
    longer = {
        name: typical(lines, name, "max") - typical(lines, name, usual)
        for name in _CAUSES
        if all(name in line.metrics for line in lines) and same_rank(lines, name, "max") == rank
    }
    cause = max(longer, key=lambda name: longer[name], default=None)
    check_cores(run, lines, skew_s, _TIMES_CORE_WAIT)
    if cause is None or longer[cause] < _EXPLAINS * skew_s:
        if is_cpu(facts) or _has_unknown_axes(facts):
            raise NotEnough(f"the phase that takes longer on rank {rank}, for which others wait")
        cause = None
    return make_finding(
        "SW020",
        {
            "skew, s/step": share * skew_s,
            "share of the step": share * skew_s / whole_s,
            "share of late lines": share,
            "threshold": _SKEW,
            "waits itself, s/step": least_s,
            **{f"longer: {name}": seconds for name, seconds in longer.items() if seconds > 0},
        },
        gain=share * skew_s,
        rank=rank,
        number=rank,
        host=facts.hosts[rank] if rank < len(facts.hosts) else "an unknown host",
        late_s=skew_s,
        often="each step" if share == 1 else f"{share:.0%} of the steps",
        doing=f": it is {longer[cause]:.3g} s longer {_CAUSES[cause]}" if cause else "",
    )


def _late_lines(
    run: RunRecord, others: Which
) -> tuple[Sequence[StepLine], Sequence[StepLine], float]:
    """Return the lines that are judged, those in which a rank is waited for, and their share.

    If most lines are late, all of them count as late, so that the typical one is judged.
    """
    lines = steady_with(run, WAITED_MS)

    def is_late(line: StepLine) -> bool:
        waited = line.metrics[WAITED_MS]
        skew_s = (getattr(waited, others) - waited.min) / 1e3
        return bool(skew_s >= max(_SKEW * line.metrics[STEP_S].median, noise_s(run.facts)))

    late = [line for line in lines if is_late(line)]
    if len(late) > len(lines) / 2:
        return lines, lines, 1.0
    if len(late) < max(_LATE_LINES, _LATE_SHARE * len(lines)):
        return lines, [], 0.0
    return lines, late, len(late) / len(lines)


def uneven_batches(run: RunRecord) -> Finding | None:
    """Find waits for ranks whose batches have more tokens, the same rank's or another's each time.

    The expected wait is the time to compute for the tokens that the longest batch has more.
    """
    facts = run.facts
    if _has_unknown_axes(facts):
        return None
    lines = [line for line in steady(run) if TOKENS_BEHIND_SHARE in line.metrics]
    if not lines:
        raise NotEnough("tokens of each step (a model that is called with token ids)")
    others, usual = _of_others(facts)
    whole_s, waited_s = step_s(lines), typical(lines, WAITED_MS, others) / 1e3
    behind = typical(lines, TOKENS_BEHIND_SHARE, others) / 100
    expected_s = behind * typical(lines, COMPUTE_S, usual)
    rank = same_rank(lines, TOKENS_BEHIND_SHARE, "min")
    is_other = rank is not None and same_rank(lines, WAITED_MS, "min") != rank
    is_long = waited_s >= max(_SKEW * whole_s, noise_s(facts))
    if behind < _SKEW or is_other or not is_long or expected_s < _EXPLAINS * waited_s:
        return None
    check_cores(run, lines, waited_s, _TIMES_CORE_WAIT)
    most = typical(lines, TOKENS, "max")
    which = f"the batches of rank {rank} have {most:.0f} tokens a step,"
    if rank is None:
        which = "the longest batch of a step, on another rank each time, has"
    return make_finding(
        "SW024",
        {
            "tokens that the longest batch has more, share": behind,
            "threshold": _SKEW,
            "most tokens of a rank, per step": most,
            "fewest tokens of a rank, per step": typical(lines, TOKENS, "min"),
            "waited, s/step": waited_s,
            "computed meanwhile for more tokens, s/step": expected_s,
        },
        gain=min(expected_s, waited_s) * (1 - 1 / facts.num_ranks),
        rank=rank,
        which=which,
        share=waited_s / whole_s,
    )


def data_loader(run: RunRecord) -> Finding | None:
    """Find steps that wait for their batch."""
    lines = [line for line in steady(run) if DATA_S in line.metrics]
    if not any(line.metrics[DATA_S].max for line in lines):
        raise NotEnough("batches that come through run.data(...)")
    steps = sum(line.num_steps for line in lines)
    # A mean, as a loader may stall at every few batches; but not of one line alone.
    data_s = sum(line.metrics[DATA_S].max * line.num_steps for line in lines) / steps
    whole_s = sum(line.metrics[STEP_S].median * line.num_steps for line in lines) / steps
    slow = [n for n in lines if n.metrics[DATA_S].max > _DATA * n.metrics[STEP_S].median]
    if data_s < max(_DATA * whole_s, noise_s(run.facts)) or len(slow) < _SLOW_LINES * len(lines):
        return None
    check_cores(run, lines, data_s)
    rank, typical_s = same_rank(lines, DATA_S, "max"), typical(lines, DATA_S)
    # Of two ranks the median is the mean of both.
    compared: tuple[Which, ...] = ("min",) if run.facts.num_ranks == 2 else ("min", "median")
    is_one = run.facts.num_ranks > 1 and all(
        typical(lines, DATA_S, which) < data_s / 3 for which in compared
    )
    rank = rank if is_one else None
    return make_finding(
        "SW021",
        {
            "data, s/step": data_s,
            "on the rank in the middle, s/step": typical_s,
            "share of the step": data_s / whole_s,
            "threshold": _DATA,
        },
        gain=(data_s - _DATA * whole_s, data_s),
        rank=rank,
        waiting="ranks wait" if rank is None else f"rank {rank} waits",
    )
