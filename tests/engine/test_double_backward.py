"""Gradient penalties: WGAN-GP and R1 against one process that has the whole batch."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from models import Checkpointed, Stack
from ranks import on_ranks
from roundings import assert_rounded_alike
from shardwise import accumulate, fully_shard, gathered, shard
from shardwise.config import Schedule
from shardwise.debug import stats
from shardwise.errors import ShardError, StateError
from trainer import full, full_grads, full_parameters

# A gradient here is a sum over at most 12 samples through 14 products of width up to 11, and back:
# about 300 roundings.
ROUNDINGS = 300
sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def batches(world_size, num_steps=2):
    """Draw what is real, what is fake, and where between them."""
    generator = torch.Generator().manual_seed(5)

    def draw():
        real, fake = (torch.randn(4, 8, generator=generator) for _ in range(2))
        return real, fake, torch.rand(4, 1, generator=generator)

    return [[draw() for _ in range(world_size)] for _ in range(num_steps)]


def make_critic():
    torch.manual_seed(0)
    critic = Stack()
    critic.blocks[1].up.bias.requires_grad_(False)
    return critic


def slope(model, x):
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return grad


def gradient_penalty(model, batch):
    real, fake, between = batch
    x = (between * real + (1 - between) * fake).requires_grad_()
    return 10 * (slope(model, x).norm(dim=1) - 1).square().mean()


def wasserstein(model, batch):
    real, fake, _ = batch
    return model(fake).mean() - model(real).mean()


def wgan_gp(model, batch):
    return wasserstein(model, batch) + gradient_penalty(model, batch)


def penalty_first(model, batch):
    return gradient_penalty(model, batch) + wasserstein(model, batch)


def r1(model, batch):
    """Both passes go through one graph: that of the real batch."""
    real = batch[0].clone().requires_grad_()
    scores = model(real)
    (grad,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
    return F.softplus(-scores).mean() + 5 * grad.square().sum(dim=1).mean()


def weight_in_the_loss(model, batch):
    """A parameter outside its module, in the graph of the penalty."""
    x = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad((model(x) @ model.head.weight).sum(), x, create_graph=True)
    return grad.square().mean()


def whole(by_rank):
    real, fake, between = (torch.cat(parts) for parts in zip(*by_rank, strict=True))
    return real, fake, between


def train_alone(loss_fn, world_size):
    """Return the gradients of every step and, last, the parameters."""
    model = make_critic()
    optimizer = sgd(model.parameters())
    found = []
    for by_rank in batches(world_size):
        loss_fn(model, whole(by_rank)).backward()
        found.append({name: full(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {name: full(p) for name, p in model.named_parameters()}]


def assert_close(found, expected, what):
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        if truth is None:
            assert found[name] is None, f"{what}: {name} has a gradient"
            continue
        assert found[name] is not None, f"{what}: {name} has no gradient"
        largest = max(truth.abs().max().item(), 1e-3)  # what is less has cancelled
        assert_rounded_alike(found[name], truth, ROUNDINGS, f"{what}: {name}", scale=largest)


def outside(model, loss_fn, batch):
    loss_fn(model, batch).backward()


def inside(model, loss_fn, batch):
    with gathered(model):
        loss_fn(model, batch).backward()


def after(model, loss_fn, batch):
    with gathered(model):
        loss = loss_fn(model, batch)
    loss.backward()


def half_and_half(model, loss_fn, batch):
    """One graph, of a pass through the shards and of a penalty that was computed inside."""
    loss = wasserstein(model, batch)
    with gathered(model):
        penalty = gradient_penalty(model, batch)
    (loss + penalty).backward()


def one_after_the_other(model, loss_fn, batch):
    with gathered(model):
        gradient_penalty(model, batch).backward()
    wasserstein(model, batch).backward()


WAYS = [
    (outside, wgan_gp, (0, 1, 2, 3)),  # 3 on one rank only: else it is refused, see below
    (outside, r1, (1, 3)),
    (outside, penalty_first, (0, 2)),
    (outside, weight_in_the_loss, (1,)),
    (inside, wgan_gp, (0, 1, 3)),
    (inside, r1, (3,)),
    (after, wgan_gp, (0, 2, 3)),
    (half_and_half, wgan_gp, (1, 3)),
    (one_after_the_other, wgan_gp, (0, 3)),
]


@on_ranks(1, pytest.param(3, marks=pytest.mark.kernels))
def test_gradient_penalties_train_as_in_one_process(rank, world_size):
    truths = {loss_fn: train_alone(loss_fn, world_size) for _, loss_fn, _ in WAYS}
    for way, loss_fn, stages in WAYS:
        truth = truths[loss_fn]
        for stage in stages:
            if way is outside and stage == 3 and world_size > 1:
                continue
            what = f"{way.__name__}, {loss_fn.__name__}, stage {stage}"
            model = shard(make_critic(), stage=stage, layout="flat" if stage == 1 else "rows")
            optimizer = sgd(model.parameters())
            for number, by_rank in enumerate(batches(world_size)):
                way(model, loss_fn, by_rank[rank])
                assert_close(full_grads(model), truth[number], f"{what}, step {number}")
                optimizer.step()
                optimizer.zero_grad()
            assert_close(full_parameters(model), truth[-1], what)


@on_ranks(1, 2)
def test_gradient_penalties_accumulate_over_micro_batches(rank, world_size):
    two = batches(world_size)
    alone = make_critic()
    for by_rank in two:
        wgan_gp(alone, whole(by_rank)).backward()
    truth = {name: p.grad for name, p in alone.named_parameters()}
    for stage in range(4):
        model = shard(make_critic(), stage=stage)
        for number, by_rank in enumerate(two):
            with accumulate(model, last=number == 1):
                half_and_half(model, wgan_gp, by_rank[rank]) if number else one_after_the_other(
                    model, wgan_gp, by_rank[rank]
                )
        assert_close(full_grads(model), truth, f"stage {stage}")


@on_ranks(2)
def test_gradient_penalties_over_replicas_and_with_activation_checkpoints(rank, world_size):
    truth = train_alone(wgan_gp, world_size)[0]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for stage, way in ((0, outside), (2, outside), (3, inside), (3, after)):
        for make in (Stack, Checkpointed):
            torch.manual_seed(0)
            model = make()
            model.blocks[1].up.bias.requires_grad_(False)
            model = shard(model, stage=stage, mesh=mesh if make is Stack else None)
            way(model, wgan_gp, batches(world_size)[0][rank])
            assert_close(full_grads(model), truth, f"{way.__name__}, stage {stage}")


class Routed(nn.Module):
    """The batch says which expert runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, which):
        return self.experts[which](x)


@on_ranks(2)
def test_inside_gathered_a_gradient_of_one_rank_is_reduced_by_all(rank):
    x = torch.arange(4.0)
    alone = Routed()
    for which in (0, 1):
        (alone(x, which).square().sum() / 2).backward()
    for stage in (0, 2, 3):
        model = shard(Routed(), stage=stage)
        with gathered(model):
            model(x, rank).square().sum().backward()
        assert_close(full_grads(model), {n: p.grad for n, p in alone.named_parameters()}, "")
        model.zero_grad()
        with gathered(model):
            model.experts[2](x).detach()
        assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_penalties_inside_gathered_reach_the_shards_of_a_bf16_run(rank, world_size):
    """Inside, the forward pass has the master dtype; the mean is one of bf16 values at most."""
    (by_rank,) = batches(world_size, 1)
    alone = make_critic()
    wgan_gp(alone, whole(by_rank)).backward()
    for stage in (1, 3):
        model = shard(make_critic(), stage=stage, precision="bf16")
        for way in (inside, after):
            way(model, wgan_gp, by_rank[rank])
            for name, grad in full_grads(model).items():
                truth = dict(alone.named_parameters())[name].grad
                if truth is not None:
                    assert grad is not None and grad.dtype == torch.float32
                    # rounded once to bf16, relative to each rank's own gradient
                    assert (grad - truth).abs().max() < 2**-7 * truth.abs().max(), name
            model.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_gathered_keeps_its_contract(rank, world_size, stage):
    model = shard(make_critic(), stage=stage)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    before = full_parameters(model)
    with gathered(model):
        assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
        assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
        state = copy.deepcopy(model.state_dict())
    assert not any(t.requires_grad for t in state.values())
    with pytest.raises(StateError, match=r"head\.weight changed inside"), gathered(model):
        model.head.weight.grad = torch.ones(5, 8)  # goes with the context that is refused
        with torch.no_grad():
            model.head.weight.zero_()
    assert all(p.grad is None for p in model.parameters())
    with gathered(model, writeback=True):
        model.head.weight.mul_(2)  # a plain write, without no_grad
        assert not any(p.requires_grad for p in model.parameters())
    with gathered(model.head.bias, writeback=True) as (bias,):
        bias[0] = 7
    assert torch.equal(full_parameters(model)["head.weight"], 2 * before["head.weight"])
    with pytest.raises(ZeroDivisionError), gathered(model):
        wgan_gp(model, batches(1)[0][0]).backward()
        raise ZeroDivisionError
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(2, 8)).sum().backward()  # and outside all goes on
    with gathered(model):  # what is written into .grad by hand counts as a gradient, too
        model.head.bias.grad = torch.full((5,), float(rank))
    expected = torch.full((5,), 2.0 + (world_size - 1) / 2)
    assert torch.equal(full(model.head.bias.grad), expected)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_a_gradient_penalty_costs_no_further_reduction(rank, world_size, stage):
    """The pass that only makes a graph sends nothing; the second reduces every unit once."""
    model = shard(make_critic(), stage=stage, schedule=Schedule(bucket_bytes=0))
    batch = batches(world_size)[0][rank]
    wasserstein(model, batch).backward()
    plain = stats(model).num_collectives
    x = batch[0].clone().requires_grad_()
    slopes = slope(model, x)
    assert stats(model).num_collectives == plain, "all is fresh, and nothing to reduce"
    (wasserstein(model, batch) + slopes.square().mean()).backward()
    twice = stats(model).num_collectives
    reduces = [kind for kind in plain if "reduce" in str(kind)]
    assert reduces and all(twice[kind] == 2 * plain[kind] for kind in reduces), (plain, twice)


@pytest.mark.filterwarnings("ignore:Using backward")  # it would pass as the end of the rank
@on_ranks(2)
def test_what_cannot_have_a_second_pass_is_refused_with_advice_that_holds():
    batch = batches(1)[0][0]
    truth = train_alone(wgan_gp, 1)[0]
    model = shard(make_critic(), stage=3)
    with pytest.raises(StateError, match=r"create_graph=True through unit .*gathered\(model\)"):
        wgan_gp(model, batch)
    inside(model, wgan_gp, batch)  # the advice is true, also right after the refusal
    assert_close(full_grads(model), truth, "stage 3")
    for stage in range(3):
        model = shard(make_critic(), stage=stage)
        loss = wasserstein(model, batch)
        with pytest.raises(StateError, match=r"p\.grad, the mean over ranks, has no graph"):
            loss.backward(create_graph=True)
        wgan_gp(model, batch).backward()
        assert_close(full_grads(model), truth, f"stage {stage}")
    model.zero_grad()
    alone = make_critic()
    for each in (alone, model):
        with gathered(each) if each is model else nullcontext():
            x = batch[0]
            params = [p for p in each.parameters() if p.requires_grad]
            grads = torch.autograd.grad(each(x).square().mean(), params, create_graph=True)
            sum(g.square().sum() for g in grads).backward()
    assert_close(full_grads(model), {n: p.grad for n, p in alone.named_parameters()}, "of grads")


@on_ranks(1, 2)
def test_fully_shard_takes_gradient_penalties_where_full_parameters_stay(rank, world_size):
    truth = train_alone(wgan_gp, world_size)
    for frees_after_forward in (True, False):
        model = make_critic()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=frees_after_forward)
        fully_shard(model)
        if world_size > 1:
            with pytest.raises(StateError, match=r"set_reshard_after_backward\(False\)"):
                wgan_gp(model, batches(1)[0][0])
        model.set_reshard_after_backward(False)
        for each in (model, *model.blocks):
            each.reshard()
        optimizer = sgd(model.parameters())
        for number, by_rank in enumerate(batches(world_size)):
            wgan_gp(model, by_rank[rank]).backward()
            for each in (model, *model.blocks):
                each.reshard()
            assert_close(full_grads(model), truth[number], f"step {number}")
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(1, 3)
def test_backward_into_named_inputs_reaches_the_parameters_among_them(rank, world_size):
    """Named parameters get the mean, others nothing, activations what is this rank's."""
    (by_rank,) = batches(world_size, 1)
    alone = make_critic()
    x = whole(by_rank)[0].requires_grad_()
    wanted = ["blocks.0.down.weight", "head.bias"]
    params = dict(alone.named_parameters())
    alone(x).square().mean().backward(inputs=[x, *(params[n] for n in wanted)])
    truth = {name: p.grad for name, p in params.items()}
    for stage in range(4):
        model = shard(make_critic(), stage=stage)
        params = dict(model.named_parameters())
        for _ in range(2):  # the second time after a pass of the first kind
            x = by_rank[rank][0].clone().requires_grad_()
            model(x).square().mean().backward(inputs=[x])
            assert x.grad is not None and all(p.grad is None for p in params.values())
            loss = model(x).square().mean()
            loss.backward(inputs=[params[n] for n in wanted])
            assert_close(full_grads(model), truth, f"stage {stage}")
            model.zero_grad()
            model(x).square().mean().backward(inputs=params["head.bias"])
            assert [n for n, p in params.items() if p.grad is not None] == ["head.bias"]
            model.zero_grad()
            model(x).square().mean().backward(inputs={"bias": params["head.bias"]})
            assert [n for n, p in params.items() if p.grad is not None] == ["head.bias"]
            model.zero_grad()
        with pytest.raises(ShardError, match=r"backward\(inputs=\[...\]\) on a ShardTensor"):
            model(x).sum().backward(inputs=[params["head.bias"].detach().clone()])
