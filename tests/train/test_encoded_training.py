"""`shardwise train` with encoded gathers over every degree: it trains, gradients are checked."""

from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks
from resumes import curve_of, train, write_text

SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq": 16, "steps": 2}


def trains(rank: int, num_ranks: int, flags: dict[str, Any]) -> None:
    train(rank, num_ranks, {**SIZES, **flags})


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2, "accumulation": 2},
        {"ep": 2, "experts": 4, "tp": 2},
        {"cp": 2, "accumulation_order": "breadth_first", "accumulation": 2},
        {"check_gradients": True},  # with exact gathers, so that there is something to compare
    ],
    ids=lambda degrees: "+".join(degrees),
)
def test_every_degree_trains_with_encoded_gathers(degrees: dict[str, Any], tmp_path: Path) -> None:
    """And computes something else than without."""
    flags = {**degrees, "data": write_text(tmp_path)}
    curves = []
    for gather in (None, "int4"):
        output = tmp_path / str(gather)
        run_ranks(trains, 4, {**flags, "gather": gather, "output": output})
        curves.append([loss for _, loss, _ in curve_of(output)])
    assert len(curves[0]) == len(curves[1]) == 2
    assert all(a != b for a, b in zip(*curves, strict=True))
