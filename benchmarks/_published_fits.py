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

from _published_systems import System

from shardwise.plan.machine.efficiencies import EFFICIENCIES, Efficiency


def _fit(source: str, **values: float) -> dict[str, Efficiency]:
    return {n: Efficiency(v, EFFICIENCIES[n].meaning, source) for n, v in values.items()}


FITS: Mapping[str, Mapping[str, Efficiency]] = {
    "A100": _fit(
        "even rows of llm-foundry, vTrain, BigScience, InternEvo, torchtitan",
        matmul_sustained=0.90,
        attention=0.28,
        host_launch_s=25e-6,
    ),
    "V100": _fit("R520 R522 (launches: as the A100)", matmul_sustained=0.71, host_launch_s=25e-6),
    "H100": _fit(
        "even rows of llm-foundry, torchtitan, fms-fsdp, Megatron",
        matmul_sustained=0.75,
        attention=0.16,
        host_launch_s=20e-6,
    ),
}


def for_system(fit: Mapping[str, Efficiency], gpu: str, system: System) -> dict[str, Efficiency]:
    """Return efficiencies with the attention of the system's own kernel on Hopper."""
    if system.attention is None or gpu not in ("H100", "GH200"):
        return dict(fit)
    return {**fit, **_fit(system.source, attention=system.attention)}


def fit_of(gpu: str) -> Mapping[str, Efficiency]:
    """Return the fitted efficiencies of an accelerator's family; none where none were fitted."""
    return FITS.get(gpu, {})


def is_fitted_on(row_id: str, gpu: str, system: str) -> bool:
    """Tell whether a row was among those that its constants were fitted on."""
    number = re.search(r"\d+", row_id)
    return gpu in FITS and number is not None and int(number[0]) % 2 == 0
