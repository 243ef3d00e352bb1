"""What the host spends on units beside their operations: the engine's own Python, and checkpoints'.

It is measured on the same model plain, sharded, and with each block under activation checkpointing.
Its blocks are small, so that little else takes time, but their products large enough that the
host's code is not in the caches when its turn comes: it takes three times as long then.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise.bench.compute import both_ways
from shardwise.bench.stopwatch import Stopwatch
from shardwise.config import Schedule
from shardwise.engine.api import shard

_NUM_BLOCKS = 16
_LAYERS_PER_BLOCK = 8  # parameters of a unit, as a decoder's block has
_WIDTH = 128
_TOKENS = 128


@dataclass(frozen=True)
class HostSeconds:
    """Seconds of one unit's forward and backward, and of one checkpointed block in both."""

    forward: float
    backward: float
    checkpoint: float


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS_PER_BLOCK))
            )
            for _ in range(_NUM_BLOCKS)
        )
        self.checkpointed = False

    def forward(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointed:
                stream = checkpoint(block, stream, use_reentrant=False)
            else:
                stream = block(stream)
        return stream


def host_seconds(watch: Stopwatch) -> HostSeconds:
    """Measure what a sharded and a checkpointed block take beyond a plain one.

    Each rank shards over itself alone: what is sent is measured with the collectives.
    """
    plain, checkpointed, sharded = (_Blocks().to(watch.device) for _ in range(3))
    checkpointed.checkpointed = True
    mesh = init_device_mesh(
        watch.device.type, (watch.num_ranks, 1), mesh_dim_names=("replicate", "shard")
    )
    shard(sharded, stage=3, mesh=mesh["shard"], schedule=Schedule(bucket_bytes=1))
    start = torch.ones(_TOKENS, _WIDTH, device=watch.device, requires_grad=True)

    def measure(model: nn.Module) -> list[float]:
        leaves = [*model.parameters()]
        return watch.parts(both_ways(watch, lambda: model(start).sum(), leaves))

    (forward, backward), both, of_engine = map(measure, (plain, checkpointed, sharded))
    again = sum(both) - forward - backward - forward  # beyond running the forward once more
    return HostSeconds(
        max(0.0, of_engine[0] - forward) / _NUM_BLOCKS,
        max(0.0, of_engine[1] - backward) / _NUM_BLOCKS,
        max(0.0, again) / _NUM_BLOCKS,
    )
