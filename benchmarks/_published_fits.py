"""Efficiencies of each GPU type, fitted on published step times, with what they were fitted on.

Note [How they were fitted]
Least mean absolute percentage error over samples of the rows with an even number, of the systems
that each entry names, one constant after the other by steps of 5 %, then rounded. Rows with an odd
number were not used, and their errors are printed apart. But the recipes in `_published_systems`
(which attention runs, what overlaps, a system's slowdown) were written with all rows in view, so
those errors are held out from the constants, not from the recipes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from _published_systems import System

from shardwise.plan.machine.efficiencies import BY_FAMILY, EFFICIENCIES, FITTED, Efficiency


def unfitted(family: str) -> dict[str, Efficiency]:
    """Return what single measurements say where a fit would be taken."""
    table = {**EFFICIENCIES, **BY_FAMILY.get(family, {})}
    return {name: table[name] for name in FITTED.get(family, {})}


def for_system(fit: Mapping[str, Efficiency], gpu: str, system: System) -> dict[str, Efficiency]:
    """Return efficiencies with the attention of the system's own kernel on Hopper."""
    if system.attention is None or gpu not in ("H100", "GH200"):
        return dict(fit)
    return {
        **fit,
        "attention": replace(
            EFFICIENCIES["attention"], value=system.attention, source=system.source
        ),
    }


def fit_of(gpu: str) -> Mapping[str, Efficiency]:
    """Return the fitted efficiencies of an accelerator's family; none where none were fitted."""
    return FITTED.get(gpu, {})


def is_fitted_on(row_id: str, gpu: str, system: str) -> bool:
    """Tell whether a row was among those that its constants were fitted on."""
    number = re.search(r"\d+", row_id)
    return gpu in FITTED and number is not None and int(number[0]) % 2 == 0
