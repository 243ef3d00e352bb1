"""What saves cost the training, and what their absence would."""

from collections import defaultdict
from itertools import pairwise
from math import sqrt

from shardwise.monitor.doctor.evidence import NotEnough, finding, steady
from shardwise.monitor.findings import Change, Finding, Gain
from shardwise.monitor.metrics import SAVE_S, STALL_S, STEP_S
from shardwise.monitor.record import RunRecord
from shardwise.quantities import format_duration

_STALL = 0.03  # of the run
_STALL_S = 0.3  # of one line
_BUSY = 0.9
# 419 failures in 54 days of 16,384 accelerators: The Llama 3 Herd of Models, 2024, section 3.3.4.
_DEVICE_MTBF_S = 50_000 * 3600.0
_MOST_MTBF_S = 7 * 24 * 3600.0  # of people, disks and networks
_UNSAVED_S, _UNSAVED_TIMES = 1800.0, 4.0


def slow_saves(run: RunRecord) -> list[Finding]:
    """Find saves that the training thread waits for."""
    steady(run)
    lines = [line for line in run.steps[3:] if STALL_S in line.metrics]
    stalls = [line.metrics[STALL_S].max * line.num_steps for line in lines]
    whole_s = sum(line.metrics[STEP_S].median * line.num_steps for line in lines)
    save_s = sum(line.metrics[SAVE_S].max * line.num_steps for line in lines)
    stall_s, longest_s = sum(stalls), max(stalls, default=0.0)
    if stall_s < _STALL * whole_s or longest_s < _STALL_S:
        return []
    behind_s = max(save_s - stall_s, 0.0)
    slowest = max(lines, key=lambda line: line.metrics[STALL_S].max).metrics[STALL_S]
    if behind_s < stall_s:
        why = "The training thread itself copies or writes them."
        changes = [Change("save_in_background", None, True)]
    elif behind_s > _BUSY * whole_s:
        why = "A save takes longer than the steps until the next, which waits for it."
        changes = [Change("save_every", None, f"{1 + behind_s / whole_s:.1g} times as many steps")]
    else:
        why = "The copy that a save begins with, or the wait for the save before it, is long."
        changes = [Change("Checkpoints.reserve()", None, "called once, after the first step")]
    return [
        finding(
            run,
            "SW050",
            f"saves have stopped the training for {stall_s:.3g} s, {stall_s / whole_s:.0%} of it",
            {
                "stalls, s": stall_s,
                "longest in a line, s": longest_s,
                "behind the training, s": behind_s,
                "run, s": whole_s,
                "share": stall_s / whole_s,
                "threshold": _STALL,
            },
            why,
            changes,
            Gain(
                (stall_s - _STALL * whole_s) / sum(line.num_steps for line in lines),
                "s/step",
                "down to 3 % of the run",
            ),
            rank=slowest.max_rank if slowest.max > 2 * slowest.median else None,
        )
    ]


def other_saves(run: RunRecord) -> list[Finding]:
    """Find saves by torch's own calls that the training waits for."""
    steady(run)
    whole_s = sum(line.metrics[STEP_S].median * line.num_steps for line in run.steps[3:])
    told = [each for each in run.lines("other_save") if each[1]["step"] > run.steps[2].step]
    by_rank: dict[int, float] = defaultdict(float)
    for rank, line in told:
        by_rank[rank] += line["seconds"]
    if not by_rank:
        return []
    rank, stall_s = max(by_rank.items(), key=lambda each: each[1])
    longest_s, call = max((line["seconds"], line["call"]) for at, line in told if at == rank)
    if stall_s < _STALL * whole_s or longest_s < _STALL_S:
        return []
    is_one = len(by_rank) < run.facts.num_ranks
    who = f"on rank {rank} " if is_one else ""
    return [
        finding(
            run,
            "SW050",
            f"{call} {who}has stopped the training for {stall_s:.3g} s, {stall_s / whole_s:.0%} of "
            "it",
            {
                "stalls, s": stall_s,
                "longest, s": longest_s,
                "run, s": whole_s,
                "share": stall_s / whole_s,
                "threshold": _STALL,
            },
            "The training thread writes the file itself"
            + (", and the other ranks wait for that rank." if is_one else "."),
            [
                Change(
                    "torch.save", None, "shardwise.Checkpoints(...).save(step), in the background"
                )
            ],
            Gain(
                (stall_s - _STALL * whole_s) / sum(line.num_steps for line in run.steps[3:]),
                "s/step",
                "down to 3 % of the run",
            ),
            rank=rank if is_one else None,
        )
    ]


def no_saves(run: RunRecord) -> list[Finding]:
    """Find a run that would lose much work if it failed."""
    lines = [line for line in run.steps if STALL_S in line.metrics]
    if not lines:
        raise NotEnough("the time in saves")
    saves = [line for line in lines if line.metrics[STALL_S].max or line.metrics[SAVE_S].max]
    moments = [lines[0].at_s, *(line.at_s for line in saves), lines[-1].at_s]
    unsaved_s = max(later - at for at, later in pairwise(moments))
    stall_s = max((line.metrics[STALL_S].max * line.num_steps for line in saves), default=0.0)
    mtbf_s = min(_DEVICE_MTBF_S / run.facts.num_ranks, _MOST_MTBF_S)
    best_s = sqrt(2 * stall_s * mtbf_s)
    threshold_s = max(_UNSAVED_S, _UNSAVED_TIMES * best_s)
    if unsaved_s < threshold_s:
        return []
    step_s = (lines[-1].at_s - lines[0].at_s) / max(sum(n.num_steps for n in lines[1:]), 1)
    every = max(int(max(best_s, _UNSAVED_S / 2) / step_s), 1)
    told = "no save at all in" if not saves else "no save for"
    return [
        finding(
            run,
            "SW051",
            f"{told} {format_duration(unsaved_s)}: a failure would cost up to as much work",
            {
                "longest time without a save, s": unsaved_s,
                "saves": len(saves),
                "mean time between failures, assumed, s": mtbf_s,
                "interval that loses least, s": best_s,
                "threshold, s": threshold_s,
            },
            "All since the last save is computed again after a failure. Saves that are made by "
            "other means than Shardwise's are not seen here.",
            [Change("save_every", None, every)],
        )
    ]
