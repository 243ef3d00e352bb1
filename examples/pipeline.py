"""3D: stages of a pipeline, tensor parallelism in each, shards over the rest.

    torchrun --nproc-per-node 8 examples/pipeline.py

Each rank has two stages, interleaved, of a language model whose embedding and head are one weight.
The schedule is torch's own; all stages are one model to check_gradients, clipping and checkpoints.
"""

import gc
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists: its defaults would keep it
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise.device import local_device

STEPS, VOCAB, WIDTH, MICRO_BATCHES = 20, 64, 64, 4
PP, STAGES = 2, 4  # ranks of the pipeline, and stages: one block each
TIED = {"head.weight": "embed.weight"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """The model, or one stage of it, with parameters under the names of the whole model."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {str(number): Block() for number in range(STAGES)}
        self.embed = nn.Embedding(VOCAB, WIDTH) if stage in (None, 0) else None
        self.blocks = nn.ModuleDict(blocks if stage is None else {str(stage): blocks[str(stage)]})
        self.head = nn.Linear(WIDTH, VOCAB, bias=False) if stage in (None, STAGES - 1) else None
        if self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_fn(logits: Tensor, tokens: Tensor) -> Tensor:
    target = (7 * tokens + 3) % VOCAB  # the function to learn
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def my_stages(axes: shardwise.Axes) -> range:
    return range(axes["pp"].get_local_rank(), STAGES, PP)


def compose(axes: shardwise.Axes, device: torch.device) -> list[nn.Module]:
    """Make this rank's stages."""
    parts = []
    for stage in my_stages(axes):
        part = Decoder(stage).to(device)
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(part, axes["tp"], plan)
        parts.append(shardwise.shard(part, mesh=axes, units="Block"))
    shardwise.parallel.tie(parts, TIED)
    return parts


def schedule_of(parts: list[nn.Module], axes: shardwise.Axes, device: torch.device) -> Any:
    group = axes["pp"].get_group()
    stages: list[Any] = [
        PipelineStage(part, stage, STAGES, device, group=group)
        for part, stage in zip(parts, my_stages(axes), strict=True)
    ]
    return ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_fn)


def step(schedule: Any, tokens: Tensor, axes: shardwise.Axes) -> list[Tensor]:
    """Run one step of the schedule; return the losses, where the last stage is."""
    losses: list[Tensor] = []
    first, last = (number in my_stages(axes) for number in (0, STAGES - 1))
    told = {"target": tokens, "losses": losses} if last else {}
    schedule.step(*([tokens] if first else []), **told)
    return losses


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axes = shardwise.Axes(pp=PP, tp=2)  # dp_shard is the rest

    # Once, before a new composition trains: has it the gradients of one process?
    report = shardwise.check.gradients(
        lambda: Decoder().to(device),
        torch.arange(128).reshape(16, 8).remainder(VOCAB).to(device),
        axes,
        compose=lambda _: compose(axes, device),
        run=lambda parts, tokens: step(schedule_of(parts, axes, device), tokens, axes),
        loss=lambda model, tokens: loss_fn(model(tokens), tokens),
        micro_batches=MICRO_BATCHES,
    )
    if dist.get_rank() == 0:
        print(report)

    parts = compose(axes, device)
    schedule = schedule_of(parts, axes, device)
    params = [param for part in parts for param in part.parameters()]
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    data = torch.Generator().manual_seed(axes["dp_shard"].get_local_rank())
    for number in range(1, STEPS + 1):
        losses = step(schedule, torch.randint(VOCAB, (8, 16), generator=data).to(device), axes)
        shardwise.parallel.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == dist.get_world_size() - 1 and (number == 1 or number % 5 == 0):
            print(f"step {number:3d}  loss {torch.stack(losses).mean().item():.4f}")

    # One checkpoint of all stages; one process reads it.
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    shardwise.save(f"{folder[0]}/saved", parts, optimizer)
    if dist.get_rank() == dist.get_world_size() - 1:
        whole = Decoder()
        shardwise.load(f"{folder[0]}/saved", whole)
        tokens = torch.randint(VOCAB, (64, 16), generator=data)
        print(f"in one process  loss {loss_fn(whole(tokens), tokens).item():.4f}")
    del parts, schedule, optimizer
    gc.collect()  # hooks form cycles that hold the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
