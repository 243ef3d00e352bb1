"""A checkpoint of any ranks loads into a plain model; what cannot be read, and what fails late."""

import pytest
import torch
import torch.distributed as dist

import shardwise
from ranks import on_ranks, run_ranks
from saving import (
    Net,
    Setting,
    build,
    differences,
    flip,
    full,
    plain,
    take_step,
    tokens_of,
    truth_of,
)
from shardwise.checkpoint.folder import step_name
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint


def save(rank, world_size, folder, setting):
    """Save steps 1 and 2; return the truth of both."""
    run, truths = build(setting, 2), []
    for step in (1, 2):
        take_step(run, step, norm=False)
        shardwise.save(folder, run.model, run.optimizer, step=step, extra=run.extra)
        truths.append(truth_of(run))
    return tuple(truths)


@pytest.mark.parametrize("setting", [Setting(1, 2), Setting(3, 3, "flat")], ids=str)
def test_a_plain_model_gets_the_same_bits_without_a_process_group(tmp_path, setting):
    older, newest = run_ranks(save, setting.num_ranks, tmp_path, setting)[0]
    assert not dist.is_initialized()
    run = plain(7)
    loaded = shardwise.load(tmp_path, run.model, run.optimizer, extra=run.extra)
    assert (loaded.step, loaded.num_ranks_saved) == (2, setting.num_ranks)
    assert differences(truth_of(run), newest) == []
    assert all(type(v) is torch.Tensor for s in run.optimizer.state.values() for v in s.values())
    assert all(p.grad is None for p in run.model.parameters())
    run.model(tokens_of(3, 0, 1)).sum().backward()  # it trains on
    run.optimizer.step()
    shardwise.load(tmp_path / step_name(1), run.model, run.optimizer, extra=run.extra)
    assert differences(truth_of(run), older) == []
    weights = plain(8).model.eval()
    shardwise.load(tmp_path, weights, step=2, restore_generators=False)
    got = {f"param {n}": full(p) for n, p in weights.named_parameters(remove_duplicate=False)}
    assert differences(got, {k: v for k, v in newest.items() if k.startswith("param")}) == []


def _ddp(model):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return torch.nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()


def test_a_plain_model_refuses_what_does_not_fit_and_falls_back_from_damage(tmp_path):
    older, _ = run_ranks(save, 2, tmp_path, Setting(2))[0]
    run = plain(7)
    run.model.few = torch.nn.Parameter(torch.zeros(3))
    before = truth_of(run)
    with pytest.raises(ConfigError, match=r"DistributedDataParallel.*give ddp\.module"):
        shardwise.load(tmp_path, _ddp(run.model))
    with pytest.raises(ConfigError, match=r"expected an nn\.Module, got int"):
        shardwise.load(tmp_path, [1])
    with pytest.raises(ConfigError, match=r"not one of the model's; build") as caught:
        shardwise.load(tmp_path, Net(), run.optimizer)
    assert "shard" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"'few' has shape \(2,\) there and \(3,\) here"):
        shardwise.load(tmp_path, run.model, run.optimizer)
    assert differences(truth_of(run), before) == []
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ConfigError, match=r"meta device.*to_empty"):
        shardwise.load(tmp_path, empty)
    flip(tmp_path / step_name(2) / "rank00001-0.safetensors")
    run = plain(7)
    with pytest.warns(UserWarning, match=r"rank00001-0.safetensors"):
        loaded = shardwise.load(tmp_path, run.model, run.optimizer, extra=run.extra)
    assert loaded.step == 1
    assert differences(truth_of(run), older) == []
    with pytest.raises(DamagedCheckpoint, match=r"do not use that before a load has succeeded"):
        shardwise.load(tmp_path, run.model, run.optimizer, step=2)


def load_alone(rank, world_size, folder, expected):
    """Only rank 0 loads, then all do: nothing waits for anybody."""
    problems = []
    for who in (range(1), range(world_size)):
        if rank in who:
            run = plain(rank)
            shardwise.load(folder, run.model, run.optimizer, extra=run.extra)
            here = {k: v for k, v in truth_of(run).items() if not k.startswith("buffer")}
            there = {k: v for k, v in expected.items() if not k.startswith("buffer")}
            problems += differences(here, there)
    return problems


def test_each_process_of_a_group_loads_a_plain_model_on_its_own(tmp_path):
    _, newest = run_ranks(save, 2, tmp_path, Setting(2, 1))[0]
    assert run_ranks(load_alone, 3, tmp_path, newest) == [[]] * 3


# -- what fails late


class Stubborn(torch.nn.Linear):
    """A module whose own state can be refused."""

    refuses = False

    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        if self.refuses:
            raise KeyError("version 3 was expected")


@on_ranks(2)
def test_a_checkpoint_that_fits_all_ranks_but_one_changes_nothing_on_any(
    rank, world_size, tmp_path
):
    run = build(Setting(world_size, 3))
    take_step(run, 1, norm=False)
    shardwise.save(tmp_path / "one", run.model, run.optimizer, extra={"n": 1})
    take_step(run, 2, norm=False)
    before = truth_of(run)
    extra = {"m": 1} if rank == world_size - 1 else {"n": 1}
    with pytest.raises(CheckpointError, match=f"rank {world_size - 1}: extra: .* no 'm'"):
        shardwise.load(tmp_path / "one", run.model, run.optimizer, extra=extra)
    assert differences(truth_of(run), before) == []


class Scheduler:
    def state_dict(self):
        return {"last": 1}

    def load_state_dict(self, state):
        raise ValueError("not of this kind")


@on_ranks(2)
def test_what_fails_late_is_found_early_or_named_and_nothing_runs(rank, world_size, tmp_path):
    from shardwise.checkpoint import save_load
    from shardwise.errors import StateError

    model = shardwise.shard(torch.nn.Sequential(torch.nn.Linear(3, 3), Stubborn(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    read = save_load.read_generators
    save_load.read_generators = lambda device: read(device) | {"torch": "AAAA"}
    shardwise.save(tmp_path / "short", model, optimizer, extra={"s": Scheduler()})
    save_load.read_generators = read
    shardwise.save(tmp_path / "good", model, optimizer, extra={"s": Scheduler()})
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9)
    with pytest.raises(CheckpointError, match="state of the torch generator does not fit"):
        shardwise.load(tmp_path / "short", model, optimizer)
    assert all((p.to_local() == 9).all() for p in model.parameters()), "changed before it was seen"
    model(torch.ones(1, 3))
    Stubborn.refuses = rank == world_size - 1
    with pytest.raises(
        CheckpointError, match=r"set_extra_state\(\) of module '1' \(Stubborn\) raised KeyError"
    ):
        shardwise.load(tmp_path / "good", model, optimizer)
    with pytest.raises(StateError, match=r"module '1'"):
        model(torch.ones(1, 3))
    Stubborn.refuses = False
    with pytest.raises(CheckpointError, match=r"extra\['s'\].load_state_dict\(\) \(Scheduler\)"):
        shardwise.load(tmp_path / "good", model, optimizer, extra={"s": Scheduler()})
    shardwise.load(tmp_path / "good", model, optimizer)
    model(torch.ones(1, 3))
    optimizer.param_groups[0]["lr"] = torch.tensor([0.5])  # of another shape than what was saved
    shardwise.load(tmp_path / "good", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1)
