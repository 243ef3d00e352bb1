"""One ds_config.json in the installed DeepSpeed's own engine and in ours: the same losses."""

import importlib
import os
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

from deepspeed_facts import NEEDS_DEEPSPEED
from ranks import run_ranks
from roundings import SMOOTH_EPS, assert_rounded_alike, of_gradient
from shardwise import accumulate, shard
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.interop.deepspeed import from_deepspeed

pytestmark = [pytest.mark.slow, NEEDS_DEEPSPEED]
NUM_STEPS = 6
CONFIG: dict[str, Any] = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.3,
    "optimizer": {
        "type": "AdamW",
        "params": {
            **{"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True},
            "eps": SMOOTH_EPS,  # Note [Losses after steps of Adam] in roundings.py
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_max_lr": 0.03},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 100},
}


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    )


def micro_batch(rank: int, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    x = torch.randn(4, 5, generator=draw)
    return x, x[:, :3].roll(1, 1) * 2


def theirs(rank: int, world_size: int) -> list[float]:
    warnings.simplefilter("ignore")  # not ours
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    losses = []
    for step in range(NUM_STEPS):
        total = 0.0
        for number in range(3):
            x, y = micro_batch(rank, step, number)
            loss = functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.item() / 3
        losses.append(all_reduce_scalars([total])[0] / world_size)
    return losses


def ours(rank: int, world_size: int) -> list[float]:
    settings = from_deepspeed(CONFIG)
    model = shard(make_model(), **settings.shard)
    optimizer = settings.optimizer(model.parameters())
    scheduler = settings.scheduler(optimizer)
    num_passes = settings.accumulation
    assert (settings.micro_batch, num_passes) == (4, 3)
    losses = []
    for step in range(NUM_STEPS):
        total = 0.0
        for number in range(num_passes):
            x, y = micro_batch(rank, step, number)
            with accumulate(model, last=number == num_passes - 1):
                loss = functional.mse_loss(model(x), y)
                (loss / num_passes).backward()
            total += loss.item() / num_passes
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clipping)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(all_reduce_scalars([total])[0] / world_size)
    return losses


def test_two_ranks_have_the_losses_of_deepspeeds_engine() -> None:
    found = run_ranks(ours, 2)
    expected = run_ranks(theirs, 2, fresh=True)
    assert found[0] == found[1]
    roundings = of_gradient(5, 16, 16, 3, over=2 * 3 * 4)  # of 2 ranks, 3 micro-batches of 4
    for step, (mine, wanted) in enumerate(zip(found[0], expected[0], strict=True)):
        assert_rounded_alike(mine, wanted, roundings, f"losses of step {step}")
    assert found[0][-1] < 0.7 * found[0][0]
