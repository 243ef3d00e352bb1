"""Train a tiny model with the plain PyTorch loop, sharded over ranks.

    torchrun --nproc-per-node 2 examples/train_loop.py --stage 3

Two calls differ from plain PyTorch: `shard` and `accumulate`. The rest makes data and ranks.
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.device import local_device

STEPS, PASSES, VOCAB, WIDTH = 20, 2, 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def train(stage: int, device: torch.device) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = shardwise.shard(NextToken().to(device), stage=stage, units="Block")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(shardwise.describe(model))
    data = torch.Generator().manual_seed(rank)  # each rank has its own data
    for step in range(1, STEPS + 1):
        loss_sum = 0.0
        for number in range(PASSES):  # micro-batches of a step
            tokens = torch.randint(VOCAB, (8, 16), generator=data).to(device)
            with shardwise.accumulate(model, last=number == PASSES - 1):
                target = (7 * tokens + 3) % VOCAB  # the function to learn
                loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten()) / PASSES
                loss.backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss_sum:.2f}  gradient norm {norm:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The plain loop on sharded parameters.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    stage = parser.parse_args().stage
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(stage, device)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
