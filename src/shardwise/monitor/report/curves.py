"""Figures of a run over its steps as a few columns: the lowest, the middle and the highest value.

Note [Thin curves]
A run of a hundred thousand steps has more lines than a picture has columns. Steps that share a
column become one: the least of the minima, the mean of the medians (weighed by how many steps a
line is about), the greatest of the maxima. A line has the extremes of its steps for what was logged
and what is known of every step, so a spike of one step is still seen.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import NamedTuple

from shardwise.monitor.record import StepLine


class Column(NamedTuple):
    """The values of some steps that follow each other; ``weight`` is their number."""

    step: float
    low: float
    middle: float
    high: float
    weight: int = 1


def metric_curve(lines: Iterable[StepLine], name: str, most: int) -> list[Column]:
    """Return a figure over all ranks in at most ``most`` columns, see Note [Thin curves]."""
    found = []
    for line in lines:
        value = line.metrics.get(name)
        if value is not None and _are_finite(value.min, value.median, value.max):
            low, high = value.min, value.max
            over = line.metrics_over_steps.get(name)
            if over is not None:
                low, high = min(low, over.min), max(high, over.max)
            found.append(Column(line.step, low, value.median, high, line.num_steps))
    return thin(found, most)


def value_curve(lines: Iterable[StepLine], name: str, most: int) -> list[Column]:
    """Return what the loop has logged under a name, in at most ``most`` columns.

    If a line has no extremes, as it is of an earlier version, the last value is all three.
    """
    found = []
    for line in lines:
        over = line.values_over_steps.get(name)
        value = line.values.get(name)
        if over is not None:
            found.append(Column(line.step, over.min, over.mean, over.max, line.num_steps))
        elif value is not None and _are_finite(value):
            found.append(Column(line.step, value, value, value, line.num_steps))
    return thin(found, most)


def not_numbers(lines: Iterable[StepLine], name: str) -> list[int]:
    """Return the steps at which what was logged under a name was not a finite number."""
    return [
        line.step
        for line in lines
        if (name in line.values and line.values[name] is None)
        or ((over := line.values_over_steps.get(name)) and over.non_finite)
    ]


def _are_finite(*values: float | None) -> bool:
    return all(isinstance(value, int | float) and isfinite(value) for value in values)


def thin(columns: Sequence[Column], most: int) -> list[Column]:
    """Return at most ``most`` columns, each of steps that lie beside each other."""
    if len(columns) <= most:
        return list(columns)
    first, last = columns[0].step, columns[-1].step
    width = (last - first) / most
    groups: dict[int, list[Column]] = {}
    for column in columns:
        place = min(int((column.step - first) / width), most - 1)
        groups.setdefault(place, []).append(column)
    return [_joined(group) for group in groups.values()]


def _joined(group: Sequence[Column]) -> Column:
    weight = sum(column.weight for column in group)
    return Column(
        group[-1].step,
        min(column.low for column in group),
        sum(column.middle * column.weight for column in group) / weight,
        max(column.high for column in group),
        weight,
    )
