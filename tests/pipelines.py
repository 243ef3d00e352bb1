"""Pipelines for tests: a small language model in stages, under any schedule of torch."""

from functools import partial

import torch
import torch.distributed.pipelining.schedules as schedules
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import PipelineStage

import shardwise
from models import Block
from shardwise.interop.fsdp2 import fully_shard

WORDS, WIDTH, LENGTH = 11, 8, 3
NUM_BLOCKS = 8
ROWS = 12  # of each data-parallel rank in a step

SINGLE = ("GPipe", "1F1B")
LOOPING = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
THERE = [n for n in (*SINGLE, *LOOPING, *IN_A_V) if hasattr(schedules, f"Schedule{n}")]
BY_AUTOGRAD_GRAD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def micro_batches_of(schedule, wanted):
    """Return how many micro-batches to take: 1F1B and DualPipeV have no fewer than stages."""
    return max(wanted, {"1F1B": 2, "DualPipeV": 4}.get(schedule, 1))


class Net(nn.Module):
    """A language model, or what one stage has of it, under the names of the whole."""

    def __init__(self, blocks=range(NUM_BLOCKS), *, ends="both", tied=False):
        super().__init__()
        torch.manual_seed(0)
        made = [Block(WIDTH) for _ in range(NUM_BLOCKS)]
        embed, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            head.weight = embed.weight
        self.embed = embed if ends in ("both", "first") else None
        self.blocks = nn.ModuleDict({str(number): made[number] for number in blocks})
        self.head = head if ends in ("both", "last") else None

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def batch_of(step, rank):
    """Return what one data-parallel rank sees in a step: words, and those that follow."""
    words = torch.randint(
        WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank)
    )
    return words[:, :-1].contiguous(), words[:, 1:]  # torch 2.11 wants inputs of a stage so


def whole_batch(step, num_ranks):
    batches = [batch_of(step, rank) for rank in range(num_ranks)]
    xs, ys = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return xs, ys


def stage_of(index, num):
    """Return one of ``num`` stages, not sharded."""
    each = NUM_BLOCKS // num
    ends = "first" if index == 0 else "last" if index == num - 1 else "none"
    blocks = range(index * each, (index + 1) * each)
    return Net(blocks, ends="both" if num == 1 else ends)


def by_fully_shard(part, *, mesh, stage, precision):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = None if precision == "fp32" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    kwargs = {"mesh": mesh, "mp_policy": policy}
    for block in part.blocks.values():
        fully_shard(block, **kwargs)
    return fully_shard(part, **kwargs)


def by_shard(part, **settings):
    return shardwise.shard(part, units=Block, **settings)


def by_torch(part, mesh):
    """Shard by torch's own, which loses gradients of zero-bubble schedules if it frees in forward.

    Its modules show DTensors then, and the schedule looks for gradients of what they show.
    """
    for block in part.blocks.values():
        torch_fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return torch_fully_shard(part, mesh=mesh, reshard_after_forward=False)


BY = {"shard": by_shard, "fully_shard": by_fully_shard}


class Pipeline:
    """This rank's stages of the model, under one schedule."""

    def __init__(
        self,
        schedule,
        axes,
        num_micro_batches,
        shards,
        *,
        stages_per_rank=2,
        stage_class=PipelineStage,
        **settings,
    ):
        place, size = axes["pp"].get_local_rank(), axes["pp"].size()
        num = size if schedule in SINGLE else stages_per_rank * size
        if schedule in IN_A_V:
            self.indices = [place, num - 1 - place]
        else:
            self.indices = list(range(place, num, size))
        self.num_stages = num
        self.parts = [shards(stage_of(index, num)) for index in self.indices]
        stages = [
            stage_class(part, index, num, torch.device("cpu"), group=axes["pp"].get_group())
            for part, index in zip(self.parts, self.indices, strict=True)
        ]
        makes = getattr(schedules, f"Schedule{schedule}")
        settings.setdefault("loss_fn", loss_of)
        takes = stages[0] if schedule in SINGLE else stages
        self.schedule = makes(takes, num_micro_batches, **settings)

    def step(self, x, y):
        args = (x,) if 0 in self.indices else ()
        kwargs = {"target": y} if self.num_stages - 1 in self.indices else {}
        self.schedule.step(*args, **kwargs)

    @property
    def params(self):
        return [param for part in self.parts for param in part.parameters()]

    def named(self):
        return {n: param for part in self.parts for n, param in part.named_parameters()}


def full(tensor):
    made = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return made.detach()


def pipeline_of(
    schedule, axes, num_micro_batches, *, by="shard", stage=3, precision="fp32", **more
):
    """Return a pipeline whose stages are sharded one way or the other."""
    shards = partial(BY[by], mesh=axes, stage=stage, precision=precision)
    return Pipeline(schedule, axes, num_micro_batches, shards, **more)


def collectives_of(parts, kind):
    return sum(shardwise.debug.stats(part).num_collectives.get(kind, 0) for part in parts)
