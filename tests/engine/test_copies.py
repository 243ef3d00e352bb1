"""Copies of a sharded model: deepcopy and AveragedModel, and the model's own few names."""

import copy
import pickle
import tempfile

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import shardwise
from models import Block, OddModel, Stack
from oracle import assert_same_bits, average
from ranks import on_ranks
from shardwise import Offload, ShardTensor, gathered, shard
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import StateError
from trainer import (
    SPREAD,
    adamw,
    assert_same_grads,
    assert_same_run,
    full_grads,
    full_parameters,
    make_steps,
    mean_square,
    train_plain,
    train_sharded,
)


class Normed(Stack):
    """With buffers, a frozen parameter, a list of parameters and a hook of the user's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.blocks[0].up.weight.requires_grad_(False)
        self.watched = []
        self.calls = []
        self.blocks[1].register_forward_hook(lambda *_: self.calls.append("seen"))

    def forward(self, x):
        return super().forward(self.norm(x))


def make_normed():
    torch.manual_seed(0)
    return Normed()


@on_ranks(1, 3)
def test_a_copy_is_a_sharded_model_of_its_own(rank):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for options in SPREAD:
        model = shard(make_normed(), **options)
        model.watched = [model.head.weight]  # another place that refers to a parameter
        mean_square(model, batch).backward()
        copied = copy.deepcopy(model)
        assert type(copied) is type(model) and isinstance(copied, Normed)
        assert engine_of(copied) is not engine_of(model)
        params = dict(copied.named_parameters())
        assert all(isinstance(p, ShardTensor) and p.grad is None for p in params.values())
        assert not params["blocks.0.up.weight"].requires_grad
        assert copied.watched[0] is copied.head.weight
        before = full_parameters(model)
        assert_same_bits(full_parameters(copied), before)
        assert stats(copied).param_shard_bytes == stats(model).param_shard_bytes
        # Each trains, and the other one does not move.
        optimizer = adamw(copied.parameters())
        mean_square(copied, batch).backward()
        assert_same_grads(full_grads(copied), full_grads(model))
        optimizer.step()
        assert_same_bits(full_parameters(model), before)
        moved = full_parameters(copied)
        assert not torch.equal(moved["head.weight"], before["head.weight"])
        adamw(model.parameters()).step()
        assert_same_bits(full_parameters(model), moved)
        again = copy.deepcopy(copied)
        with torch.no_grad():
            copied.eval(), again.eval()
            assert torch.equal(copied(batch), again(batch))
        del copied, again
        mean_square(model, batch).backward()  # what the copies' end takes along is theirs


@on_ranks(1, 2)
def test_a_copy_takes_the_steps_of_the_oracle(world_size):
    steps = make_steps(world_size, 3)
    torch.manual_seed(0)
    truth = train_plain(Stack(), steps, mean_square)
    with tempfile.TemporaryDirectory() as folder:
        files = dict.fromkeys(("params", "grads", "optimizer"), f"nvme:{folder}")
        for options in (*SPREAD, {"stage": 3, "offload": Offload(**files)}):
            torch.manual_seed(0)
            copied = copy.deepcopy(shard(Stack(), **options))
            assert_same_run(train_sharded(copied, steps, mean_square), truth)
        del copied
    tokens = torch.arange(6).view(2, 3) % 5
    model = shard(OddModel(), stage=3)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight
    for each in (model, copied):
        each(tokens).square().mean().backward()
    assert_same_grads(full_grads(copied), full_grads(model))


def average_alone(world_size, **options):
    model = make_normed()
    averaged = AveragedModel(model, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for (by_rank,) in make_steps(world_size, 4):
        grads = []
        for batch in by_rank:
            model.zero_grad()
            mean_square(model.eval(), batch).backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
        for name, grad in average(grads).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    return averaged


@on_ranks(1, 3)
def test_an_averaged_model_is_that_of_one_process(rank, world_size, tmp_path):
    variants = [
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
        {"avg_fn": lambda mean, value, num: mean + (value - mean) / (num + 1)},
    ]
    for number, variant in enumerate(variants):
        truth = average_alone(world_size, **variant)
        for stage in (number, 3):
            model = shard(make_normed(), stage=stage)
            averaged = AveragedModel(model, **variant)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for (by_rank,) in make_steps(world_size, 4):
                mean_square(model.eval(), by_rank[rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
                averaged.update_parameters(model)
            found = full_parameters(averaged)
            assert_same_bits(found, {n: p.detach() for n, p in truth.named_parameters()})
            loader = [by_rank[0] for (by_rank,) in make_steps(1, 3)]
            for each in (truth, averaged):
                update_bn(loader, each)
            assert_same_bits(dict(averaged.named_buffers()), dict(truth.named_buffers()))
            with torch.no_grad():
                out, expected = (each.eval()(loader[0]) for each in (averaged, truth))
            assert torch.equal(out, expected)
            with gathered(averaged.module):
                plain = copy.deepcopy(averaged.module)
            assert torch.equal(plain(loader[0]), out)
            shardwise.save(tmp_path / f"{number} {stage}", averaged.module)
            other = shard(make_normed(), stage=1)
            shardwise.load(tmp_path / f"{number} {stage}", other)
            assert_same_bits(full_parameters(other), full_parameters(averaged.module))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_copy_inside_gathered_is_plain(stage):
    plain = make_normed()
    model = shard(make_normed(), stage=stage)
    batch = torch.ones(3, 8)
    with gathered(model):
        copied = copy.deepcopy(model)
    assert type(copied) is Normed and not hasattr(copied, "no_sync")
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    assert len(copied.blocks[1]._forward_hooks) == 1  # the user's
    assert_same_bits(copied.state_dict(), plain.state_dict())
    pickle.dumps(copied.state_dict())
    for each in (copied, plain):
        each(batch).sum().backward()
    assert_same_grads(full_grads(copied), full_grads(plain))
    resharded = shard(copied, stage=3)  # and may be sharded like any other
    assert_same_bits(full_parameters(resharded), full_parameters(model))


class Refusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        copy.deepcopy(self)
        return self.linear(x)


class Wrapping(nn.Module):
    """Has a real `module` and a `no_sync` of its own."""

    def __init__(self):
        super().__init__()
        self.module = Block()

    def no_sync(self):
        return "mine"

    def forward(self, x):
        return self.module(x)


@on_ranks(1)
def test_names_that_people_look_for_say_what_to_do():
    model = shard(make_normed(), stage=1)
    assert not hasattr(model, "module") and not hasattr(model, "join_hook")
    assert getattr(model, "module", None) is None
    with pytest.raises(AttributeError, match=r"no attribute 'module'.*drop `\.module`"):
        _ = model.module
    with pytest.raises(AttributeError, match=r"shardwise\.parallel\.join\(model, loader\)"):
        torch.distributed.algorithms.Join([model])
    with pytest.raises(AttributeError, match=r"^'Normed' object has no attribute 'other'$"):
        _ = model.other
    fresh = type(model)()  # a plain one, of the same class
    with pytest.raises(AttributeError, match=r"^'Normed' object has no attribute 'module'$"):
        _ = fresh.module
    assert torch.equal(copy.deepcopy(fresh).head.weight, fresh.head.weight)
    assert type(model).__name__ == "Normed" and repr(model).startswith("Normed(")
    assert type(make_normed()) is Normed, "the user's class stays"
    with pytest.raises(StateError, match="pickling a sharded model"):
        pickle.dumps(model)
    wrapping = shard(Wrapping(), stage=3)
    assert isinstance(wrapping.module, Block) and wrapping.no_sync() == "mine"
    inside = shard(Refusing(), stage=3)
    with pytest.raises(StateError, match="inside a forward or backward pass"):
        inside(torch.ones(1, 2))
