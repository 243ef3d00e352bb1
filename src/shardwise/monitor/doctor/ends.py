"""Rules about runs that did not come to their end: a rank died or raised, or no step comes."""

from collections.abc import Sequence
from itertools import pairwise

from shardwise.monitor.doctor.evidence import Evidence, NotEnough
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.record import Begin, End, OutOfMemory, RunRecord
from shardwise.names import name_of_unit
from shardwise.processes import fate, own_process
from shardwise.quantities import format_bytes, format_duration

_HANG_TIMES, _HANG_S = 5.0, 60.0
_MAX_SHOWN, _MAX_QUOTED = 4, 300  # ranks, and characters of each one's error


def died(e: Evidence) -> Finding | None:
    """Find ranks that raised or were killed, and those whose communication failed after them.

    A rank that raised by itself is the cause before one that exited, since launchers kill the
    others. Ranks whose communication failed are the cause only if no other rank is known to be.
    """
    run, last_lines = e.run, e.run.end_lines
    ends = {rank: line for rank, line in last_lines.items() if isinstance(line, End)}
    failed = {rank: line for rank, line in ends.items() if line.error}
    stopped = [rank for rank, line in failed.items() if line.error == "KeyboardInterrupt"]
    failed = {rank: line for rank, line in failed.items() if rank not in stopped}
    own = {rank: line for rank, line in failed.items() if not line.follows}
    this = own_process()
    gone = {  # hosts of ranks that wrote no end and are known to have exited
        rank: line.process.host
        for rank, line in last_lines.items()
        if isinstance(line, Begin) and line.process and fate(line.process, this)[0] == "dead"
    }
    if not (failed or gone) or (stopped and not own):  # a user's Ctrl-C ends all ranks
        return None
    last = run.steps[-1].step if run.steps else 0
    named: Sequence[int] = [*gone]
    changes: list[Change] = []
    if own or not gone:
        # The first that failed in a step; errors outside of steps come after them.
        first = min(
            own or failed,
            key=lambda r: (failed[r].during is None, failed[r].unix_s or 0.0),
        )
        cause = _describe_error(failed[first])
        named = [rank for rank, line in failed.items() if _describe_error(line) == cause]
        verdict, changes = _describe_cause(run, first, named, failed[first])
    else:
        # Other ranks know of steps since the last line of figures.
        during = (line.during for line in failed.values())
        over = max([last, *(step - 1 for step in during if step is not None)])
        verdict = (
            f"{_list_ranks(named)} on {gone[named[0]]} died after step {over} and left no error: "
            "killed (signal 9; the system does so when the host's memory runs out), or crashed"
        )
    others = [rank for rank in failed if rank not in named]
    quoted = [_quote(rank, failed[rank]) for rank in others[:_MAX_SHOWN]]
    if gone and [*gone] != named:
        quoted.append(f"The processes of {_list_ranks([*gone])} exited and left no error.")
    return make_finding(
        "SW023",
        {
            "last line of figures, step": last,
            "ranks that raised": len(own),
            "ranks that are gone": len(gone),
            "ranks whose communication failed": len(failed) - len(own),
        },
        *changes,
        rank=named[0] if len(named) == 1 else None,
        verdict=verdict,
        why=" ".join(quoted) or "The run did not come to its end.",
    )


def _describe_error(line: End) -> str:
    if not line.message:
        return str(line.error)
    return line.message if line.follows else f"{line.error}: {line.message}"


def _quote(rank: int, line: End) -> str:
    text = _describe_error(line)
    text = text if text.startswith("rank ") else f"rank {rank}: {text}"
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def _describe_cause(
    run: RunRecord, first: int, named: Sequence[int], line: End
) -> tuple[str, list[Change]]:
    """Return the verdict about an error, and the change that helps if memory ran out."""
    step = line.step if line.during is None else line.during
    place = f"in step {step}"
    if line.phase not in (None, "outside"):
        place += f", in {line.phase} of '{name_of_unit(line.unit or '')}'"
    if line.follows:
        return f"communication failed {place} on rank {first}: {_describe_error(line)}", []
    for _, oom in run.lines(OutOfMemory, first):
        if oom.step == step:
            asks = "" if oom.asked_bytes is None else f" asking for {format_bytes(oom.asked_bytes)}"
            in_use, most = format_bytes(oom.in_use_bytes), format_bytes(oom.capacity_bytes)
            fixes = [Change("memory", None, fix.change) for fix in oom.fixes if fix.fits]
            held = f"{asks} with {in_use} in use of {most}"
            return f"rank {first} ran out of memory {place},{held}", fixes[:1]
    return f"{_list_ranks(named)} raised {_describe_error(line)}, {place}", []


def _list_ranks(ranks: Sequence[int]) -> str:
    more = f", ... ({len(ranks)} in all)" if len(ranks) > _MAX_SHOWN else ""
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def no_step(e: Evidence) -> Finding | None:
    """Find a run that has not ended and writes no steps any more."""
    run = e.run
    if run.idle_s is None or any(isinstance(line, End) for line in run.end_lines.values()):
        return None
    if len(run.steps) < 3:
        raise NotEnough("lines of steps, which tell how long one takes")
    intervals = sorted(later.at_s - line.at_s for line, later in pairwise(run.steps))
    longest = intervals[int(0.99 * (len(intervals) - 1))]
    # Lines are written every few steps: of the first ones each has its own.
    per_step = longest / min(line.num_steps for line in run.steps)
    longest = max(longest, per_step * max(line.num_steps for line in run.steps))
    if run.idle_s < max(_HANG_TIMES * longest, _HANG_S):
        return None
    return make_finding(
        "SW022",
        {
            "idle, s": run.idle_s,
            "longest interval, s": longest,
            "threshold, intervals": _HANG_TIMES,
            "last step": run.steps[-1].step,
        },
        idle=format_duration(run.idle_s),
    )
