"""Runs that did not come to their end: a rank died or raised, or no step comes any more."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shardwise.keys import checked_value
from shardwise.monitor.doctor.evidence import NotEnough, finding
from shardwise.monitor.findings import Change, Finding
from shardwise.monitor.record import RunRecord
from shardwise.names import name_of_unit
from shardwise.processes import Process, fate, own_process
from shardwise.quantities import format_bytes, format_duration

_HANG_TIMES, _HANG_S = 5.0, 60.0
_MAX_SHOWN, _MAX_QUOTED = 4, 300  # ranks, and characters of what each says


def died(run: RunRecord) -> list[Finding]:
    """Find ranks that raised or were killed, and those that waited for them in vain.

    A rank that raised by itself is the cause before one that is gone, since launchers kill the
    others; ranks whose communication failed are the cause only if no other rank is known to be.
    """
    words = run.last_words
    failed = {rank: word for rank, word in words.items() if word.get("error")}
    stopped = [rank for rank, word in failed.items() if word["error"] == "KeyboardInterrupt"]
    failed = {rank: word for rank, word in failed.items() if rank not in stopped}
    own = {rank: word for rank, word in failed.items() if not word.get("follows")}
    mine = own_process()
    gone = [rank for rank, word in words.items() if _is_gone(word, mine)]
    if not (failed or gone) or (stopped and not own):  # a user's Ctrl-C ends all ranks
        return []
    last = run.steps[-1].step if run.steps else 0
    named: Sequence[int] = gone
    changes: list[Change] = []
    if own or not gone:
        first = min(own or failed, key=lambda rank: _order(failed[rank]))
        named = [rank for rank, word in failed.items() if _said(word) == _said(failed[first])]
        verdict, changes = _raised(run, first, named, failed[first])
    else:
        where = f" on {words[gone[0]]['process']['host']}"
        # Other ranks know of steps since the last line of figures.
        over = max([last, *(word["during"] - 1 for word in failed.values() if "during" in word)])
        verdict = (
            f"{_named(gone)}{where} died after step {over} and left no error: killed (signal 9; "
            "the system does so when the host's memory runs out), or crashed"
        )
    others = [rank for rank in failed if rank not in named]
    quoted = [_quoted(rank, failed[rank]) for rank in others[:_MAX_SHOWN]]
    if gone and gone != named:
        quoted.append(f"The processes of {_named(gone)} are gone and left no error.")
    return [
        finding(
            run,
            "SW023",
            verdict,
            {
                "last line of figures, step": last,
                "ranks that raised": len(own),
                "ranks that are gone": len(gone),
                "ranks whose communication failed": len(failed) - len(own),
            },
            " ".join(quoted) or "The run did not come to its end.",
            [*changes, Change("resume", None, "auto, once the cause is mended")],
            rank=named[0] if len(named) == 1 else None,
        )
    ]


def _is_gone(word: Mapping[str, Any], mine: Process) -> bool:
    """Tell whether a rank has not said that it ended, and its process is known to be gone."""
    if word["kind"] != "begin" or word.get("process") is None:
        return False
    return fate(checked_value(Process, word["process"], "process"), mine)[0] == "dead"


def _order(word: Mapping[str, Any]) -> tuple[bool, float]:
    """Return what ranks are sorted by: first those that failed in a step, as time goes."""
    return "during" not in word, word.get("unix_s", 0.0)


def _said(word: Mapping[str, Any]) -> str:
    error, message = word["error"], word.get("message")
    if not message:
        return str(error)
    return str(message) if word.get("follows") else f"{error}: {message}"


def _quoted(rank: int, word: Mapping[str, Any]) -> str:
    text = _said(word)
    text = text if text.startswith("rank ") else f"rank {rank}: {text}"
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def _raised(
    run: RunRecord, first: int, named: Sequence[int], word: Mapping[str, Any]
) -> tuple[str, list[Change]]:
    """Return the verdict about an error, and what to change where memory ran out."""
    step, phase = word.get("during", word["step"]), word.get("phase", "outside")
    place = f"in step {step}"
    if phase != "outside":
        place += f", in {phase} of '{name_of_unit(word.get('unit', ''))}'"
    for _, told in run.lines("out_of_memory", first):
        if told["step"] == step and not word.get("follows"):
            asked = told["asked_bytes"]
            asks = "" if asked is None else f" asking for {format_bytes(asked)}"
            in_use, most = (format_bytes(told[f"{k}_bytes"]) for k in ("in_use", "capacity"))
            fixes = [Change("memory", None, fix["change"]) for fix in told["fixes"] if fix["fits"]]
            held = f"{asks} with {in_use} in use of {most}"
            return f"rank {first} ran out of memory {place},{held}", fixes[:1]
    if word.get("follows"):
        return f"communication failed {place} on rank {first}: {_said(word)}", []
    return f"{_named(named)} raised {_said(word)}, {place}", []


def _named(ranks: Sequence[int]) -> str:
    more = f", ... ({len(ranks)} in all)" if len(ranks) > _MAX_SHOWN else ""
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def no_step(run: RunRecord) -> list[Finding]:
    """Find a run that has not ended and tells of no step any more."""
    if run.idle_s is None or any(word["kind"] == "end" for word in run.last_words.values()):
        return []
    if len(run.steps) < 3:
        raise NotEnough("lines of steps, by which to tell how long one takes")
    intervals = sorted(later.at_s - line.at_s for line, later in pairwise(run.steps))
    longest = intervals[int(0.99 * (len(intervals) - 1))]
    # Lines are written every few steps: of the first ones each has its own.
    per_step = longest / min(line.num_steps for line in run.steps)
    longest = max(longest, per_step * max(line.num_steps for line in run.steps))
    if run.idle_s < max(_HANG_TIMES * longest, _HANG_S):
        return []
    last = run.steps[-1].step
    return [
        finding(
            run,
            "SW022",
            f"no step for {format_duration(run.idle_s)} after step {last}: it hangs, or was killed",
            {
                "idle, s": run.idle_s,
                "longest interval, s": longest,
                "threshold, intervals": _HANG_TIMES,
                "last step": last,
            },
            "The run has not said that it is over, and its lines came far more often before.",
            [Change("resume", None, "auto, once the cause is found")],
        )
    ]
