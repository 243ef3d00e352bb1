"""Ranks with different numbers of batches (`join`) and of tokens (`mean_loss`)."""

import pytest
import torch

import shardwise
from models import Block, Stack, stack_roundings
from oracle import assert_same_bits, average, copy
from ranks import on_ranks
from roundings import assert_all_rounded_alike, assert_rounded_alike, of_gradient
from shardwise import accumulate, fully_shard, shard
from shardwise.errors import ConfigError
from shardwise.parallel import join, mean_loss
from trainer import full_parameters, mean_square, sgd, sharded_by_block

LENGTHS = [[3], [4, 1], [2, 5, 1]]  # by the number of ranks


def batches_of(rank, world_size, dtype):
    random = torch.Generator().manual_seed(rank)
    length = LENGTHS[world_size - 1][rank]
    return [torch.randn(3, 8, generator=random, dtype=dtype) for _ in range(length)]


def train_alone(world_size, divide_by_present, dtype=torch.float32):
    """Let the ranks take turns; who is through counts as zero, or not at all."""
    torch.manual_seed(0)
    model = Stack().to(dtype)
    optimizer = sgd(model.parameters())
    data = [batches_of(rank, world_size, dtype) for rank in range(world_size)]
    for number in range(max(map(len, data))):
        by_rank = []
        present = sum(number < len(batches) for batches in data)
        for batches in data:
            model.zero_grad()
            is_there = number < len(batches)
            weight = (world_size / present if divide_by_present else 1.0) * is_there
            (weight * mean_square(model, batches[number if is_there else -1])).backward()
            by_rank.append({name: copy(p.grad) for name, p in model.named_parameters()})
        for name, grad in average(by_rank).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train_joined(model, rank, world_size, **options):
    optimizer = sgd(model.parameters())
    weights = []
    dtype = next(model.parameters()).dtype
    for batch, weight in join(model, iter(batches_of(rank, world_size, dtype)), **options):
        (weight * mean_square(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(weight)
    return weights


@on_ranks(1, 3)
def test_uneven_data_trains_as_if_ranks_without_data_had_gradients_of_zero(rank, world_size):
    lengths = LENGTHS[world_size - 1]
    for by_present in (False, True):
        truth = train_alone(world_size, by_present)
        for stage in range(4):
            torch.manual_seed(0)
            model = shard(Stack(), stage=stage)
            weights = train_joined(model, rank, world_size, divide_by_present=by_present)
            assert len(weights) == max(lengths)
            assert [bool(w) for w in weights] == [n < lengths[rank] for n in range(max(lengths))]
            assert by_present or set(weights) <= {0.0, 1.0}
            assert_same_bits(full_parameters(model), truth)


@pytest.mark.kernels
@on_ranks(2)
def test_uneven_data_under_fully_shard(rank, world_size):
    """In fp64 by SGD: what a gradient is off by shows in the parameters, and roundings hardly."""
    torch.manual_seed(0)
    model = Stack().double()
    sharded_by_block(model)
    train_joined(model, rank, world_size)
    truth = train_alone(world_size, False, torch.float64)
    # Of each step the gradient, its mean over ranks, and momentum, rate and sum of the optimizer.
    roundings = max(LENGTHS[world_size - 1]) * (stack_roundings(rows=3) + world_size + 4)
    assert_all_rounded_alike(full_parameters(model), truth, roundings)


@on_ranks(2)
def test_join_tells_all_ranks_when_one_has_nothing_and_stops_when_all_are_through(rank):
    torch.manual_seed(0)
    model = shard(Stack(), stage=2)

    def batches():
        yield from range(rank)

    with pytest.raises(ConfigError, match=r"1 of 2 ranks have no batch at all") as raised:
        list(join(model, batches()))
    assert ("this one among them" in str(raised.value)) == (rank == 0)
    assert list(join(model, [])) == []  # nobody has any: nothing to do
    taken = [batch for batch, _ in join(model, range(5 - rank))]
    assert taken == [0, 1, 2, 3, 3 + (rank == 0)]
    with pytest.raises(ConfigError, match="this Stack is not sharded"):
        next(join(Stack(), [1]))
    # windows end alike on all ranks, as they all see the same number of micro-batches
    for number, (_, weight) in enumerate(join(model, range(4 - 2 * rank))):
        with accumulate(model, last=number % 2 == 1):
            (weight * model(torch.ones(1, 8)).sum()).backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(1, 3, 4)
def test_ranks_with_any_numbers_of_tokens_make_one_mean(rank, num_ranks):
    def make():
        torch.manual_seed(5)
        return Block()

    def undivided(model):
        sharded = fully_shard(model, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        return sharded

    x = torch.randn(6 * num_ranks, 8, generator=torch.Generator().manual_seed(2))
    # Rank 0 has one token, the last one has most of them, and one between has none.
    bounds = [0, 1, 1, *(2 * n for n in range(1, num_ranks)), len(x)][: num_ranks + 1]
    bounds[-1] = len(x)
    mine = x[bounds[rank] : bounds[rank + 1]]
    plain = make()
    wanted = plain(x).square().sum() / len(x)
    wanted.backward()
    roundings = of_gradient(8, 11, 8, over=len(x) + 8)
    mesh = shardwise.Axes(dp_replicate=2) if num_ranks == 4 else None
    for sharded in (
        shard(make(), mesh=mesh),
        shard(make(), mesh=mesh, stage=1),
        fully_shard(make(), mesh=mesh),
        undivided(make()),
    ):
        shown = []
        for part in (mine[:1], mine[1:]):
            with accumulate(sharded, last=len(shown) == 1):
                loss = mean_loss(sharded, sharded(part).square().sum(), len(mine))
                loss.backward()
            shown.append(loss.detach())
        for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert_rounded_alike(p.grad.full_tensor(), q.grad, roundings, name)
    summed = [torch.zeros(()) for _ in range(num_ranks)]
    torch.distributed.all_gather(summed, sum(shown, torch.zeros(())))
    assert_rounded_alike(torch.stack(summed).sum(), wanted.detach(), roundings)
    assert mean_loss(sharded, torch.zeros(()), 0) == 0
    assert mean_loss(sharded, torch.ones((), dtype=torch.bfloat16), 3).dtype == torch.float32
