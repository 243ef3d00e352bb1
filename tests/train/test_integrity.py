"""Checks of bits: steps computed twice, copies compared, within a share of the time; and loop."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks, run_ranks
from resumes import curve_of, prepared, train, write_text
from shardwise.errors import GradientError, ReplicaError
from shardwise.train import loop
from shardwise.train.integrity import CHECKS, IntegrityBudget, ReplayError
from shardwise.train.launch import RankPlace, StopRequest, leave
from shardwise.train.loop import train_prepared


def test_both_checks_take_turns_and_stay_within_their_share_of_the_time():
    now, spent, made = 0.0, 0.0, []
    budget = IntegrityBudget(0.05, clock=lambda: now)
    for _ in range(4000):
        now += 2.0 if budget.agreed == "replay" else 1.0
        budget.note_step(2.0 if budget.agreed == "replay" else 1.0, budget.agreed == "replay")
        if budget.agreed == "replicas":
            with budget.comparing():
                now += 0.5
        spent += {"none": 0.0, "replicas": 0.5, "replay": 1.0}[budget.agreed]
        made += [budget.agreed] * (budget.agreed != "none")
        assert spent <= 0.05 * now + 1.0  # the check under way
        budget.agree(budget.next_check())
    assert spent > 0.04 * now
    assert made[:4] == ["replicas", "replay", "replicas", "replay"]
    never = IntegrityBudget(0.0)
    never.note_step(1.0, False)
    assert CHECKS[never.next_check()] == "none"


def checked_run(rank, world_size, flags):
    made = [0, 0]
    compare, replay = loop.check_replicas, loop.compute_twice

    def count(number, call):
        def counted(*args):
            made[number] += 1
            return call(*args)

        return counted

    loop.check_replicas, loop.compute_twice = count(0, compare), count(1, replay)
    train(rank, world_size, flags)
    return made


def test_all_ranks_make_the_same_checks_and_no_bit_changes(tmp_path):
    flags = {"data": write_text(tmp_path), "steps": 12, "dropout": 0.1, "stage": 2}
    made = run_ranks(checked_run, 3, {**flags, "integrity": 0.9, "output": tmp_path / "checked"})
    assert made[0] == made[1] == made[2] and min(made[0]) > 1
    run_ranks(train, 3, {**flags, "output": tmp_path / "plain"})
    assert curve_of(tmp_path / "checked") == curve_of(tmp_path / "plain")


def test_the_node_of_the_rank_at_fault_alone_leaves(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    places = [RankPlace(rank, 6, rank % 2, 2) for rank in range(6)]
    assert [leave(place, 3) for place in places] == [False, False, True, True, False, False]
    assert sent == [(os.getppid(), signal.SIGTERM)]
    assert not leave(RankPlace(1, 2, 1, 2), 1), "with one node the run ends"


def flip(tensor):
    """Flip the lowest bit of the first element."""
    tensor.view(torch.uint8).view(-1)[0] ^= 1


def flip_in_run(rank, world_size, flags, where, at_pass):
    """Flip a bit on the last rank in one pass; return the error, its rank, and how many passes."""
    run = prepared(rank, world_size, flags)
    passes = []

    def at_step(optimizer, args, kwargs):
        passes.append(1)
        if len(passes) == at_pass and rank == world_size - 1:
            param = dict(run.model.named_parameters())["embedding.weight"]
            flip(param.to_local() if where == "value" else optimizer.state[param][where].to_local())

    def at_forward(module, inputs, output):
        passes.append(1)
        return output * (1.5 if len(passes) == at_pass and rank == world_size - 1 else 1.0)

    if where == "forward":
        run.model.register_forward_hook(at_forward)
    else:
        run.optimizer.register_step_post_hook(at_step)
    with pytest.raises((ReplayError, ReplicaError)) as caught:
        train_prepared(run, StopRequest())
    return str(caught.value), getattr(caught.value, "rank", None), len(passes)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("value", "parameter 'embedding.weight'"),
        ("exp_avg", "parameter 'embedding.weight', exp_avg"),
        ("forward", "the loss of its own windows"),
    ],
)
def test_a_bit_that_flips_between_two_passes_is_named(tmp_path, where, named):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 9}
    # The fourth pass is the second through step 3.
    told = run_ranks(flip_in_run, 3, {**flags, "replay_every": 3, "stage": 2}, where, 4)
    assert len(set(told)) == 1
    text, rank, _ = told[0]
    assert text.startswith("step 3, computed twice from the same state, gave other bits")
    assert f"First difference on rank 2: {named}" in text and rank == 2


def test_a_copy_that_differs_between_ranks_ends_the_run_before_it_is_saved(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 9, "stage": 0}
    flags |= {"save_every": 1, "check_replicas_every": 2}
    outcomes = run_ranks(flip_in_run, 3, flags, "value", 3)
    assert len(set(outcomes)) == 1
    text, _, num_steps = outcomes[0]
    assert "rank 2 differs from ranks 0, 1" in text and "embedding.weight" in text
    assert num_steps == 4
    names = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(names) == "step-00000003"


def flags_of(rank, folder):
    """Return flags of a run on a text that rank 0 writes."""
    if rank == 0:
        write_text(folder)
    dist.barrier()
    return {"data": folder / "text.txt", "output": folder / "run"}


SETTINGS = [
    (1, {"stage": 2, "precision": "fp16", "dropout": 0.1}),
    (2, {"stage": 1, "precision": "bf16", "layout": "flat", "dp_replicate": 2}),
    (3, {"stage": 3, "layout": "matrices", "dp_shard": 3}),
    (3, {"stage": 3, "activation_checkpointing": True, "tied_head": True}),
    (4, {"pp": 2, "tp": 2, "accumulation": 2, "tied_head": True}),
    (4, {"pp": 2, "ep": 2, "experts": 4, "expert_balance": 0.0, "accumulation": 2}),
    (4, {"tp": 2, "cp": 2, "activation_checkpointing": True, "tied_head": True}),
]


@pytest.mark.parametrize(("world_size", "flags"), SETTINGS)
@on_ranks()
def test_gradients_of_runs_are_right_and_looking_at_them_changes_nothing(
    rank, world_size, flags, tmp_path
):
    run = prepared(rank, world_size, {**flags_of(rank, tmp_path), **flags})
    before = torch.get_rng_state(), [p.to_local().clone() for p in run.model.parameters()]
    report = loop.check_run_gradients(run)
    assert not report.wrong
    # Of a pipeline the report has all stages, and this rank one.
    assert (len(report.checks) > len(before[1])) is (run.config.pp > 1)
    assert len(report.checks) >= len(before[1])
    assert torch.equal(torch.get_rng_state(), before[0])
    for param, value in zip(run.model.parameters(), before[1], strict=True):
        assert torch.equal(param.to_local(), value)
        assert param.grad is None


@on_ranks(3)
def test_a_wrong_scale_ends_the_run(rank, world_size, tmp_path):
    run = prepared(rank, world_size, flags_of(rank, tmp_path))
    shard_decoder = loop.shard_decoder

    def summed(*arguments):
        model = shard_decoder(*arguments)
        model.set_gradient_divide_factor(1.0)
        return model

    loop.shard_decoder = summed
    with pytest.raises(GradientError, match="3 is data-parallel ranks: summed and not divided"):
        loop.check_run_gradients(run)
    loop.shard_decoder = shard_decoder
