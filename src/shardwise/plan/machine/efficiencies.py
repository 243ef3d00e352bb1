"""The one table of efficiencies: what share of a datasheet's figure a training step reaches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from shardwise.errors import ConfigError
from shardwise.plan.machine.hardware import Accelerator, unknown
from shardwise.plan.tables import make_row, read_table


@dataclass(frozen=True)
class Efficiency:
    """A share of a datasheet's figure, or seconds (names in ``_s``), with meaning and source."""

    value: float
    meaning: str
    source: str


@cache
def common_efficiencies() -> Mapping[str, Efficiency]:
    """Return what holds for every accelerator that has no entry of its own."""
    rows = read_table("efficiencies")["all"]
    return {n: make_row(Efficiency, f"efficiencies.toml: {n}", row) for n, row in rows.items()}


@cache
def family_efficiencies() -> Mapping[str, Mapping[str, Efficiency]]:
    """Return what single measurements say of a family of accelerators."""
    tables = read_table("efficiencies")["families"]
    return {
        family: {n: _known(n, row["value"], row["source"]) for n, row in rows.items()}
        for family, rows in tables.items()
    }


@cache
def fitted_efficiencies() -> Mapping[str, Mapping[str, Efficiency]]:
    """Return what whole steps of a family's published runs come to."""
    by, tables = "benchmarks/published.py", read_table("efficiencies")["fitted"]
    return {
        family: {
            name: _known(name, value, f"fitted on published step times by {by}: {row['rows']}")
            for name, value in row["values"].items()
        }
        for family, row in tables.items()
    }


def _known(name: str, value: float, source: str) -> Efficiency:
    return Efficiency(value, common_efficiencies()[name].meaning, source)


def efficiencies_of(
    accelerator: Accelerator, overrides: Mapping[str, Efficiency]
) -> Mapping[str, Efficiency]:
    """Return the table for an accelerator, overrides last.

    **Raises** ConfigError for an unknown name, and for a share that is not in (0, 1].
    """
    for name, each in overrides.items():
        if name not in common_efficiencies():
            raise unknown("efficiency", name, {known: known for known in common_efficiencies()})
        largest = math.inf if name.endswith("_s") else 1.0
        if not 0 < each.value <= largest or math.isinf(each.value):
            raise ConfigError(
                f"efficiency {name}={each.value}: expected more than 0"
                + ("" if largest > 1 else ", at most 1")
            )
    family = accelerator.family
    own = family_efficiencies().get(family, {}), fitted_efficiencies().get(family, {})
    return {**common_efficiencies(), **own[0], **own[1], **overrides}
