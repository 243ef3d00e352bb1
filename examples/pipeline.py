"""3D: the stages of a pipeline, tensor parallelism in each, shards over the rest.

    torchrun --nproc-per-node 8 examples/pipeline.py

Embedding and head are one weight. The schedule is torch's; clipping and checkpoints see one model.
"""

import gc
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise.device import local_device

STEPS, VOCAB, WIDTH, MICRO_BATCHES, FOLDER = 20, 64, 64, 4, "runs/pipeline"
PLAN = {"block*.up": ColwiseParallel(), "block*.down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))


def make_model(first: int = 0, end: int = 6) -> nn.Sequential:
    """Make the model, or some of its layers under the names that they have in the whole model."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = nn.init.normal_(embed.weight, std=0.1)  # one weight
    layers = [("embed", embed), *((f"block{n}", Block()) for n in range(4)), ("head", head)]
    return nn.Sequential(OrderedDict(layers[first:end]))


def loss_fn(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), (7 * tokens + 3).flatten() % VOCAB)


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axes = shardwise.Axes(pp=2, tp=2)  # dp_shard is the rest
    number, is_last = axes["pp"].get_local_rank(), dist.get_rank() == dist.get_world_size() - 1
    part = make_model(3 * number, 3 * number + 3).to(device)
    parallelize_module(part, axes["tp"], PLAN)
    shardwise.shard(part, mesh=axes, units="Block")
    shardwise.parallel.tie([part], {"head.weight": "embed.weight"})
    stage = PipelineStage(part, number, 2, device, group=axes["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(axes["dp_shard"].get_local_rank())
    for step in range(1, STEPS + 1):
        tokens = torch.randint(VOCAB, (8, 16), generator=data).to(device)
        losses: list[Tensor] = []  # of the last stage
        schedule.step(*([] if number else [tokens]), target=tokens, losses=losses)
        shardwise.parallel.clip_grad_norm_(part.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_last and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {torch.stack(losses).mean().item():.2f}")
    shardwise.save(FOLDER, part, optimizer, replace=True)  # one checkpoint of all stages
    if is_last:
        shardwise.load(FOLDER, whole := make_model())
        print(f"in one process  loss {loss_fn(whole(tokens.cpu()), tokens.cpu()).item():.2f}")
    del part, stage, schedule, optimizer
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
