"""Calls of what the root merely wraps are calls of the model, with its traffic and its bits."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import Stack
from oracle import assert_same_bits
from ranks import on_ranks
from shardwise import shard
from shardwise.debug import stats
from shardwise.engine.hooks import wrapped_by
from trainer import adamw, assert_same_grads, events_of, full_grads, full_parameters

STAGES = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "precision": "bf16"}]


class Wrapper(nn.Module):
    """Holds a model and nothing else, as libraries do around a user's."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


def wrapped():
    return Wrapper(Wrapper(Stack()))


def trace(model, call, options, rank):
    """Train, then evaluate; return what was sent, what was held and computed, and the model."""
    shard(model, **options)
    events, found = events_of(model), []
    optimizer = adamw(model.parameters())
    random = torch.Generator().manual_seed(rank)
    for _ in range(3):
        y = call(model, torch.randn(3, 8, generator=random, requires_grad=True))
        found.append(stats(model).param_full_bytes)
        y.square().mean().backward()
        found += [stats(model).param_full_bytes, y.detach()]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(call(model, torch.ones(3, 8)))
    found.append(stats(model).param_full_bytes)
    sent = [(kind, num_bytes) for kind, _, num_bytes in events]
    return sent, found, model


@on_ranks(2)
def test_calls_of_any_wrapped_module_send_hold_and_compute_what_the_model_alone_does(rank):
    for options in STAGES:
        torch.manual_seed(0)
        sent, found, plain = trace(Stack(), lambda m, x: m(x), options, rank)
        for call in (
            lambda m, x: m(x),
            lambda m, x: m.net(x),
            lambda m, x: m.net.net(x),
        ):
            torch.manual_seed(0)
            ours, values, model = trace(wrapped(), call, options, rank)
            assert ours == sent
            assert len(values) == len(found)
            assert all(
                torch.equal(torch.as_tensor(a), torch.as_tensor(b))
                for a, b in zip(values, found, strict=True)
            )
            assert_same_bits(
                {k.removeprefix("net.net."): v for k, v in full_parameters(model).items()},
                full_parameters(plain),
            )


@on_ranks(2)
def test_checkpointing_a_wrapped_module_gives_the_same_gradients(rank):
    """Recompute from outside the wrapper, from inside, and on the way past it."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    for stage in (1, 3):  # where full parameters stay, and where they are freed
        truth = None
        for reentrant in (False, True):
            again = partial(checkpoint, use_reentrant=reentrant)
            calls = [
                lambda m, x: m(x),
                lambda m, x: again(m, x),  # noqa: B023  # called in this turn
                lambda m, x: again(m.net, x),  # noqa: B023
                lambda m, x: again(m.net.net, x),  # noqa: B023
            ]
            for call in calls:
                torch.manual_seed(0)
                model = shard(wrapped(), stage=stage)
                call(model, x).square().mean().backward()
                grads = full_grads(model)
                truth = truth or grads
                assert_same_grads(grads, truth)


class Failing(Stack):
    """Raises once, in the middle of a forward pass."""

    fails = True

    def forward(self, x):
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        return super().forward(x)


@on_ranks(2)
def test_a_call_that_raised_leaves_the_way_in_open():
    torch.manual_seed(0)
    expected = Stack()(torch.ones(3, 8))
    torch.manual_seed(0)
    model = shard(Wrapper(Failing()), stage=3)
    for call in (model.net, model):
        model.net.fails = True
        try:
            call(torch.ones(3, 8))
        except ZeroDivisionError:
            assert torch.equal(model.net(torch.ones(3, 8)), expected)
            assert torch.equal(model(torch.ones(3, 8)), expected)
            continue
        raise AssertionError("it was to raise")


def test_only_what_is_merely_wrapped_is_an_entrance():
    inner = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    outer = nn.Sequential(nn.Identity(), nn.Sequential(inner, nn.Dropout()))
    assert wrapped_by(outer, ()) == [outer[1], inner]
    assert wrapped_by(outer, {id(inner)}) == [outer[1]]  # it is a unit, with hooks of its own
    outer.scale = nn.Parameter(torch.ones(1))
    assert wrapped_by(outer, ()) == []
