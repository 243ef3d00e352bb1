"""Where the time of a plan's slowest rank goes, as lines that terminal and page share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwise.plan.planning import Plan
    from shardwise.plan.step.program import Stream

_COMMUNICATING: tuple[Stream, ...] = ("shard", "replicate")
_OFFLOADING: tuple[Stream, ...] = ("to_device", "to_host", "cpu", "disk")


class TimeRow(NamedTuple):
    """A line of the table; ``is_part``: it is a part of the line above, or beside it."""

    name: str
    seconds: float
    is_part: bool = False


def time_rows(plan: Plan) -> list[TimeRow]:
    """Return the lines: computing, waiting and idle add up to what was simulated.

    What a stream does by phase stands below; it is busy time, hidden or not.
    """
    run = plan.simulated.slowest
    rows = [TimeRow("computing", run.compute_s), *_phases(plan, ("compute",))]
    rows += [
        TimeRow(f"of it, {axis} parallel collectives", seconds, True)
        for axis, seconds in plan.model_parallel_s.items()
    ]
    rows.append(TimeRow("waiting for communication", run.exposed_s))
    offloading = _phases(plan, _OFFLOADING)
    if offloading:
        rows.append(TimeRow("waiting for offload", run.exposed_offload_s))
    rows += [TimeRow("idle", run.idle_s), TimeRow("all of it", run.step_s)]
    rows.append(TimeRow("communicating, hidden or not", run.communication_s))
    rows += _phases(plan, _COMMUNICATING)
    if offloading:
        seconds = sum(row.seconds for row in offloading)
        rows += [TimeRow("offloading, hidden or not, summed", seconds), *offloading]
    if plan.candidate.pipeline_parallel > 1:
        rows.append(TimeRow("filling and emptying the pipeline, a step", plan.fill_s))
        rows.append(TimeRow("sends between its stages, a step", plan.sends_s))
    return rows


def _phases(plan: Plan, streams: Iterable[Stream]) -> list[TimeRow]:
    found: Counter[str] = Counter()
    busy = plan.simulated.slowest.stream_phase_s
    for stream in streams:
        for phase, seconds in busy.get(stream, {}).items():
            found[phase] += seconds  # type: ignore[assignment]
    return [TimeRow(phase, seconds, True) for phase, seconds in found.items()]
