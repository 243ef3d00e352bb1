"""2D: tensor parallelism between neighbours, shards over the rest.

    torchrun --nproc-per-node 4 examples/shard_and_tensor.py

Each pair of ranks shares the layers of one batch by torch's own parallel layers; parameters,
gradients and optimizer state of each part are sharded over the pairs.
"""

import gc
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise.device import local_device

STEPS, VOCAB, WIDTH = 20, 64, 64
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block() for _ in range(4))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))


def compose(axes: shardwise.Axes, model: nn.Module) -> nn.Module:
    for block in list(model.children())[1:-1]:
        parallelize_module(block, axes["tp"], PLAN)
    return shardwise.shard(model, mesh=axes, units="Block")


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    target = (7 * tokens + 3) % VOCAB  # the function to learn
    return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axes, rank = shardwise.Axes(tp=2), dist.get_rank()  # dp_shard is the rest
    # Once, before a new composition trains: has it the gradients of one process?
    tokens, together = torch.arange(64, device=device).reshape(8, 8), partial(compose, axes)
    report = shardwise.check.gradients(
        lambda: make_model().to(device), tokens, axes, compose=together, loss=next_token_loss
    )
    model = together(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(report)
    data = torch.Generator().manual_seed(axes["dp_shard"].get_local_rank())  # tp groups share it
    for step in range(1, STEPS + 1):
        loss = next_token_loss(model, torch.randint(VOCAB, (8, 16), generator=data).to(device))
        loss.backward()
        shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss.item():.2f}")
    del model, optimizer
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
