"""Pipelines with tensor parallelism, and with replicas of shards: the steps of one process."""

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
    Net,
    Pipeline,
    batch_of,
    collectives_of,
    full,
    loss_of,
    micro_batches_of,
    whole_batch,
)
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.config import Units
from shardwise.parallel.routing import Routing

STEPS = 2
WIDTH = 9  # blocks have 12 hidden rows then, as torch's tensor parallelism wants them even
ROUNDINGS = STEPS * of_gradient(*(9, 12) * NUM_BLOCKS, 9, over=24)
CASES = [
    ({"tp": 2}, "1F1B", 3, False),
    ({"tp": 2}, "ZBVZeroBubble", 2, False),
    ({"tp": 2}, "Interleaved1F1B", 3, True),
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
    patch.setattr(pipelines, "WIDTH", WIDTH)
    for number, (degrees, schedule, stage, tied) in enumerate(CASES):
        axes = shardwise.Axes(pp=2, **degrees)
        settings = {"mesh": axes, "units": "Block", "stage": stage}
        made = Pipeline(
            schedule,
            axes,
            pipelines.micro_batches_of(schedule, 3),
            lambda part, axes=axes, how=settings: shardwise.shard(parallel(part, axes), **how),
        )
        if tied:
            shardwise.parallel.tie(made.parts, {"head.weight": "embed.weight"})
        whole = Net(tied=tied)
        optimizers = [torch.optim.SGD(ps, lr=0.5) for ps in (made.params, whole.parameters())]
        replicas = axes["dp_replicate"]
        for step in range(STEPS):
            made.step(*batch_of(step, replicas.get_local_rank()))
            x, y = whole_batch(step, replicas.size())
            loss_of(whole(x), y).backward()
            norm = shardwise.parallel.clip_grad_norm_(made.params, 0.5)
            wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            assert_rounded_alike(norm, wanted.item(), ROUNDINGS)
            for each in optimizers:
                each.step()
                each.zero_grad()
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for name, param in made.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), ROUNDINGS, name)
        shardwise.check.replicas(made.parts, optimizers[0])
        shardwise.save(tmp_path / str(number), made.parts, optimizers[0])

        # Into stages that are split, cut and sharded otherwise.
        shards = shardwise.Axes(pp=2)
        other = pipelines.pipeline_of("GPipe", shards, 3, by="fully_shard")
        if tied:
            shardwise.parallel.tie(other.parts, {"head.weight": "embed.weight"})
        shardwise.load(tmp_path / str(number), other.parts)
        for name, param in other.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), ROUNDINGS, name)
        if rank == 0:
            alone = Net(tied=tied)
            shardwise.load(tmp_path / str(number), alone)
            for mine, theirs in zip(alone.parameters(), whole.parameters(), strict=True):
                assert_rounded_alike(mine, theirs, ROUNDINGS)
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
