"""Runs of the engine with bad settings, and the doctor's findings about their records."""

import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.config import Schedule
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.record import read_run

LAYERS, WIDTH = 24, 256
DEFAULT_BYTES = 1 << 20
# Layers of each unit, bytes of a bucket, and what the doctor says.
ENGINE: dict[str, tuple[tuple[int, ...], int, str]] = {
    "tiny buckets": ((1,) * LAYERS, 1, "SW010"),
    "one huge bucket": ((1,) * LAYERS, 1 << 23, "SW011"),
    "one large unit": ((20, 1, 1, 1, 1), DEFAULT_BYTES, "SW004"),
    "one unit": ((LAYERS,), DEFAULT_BYTES, "SW002"),
}


@cache
def findings(units: tuple[int, ...], bucket_bytes: int) -> tuple[str, ...]:
    """Train an observed model on this group's ranks; return the doctor's codes on each."""
    torch.manual_seed(10)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))) for count in units)
    )
    shardwise.shard(model, units=list(model), stage=3, schedule=Schedule(bucket_bytes=bucket_bytes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[object] = [None]
    with tempfile.TemporaryDirectory() as folder:
        place = [folder]
        dist.broadcast_object_list(place)
        with shardwise.observe(model, optimizer, place[0]):
            for _ in range(2):
                model(torch.ones(1, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        if dist.get_rank() == 0:
            found = [tuple(each.code for each in diagnose(read_run(Path(place[0]))).findings)]
        dist.broadcast_object_list(found)
    codes = found[0]
    assert isinstance(codes, tuple)
    return codes
