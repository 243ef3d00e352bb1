"""Expert parallelism in plans: held against runs of the built-in decoder, and what plans tell."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from decoders import SEQ, SHAPE, cluster_of_ranks, faster, make_plan
from ranks import run_ranks
from shardwise.cli.plan_setup import set_up
from shardwise.errors import ConfigError
from shardwise.parallel.context import ContextParallel
from shardwise.plan.candidate import Candidate, Offload
from shardwise.plan.machine.links import Group, all_to_all_seconds, send_seconds
from shardwise.plan.machine.pricing import Prices
from shardwise.plan.model.execution import Execution
from shardwise.plan.model.shape_tape import shape_tape
from shardwise.plan.model.shapes import Experts
from shardwise.plan.planning import plan
from shardwise.plan.request import PlanRequest
from shardwise.plan.searching import Space, search
from shardwise.plan.timing.scenario import Scenario, SlowLink, Straggler
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder
from shardwise.train.setup import shard_decoder
from shardwise.train.summary import count_state

MIXED = replace(SHAPE, experts=Experts(8, 2, 96, shared=1, dense_layers=1))
VOCAB = 64
# Each token goes to all experts, so how many of them are another rank's does not depend on routing.
TINY: dict[str, Any] = {
    **{"dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "seq": 16, "micro_batch": 2},
    **{"experts": 6, "experts_per_token": 6, "expert_ffn_multiple": 2.0, "vocab": VOCAB},
    **{"shared_experts": 1, "dense_layers": 1},
}
RUNS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"ep": 2, "bucket_bytes": 0},
        {"ep": 2, "stage": 1, "accumulation": 2},
        {"ep": 2, "tp": 2, "activation_checkpointing": True},
        {"tp": 2},
    ],
    4: [
        {"ep": 2},  # three experts on a rank, two of which are rank 0's of two
        {"ep": 2, "tp": 2, "precision": "bf16"},
        {"ep": 2, "dp_replicate": 2, "stage": 2},
        {"ep": 2, "cp": 2, "layout": "flat", "activation_checkpointing": True, "accumulation": 2},
    ],
}


def run_of(rank: int, num_ranks: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [measured(TrainConfig(**{**TINY, **run}), num_ranks) for run in runs]


def measured(config: TrainConfig, num_ranks: int) -> dict[str, Any]:
    """Take two steps; return what this rank holds after the second one, and sent in it."""
    axes = config.axes.over(num_ranks)
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = Decoder(config, VOCAB)
    model = shard_decoder(config, axes, model)
    context = ContextParallel(model, axes) if config.cp > 1 else None
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        before = shardwise.stats(model)
        for number in range(config.accumulation or 1):
            ids = torch.randint(VOCAB, (config.micro_batch, config.seq))
            last = number + 1 == (config.accumulation or 1)
            cut = nullcontext((ids, ids)) if context is None else context.cut(ids, ids)
            with shardwise.accumulate(model, last=last), cut as inputs:
                model(*inputs).backward()
        shardwise.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = count_state(model, optimizer)
        optimizer.zero_grad()
    after = shardwise.stats(model)
    return {
        "state": [state.param_bytes, state.grad_bytes, state.optimizer_bytes],
        "sent": Counter(after.sent_bytes) - Counter(before.sent_bytes),
        "num": Counter(after.num_collectives) - Counter(before.num_collectives),
    }


@pytest.mark.parametrize("num_ranks", RUNS)
def test_a_plan_with_experts_holds_and_sends_what_its_run_does(
    num_ranks: int, tmp_path: Path
) -> None:
    """State of the largest rank, its gathers, reductions and tokens: to the byte, and how many."""
    found = run_ranks(run_of, num_ranks, RUNS[num_ranks])
    for number, settings in enumerate(RUNS[num_ranks]):
        ranks = [each[number] for each in found]
        file = tmp_path / f"{number}.yaml"
        keys = {**TINY, "precision": "fp32", **settings, "ranks": num_ranks}
        file.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
        setup = set_up(str(file), PlanRequest())
        on_cpu = replace(setup.candidate, transport="point_to_point")
        made = plan(setup.model, setup.cluster, on_cpu)
        ledger = next(m.ledger for m in made.played.peaks if m.phase == "optimizer")
        held = [ledger.param_shards + ledger.param_full, ledger.grad_shards, ledger.optimizer_state]
        assert held == ranks[0]["state"] == max((r["state"] for r in ranks), key=sum), settings
        program = made.played.program
        names = ["shard.all_gather", "shard.reduce_scatter", "replicate.all_reduce"]
        names += ["ep.all_to_all", "ep.scalars"] + ["shard.scalars"] * ("tp" not in settings)
        for name in names:
            sent, num = ranks[0]["sent"].get(name, 0), ranks[0]["num"].get(name, 0)
            assert program.sent_bytes.get(name, 0) == sent, (settings, name)
            assert program.num_collectives.get(name, 0) == num, (settings, name)
