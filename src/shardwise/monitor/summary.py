"""Summary of a run: settled figures, curves, a step's time and memory, saves, a Chrome trace.

Note [Steps in a trace]
~~~~~~~~~~~~~~~~~~~~~~~
A record has timelines of single steps, each with its own times. In a trace they follow each other
without gaps and begin at the same moment on all ranks; a line "steps" names them. Names are those
of a simulated step's trace, so that the two can be compared.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwise import svg
from shardwise.errors import ConfigError
from shardwise.monitor import metrics as m
from shardwise.monitor.metrics import OverRanks
from shardwise.monitor.record import (
    Memory,
    Moment,
    RunFacts,
    RunRecord,
    StepLine,
    Timeline,
    over_steps,
    settled,
)
from shardwise.names import MAIN, name_of_unit
from shardwise.trace_events import ChromeTrace
from shardwise.unit_facts import UnitFacts

_TICKS_PER_MS, _TICKS_PER_US = 10_000, 10  # a record's times have four digits
_STEPS = 0
_UNLABELLED = ("outside", "data", "save", "load")


def metric_curve(lines: Iterable[StepLine], name: str, most: int) -> list[svg.Point]:
    """Return a figure over all ranks in at most ``most`` points.

    A line has the extremes of its steps if the figure is known of every step.
    """
    found = []
    for line in lines:
        if (value := line.metrics.get(name)) is not None:
            over = line.metrics_over_steps.get(name, value)
            low, high = min(value.min, over.min), max(value.max, over.max)
            found.append(svg.Point(line.step, low, value.median, high, line.num_steps))
    return svg.thin(found, most)


def value_curve(lines: Iterable[StepLine], name: str, most: int) -> list[svg.Point]:
    """Return the values that the loop has logged under a name, in at most ``most`` points.

    If a line has no extremes, as in an earlier version, the last value is all three.
    """
    found = []
    for line in lines:
        over = line.values_over_steps.get(name)
        value = None if line.values_over_steps else line.values.get(name)
        if over is not None or value is not None:
            three = (over.min, over.mean, over.max) if over is not None else (value or 0.0,) * 3
            found.append(svg.Point(line.step, *three, line.num_steps))
    return svg.thin(found, most)


def not_numbers(lines: Iterable[StepLine], name: str) -> list[int]:
    """Return the steps at which the value logged under a name was not a finite number."""
    return [
        line.step
        for line in lines
        if (name in line.values and line.values[name] is None)
        or ((over := line.values_over_steps.get(name)) and over.non_finite)
    ]


def figures_of(lines: Sequence[StepLine]) -> dict[str, OverRanks]:
    """Return the most asked for figures of the settled run, by metric."""
    late = settled(lines)
    found = {shown.metric: over_steps(late, shown.metric) for shown in m.FIGURES}
    return {name: value for name, value in found.items() if value is not None}


def phase_seconds(lines: Sequence[StepLine]) -> dict[str, float]:
    """Return the seconds of a settled step by phase, the median over the ranks.

    The rest of the step is `ENGINE`, so they add up to it.
    """
    late = settled(lines)
    found = {}
    for phase, metric, unit_s, _ in m.PHASES:
        value = over_steps(late, metric)
        if value is not None and value.median > 0:
            found[phase] = value.median * unit_s
    whole = over_steps(late, m.STEP_S)
    rest = 0.0 if whole is None else whole.median - sum(found.values())
    return {**found, **({m.ENGINE: rest} if rest > 0 else {})}


class Save(NamedTuple):
    """The time of checkpoints in the steps up to ``step``, on the slowest rank."""

    step: int
    num_steps: int
    save_s: float
    stall_s: float


def saves_of(lines: Iterable[StepLine]) -> Iterator[Save]:
    """Yield the time of each save, and for how long the training waited for it."""
    for line in lines:
        took, stood = line.metrics.get(m.SAVE_S), line.metrics.get(m.STALL_S)
        if took is not None and took.max:
            stall_s = stood.max * line.num_steps if stood is not None and stood.max else 0.0
            yield Save(line.step, line.num_steps, took.max * line.num_steps, stall_s)


@dataclass(frozen=True)
class UnitRow:
    """Consecutive units with equal facts; ``depth`` counts the dots of the name."""

    name: str
    depth: int
    count: int
    unit: UnitFacts


def unit_rows(facts: RunFacts) -> list[UnitRow]:
    """Return the units as a tree, with equal ones in one row."""
    rows: list[UnitRow] = []
    for unit in facts.units:
        first = rows[-1].unit if rows else None
        if first is not None and first.name and _without_number(first) == _without_number(unit):
            name, count = f"{first.name} to {unit.name}", rows[-1].count + 1
            rows[-1] = replace(rows[-1], name=name, count=count)
        else:
            depth = 1 + unit.name.count(".") if unit.name else 0
            rows.append(UnitRow(name_of_unit(unit.name), depth, 1, unit))
    return rows


def _without_number(unit: UnitFacts) -> tuple[UnitFacts, bool]:
    prefix, _, last = unit.name.rpartition(".")
    return replace(unit, name=prefix), last.isdigit()


def kinds_shown(moment: Moment, facts: RunFacts) -> dict[str, int]:
    """Return the bytes of a moment by kind; `svg.OTHER` comes last.

    On the CPU the record knows of other memory only that the process has it. As that may contain
    freed memory, it is left out.
    """
    kinds = {**moment.device, **({} if facts.device == "cpu" else {svg.OTHER: moment.other})}
    return {kind: kinds[kind] for kind in sorted(kinds, key=svg.order_of_kinds)}


def largest_memory(record: RunRecord) -> tuple[int, Memory] | None:
    """Return the rank that had the most memory in its newest sampled step, and that step."""

    def peak_bytes(row: tuple[int, Memory]) -> int:
        return sum(kinds_shown(row[1].moments[row[1].peak], record.facts).values())

    return max(dict(record.lines(Memory)).items(), key=peak_bytes, default=None)


def place_of(line: str) -> tuple[int, str]:
    """Return the place of a line of work: the one that computes, collectives, other threads."""
    return (0 if line in ("device", MAIN) else 1 if "." in line else 2), line


def write_figure(value: float) -> str:
    """Write a value with three digits, or as many as its whole part has."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


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
