"""Optimizers and schedulers that train nothing, or parameters that no rank sums, are told."""

import warnings

import pytest
import torch
from torch import nn

from ranks import on_ranks
from shardwise import fully_shard, gathered, shard
from shardwise.errors import StateError


def backward(model):
    model(torch.ones(2, 4)).square().sum().backward()


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@on_ranks(1, 2)
def test_an_optimizer_of_full_parameters_raises_in_its_first_step():
    for stage in (0, 3):
        model = shard(stack(), stage=stage)
        with gathered(model):
            inside = torch.optim.SGD(model.parameters(), lr=1.0)
        model.unshard()
        unsharded = torch.optim.SGD(model.parameters(), lr=1.0)
        model.reshard()
        backward(model)
        for optimizer in (inside, unsharded):
            with pytest.raises(StateError, match="its steps would change nothing"):
                optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model = fully_shard(stack())
    model.unshard()
    unsharded = torch.optim.SGD(model.parameters(), lr=1.0)
    model.reshard()
    backward(model)
    with pytest.raises(StateError, match="its steps would change nothing"):
        unsharded.step()


@on_ranks(1, 2)
def test_an_optimizer_of_copies_or_data_is_told():
    model = shard(stack(), stage=3)
    backward(model)
    for held in (
        [p.data for p in model.parameters()],
        [p.detach().clone() for p in model.parameters()],
    ):
        with pytest.warns(UserWarning, match=r"holds a copy or the \.data"):
            torch.optim.SGD(held, lr=0.1).step()


@on_ranks(2)
def test_a_scheduler_of_an_optimizer_from_before_shard_is_told():
    model = stack()
    before = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(before, lambda step: 0.5)
    shard(model, stage=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model)
    with pytest.warns(UserWarning, match=r"LambdaLR changes the rates of a SGD"):
        optimizer.step()
    del scheduler, before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(model.parameters(), lr=1.0).step()


class Whole(nn.Module):
    """A model of which only the body is sharded."""

    def __init__(self):
        super().__init__()
        self.body = stack()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


@on_ranks(2)
def test_plain_trained_parameters_beside_sharded_ones_are_told_once_by_name():
    for stage in (1, 3):
        model = Whole()
        shard(model.body, stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        with pytest.warns(UserWarning) as told:
            optimizer.step()
            optimizer.step()
        (text,) = [str(each.message) for each in told]
        assert "'norm.weight', 'norm.bias', 'head.weight' and 1 more" in text
        assert "'norm.running_mean'" in text and "parallel.clip_grad_norm_" in text
    model = shard(stack(), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    optimizer.add_param_group({"params": [plain]})
    backward(model)
    with pytest.warns(UserWarning, match=r"\(3,\). No rank sums"):
        optimizer.step()
