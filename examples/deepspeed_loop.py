"""Train with a DeepSpeed config, without DeepSpeed: its JSON decides sharding, batch and schedule.

    torchrun --nproc-per-node 2 examples/deepspeed_loop.py

The file needs no change; `print(settings)` lists each key with its effect.
"""

import gc
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.device import local_device

CONFIG = Path(__file__).parent / "ds_config.json"
STEPS, VOCAB, WIDTH = 20, 64, 64


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCAB, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCAB),
    )


def train(device: torch.device) -> None:
    rank = dist.get_rank()
    settings = shardwise.interop.deepspeed.from_deepspeed(CONFIG)
    torch.manual_seed(0)
    model = shardwise.shard(build_model().to(device), **settings.shard)
    optimizer = settings.optimizer(model.parameters())
    scheduler = settings.scheduler(optimizer, total_num_steps=STEPS)  # "auto" in the file
    micro_batch, passes = settings.micro_batch, settings.accumulation
    if rank == 0:
        print(settings)
    data = torch.Generator().manual_seed(rank)  # each rank draws other data
    for step in range(1, STEPS + 1):
        loss_sum = 0.0
        for number in range(passes):
            tokens = torch.randint(VOCAB, (micro_batch, 16), generator=data).to(device)
            with shardwise.accumulate(model, last=number == passes - 1):
                target = (7 * tokens + 3) % VOCAB  # the pattern to learn
                loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten()) / passes
                loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clipping)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 5 == 0):
            (lr,) = scheduler.get_last_lr()
            print(f"step {step:3d}  loss {loss_sum:.2f}  next learning rate {lr:.2e}")


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(device)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
