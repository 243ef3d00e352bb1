"""Train a tiny model with the plain PyTorch loop, sharded over ranks.

    python examples/train_loop.py --ranks 2 --stage 3
    torchrun --nproc-per-node 2 examples/train_loop.py --stage 3

Two calls differ from plain PyTorch: `shard` and `accumulate`. The rest makes data and ranks.
"""

import argparse
import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists: its defaults would keep it
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.device import local_device

STEPS, MICRO_BATCHES, VOCAB, WIDTH = 20, 2, 64, 64


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
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))  # each block becomes a unit
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(stage: int, device: torch.device) -> None:
    rank = dist.get_rank()
    model = shardwise.shard(NextToken().to(device), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(shardwise.describe(model))
    data = torch.Generator().manual_seed(rank)  # each rank has its own data
    for step in range(1, STEPS + 1):
        loss_sum = 0.0
        for number in range(MICRO_BATCHES):
            tokens = torch.randint(VOCAB, (8, 16), generator=data).to(device)
            with shardwise.accumulate(model, last=number == MICRO_BATCHES - 1):
                logits = model(tokens)
                target = (7 * tokens + 3) % VOCAB  # the function to learn
                loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()) / MICRO_BATCHES
                loss.backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss_sum:.4f}  gradient norm {norm:.3f}")
    if rank == 0:
        print(shardwise.debug.stats(model))


def run_rank(local_rank: int, stage: int, num_ranks: int = -1, method: str | None = None) -> None:
    device = local_device(local_rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank = local_rank if method else -1  # torchrun says by itself which rank this is
    dist.init_process_group(backend, method, rank=rank, world_size=num_ranks)
    train(stage, device)
    gc.collect()  # hooks form cycles that hold the group
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="The plain loop on sharded parameters.")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (not by torchrun)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    asked = parser.parse_args()
    if dist.is_torchelastic_launched():
        return run_rank(dist.get_node_local_rank(), asked.stage)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (asked.stage, asked.ranks, f"file://{folder}/group")
        torch.multiprocessing.spawn(run_rank, arguments, asked.ranks)


if __name__ == "__main__":
    main()
