"""Ranks that others wait for, and batches that a rank waits for."""

from collections.abc import Sequence

from shardwise.monitor.doctor.evidence import (
    NotEnough,
    Which,
    core_wait_s,
    finding,
    is_cpu,
    noise_s,
    same_rank,
    steady,
    step_s,
    typical,
)
from shardwise.monitor.findings import Change, Finding, Gain
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
from shardwise.monitor.record import RunRecord, StepLine

_SKEW = 0.1  # of the step
_LATE_LINES, _LATE_SHARE = 3, 0.25  # of those judged: fewer may be chance
_EXPLAINS = 0.5  # of the skew, by what the rank does longer
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


def straggler(run: RunRecord) -> list[Finding]:
    """Find the rank that waits least while all others wait, in each step or now and then."""
    facts = run.facts
    if facts.num_ranks == 1:
        return []
    others: Which = "max" if facts.num_ranks == 2 else "median"
    all_lines, lines, share = _late_lines(run, others)
    if not lines:
        return []
    whole_s, least_s = step_s(all_lines), typical(lines, WAITED_MS, "min") / 1e3
    skew_s = typical(lines, WAITED_MS, others) / 1e3 - least_s
    rank = same_rank(lines, WAITED_MS, "min")
    if rank is None or share * skew_s < max(_SKEW * whole_s, noise_s(facts)):
        return []
    usual: Which = "min" if facts.num_ranks == 2 else "median"
    longer = {
        name: typical(lines, name, "max") - typical(lines, name, usual)
        for name in _CAUSES
        if all(name in line.metrics for line in lines) and same_rank(lines, name, "max") == rank
    }
    cause = max(longer, key=lambda name: longer[name], default=None)
    explained = longer[cause] / skew_s if cause is not None else 0.0
    waits_s = core_wait_s(run, lines)
    if is_cpu(facts) and skew_s < _TIMES_CORE_WAIT * waits_s:
        raise NotEnough("cores of their own for the ranks: they wait for cores as much")
    if explained < _EXPLAINS:
        if is_cpu(facts) or set(facts.degrees) > {"replicate", "shard"}:
            raise NotEnough(f"what rank {rank} does longer than others, who wait for it")
        cause = None
    host = facts.hosts[rank] if rank < len(facts.hosts) else "an unknown host"
    doing = "" if cause is None else f": it is {longer[cause]:.3g} s longer {_CAUSES[cause]}"
    return [
        finding(
            run,
            "SW020",
            f"rank {rank} on {host} comes {skew_s:.3g} s late in {_often(share)}{doing}",
            {
                "skew, s/step": share * skew_s,
                "share of the step": share * skew_s / whole_s,
                "share of late lines": share,
                "threshold": _SKEW,
                "waits itself, s/step": least_s,
                **{f"longer: {name}": seconds for name, seconds in longer.items() if seconds > 0},
            },
            "It waits least in collectives, and all others wait in them for it.",
            [Change(f"rank {rank}", None, "the same device, cores and batches as the others")],
            Gain(share * skew_s, "s/step", "down to what the other ranks do"),
            rank=rank,
        )
    ]


def _late_lines(
    run: RunRecord, others: Which
) -> tuple[Sequence[StepLine], Sequence[StepLine], float]:
    """Return the lines that are judged, those in which a rank is waited for, and their share.

    All of them count as late where most are, so that the typical one is judged.
    """
    lines = [line for line in steady(run) if WAITED_MS in line.metrics]
    if not lines:
        raise NotEnough(f"the figure {WAITED_MS}")

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


def _often(share: float) -> str:
    return "each step" if share == 1 else f"{share:.0%} of the steps"


def uneven_batches(run: RunRecord) -> list[Finding]:
    """Find waits for ranks whose batches have more tokens, the same rank's or another's each time.

    A rank waits for the tokens that the longest batch has more, as long as it computes for as many
    of its own.
    """
    facts = run.facts
    if facts.num_ranks == 1 or set(facts.degrees) > {"replicate", "shard"}:
        return []
    lines = [line for line in steady(run) if TOKENS_BEHIND_SHARE in line.metrics]
    if not lines:
        raise NotEnough("tokens of each step (a model that is called with token ids)")
    others: Which = "max" if facts.num_ranks == 2 else "median"
    usual: Which = "min" if facts.num_ranks == 2 else "median"
    whole_s, waited_s = step_s(lines), typical(lines, WAITED_MS, others) / 1e3
    behind = typical(lines, TOKENS_BEHIND_SHARE, others) / 100
    expected_s = behind * typical(lines, COMPUTE_S, usual)
    rank = same_rank(lines, TOKENS_BEHIND_SHARE, "min")
    is_other = rank is not None and same_rank(lines, WAITED_MS, "min") != rank
    is_long = waited_s >= max(_SKEW * whole_s, noise_s(facts))
    if behind < _SKEW or is_other or not is_long or expected_s < _EXPLAINS * waited_s:
        return []
    if is_cpu(facts) and waited_s < _TIMES_CORE_WAIT * core_wait_s(run, lines):
        raise NotEnough("cores of their own for the ranks: they wait for cores as much")
    if rank is None:
        which = f"the longest batch of a step, on another rank each time, has {behind:.0%} more"
    else:
        most = typical(lines, TOKENS, "max")
        which = f"the batches of rank {rank} have {most:.0f} tokens a step, {behind:.0%} more"
    return [
        finding(
            run,
            "SW024",
            f"{which} tokens than others, which wait for it {waited_s:.3g} s of each step "
            f"({waited_s / whole_s:.0%})",
            {
                "tokens that the longest batch has more, share": behind,
                "threshold": _SKEW,
                "most tokens of a rank, per step": typical(lines, TOKENS, "max"),
                "fewest tokens of a rank, per step": typical(lines, TOKENS, "min"),
                "waited, s/step": waited_s,
                "computed meanwhile for more tokens, s/step": expected_s,
            },
            "A step lasts as long as its longest batch, and the other ranks wait in collectives.",
            [Change("batches", None, "as many tokens on each rank: packed, or balanced by length")],
            Gain(
                min(expected_s, waited_s) * (1 - 1 / facts.num_ranks),
                "s/step",
                "down to the mean of the ranks",
            ),
            rank=rank,
        )
    ]


def data_loader(run: RunRecord) -> list[Finding]:
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
        return []
    if is_cpu(run.facts) and data_s < core_wait_s(run, lines):
        raise NotEnough("cores of their own for the ranks: they wait for cores as much")
    typical_s = typical(lines, DATA_S)
    rank = same_rank(lines, DATA_S, "max")
    is_one = run.facts.num_ranks > 1 and rank is not None
    # Of two ranks the median is the mean of both.
    is_one = (
        is_one
        and typical(lines, DATA_S, "min") < data_s / 3
        and (typical_s < data_s / 3 or run.facts.num_ranks == 2)
    )
    who = f"rank {rank} waits" if is_one else "ranks wait"
    return [
        finding(
            run,
            "SW021",
            f"{who} {data_s:.3g} s of each step ({data_s / whole_s:.0%}) for the next batch",
            {
                "data, s/step": data_s,
                "on the rank in the middle, s/step": typical_s,
                "share of the step": data_s / whole_s,
                "threshold": _DATA,
            },
            "Nothing is computed meanwhile, and where one rank waits, all do.",
            [Change("loader", None, "more workers, prefetching, batches packed before the run")],
            Gain(data_s - _DATA * whole_s, "s/step", "down to a tenth of the step", data_s),
            rank=rank if is_one else None,
        )
    ]
