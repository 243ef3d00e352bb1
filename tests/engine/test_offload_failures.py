"""The disk or host memory of one rank fails: all ranks end soon, and name rank, unit and path."""

import errno
import os
import time

import pytest
import torch
from test_offload_files import OPTIMIZERS
from torch import nn

from models import Stack
from ranks import HANG_S, on_ranks, run_ranks
from same_runs import assert_same, go_on, make, train
from shardwise import Offload, load, save, shard
from shardwise.device import HostTime
from shardwise.errors import CheckpointError, CollectiveError, ConfigError, ShardError, StorageError
from shardwise.hangs.abort import WATCH
from shardwise.offload import file_slices
from shardwise.offload.files import System
from shardwise.step.state_files import StateFile

SOON_S = HANG_S / 4  # before the process group would say that it has waited too long


def io_error(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def full_after(num_files):
    """Return what reserves space as a disk that is full after some files does."""
    reserve, made = System.reserve, []

    def fill(self, fd, num_bytes):
        if len(made) == num_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(num_bytes)
        reserve(self, fd, num_bytes)

    return fill


@pytest.mark.parametrize(
    ("world_size", "name"),
    [*((1, name) for name in OPTIMIZERS if name not in ("adamw", "sgd")), (3, "adamw")],
)
@on_ranks()
def test_one_full_disk_at_the_first_step_changes_nothing_on_any_rank(
    rank, world_size, tmp_path, name
):
    """Only one rank has no room: no rank has stepped, and all can step when there is room."""
    place = f"nvme:{tmp_path}"
    expected = train(*make(name, place), 2)
    model, optimizer = make(name, place)
    before = [param.full_tensor() for param in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setattr(System, "reserve", full_after(2))
        said = rf"rank {world_size - 1}, unit '\S+': .* are needed in {tmp_path}, and .* are free"
        with pytest.raises(StorageError, match=said):
            train(model, optimizer, 1)
    assert_same([param.full_tensor() for param in model.parameters()], before)
    assert not any(optimizer.state.values())
    optimizer.zero_grad()
    assert_same(train(model, optimizer, 2), expected)


@on_ranks(1, 3)
def test_one_rank_without_room_in_shard_is_told_to_all_first(rank, world_size, tmp_path):
    """One rank has no memory for the slab, or no space for the slices of the third unit."""
    victim = world_size - 1

    def no_memory(*_):
        raise RuntimeError("can't allocate memory")

    in_files = Offload(f"nvme:{tmp_path}", optimizer="cpu")
    cases = [
        ("cpu", (HostTime, "locked_memory"), no_memory, ": the .* of host memory .* allocate"),
        (in_files, (System, "reserve"), full_after(4), rf", unit '\S+': .* needed in {tmp_path}"),
        (f"nvme:{tmp_path}", (System, "reserve"), full_after(0), ".*No space left"),
    ]
    for offload, (where, name), fails, said in cases:
        model = Stack()
        params = [*model.parameters()]
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                patch.setattr(where, name, fails)
            told = (StorageError, ConfigError)
            with pytest.raises(told, match=rf"(?s)rank {victim}{said}"):
                shard(model, offload=offload)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert all(type(param) is nn.Parameter for param in params)
        shard(model, offload=offload)(torch.ones(2, 8))


def in_a_write(patch):
    patch.setattr(System, "write", io_error)


def in_a_read(patch):
    patch.setattr(System, "read", io_error)


def in_the_first_store(patch):
    store, stored = StateFile.store, []

    def fail(file, held):
        stored.append(held)
        if len(stored) == 3:
            patch.setattr(System, "write", io_error)
        store(file, held)

    patch.setattr(StateFile, "store", fail)


def in_space_for_means(patch):
    patch.setattr(System, "reserve", full_after(1))


def train_on_a_disk_that_fails(rank, world_size, folder, place, breaks, first):
    """Train until one rank fails, which then stays where it is; return what this rank was told."""
    WATCH.look_every_s = 0.2
    victim, told = world_size - 1, folder / "told"
    told.mkdir(exist_ok=True)
    begun_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_slices, "cached_share", lambda _: 0.0)
        model, optimizer = make("adamw", place)
        train(model, optimizer, first)
        if rank == victim:
            breaks(patch)
        with pytest.raises((StorageError, ShardError, CollectiveError)) as caught:
            train(model, optimizer, 5, first=first)
        (told / str(rank)).touch()
        while len(os.listdir(told)) < world_size and time.monotonic() - begun_s < HANG_S:
            time.sleep(0.05)  # no connection is closed, so nobody is told by that
    assert (rank == victim) == (caught.type is not CollectiveError)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("kinds", "breaks", "first", "doing"),
    [
        (("", "", "nvme:"), in_a_write, 2, "writing"),
        (("nvme:", "", ""), in_a_read, 2, "reading"),
        (("", "", "nvme:"), in_the_first_store, 0, "writing"),
        (("", "nvme:", ""), in_space_for_means, 1, "needed"),
    ],
)
def test_a_disk_that_fails_in_training_is_told_to_every_rank_with_rank_unit_and_path(
    kinds, breaks, first, doing, world_size, tmp_path
):
    places = [f"{kind}{tmp_path}" if kind else "cpu" for kind in kinds]
    found = run_ranks(
        *(train_on_a_disk_that_fails, world_size, tmp_path, Offload(*places), breaks, first),
        fresh=True,
        timeout_s=SOON_S,
    )
    for text in found:
        assert f"rank {world_size - 1}, unit '" in text and str(tmp_path) in text, found
        assert doing in text, found
    for rank, text in enumerate(found[:-1]):
        assert text.startswith(f"rank {rank}: ") and ": it cannot end: rank " in text


@on_ranks(1, 3)
def test_a_failure_that_a_save_has_told_is_mended_by_a_load(rank, world_size, tmp_path):
    """A save tells all ranks, all load, and go on: the file that failed is made anew by all."""
    model, optimizer = make("adamw", f"nvme:{tmp_path}")
    train(model, optimizer, 2)
    save(tmp_path / "saved", model, optimizer)
    expected = go_on(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        model(torch.ones(3, 8)).sum().backward()
        if rank == world_size - 1:
            patch.setattr(System, "write", io_error)
        optimizer.step()
        with pytest.raises(CheckpointError, match=rf"rank {world_size - 1}, unit .*writing"):
            save(tmp_path / "never", model, optimizer)
    optimizer.zero_grad()
    load(tmp_path / "saved", model, optimizer)
    assert_same(go_on(model, optimizer), expected)
