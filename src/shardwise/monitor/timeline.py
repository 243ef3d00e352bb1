"""The recorded timelines of a run as a Chrome trace.

Note [Steps in a trace]
~~~~~~~~~~~~~~~~~~~~~~~
A record has timelines of single steps, each with its own times. In a trace they follow each other
without gaps and begin at the same moment on all ranks; a line "steps" names them. Names are those
of a simulated step's trace, so that the two can be compared.
"""

from collections.abc import Sequence

from shardwise.errors import ConfigError
from shardwise.monitor.record import RunRecord, Timeline
from shardwise.monitor.summary import place_of
from shardwise.names import name_of_unit
from shardwise.trace_events import ChromeTrace

_TICKS_PER_MS, _TICKS_PER_US = 10_000, 10  # a record's times have four digits
_STEPS = 0
_UNLABELLED = ("outside", "data", "save", "load")


def recorded_trace(record: RunRecord) -> dict[str, object]:
    """Return the timelines of all steps: a process for each rank, a thread for each line.

    **Raises** ConfigError if no timeline was recorded.
    """
    timelines = list(record.lines(Timeline))
    if not timelines:
        raise ConfigError(
            f"{record.path}: no timeline is recorded yet; the second step has the first one"
        )
    trace, begins = ChromeTrace(_TICKS_PER_US), _begins(timelines)
    lines = dict.fromkeys(span[0] for _, line in timelines for span in line.spans)
    threads = {name: tid for tid, name in enumerate(sorted(lines, key=place_of), start=1)}
    names = {_STEPS: "steps", **{tid: name for name, tid in threads.items()}}
    for rank in dict.fromkeys(rank for rank, _ in timelines):
        trace.name_process(rank, f"rank {rank}", rank, names)
    for rank, line in timelines:
        step, begin = line.step, begins[line.step]
        end = begin + _ticks(1e3 * line.seconds)
        trace.add_span(f"step {step}", "step", (rank, _STEPS, begin), end, {"step": step})
        free: dict[str, int] = {}
        for name, phase, unit, begin_ms, length_ms, num_bytes in line.spans:
            start = max(_ticks(begin_ms), free.get(name, 0))  # so that none overlaps by rounding
            free[name] = max(_ticks(begin_ms + length_ms), start)
            args = {"unit": name_of_unit(unit), "step": step, "phase": phase}
            args |= {"bytes": num_bytes} if num_bytes else {}
            label = phase if phase in _UNLABELLED else f"shardwise.{phase}({name_of_unit(unit)})"
            place = (rank, threads[name], begin + start)
            trace.add_span(label, phase, place, begin + free[name], args)
    return trace.to_json(
        source="shardwise report",
        run=str(record.path),
        num_ranks=record.facts.num_ranks,
        device=record.facts.device,
    )


def _begins(timelines: Sequence[tuple[int, Timeline]]) -> dict[int, int]:
    """Return the begin of each step, in ticks; see Note [Steps in a trace]."""
    lengths: dict[int, int] = {}
    for _, line in timelines:
        ends = (span[3] + span[4] for span in line.spans)
        length = max(_ticks(1e3 * line.seconds), *(_ticks(end) for end in ends), 1)
        lengths[line.step] = max(length, lengths.get(line.step, 0))
    begins, at = {}, 0
    for step in sorted(lengths):
        begins[step] = at
        at += lengths[step]
    return begins


def _ticks(ms: float) -> int:
    return round(ms * _TICKS_PER_MS)
