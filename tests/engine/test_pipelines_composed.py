"""Pipelines with tensor parallelism, and with replicas of shards: the steps of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pipelines
import shardwise
from pipelines import NUM_BLOCKS, Net, Pipeline, batch_of, full, loss_of, whole_batch
from ranks import run_ranks
from roundings import assert_rounded_alike, of_gradient

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


def parallel(part: Any, axes: shardwise.Axes) -> Any:
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


def composed(rank: int, num_ranks: int, folder: Path) -> None:
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
            shardwise.tie(made.parts, {"head.weight": "embed.weight"})
        whole = Net(tied=tied)
        optimizers = [torch.optim.SGD(ps, lr=0.5) for ps in (made.params, whole.parameters())]
        replicas = axes["dp_replicate"]
        for step in range(STEPS):
            made.step(*batch_of(step, replicas.get_local_rank()))
            x, y = whole_batch(step, replicas.size())
            loss_of(whole(x), y).backward()
            norm = shardwise.clip_grad_norm_(made.params, 0.5)
            wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            assert_rounded_alike(norm, wanted.item(), ROUNDINGS)
            for each in optimizers:
                each.step()
                each.zero_grad()
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for name, param in made.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), ROUNDINGS, name)
        shardwise.check_replicas(made.parts, optimizers[0])
        shardwise.save(folder / str(number), made.parts, optimizers[0])

        # Into stages that are split, cut and sharded otherwise.
        shards = shardwise.Axes(pp=2)
        other = pipelines.pipeline_of("GPipe", shards, 3, by="fully_shard")
        if tied:
            shardwise.tie(other.parts, {"head.weight": "embed.weight"})
        shardwise.load(folder / str(number), other.parts)
        for name, param in other.named().items():
            assert_rounded_alike(full(param), expected[name].detach(), ROUNDINGS, name)
        if rank == 0:
            alone = Net(tied=tied)
            shardwise.load(folder / str(number), alone)
            for mine, theirs in zip(alone.parameters(), whole.parameters(), strict=True):
                assert_rounded_alike(mine, theirs, ROUNDINGS)
        torch.distributed.barrier()
    patch.undo()


def test_pipelines_beside_tensor_parallelism_and_replicas_take_the_steps_of_one_process(
    tmp_path: Path,
) -> None:
    run_ranks(composed, 4, tmp_path)
