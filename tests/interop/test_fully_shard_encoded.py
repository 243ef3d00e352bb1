"""`fully_shard` with encoded gathers: the values of `block_codes`, whatever else is asked for."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

from block_codes import of_rows
from ranks import on_ranks
from shardwise import Precision
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2 import fully_shard
from trainer import sharded_by_block

KINDS = ("int8", "fp8", "int4")
BLOCK = 16


class Block(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, width))
        self.back = nn.Parameter(torch.randn(width, 7))
        self.bias = nn.Parameter(torch.randn(width))
        self.seen = {}

    def forward(self, x):
        self.seen = {n: p.detach().clone() for n, p in self.named_parameters()}
        return x + torch.tanh(x @ self.weight.T) @ self.back.T + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(kind, param=None, **options):
    torch.manual_seed(2)
    model = Net()
    policy = Precision(param, gather=kind, block=BLOCK, cast_inputs=True)
    return sharded_by_block(model, mp_policy=policy, **options)


def check(model, kind, num_ranks, param):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        full = {n: p.full_tensor().detach().cpu() for n, p in model.named_parameters()}
        model(torch.ones(2, 12) + step).square().sum().backward()
        for number, block in enumerate(model.blocks):
            for name, seen in block.seen.items():
                value = full[f"blocks.{number}.{name}"]
                wanted = of_rows(value, kind, num_ranks, BLOCK, 0)
                assert torch.equal(seen, wanted.to(param)), (kind, name)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 3)
def test_layers_read_what_the_encoding_says(num_ranks):
    for kind in KINDS:
        check(make(kind), kind, num_ranks, torch.float32)
    check(make("int8", torch.bfloat16), "int8", num_ranks, torch.bfloat16)
    check(make("fp8", reshard_after_forward=False), "fp8", num_ranks, torch.float32)
    home = make("int4", torch.bfloat16, offload_policy=CPUOffloadPolicy())
    check(home, "int4", num_ranks, torch.bfloat16)


@on_ranks(3)
def test_a_matrix_cut_along_another_dim_is_encoded_rank_by_rank(num_ranks):
    model = make("int8", shard_placement_fn=lambda p: Shard(1) if p.shape == (7, 12) else None)
    full = model.blocks[0].weight.full_tensor().detach()
    model(torch.ones(1, 12))
    assert torch.equal(model.blocks[0].seen["weight"], of_rows(full, "int8", num_ranks, BLOCK, 1))
    back = model.blocks[0].back.full_tensor().detach()
    assert torch.equal(model.blocks[0].seen["back"], of_rows(back, "int8", num_ranks))


@on_ranks(4)
def test_parts_kept_nearby_are_what_arrived():
    """What stays between forward and backward is what arrived, so both have the same weights."""
    grads = []
    for keeps in (True, 2):
        model = make("int4", reshard_after_forward=keeps)
        model(torch.ones(2, 12)).square().sum().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *grads))


@on_ranks(1)
def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="fully_shard keeps the parameters' own dtype"):
        fully_shard(Net(), mp_policy=Precision(master=torch.float32, gather="int8"))
