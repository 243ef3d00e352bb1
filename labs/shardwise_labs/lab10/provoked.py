"""Runs of the engine with bad settings, and the doctor's findings about their records."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.config import Schedule
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.record import RunRecord, read_run
from shardwise.offload.files import System
from shardwise.trace import Tracer

LAYERS, WIDTH = 24, 256
DELAY_S = 0.03  # of each copy over the slow link, and of each read from the slow disk
STEP_S = 120.0  # for which a step counts in runs that last long
# What a run may be told, and what it is told by default.
USUAL: dict[str, object] = {
    "units": [1] * LAYERS,  # layers of each
    "bucket_bytes": 1 << 20,
    "offload": None,
    "save_every": None,  # steps
}
# The settings that are bad, and what the doctor says.
ENGINE: dict[str, tuple[dict[str, object], str]] = {
    "tiny buckets": ({"bucket_bytes": 1}, "SW010"),
    "one huge bucket": ({"bucket_bytes": 1 << 23}, "SW011"),
    "one large unit": ({"units": [20, 1, 1, 1, 1]}, "SW004"),
    "one unit": ({"units": [LAYERS]}, "SW002"),
    "slow link": ({"units": [1, 1], "offload": "cpu"}, "SW032"),
    "slow disk": ({"units": [1, 1], "offload": "files"}, "SW033"),
    "no saves": ({"units": [1, 1]}, "SW051"),
}

# The setting that a finding is about.
ABOUT = {
    "SW002": "units",
    "SW004": "units",
    "SW010": "bucket_bytes",
    "SW011": "bucket_bytes",
    "SW032": "offload",
    "SW033": "offload",
    "SW051": "save_every",
}


def findings(name: str, settings: Mapping[str, object]) -> tuple[str, ...]:
    """Return the doctor's codes on each rank about a run with a failure's settings."""
    units = tuple(settings["units"])  # type: ignore[arg-type]
    told = settings["bucket_bytes"], settings["offload"], settings["save_every"]
    slow = {"slow link": "link", "slow disk": "disk"}.get(name)
    return _findings(slow, name == "no saves", units, *told)  # type: ignore[arg-type]


@cache
def _findings(
    slow: str | None,
    is_long: bool,
    units: tuple[int, ...],
    bucket_bytes: int,
    offload: str | None,
    save_every: int | None,
) -> tuple[str, ...]:
    """Train an observed model on this group's ranks; return the doctor's codes on each."""
    steps = 20 if is_long else 8 if slow else 2
    found: list[object] = [None]
    with tempfile.TemporaryDirectory() as folder:
        place = [folder]
        dist.broadcast_object_list(place)
        with _slow(slow):
            where = f"nvme:{place[0]}" if offload == "files" else offload
            _train(Path(place[0]), units, bucket_bytes, where, save_every, steps)
        dist.barrier()
        if dist.get_rank() == 0:
            run = read_run(Path(place[0]))
            found = [tuple(e.code for e in diagnose(_slowed(run) if is_long else run).findings)]
        dist.broadcast_object_list(found)
    codes = found[0]
    assert isinstance(codes, tuple)
    return codes


def _train(
    folder: Path,
    units: tuple[int, ...],
    bucket_bytes: int,
    offload: str | None,
    save_every: int | None,
    steps: int,
) -> None:
    torch.manual_seed(10)
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))) for count in units)
    )
    schedule = Schedule(bucket_bytes=bucket_bytes)
    shardwise.shard(model, units=list(model), stage=3, schedule=schedule, offload=offload)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with (
        shardwise.observe(model, optimizer, folder, every=1),
        shardwise.Checkpoints(folder / "saves", model, optimizer) as saves,
    ):
        for step in range(1, steps + 1):
            model(torch.ones(1, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if save_every and step % save_every == 0:
                saves.save(step)


@contextmanager
def _slow(part: str | None) -> Iterator[None]:
    """Delay copies between host and device ("link"), or reads of files ("disk")."""
    copies, read = Tracer.copies, System.read

    @contextmanager
    def slow_copies(*args: Any) -> Iterator[None]:
        with copies(*args):
            time.sleep(DELAY_S)
            yield

    def slow_read(*args: Any) -> Any:
        time.sleep(DELAY_S)
        return read(*args)

    with (
        mock.patch.object(Tracer, "copies", slow_copies if part == "link" else copies),
        mock.patch.object(System, "read", slow_read if part == "disk" else read),
    ):
        yield


def _slowed(run: RunRecord) -> RunRecord:
    """Return the record with steps of `STEP_S`: what a run of an hour would have recorded."""
    steps = tuple(replace(line, at_s=STEP_S * line.step) for line in run.steps)
    return replace(run, steps=steps)
