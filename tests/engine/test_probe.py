"""Optimizers that read more than the parameter they step, draw, or call collectives."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from oracle import assert_same_bits
from ranks import on_ranks
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2 import fully_shard
from shardwise.step.probe import traits_of


class Stepped(torch.optim.Optimizer):
    """Gives `one` each parameter that has a gradient, after `all_of` has seen all of them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "scale": 1.0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            self.all_of(params, group)
            for p in params:
                self.one(p, self.state[p], group)

    def all_of(self, params, group):
        pass

    def one(self, p, state, group):
        p.add_(p.grad, alpha=-group["lr"])


class Whitened(Stepped):
    """Reads one whole matrix at a time."""

    def one(self, p, state, group):
        if p.ndim == 2:
            state["square"] = state.get("square", 0) + p.grad @ p.grad.T
            p.add_(state["square"] @ p.grad, alpha=-group["lr"])
        else:
            super().one(p, state, group)


class Normed(Stepped):
    """Divides by the norm of all gradients, as global clipping inside an optimizer does."""

    def all_of(self, params, group):
        norm = nn.utils.get_total_norm([p.grad for p in params])
        for p in params:
            p.grad.div_(norm)


class Counted(Stepped):
    """Learns one number from all parameters, as D-Adaptation does; it is used later."""

    def all_of(self, params, group):
        group["scale"] += sum(float(p.grad.square().sum()) for p in params)
        group["lr"] = 0.1 if self.num_steps < 3 else 0.1 / group["scale"]


class Noisy(Stepped):
    """Adds noise, as Langevin dynamics and Gravity do."""

    def one(self, p, state, group):
        super().one(p, state, group)
        p.add_(torch.randn_like(p), alpha=0.01)


class Dealt(Stepped):
    """Deals parameters to ranks and gathers the results, in the manner of Keller Jordan's Muon."""

    def all_of(self, params, group):
        for first in range(0, len(params), dist.get_world_size()):
            mine = first + dist.get_rank()
            if mine < len(params):
                params[mine].grad.mul_(2)
            value = torch.ones(4)
            dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size())], value)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 3))


def train(model, kind, num_steps=4):
    optimizer = kind(model.parameters())
    torch.manual_seed(7)
    for step in range(num_steps):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(model):
    params = model.named_parameters()
    return {n: getattr(p, "full_tensor", p.detach().clone)().detach() for n, p in params}


@on_ranks(1, 2, 3)
def test_optimizer_that_reads_all_parameters_steps_as_one_process_under_matrices(rank, num_ranks):
    for kind in (Whitened, Normed, Counted):
        plain, sharded = make_model(), shardwise.shard(make_model(), layout="matrices", units=[])
        train(plain, kind)
        optimizer = train(sharded, kind)
        for ours, theirs in zip(whole(sharded).values(), whole(plain).values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        if kind is Whitened:  # the state of a matrix is on its owner alone
            owned = [p for p in sharded.parameters() if p.ndim == 2 and p.to_local().numel()]
            assert sum(map(bool, optimizer.state.values())) == len(owned)


@on_ranks(2)
def test_draws_of_a_step_are_those_of_one_process_in_every_layout(rank, num_ranks):
    plain = make_model()
    train(plain, Noisy)
    for layout in ("rows", "flat", "matrices"):
        sharded = shardwise.shard(make_model(), layout=layout, units=[])
        train(sharded, Noisy)
        for ours, theirs in zip(whole(sharded).values(), whole(plain).values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_optimizer_that_calls_collectives_is_refused_before_any_change(rank, num_ranks):
    for layout in ("rows", "flat", "matrices", None):
        model = make_model()
        if layout is None:
            fully_shard(model)
        else:
            model = shardwise.shard(model, layout=layout, units=[])
        before = whole(model)
        optimizer = Dealt(model.parameters())
        model(torch.randn(4, 5)).square().mean().backward()
        with pytest.raises(ConfigError, match=r"Dealt.step\(\) calls a collective \(all_gather\)"):
            optimizer.step()
        assert_same_bits(whole(model), before)
        assert optimizer.num_steps == 0
        assert not optimizer.state


@on_ranks(2)
def test_probe_leaves_generators_options_and_attributes_as_they_were(rank, num_ranks):
    model = shardwise.shard(make_model(), layout="matrices", units=[])
    for kind in (Whitened, Counted, Noisy):
        optimizer = kind(model.parameters())
        optimizer.kept = [1]
        states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
        traits = traits_of(optimizer, (optimizer,), {})
        assert traits.is_separable is (kind is Whitened)
        assert states[0] == random.getstate()
        assert str(states[1]) == str(np.random.get_state(legacy=False))
        assert torch.equal(states[2], torch.get_rng_state())
        assert (optimizer.num_steps, optimizer.param_groups[0]["scale"]) == (0, 1.0)
        assert not optimizer.state
