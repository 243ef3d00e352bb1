"""`--check-gradients`: a run's gradients are those of one process, and the run is not touched."""

import pytest
import torch

import shardwise.train.loop as gradients
from ranks import run_ranks
from resumes import prepared, write_text
from shardwise.errors import GradientError

SETTINGS = [
    (1, {"stage": 2, "precision": "fp16", "dropout": 0.1}),
    (2, {"stage": 1, "precision": "bf16", "layout": "flat", "dp_replicate": 2}),
    (3, {"stage": 3, "layout": "matrices", "dp_shard": 3}),
    (3, {"stage": 3, "activation_checkpointing": True, "tied_head": True}),
    (4, {"pp": 2, "tp": 2, "accumulation": 2, "tied_head": True}),
    (4, {"pp": 2, "ep": 2, "experts": 4, "expert_balance": 0.0, "accumulation": 2}),
    (4, {"tp": 2, "cp": 2, "activation_checkpointing": True, "tied_head": True}),
]


def is_content(rank, world_size, flags):
    run = prepared(rank, world_size, flags)
    before = torch.get_rng_state(), [p.to_local().clone() for p in run.model.parameters()]
    report = gradients.check_run_gradients(run)
    assert not report.wrong
    # Of a pipeline the report has all stages, and this rank one.
    assert (len(report.checks) > len(before[1])) is (run.config.pp > 1)
    assert len(report.checks) >= len(before[1])
    assert torch.equal(torch.get_rng_state(), before[0])
    for param, value in zip(run.model.parameters(), before[1], strict=True):
        assert torch.equal(param.to_local(), value)
        assert param.grad is None


@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_gradients_of_runs_are_right_and_looking_at_them_changes_nothing(tmp_path, case):
    world_size, flags = SETTINGS[case]
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", **flags}
    run_ranks(is_content, world_size, flags)


def finds_a_wrong_scale(rank, world_size, flags):
    run = prepared(rank, world_size, flags)
    shard_decoder = gradients.shard_decoder

    def summed(*arguments):
        model = shard_decoder(*arguments)
        model.set_gradient_divide_factor(1.0)
        return model

    gradients.shard_decoder = summed
    with pytest.raises(GradientError, match="3 is data-parallel ranks: summed and not divided"):
        gradients.check_run_gradients(run)
    gradients.shard_decoder = shard_decoder


def test_a_wrong_scale_ends_the_run(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run"}
    run_ranks(finds_a_wrong_scale, 3, flags)
