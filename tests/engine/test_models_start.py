"""Models built on the meta device get the same values at any number of ranks, stage and layout."""

import pytest
import torch
from torch import nn

from models import Stack, stack_roundings
from oracle import assert_same_bits
from ranks import on_ranks, run_ranks
from roundings import assert_all_rounded_alike, assert_rounded_alike
from shardwise import fully_shard, gathered, shard
from shardwise.config import Units
from shardwise.errors import ConfigError, ShardwiseError
from trainer import LAYOUTS, full_grads, full_parameters, mean_square, sgd, sharded_by_block


class Start(Stack):
    """Tied weights, buffers, layers with and without bias, odd sizes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.table = nn.Embedding(7, 5)
        self.blocks[2].down.weight = self.blocks[0].down.weight

    def forward(self, x):
        return self.norm(super().forward(x)) + self.table.weight.sum(0)


def materialised(rank, world_size):
    """Check that all settings give the same values, and return them."""
    found = {}
    for options in LAYOUTS:
        torch.manual_seed(5 if rank == 0 else 100 + rank)  # rank 0's seed is the one that counts
        with torch.device("meta"):
            model = Start()
        shard(model, **options)
        assert model.blocks[2].down.weight is model.blocks[0].down.weight
        values = full_parameters(model)
        assert torch.equal(model.norm.running_var, torch.ones(5))
        if found:
            assert_same_bits(values, found)
        found = values
    return found


def test_a_meta_start_has_the_same_values_everywhere():
    results = [result for world_size in (1, 2, 3) for result in run_ranks(materialised, world_size)]
    for result in results[1:]:
        assert_same_bits(result, results[0])
    weight = results[0]["blocks.0.up.weight"]
    assert 0 < weight.std() < 1
    assert not torch.equal(weight, results[0]["blocks.1.up.weight"])
    assert torch.equal(results[0]["norm.weight"], torch.ones(5))


def train_from_meta(rank, world_size):
    with torch.device("meta"):
        model = Stack()
    shard(model, stage=3)
    optimizer = sgd(model.parameters())  # Note [Losses after steps of Adam] in roundings.py
    losses, grads = [], []
    for _ in range(4):
        loss = mean_square(model, torch.linspace(-1, 1, 24).view(3, 8))
        loss.backward()
        losses.append(loss.item())
        grads.append(full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def test_a_model_from_meta_trains_alike_at_every_world_size():
    one, three = run_ranks(train_from_meta, 1)[0], run_ranks(train_from_meta, 3)[0]
    assert one[0][0] == three[0][0]
    assert one[0][-1] < one[0][0]
    roundings = stack_roundings(rows=3) + 3  # a mean of three equal gradients may round
    for alone, together in zip(one[1], three[1], strict=True):
        assert_all_rounded_alike(together, alone, roundings)
    for alone, together in zip(one[0], three[0], strict=True):
        assert_rounded_alike(together, alone, roundings)


def fill_by_hand(module):
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.25)


class Bare(nn.Module):
    """Has a parameter of its own and no reset_parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x @ self.weight)


@on_ranks(2)
def test_init_fills_the_modules_instead_of_reset_parameters():
    with torch.device("meta"):
        model = Bare()
    shard(model, stage=3, units=Units(init=fill_by_hand))
    values = full_parameters(model)
    assert all(torch.equal(v, torch.full_like(v, 0.25)) for v in values.values())


class Scaled(nn.Module):
    """Parameters and buffers of several dtypes, all of which `reset_parameters` may write."""

    leaves: tuple[str, ...] = ()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 3))
        self.register_buffer("scale", torch.empty(3))
        self.register_buffer("mask", torch.empty(2, 3, dtype=torch.bool), persistent=False)
        self.register_buffer("ids", torch.empty(5, dtype=torch.int64))
        self.register_buffer("codes", torch.empty(4, dtype=torch.uint8))

    @torch.no_grad()
    def reset_parameters(self):
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if name not in self.leaves:
                tensor.fill_(1)
            elif name == "weight":
                tensor[:6].fill_(1)  # all but a row

    def forward(self, x):
        return (x @ self.weight) * self.scale


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x):
        return sum(block(x) for block in self.blocks)


def on_meta(leaves):
    with torch.device("meta"):
        model = Scales()
    model.blocks[1].leaves = leaves
    return model


ALL = ("weight", "scale", "mask", "ids", "codes")


def emptied(leaves):
    model = on_meta(leaves)
    sharded_by_block(model).to_empty(device="cpu")
    for block in model.blocks:
        block.reset_parameters()
    return model


@on_ranks(1, 3, fresh=True)
def test_what_init_leaves_unwritten_of_a_model_on_meta_is_refused_by_name(rank, world_size):
    """Leave elements unwritten on all ranks, and on the last rank alone."""
    names = ", ".join(f"'blocks.1.{name}'" for name in ALL)
    x = torch.ones(2, 7)
    assert torch.equal(shard(on_meta(()))(x), torch.full((2, 3), 14.0))
    with pytest.raises(ConfigError, match=f"model: {names} had no value"):
        shard(on_meta(ALL))
    with pytest.raises(ConfigError, match=r"'blocks.1.scale' and 3 more had no"):
        ones = Units(init=lambda m: [nn.init.ones_(p) for p in m.parameters(recurse=False)])
        shard(on_meta(()), units=ones)
    with pytest.raises(ConfigError, match=r"'blocks.1.scale' had no value"):
        shard(on_meta(("scale",) if rank == world_size - 1 else ()))
    assert torch.equal(emptied(())(x), torch.full((2, 3), 14.0))
    model = emptied(ALL)
    with pytest.raises(ConfigError, match=f"rank {rank}: nothing has written {names} since"):
        model(x)
    model.blocks[1].leaves = ()
    model.blocks[1].reset_parameters()
    assert torch.equal(model(x), torch.full((2, 3), 14.0))
    last = world_size - 1
    with pytest.raises(ShardwiseError, match=f"rank {last}: nothing has written 'blocks.1.ids'"):
        emptied(("ids",) if rank == last else ())(x)


@on_ranks(2)
def test_modules_that_are_live_already_keep_rank_zeros_values(rank):
    for stage in range(4):
        with torch.device("meta"):
            model = Stack()
        model.head = nn.Linear(8, 5)
        nn.init.constant_(model.head.weight, float(rank + 1))
        shard(model, stage=stage)
        values = full_parameters(model)
        assert torch.equal(values["head.weight"], torch.ones(5, 8))
        assert values["blocks.0.up.weight"].std() > 0


class Float8(nn.Module):
    """A frozen weight in float8, and another dtype that gloo does not know."""

    def __init__(self, rank):
        super().__init__()
        values = torch.full((5, 3), rank + 1.0).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.full((3,), rank, dtype=torch.uint16))

    def forward(self, x):
        return x @ (self.weight.float() * self.scale)


@on_ranks(1, 3)
def test_float8_parameters_have_rank_zeros_values(rank):
    for options in LAYOUTS:
        model = shard(Float8(rank), **options)
        assert torch.equal(model(torch.ones(1, 5)), torch.full((1, 3), 5.0))
        whole = model.weight.full_tensor()
        assert whole.dtype is torch.float8_e4m3fn and whole.float().unique().tolist() == [1.0]
        assert model.mask.tolist() == [0, 0, 0]


@on_ranks(1, 3)
def test_float8_parameters_of_fully_shard_run_and_are_read_inside_gathered(rank):
    model = fully_shard(Float8(rank=0))
    assert torch.equal(model(torch.ones(1, 5)), torch.full((1, 3), 5.0))
    with gathered(model):  # full_tensor() is torch's, which gloo does not know float8 for
        assert model.weight.dtype is torch.float8_e4m3fn
        assert model.weight.float().unique().tolist() == [1.0]
