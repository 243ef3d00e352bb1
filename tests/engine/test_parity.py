"""In fp32 every stage, layout and world size takes the bit-identical steps of the plain loop."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_from_scratch as zero
from models import OddModel
from oracle import assert_same_bits
from ranks import on_ranks
from roundings import SMOOTH_EPS, assert_all_rounded_alike, of_gradient
from shardwise import fully_shard, shard
from trainer import (
    HALVES,
    SPREAD,
    adamw,
    adamw_fused,
    assert_same_grads,
    full_parameters,
    make_steps,
    token_batch,
    train,
    train_plain,
)

# The last sum is over 3 ranks of 2 x 8 tokens; the loss is a sum over 256 bytes.
ODD_ROUNDINGS = of_gradient(*(7, 28) * 3, 7, 256, over=3 * 2 * 8)


@pytest.mark.kernels
@on_ranks(3)
def test_the_fused_optimizer_differs_by_rounding_where_slices_are_odd(world_size):
    """The fused kernel's scalar tail rounds differently from its vector body."""
    steps = make_steps(world_size, 3, make_batch=token_batch)
    fused = partial(adamw_fused, eps=SMOOTH_EPS)
    torch.manual_seed(0)
    truth = train_plain(OddModel(), steps, zero.next_byte_loss, fused)
    for options in HALVES[0]:
        torch.manual_seed(0)
        trained = train(OddModel(), steps, zero.next_byte_loss, fused, **options)
        assert_same_grads(trained.grads[0], truth.grads[0])  # nothing was fused before them
        for ours, theirs in zip(trained.grads, truth.grads, strict=True):
            assert_all_rounded_alike(ours, theirs, ODD_ROUNDINGS)
        assert_all_rounded_alike(trained.parameters, truth.parameters, ODD_ROUNDINGS)


@pytest.mark.kernels
@on_ranks(2)
def test_two_ranks_have_the_bits_of_distributed_data_parallel(rank, world_size):
    steps = make_steps(world_size, 4, make_batch=token_batch)
    torch.manual_seed(0)
    model = OddModel()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    losses = []
    for ((*batches,),) in steps:
        loss = zero.next_byte_loss(wrapped, batches[rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    expected = full_parameters(model)
    del expected["never_used"]  # DistributedDataParallel gives it zeros, so its weight decays
    for options in SPREAD:
        torch.manual_seed(0)
        trained = train(OddModel(), steps, zero.next_byte_loss, **options)
        assert trained.losses == losses
        assert_same_bits({n: trained.parameters[n] for n in expected}, expected)


def steps_with_buffers(model, rank, sends):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        for buffer in model.buffers() if sends else ():
            dist.broadcast(buffer, 0)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): each for name, each in model.named_buffers()}


@on_ranks(2)
def test_buffers_are_each_ranks_own_and_those_of_ddp_where_the_loop_sends_them(rank):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    ddp = make()
    expected = steps_with_buffers(DistributedDataParallel(ddp), rank, sends=False)
    for shards in (shard, fully_shard):
        for sends in (True, False):
            model = shards(make())
            found = steps_with_buffers(model, rank, sends)
            alike = all(torch.equal(found[name], expected[name]) for name in expected)
            assert alike == (sends or rank == 0)
            ours = {name: p.full_tensor() for name, p in model.named_parameters()}
            assert_same_bits(ours, dict(ddp.named_parameters()))
