"""Copies of one parameter on several stages of a pipeline stay one: `tie()`."""

import pytest
import torch
from torch import nn

import shardwise
from pipelines import (
    BY,
    IN_A_V,
    NUM_BLOCKS,
    WIDTH,
    WORDS,
    Net,
    Pipeline,
    batch_of,
    full,
    loss_of,
    micro_batches_of,
    pipeline_of,
    whole_batch,
)
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.errors import ConfigError, ReplicaError

NAMES = {"head.weight": "embed.weight"}
STEPS = 3
ROUNDINGS = STEPS * of_gradient(*(8, 11) * NUM_BLOCKS, 8, over=24)


def tied_pipeline(schedule, axes, **settings):
    made = pipeline_of(schedule, axes, micro_batches_of(schedule, 2), **settings)
    shardwise.parallel.tie(made.parts, NAMES)
    return made


def sent_for_tied(made):
    return sum(shardwise.debug.stats(p).sent_bytes.get("stages.tied", 0) for p in made.parts)


def tied_steps(rank, num_ranks, folder, cases):
    """Steps, clipped or not, are those of one process; what is sent are slices; and checkpoints."""
    axes = shardwise.Axes(pp=2)
    dp = axes["dp_shard"]
    for number, (schedule, by, stage) in enumerate(cases):
        made = tied_pipeline(schedule, axes, by=by, stage=stage)
        optimizer = torch.optim.SGD(made.params, lr=0.5, momentum=0.5)
        whole = Net(tied=True)
        reference = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.5)
        for step in range(STEPS):
            before = sent_for_tied(made)
            made.step(*batch_of(step, dp.get_local_rank()))
            x, y = whole_batch(step, dp.size())
            loss_of(whole(x), y).backward()
            if step:  # without it the optimizer's step sums
                norm = shardwise.parallel.clip_grad_norm_(made.params, 0.5)
                wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
                assert_rounded_alike(norm, wanted.item(), ROUNDINGS)
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
            mine = [p for n, p in made.named().items() if n in ("embed.weight", "head.weight")]
            crosses = schedule not in IN_A_V  # whose first and last stage one rank has
            slices = [p.to_local().numel() for p in mine] if crosses else []
            assert sent_for_tied(made) - before == sum(4 * (n + 1) for n in slices)
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for name, param in made.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), ROUNDINGS, name)
        shardwise.check.replicas(made.parts, optimizer)
        shardwise.save(folder / str(number), made.parts, optimizer)

        # Into other stages, and into one model that is tied in itself.
        other = tied_pipeline("1F1B", axes)
        alone = shardwise.shard(Net(tied=True), units="Block")
        for parts in (other.parts, [alone], made.parts):
            params = [p for part in parts for p in part.parameters()]
            shardwise.load(
                folder / str(number), parts, torch.optim.SGD(params, lr=0.1, momentum=0.5)
            )
            for part in parts:
                for name, param in part.named_parameters():
                    assert_rounded_alike(full(param), expected[name].detach(), ROUNDINGS, name)
        shardwise.save(folder / "alone", alone, replace=True)
        shardwise.load(folder / "alone", other.parts)


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (4, [("1F1B", "shard", 3), ("ZBVZeroBubble", "shard", 2), ("GPipe", "fully_shard", 3)]),
        (2, [("Interleaved1F1B", "shard", 0), ("DualPipeV", "fully_shard", 3)]),
    ],
)
def test_tied_stages_take_the_steps_of_one_tied_model_and_are_saved_once(
    num_ranks, cases, tmp_path
):
    run_ranks(tied_steps, num_ranks, tmp_path, cases)
    for number in range(len(cases)):
        whole = Net(tied=True)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.5)
        loaded = shardwise.load(tmp_path / str(number), whole, optimizer)
        assert not loaded.missing
        assert not loaded.unexpected
        assert optimizer.state[whole.embed.weight]["momentum_buffer"].any()


class Ends(nn.Module):
    """The first stage or the last, with its copy alone."""

    def __init__(self, attribute, shape=(WORDS, WIDTH), **how):
        super().__init__()
        self.register_parameter(attribute, nn.Parameter(torch.randn(shape, **how)))

    def forward(self, x):
        return x


@on_ranks(2)
def test_what_is_no_one_parameter_is_not_tied_and_copies_that_part_are_found(rank):
    axes = shardwise.Axes(pp=2)
    place = axes["pp"].get_local_rank()

    def refused(part, names, match):
        with pytest.raises(ConfigError, match=match):
            shardwise.parallel.tie(shardwise.shard(part, mesh=axes), names)

    ends = ("a", "b")
    refused(Ends(ends[place]), {"c": "a"}, "no stage has a parameter 'c'")
    refused(Ends(ends[place]), {}, "names={}: expected")
    both_ways = {"a": "b", "b": "a"}
    refused(Ends(ends[place]), both_ways, r"names: \['a', 'b'\] stand on both sides")
    others = {"b": "a"} if rank else {"a": "b"}
    refused(Ends(ends[place]), others, r"names: rank \d asked for")
    other_shape = Ends(ends[place], (WORDS, WIDTH + place))
    refused(other_shape, {"b": "a"}, r"'a' cannot be one parameter.* on rank 0.* on rank 1")
    other_dtype = Ends(ends[place], dtype=(torch.float32, torch.float64)[place])
    refused(other_dtype, {"b": "a"}, "float32.* on rank 0.*float64.* on rank 1")

    torch.manual_seed(rank)
    part = Ends(ends[place])
    before = part.get_parameter(ends[place]).detach().clone()
    part = shardwise.shard(part, mesh=axes)
    shardwise.parallel.tie(part, {"b": "a"})
    ((name, param),) = part.named_parameters()
    assert name == ends[place]
    assert torch.equal(full(param), before) == (place == 0)  # all take the first stage's values
    shardwise.check.replicas(part)
    if place:
        param.to_local()[0, 0] += 1
    with pytest.raises(ReplicaError, match=r"'a'.*ranks 0, 1 differ"):
        shardwise.check.replicas(part)


@on_ranks(2)
def test_a_window_over_schedules_sums_tied_gradients_once():
    """Gradients of several schedules are summed over stages once, with the last."""
    axes = shardwise.Axes(pp=2)
    for by in BY:
        made = tied_pipeline("1F1B", axes, by=by)
        optimizer = torch.optim.SGD(made.params, lr=0.5)
        whole = Net(tied=True)
        before = sent_for_tied(made)
        for number in range(3):
            with shardwise.accumulate(made.parts, last=number == 2):
                made.step(*batch_of(number, 0))
            x, y = whole_batch(number, 1)
            loss_of(whole(x), y).backward()
        shardwise.parallel.clip_grad_norm_(made.params, 1e9)
        optimizer.step()
        torch.optim.SGD(whole.parameters(), lr=0.5).step()
        assert sent_for_tied(made) - before == 4 * (WORDS * WIDTH + 1)
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for name, param in made.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), ROUNDINGS, name)


@on_ranks(2)
def test_frozen_copies_send_nothing_in_a_step():
    def frozen(part):
        for name, param in part.named_parameters():
            param.requires_grad_(name not in ("embed.weight", "head.weight"))
        return shardwise.shard(part, mesh=axes, units="Block")

    axes = shardwise.Axes(pp=2)
    made = Pipeline("1F1B", axes, 2, frozen)
    shardwise.parallel.tie(made.parts, NAMES)
    before = sent_for_tied(made)
    made.step(*batch_of(0, 0))
    shardwise.parallel.clip_grad_norm_(made.params, 1.0)
    torch.optim.SGD(made.params, lr=0.5).step()
    assert sent_for_tied(made) == before
