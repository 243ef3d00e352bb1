"""Summary of a run: settled figures, curves over the steps, where a step's time goes, saves."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from shardwise import svg
from shardwise.monitor.metrics import (
    ALL_GATHER_MS,
    BACKGROUND_STEP_MS,
    DATA_S,
    DATA_SHARE,
    EXPOSED_SHARE,
    IDLE_SHARE,
    LOAD_S,
    MAX_ACTIVE_GIB,
    MFU_SHARE,
    NUM_COLLECTIVES,
    OPTIMIZER_S,
    OUTSIDE_S,
    OVERLAP_SHARE,
    PADDING_SHARE,
    RECOMPUTE_S,
    REDUCE_SCATTER_MS,
    SAVE_S,
    SENT_MIB,
    STALL_S,
    STEP_S,
    TOKENS_PER_S,
    OverRanks,
    transfers_ms,
)
from shardwise.monitor.record import RunFacts, StepLine, UnitFacts, over_steps
from shardwise.names import name_of_unit


class Shown(NamedTuple):
    """A figure as it is shown: its metric, name and unit."""

    metric: str
    name: str
    unit: str
    is_better: int = 0  # 1: higher, -1: lower

    @property
    def title(self) -> str:
        """The name with its unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def is_shown(self, value: OverRanks | None) -> bool:
        """Return whether a value says something: none of what need not be there says nothing."""
        return value is not None and bool(self.is_better or value.max)


def write_figure(value: float) -> str:
    """Write a value with three digits, or as many as its whole part has."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


FIGURES = (
    Shown(STEP_S, "step time", "s", -1),
    Shown(TOKENS_PER_S, "tokens per second, a rank", "", 1),
    Shown(MFU_SHARE, "MFU", "%", 1),
    Shown(EXPOSED_SHARE, "exposed communication", "% of a step", -1),
    Shown(OVERLAP_SHARE, "overlap of communication", "%", 1),
    Shown(IDLE_SHARE, "device idle", "% of a step", -1),
    Shown(DATA_SHARE, "waiting for data", "% of a step", -1),
    Shown(MAX_ACTIVE_GIB, "peak memory", "GiB", -1),
    Shown(ALL_GATHER_MS, "all-gathers", "ms a step"),
    Shown(REDUCE_SCATTER_MS, "reduce-scatters", "ms a step"),
    Shown(BACKGROUND_STEP_MS, "steps in the background", "ms a step"),
    Shown(transfers_ms("to_device"), "copies to the device", "ms a step"),
    Shown(transfers_ms("to_host"), "copies to the host", "ms a step"),
    Shown(transfers_ms("disk_read"), "reads of offloaded state", "ms a step"),
    Shown(transfers_ms("disk_write"), "writes of offloaded state", "ms a step"),
    Shown(SENT_MIB, "sent by a rank", "MiB a step"),
    Shown(NUM_COLLECTIVES, "collectives", "a step"),
    Shown(PADDING_SHARE, "padding", "% of the parameters"),
)
ENGINE = "engine"  # the part of a step outside of all phases: begins of gathers and reductions
PHASES = (  # of the line that computes: name, metric, seconds in one of it
    ("forward", "time_metrics/forward(s)", 1.0),
    ("recompute", RECOMPUTE_S, 1.0),
    ("backward", "time_metrics/backward(s)", 1.0),
    ("waiting for others", "comm/waited(ms)", 1e-3),
    ("optimizer", OPTIMIZER_S, 1.0),
    ("data", DATA_S, 1.0),
    ("save", STALL_S, 1.0),
    ("load", LOAD_S, 1.0),
    ("outside", OUTSIDE_S, 1.0),
)


def metric_curve(lines: Iterable[StepLine], name: str, most: int) -> list[svg.Point]:
    """Return a figure over all ranks in at most ``most`` points.

    A line has the extremes of its steps if the figure is known of every step.
    """
    found = []
    for line in lines:
        value = line.metrics.get(name)
        if value is not None and _are_finite(value.min, value.median, value.max):
            low, high = value.min, value.max
            over = line.metrics_over_steps.get(name)
            if over is not None:
                low, high = min(low, over.min), max(high, over.max)
            found.append(svg.Point(line.step, low, value.median, high, line.num_steps))
    return svg.thin(found, most)


def value_curve(lines: Iterable[StepLine], name: str, most: int) -> list[svg.Point]:
    """Return the values that the loop has logged under a name, in at most ``most`` points.

    If a line has no extremes, as in an earlier version, the last value is all three.
    """
    found = []
    for line in lines:
        over, value = line.values_over_steps.get(name), line.values.get(name)
        if over is not None:
            found.append(svg.Point(line.step, over.min, over.mean, over.max, line.num_steps))
        elif value is not None and _are_finite(value):
            found.append(svg.Point(line.step, value, value, value, line.num_steps))
    return svg.thin(found, most)


def not_numbers(lines: Iterable[StepLine], name: str) -> list[int]:
    """Return the steps at which the value logged under a name was not a finite number."""
    return [
        line.step
        for line in lines
        if (name in line.values and line.values[name] is None)
        or ((over := line.values_over_steps.get(name)) and over.non_finite)
    ]


def _are_finite(*values: float | None) -> bool:
    return all(isinstance(value, int | float) and isfinite(value) for value in values)


def settled(lines: Sequence[StepLine]) -> Sequence[StepLine]:
    """Return the lines about the later half of the steps, without the slow first ones.

    Each of the first few steps has a line of its own, so it is not the later half of the lines.
    """
    if not lines:
        return lines
    middle = (lines[0].step - lines[0].num_steps + lines[-1].step) / 2
    return [line for line in lines if line.step > middle]


def figures_of(lines: Sequence[StepLine]) -> dict[str, OverRanks]:
    """Return the most asked for figures of the settled run, by metric."""
    late = settled(lines)
    found = {shown.metric: over_steps(late, shown.metric) for shown in FIGURES}
    return {name: value for name, value in found.items() if value is not None}


def where_time_goes(lines: Sequence[StepLine]) -> dict[str, float]:
    """Return the seconds of a settled step by phase, the median over the ranks.

    The rest of the step is `ENGINE`, so they add up to it.
    """
    late = settled(lines)
    found = {}
    for phase, metric, unit_s in PHASES:
        value = over_steps(late, metric)
        if value is not None and value.median > 0:
            found[phase] = value.median * unit_s
    whole = over_steps(late, STEP_S)
    rest = 0.0 if whole is None else whole.median - sum(found.values())
    return {**found, **({ENGINE: rest} if rest > 0 else {})}


class Save(NamedTuple):
    """The time of checkpoints in the steps up to ``step``, on the slowest rank."""

    step: int
    num_steps: int
    save_s: float
    stall_s: float


def saves_of(lines: Iterable[StepLine]) -> Iterator[Save]:
    """Yield the time of each save, and for how long the training waited for it."""
    for line in lines:
        took, stood = line.metrics.get(SAVE_S), line.metrics.get(STALL_S)
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
        if rows and _are_equal(rows[-1].unit, unit):
            first = rows[-1]
            name = f"{first.unit.name} to {unit.name}"
            rows[-1] = UnitRow(name, first.depth, first.count + 1, first.unit)
        else:
            depth = 1 + unit.name.count(".") if unit.name else 0
            rows.append(UnitRow(name_of_unit(unit.name), depth, 1, unit))
    return rows


def _are_equal(one: UnitFacts, other: UnitFacts) -> bool:
    def all_but_name(unit: UnitFacts) -> Mapping[str, object]:
        prefix, _, last = unit.name.rpartition(".")
        return {**vars(unit), "name": (prefix, last.isdigit())}

    return bool(one.name) and all_but_name(one) == all_but_name(other)
