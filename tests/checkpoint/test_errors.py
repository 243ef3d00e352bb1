"""An operation that fails, whichever and on whatever rank, is told to all; nothing else happens.

SQLite's method: fail the first operation, then the second, and so on, until a run passes.
"""

import dataclasses
import errno
import os
import resource
import subprocess
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
from disk import Fault, FaultyFiles
from ranks import on_ranks, run_ranks
from saving import same_on_all_ranks, warns_on_rank_0
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import step_name
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.save_load import Load
from shardwise.checkpoint.source import TensorInfo
from shardwise.checkpoint.state import _row_of
from shardwise.checkpoint.write import write_checkpoint
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, StateError
from shardwise.layout.boxes import full_region
from stamped import build, count, save_each, stamp
from tables import (
    NONCE,
    RUN,
    assert_an_error_leaves_nothing,
    disk_with,
    kept,
    manifest_of,
    part_of,
    run_ranks_on,
)

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)


@pytest.mark.parametrize(
    ("who", "ranks", "replace"),
    [("all", 1, False), ("first", 3, True), ("last", 3, False), ("all", 3, True)],
)
def test_whichever_operation_fails_all_ranks_say_which_and_nothing_is_left(ranks, replace, who):
    failing = {"first": [0], "last": [ranks - 1], "all": list(range(ranks))}[who]
    at, seen = 0, []
    while "saved" not in seen:
        number = ERRNOS[at % len(ERRNOS)]
        faults = {rank: Fault(at, number) for rank in failing}
        seen.append(assert_an_error_leaves_nothing(ranks, faults, replace))
        at += 1
    assert seen.count("refused") >= 8
    # A lock or files of the old one that resist their removal cost nothing but their space.
    assert ("saved, leftovers" in seen) == (0 in failing)


@given(
    ranks=st.integers(1, 4),
    faults=st.dictionaries(
        st.integers(0, 3),
        st.tuples(st.integers(0, 45), st.sampled_from(ERRNOS), st.booleans()),
        min_size=1,
    ),
    replace=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=60)
def test_several_failures_at_once_even_lasting_ones_lose_nothing(ranks, faults, replace, seed):
    chosen = {
        rank % ranks: Fault(at, number, lasting=lasting)
        for rank, (at, number, lasting) in faults.items()
    }
    assert_an_error_leaves_nothing(ranks, chosen, replace, seed)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_fails_in_memory_on_the_last_rank_leaves_no_folder_of_rank_0(ranks):
    start = disk_with(ranks, {1: "A"})
    disk, before = kept(start), start.tree()

    def body(files, control):
        manifest = manifest_of("B", ranks)
        part = part_of("B", control.rank, manifest)
        if control.rank == ranks - 1:
            part = dataclasses.replace(part, read=refuse)
        return write_checkpoint(files, control, RUN / step_name(2), NONCE, manifest, part)

    results, files = run_ranks_on(disk, ranks, body)
    assert disk.tree() == before
    if ranks > 1:
        assert ("make_folder", f".tmp-step-00000002-{NONCE.hex()}") in files[0].operations
    who = f"rank {ranks - 1}: " if ranks > 1 else ""
    assert {str(result) for result in results} == {f"{who}the state is gone"}


def refuse(number, box):
    raise StateError("the state is gone")


# -------------------------------------------------------------------------------------- real ranks


def raised(work):
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def files_no_longer_than(num_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@on_ranks(1, 3)
def test_one_rank_that_cannot_write_is_named_to_all_and_the_next_save_works(
    rank, world_size, tmp_path
):
    victim = world_size - 1
    model, optimizer = build(width=40)
    save_each(tmp_path, model, optimizer, "A")
    stamp(model, optimizer, "B")
    for options in ({"step": 2}, {"step": 1, "replace": True}):
        with files_no_longer_than(5_000 if rank == victim else 1 << 30):
            text = raised(lambda o=options: shardwise.save(tmp_path, model, optimizer, **o))
        same_on_all_ranks(text)
        assert text.startswith("CheckpointError: ")
        assert f"rank0000{victim}-0.safetensors: File too large (errno {errno.EFBIG})" in text
        assert "This file wants " in text and " are free there" in text
        assert (f"rank {victim}: " in text) == (world_size > 1)
        assert os.listdir(tmp_path) == [step_name(1)]
        dist.barrier()  # nobody saves again before all have looked
    assert set(count(model, optimizer)) == {"B"}
    model(torch.ones(1, 40)).sum().backward()  # training goes on
    optimizer.zero_grad()
    assert shardwise.load(tmp_path, model, optimizer).step == 1
    assert set(count(model, optimizer)) == {"A"}
    stamp(model, optimizer, "C")
    shardwise.save(tmp_path, model, optimizer, step=2)
    stamp(model, optimizer, "Z")
    assert shardwise.load(tmp_path, model, optimizer).step == 2
    assert set(count(model, optimizer)) == {"C"}


def save_to_a_small_disk(rank, world_size, folder):
    model, optimizer = build(width=150)  # 0.55 MB
    save_each(folder, model, optimizer, "A")
    stamp(model, optimizer, "B")
    text = raised(lambda: shardwise.save(folder, model, optimizer, step=2))
    same_on_all_ranks(text)
    assert f"No space left on device (errno {errno.ENOSPC})" in text and "/rank0000" in text
    assert " wants " in text and " are free there" in text and "free some space" in text
    assert os.listdir(folder) == [step_name(1)]
    dist.barrier()
    Path(folder, f"space{rank}").write_bytes(bytes(1000))  # what was written was given back
    assert shardwise.load(folder, model, optimizer).step == 1
    assert set(count(model, optimizer)) == {"A"}


@contextmanager
def small_disk(folder, num_bytes):
    if os.geteuid():
        pytest.skip("mounting a disk of limited size needs root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this system lets root mount nothing: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_says_how_much_was_wanted_and_what_is_free_and_is_left_as_it_was(tmp_path):
    with small_disk(tmp_path, 800 << 10) as folder:
        run_ranks(save_to_a_small_disk, 3, str(folder))


# ------------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize(("world_size", "victim"), [(1, 0), (2, 1), (3, 0)])
@on_ranks()
def test_a_read_that_fails_is_told_to_all_and_the_model_runs_again_after_a_good_load(
    rank, world_size, tmp_path, victim
):
    model, optimizer = build()
    control = engine_of(model).comm.control
    save_each(tmp_path, model, optimizer)
    said, looked_again, at = [], 0, 0
    while True:
        stamp(model, optimizer, "Z")
        faults = [Fault(at, errno.ESTALE)] if rank == victim else []
        files = FaultyFiles(Files(), *faults)
        one = Load(files, model, optimizer)
        text = raised(lambda one=one: one.run(tmp_path))
        if control.exchange(bytes([at >= len(files.operations)]))[victim] != b"\0":
            break
        if text:
            said.append(text)
        else:
            looked_again += 1
            assert set(count(model, optimizer)) == {"B"}
        if rank == victim:
            op, name = files.operations[at]
            assert f"{name}: " in text if text else name == MANIFEST, (text, op, name)
        if text and engine_of(model).status.unusable is None:
            assert set(count(model, optimizer)) == {"Z"}
        elif text:
            with pytest.raises(StateError, match="not to be used"):
                model(torch.zeros(1, 13))
        good = shardwise.load(tmp_path, model, optimizer)
        assert good.step == 2 and set(count(model, optimizer)) == {"B"} and not good.skipped
        model(torch.zeros(1, 13))
        at += 1
    same_on_all_ranks((said, looked_again))
    assert len(said) >= 6  # the listings, the indexes, the files
    # The manifest may be another save's by now: rank 0, who reads it, looks at it once more.
    assert looked_again == (2 if victim == 0 else 0)  # opened, and read
    for text in said:
        assert text.startswith("CheckpointError: ") and f"(errno {errno.ESTALE})" in text
        assert (f"rank {victim}: " in text) == (world_size > 1)


class Refused(FaultyFiles):
    """Files that this user may not open: those of step 2 whose name begins so."""

    def __init__(self, name):
        super().__init__(Files())
        self._name = name

    def open(self, path):
        if path.parent.name == step_name(2) and path.name.startswith(self._name):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return super().open(path)


@on_ranks(1, 3)
def test_a_file_that_cannot_be_read_is_damage_and_the_older_checkpoint_is_taken(
    rank, world_size, tmp_path
):
    model, optimizer = build()
    save_each(tmp_path, model, optimizer)
    at = 3 if world_size > 1 else 2  # after the manifest and the indexes
    last = f"rank{world_size - 1:05d}-0"
    skipped = []
    for files in (
        FaultyFiles(Files(), *([Fault(at, errno.EIO, "read")] if rank == world_size - 1 else [])),
        Refused(MANIFEST),
        Refused(last),
    ):
        with Checkpoints(tmp_path, model, optimizer, files=files) as checkpoints:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                loaded = checkpoints.load()
            assert loaded.step == 1
            assert set(count(model, optimizer)) == {"A"}, (loaded, count(model, optimizer))
            assert [str(w.message) for w in warned if "passed over" in str(w.message)] or rank != 0
            skipped += loaded.skipped
    with Checkpoints(tmp_path, model, optimizer, files=Refused("")) as checkpoints:
        with warns_on_rank_0(rank, "errno 13"):
            assert checkpoints.load() is not None
        checkpoints.save(2, wait=True)  # the run comes to the step that it could not read
    assert shardwise.load(tmp_path, model, optimizer).step == 2
    assert set(count(model, optimizer)) == {"A"}
    assert len(same_on_all_ranks(skipped)) == 3
    for text, number in zip(skipped, (errno.EIO, errno.EACCES, errno.EACCES), strict=True):
        assert f"(errno {number})" in text and "step-00000002" in text


def test_a_name_that_is_too_long_is_told_in_one_short_line():
    info = TensorInfo("param", "a" * 5000, "F32", (2,), "")
    said = r"aaa.*at most 4096 characters as its name; it has 5000"
    with pytest.raises(CheckpointError, match=said) as caught:
        _row_of(info, full_region((2,)))
    assert len(str(caught.value)) < 200
