"""Runs of `shardwise train`: observed, with the memory of their plan, and with encodings."""

import math

import pytest

from ranks import run_ranks
from resumes import curve_of, train, write_text
from shardwise.cli.report import plan_of_run
from shardwise.monitor.metrics import DATA_S, SAVE_S, STALL_S, TOKENS_PER_S
from shardwise.monitor.record import Memory, read_run

FLAGS = {
    **{"steps": 4, "save_every": 2, "eval_every": 2, "replay_every": 3, "accumulation": 2},
    **{"precision": "fp16", "activation_checkpointing": True},
}


def run_twice(rank, world_size, folder):
    made = {**FLAGS, "data": folder / "text.txt", "output": folder / "run"}
    train(rank, world_size, made)
    train(rank, world_size, {**made, "steps": 6, "resume": "auto"})
    train(rank, world_size, {**made, "output": folder / "unseen", "observe": False})


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_step_of_a_run_and_of_its_resume_is_observed_once(world_size, tmp_path):
    write_text(tmp_path)
    run_ranks(run_twice, world_size, tmp_path)
    record = read_run(tmp_path / "run")
    assert [line.step for line in record.steps] == [1, 2, 3, 4, 5, 6]
    for line in record.steps:
        assert math.isfinite(line.values["loss"]) and line.values["loss_scale"] > 0
        assert line.metrics[DATA_S].min > 0 and line.metrics[TOKENS_PER_S].min > 0
    for name in (STALL_S, SAVE_S):  # the save that follows step 2 is in the time of step 3
        assert record.steps[2].metrics[name].min > 0
    assert record.steps[1].metrics[STALL_S].max == 0
    assert not (tmp_path / "unseen" / "observed").exists()


# Units that share a bucket, and so many of them that reductions are under way in later passes.
MANY = {
    **{"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "seq": 16, "micro_batch": 2, "steps": 3},
    **{"bucket_bytes": 100_000, "threads": 1, "sample_tokens": 0},
}


CASES = [  # each stage, and each format, in turns
    *((3, {"stage": stage, "accumulation": 1 + stage % 2}) for stage in range(4)),
    *((3, {"stage": stage, "accumulation": 2 - stage % 2}) for stage in (0, 3)),
    *((1, {"stage": stage, "accumulation": 1 + stage % 3}) for stage in (0, 1, 3)),
    (1, {"precision": "bf16", "stage": 1, "gather": "int8", "units": ["Block", "TokenEmbedding"]}),
    (3, {"precision": "bf16", "gather": "fp8"}),
    (1, {"precision": "bf16", "gather": "int4"}),
    (3, {"precision": "bf16", "stage": 0, "reduce": "bf16-a2a"}),
    (1, {"precision": "bf16", "gather": "int8", "reduce": "int8-a2a"}),
    (3, {"precision": "bf16", "gather": "int8", "reduce": "int8-a2a"}),
    (3, {"precision": "bf16", "stage": 2, "reduce": "fp8-a2a", "accumulation": 2}),
]


@pytest.mark.parametrize(("world_size", "more"), CASES, ids=str)
def test_the_engines_memory_is_that_of_the_plan_line_by_line(world_size, more, tmp_path):
    flags = {**MANY, **more, "output": tmp_path / "run"}
    run_ranks(train, world_size, {**flags, "data": write_text(tmp_path)})
    record = read_run(tmp_path / "run")
    (line,) = (line for _, line in record.lines(Memory, 0))
    plan, _ = plan_of_run(tmp_path / "run" / "config.yaml", record)
    planned = {k: n for k, n in plan.played.engine_peak.ledger.engine_lines().items() if n}
    peak = line.moments[line.peak]
    assert peak.device == planned, peak
    of_units = {unit.class_name for unit in record.facts.units}
    assert of_units == {"Decoder", *more.get("units", ["Block"])}
    assert sum(peak.device.values()) == max(sum(m.device.values()) for m in line.moments)


SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq": 16, "steps": 2}


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2, "accumulation": 2},
        {"ep": 2, "experts": 4, "tp": 2},
        # Gradients are checked without encodings, so that there is something to compare.
        {
            **{"cp": 2, "accumulation_order": "breadth_first", "accumulation": 2},
            "check_gradients": True,
        },
    ],
    ids=lambda degrees: "+".join(degrees),
)
def test_every_degree_trains_with_encodings(degrees, tmp_path):
    """And computes something else than without: with encoded reductions from the first step on."""
    flags = {**SIZES, **degrees, "data": write_text(tmp_path)}
    curves = []
    for coded in ({}, {"gather": "int4"}, {"reduce": "int4-a2a"}):
        output = tmp_path / "-".join(["run", *coded])
        run_ranks(train, 4, {**flags, **coded, "output": output})
        curves.append([loss for _, loss, _ in curve_of(output)])
    plain, gathered, reduced = curves
    assert len(plain) == len(gathered) == len(reduced) == 2
    assert all(a != b for a, b in zip(plain, gathered, strict=True))
    assert plain[0] == reduced[0] and plain[1] != reduced[1]
