"""`shardwise train` with encodings over every degree: it trains, gradients are checked."""

import pytest

from ranks import run_ranks
from resumes import curve_of, train, write_text

SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq": 16, "steps": 2}


def trains(rank, num_ranks, flags):
    train(rank, num_ranks, {**SIZES, **flags})


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2, "accumulation": 2},
        {"ep": 2, "experts": 4, "tp": 2},
        {"cp": 2, "accumulation_order": "breadth_first", "accumulation": 2},
        {"check_gradients": True},  # without encodings, so that there is something to compare
    ],
    ids=lambda degrees: "+".join(degrees),
)
def test_every_degree_trains_with_encodings(degrees, tmp_path):
    """And computes something else than without: with encoded reductions from the first step on."""
    flags = {**degrees, "data": write_text(tmp_path)}
    curves = []
    for coded in ({}, {"gather": "int4"}, {"reduce": "int4-a2a"}):
        output = tmp_path / "-".join(["run", *coded])
        run_ranks(trains, 4, {**flags, **coded, "output": output})
        curves.append([loss for _, loss, _ in curve_of(output)])
    plain, gathered, reduced = curves
    assert len(plain) == len(gathered) == len(reduced) == 2
    assert all(a != b for a, b in zip(plain, gathered, strict=True))
    assert plain[0] == reduced[0] and plain[1] != reduced[1]
