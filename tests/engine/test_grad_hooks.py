"""Hooks on a parameter's reduced gradient: the optimizer in backward."""

from functools import partial

import pytest
import torch

from models import Experts, OddModel, Stack, routed_loss
from oracle import assert_same_bits
from ranks import on_ranks
from roundings import assert_rounded_alike
from shardwise import fully_shard, gathered, shard
from shardwise.errors import ConfigError, ShardError
from trainer import (
    SPREAD,
    STAGES,
    adamw,
    full,
    full_parameters,
    make_steps,
    mean_square,
    sharded_by_block,
)


def step_in_backward(model, make_optimizer):
    """Give every parameter an optimizer that steps as soon as there is a gradient."""
    optimizers = {p: make_optimizer([p]) for p in model.parameters() if p.requires_grad}

    def step(param):
        assert param.grad is not None and not torch.is_grad_enabled()
        # as between steps, and not as inside a pass, where a full parameter would be the answer
        assert type(param * 2) is type(param.detach())
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    return optimizers


@on_ranks(1, 3)
def test_an_optimizer_in_backward_takes_the_steps_of_the_plain_loop(rank, world_size):
    for shards in (*(partial(shard, **options) for options in STAGES), sharded_by_block):
        found = []
        for in_backward in (True, False):
            torch.manual_seed(0)
            model = shards(Stack())
            if in_backward:
                step_in_backward(model, adamw)
            else:
                optimizer = adamw(list(model.parameters()))
            for (by_rank,) in make_steps(world_size, 3):
                mean_square(model, by_rank[rank]).backward()
                if in_backward:
                    assert all(p.grad is None for p in model.parameters())
                else:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(full_parameters(model))
        assert_same_bits(found[0], found[1])


def fail(param):
    raise ZeroDivisionError


@on_ranks(1, pytest.param(2, marks=pytest.mark.kernels))
def test_hooks_are_called_once_for_every_gradient_that_grew(rank, world_size):
    """Once per window, with the mean, in one order on all ranks, whatever a rank has used."""
    for options in SPREAD:
        torch.manual_seed(0)
        model = shard(Experts(), **options)
        names = {p: name for name, p in model.named_parameters()}
        calls = []
        norms = []

        def note(param):
            calls.append(names[param])  # noqa: B023 - called before the next turn
            norms.append(float(param.grad.norm()))  # noqa: B023 - a collective inside a hook

        handles = [p.register_post_accumulate_grad_hook(note) for p in names]
        x = torch.ones(2, 8)
        with model.no_sync():
            routed_loss(model, (x, rank)).backward()
        assert not calls, options
        routed_loss(model, (x, 0)).backward()
        used = {f"blocks.{b}.experts.{e}.{k}" for b in (0, 1) for e in range(world_size)
                for k in ("weight", "bias")}  # fmt: skip
        assert sorted(calls) == sorted(used), options
        assert calls == [name for name in names.values() if name in used]
        expected = [float(full(p.grad).norm()) for p, n in names.items() if n in used]
        for norm, wanted in zip(norms, expected, strict=True):
            # of 64 elements at most: their squares, the sum, over ranks in another order, the root
            assert_rounded_alike(norm, wanted, 64 + 2)
        # Nothing new for a parameter: not called, though p.grad is still there.
        calls.clear()
        handles[0].remove()
        routed_loss(model, (x, 0)).backward()
        assert set(calls) < {n for n in used if ".0." in n[7:]}, calls
        assert next(iter(names.values())) not in calls
        with gathered(model):
            calls.clear()
            routed_loss(model, (x, 2)).backward()
        assert set(calls) == {n for n in names.values() if "experts.2" in n}
        with pytest.raises(ZeroDivisionError):
            next(iter(model.parameters())).register_post_accumulate_grad_hook(fail)
            routed_loss(model, (x, 0)).backward()


@on_ranks(2)
def test_hooks_on_what_is_no_trained_parameter_are_refused():
    tokens = torch.arange(6).view(2, 3) % 5
    model = shard(OddModel(), stage=3)
    names = {p: name for name, p in model.named_parameters()}
    calls = []
    for param in names:
        param.register_post_accumulate_grad_hook(lambda p: calls.append(names[p]))
    model(tokens).square().mean().backward()
    assert sorted(calls) == sorted(n for n in names.values() if n != "never_used")
    weight = model.head.weight
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        for other in (weight.grad, weight.detach()):
            with pytest.raises(ShardError, match=r"read p\.grad after"):
                getattr(other, hook)(print)
    with pytest.raises(ShardError, match="use register_post_accumulate_grad_hook"):
        weight.register_hook(print)
    weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        weight.register_post_accumulate_grad_hook(print)


SHARDS = {"shard": shard, "fully_shard": fully_shard}


@on_ranks(1, 3)
def test_hooks_set_before_sharding_are_called_with_the_mean_or_refused(rank, world_size):
    """Hooks of a plain model are called by the sharded one, until their handles remove them."""
    for shards in SHARDS.values():
        model = Stack()
        calls = []

        def note(name, param):
            calls.append((name, full(param.grad).sum().item()))  # noqa: B023

        handles = {
            name: param.register_post_accumulate_grad_hook(partial(note, name))
            for name, param in model.named_parameters()
        }
        shards(model)
        x = torch.full((2, 8), float(rank))
        model(x).sum().backward()
        assert sorted(calls) == sorted(
            (n, full(p.grad).sum().item()) for n, p in model.named_parameters()
        )
        handles.pop("head.weight").remove()
        calls.clear()
        model(x).sum().backward()
        assert {name for name, _ in calls} == set(handles)
        # Called with a gradient of one rank, as autograd has it: refused, and nothing is changed.
        model = Stack()
        before = dict(model.named_parameters())
        handle = model.head.weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(ConfigError, match=r"'head.weight' has a hook of register_hook\(\)"):
            shards(model)
        assert all(p is before[name] for name, p in model.named_parameters())
        handle.remove()
        shards(model)
    if world_size > 1:
        model = Stack()
        if rank == 1:
            model.head.weight.register_post_accumulate_grad_hook(print)
        with pytest.raises(ConfigError, match=r"rank 1 has .*'head.weight'.*1 hooks"):
            shard(model)
