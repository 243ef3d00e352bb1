"""A loop from a DeepSpeed config beside the same loop with plain DDP: the same bits in fp32."""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ranks import on_ranks
from shardwise import shard
from shardwise.interop.deepspeed import from_deepspeed

NUM_STEPS = 5


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 5, "warmup_num_steps": 2, "warmup_min_ratio": 0.5},
        },
        "zero_optimization": {"stage": stage, "prefetch_bucket_size": 64},
    }


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    )


def losses_of(rank: int, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> list[float]:
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(NUM_STEPS):
        x = torch.randn(4, 5, generator=draw)
        loss = functional.mse_loss(model(x), x[:, :3].sin())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_every_stage_of_a_config_has_the_bits_of_ddp_on_two_ranks(rank, world_size):
    """Return the losses of DDP, and of every stage."""
    plain = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1)
    scheduler = from_deepspeed(config_of(0)).scheduler(optimizer)
    expected = losses_of(rank, plain, optimizer, scheduler)
    found = []
    for stage in range(4):
        settings = from_deepspeed(config_of(stage))
        assert settings.global_batch == 4 * world_size
        model = shard(make_model(), **settings.shard)
        optimizer = settings.optimizer(model.parameters())
        found.append(losses_of(rank, model, optimizer, settings.scheduler(optimizer)))
    expected, found = expected, found
    assert found == [expected] * 4
    assert len(set(expected)) == NUM_STEPS
