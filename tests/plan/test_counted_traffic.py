"""What plans say that a rank sends over `tp`, `pp` and `cp`, against what its run has sent.

The oracle is `shardwise.debug.counting` around one step of the built-in decoder, on every rank.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import shardwise
from composed_cells import candidate_of
from ranks import run_ranks
from shardwise.parallel.context import ContextParallel
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.catalogue import make_cluster
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.tape import Work
from shardwise.plan.planning import plan
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder, Pipeline
from shardwise.train.setup import shard_decoder

VOCAB = 64
# Each token goes to all experts, so how many of them are another rank's does not depend on routing.
TINY: dict[str, Any] = {
    **{"dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "seq": 16, "micro_batch": 2},
    **{"vocab": VOCAB, "precision": "fp32"},
}
EXPERTS: dict[str, Any] = {
    **{"experts": 6, "experts_per_token": 6, "expert_ffn_multiple": 2.0, "shared_experts": 1},
    **{"dense_layers": 0, "expert_balance": 0.0, "expert_bias": True},
}


def sent_in_a_step(rank: int, num_ranks: int, runs: list[dict[str, Any]]) -> list[Any]:
    """Return bytes and numbers of what this rank sends in the second step of each run."""
    return [_sent(TrainConfig(**{**TINY, **run}), num_ranks) for run in runs]


def _sent(config: TrainConfig, num_ranks: int) -> Any:
    axes, num = config.axes.over(num_ranks), config.accumulation or 1
    with torch.device("meta"):
        model: Any = Decoder(config, VOCAB)
    model = shard_decoder(config, axes, model)
    context = ContextParallel(model, axes, config.cp_method) if config.cp > 1 else None
    pipeline = Pipeline(model, axes, config, torch.device("cpu")) if config.pp > 1 else None
    for _ in range(2):  # in the first one stages tell each other of shapes
        with shardwise.debug.counting(model) as counted:
            rows = config.micro_batch * (1 if pipeline is None else num)
            for _ in range(num if pipeline is None else 1):
                ids = torch.randint(VOCAB, (rows, config.seq))
                cut = nullcontext((ids, ids, None)) if context is None else context.cut(ids, ids)
                with cut as inputs:
                    if pipeline is None:
                        model(*inputs).backward()
                    else:
                        pipeline.step(*inputs)
        model.zero_grad()
    return dict(counted.sent_bytes), dict(counted.num_collectives)


def model_of(config: TrainConfig) -> ShapedModel:
    return ShapedModel("tiny", config.shape(VOCAB), config.seq)


def of_axis(counts: dict[str, int], axis: str) -> int:
    return sum(count for name, count in counts.items() if name.startswith(f"{axis}."))


# -- context parallelism
CONTEXTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"cp": 2, "cp_method": "gather"},
        {"cp": 2, "cp_method": "heads", "accumulation": 2},
        {"cp": 2, "cp_method": "ring", "activation_checkpointing": True},
        {"cp": 2, "cp_method": "ring", "precision": "bf16"},
        {"cp": 2, "cp_method": "gather", "activation_checkpointing": True, "precision": "bf16"},
    ],
    4: [
        {"cp": 4, "cp_method": "heads", "activation_checkpointing": True},  # keys are repeated
        {"cp": 4, "cp_method": "ring"},
        {"cp": 2, "tp": 2, "cp_method": "heads", "kv_heads": 4},
        {"cp": 2, "tp": 2, "cp_method": "ring"},
        {"cp": 2, "cp_method": "gather", **EXPERTS, "ep": 2},
    ],
}


@pytest.mark.parametrize("num_ranks", CONTEXTS)
def test_a_plan_says_what_each_way_of_attention_sends(num_ranks: int) -> None:
    """To the byte and to the collective, on every rank."""
    found = run_ranks(sent_in_a_step, num_ranks, CONTEXTS[num_ranks])
    for number, run in enumerate(CONTEXTS[num_ranks]):
        config = TrainConfig(**{**TINY, **run})
        cluster = make_cluster("cpu", num_ranks)
        program = plan(model_of(config), cluster, candidate_of(config, num_ranks)).played.program
        for rank in found:
            sent, num = rank[number]
            for name in ("cp.all_gather", "cp.all_to_all", "cp.ring"):
                assert program.sent_bytes.get(name, 0) == sent.get(name, 0), (run, name)
                assert program.num_collectives.get(name, 0) == num.get(name, 0), (run, name)


# -- pipelines, alone and beside tensor parallelism
STAGES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"pp": 2, "accumulation": 3, "pp_schedule": schedule, "layers": layers, **more}
        for schedule, layers, more in (
            ("1f1b", 4, {"activation_checkpointing": True}),
            ("1f1b", 2, {"precision": "bf16"}),
            ("gpipe", 3, EXPERTS),
        )
    ],
    4: [
        {"pp": 2, "tp": 2, "accumulation": 3, "pp_schedule": "gpipe"},
        {"pp": 2, "tp": 2, "accumulation": 2, "ep": 2, **EXPERTS},
        {"pp": 2, "cp": 2, "accumulation": 2},
        {"pp": 2, "accumulation": 2, "precision": "bf16"},
    ],
}


@pytest.mark.parametrize("num_ranks", STAGES)
def test_a_plan_says_what_an_outer_stage_sends(num_ranks: int) -> None:
    found = run_ranks(sent_in_a_step, num_ranks, STAGES[num_ranks])
    for number, run in enumerate(STAGES[num_ranks]):
        config = TrainConfig(**{**TINY, **run})
        cluster = make_cluster("cpu", num_ranks)
        program = plan(model_of(config), cluster, candidate_of(config, num_ranks)).played.program
        for rank in found:
            sent, num = rank[number]
            assert program.sent_bytes["pp.send"] == sent["pp.send"], run
            assert program.num_collectives["pp.send"] == num["pp.send"], run


def test_a_stage_in_the_middle_sends_both_ways() -> None:
    run = {"pp": 4, "layers": 4, "accumulation": 4}
    config = TrainConfig(**{**TINY, **run})
    stream = model_of(config).boundary_bytes(candidate_of(config, 4))
    sent = [rank[0][0]["pp.send"] for rank in run_ranks(sent_in_a_step, 4, [run])]
    assert sent == [4 * stream, 8 * stream, 8 * stream, 4 * stream]


# -- tensor parallelism
LAYERS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tp": 2},
        {"tp": 2, **EXPERTS},
        {"tp": 2, **EXPERTS, "ep": 2},
        {"tp": 2, **EXPERTS, "shared_experts": 0},
    ],
    4: [
        {"tp": 2, "pp": 2, "accumulation": 2},
        {"tp": 2, "precision": "bf16"},
        {"tp": 4, "kv_heads": 4},
    ],
}


@pytest.mark.parametrize("num_ranks", LAYERS)
def test_a_plan_says_what_a_layer_sends_to_its_tensor_group(num_ranks: int) -> None:
    """Of the stream, in a run with one layer more on each stage.

    Gradients of its norms, which are summed once a step, are beside it. Weights of choices are
    shared out too where experts are spread, and their gradients gathered: 4 bytes for each.
    """
    runs = []
    for run in LAYERS[num_ranks]:
        stages = run.get("pp", 1)
        runs += [{**run, "layers": stages * layers} for layers in (2, 3)]
    found = run_ranks(sent_in_a_step, num_ranks, runs)
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
        costs = [c for e in tape.events if isinstance(e, Work) for c in e.costs]
        planned = sum(c.moved_bytes for c in costs if c.kind == "tensor_parallel") // 2
        others = config.tp - 1
        weights = 32 * 6 * 4 * others // config.tp if config.ep > 1 else 0
        norms = 2 * 2 * config.dim * (2 if config.precision == "bf16" else 4) * others // config.tp
        for rank in found:
            two, three = (rank[2 * number + more][0] for more in (0, 1))
            passes = config.accumulation or 1
            more = of_axis(three, "tp") - of_axis(two, "tp")
            assert more == passes * (planned + weights) + norms, run
