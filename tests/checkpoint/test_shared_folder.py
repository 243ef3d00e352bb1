"""One folder, many hands: other processes that save and load there, and the user's own files."""

import errno
import itertools
import os
import shutil
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from disk import Fault, FaultyFiles, Killed, SimulatedDisk
from ranks import HANG_S, on_ranks, start_ranks
from saving import flip, same_on_all_ranks, until, warns_on_rank_0
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import (
    choose,
    clean_up,
    hold,
    is_held,
    let_go,
    remove_checkpoint,
    rotate,
    step_name,
    steps_in,
    temporary,
)
from shardwise.checkpoint.save_load import Load
from shardwise.checkpoint.verify import check_quickly
from shardwise.comm.control import SoloControl
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint
from stamped import build, count, stamp
from tables import NONCE, RUN, disk_with, kept, newest, write

FILES = Files()


def hidden(folder):
    """Return the temporary names in a folder."""
    return [p.name for p in folder.iterdir() if p.name.startswith((".tmp-", ".old-"))]


# ------------------------------------------------------------------------ saves of other processes


def save_many(rank, world_size, folder, name, number):
    model, optimizer = build(save="A")
    failures = []
    for n in range(number):
        try:
            written = shardwise.save(Path(folder, f"{name}{n}"), model, optimizer)
            check_quickly(FILES, written.path)
        except CheckpointError as error:
            failures.append(str(error))
    Path(folder, f"{name}-done").touch()
    return failures


def open_until(rank, world_size, folder, done):
    model, optimizer = build()
    opened = 0
    while not all(Path(folder, f"{name}-done").exists() for name in done):
        with Checkpoints(folder, model, optimizer):
            opened += 1
    return opened


@pytest.mark.slow
def test_saves_of_other_processes_all_succeed_while_a_run_opens_the_folder_again_and_again(
    tmp_path,
):
    folder = str(tmp_path)
    worlds = [
        start_ranks(save_many, 1, folder, "one", 30),
        start_ranks(save_many, 2, folder, "two", 20),
        start_ranks(open_until, 1, folder, ["one", "two"]),
    ]
    found = [world.wait(HANG_S) for world in worlds]
    assert all(outcome.ok for world in found for outcome in world), found
    assert [outcome.result for world in found[:2] for outcome in world] == [[], [], []]
    assert found[2][0].result > 5
    assert len(list(tmp_path.glob("*/manifest.json"))) == 50 and not hidden(tmp_path)


def test_a_save_that_loses_a_race_says_that_the_name_is_taken(tmp_path):
    class Late(FaultyFiles):
        def rename(self, source, target):
            if not any(name.name == target.name for name in self.inner.list(target.parent)):
                self.inner.make_folder(target)
            super().rename(source, target)

    disk = disk_with(1, {1: "A"})
    with pytest.raises(
        CheckpointError, match=r"step-00000002 exists already.* meanwhile"
    ) as caught:
        write(Late(disk), SoloControl(), "B", 2)
    assert ".tmp-" not in str(caught.value)
    assert not [name for name in disk.tree() if "/.tmp-" in name]


# -------------------------------------------------------------------------------------- leftovers


@pytest.mark.parametrize("replace", [False, True])
def test_what_a_killed_save_left_is_removed_by_the_next_save_of_its_name_or_series(replace):
    start = disk_with(1, {1: "A"})
    seen = 0
    for at in itertools.count():
        disk = kept(start)
        files = FaultyFiles(disk, Fault(at, when="after"))
        try:
            write(files, SoloControl(), "B", 1 if replace else 2, replace=replace)
        except Killed:
            pass
        else:
            assert seen > 5
            return
        left = [name for name in disk.tree() if name.startswith("/run/.")]
        seen += bool(left)
        write(disk, SoloControl(), "C", 3)
        # What was written comes first: it has a nonce of its own, the same in all these tests.
        assert not [name for name in disk.tree() if name.startswith("/run/.")], (at, left)
        assert newest(disk, 1) == (3, "C")


def test_a_save_of_another_name_leaves_leftovers_alone():
    disk = disk_with(1, {1: "A"})
    for name in ("best", "step-00000007"):
        disk.make_folder(temporary(RUN / name, b"\1\1\1\1"))
    write(disk, SoloControl(), "B", 2)
    assert [name for name in disk.tree() if name.startswith("/run/.")] == [
        "/run/.tmp-best-01010101"
    ]


def test_what_somebody_writes_is_neither_removed_nor_called_a_leftover():
    disk = SimulatedDisk()
    disk.make_folders(RUN)
    folder = temporary(RUN / step_name(3), NONCE)
    lock = hold(disk, folder)
    disk.make_folder(folder)
    with disk.create(folder / "manifest.json") as writer:
        writer.sync()
    before = disk.tree()
    assert is_held(disk, folder)
    left = clean_up(disk, RUN)
    assert (left.removed, left.kept) == ((), ()) and disk.tree() == before
    let_go(disk, folder, lock)
    assert not is_held(disk, folder)
    assert clean_up(disk, RUN).removed == (folder.name,)
    assert disk.tree() == {"/run": None}


def test_asking_about_a_save_that_ends_at_that_moment_leaves_no_lock_behind():
    disk = SimulatedDisk()
    disk.make_folders(RUN)
    folder = temporary(RUN / step_name(3), NONCE)
    lock = hold(disk, folder)

    class Ending(FaultyFiles):
        def list(self, path):
            entries = super().list(path)
            let_go(self.inner, folder, lock)
            return entries

    assert not is_held(Ending(disk), folder)
    assert disk.tree() == {"/run": None}


def test_without_locks_saves_work_and_nothing_is_removed():
    disk = disk_with(1, {1: "A"})
    fault = Fault(0, errno.ENOSYS, "lock", lasting=True)
    write(FaultyFiles(disk, fault), SoloControl(), "B", 2)
    assert newest(disk, 1) == (2, "B") and not [n for n in disk.tree() if n.startswith("/run/.")]
    folder = temporary(RUN / step_name(3), NONCE)
    disk.make_folder(folder)
    assert clean_up(FaultyFiles(disk, fault), RUN).kept == (folder.name,)
    write(FaultyFiles(disk, fault), SoloControl(), "D", 4)
    assert folder.name in [entry.name for entry in disk.list(RUN)]


def test_where_locks_are_not_seen_a_save_fails_and_no_checkpoint_stands_with_files_missing():
    """Another machine takes the save for a leftover, at any of its operations."""
    lost = 0
    for at in itertools.count():
        disk = disk_with(1, {1: "A"})

        class Blind(FaultyFiles):
            def lock(self, path, shared=False):
                self.do("lock", path, lambda: None)
                raise OSError(errno.ENOSYS, "no locks", str(path))

        others = FaultyFiles(disk)
        mine = Blind(disk, before=lambda: None)

        def meddle(mine=mine, others=others, at=at):
            if len(mine.operations) == at:
                clean_up(others, RUN)

        mine._before = meddle
        try:
            write(mine, SoloControl(), "B", 2)
            found = (2, "B")
        except CheckpointError:
            lost += 1
            found = (1, "A")
        assert newest(disk, 1) == found, at
        for step in steps_in(disk, RUN):
            check_quickly(disk, RUN / step_name(step))
        if at > len(mine.operations):
            assert lost > 3
            return


# ---------------------------------------------------------------------------- the user's own files


def put_things_into(folder):
    (folder / "eval.json").write_text("{}")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.png").write_text("picture")
    (folder / "link").symlink_to(folder / "eval.json")


def things_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@on_ranks(1, 3)
def test_files_that_are_none_of_ours_stay_and_are_told_of_when_their_checkpoint_goes(
    rank, tmp_path
):
    model, optimizer = build(save="A")
    folder, best = tmp_path / "run", tmp_path / "best"
    left = [folder / "step-00000001-other-files", tmp_path / "best-other-files"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpoints(folder, model, optimizer, keep_last=1) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, wait=True)
                if rank == 0 and step == 1:
                    put_things_into(folder / step_name(1))
                dist.barrier()
        for _ in range(2):
            shardwise.save(best, model, optimizer, replace=True)
            if rank == 0 and not left[1].exists():
                put_things_into(best)
            dist.barrier()
    assert shardwise.load(best, model, optimizer).step is None
    assert len(caught) == (2 if rank == 0 else 0)
    for path, warning in zip(left, caught, strict=rank == 0):
        assert things_in(path) == ["eval.json", "link", "plots", "plots/a.png"]
        assert str(warning.message).startswith(f"{path}: ")
    assert steps_in(FILES, folder) == [2]
    assert not hidden(tmp_path) and not hidden(folder)


def test_killed_at_any_operation_of_a_removal_nothing_of_the_user_is_lost_or_stays_hidden():
    start = disk_with(1, {1: "A", 2: "B"})
    start.make_folder(RUN / step_name(1) / "plots")
    with start.create(RUN / step_name(1) / "eval.json") as writer:
        writer.write([memoryview(b"mine")])
        writer.sync()
    killed = True
    for at in itertools.count():
        disk = kept(start)
        with suppress(Killed):
            rotate(FaultyFiles(disk, Fault(at)), RUN, "run", 1, None, 2)
            killed = False
        clean_up(disk, RUN)
        rotate(disk, RUN, "run", 1, None, 2)
        left = sorted(n for n in disk.tree() if not n.startswith(f"/run/{step_name(2)}"))
        other = f"/run/{step_name(1)}-other-files"
        assert left == ["/run", other, f"{other}/eval.json", f"{other}/plots"], (at, left)
        if not killed:
            return


@on_ranks(1)
def test_only_a_checkpoint_is_replaced_and_no_link_file_or_folder_of_the_user(tmp_path):
    model, optimizer = build(save="A")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "thesis.tex").write_text("mine")
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-notes" / "day-1.md").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "project")
    (tmp_path / "folder-of-steps" / step_name(1)).mkdir(parents=True)
    (tmp_path / "nothing-in-it").mkdir()
    before = things_in(tmp_path)
    for name in ("link", "file", "project", "folder-of-steps", "step-notes"):
        what = "link or a file" if name in ("link", "file") else "folder that holds no checkpoint"
        with pytest.raises(CheckpointError, match=f"{tmp_path / name} is a {what}"):
            shardwise.save(tmp_path / name, model, optimizer, replace=True)
    shardwise.save(tmp_path / "nothing-in-it", model, optimizer, replace=True)
    after = things_in(tmp_path)
    assert [name for name in after if not name.startswith("nothing-in-it/")] == before
    assert "nothing-in-it/manifest.json" in after


# ----------------------------------------------------------------------------- damage and old runs


@on_ranks(1, 3)
def test_a_run_that_went_on_behind_damaged_steps_saves_them_again_and_keeps_the_last_that_count(
    rank, tmp_path
):
    """Steps 3 and 4 are damaged; training goes on from 2, and comes to 3 or starts with 5."""
    model, optimizer = build()
    again, beyond = tmp_path / "again", tmp_path / "beyond"
    with Checkpoints(again, model, optimizer) as checkpoints:
        for step, save in enumerate("ABCD", 1):
            stamp(model, optimizer, save)
            checkpoints.save(step, wait=True)
    if rank == 0:
        for step in (3, 4):
            flip(again / step_name(step) / "rank00000-0.safetensors")
        shutil.copytree(again, beyond)
    dist.barrier()
    for folder, left in (
        (again, {3: [4, 3, 2], 4: [4, 3]}),
        (beyond, {5: [5, 4, 3, 2], 6: [6, 5, 4, 3]}),
    ):
        with Checkpoints(folder, model, optimizer, keep_last=2) as checkpoints:
            with warns_on_rank_0(rank, "is damaged"):
                loaded = checkpoints.load()
            assert loaded.step == 2 and len(loaded.skipped) == 2
            for (step, steps), save in zip(left.items(), "EF", strict=True):
                stamp(model, optimizer, save)
                checkpoints.save(step, wait=True)
                dist.barrier()  # rank 0 removes after the others have gone on
                assert steps_in(FILES, folder) == steps
                dist.barrier()
            newest = checkpoints.load()
            assert newest.step == step and not newest.skipped
            assert set(count(model, optimizer, "DF")) == {"F"}
            with pytest.raises(CheckpointError, match="exists already"):  # good ones stay
                checkpoints.save(step, wait=True)


@on_ranks(1, 3)
def test_a_new_run_in_an_old_folder_is_warned_and_no_save_counts_that_a_load_would_not_take(
    rank, tmp_path
):
    model, optimizer = build(save="A")
    with Checkpoints(tmp_path, model, optimizer) as old:
        old.save(10, wait=True)
    told = []
    model, optimizer = build(save="B")  # of another run
    with Checkpoints(tmp_path, model, optimizer) as new:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(2, 13)).sum().backward()
            optimizer.zero_grad()
            told += [str(warning.message) for warning in caught]
        with pytest.raises(ConfigError) as refused:
            new.save(3)
        told.append(str(refused.value))
        stamp(model, optimizer, "B")
        new.save(11, wait=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rank == 0:
                Path(tmp_path, step_name(12)).mkdir()  # no load takes that one
            shardwise.save(tmp_path, model, optimizer, step=4)
            if rank == 0:
                Path(tmp_path, step_name(12)).rmdir()
            told += [str(warning.message) for warning in caught]
    dist.barrier()
    assert shardwise.load(tmp_path, model, optimizer).step == 11
    assert set(count(model, optimizer)) == {"B"}
    (refusal,) = told[1:2] if rank == 0 else told
    assert f"step 3: {tmp_path} holds step 10, which the next load would take" in refusal
    if rank == 0:
        warned, _, beside = told
        assert "(newest: step 10)" in warned and "load()" in warned and str(tmp_path) in warned
        assert f"{tmp_path} holds step 11 too" in beside
    assert steps_in(FILES, tmp_path) == [11, 10, 4]


@on_ranks(1, 3)
def test_a_relative_folder_is_the_one_of_the_moment_it_was_named(tmp_path):
    here, there = Path(tmp_path, "here"), Path(tmp_path, "there")
    for folder in (here, there):
        folder.mkdir(exist_ok=True)
    os.chdir(here)
    model, optimizer = build(save="A")
    with Checkpoints("run", model, optimizer) as checkpoints:
        os.chdir(there)
        saving = checkpoints.save(1, wait=True)
        with pytest.raises(ConfigError, match="holds step 1"):
            checkpoints.save(0)
        again = checkpoints.load()
    os.chdir(here)
    written = shardwise.save("one", model, optimizer)
    loaded = shardwise.load("one", model, optimizer)
    assert saving.wait().path == again.path == here / "run" / step_name(1)
    assert written.path == loaded.path == here / "one" and not list(there.iterdir())


# ------------------------------------------------------------------------- loads beside a rotation


class Meddling(FaultyFiles):
    """A disk on which another process does something in the folder at some operation of ours."""

    def __init__(self, folder, at, does):
        super().__init__(Files(), before=self._meddle)
        self._folder, self._at, self._does = folder, at, does

    def _meddle(self):
        if len(self.operations) == self._at:
            self._does(self._folder)


def go_on(folder):
    """Replace the one checkpoint by the next, as a run that keeps the last."""
    (folder / "next").rename(folder / step_name(2))
    (folder / step_name(1)).rename(folder / ".old-step-00000001-01020304")


def save_again(folder):
    """Replace the newest checkpoint by another of its step."""
    FILES.exchange(folder / "next", folder / step_name(2))
    shutil.rmtree(folder / "next")


SAVES = {"A": 1, "B": 2, "C": 2}  # with their steps
# What another process does, what is in the folder before it, and what may be loaded then.
MEDDLES = [
    (go_on, {step_name(1): "A", "next": "B"}, "AB"),
    (save_again, {step_name(1): "A", step_name(2): "B", "next": "C"}, "BC"),
]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("does", "there", "letters"), MEDDLES)
@on_ranks()
def test_a_checkpoint_that_is_removed_or_replaced_while_it_is_read_gives_way_and_is_no_damage(
    rank, world_size, tmp_path, does, there, letters
):
    model, optimizer = build()
    folder, found = tmp_path / "run", []
    for letter, step in SAVES.items():
        stamp(model, optimizer, letter)
        extra = {"text": letter * (1 + 99 * (letter == "C"))}  # of another size than the old one
        shardwise.save(tmp_path / letter, model, optimizer, step=step, extra=extra)
    for at, is_one in itertools.product(
        range(14), (False, True) if does is save_again else (False,)
    ):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            for name, letter in there.items():
                shutil.copytree(tmp_path / letter / step_name(SAVES[letter]), folder / name)
        dist.barrier()
        stamp(model, optimizer, "Z")
        files = Meddling(folder, at, does) if rank == 0 else FILES
        loaded = Load(files, model, optimizer).run(
            folder, folder / step_name(2) if is_one else None
        )
        read = "".join(count(model, optimizer))
        found.append((loaded.step, read, loaded.extra["text"][0], loaded.skipped))
        dist.barrier()
    same_on_all_ranks(found)
    assert set(found) == {(SAVES[letter], letter, letter, ()) for letter in letters}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_stale_handle_of_a_network_disk_leads_to_another_look(replaced):
    disk = disk_with(1, {1: "A", 2: "B"})

    class Stale(FaultyFiles):
        is_stale = False

        def open(self, path):
            if path.parent.name == step_name(2) and not self.is_stale:
                self.is_stale = True
                if replaced:
                    write(disk, SoloControl(), "C", 2, replace=True)
                else:
                    remove_checkpoint(disk, RUN / step_name(2))
                    write(disk, SoloControl(), "C", 3)
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return super().open(path)

    skipped = {}
    chosen = choose(SoloControl(), Stale(disk), RUN, skipped)
    assert chosen is not None and not skipped
    step = 2 if replaced else 3
    assert (chosen.step, newest(disk, 1)) == (step, (step, "C"))
    silent = FaultyFiles(disk, Fault(0, errno.ETIMEDOUT, "open", lasting=True))
    with pytest.raises(CheckpointError, match="errno 110") as caught:
        choose(SoloControl(), silent, RUN, {})
    assert type(caught.value) is CheckpointError  # says nothing of this checkpoint, nor of others


@pytest.mark.parametrize("removed", ["-0.safetensors", ".json"])
def test_what_is_missing_is_named_with_as_few_reads_however_many_ranks_lack_it(removed):
    disk = disk_with(7, {1: "A"})
    folder = RUN / step_name(1)
    for rank in range(1, 7):
        disk.remove_file(folder / f"rank{rank:05d}{removed}")
    files = FaultyFiles(disk)
    with pytest.raises(DamagedCheckpoint, match=f"rank00001{removed}: it is missing"):
        check_quickly(files, folder)
    opened = [name for op, name in files.operations if op == "open"]
    assert len(opened) <= 4, opened  # the manifest twice, the first rank's index, and that one's


def save_and_rotate(rank, world_size, folder):
    model, optimizer = build(save="A")
    step = 0
    with Checkpoints(folder, model, optimizer, keep_last=2) as checkpoints:
        while not Path(folder, "stop").exists():
            step += 1
            checkpoints.save(step, wait=True)
    return step


def load_many(rank, world_size, folder, number):
    model, optimizer = build()
    until(lambda: steps_in(FILES, Path(folder)))
    steps = []
    for _ in range(number):
        loaded = shardwise.load(folder, model, optimizer)
        assert loaded.step is not None and not loaded.skipped
        steps.append(loaded.step)
    return steps


@pytest.mark.slow
def test_loads_beside_a_trainer_that_rotates_all_succeed(tmp_path):
    folder = str(tmp_path)
    trainer = start_ranks(save_and_rotate, 1, folder)
    readers = [start_ranks(load_many, size, folder, 15) for size in (1, 2)]
    found = [reader.wait(HANG_S) for reader in readers]
    (tmp_path / "stop").touch()
    (ended,) = trainer.wait(HANG_S)
    assert ended.ok, ended.describe()
    for outcome in (outcome for world in found for outcome in world):
        assert outcome.ok, outcome.describe()
        assert outcome.result == sorted(outcome.result)


# ------------------------------------------------------------------------------------------ texts


@on_ranks(3)
def test_a_manifest_of_another_save_and_a_file_that_was_cut_are_named_and_no_other_file(
    rank, tmp_path
):
    model, optimizer = build(layout="flat", save="A")
    for name in ("one", "two"):
        for step in (1, 2):
            shardwise.save(tmp_path / name, model, optimizer, step=step)
    manifest, cut = "manifest.json", "rank00001-1.safetensors"
    if rank == 0:
        for name in ("stale", "swapped", "cut"):
            shutil.copytree(tmp_path / "one" / step_name(2), tmp_path / name)
        shutil.copy(tmp_path / "one" / step_name(1) / manifest, tmp_path / "stale" / manifest)
        shutil.copy(tmp_path / "two" / step_name(2) / manifest, tmp_path / "swapped" / manifest)
        os.truncate(tmp_path / "cut" / cut, (tmp_path / "cut" / cut).stat().st_size - 4)
    dist.barrier()
    said = {}
    for name in ("stale", "swapped", "cut"):
        with pytest.raises(DamagedCheckpoint) as caught:
            shardwise.load(tmp_path / name, model, optimizer)
        said[name] = str(caught.value)
    of_all = [{}] * 3
    dist.all_gather_object(of_all, said)
    assert of_all == [said] * 3
    for name in ("stale", "swapped"):
        mixed = f"{tmp_path / name}: {manifest} and rank00000.json are whole and of two saves"
        assert mixed in said[name]
    assert "step 1 of run" in said["stale"] and "step 2 of run" in said["stale"]
    assert f"{tmp_path}/cut/{cut}: " in said["cut"] and "bytes, expected" in said["cut"]
    assert "rank00001-0" not in said["cut"]


def hold_a_save(rank, world_size, folder):
    model, optimizer = build()

    class Stuck(Files):
        def create(self, path):
            Path(folder, "writing").touch()
            signal.pause()

    from shardwise.checkpoint import save_load

    save_load.Files = Stuck
    shardwise.save(folder, model, optimizer, step=1)


def test_a_save_that_is_under_way_is_left_alone_until_its_process_is_dead(tmp_path):
    (tmp_path / step_name(0)).mkdir()
    world = start_ranks(hold_a_save, 1, str(tmp_path))
    try:
        until((tmp_path / "writing").exists)
        (name,) = [n for n in hidden(tmp_path) if not n.endswith(".lock")]
        assert clean_up(FILES, tmp_path).removed == () and (tmp_path / name).is_dir()
        world.kill(0)
        world.wait()
        assert clean_up(FILES, tmp_path).removed == (name,) and not hidden(tmp_path)
    finally:
        world.close()
