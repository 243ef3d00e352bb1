"""`check_gradients` holds a step of a pipeline's schedule against one process."""

from functools import partial

import pytest
import torch
from torch import nn

import shardwise
from pipelines import BY, Net, Pipeline, batch_of, by_torch, loss_of, micro_batches_of, whole_batch
from ranks import on_ranks
from shardwise.errors import ConfigError, GradientError


def plain_loss(model, batch):
    x, y = batch
    return loss_of(model(x), y)


class Checked:
    """One pipeline, as `check_gradients` is told of it."""

    def __init__(self, schedule, axes, shards, *, tied=False, ties=True, **how):
        self.axes, self.tied, self.ties = axes, tied, tied and ties
        self.num = micro_batches_of(schedule, 3)
        self.makes = lambda: Pipeline(schedule, axes, self.num, shards, **how)

    def compose(self, model):
        self.pipeline = self.makes()
        if self.ties:
            shardwise.parallel.tie(self.pipeline.parts, {"head.weight": "embed.weight"})
        return self.pipeline.parts

    def run(self, parts, batch):
        assert parts is not None
        self.pipeline.step(*batch)

    def report(self, **more):
        told = {"compose": self.compose, "run": self.run, "loss": plain_loss, **more}
        return shardwise.check.gradients(
            lambda: Net(tied=self.tied),
            whole_batch(0, self.axes["dp_shard"].size()),
            self.axes,
            micro_batches=self.num,
            **told,
        )


@on_ranks(4)
def test_schedules_are_checked_against_one_process():
    """Two of them: the steps of all are in test_pipeline_schedules.py."""
    axes = shardwise.Axes(pp=2)
    shards = {by: partial(BY[by], mesh=axes, stage=3, precision="fp32") for by in BY}
    for number, schedule in enumerate(("1F1B", "Interleaved1F1B")):
        by = ("shard", "fully_shard")[number % 2]
        report = Checked(schedule, axes, shards[by], tied=number == 0).report()
        assert not report.wrong
        names = [check.name for check in report.checks]  # of all stages, on every rank
        assert sorted(names) == sorted(n for n, _ in Net().named_parameters())
    theirs = Checked("1F1B", axes, partial(by_torch, mesh=axes["dp_shard"])).report()
    assert not theirs.wrong


@on_ranks(2)
def test_a_scale_of_micro_batches_and_a_missing_last_sync_are_named_on_all_ranks():
    axes = shardwise.Axes(pp=2)
    shards = partial(BY["shard"], mesh=axes, stage=3, precision="fp32")

    def said_of(checked, **more):
        with pytest.raises(GradientError) as caught:
            checked.report(**more)
        return str(caught.value)

    # Micro-batches whose losses nobody divides: 3 times, on all ranks alike.
    said = said_of(Checked("Interleaved1F1B", axes, shards, scale_grads=False))
    assert "34 of 34 gradients are wrong" in said
    assert "3 times too large: 3 is micro-batches: the loss of each is to be divided" in said

    # One stage forgets its last reduction, as if a schedule had not said that it is over.
    checked = Checked("1F1B", axes, shards)

    def forgets(parts, batch):
        checked.run(parts, batch)
        if axes["pp"].get_local_rank() == 1:
            for param in parts[0].parameters():
                param.grad = None

    said = said_of(checked, run=forgets)
    assert "there is no gradient; in one process there is" in said
    assert "blocks.*.up.weight (4 parameters)" in said

    # Copies that are one parameter in the plain model, and not tied here.
    said = said_of(Checked("GPipe", axes, shards, tied=True, ties=False))
    assert "head.weight: the gradient is no multiple of the right one" in said
    assert "embed.weight: the gradient is no multiple of the right one" in said


class WithMore(Net):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.zeros(2))


@on_ranks(2)
def test_stages_that_are_not_the_plain_model_are_refused_on_all_ranks():
    axes = shardwise.Axes(pp=2)
    shards = partial(BY["shard"], mesh=axes, stage=3, precision="fp32")
    checked = Checked("Interleaved1F1B", axes, shards)
    with pytest.raises(ConfigError, match="run: compose= returned several stages"):
        checked.report(run=None)
    with pytest.raises(ConfigError, match="no stage has 'more' of the plain model"):
        shardwise.check.gradients(
            WithMore, batch_of(0, 0), axes, compose=checked.compose, run=checked.run
        )
    with pytest.raises(ConfigError, match=r"make_model: 'blocks\.\d.* the plain one has no such"):
        shardwise.check.gradients(
            lambda: Net(range(1)), batch_of(0, 0), axes, compose=checked.compose, run=checked.run
        )
