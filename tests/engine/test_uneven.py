"""Ranks with different numbers of batches: `shardwise.parallel.join`."""

import pytest
import torch

from models import Stack, stack_roundings
from oracle import assert_same_bits, average, copy
from ranks import on_ranks
from roundings import assert_all_rounded_alike
from shardwise import accumulate, shard
from shardwise.errors import ConfigError
from shardwise.parallel import join
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


@on_ranks(1, 2, 3)
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
