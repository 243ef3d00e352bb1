"""Saves and loads at moments when they could go wrong without a word."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from disk import FaultyFiles
from ranks import on_ranks
from saving import flip, warns_on_rank_0
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import step_name, steps_in
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint, StateError
from stamped import build, stamp


@on_ranks(2)
def test_state_of_l_bfgs_is_saved_at_stage_0_and_state_of_several_parameters_nowhere_else(tmp_path):
    """L-BFGS goes on at stage 0; state that is cut otherwise than its parameter is refused."""
    x = torch.linspace(0, 1, 7)

    def make(stage, kind=torch.optim.LBFGS):
        torch.manual_seed(0)
        model = shardwise.shard(nn.Linear(7, 2), stage=stage)
        return model, kind(model.parameters(), lr=0.1)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)

    run, other = make(0), make(0)
    shardwise.save(Path(tmp_path, "fresh"), *run)  # there is no state yet
    step(*run)
    shardwise.save(Path(tmp_path, "all"), *run)
    shardwise.load(Path(tmp_path, "all"), *other)
    for one in (run, other):
        step(*one)
    for ours, theirs in zip(*(m.parameters() for m, _ in (run, other)), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
    for stage in (1, 2, 3):
        model, optimizer = make(stage, torch.optim.SGD)
        weight, bias = model.parameters()
        for value in (bias.detach(), [bias.detach()]):
            optimizer.state[weight]["of_both"] = value
            with pytest.raises(
                CheckpointError, match=r"SGD keeps its state 'of_both'.*optimizer=None"
            ):
                shardwise.save(Path(tmp_path, "refused"), model, optimizer)
    assert [each.name for each in sorted(Path(tmp_path).iterdir())] == ["all", "fresh"]


@on_ranks(2)
def test_saves_and_loads_inside_gathered_are_refused(tmp_path):
    model, optimizer = build()
    shardwise.save(Path(tmp_path, "a"), model, optimizer)
    with shardwise.gathered(model, writeback=True):
        with pytest.raises(StateError, match="inside gathered"):
            shardwise.save(Path(tmp_path, "b"), model, optimizer)
        with pytest.raises(StateError, match="inside gathered"):
            shardwise.load(Path(tmp_path, "a"), model, optimizer)
    engine_of(model).status.begin_load((), "a test says so")
    with pytest.raises(StateError, match="a test says so"), shardwise.gathered(model):
        pass
    engine_of(model).status.end_load(())


def damage(path, key):
    """Flip a bit of a tensor in the file of rank 0."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:size])[key]["data_offsets"]
    flip(path, size + (begin + end) // 2)


@on_ranks(1, 3)
def test_moments_that_were_half_loaded_are_gone_when_parameters_alone_are_loaded(rank, tmp_path):
    model, optimizer = build()
    name = next(name for name, p in model.named_parameters() if p.ndim == 2)
    stamp(model, optimizer, "A")
    shardwise.save(tmp_path, model, optimizer, step=1)
    if rank == 0:
        path = tmp_path / step_name(1) / "rank00000-0.safetensors"
        damage(path, f"optim.state.{name}.exp_avg_sq")
    dist.barrier()
    with pytest.raises(DamagedCheckpoint):
        shardwise.load(tmp_path, model, optimizer, step=1)
    with pytest.raises(StateError, match="not to be used"):
        model(torch.zeros(1, 13))
    shardwise.load(tmp_path, model, step=1)  # the parameters are whole
    assert not optimizer.state, "half loaded moments would have been stepped with"


@on_ranks(1, 3)
def test_a_run_cannot_go_back_behind_checkpoints_that_it_would_return_to(tmp_path):
    model, optimizer = build()
    with shardwise.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        for step in (5, 10):
            checkpoints.save(step, wait=True)
        with pytest.raises(ConfigError, match="newer checkpoints"):
            checkpoints.load(step=5)
        checkpoints.load(step=10)
    with pytest.raises(StateError, match="closed"):
        checkpoints.save(11)
    with pytest.raises(ConfigError, match="one checkpoint, not a folder"):
        shardwise.Checkpoints(Path(tmp_path, step_name(5)), model, optimizer)
    with pytest.raises(CheckpointError, match="there is no step-00000007"):
        shardwise.load(tmp_path, model, optimizer, step=7)


@on_ranks(1, 3)
def test_a_rotation_that_fails_is_warned_of_and_the_save_counts(rank, tmp_path):
    model, optimizer = build()
    failed = []

    class Failing(FaultyFiles):
        def remove_file(self, path):
            if path.parent.name.startswith(f".old-{step_name(1)}-") and not failed:
                failed.append(path.name)
                raise OSError(5, "Input/output error", str(path))
            super().remove_file(path)

    files = Failing(Files())
    with shardwise.Checkpoints(tmp_path, model, optimizer, keep_last=1, files=files) as checkpoints:
        checkpoints.save(1, wait=True)
        with warns_on_rank_0(rank, "stay"):
            checkpoints.save(2, wait=True)
        checkpoints.save(3, wait=True)
    dist.barrier()  # rank 0 removes behind the others' backs
    assert len(failed) == (rank == 0)
    assert steps_in(Files(), tmp_path) == [3]


@on_ranks(2)
def test_a_default_device_disturbs_neither_saves_nor_loads(tmp_path):
    with torch.device("meta"):
        model = shardwise.shard(nn.Linear(4, 4), stage=3)
        optimizer = torch.optim.AdamW(model.parameters())
        shardwise.save(tmp_path, model, optimizer, step=1)
        shardwise.load(tmp_path, model, optimizer)
        with shardwise.Checkpoints(tmp_path, model, optimizer) as checkpoints:
            checkpoints.save(2, wait=True)
