"""Host memory of a run with state off the device, and of copies for its checkpoints, as planned."""

import ctypes
import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shardwise import Checkpoints, Offload, shard
from shardwise.device import HostTime
from shardwise.engine.api import engine_of
from shardwise.homes import folders_of
from shardwise.offload.home import Home
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tracing import trace
from shardwise.plan.step.play import play

WIDTH, DEPTH, ROWS = 1024, 12, 2
MMAP_THRESHOLD = -3  # of mallopt(3)
ALIGNMENT = 64  # of a tensor in the copy that is written
DESCRIPTION_BYTES = 1024  # at most, of a tensor in its file's header, index and manifest
PLACES = [
    Offload("cpu", "cpu", "cpu"),
    Offload("device", "cpu", "nvme"),
    Offload("cpu", "cpu", "nvme", fraction=0.5),
    Offload("nvme", "nvme", "nvme"),
]


def make_model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def loss_of(model, batch):
    return model(batch).square().mean()


def make_batch():
    return torch.ones(ROWS, WIDTH)


def planned(place):
    candidate = Candidate(
        precision="fp32",
        micro_batch=ROWS,
        units=("Linear",),
        offload=place,
        transport="point_to_point",
    )
    sizes = {"compute_dtype": "float32", "units": ("Linear",)}
    return play(trace(make_model(), make_batch, loss_of, name="model", **sizes), candidate)


def anonymous_bytes():
    """Return the memory that this process has for itself: neither files nor what is shared."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is freed is given back
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def train(place):
    with torch.device("meta"):
        plain = make_model()
    model = shard(plain, units=nn.Linear, offload=place)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        loss_of(model, make_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()  # waits
    return model, optimizer


def held(model, optimizer):
    """Return what buffers of files and state on the host take."""
    homes = [unit.home for unit in engine_of(model).units if unit.home is not None]
    disks = {disk for home in homes for disk in vars(home.files).values() if disk is not None}
    found = sum(disk.pool.num_bytes for disk in disks)
    in_files = homes[0].files.optimizer is not None
    values = [v for state in optimizer.state.values() for v in state.values()]
    moved = (getattr(v, "_local_tensor", v) for v in values if v.ndim == 0 or not in_files)
    found += sum(v.nbytes for v in moved)
    return found


def measure(rank, world_size, place, folder):
    """Return the bytes of host memory as counted, and what the process grew by."""
    where = f"nvme:{folder}"
    names = [n for n in ("params", "grads", "optimizer") if folders_of(getattr(place, n))]
    place = Offload(**{**vars(place), **dict.fromkeys(names, where)})
    made = []
    locked, memory = HostTime.locked_memory, Home.allocate

    def locked_memory(time, num_bytes):
        made.append(num_bytes)
        return locked(time, num_bytes)

    def home_memory(home, numel, dtype):
        made.append(numel * dtype.itemsize)
        return memory(home, numel, dtype)

    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 18)  # large pieces are given back when freed
    train(place)  # whatever is loaded and started once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTime, "locked_memory", locked_memory)
        patch.setattr(Home, "allocate", home_memory)
        before = anonymous_bytes()
        model, optimizer = train(place)
        grown = anonymous_bytes() - before
    return sum(made) + held(model, optimizer), grown


@pytest.mark.parametrize("place", PLACES)
def test_a_run_takes_the_host_memory_of_its_plan_and_five_per_cent_at_most(place, tmp_path):
    played = planned(place)
    [(counted, grown)] = run_ranks(measure, 1, place, tmp_path, fresh=True)
    assert played.host.total <= counted <= 1.05 * played.host.total
    here = played.host.total + played.device.total  # the device is the host
    assert 0.95 * here <= grown <= 1.05 * here


def copied(rank, world_size, stage, place, folder):
    """Return what a rank's saves hold: the copy that is written, and all files in memory."""
    model = shard(make_model(), stage=stage, units=nn.Linear, offload=place)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Checkpoints(
        folder / "run", model, optimizer, memory_every=1, memory_folder=folder / "memory"
    ) as checkpoints:
        for step in (1, 2, 3):
            loss_of(model, make_batch()).backward()
            optimizer.step()
            saving = checkpoints.copy_to_memory(step)
            saving.wait()
            engine_of(model).all_ranks.exchange(b"here")
        files = [path for path in (folder / "memory").rglob("*") if path.is_file()]
        in_files = sum(path.stat().st_size for path in files)
        engine_of(model).all_ranks.exchange(
            b"here"
        )  # none leaves, and clears, before all have seen
        return saving.held_bytes, in_files


@pytest.mark.parametrize(("stage", "world_size", "optimizer"), [(0, 3, ""), (3, 2, "nvme")])
def test_copies_of_the_state_take_the_host_memory_of_their_plan(
    stage, world_size, optimizer, tmp_path
):
    place = Offload("cpu", "cpu", f"nvme:{tmp_path}") if optimizer else None
    candidate = Candidate(
        stage=stage,
        num_shards=world_size,
        precision="fp32",
        micro_batch=ROWS,
        units=("Linear",),
        offload=place or Offload(),
        transport="point_to_point",
    )
    sizes = {"compute_dtype": "float32", "units": ("Linear",)}
    tape = trace(make_model(), make_batch, loss_of, name="model", **sizes)
    saved = play(tape, replace(candidate, save_every=1))
    both = play(tape, replace(candidate, save_every=1, memory_every=1))
    copy = saved.files if optimizer else saved.host
    in_memory = both.host.checkpoint_copies - saved.host.checkpoint_copies

    [(held, in_files), *_] = run_ranks(copied, world_size, stage, place, tmp_path)
    num_tensors = 4 * DEPTH  # weights, two moments, step counts
    assert copy.checkpoint_copies <= held <= copy.checkpoint_copies + num_tensors * ALIGNMENT
    described = 2 * num_tensors * DESCRIPTION_BYTES * world_size
    uneven = 2 * num_tensors * 4 * WIDTH * world_size  # a row more than the other ranks
    assert in_files - described <= in_memory * world_size <= in_files + uneven
