"""`check_gradients` finds gradients of a wrong scale, says why, and is content with right ones."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise
from ranks import on_ranks
from shardwise.check.one_process import GradientCheck, GradientReport
from shardwise.errors import ConfigError, GradientError
from shardwise.interop.fsdp2 import fully_shard

WIDTH, ROWS = 12, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.layers(x)


def parallel(model, axes):
    for block in model.layers:
        parallelize_module(block, axes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def said_of(**arguments):
    with pytest.raises(GradientError) as caught:
        shardwise.check.gradients(Net, **arguments)
    return str(caught.value)


class Odd(nn.Module):
    """Tied weights, names like those of wrappers, and a tensor of integers that nobody trains."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(WIDTH, WIDTH)
        self.submodule = nn.Linear(WIDTH, WIDTH)
        self.submodule.weight = self.module.weight
        self.codes = nn.Parameter(torch.ones(WIDTH, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return self.submodule(torch.tanh(self.module(x))) * self.codes


def odd_on_meta():
    with torch.device("meta"):
        model = Odd()
    del model.codes
    model.codes = 1
    return model


@on_ranks(1, 3)
def test_right_gradients_pass_whatever_the_composition(rank, num_ranks):
    torch.manual_seed(rank)  # weights differ from call to call and rank to rank, which is no matter
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    report = shardwise.check.gradients(Net, batch)
    assert not report.wrong
    assert len(report.checks) == 8
    shardwise.check.gradients(Net, (batch,), compose=lambda m: fully_shard(m))
    assert len(shardwise.check.gradients(Odd, batch).checks) == 3
    shardwise.check.gradients(Odd, batch, compose=nn.parallel.DistributedDataParallel)
    assert len(shardwise.check.gradients(odd_on_meta, batch).checks) == 3
    shardwise.check.gradients(Net, batch, micro_batches=2)
    shardwise.check.gradients(
        Net, batch, compose=lambda m: shardwise.shard(m, stage=1, precision="bf16")
    )
    if num_ranks > 1:
        axes = shardwise.Axes(tp=num_ranks)
        shardwise.check.gradients(
            Net, batch, axes, compose=lambda m: shardwise.shard(parallel(m, axes), mesh=axes)
        )
    with pytest.raises(ConfigError, match=r"\(1, 12\) has no rows that"):
        shardwise.check.gradients(Net, batch[:1], micro_batches=2)


def wrong_ones_are_explained(rank, num_ranks):
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    def summed(model):
        sharded = shardwise.shard(model)
        sharded.set_gradient_divide_factor(1.0)
        return sharded

    said = said_of(batch=batch, compose=summed)
    assert said.startswith("8 of 8 gradients are wrong:"), said
    assert "layers.*.up.weight (2 parameters): the gradient is 4 times too large: 4 is" in said
    assert "4 is data-parallel ranks: summed and not divided" in said

    axes = shardwise.Axes(tp=2)

    def twice(model):
        """Give a norm between two layers whole gradients where partial ones are expected."""
        sharded = shardwise.shard(parallel(model, axes), mesh=axes, units=Block)
        sharded.layers[0].set_gradient_divide_factor(1.0)
        return sharded

    said = said_of(batch=batch, mesh=axes, compose=twice)
    assert said.startswith("4 of 8"), said
    assert "layers.0.up.bias: the gradient is 2 times too large: 2 is dp_shard; or 2 is tp" in said
    assert "layers.1" not in said

    def not_divided(model, rows):
        return model(rows).square().mean() * (3 if len(rows) < ROWS else 1)

    said = said_of(batch=batch, loss=not_divided, micro_batches=3)
    assert "3 times too large: 3 is micro-batches: the loss of each is to be divided" in said

    first = batch[: ROWS // num_ranks]
    said = said_of(batch=batch, local_batch=lambda _: first)
    assert "is no multiple of the right one: a rank's batch is left out or counted twice" in said

    def frozen(model):
        model.layers[1].up.bias.requires_grad_(False)
        return shardwise.shard(model)

    said = said_of(batch=batch, compose=frozen)
    assert said.splitlines()[1:] == [
        "layers.1.up.bias: there is no gradient; in one process there is"
    ]

    def times(factor):
        return lambda model, rows: (
            model(rows).square().mean() * (factor if len(rows) < ROWS else 1.0)
        )

    said = said_of(batch=batch, loss=times(0.0))
    assert "up.bias (2 parameters): the gradient is zero; in one process it is not" in said
    said = said_of(batch=batch, loss=times(-2.0))
    assert "the gradient is -2 times the right one: its sign is wrong" in said

    def not_a_number(model, rows):
        poison = float("nan") if len(rows) < ROWS and rank == 0 else 1.0
        return model(rows).square().mean() * poison

    assert "elements that are not finite" in said_of(batch=batch, loss=not_a_number)


def expert_scales_are_explained(rank, num_ranks):
    """torch's rule divides by a parameter's own mesh, though gradients of all ranks are in it."""
    axes = shardwise.Axes(ep=2)
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    def by_own_mesh(model):
        sharded = shardwise.shard(model, mesh=axes, units=Block)
        efsdp = axes["efsdp"].size()
        sharded.layers[1].set_gradient_divide_factor(float(efsdp))
        return sharded

    said = said_of(batch=batch, mesh=axes, compose=by_own_mesh)
    assert "layers.1.down.weight: the gradient is 2 times too large" in said
    assert "2 is ep" in said
    assert "divided by efsdp = 2 where there are 4 data-parallel ranks" in said


@on_ranks(4)
def test_wrong_gradients_are_found_and_their_factors_explained(rank, num_ranks):
    wrong_ones_are_explained(rank, num_ranks)
    expert_scales_are_explained(rank, num_ranks)


def test_powers_products_and_plain_numbers_are_told_apart():
    degrees = {"dp_shard": 3, "tp": 5, "micro-batches": 1}

    def finding(scale):
        return str(GradientReport((GradientCheck("w", scale),), 1e-3, degrees)).splitlines()[1]

    assert finding(8.0) == "w: the gradient is 8 times too large: 8 is 2^3: doubled 3 times"
    assert finding(1 / 15) == "w: the gradient is 15 times too small: 15 is dp_shard x tp"
    assert finding(1.1) == "w: the gradient is 1.1 times too large"
    assert "allowed: 1.0e-03" in str(GradientReport((GradientCheck("w"),), 1e-3, degrees))


class Attention(nn.Module):
    """The gradient of the key's bias is zero but for rounding: softmax takes no notice of it."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = x.view(len(x), -1, WIDTH)
        scores = self.query(rows) @ self.key(rows).transpose(1, 2)
        return torch.softmax(scores, dim=-1) @ rows


def said_of_attention(batch, loss):
    with pytest.raises(GradientError) as caught:
        shardwise.check.gradients(Attention, batch, loss=loss)
    return str(caught.value)


@on_ranks(3)
def test_what_is_rounding_alone_is_no_alarm_and_ranks_refuse_together(rank):
    batch = torch.randn(ROWS, 4 * WIDTH, generator=torch.Generator().manual_seed(1))
    report = shardwise.check.gradients(Attention, batch)
    (bias,) = (check for check in report.checks if check.name == "key.bias")
    assert bias.is_rounding

    def halves(model, rows):
        found = model(rows).square().mean()
        return found * (2 if len(rows) < ROWS else 1)

    assert "key.weight: the gradient is 2 times too large" in said_of_attention(batch, halves)
    rows = {"local_batch": lambda whole: whole[: 3 if rank else 4], "micro_batches": 2}
    with pytest.raises(ConfigError, match=r"another rank cannot cut|\(3, 48\) has no rows"):
        shardwise.check.gradients(Attention, batch, **rows)
