"""A loss over tokens of which ranks have different numbers is the mean over all of them."""

import torch
from torch import nn

import shardwise
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.interop.fsdp2 import fully_shard

WIDTH, ROWS = 8, 6


def make():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def sum_of_losses(model, x):
    return model(x).square().sum()


@on_ranks(1, 3, 4)
def test_ranks_with_any_numbers_of_tokens_make_one_mean(rank, num_ranks):
    x = torch.randn(ROWS * num_ranks, WIDTH, generator=torch.Generator().manual_seed(2))
    # Rank 0 has one token, the last one has most of them, and one between has none.
    bounds = [0, 1, 1, *(2 * n for n in range(1, num_ranks)), len(x)][: num_ranks + 1]
    bounds[-1] = len(x)
    mine = x[bounds[rank] : bounds[rank + 1]]
    plain = make()
    wanted = sum_of_losses(plain, x) / len(x)
    wanted.backward()
    roundings = of_gradient(WIDTH, WIDTH, 3, over=len(x) + 8)
    mesh = shardwise.Axes(dp_replicate=2) if num_ranks == 4 else None

    def undivided(model):
        sharded = fully_shard(model, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        return sharded

    for sharded in (
        shardwise.shard(make(), mesh=mesh),
        shardwise.shard(make(), mesh=mesh, stage=1),
        fully_shard(make(), mesh=mesh),
        undivided(make()),
    ):
        shown = []
        for part in (mine[:1], mine[1:]):
            with shardwise.accumulate(sharded, last=len(shown) == 1):
                total = sum_of_losses(sharded, part)
                loss = shardwise.parallel.mean_loss(sharded, total, len(mine))
                loss.backward()
            shown.append(loss.detach())
        for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert_rounded_alike(p.grad.full_tensor(), q.grad, roundings, name)
    summed = [torch.zeros(()) for _ in range(num_ranks)]
    torch.distributed.all_gather(summed, sum(shown, torch.zeros(())))
    assert_rounded_alike(torch.stack(summed).sum(), wanted.detach(), roundings)
    assert shardwise.parallel.mean_loss(sharded, torch.zeros(()), 0) == 0
    in_bf16 = shardwise.parallel.mean_loss(sharded, torch.ones((), dtype=torch.bfloat16), 3)
    assert in_bf16.dtype == torch.float32
