"""torch's pipelining drives stages that were given to `shard()`, as it drives those of FSDP2."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor

import shardwise
from models import Block
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import shard
from shardwise.engine.api import engine_of, is_sharded
from shardwise.unit.states import GradState, ParamState

STEPS = 2
ROWS, BATCHES = 4, 2  # of each data-parallel rank in a step, in so many micro-batches
LOSS = nn.functional.mse_loss
LOOPING = (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble)


class Part(nn.Module):
    """One pipeline stage: two units, and a root with something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def whole(num: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Part() for _ in range(num)))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 8, generator=generator)


class Stage(PipelineStage):
    """A pipeline stage that looks at what the first pass, which finds shapes, leaves behind."""

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        if is_sharded(self.submod):
            is_at_rest(self.submod)
            self.submod.num_inferred = 1


class Pipeline:
    """This rank's stages of a model, under one schedule."""

    def __init__(self, schedule: Any, mesh: DeviceMesh, num: int, shards: Any) -> None:
        place, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
        size = mesh["pp"].size()
        self.indices = list(range(place, num, size))
        self.parts = [copy.deepcopy(whole(num)[index]) for index in self.indices]
        for part in self.parts:
            shards(part)
        stages = [
            Stage(part, index, num, torch.device("cpu"), group=group)
            for part, index in zip(self.parts, self.indices, strict=True)
        ]
        self.is_first, self.is_last = 0 in self.indices, num - 1 in self.indices
        takes = stages[0] if issubclass(schedule, ScheduleGPipe | Schedule1F1B) else stages
        self.schedule = schedule(takes, BATCHES, loss_fn=LOSS)

    def step(self, x: Tensor, y: Tensor) -> None:
        args = (x,) if self.is_first else ()
        self.schedule.step(*args, **({"target": y} if self.is_last else {}))

    def grads(self) -> list[Tensor]:
        return [full(p.grad) for part in self.parts for p in part.parameters()]


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def torchs_own(part: nn.Module, mesh: DeviceMesh) -> None:
    """Shard by torch's own, which loses gradients of zero-bubble schedules if it frees in forward.

    Its modules show DTensors then, and the schedule looks for gradients of what they show.
    """
    for block in part.blocks:
        torch_fully_shard(block, mesh=mesh, reshard_after_forward=False)
    torch_fully_shard(part, mesh=mesh, reshard_after_forward=False)


def gathers_of(parts: list[nn.Module]) -> int:
    return sum(
        shardwise.debug.stats(part).num_collectives.get("shard.all_gather", 0) for part in parts
    )


def is_at_rest(part: nn.Module) -> None:
    """Nothing of a pass is left: no gradients, no full parameters, shards in the modules."""
    engine = engine_of(part)
    frees = engine.config.stage.frees_after_backward
    for unit in engine.units:
        assert unit.grad_state is GradState.EMPTY and not unit.is_pinned
        assert not frees or unit.param_state is ParamState.SHARDED
        for param in unit.params:
            assert not param.keeps_grad
    assert all(isinstance(p, DTensor) and p.grad is None for p in part.parameters())
    assert not engine.is_in_window and not engine.is_running()


def steps_of_torchs_own(schedule: Any, mesh: DeviceMesh, num: int) -> list[list[Tensor]]:
    """Return FSDP2's gradients of two steps."""
    theirs = Pipeline(schedule, mesh, num, functools.partial(torchs_own, mesh=mesh["dp"]))
    found = []
    for number in range(STEPS):
        theirs.step(*batch_of(number, mesh["dp"].get_local_rank()))
        found.append(theirs.grads())
        forget_grads(theirs.parts)
    return found


def forget_grads(parts: list[nn.Module]) -> None:
    for part in parts:
        for param in part.parameters():
            param.grad = None


def steps(
    schedule: Any, mesh: DeviceMesh, num: int, stage: int, of_torch: list[list[Tensor]]
) -> None:
    """Two steps: gradients of one process over the whole batch, and the bits of FSDP2's."""
    dp = mesh["dp"]
    ours = Pipeline(schedule, mesh, num, functools.partial(shard, stage=stage, mesh=dp))
    for part in ours.parts:
        assert isinstance(part, FSDPModule) and isinstance(part, Part)
        if schedule is ScheduleGPipe:  # those that loop open and close their stages
            part.set_reshard_after_forward(False)
    for number in range(STEPS):
        x, y = batch_of(number, dp.get_local_rank())
        before = gathers_of(ours.parts)
        ours.step(x, y)
        if hasattr(PipelineStage, "_post_metadata_inference_cleanup"):  # torch 2.11 lacks it
            assert all(part.num_inferred for part in ours.parts)
        if number and stage == 3 and dp.size() > 1 and schedule is not Schedule1F1B:
            assert gathers_of(ours.parts) - before == 3 * len(ours.parts)
        reference = whole(num)
        batches = [batch_of(number, rank) for rank in range(dp.size())]
        xs, ys = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        LOSS(reference(xs), ys).backward()
        expected = [p.grad for index in ours.indices for p in reference[index].parameters()]
        roundings = of_gradient(*(8, 11) * 2 * num, over=ROWS * dp.size())
        for mine, torchs, wanted in zip(ours.grads(), of_torch[number], expected, strict=True):
            assert_rounded_alike(mine, wanted, roundings)
            if dp.size() < 3:
                assert torch.equal(mine, torchs)
        forget_grads(ours.parts)
        for part in ours.parts:
            is_at_rest(part)


@pytest.mark.parametrize(
    ("world", "num_stages", "stages"), [(4, 2, (0, 2, 3)), (2, 2, (3,)), (3, 1, (2, 3))]
)
@on_ranks()
def test_stages_of_shard_take_the_steps_of_one_process_and_of_fsdp2(world, num_stages, stages):
    shape = (num_stages, world // num_stages)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    schedules = [(schedule, num_stages) for schedule in (ScheduleGPipe, Schedule1F1B)]
    if num_stages > 1:
        schedules += [(schedule, 2 * num_stages) for schedule in LOOPING]
    for schedule, num in schedules:
        expected = steps_of_torchs_own(schedule, mesh, num)
        for stage in stages:
            steps(schedule, mesh, num, stage, expected)
