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
from shardwise.errors import ConfigError, ShardError
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


class Restoring(torch.optim.Optimizer):
    """Puts a function in place of a method of the optimizer inside, as SAM of heavyball does.

    The function writes the parameters as they were before they were moved.
    """

    def __init__(self, params):
        params = list(params)
        self.inside = Loading(params)
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        moved = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
        for p, _ in moved:
            p.add_(p.grad)

        def load():
            for p, before in moved:
                p.grad.add_(p - before)
                p.copy_(before)

        self.inside.load = load
        self.inside.step()
        del self.inside.load


class Loading(Stepped):
    """Calls a method before it steps; the name of a collective makes it tried out."""

    def load(self):
        pass

    def all_of(self, params, group):
        self.load()
        if len(params) > 100:
            dist.all_gather([], params[0])


class Unknown(Stepped):
    """Names a collective, and has a table by parameter, which tensors of other sizes do not fit."""

    def __init__(self, params):
        super().__init__(params)
        self.sums = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]}

    def one(self, p, state, group):
        if group["scale"] != 1.0:
            dist.all_gather([], p.grad)
        self.sums[p] += p.grad
        p.add_(self.sums[p], alpha=-group["lr"])


class Thresholded(Stepped):
    """Scales a step by a number that it keeps, as RACS does."""

    def one(self, p, state, group):
        whole = p.grad.reshape(-1)
        norm = torch.linalg.vector_norm(whole)
        p.add_(p.grad, alpha=-group["lr"] * state.get("norm", 1.0))
        state["norm"] = norm


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


def assert_same_but_for_rounding(sharded, plain):
    for ours, theirs in zip(whole(sharded).values(), whole(plain).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def assert_steps_as_one_process(kind):
    """Check the training with an optimizer in each layout."""
    plain = make_model()
    train(plain, kind)
    for layout in ("rows", "flat", "matrices"):
        sharded = shardwise.shard(make_model(), layout=layout, units=[])
        train(sharded, kind)
        assert_same_but_for_rounding(sharded, plain)


@on_ranks(1, 2, 3)
def test_optimizer_that_reads_all_parameters_steps_as_one_process_under_matrices(rank, num_ranks):
    for kind in (Whitened, Normed, Counted):
        plain, sharded = make_model(), shardwise.shard(make_model(), layout="matrices", units=[])
        train(plain, kind)
        optimizer = train(sharded, kind)
        assert_same_but_for_rounding(sharded, plain)
        if kind is Whitened:  # the state of a matrix is on its owner alone
            owned = [p for p in sharded.parameters() if p.ndim == 2 and p.to_local().numel()]
            assert sum(map(bool, optimizer.state.values())) == len(owned)


@on_ranks(2)
def test_draws_of_a_step_are_those_of_one_process_in_every_layout(rank, num_ranks):
    assert_steps_as_one_process(Noisy)


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


@on_ranks(2, 3)
def test_probe_does_not_call_what_stands_in_place_of_a_method(rank, num_ranks):
    assert_steps_as_one_process(Restoring)


@on_ranks(2)
def test_class_that_names_collectives_and_cannot_be_tried_is_not_taken_apart(rank, num_ranks):
    model = shardwise.shard(make_model(), layout="matrices", units=[])
    optimizer = Unknown(model.parameters())
    assert not traits_of(optimizer, (optimizer,), {}).is_separable


@on_ranks(1, 2, 3)
def test_number_of_a_step_may_be_kept_for_a_parameter_without_dims(rank, num_ranks):
    plain, sharded = Scalar(), shardwise.shard(Scalar(), units=[])
    train(plain, Thresholded)
    train(sharded, lambda params: shardwise.optim.gathering(Thresholded(params)))
    assert_same_but_for_rounding(sharded, plain)


class Scalar(nn.Module):
    """A layer, and a parameter without dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x) * self.scale


@on_ranks(2, 3)
def test_muon_of_torch_over_a_row_under_fully_shard_is_refused_before_any_change(rank, num_ranks):
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 1, bias=False))
    fully_shard(model)
    before = whole(model)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    model(torch.randn(4, 5)).square().mean().backward()
    with pytest.raises(ShardError, match=r"Muon asks for T .* Use shardwise.optim.gathering\(Muon"):
        optimizer.step()
    assert_same_bits(whole(model), before)
    shardwise.optim.gathering(optimizer).step()
    assert not torch.equal(whole(model)["1.weight"], before["1.weight"])
