"""Checks of bits within a share of the time, and a node that is at fault and leaves."""

import os
import signal

import pytest

from ranks import run_ranks
from resumes import curve_of, prepared, train, write_text
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
        budget.agree(budget.ask())
    assert spent > 0.04 * now
    assert made[:4] == ["replicas", "replay", "replicas", "replay"]


def test_a_share_of_nothing_asks_for_nothing():
    budget = IntegrityBudget(0.0)
    budget.note_step(1.0, False)
    assert CHECKS[budget.ask()] == "none"


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


def rank_at_fault(rank, world_size, flags):
    run = prepared(rank, world_size, flags)
    passes = []

    def err_once(module, inputs, output):
        passes.append(1)
        return output * (1.5 if len(passes) == 2 and rank == 1 else 1.0)

    run.model.register_forward_hook(err_once)
    with pytest.raises(ReplayError) as caught:
        train_prepared(run, StopRequest())
    return caught.value.rank


def test_the_rank_at_fault_is_the_same_on_all_and_its_node_alone_leaves(tmp_path, monkeypatch):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 3}
    assert run_ranks(rank_at_fault, 3, {**flags, "replay_every": 1}) == [1, 1, 1]
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    places = [RankPlace(rank, 6, rank % 2, 2) for rank in range(6)]
    assert [leave(place, 3) for place in places] == [False, False, True, True, False, False]
    assert sent == [(os.getppid(), signal.SIGTERM)]
    assert not leave(RankPlace(1, 2, 1, 2), 1), "with one node the run ends"
