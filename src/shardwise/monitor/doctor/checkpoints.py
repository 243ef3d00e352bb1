"""What saves cost the training."""

from shardwise.monitor.doctor.evidence import finding, steady
from shardwise.monitor.findings import Change, Finding, Gain
from shardwise.monitor.metrics import SAVE_S, STALL_S, STEP_S
from shardwise.monitor.record import RunRecord

_STALL = 0.03  # of the run
_STALL_S = 0.3  # of one line
_BUSY = 0.9


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
