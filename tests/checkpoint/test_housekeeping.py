"""The folder of a run: what is removed and what never is, who may write there, what is reported."""

import errno
import itertools
import json
import os
import re
import signal
import socket
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from disk import Fault, FaultyFiles, Killed, SimulatedDisk
from ranks import on_ranks, run_ranks, start_ranks
from saving import until, warns_on_rank_0
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import (
    LOCK,
    clean_up,
    lock_holder,
    rotate,
    step_name,
    steps_in,
    take_lock,
)
from shardwise.checkpoint.verify import check_quickly
from shardwise.comm.control import SoloControl
from shardwise.errors import CheckpointError, ConfigError
from stamped import build, count, stamp
from tables import RUN, disk_with, kept, newest, write_and_rotate

# ---------------------------------------------------------------------------------- what is removed


STEPS = (0, 3, 4, 6, 7, 9, 12)


@pytest.mark.parametrize("keep_last", [None, 1, 3, 9])
@pytest.mark.parametrize("keep_every", [None, 1, 3, 4])
def test_the_newest_and_the_multiples_are_kept_and_all_else_goes(keep_last, keep_every):
    disk = disk_with(1, {step: chr(ord("A") + n) for n, step in enumerate(STEPS)})
    assert not rotate(disk, RUN, "run", keep_last, keep_every, max(STEPS))
    newest_ones = STEPS if keep_last is None else STEPS[-keep_last:]
    multiples = [step for step in STEPS if keep_every and step % keep_every == 0]
    assert set(steps_in(disk, RUN)) == {*newest_ones, *multiples}


def damage(disk, step, name="rank00000-0.safetensors"):
    """Flip the last bit of a file, so that its size stays: only who reads it can tell."""
    path = RUN / step_name(step) / name
    with disk.open(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    disk.remove_file(path)
    with disk.create(path) as writer:
        writer.write([memoryview(data[:-1] + bytes([data[-1] ^ 1]))])


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_rotation_leaves_one_that_verifies_even_if_newer_ones_are_damaged(keep_last):
    """A load passed over steps 8 and 9, training went on from 5, and saves 6."""
    disk = disk_with(1, {4: "A", 5: "B", 8: "C", 9: "D"})
    damage(disk, 8), damage(disk, 9)
    assert newest(disk, 1) == (5, "B")
    write_and_rotate(disk, SoloControl(), "E", 6, keep_last)
    assert newest(disk, 1) == (6, "E")


def test_rotation_counts_no_checkpoint_that_fails_the_quick_check_and_removes_none():
    disk = disk_with(1, {1: "A", 2: "B", 3: "C"})
    disk.remove_file(RUN / step_name(3) / "manifest.json")
    write_and_rotate(disk, SoloControl(), "D", 4, keep_last=2)
    assert steps_in(disk, RUN) == [4, 3, 2]  # 3 is damaged: nobody can say whose it is


def test_rotation_removes_no_checkpoint_of_another_run():
    disk = disk_with(1, {1: "A", 2: "B", 3: "C"})
    rotate(disk, RUN, "another run", 1, None, 3)
    assert steps_in(disk, RUN) == [3, 2, 1]
    rotate(disk, RUN, "run", 1, None, 3)
    assert steps_in(disk, RUN) == [3]


def test_killed_at_any_operation_of_a_rotation_what_is_left_are_whole_checkpoints():
    start = disk_with(1, {1: "A", 2: "B", 3: "C", 4: "D"})
    for at in itertools.count():
        disk = kept(start)
        files = FaultyFiles(disk, Fault(at))
        try:
            rotate(files, RUN, "run", 2, None, 4)
        except Killed:
            pass
        else:
            assert steps_in(disk, RUN) == [4, 3] and at > 5
            return
        for step in steps_in(disk, RUN):
            check_quickly(disk, RUN / step_name(step))
        assert newest(disk, 1) == (4, "D") and steps_in(disk, RUN)[:2] == [4, 3]
        clean_up(disk, RUN)
        rotate(disk, RUN, "run", 2, None, 4)
        assert steps_in(disk, RUN) == [4, 3]
        assert not [name for name in disk.tree() if "/.old-" in name]


FOREIGN = (
    "notes.txt",
    ".tmp-step-9",  # no number at its end
    ".tmp-step-00000009-0badcafe",  # holds what no checkpoint holds
    ".old-step-00000001-deadbeef",  # holds a folder
    ".tmp-file-00000000",  # a file
    "step-9",
    "step-00000099",  # a step without a manifest
    "best",
)


def make_foreign(folder):
    (folder / "notes.txt").write_text("mine")
    for name in (FOREIGN[1], FOREIGN[2], FOREIGN[3], *FOREIGN[5:]):
        (folder / name).mkdir()
    (folder / FOREIGN[2] / "rank00000-0.safetensors").write_text("x")
    (folder / FOREIGN[2] / "thesis.tex").write_text("mine")
    (folder / FOREIGN[3] / "sub").mkdir()
    (folder / FOREIGN[4]).write_text("mine")
    (folder / "step-00000099" / "rank00000-0.safetensors").write_text("mine")
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "rank00000-0.safetensors").write_text("mine")
    (folder / ".tmp-step-00000003-00c0ffee").symlink_to(outside)


def snapshot(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        is_link = path.is_symlink()
        found[name] = os.readlink(path) if is_link else None if path.is_dir() else path.read_bytes()
    return found


def test_what_is_not_proved_ours_is_never_removed_and_what_is_kept_is_reported(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    make_foreign(folder)
    before = snapshot(tmp_path)
    ours = folder / ".tmp-step-00000004-12345678"
    ours.mkdir()
    (ours / "rank00001-0.safetensors").write_bytes(b"half")
    (folder / ".old-step-00000002-87654321").mkdir()
    left = clean_up(Files(), folder)
    assert set(left.removed) == {ours.name, ".old-step-00000002-87654321"}
    given_back = "step-00000001-other-files"  # a removal of ours that a user's folder stopped
    assert set(left.kept) == {FOREIGN[2], given_back, FOREIGN[4], ".tmp-step-00000003-00c0ffee"}
    (folder / given_back).rename(folder / FOREIGN[3])
    assert not rotate(Files(), folder, "run", 1, None, 99)
    assert snapshot(tmp_path) == before


def test_a_leftover_that_cannot_be_removed_is_reported_as_kept():
    disk = SimulatedDisk()
    disk.make_folders(RUN / ".tmp-step-00000001-01020304")
    files = FaultyFiles(disk, Fault(0, errno.EIO, "remove_folder"))
    left = clean_up(files, RUN)
    assert (left.removed, left.kept) == ((), (".tmp-step-00000001-01020304",))


# -------------------------------------------------------------------------------------- real ranks


@on_ranks(1, 3)
def test_a_run_keeps_its_last_two_and_every_fifth_of_what_it_saved_or_goes_on_from(rank, tmp_path):
    model, optimizer = build(save="A")
    shardwise.save(tmp_path, model, optimizer, step=1)
    model, optimizer = build()
    loaded = shardwise.load(
        tmp_path, model, optimizer
    )  # the run goes on from it, so it is the run's
    seen = [1]
    with Checkpoints(tmp_path, model, optimizer, keep_last=2, keep_every=5) as checkpoints:
        with warnings.catch_warnings(action="error"):
            train_one_pass(model, optimizer)
        assert checkpoints.run == loaded.run
        for step in range(2, 9):
            stamp(model, optimizer, "ABCDEFGH"[step - 1])
            checkpoints.save(step, wait=True)
            seen.append(max(steps_in(Files(), Path(tmp_path))))
            dist.barrier()
    left = steps_in(Files(), Path(tmp_path))
    assert shardwise.load(tmp_path, model, optimizer).step == 8
    assert set(count(model, optimizer, "GH")) == {"H"}
    shardwise.load(tmp_path, model, optimizer, step=5)
    with Checkpoints(tmp_path, model, optimizer), warns_on_rank_0(rank, "from step 5"):
        train_one_pass(model, optimizer)
    with Checkpoints(tmp_path, model, optimizer) as checkpoints:
        shardwise.load(tmp_path, model, optimizer)
        with warnings.catch_warnings(action="error"):
            train_one_pass(model, optimizer)
        with pytest.raises(CheckpointError, match="exists already"):
            checkpoints.save(8, wait=True)
        assert checkpoints.run == loaded.run
    assert seen == list(range(1, 9)) and left == [8, 7, 5]


def train_one_pass(model, optimizer):
    model(torch.zeros(1, 13)).sum().backward()
    optimizer.zero_grad()


@on_ranks(1)
def test_numbers_of_checkpoints_to_keep_are_checked(tmp_path):
    model, optimizer = build()
    for wrong in ({"keep_last": 0}, {"keep_every": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Checkpoints(tmp_path, model, optimizer, **wrong)


# ---------------------------------------------------------------------------------- who may write


def hold(rank, world_size, folder):
    model, optimizer = build()
    with Checkpoints(folder, model, optimizer) as checkpoints:
        stamp(model, optimizer, "A")
        checkpoints.save(1, wait=True)
        Path(folder, f"holding{rank}").touch()
        signal.pause()


def try_to_open(rank, world_size, folder):
    model, optimizer = build()
    try:
        with Checkpoints(folder, model, optimizer) as checkpoints:
            assert checkpoints.load() is not None
            checkpoints.save(2, wait=True)
            return "", list(checkpoints.leftovers.removed)
    except CheckpointError as error:
        return str(error), []


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_second_run_is_refused_naming_the_first_until_that_one_is_dead(tmp_path, world_size):
    first = start_ranks(hold, world_size, str(tmp_path))
    try:
        until(lambda: len(list(tmp_path.glob("holding*"))) == world_size)
        interrupted = tmp_path / ".tmp-step-00000002-00000001"  # as the first one may leave
        interrupted.mkdir()
        refusals = {text for text, _ in run_ranks(try_to_open, world_size, str(tmp_path))}
        (refusal,) = refusals  # one text on all ranks
        holder = rf"process {first.pids[0]} on {socket.gethostname()} \(run \w+\) saves checkpoints"
        assert (
            re.search(holder, refusal) and str(tmp_path) in refusal and "choose another" in refusal
        )
        assert interrupted.exists()  # it may be at work there
        for rank in range(world_size):
            first.kill(rank)
        first.wait()
        opened = run_ranks(try_to_open, world_size, str(tmp_path))
        assert opened[0] == ("", [interrupted.name])
        assert {text for text, _ in opened} == {""} and not interrupted.exists()
    finally:
        first.close()
    assert steps_in(Files(), tmp_path) == [2, 1]


def test_a_lock_says_whose_it_is_and_one_whose_writer_died_in_the_middle_that_it_is_held(tmp_path):
    take_lock(Files(), tmp_path, "our run").release()
    assert json.loads((tmp_path / LOCK).read_text())["run"] == "our run"
    lock = Files().lock(tmp_path / LOCK)
    lock.write('{"pid": 1')
    with pytest.raises(CheckpointError, match="another process saves checkpoints there"):
        take_lock(Files(), tmp_path, "our run")
    lock.release()


class Asked(Files):
    """Files of a run that starts while others ask who saves there, again and again."""

    def __init__(self, num_asking):
        self.asking = [Files() for _ in range(num_asking)]
        self.num_tries = 0

    def lock(self, path, shared=False):
        if shared:  # the run's own look at who is in its way
            return super().lock(path, shared=True)
        self.num_tries += 1
        held = [files.lock(path, shared=True) for files in self.asking]
        assert all(held)
        if self.num_tries % 2:
            self.asking.pop()
        found = super().lock(path)
        for lock in held:
            lock.release()
        return found


def test_a_run_starts_however_long_others_hold_the_lock_to_ask_whose_it_is(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr("shardwise.checkpoint.folder.time.sleep", pauses.append)
    files = Asked(4)
    take_lock(files, tmp_path, "mine").release()
    assert files.num_tries == len(pauses) + 1 > 6

    asking = Files().lock(tmp_path / LOCK, shared=True)  # and is stopped
    assert lock_holder(Files(), tmp_path) is None  # two who ask are not each other's holder
    with pytest.raises(CheckpointError, match=r"only test this lock .* for a minute"):
        take_lock(Files(), tmp_path, "mine")
    assert sum(pauses) > 50
    asking.release()

    def hold_while_asked(_):
        asking.release()
        held.append(take_lock(Files(), tmp_path, "other"))

    held = []
    asking = Files().lock(tmp_path / LOCK, shared=True)
    monkeypatch.setattr("shardwise.checkpoint.folder.time.sleep", hold_while_asked)
    with pytest.raises(CheckpointError, match=r"\(run other\) saves checkpoints there"):
        take_lock(Files(), tmp_path, "mine")
    assert "(run other)" in str(lock_holder(Files(), tmp_path))
    held[0].release()


@on_ranks(2, 3)
def test_a_save_beside_a_background_save_disturbs_neither(tmp_path):
    """A save in the foreground, and one of another folder, while one is under way behind."""
    model, optimizer = build(width=120, depth=3)
    with Checkpoints(Path(tmp_path, "run"), model, optimizer) as checkpoints:
        for step in range(1, 9):
            stamp(model, optimizer, "ABCDEFGH"[step - 1])
            checkpoints.save(step)
            stamp(model, optimizer, "Z")
            shardwise.save(Path(tmp_path, "aside"), model, optimizer, step=step)
        checkpoints.finish()
        found = {}
        for step in range(1, 9):
            shardwise.load(Path(tmp_path, "run"), model, optimizer, step=step)
            found[step] = "".join(count(model, optimizer, "ABCDEFGH"))
    assert found == {step: "ABCDEFGH"[step - 1] for step in range(1, 9)}
    assert steps_in(Files(), tmp_path / "aside") == list(range(8, 0, -1))
