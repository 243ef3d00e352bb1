"""Rules about runs that did not come to their end: a rank died or raised, or no step comes."""

from collections.abc import Sequence
from itertools import pairwise

from shardwise.keys import checked_value
from shardwise.monitor.doctor.evidence import Evidence, NotEnough
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.lines import RankLine
from shardwise.monitor.record import RunRecord
from shardwise.names import name_of_unit
from shardwise.processes import Process, fate, own_process
from shardwise.quantities import format_bytes, format_duration

_HANG_TIMES, _HANG_S = 5.0, 60.0
_MAX_SHOWN, _MAX_QUOTED = 4, 300  # ranks, and characters of each one's error


def died(e: Evidence) -> Finding | None:
    """Find ranks that raised or were killed, and those whose communication failed after them.

    A rank that raised by itself is the cause before one that exited, since launchers kill the
    others. Ranks whose communication failed are the cause only if no other rank is known to be.
    """
    run, last_lines = e.run, e.run.end_lines
    failed = {rank: line for rank, line in last_lines.items() if line.get("error")}
    stopped = [rank for rank, line in failed.items() if line["error"] == "KeyboardInterrupt"]
    failed = {rank: line for rank, line in failed.items() if rank not in stopped}
    own = {rank: line for rank, line in failed.items() if not line.get("follows")}
    this = own_process()
    gone = [rank for rank, line in last_lines.items() if _is_gone(line, this)]
    if not (failed or gone) or (stopped and not own):  # a user's Ctrl-C ends all ranks
        return None
    last = run.steps[-1].step if run.steps else 0
    named: Sequence[int] = gone
    changes: list[Change] = []
    if own or not gone:
        # The first that failed in a step; errors outside of steps come after them.
        first = min(
            own or failed,
            key=lambda r: ("during" not in failed[r], failed[r].get("unix_s", 0.0)),
        )
        cause = _describe_error(failed[first])
        named = [rank for rank, line in failed.items() if _describe_error(line) == cause]
        verdict, changes = _describe_cause(run, first, named, failed[first])
    else:
        where = f" on {last_lines[gone[0]]['process']['host']}"
        # Other ranks know of steps since the last line of figures.
        over = max([last, *(line["during"] - 1 for line in failed.values() if "during" in line)])
        verdict = (
            f"{_list_ranks(gone)}{where} died after step {over} and left no error: killed (signal "
            "9; the system does so when the host's memory runs out), or crashed"
        )
    others = [rank for rank in failed if rank not in named]
    quoted = [_quote(rank, failed[rank]) for rank in others[:_MAX_SHOWN]]
    if gone and gone != named:
        quoted.append(f"The processes of {_list_ranks(gone)} exited and left no error.")
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


def _is_gone(line: RankLine, this: Process) -> bool:
    """Tell whether a rank has not written its end, and its process is known to have exited."""
    if line["kind"] != "begin" or line.get("process") is None:
        return False
    return fate(checked_value(Process, line["process"], "process"), this)[0] == "dead"


def _describe_error(line: RankLine) -> str:
    error, message = line["error"], line.get("message")
    if not message:
        return str(error)
    return str(message) if line.get("follows") else f"{error}: {message}"


def _quote(rank: int, line: RankLine) -> str:
    text = _describe_error(line)
    text = text if text.startswith("rank ") else f"rank {rank}: {text}"
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def _describe_cause(
    run: RunRecord, first: int, named: Sequence[int], line: RankLine
) -> tuple[str, list[Change]]:
    """Return the verdict about an error, and the change that helps if memory ran out."""
    step, phase = line.get("during", line["step"]), line.get("phase", "outside")
    place = f"in step {step}"
    if phase != "outside":
        place += f", in {phase} of '{name_of_unit(line.get('unit', ''))}'"
    if line.get("follows"):
        return f"communication failed {place} on rank {first}: {_describe_error(line)}", []
    for _, oom in run.lines("out_of_memory", first):
        if oom["step"] == step:
            asked = oom["asked_bytes"]
            asks = "" if asked is None else f" asking for {format_bytes(asked)}"
            in_use, most = (format_bytes(oom[f"{k}_bytes"]) for k in ("in_use", "capacity"))
            fixes = [Change("memory", None, fix["change"]) for fix in oom["fixes"] if fix["fits"]]
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
    if run.idle_s is None or any(line["kind"] == "end" for line in run.end_lines.values()):
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
