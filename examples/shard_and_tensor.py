"""2D: tensor parallelism between neighbours, shards over the rest.

    torchrun --nproc-per-node 4 examples/shard_and_tensor.py

Each pair of ranks shares the layers of one batch by torch's own parallel layers; parameters,
gradients and optimizer state of each part are sharded over the pairs.
"""

import gc

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists: its defaults would keep it
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise.device import local_device

STEPS, VOCAB, WIDTH = 20, 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block() for _ in range(4))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))


def compose(model: nn.Module, axes: shardwise.Axes) -> nn.Module:
    for block in list(model.children())[1:-1]:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, axes["tp"], plan)
    return shardwise.shard(model, mesh=axes)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    target = (7 * tokens + 3) % VOCAB  # the function to learn
    return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axes = shardwise.Axes(tp=2)  # dp_shard is the rest
    rank = dist.get_rank()

    # Once, before a new composition trains: has it the gradients of one process?
    tokens = torch.arange(64).reshape(8, 8).to(device)
    report = shardwise.check.gradients(
        lambda: make_model().to(device),
        tokens,
        axes,
        compose=lambda model: compose(model, axes),
        loss=next_token_loss,
    )

    model = compose(make_model().to(device), axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(report)
        params = {
            param.name: param for unit in shardwise.describe(model).units for param in unit.params
        }
        print(params["1.up.weight"], params["1.down.weight"], params["1.norm.weight"], sep="\n")
    part = axes["dp_shard"].get_local_rank()  # ranks of one tp group get the same batch
    data = torch.Generator().manual_seed(part)
    for step in range(1, STEPS + 1):
        loss = next_token_loss(model, torch.randint(VOCAB, (8, 16), generator=data).to(device))
        loss.backward()
        shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss.item():.4f}")
    del model, optimizer
    gc.collect()  # hooks form cycles that hold the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
