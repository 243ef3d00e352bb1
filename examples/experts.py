"""A mixture of experts: experts on several ranks, everything sharded.

    torchrun --nproc-per-node 4 examples/experts.py

Each pair of ranks has all experts, half of them each, and sends tokens to where their experts are;
each expert is sharded over the pairs, all else over all ranks.
"""

import gc
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.config import Units
from shardwise.device import local_device
from shardwise.parallel.routing import Routing

STEPS, VOCAB, WIDTH, BALANCE = 20, 64, 64, 0.01


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        routing = Routing(num=8, top_k=2, scoring="sigmoid", balanced=True, biased=True)
        make_layer = partial(shardwise.parallel.MixtureOfExperts, WIDTH, WIDTH, routing)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(make_layer(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, balances = self.embedding(tokens), 0.0
        for layer in self.layers:
            y, balance = layer(F.layer_norm(x, (WIDTH,)))
            x, balances = x + y, balances + balance
        target = (7 * tokens + 3) % VOCAB  # the function to learn
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten()) + BALANCE * balances


def compose(axes: shardwise.Axes, model: nn.Module) -> nn.Module:
    shardwise.parallel.spread_experts(model, axes)
    return shardwise.shard(model, mesh=axes, units=Units(experts="*.experts"))


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axes, rank = shardwise.Axes(ep=2), dist.get_rank()

    # Once, before a new composition trains: has it the gradients of one process?
    tokens, together = torch.arange(64, device=device).reshape(8, 8), partial(compose, axes)
    report = shardwise.check.gradients(
        lambda: Model().to(device), tokens, axes, compose=together, loss=lambda model, x: model(x)
    )
    model = together(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        loss = model(torch.randint(VOCAB, (8, 16), generator=data).to(device))
        loss.backward()
        shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shardwise.parallel.balance_experts(model)
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss.item():.2f}")
    if rank == 0:
        sent = shardwise.debug.stats(model).sent_bytes["ep.all_to_all"] // STEPS
        print(report, f"sent {sent:,} bytes of tokens a step", sep="\n")
    del model, optimizer
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
