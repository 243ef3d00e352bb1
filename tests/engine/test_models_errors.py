"""A step that raises leaves nothing behind, and a step that takes another path is right."""

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import Block, Stack
from ranks import run_ranks
from shardwise import accumulate, shard
from shardwise.config import Schedule
from shardwise.engine.api import engine_of
from shardwise.errors import StateError
from shardwise.unit.states import GradState, ParamState
from trainer import (
    SPREAD,
    STAGES,
    adamw,
    assert_same_grads,
    assert_same_run,
    compare,
    events_of,
    full_grads,
    make_steps,
    mean_square,
    train,
    train_plain,
)


class Boom(Exception):
    """What the model raises."""


class Explode(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Boom


class Fragile(Stack):
    """Raises where it is told to."""

    fails = ""
    checkpoints = False

    def run(self, number: int, x: Tensor) -> Tensor:
        if self.fails == f"forward {number}":
            raise Boom
        x = self.blocks[number](x)
        return Explode.apply(x) if self.fails == f"backward {number}" else x

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            if self.checkpoints:
                x = checkpoint(self.run, number, x, use_reentrant=False)
            else:
                x = self.run(number, x)
        return self.head(x)


class FragileInside(Fragile):
    """Raises inside the forward of a unit."""

    class Inner(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.fails:
                raise Boom
            return x

    block_class = Inner

    def run(self, number: int, x: Tensor) -> Tensor:
        self.blocks[number].fails = self.fails == f"forward {number}"
        return super().run(number, x) if not self.blocks[number].fails else self.blocks[number](x)


class FragileCheckpointed(Fragile):
    checkpoints = True


WHERE = ["forward 0", "forward 1", "forward 2", "backward 0", "backward 1", "backward 2"]


def shaken_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Fail once at every place before the good forward."""
    for where in WHERE:
        model.fails = where
        with pytest.raises(Boom):
            mean_square(model, batch * 3).backward()
        model.fails = ""
        if not hasattr(model, "_shardwise_engine"):
            model.zero_grad()  # a plain model keeps the gradients of half a backward pass
    return mean_square(model, batch)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make_model", [Fragile, FragileInside])
def test_a_step_that_raised_leaves_no_trace(make_model: Any, world_size: int) -> None:
    run_ranks(compare, world_size, make_model, SPREAD, shaken_loss)


def test_a_checkpointed_step_that_raised_leaves_no_trace() -> None:
    run_ranks(compare, 2, FragileCheckpointed, SPREAD, shaken_loss)


class FailsInRecompute(Stack):
    """Raises when a block's forward is run for the second time."""

    fails = False
    num_runs = 0

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.num_runs += 1
        if self.fails and self.num_runs == 5:
            raise Boom
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        self.num_runs = 0
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=False)
        return self.head(x)


def failing_recompute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    model.fails = True
    with pytest.raises(Boom):
        mean_square(model, batch).backward()
    model.fails = False
    if not hasattr(model, "_shardwise_engine"):
        model.zero_grad()
    return mean_square(model, batch)


def test_an_exception_in_recomputation_leaves_no_trace() -> None:
    run_ranks(compare, 2, FailsInRecompute, SPREAD, failing_recompute_loss)


def states_after_failures(rank: int, world_size: int) -> None:
    """After a failed step and one that follows, every unit is where it was at the beginning."""
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
            assert {u.grad_state for u in engine.units} == {GradState.EMPTY}
            assert engine.ledger.now == full_bytes
            if options["stage"] == 3:
                assert {u.param_state for u in engine.units} == {ParamState.SHARDED}
            assert all(type(p) is not nn.Parameter for p in model.parameters())


def test_states_and_memory_are_clean_after_a_step_that_raised() -> None:
    run_ranks(states_after_failures, 2)


class Detours(Stack):
    """Takes its blocks in an order that changes from call to call."""

    ORDERS = ((0, 1, 2), (2, 0, 1), (1,), (0, 2), (0, 1, 2), (0, 1, 2))
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for number in self.ORDERS[self.num_calls % len(self.ORDERS)]:
            x = self.blocks[number](x)
        return self.head(x)


class DetoursByStep(Detours):
    """Goes on to the next order with each batch of the rank's own, also in the oracle."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls = int(x[0, 0])
        return super().forward(x)


def compare_detours(rank: int, world_size: int) -> None:
    steps = make_steps(world_size, 6)
    for number, (by_rank,) in enumerate(steps):
        for batch in by_rank:
            batch[0, 0] = number
    torch.manual_seed(0)
    truth = train_plain(DetoursByStep(), steps, mean_square)
    for options in [*SPREAD, {"stage": 3, "schedule": Schedule(1 << 20)}]:
        torch.manual_seed(0)
        assert_same_run(train(DetoursByStep(), steps, mean_square, **options), truth)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_order_of_units_may_change_from_step_to_step(world_size: int) -> None:
    run_ranks(compare_detours, world_size)


def gathers_ahead(rank: int, world_size: int) -> list[int]:
    """Return for every step how many blocks were gathered before the block before them ran."""
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
    return counts


def test_prefetching_goes_on_after_the_order_has_changed() -> None:
    for counts in run_ranks(gathers_ahead, 2):
        assert counts[0] == 2, "module order predicts the first step"
        assert counts[5] == 2, "the step before predicts the next"


def gathers_of_backward(rank: int, world_size: int) -> list[str]:
    """Return the units gathered in backward after a changed order, in order of their starts."""
    model = shard(Detours(), stage=3)
    for step in (0, 1):
        model.num_calls = step
        loss = mean_square(model, torch.ones(2, 8))
        events = events_of(model)
        loss.backward()
    return [unit for kind, unit, _ in events if kind == "shard.all_gather"]


def test_backward_gathers_each_unit_once_in_reverse_of_its_own_forward() -> None:
    """Block 2 ran first, where the prediction had it last, so it was kept for backward."""
    assert run_ranks(gathers_of_backward, 2) == [["blocks.1", "blocks.0"]] * 2


def fail_in_a_window(rank, world_size):
    """Raise in the second of three micro-batches; return what was warned, per stage."""
    found = []
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
        found.append([str(w.message) for w in caught])
        again = shard(Fragile(), stage=stage, schedule=Schedule(reduce_every="step"))
        again.load_state_dict(model.state_dict())
        for _ in range(2):
            again(x).sum().backward()
        assert_same_grads(full_grads(model), full_grads(again))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_accumulation_window_that_a_raising_pass_has_cost_is_told_once(num_ranks):
    for by_stage in run_ranks(fail_in_a_window, num_ranks):
        for messages in by_stage:
            assert len(messages) == 1 and "run the window again" in messages[0]


def replace_one(rank: int, world_size: int) -> None:
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


def test_a_replaced_parameter_is_named_and_the_others_stay_sharded() -> None:
    run_ranks(replace_one, 1)
