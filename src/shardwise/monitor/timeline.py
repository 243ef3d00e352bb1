"""The recorded timelines of a run as Chrome trace JSON, to be opened in Perfetto.

Note [Steps in a trace]
~~~~~~~~~~~~~~~~~~~~~~~
A record has timelines of single steps, each in its own time. In a trace they stand one after the
other, with nothing in between, and begin at the same moment on all ranks; a line "steps" says which
is which. Names are those of a simulated step's trace, so that the two can lie side by side.

Source: Trace Event Format (Google, the trace-event profiling tool): JSON object form, complete
events X, metadata events M; times in microseconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.monitor.pictures import place_of
from shardwise.monitor.record import RunRecord
from shardwise.names import name_of_unit

_TICKS_PER_MS, _TICKS_PER_US = 10_000, 10  # a record's times have four digits
_STEPS = 0

Event = dict[str, Any]


def chrome_trace(record: RunRecord) -> dict[str, Any]:
    """Return the timelines of all steps: a process for each rank, a thread for each line.

    **Raises** ConfigError where no timeline was recorded.
    """
    timelines = list(record.lines("timeline"))
    if not timelines:
        raise ConfigError(
            f"{record.path}: no timeline is recorded yet; the second step has the first one"
        )
    begins = _begins(timelines)
    lines = list(dict.fromkeys(span[0] for _, line in timelines for span in line["spans"]))
    threads = {name: tid for tid, name in enumerate(sorted(lines, key=place_of), start=1)}
    events = [e for rank in dict.fromkeys(r for r, _ in timelines) for e in _named(rank, threads)]
    for rank, line in timelines:
        events += _step_events(rank, line, begins[line["step"]], threads)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "source": "shardwise report",
            "run": str(record.path),
            "num_ranks": record.facts.num_ranks,
            "device": record.facts.device,
        },
        "traceEvents": events,
    }


def _begins(timelines: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[int, int]:
    """Return when each step begins, in ticks; see Note [Steps in a trace]."""
    lengths: dict[int, int] = {}
    for _, line in timelines:
        ends = (span[3] + span[4] for span in line["spans"])
        length = max(_ticks(1e3 * line["seconds"]), *(_ticks(end) for end in ends), 1)
        lengths[line["step"]] = max(length, lengths.get(line["step"], 0))
    begins, at = {}, 0
    for step in sorted(lengths):
        begins[step] = at
        at += lengths[step]
    return begins


def _ticks(ms: float) -> int:
    return round(ms * _TICKS_PER_MS)


def _named(rank: int, threads: Mapping[str, int]) -> Iterator[Event]:
    def metadata(kind: str, tid: int, **args: object) -> Event:
        return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "ts": 0, "args": args}

    yield metadata("process_name", 0, name=f"rank {rank}")
    yield metadata("process_sort_index", 0, sort_index=rank)
    for name, tid in {"steps": _STEPS, **threads}.items():
        yield metadata("thread_name", tid, name=name)
        yield metadata("thread_sort_index", tid, sort_index=tid)


def _step_events(
    rank: int, line: Mapping[str, Any], begin: int, threads: Mapping[str, int]
) -> Iterator[Event]:
    step = line["step"]
    whole = _ticks(1e3 * line["seconds"])
    yield _event(f"step {step}", "step", rank, _STEPS, (begin, begin + whole), {"step": step})
    free: dict[str, int] = {}
    for name, phase, unit, begin_ms, length_ms, num_bytes in line["spans"]:
        start = max(_ticks(begin_ms), free.get(name, 0))  # so that none overlaps by rounding
        end = max(_ticks(begin_ms + length_ms), start)
        free[name] = end
        args = {"unit": name_of_unit(unit), "step": step, "phase": phase}
        if num_bytes:
            args["bytes"] = num_bytes
        is_told = phase in ("outside", "data", "save", "load")
        label = phase if is_told else f"shardwise.{phase}({name_of_unit(unit)})"
        yield _event(label, phase, rank, threads[name], (begin + start, begin + end), args)


def _event(
    name: str, kind: str, rank: int, tid: int, when: tuple[int, int], args: Mapping[str, Any]
) -> Event:
    times = {"ts": when[0] / _TICKS_PER_US, "dur": (when[1] - when[0]) / _TICKS_PER_US}
    return {"name": name, "cat": kind, "ph": "X", "pid": rank, "tid": tid, **times, "args": args}
