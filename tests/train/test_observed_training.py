"""Runs of `shardwise train` are observed: every step once, whatever happens between steps."""

import math

import pytest

from ranks import run_ranks
from resumes import train, write_text
from shardwise.monitor.metrics import DATA_S, SAVE_S, STALL_S, TOKENS_PER_S
from shardwise.monitor.record import read_run

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
