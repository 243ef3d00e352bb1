"""An optimizer that was built before ``shard()``: passed, it trains on; not passed, it says so."""

import copy
import warnings

import pytest
import torch
from torch import nn

from models import OddModel
from ranks import on_ranks
from roundings import SMOOTH_EPS, assert_rounded_alike, of_gradient
from shardwise import ShardTensor, fully_shard, shard
from shardwise.errors import ConfigError, StateError

STEPS = 2
# Of four steps. A rate, or rate / eps, of 10 at most makes a step of a gradient.
ROUNDINGS = 10 * 2 * STEPS * of_gradient(*(7, 28) * 3, 7, over=2 * 5 * 7)
smooth = {"eps": SMOOTH_EPS}  # Note [Losses after steps of Adam] in roundings.py


def make_model():
    torch.manual_seed(3)
    model = OddModel().double()
    model.blocks[1].requires_grad_(False)
    return model


def tokens(step):
    return torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(step))


def groups_of(model):
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if p.ndim >= 2]
    others = [(n, p) for n, p in named if p.ndim < 2]
    return [{"params": others, "lr": 0.003}, {"params": matrices, "weight_decay": 0.1}]


def train(model, optimizer, first):
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        model(tokens(step)).square().mean().backward()
        optimizer.step()


MAKE = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, **smooth),
    "adamw one by one": lambda p: torch.optim.AdamW(
        p, lr=0.01, foreach=False, amsgrad=True, **smooth
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, **smooth),  # has its state from the start
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, **smooth),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.kernels
@on_ranks(1, 2, 3)
def test_an_optimizer_that_is_passed_to_shard_goes_on_as_if_it_had_been_built_afterwards(
    world_size,
):
    for number, (label, make) in enumerate(MAKE.items()):
        one_way = (number + world_size // 2) % 2 == 1
        for trained_before in (False, True) if world_size == 2 else (one_way,):
            stage, layout = (number + trained_before) % 4, ("rows", "flat")[number % 2]
            what = f"{label}, stage {stage}, {layout}, trained before: {trained_before}"
            plain, model = make_model(), make_model()
            optimizers = [make(groups_of(m)) for m in (plain, model)]
            if trained_before:
                for one, optimizer in zip((plain, model), optimizers, strict=True):
                    train(one, optimizer, 0)
            ours = optimizers[1]
            lists = [group["params"] for group in ours.param_groups]
            names = [group["param_names"] for group in ours.param_groups]
            shard(model, stage=stage, layout=layout, optimizer=ours)
            assert [group["params"] for group in ours.param_groups] == lists
            by_name = dict(model.named_parameters())
            for held, of_group in zip(lists, names, strict=True):
                assert [id(p) for p in held] == [id(by_name[n]) for n in of_group], what
            assert all(isinstance(p, ShardTensor) for p in ours.state), what
            for one, optimizer in zip((plain, model), optimizers, strict=True):
                train(one, optimizer, STEPS)
            found = {n: p.full_tensor() for n, p in by_name.items()}
            for name, value in plain.named_parameters():
                if world_size < 3:
                    assert torch.equal(found[name], value), f"{what}: {name}"
                else:  # the mean over three ranks of equal gradients rounds
                    assert_rounded_alike(found[name], value, ROUNDINGS, f"{what}: {name}")


@on_ranks(2)
def test_optimizers_of_meta_models_and_of_ranks_that_differ_get_what_rank_0_has(rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    originals = [o.param_groups[0]["params"][0] for o in optimizers]
    shard(model, optimizer=optimizers)
    held = [o.param_groups[0]["params"][0] for o in optimizers]
    assert [id(p) for p in held] == [id(p) for p in model.parameters()]
    assert all(p.is_meta for p in originals)

    torch.manual_seed(rank)  # every rank trained for itself: rank 0's state counts, as its values
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    first = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    for tensor in first:
        torch.distributed.broadcast(tensor, 0)
    torch.manual_seed(rank)
    expected = [tensor.clone() for tensor in first]
    for tensor in (optimizer.state[p]["momentum_buffer"] for p in model.parameters()):
        tensor.add_(rank)
    shard(model, optimizer=optimizer, precision="bf16", stage=2)
    for param, value in zip(model.parameters(), expected, strict=True):
        state = optimizer.state[param]["momentum_buffer"]
        assert isinstance(state, ShardTensor) and state.dtype == torch.float32
        assert torch.equal(state.full_tensor(), value)


@on_ranks(1, 2)
def test_what_cannot_be_adopted_is_refused_before_anything_is_changed(rank, world_size):
    model = nn.Linear(3, 4)
    before = list(model.parameters())

    def refused(match, optimizer):
        with pytest.raises(ConfigError, match=match):
            shard(model, optimizer=optimizer)
        assert list(map(id, model.parameters())) == list(map(id, before))

    refused("expected a torch optimizer", "adam")
    refused("expected a torch optimizer", [torch.optim.SGD(before, 0.1), None])
    stranger = nn.Parameter(torch.ones(5))
    refused(r"parameter 2 of group 0 \(5,\) of this SGD", torch.optim.SGD([*before, stranger], 0.1))
    other_model = torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1)
    refused("not one of the model's", other_model)
    held = torch.optim.SGD(before, 0.1)
    held.state[before[0]]["codes"] = torch.zeros(4, 3, dtype=torch.uint8)
    refused(r"state 'codes' of 'weight' .* quantised", held)
    if world_size > 1:
        alike = torch.optim.SGD(before if rank == 0 else before[:1], 0.1)
        refused("the ranks differ: rank 1 has", alike)
        refused("the ranks differ|rank 1", alike if rank == 0 else other_model)
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    before = list(model.parameters())
    refused("state 'sum' of 'weight' is on the meta device", torch.optim.Adagrad(before))


@on_ranks(1, 2)
def test_an_optimizer_built_before_sharding_is_told_so_at_its_first_step():
    for way, by in (
        (lambda m: shard(m, stage=0), "shard()"),
        (lambda m: shard(m, stage=3), "shard()"),
        (fully_shard, "fully_shard()"),
    ):
        model = nn.Linear(3, 4)
        too_early = torch.optim.AdamW(model.parameters())
        way(model)
        model(torch.ones(2, 3)).sum().backward()
        for call in (too_early.step, too_early.zero_grad):
            with pytest.raises(StateError, match=r"AdamW was built before.*'weight'") as told:
                call()
            assert f"before {by}" in str(told.value)
            assert ("optimizer=optimizer" in str(told.value)) == (by == "shard()")
        after = torch.optim.AdamW(model.parameters())  # and all is well with one built afterwards
        after.step()
        after.zero_grad()

    model = nn.Linear(3, 4)
    kept = list(model.parameters())
    values = [p.detach().clone() for p in kept]
    shard(model, optimizer=torch.optim.SGD(kept, 0.1))
    assert all(torch.equal(p, v) for p, v in zip(kept, values, strict=True))  # they may be read
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        nn.utils.clip_grad_norm_(kept, 1.0)
    assert {str(w.message).split("'")[1] for w in heard} == {"weight", "bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(kept[0])
        assert type(copied) is nn.Parameter and copied.grad is None
