"""A mixture of experts: experts on several ranks, everything sharded.

    torchrun --nproc-per-node 4 examples/experts.py

Each pair of ranks has all experts, half of them each, and sends tokens to where their experts are;
each expert is sharded over the pairs, all else over all ranks.
"""

import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.config import Units
from shardwise.device import local_device
from shardwise.parallel.routing import Routing

STEPS, VOCAB, WIDTH, BALANCE = 20, 64, 64, 0.01


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        routing = Routing(num=8, top_k=2, scoring="sigmoid", balanced=True, biased=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = shardwise.parallel.MixtureOfExperts(
            WIDTH, WIDTH, routing, nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance = self.moe(self.norm(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss, with the auxiliary loss of each layer."""
        x, balances = self.embedding(tokens), 0.0
        for block in self.blocks:
            x, balance = block(x)
            balances = balances + balance
        target = (7 * tokens + 3) % VOCAB  # the function to learn
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten()) + BALANCE * balances


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def compose(model: nn.Module, axes: shardwise.Axes) -> nn.Module:
    shardwise.parallel.spread_experts(model, axes)
    return shardwise.shard(model, mesh=axes, units=Units(experts="*.experts"))


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axes = shardwise.Axes(ep=2)
    rank = dist.get_rank()

    # Once, before a new composition trains: has it the gradients of one process?
    tokens = torch.arange(64).reshape(8, 8).to(device)
    report = shardwise.check.gradients(
        lambda: make_model().to(device),
        tokens,
        axes,
        compose=lambda model: compose(model, axes),
        loss=lambda model, tokens: model(tokens),
    )

    model = compose(make_model().to(device), axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(report)
        params = {p.name: p for unit in shardwise.describe(model).units for p in unit.params}
        print(params["blocks.0.moe.experts.gate"], params["head.weight"], sep="\n")
    data = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        loss = model(torch.randint(VOCAB, (8, 16), generator=data).to(device))
        loss.backward()
        shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shardwise.parallel.balance_experts(model)
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss.item():.4f}")
    if rank == 0:
        sent = shardwise.debug.stats(model).sent_bytes["ep.all_to_all"]
        print(f"sent {sent // STEPS:,} bytes of tokens a step")
    del model, optimizer
    gc.collect()  # hooks form cycles that hold the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
