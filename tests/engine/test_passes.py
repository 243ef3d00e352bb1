"""Forward passes in flight at once, and the table of states of a call."""

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ranks import on_ranks
from shardwise import accumulate, gathered, shard
from shardwise.config import Schedule
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.engine.calls import CALL_TRANSITIONS, Call, CallState
from shardwise.errors import ConfigError, IllegalTransition
from shardwise.interop.fsdp2 import fully_shard

NUM_BLOCKS = 3
IN_FLIGHT = 3


def whole_numbers():
    """Return a model whose gradients are small whole numbers: sums in any order have equal bits."""
    blocks = [nn.Linear(4, 4, bias=False) for _ in range(NUM_BLOCKS)]
    model = nn.Sequential(*(nn.Sequential(block, nn.ReLU()) for block in blocks))
    generator = torch.Generator().manual_seed(1)
    for block in blocks:
        values = torch.randint(-2, 3, (4, 4), generator=generator)
        block.weight = nn.Parameter(values.float())
    return model


def inputs(step, number):
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randint(-2, 3, (3, 4), generator=generator).float()


def has_gradients_of(model, plain):
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)


def watch(model):
    """Return a list that grows with what the engine hears."""
    engine, heard = engine_of(model), []

    def hear(name):
        plain = getattr(engine.backward, name)

        def call(*args):
            heard.append((name, getattr(args[0], "index", -1) if args else -1))
            plain(*args)

        setattr(engine.backward, name, call)

    for name in ("on_backward", "on_unit_end", "on_pass_end"):
        hear(name)
    return heard


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 2), (3, 3)])
@on_ranks()
def test_backward_passes_in_any_order_close_their_units_and_have_the_gradients_of_one_process(
    stage,
):
    plain = whole_numbers()
    model = shard(whole_numbers(), stage=stage, units=[nn.Sequential])
    heard = watch(model)
    for step, order in enumerate(((0, 1, 2), (2, 1, 0), (1, 2, 0))):
        outputs = [model(inputs(step, number)).sum() for number in range(IN_FLIGHT)]
        for place, number in enumerate(order):
            plain(inputs(step, number)).sum().backward()
            heard.clear()
            with accumulate(model, last=place == IN_FLIGHT - 1):
                outputs[number].backward()
            over = [index for name, index in heard if name == "on_unit_end" and index]
            assert over == [3, 2, 1]
            if (step, place) != (0, 0):  # the first pass of all does not know that it is alone
                assert heard.index(("on_unit_end", 2)) < heard.index(("on_backward", 1))
        has_gradients_of(model, plain)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (3, 3)])
@on_ranks()
def test_a_backward_pass_through_several_forward_passes_reduces_each_unit_once(stage):
    plain = whole_numbers()
    model = shard(
        whole_numbers(), stage=stage, units=[nn.Sequential], schedule=Schedule(bucket_bytes=0)
    )
    counts = []
    # Passes through one graph, of one that is alive, say nothing of passes through several.
    for step, num_forwards in enumerate((3, 3, 1, 2, 1, 3)):
        before = dict(stats(model).num_collectives)
        sum(model(inputs(step, number)).sum() for number in range(num_forwards)).backward()
        sum(plain(inputs(step, number)).sum() for number in range(num_forwards)).backward()
        has_gradients_of(model, plain)
        after = stats(model).num_collectives
        reductions = [n for n in after if n.endswith("reduce_scatter")]
        counts.append(sum(after[n] - before.get(n, 0) for n in reductions))
    assert counts == [NUM_BLOCKS] * 6


@on_ranks(2)
def test_a_graph_that_never_runs_keeps_no_unit_open():
    model = shard(whole_numbers(), stage=3, units=[nn.Sequential])
    model(inputs(0, 0)).sum().backward()
    kept = model(inputs(0, 1)).sum()
    model(inputs(0, 2)).sum().backward()  # which may have gone through both
    heard = watch(model)
    model(inputs(0, 3)).sum().backward()
    assert heard.index(("on_unit_end", 2)) < heard.index(("on_backward", 1))
    kept.backward()  # and it may still run
    assert heard.count(("on_pass_end", -1)) == 2


def test_a_call_that_leaves_its_table_raises_with_unit_from_and_to():
    unit = SimpleNamespace(name="blocks.1")
    for before, after in product(CallState, CallState):
        call = Call(unit, (), in_backward=False, recomputes=False)
        call.state = before
        if (before, after) in CALL_TRANSITIONS:
            call.enter(after)
            assert call.state is after
        else:
            with pytest.raises(IllegalTransition, match=f"'blocks.1': {before.value} -> "):
                call.enter(after)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_rank_that_keeps_a_graph_which_others_drop_takes_the_same_collectives(rank, stage):
    plain = whole_numbers()
    model = shard(whole_numbers(), stage=stage, units=[nn.Sequential])
    kept = []
    for step in range(4):
        output = model(inputs(step, 0)).sum()
        if rank == 0:
            kept.append(output)
        del output
        model(inputs(step, 1)).sum().backward()
        plain(inputs(step, 1)).sum().backward()
    has_gradients_of(model, plain)


class Breaks(nn.Module):
    """Passes its input on; its backward raises while ``breaks``."""

    breaks = False

    def forward(self, x):
        def look(grad):
            if self.breaks:
                raise ArithmeticError("on purpose")

        x = x * 1
        if x.requires_grad:
            x.register_hook(look)
        return x


@pytest.mark.parametrize("how", ["0", "2", "3", "fully_shard"])
@on_ranks(2)
def test_a_backward_pass_that_raised_leaves_nothing_to_the_next_one(how):
    plain, ours = whole_numbers(), whole_numbers()
    breaks = Breaks()
    model = nn.Sequential(ours[0], breaks, *ours[1:])
    if how == "fully_shard":
        for block in (model[0], *model[2:]):
            fully_shard(block)
        fully_shard(model)
    else:
        shard(model, stage=int(how), units=[nn.Sequential])
    first, second = model(inputs(0, 0)).sum(), model(inputs(0, 1)).sum()
    breaks.breaks = True
    with pytest.raises(ArithmeticError):
        first.backward()
    breaks.breaks = False
    second.backward()  # no forward in between
    breaks.breaks = True
    third = model(inputs(0, 2)).sum()
    for p in model.parameters():
        p.grad = None
    with pytest.raises(ArithmeticError):
        third.backward()
    breaks.breaks = False
    model(inputs(0, 3)).sum().backward()
    plain(inputs(0, 3)).sum().backward()
    has_gradients_of(model, plain)
    with pytest.raises(ConfigError) if how == "fully_shard" else nullcontext():
        stats(model[0] if how == "fully_shard" else model)


class Force(nn.Module):
    """Adds to its output the gradient of an energy that inner units have computed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(*list(whole_numbers()))

    def forward(self, x):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.inner(at)
            (force,) = torch.autograd.grad(energy.sum(), at, retain_graph=True)
        return self.inner(x) + force


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_backward_pass_inside_a_forward_pass_leaves_the_forward_pass_alone(stage):
    plain, model = Force(), shard(Force(), stage=stage, units=[nn.Sequential])
    for step in range(2):
        x = inputs(step, 0).requires_grad_()
        plain(x).sum().backward()
        model(x).sum().backward()
    has_gradients_of(model, plain)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1, 2)
def test_gradients_that_come_late_are_whole_in_whatever_order_they_are_read(
    rank, world_size, stage
):
    """Let a penalty's gradients come after the layers' own are on their way; read in two orders."""
    found = []
    for step in (1, -1):
        model = shard(
            whole_numbers(), stage=stage, units=nn.Linear, schedule=Schedule(bucket_bytes=0)
        )
        with gathered(model):
            penalty = sum(p.sum() for p in model.parameters())
        (model(inputs(0, rank)).sum() + penalty).backward()
        params = list(model.parameters())[::step]
        grads = [p.grad.full_tensor() for p in params][::step]
        model.zero_grad()
        model(inputs(1, rank)).sum().backward()  # nothing is left over for it
        grads += [p.grad.full_tensor() for p in model.parameters()]
        found.append(grads)
    plain = whole_numbers()
    for number in range(2):
        of_ranks = [plain(inputs(number, r)).sum() for r in range(world_size)]
        penalty = sum(p.sum() for p in plain.parameters()) if number == 0 else torch.zeros(())
        truth = torch.autograd.grad(sum(of_ranks) / world_size + penalty, list(plain.parameters()))
        begin = number * NUM_BLOCKS
        for grads in found:
            for ours, expected in zip(grads[begin : begin + NUM_BLOCKS], truth, strict=True):
                assert torch.equal(ours, expected), (stage, number)
