"""Pipelines: tied stages, other axes beside them, and `check_gradients` of a schedule's step."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pipelines
import shardwise
from pipelines import (
    BY,
    IN_A_V,
    NUM_BLOCKS,
    THERE,
    WIDTH,
    WORDS,
    Net,
    Pipeline,
    batch_of,
    by_torch,
    collectives_of,
    full,
    loss_of,
    micro_batches_of,
    pipeline_of,
    whole_batch,
)
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.config import Units
from shardwise.errors import ConfigError, GradientError, ReplicaError
from shardwise.parallel.routing import Routing

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
    refused(Ends(ends[place]), both_ways, r"names: \['a', 'b'\] are on both sides")
    others = {"b": "a"} if rank else {"a": "b"}
    refused(Ends(ends[place]), others, r"names: rank \d passed")
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


# -- beside tensor parallelism and replicas
WIDE = 9  # blocks have 12 hidden rows then, as torch's tensor parallelism wants them even
WIDE_ROUNDINGS = 2 * of_gradient(*(9, 12) * NUM_BLOCKS, 9, over=24)
COMPOSED = [
    ({"tp": 2}, "1F1B", 3, False),
    ({"tp": 2}, "ZBVZeroBubble", 2, True),
    ({"dp_replicate": 2, "dp_shard": 1}, "1F1B", 3, True),
    ({"dp_replicate": 2, "dp_shard": 1}, "DualPipeV", 1, True),
]


def parallel(part, axes):
    """Cut a stage over ``tp``: blocks in pairs, embedding and head along the words."""
    if axes["tp"].size() == 1:
        return part
    for block in part.blocks.values():
        parallelize_module(block, axes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(
        part, axes["tp"], {n: how for n, how in plan.items() if getattr(part, n) is not None}
    )


@on_ranks(4)
def test_pipelines_beside_tensor_parallelism_and_replicas_take_the_steps_of_one_process(
    rank, tmp_path
):
    patch = pytest.MonkeyPatch()
    patch.setattr(pipelines, "WIDTH", WIDE)
    for number, (degrees, schedule, stage, tied) in enumerate(COMPOSED):
        axes = shardwise.Axes(pp=2, **degrees)
        settings = {"mesh": axes, "units": "Block", "stage": stage}
        made = Pipeline(
            schedule,
            axes,
            micro_batches_of(schedule, 3),
            lambda part, axes=axes, how=settings: shardwise.shard(parallel(part, axes), **how),
        )
        if tied:
            shardwise.parallel.tie(made.parts, NAMES)
        whole = Net(tied=tied)
        optimizers = [torch.optim.SGD(ps, lr=0.5) for ps in (made.params, whole.parameters())]
        replicas = axes["dp_replicate"]
        for step in range(2):
            made.step(*batch_of(step, replicas.get_local_rank()))
            x, y = whole_batch(step, replicas.size())
            loss_of(whole(x), y).backward()
            norm = shardwise.parallel.clip_grad_norm_(made.params, 0.5)
            wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            assert_rounded_alike(norm, wanted.item(), WIDE_ROUNDINGS)
            for each in optimizers:
                each.step()
                each.zero_grad()
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for name, param in made.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), WIDE_ROUNDINGS, name)
        shardwise.check.replicas(made.parts, optimizers[0])
        shardwise.save(tmp_path / str(number), made.parts, optimizers[0])

        # Into stages that are split, cut and sharded otherwise.
        shards = shardwise.Axes(pp=2)
        other = pipeline_of("GPipe", shards, 3, by="fully_shard")
        if tied:
            shardwise.parallel.tie(other.parts, NAMES)
        shardwise.load(tmp_path / str(number), other.parts)
        for name, param in other.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), WIDE_ROUNDINGS, name)
        if rank == 0:
            alone = Net(tied=tied)
            shardwise.load(tmp_path / str(number), alone)
            for mine, theirs in zip(alone.parameters(), whole.parameters(), strict=True):
                assert_rounded_alike(mine, theirs, WIDE_ROUNDINGS)
        torch.distributed.barrier()
    patch.undo()


# -- parameters on a mesh of their own
class ExpertsBlock(nn.Module):
    """A unit with experts."""

    def __init__(self, width):
        super().__init__()
        self.moe = shardwise.parallel.MixtureOfExperts(
            width, 6, Routing(4, 2), std=0.2, out_std=0.2
        )
        nn.init.normal_(self.moe.router.weight)  # so large that rounding decides no choice

    def forward(self, x):
        return x + self.moe(x)[0]


def sharded_by(by, part, axes):
    shardwise.parallel.spread_experts(part, axes, "blocks.*.moe.experts")
    how = {"mesh": axes, "stage": 3, "precision": "fp32"}
    if by == "fully_shard":
        return BY[by](part, **how)
    return shardwise.shard(part, units=Units(ExpertsBlock, experts="*.experts"), **how)


def counts_gathers_of_other_meshes(axes):
    """A mesh that is told for a parameter gathers once per step, as the model's does."""
    _fsdp_common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    result = getattr(_fsdp_common, "ShardPlacementResult", None)
    if result is None:
        return  # an earlier torch
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "apart"))["apart"]
    info = _fsdp_common.FSDPMeshInfo(own, shard_mesh_dim=0)

    def place(param):
        return result(Shard(0), info) if param.ndim == 1 else None

    def shards(part):
        for block in part.blocks.values():
            shardwise.fully_shard(block, mesh=axes, shard_placement_fn=place)
        return shardwise.fully_shard(part, mesh=axes, shard_placement_fn=place)

    made = Pipeline("1F1B", axes, 6, shards)
    for step in range(2):
        before = collectives_of(made.parts, "shard.all_gather")
        made.step(*batch_of(step, axes["dp_shard"].get_local_rank()))
        gathers = collectives_of(made.parts, "shard.all_gather") - before
        for param in made.params:
            param.grad = None
    assert gathers == 2 * sum(len(part.blocks) for part in made.parts) + 1  # and the root's own


@on_ranks(4)
def test_experts_of_a_stage_have_the_gradients_of_one_process_and_know_of_other_stages():
    axes = shardwise.Axes(pp=2, ep=2)
    patch = pytest.MonkeyPatch()
    patch.setattr(pipelines, "Block", ExpertsBlock)
    whole = Net()
    x, y = whole_batch(0, 2)
    loss_of(whole(x), y).backward()
    grads = {name: param.grad for name, param in whole.named_parameters()}
    norm = nn.utils.get_total_norm([grad for grad in grads.values() if grad is not None])
    roundings = of_gradient(*(8, 4, 8, 6, 2) * NUM_BLOCKS, 8, over=72)
    cases = [("shard", "InterleavedZeroBubble"), ("fully_shard", "InterleavedZeroBubble")]
    cases += [("fully_shard", schedule) for schedule in IN_A_V if schedule in THERE]
    for by, schedule in cases:
        made = Pipeline(
            schedule,
            axes,
            micro_batches_of(schedule, 4),
            lambda part, by=by: sharded_by(by, part, axes),
        )
        made.step(*batch_of(0, axes["dp_shard"].get_local_rank()))
        for name, param in made.named().items():
            what = f"{name}, {by}, {schedule}"
            assert_rounded_alike(full(param.grad), grads[name], roundings, what)
        # The norm is one over all stages, whichever parameter comes first.
        params = [p for _, p in sorted(made.named().items(), key=lambda e: ".experts." not in e[0])]
        assert_rounded_alike(shardwise.parallel.clip_grad_norm_(params, 1.0), norm, roundings)
    patch.undo()
    counts_gathers_of_other_meshes(axes)


# -- `check_gradients`
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
            shardwise.parallel.tie(self.pipeline.parts, NAMES)
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
