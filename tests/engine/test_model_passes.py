"""Models beside the table of scenarios: backwards, hooks, what is left after errors, gradients."""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zero_from_scratch as zero
from models import Checkpointed, OddModel, Stack
from oracle import assert_same_bits
from ranks import on_ranks
from roundings import assert_rounded_alike
from scenarios import (
    WHERE,
    Boom,
    CheckpointedInside,
    Detours,
    Fragile,
    UsedBeforeItIsClosed,
    Wrapped,
)
from shardwise import ShardTensor, accumulate, fully_shard, shard
from shardwise.config import Schedule
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import StateError
from shardwise.unit.states import GradState, ParamState
from trainer import (
    SPREAD,
    STAGES,
    adamw,
    assert_same_grads,
    events_of,
    full_grads,
    full_parameters,
    make_steps,
    mean_square,
    token_batch,
    train,
)


# Ways to call a unit: twice, nested, evaluated, with inputs and outputs of every shape.
def two_graphs(model, batch):
    mean_square(model, batch).backward()
    mean_square(model, batch * 0.5).backward()


def one_graph_twice(model, batch):
    loss = mean_square(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses_of_one_forward(model, batch):
    out = model(batch)
    out.square().mean().backward(retain_graph=True)
    (out * 0.1).mean().backward()


def a_gradient_that_is_given(model, batch):
    out = model(batch)
    out.backward(torch.full_like(out, 0.25))


@on_ranks(2)
def test_gradients_add_up_over_backward_passes():
    """Every rank has the same batch, so that the mean is the plain gradient, to the bit at N=2."""
    batch = torch.linspace(-1, 1, 24).view(3, 8)
    once_more = two_graphs, one_graph_twice, two_losses_of_one_forward
    for run in (*once_more, a_gradient_that_is_given):
        found = []
        for options in (None, *SPREAD):
            torch.manual_seed(0)
            model = Stack() if options is None else shard(Stack(), **options)
            run(model, batch)
            found.append(full_grads(model))
            assert_same_bits(found[-1], found[0])


@pytest.mark.kernels
@on_ranks(2)
def test_two_ranks_have_the_bits_of_distributed_data_parallel(rank, world_size):
    """The oracle is a loop of our own; this is torch's."""
    torch.manual_seed(0)
    model = OddModel()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    steps, losses = make_steps(world_size, 4, make_batch=token_batch), []
    for (by_rank,) in steps:
        loss = zero.next_byte_loss(wrapped, by_rank[rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    expected = full_parameters(model)
    del expected["never_used"]  # DistributedDataParallel gives it zeros, so its weight decays
    torch.manual_seed(0)
    trained = train(OddModel(), steps, zero.next_byte_loss, stage=3)
    assert trained.losses == losses
    assert_same_bits({n: trained.parameters[n] for n in expected}, expected)


def steps_with_buffers(model, rank, sends):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        for buffer in model.buffers() if sends else ():
            dist.broadcast(buffer, 0)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): each for name, each in model.named_buffers()}


@on_ranks(2)
def test_buffers_are_each_ranks_own_and_those_of_ddp_where_the_loop_sends_them(rank):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    ddp = make()
    expected = steps_with_buffers(DistributedDataParallel(ddp), rank, sends=False)
    for shards in (shard, fully_shard):
        for sends in (True, False):
            model = shards(make())
            found = steps_with_buffers(model, rank, sends)
            alike = all(torch.equal(found[name], expected[name]) for name in expected)
            assert alike == (sends or rank == 0)
            ours = {name: p.full_tensor() for name, p in model.named_parameters()}
            assert_same_bits(ours, dict(ddp.named_parameters()))


def train_with_user_hooks(model, batch):
    """Hang every kind of hook on a block; return what they saw, and the gradients."""
    seen = []
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    block.register_forward_hook(lambda m, args, out: out + 1)
    block.register_forward_hook(lambda m, args, out: seen.append(("out", out.sum().item())))
    block.register_full_backward_pre_hook(lambda m, g: seen.append(("pre", g[0].sum().item())))
    block.register_full_backward_hook(lambda m, i, o: seen.append(("in", i[0].sum().item())))
    model.register_full_backward_hook(lambda m, i, o: seen.append(("root", o[0].sum().item())))
    model.blocks[2].register_forward_hook(
        lambda m, args, out: seen.append(("weight", tuple(m.up.weight.shape)))
    )
    mean_square(model, batch).backward()
    return seen, full_grads(model)


@on_ranks(2)
def test_hooks_of_the_user_see_and_change_what_they_would_without_shards():
    batch = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    torch.manual_seed(0)
    seen, grads = train_with_user_hooks(Stack(), batch)
    assert len(seen) == 5
    for options in SPREAD:
        torch.manual_seed(0)
        seen_sharded, grads_sharded = train_with_user_hooks(shard(Stack(), **options), batch)
        assert seen_sharded == seen
        assert_same_bits(grads_sharded, grads)


class WithNothing(nn.Module):
    """A parameter without elements, alone in its dtype."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + self.nothing.sum().float()


@on_ranks(2)
def test_a_parameter_without_elements_alone_in_its_dtype_is_reduced_over_replicas(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for stage in range(4):
        model = shard(WithNothing(), stage=stage, mesh=mesh)
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        means = full_grads(model)
        assert torch.equal(means["layer.weight"], torch.full((4, 4), 3.0)), stage
        assert means["nothing"].shape == (0, 4) and means["nothing"].dtype == torch.float64


# Activation checkpointing of both kinds, nested, around and inside units, with frozen layers.
@on_ranks(1, 3)
def test_a_graph_with_a_recomputed_region_runs_backward_twice(world_size):
    results = []
    for stage in (None, 2, 3):
        torch.manual_seed(0)
        model = UsedBeforeItIsClosed()
        if stage is not None:
            model = shard(model, stage=stage, units=["Product", "Block"])
        loss = model(torch.ones(3, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        results.append([g.full_tensor() if isinstance(g, ShardTensor) else g for g in grads])
    for sharded in results[1:]:
        for ours, theirs in zip(sharded, results[0], strict=True):
            # One rank has the same bits; the mean of three equal gradients is two sums, a quotient.
            assert_rounded_alike(ours, theirs, 0 if world_size == 1 else 3)


@on_ranks(3)
def test_a_checkpoint_inside_a_unit_holds_no_more_than_one_around_it():
    """Compare the peak of full parameters, and unreduced gradients at the end of backward."""
    found = []
    for make_model in (Checkpointed, CheckpointedInside):
        torch.manual_seed(0)
        model, seen = shard(make_model(), stage=3), []
        for _ in range(2):
            x = torch.randn(4, 8, requires_grad=True)
            x.register_hook(lambda _, m=model, s=seen: s.append(stats(m).grad_partial_bytes))
            model(x).sum().backward()
        found.append((stats(model).param_full_peak_bytes, seen))
    assert found[0] == found[1]


# Units whose output is another unit's, as it came: two units then begin backward at one node.
@on_ranks(1, 2)
def test_fully_shard_too_frees_no_unit_before_its_backward():
    for frees in (None, True, False):
        torch.manual_seed(0)
        plain, model = Wrapped(), Wrapped()
        model.load_state_dict(plain.state_dict())
        for module in (*model.model.blocks, model.model, model):
            fully_shard(module, reshard_after_forward=frees)
        x = torch.randn(4, 8)
        for each in (plain, model):
            each(x).square().mean().backward()
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert (param.grad is None) == (expected.grad is None), name
            if expected.grad is not None:  # alike on all ranks, so the mean has the same bits
                assert torch.equal(param.grad.full_tensor(), expected.grad), name


# A step that raises leaves nothing behind, and a step that takes another path is right.
@on_ranks(2)
def test_states_and_memory_are_clean_after_a_step_that_raised():
    batch = torch.linspace(-1, 1, 24).view(3, 8)
    for options in STAGES:
        model = shard(Fragile(), **options)
        engine = engine_of(model)
        full_bytes = engine.ledger.now
        for where in WHERE:
            model.fails = where
            with pytest.raises(Boom):
                mean_square(model, batch).backward()
            model.fails = ""
            with torch.no_grad():
                model(batch)
            assert all(p.grad is None for p in model.parameters())
            assert {u.grads.state for u in engine.units} == {GradState.EMPTY}
            assert engine.ledger.now == full_bytes
            if options["stage"] == 3:
                assert {u.gather.state for u in engine.units} == {ParamState.SHARDED}
            assert all(type(p) is not nn.Parameter for p in model.parameters())


@on_ranks(2)
def test_prefetching_goes_on_after_the_order_has_changed():
    model = shard(Detours(), stage=3)
    optimizer = adamw(model.parameters())
    events = events_of(model)
    for number, block in enumerate(model.blocks):
        note = ("call", f"blocks.{number}", 0)
        block.register_forward_pre_hook(lambda *_, note=note: events.append(note))
    counts = []
    for step in range(6):
        model.num_calls = step
        events.clear()
        loss = mean_square(model, torch.ones(2, 8))
        order = [(kind, unit) for kind, unit, _ in events]
        blocks = [f"blocks.{n}" for n in Detours.ORDERS[step]]
        ahead = sum(
            ("shard.all_gather", later) in order[: order.index(("call", earlier))]
            for earlier, later in pairwise(blocks)
        )
        counts.append(ahead)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counts[0] == 2, "module order predicts the first step"
    assert counts[5] == 2, "the step before predicts the next"


@on_ranks(2)
def test_backward_gathers_each_unit_once_in_reverse_of_its_own_forward():
    """Block 2 ran first, where the prediction had it last, so it was kept for backward."""
    model = shard(Detours(), stage=3)
    for step in (0, 1):
        model.num_calls = step
        loss = mean_square(model, torch.ones(2, 8))
        events = events_of(model)
        loss.backward()
    gathered = [unit for kind, unit, _ in events if kind == "shard.all_gather"]
    assert gathered == ["blocks.1", "blocks.0"]


@on_ranks(1, 2)
def test_an_accumulation_window_that_a_raising_pass_has_cost_is_told_once():
    for stage in range(4):
        torch.manual_seed(0)
        model = shard(Fragile(), stage=stage, schedule=Schedule(reduce_every="step"))
        x = torch.ones(2, 8)
        with accumulate(model, last=False):
            model(x).sum().backward()
            model.fails = "backward 1"
            with pytest.raises(Boom):
                model(x).sum().backward()
        model.fails = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with accumulate(model, last=True):
                model(x).sum().backward()
            model(x).sum().backward()
        (told,) = caught
        assert "run the window again" in str(told.message)
        again = shard(Fragile(), stage=stage, schedule=Schedule(reduce_every="step"))
        again.load_state_dict(model.state_dict())
        for _ in range(2):
            again(x).sum().backward()
        assert_same_grads(full_grads(model), full_grads(again))


@on_ranks(1)
def test_a_replaced_parameter_is_named_and_the_others_stay_sharded():
    model = shard(nn.Sequential(nn.Linear(4, 4)), stage=3)
    ours = dict(model.named_parameters())
    model[0].bias = nn.Parameter(torch.zeros(4))
    for _ in range(2):  # the second call says the same
        with torch.no_grad(), pytest.raises(StateError, match=r"'0\.bias' was replaced"):
            model(torch.ones(1, 4))
        assert model[0].weight is ours["0.weight"]
    model[0].bias = ours["0.bias"]
    model(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None for param in ours.values())
