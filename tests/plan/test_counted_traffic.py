"""What plans say that a composed run holds and sends, against runs of the built-in decoder.

The oracle is `shardwise.debug` around the second step, on every rank.
"""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch

import shardwise
from composed_cells import candidate_of, compose
from ranks import run_ranks
from shardwise.cli.plan_setup import set_up
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.tape import UnitWork
from shardwise.plan.planning import plan
from shardwise.plan.request import PlanRequest
from shardwise.plan.step.play import play
from shardwise.train.config import TrainConfig
from shardwise.train.setup import make_local_steps
from shardwise.train.summary import count_state

VOCAB = 64
TINY = {
    **{"dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "seq": 16, "micro_batch": 2},
    **{"vocab": VOCAB, "precision": "fp32"},
}
# Each token goes to all experts, so how many of them are another rank's does not depend on routing.
MIXED = {
    **{"experts": 6, "experts_per_token": 6, "expert_ffn_multiple": 2.0, "shared_experts": 1},
    "dense_layers": 1,
}
BY_BIASES = {**MIXED, "expert_balance": 0.0, "expert_bias": True}
ALL_MIXED = {**BY_BIASES, "dense_layers": 0}
AGAIN = {"activation_checkpointing": True}
BF16 = {"precision": "bf16"}
# Replicas are synchronised in every step, so that a step's share is a whole synchronisation.
APART = [
    {"stage": 0, "local_steps": {"every": 1, "outer": "nesterov"}},
    {"layout": "flat", "local_steps": {"every": 1, "state": "int8", "send": "int8"}, **BF16},
    {"stage": 1, "accumulation": 2, "local_steps": 1},
    {"stage": 2, "accumulation": 2, **MIXED, "ep": 2, "local_steps": {"every": 1, "lr": 0.5}},
]
RUNS = {
    2: [
        {**MIXED, "ep": 2, "bucket_bytes": 0},
        {**MIXED, "ep": 2, "stage": 1, "accumulation": 2},
        {**MIXED, "ep": 2, "tp": 2, **AGAIN},
        {**MIXED, "ep": 2, "stage": 0},
        {**MIXED, "tp": 2},
        {"cp": 2, "cp_method": "heads", "accumulation": 2},
        {"cp": 2, "cp_method": "ring", **AGAIN},
        {"cp": 2, "cp_method": "ring", **BF16},
        {"cp": 2, "cp_method": "gather", **AGAIN, **BF16},
        {"pp": 2, "accumulation": 3, "layers": 4, **AGAIN},
        {"pp": 2, "accumulation": 3, "layers": 2, **BF16},
        {"pp": 2, "accumulation": 3, "pp_schedule": "gpipe", **ALL_MIXED},
    ],
    4: [
        {**MIXED, "ep": 2},  # three experts on a rank, two of which are rank 0's of two
        {**MIXED, "ep": 2, "tp": 2, **BF16},
        {**MIXED, "ep": 2, "tp": 2, **BF16, "reduce": "int8-a2a"},
        {**MIXED, "ep": 2, "tp": 4, "kv_heads": 4},  # experts are sharded, and nothing else is
        {**MIXED, "ep": 2, "dp_replicate": 2, "stage": 2},
        {**MIXED, "ep": 2, "dp_replicate": 2, "stage": 2, "reduce": "fp8-a2a", "gather_block": 16},
        {**MIXED, "ep": 2, "cp": 2, "layout": "flat", "accumulation": 2, **AGAIN},
        {"ep": 2, "pp": 2, "layers": 4, "stage": 2, "accumulation": 2, **BY_BIASES},
        {"ep": 2, "pp": 2, "layers": 5, "accumulation": 3, **BY_BIASES},
        {"ep": 2, "pp": 2, "layers": 2, "accumulation": 2, **BY_BIASES},  # one is the root's
        {"ep": 2, "pp": 2, "layers": 2, "accumulation": 2, "reduce": "bf16-a2a", **BY_BIASES},
        {"pp": 2, "layers": 2, "accumulation": 3, "pp_schedule": "gpipe", **BY_BIASES},
        {"cp": 4, "cp_method": "heads", **AGAIN},  # keys are repeated
        {"cp": 4, "cp_method": "ring"},
        {"cp": 2, "tp": 2, "cp_method": "heads", "kv_heads": 4},
        {"cp": 2, "tp": 2, "cp_method": "ring"},
        {"pp": 2, "tp": 2, "accumulation": 3, "pp_schedule": "gpipe"},
        {"pp": 2, "tp": 2, "accumulation": 2, "ep": 2, **ALL_MIXED},
        {"pp": 2, "cp": 2, "accumulation": 2},
    ],
}


def run_all(rank, num_ranks, runs):
    return [measured(TrainConfig(**{**TINY, **run}), num_ranks) for run in runs]


def measured(config, num_ranks):
    """Take two steps; return what this rank holds after the second one, and sent in it."""
    model, run_passes = compose(config, num_ranks)
    optimizer, local = torch.optim.AdamW(model.parameters()), make_local_steps(config, model)
    outer_bytes = 0 if local is None else local.state_bytes
    for _ in range(2):  # in the first one stages tell each other of shapes
        before = shardwise.debug.stats(model)
        with shardwise.debug.counting(model) as counted:
            run_passes()
        shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = count_state(model, optimizer, outer_bytes)
        optimizer.zero_grad()
        if local is not None:
            local.step()
    after = shardwise.debug.stats(model)
    return {
        "stage": config.axes.over(num_ranks)["pp"].get_local_rank() if config.pp > 1 else 0,
        "state": [state.param_bytes, state.grad_bytes, state.optimizer_bytes],
        "sent": Counter(after.sent_bytes) - Counter(before.sent_bytes),
        "num": Counter(after.num_collectives) - Counter(before.num_collectives),
        "in passes": (dict(counted.sent_bytes), dict(counted.num_collectives)),
    }


@pytest.mark.parametrize("num_ranks", RUNS)
def test_a_plan_with_degrees_holds_and_sends_what_its_run_does(num_ranks, tmp_path):
    check_runs(num_ranks, RUNS[num_ranks][::2], tmp_path)


def check_runs(num_ranks, runs, tmp_path):
    """State of the largest rank, and what is sent over each axis: to the byte, and how many."""
    found = run_ranks(run_all, num_ranks, runs)
    for number, settings in enumerate(runs):
        ranks = [each[number] for each in found]
        file = tmp_path / f"{number}.yaml"
        keys = {**TINY, **settings, "ranks": num_ranks}
        file.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
        setup = set_up(str(file), PlanRequest())
        on_cpu = replace(setup.candidate, transport="point_to_point")
        made = plan(setup.model, setup.cluster, on_cpu).played
        names = ["shard.all_gather", "shard.reduce_scatter", "replicate.all_reduce"]
        stages = [made]
        if "pp" in settings:
            assert isinstance(setup.model, ShapedModel)
            tapes = [setup.model.tape(on_cpu, stage) for stage in range(on_cpu.pp)]
            as_played = on_cpu.with_context_shards
            stages = [play(tape, as_played) for tape in tapes]
        else:
            names += ["ep.all_to_all", "ep.scalars"] + ["shard.scalars"] * ("tp" not in settings)
        for stage, played in enumerate(stages):
            check_stage(played, [r for r in ranks if r["stage"] == stage], names, settings)
        for rank in ranks:  # each sends as much in its layers, and to the other stage of two
            for name in ("cp.all_gather", "cp.all_to_all", "cp.ring", "pp.send"):
                program, (sent, num) = made.program, rank["in passes"]
                if name != "pp.send" and "pp" in settings:
                    continue  # a stage has its layers alone
                assert program.sent_bytes.get(name, 0) == sent.get(name, 0), (settings, name)
                assert program.num_collectives.get(name, 0) == num.get(name, 0), (settings, name)


def check_stage(played, ranks, names, settings):
    """Compare one stage's plan with its ranks, of which the first has most."""
    ledger = next(m.ledger for m in played.peaks if m.phase == "optimizer")
    held = [ledger.param_shards + ledger.param_full, ledger.grad_shards, ledger.optimizer_state]
    assert held == ranks[0]["state"] == max((r["state"] for r in ranks), key=sum), settings
    for name in names:
        sent, num = ranks[0]["sent"].get(name, 0), ranks[0]["num"].get(name, 0)
        assert played.program.sent_bytes.get(name, 0) == sent, (settings, name)
        assert played.program.num_collectives.get(name, 0) == num, (settings, name)


def test_a_stage_in_the_middle_sends_both_ways():
    run = {"pp": 4, "layers": 4, "accumulation": 4}
    config = TrainConfig(**{**TINY, **run})
    model = ShapedModel("tiny", config.shape(VOCAB), config.seq)
    stream = model.boundary_bytes(candidate_of(config, 4))
    sent = [rank[0]["in passes"][0]["pp.send"] for rank in run_ranks(run_all, 4, [run])]
    assert sent == [4 * stream, 8 * stream, 8 * stream, 4 * stream]


# -- tensor parallelism
LAYERS = {
    2: [
        {"tp": 2},
        {"tp": 2, **ALL_MIXED},
        {"tp": 2, **ALL_MIXED, "ep": 2},
        {"tp": 2, **ALL_MIXED, "shared_experts": 0},
    ],
    4: [
        {"tp": 2, "pp": 2, "accumulation": 2},
        {"tp": 2, **BF16},
        {"tp": 4, "kv_heads": 4},
    ],
}


@pytest.mark.parametrize("num_ranks", LAYERS)
def test_a_plan_says_what_a_layer_sends_to_its_tensor_group(num_ranks):
    """Of the stream, in a run with one layer more on each stage.

    Gradients of its norms, which are summed once a step, are beside it. Weights of choices are
    shared out too where experts are spread, and their gradients gathered: 4 bytes for each.
    """
    runs = []
    for run in LAYERS[num_ranks]:
        stages = run.get("pp", 1)
        runs += [{**run, "layers": stages * layers} for layers in (2, 3)]
    found = run_ranks(run_all, num_ranks, runs)
    for number, run in enumerate(LAYERS[num_ranks]):
        config = TrainConfig(**{**TINY, **run, "layers": 2})
        candidate = candidate_of(TrainConfig(**{**TINY, **runs[2 * number]}), num_ranks)
        tape = ShapedModel("tiny", config.shape(VOCAB), config.seq).tape(
            Candidate(
                **{name: getattr(candidate, name) for name in ("tp", "cp", "ep", "num_shards")},
                micro_batch=2,
                precision=config.precision,
            )
        )
        costs = [c for e in tape.events if isinstance(e, UnitWork) for c in e.costs]
        planned = sum(c.moved_bytes for c in costs if c.kind == "tensor_parallel") // 2
        others = config.tp - 1
        weights = 32 * 6 * 4 * others // config.tp if config.ep > 1 else 0
        norms = 2 * 2 * config.dim * (2 if config.precision == "bf16" else 4) * others // config.tp
        for rank in found:
            two, three = (
                sum(
                    n
                    for name, n in rank[2 * number + more]["in passes"][0].items()
                    if name[:3] == "tp."
                )
                for more in (0, 1)
            )
            passes = config.accumulation or 1
            assert three - two == passes * (planned + weights) + norms, run


def test_a_plan_counts_replicas_that_step_apart_as_their_run_does(tmp_path):
    check_runs(4, [{"dp_replicate": 2, **apart} for apart in APART], tmp_path)


def test_a_window_of_local_steps_sends_its_share_in_each_step():
    shape = TrainConfig(**TINY).shape(VOCAB)
    tape = ShapedModel("tiny", shape, 16).tape(Candidate(num_replicas=2, precision="fp32"))
    sent, state = {}, {}
    for every in (0, 1, 8):
        local = {"every": every, "outer": "nesterov"} if every else None
        played = play(tape, Candidate(num_replicas=2, precision="fp32", local_steps=local))
        sent[every] = played.program.sent_bytes["replicate.all_reduce"]
        state[every] = played.device.optimizer_state
    numel = sum(prod(param.shape) for unit in tape.units for param in unit.params)
    assert state[8] == state[1] == state[0] + 8 * numel
    assert sent[1] // 8 <= sent[8] < sent[1] // 8 + len(tape.units)
