"""`fully_shard` where ranks use different parameters of one module: gradients never mix."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import on_ranks
from roundings import SMOOTH_EPS, assert_rounded_alike, of_gradient
from shardwise import Precision, debug, fully_shard
from shardwise.errors import CollectiveError, ConfigError
from trainer import sharded_by_block


class Experts(nn.Module):
    """Of its experts, which are all of one size, a call uses those that it is told."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, which):
        return self.scale * sum((self.experts[i](x) for i in which), x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x, which):
        for block in self.blocks:
            x = torch.tanh(block(x, which))
        return x.square().sum()


def batches_of(rank, num_steps):
    random = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(3, 6, generator=random, dtype=torch.float64),
            [n for n in range(3) if (rank + n + step) % 3],
        )
        for step in range(num_steps)
    ]  # expert 3 is used by nobody


@pytest.mark.parametrize(
    ("world_size", "has_replicas"),
    [(1, False), (2, False), pytest.param(3, False, marks=pytest.mark.kernels), (4, True)],
)
@on_ranks()
def test_ranks_may_use_different_parameters_of_one_module(rank, world_size, has_replicas):
    """Compare with one process that sees all ranks' batches; in whole numbers of micro-batches."""
    torch.manual_seed(0)
    truth = Model().double()
    torch.manual_seed(0)
    model = Model().double()
    mesh = None
    if has_replicas:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    sharded_by_block(model, mesh=mesh)
    smooth = {"lr": 0.01, "eps": SMOOTH_EPS}  # Note [Losses after steps of Adam] in roundings.py
    optimizers = [torch.optim.AdamW(m.parameters(), **smooth) for m in (truth, model)]
    nobody = set()
    everyones = [batches_of(r, 4) for r in range(world_size)]
    # Each block sums a product and three experts; 4 steps, over ranks and 2 micro-batches of 3.
    roundings = 4 * of_gradient(6, 3, 6, 3, over=world_size * 2 * 3)
    for step in range(4):
        for number in range(2):  # two micro-batches, the second with other experts
            for batches in everyones:
                x, which = batches[(step + number) % 4]
                (truth(x, which) / world_size).backward()
            x, which = everyones[rank][(step + number) % 4]
            model(x, which).backward()
        for (name, plain), sharded in zip(
            truth.named_parameters(), model.parameters(), strict=True
        ):
            assert (plain.grad is None) == (sharded.grad is None), name
            if plain.grad is None:
                nobody.add(name)
                continue
            assert_rounded_alike(sharded.grad.full_tensor(), plain.grad, roundings, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert any("experts.3" in name for name in nobody)


class Pair(nn.Module):
    """Two layers of one size, of which a call runs those that it is told."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x, names):
        return sum(getattr(self, name)(x) for name in names).sum()


@on_ranks(2, fresh=True)
def test_gradients_never_mix_with_those_of_another_module_that_other_ranks_run(rank):
    """Run another module on each rank in a pass in which nothing needs to be gathered."""
    model = Pair()
    for layer in (model.a, model.b):
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 4), "ab")  # gathers both
    debug.watch(4)  # in a process of its own, which ends with this call
    name = "ab"[rank]
    with pytest.raises(CollectiveError, match=f"reduce_scatter of unit '{name}'"):
        model(torch.ones(1, 4), name).backward()
    assert model.a.weight.grad is None and model.b.weight.grad is None


@on_ranks(3)
def test_another_dtype_on_one_rank_is_told_on_all_before_the_first_gather(rank):
    policy = Precision(torch.bfloat16 if rank == 1 else None)
    model = fully_shard(Pair(), mp_policy=policy)
    told = r"^fully_shard\(\): the ranks differ: rank 1 has \[unit '\(root\)'"
    told += ".*param=torch.bfloat16.* where rank 0 has .*param=None"
    with pytest.raises(ConfigError, match=told):
        model(torch.ones(1, 4), "ab")
