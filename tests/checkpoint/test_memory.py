"""Copies in the hosts' memory: after a restart the newest whole one is loaded, to the bit.

A host is a file system in memory. Here each is a folder on one, so that several hosts stand on one
machine; what belongs to another host is read over TCP, as between machines.
"""

import errno
import json
import os
import re
import shutil
import signal
import socket
import time
import warnings
from contextlib import chdir, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

import shardwise
from ranks import HANG_S, on_ranks, run_ranks, start_ranks
from saving import Setting, build, differences, flip, take_step, truth_of, until, warns_on_rank_0
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import LOCK, CopiesThatCount, copies_that_count, name_holder
from shardwise.checkpoint.memory import folder_in_memory, remove_dead_runs
from shardwise.errors import CheckpointError, ConfigError
from shardwise.processes import own_process

END = 4  # steps of a run


class Crash(Exception):
    """The end of a run that did not end well."""


def memory_of_host(root, rank, hosts):
    """Return the memory of a rank's host; ``hosts`` has the number of ranks on each."""
    ends = [sum(hosts[: n + 1]) for n in range(len(hosts))]
    host = next(n for n, end in enumerate(ends) if rank < end)
    return root / f"host{host}"


@contextmanager
def run_of(rank, root, hosts=(2,), stage=3, **options):
    """Build a run with copies in memory after every step."""
    run = build(Setting(sum(hosts), stage), seed=1)
    memory = memory_of_host(root, rank, hosts)
    options = {"memory_every": 1, "memory_folder": memory} | options
    with shardwise.Checkpoints(root / "run", run.model, run.optimizer, **options) as checkpoints:
        yield run, checkpoints


def train(rank, num_ranks, root, hosts, saved=1, stage=3, **options):
    """Train, copy every step, save one to disk, crash; return the state after each step."""
    truths = []
    with suppress(Crash), run_of(rank, root, hosts, stage, **options) as (run, checkpoints):
        for step in range(1, END):
            take_step(run, step, norm=False)
            truths.append(truth_of(run))
            checkpoints.finish()
            if step == saved:
                checkpoints.save(step, extra=run.extra, wait=True)
            else:
                checkpoints.copy_to_memory(step, extra=run.extra)
        checkpoints.finish()
        raise Crash
    return truths


def resume(rank, num_ranks, root, hosts=(2,), stage=3, warned="", **options):
    """Load in a new run; return the step, whether it came from memory, and the state."""
    with run_of(rank, root, hosts, stage, **options) as (run, checkpoints):
        with warns_on_rank_0(rank, warned) if warned else nullcontext():
            loaded = checkpoints.load(extra=run.extra)
        if loaded is None:
            return None, False, {}
        return loaded.step, loaded.from_memory, truth_of(run)


def resume_quietly(*args, **options):
    """Load in a new run; a state that is not the newest is told or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resume(*args, **options)


def same_on_all(found, step, from_memory, truths):
    for rank, (found_step, was_memory, truth) in enumerate(found):
        assert (found_step, was_memory) == (step, from_memory)
        if step is not None:
            assert not differences(truth, truths[rank % len(truths)][step - 1])


def files_of(root, host, pattern):
    return sorted((root / f"host{host}").rglob(pattern))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that puts what a run left into a folder; each run is trained once."""
    runs = {}

    def put(folder, hosts=(2,), **options):
        key = hosts, *sorted(options.items())
        if key not in runs:
            root = tmp_path_factory.mktemp("trained")
            runs[key] = root, run_ranks(train, sum(hosts), root, hosts, **options)
        root, truths = runs[key]
        shutil.copytree(root, folder, dirs_exist_ok=True)
        for host in folder.glob("host*"):
            copies = folder_in_memory(root / "run", host)
            copies.rename(folder_in_memory(folder / "run", host))
        assert len(files_of(folder, 0, "manifest.json")) == 2, "two copies, of two steps"
        return truths

    return put


def lose(*hosts):
    """Return what loses the memory of some hosts."""
    return lambda root: [shutil.rmtree(root / f"host{host}") for host in hosts]


def damage_the_newest(root):
    flip(files_of(root, 0, f"step-*{END - 1}/rank00001-0.safetensors")[0])


# What runs, how, what happens before the restart, and what that loads: the step, whether from
# memory, and what is told where the newest copy is not. The copy of host 1 is on host 2.
HOSTS = (1, 1, 1)
RESTARTS = {
    "one rank": ((1,), {}, None, END - 1, True, ""),
    "one host": ((3,), {"stage": 0}, None, END - 1, True, ""),
    "three hosts": (HOSTS, {}, None, END - 1, True, ""),
    "hosts of one rank and of two": ((1, 2), {"stage": 1}, None, END - 1, True, ""),
    "no copies on other hosts": (HOSTS, {"copies": 0}, None, END - 1, True, ""),
    "a host is gone": (HOSTS, {}, lose(1), END - 1, True, ""),
    "a host and its copy are gone": (
        *(HOSTS, {}, lose(1, 2), 1, False),
        "step 3 in memory does not count: no host has the files of rank 1. .* loaded from disk",
    ),
    "two hosts of three are gone": (HOSTS, {"copies": 2}, lose(1, 2), END - 1, True, ""),
    "the memory of all hosts is gone": (
        *((2,), {}, lose(0), 1, False),
        "copy of step 3 in memory does not count: nothing of it is in .* host was restarted",
    ),
    "the newest copy is damaged": (
        *((2,), {}, damage_the_newest, END - 2, True),
        "copy of step 3 in memory is lost: .*rank00001-0.safetensors.*step-00000002 was loaded",
    ),
    "the disk has a newer one": ((2,), {"saved": END - 1}, None, END - 1, False, ""),
    "another run, or its checkpoints are gone": (
        *((2,), {}, lambda root: shutil.rmtree(root / "run"), None, False),
        "nothing is loaded: the copies of steps 2, 3 in memory do not count: .* of its run",
    ),
    "its checkpoints were moved away": (
        *((2,), {}),
        *(lambda root: shutil.move(root / "run/step-00000001", root / "elsewhere"), None, False),
        "nothing is loaded: the copies .*step-00000001 was removed or moved after they were made",
    ),
}


@pytest.mark.parametrize("what", RESTARTS)
def test_a_restarted_run_goes_on_from_the_newest_whole_copy_that_is_its_own_to_the_bit(
    what, trained, tmp_path
):
    hosts, options, happens, step, from_memory, warned = RESTARTS[what]
    truths = trained(tmp_path, hosts, **options)
    if happens is not None:
        happens(tmp_path)
    how = {key: value for key, value in options.items() if key != "saved"} | {"warned": warned}
    same_on_all(run_ranks(resume, sum(hosts), tmp_path, hosts, **how), step, from_memory, truths)
    if happens is None:
        left = list(tmp_path.glob("host*/**/*.safetensors"))
        assert not left, "a run that ends well leaves nothing"


@pytest.mark.parametrize("hosts", [(2,), (1, 1, 1, 1)])
def test_another_number_of_ranks_goes_on_from_memory(hosts, trained, tmp_path):
    truths = trained(tmp_path, HOSTS, copies=2)
    if len(hosts) == 1:  # its memory has all files
        assert files_of(tmp_path, 0, "rank00002-0.safetensors")
    found = run_ranks(resume, sum(hosts), tmp_path, hosts, copies=2)
    for step, from_memory, truth in found:
        assert (step, from_memory) == (END - 1, True)
        wrong = differences(truth, truths[0][-1])
        assert all("scratch" in line or "buffer" in line for line in wrong), wrong


def empty(path):
    path.write_bytes(b"")


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def put_folder(path):
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def put_link(path):
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def put_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made, chdir(path.parent):
        made.bind(path.name)


def put_file_for_folder(path):
    shutil.rmtree(path.parent)
    path.parent.write_text("mine")


STANDS = (
    ("manifest.json", put_folder),
    ("manifest.json", empty),
    ("manifest.json", put_link),
    ("rank00000.json", put_folder),
    ("rank00001-0.safetensors", empty),
    ("rank00001-0.safetensors", cut),
    ("rank00000-0.safetensors", put_link),
    ("rank00001.json", put_socket),
    ("manifest.json", put_file_for_folder),
)


@pytest.mark.parametrize(("name", "put"), STANDS)
def test_whatever_stands_in_memory_the_next_newest_state_is_loaded_and_the_reason_is_told(
    name, put, trained, tmp_path
):
    truths = trained(tmp_path)
    (path,) = files_of(tmp_path, 0, f"step-*{END - 1}/{name}")
    put(path)
    warned = f"copy of step 3 in memory is lost: .*(no folder|{name}).*step-00000002 was loaded"
    found = run_ranks(resume_telling, 2, tmp_path, warned=warned)
    same_on_all(found, END - 2, True, truths)
    if put in (put_folder, put_file_for_folder):
        kept = [path for path in files_of(tmp_path, 0, "**/*") if path.is_file()]
        assert [path.read_text() for path in kept] == ["mine"]


def resume_telling(rank, num_ranks, root, warned):
    """Load in a new run, with one warning on the copy, and others on files that are not ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = resume(rank, num_ranks, root)
    texts = [str(each.message) for each in caught]
    assert len([text for text in texts if re.search(warned, text)]) == (rank == 0), texts
    assert not [text for text in texts if "memory" not in text and "it is now" not in text], texts
    return found


def name_a_copy_and_die(rank, num_ranks, root):
    rename = Files.rename

    def rename_and_die(files, source, target):
        rename(files, source, target)
        if target.name == "step-00000003":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "rename", rename_and_die)
        train(rank, num_ranks, root, (2,), saved=None)


def test_a_copy_counts_from_the_moment_it_has_its_name(trained, tmp_path):
    truths = trained(tmp_path / "quiet", saved=None)
    killed = start_ranks(name_a_copy_and_die, 2, tmp_path / "run of 2")
    killed.wait(HANG_S, 0.5)
    same_on_all(run_ranks(resume, 2, tmp_path / "run of 2"), END - 1, True, truths)


def test_a_lock_that_was_cut_off_while_a_shorter_text_was_written_still_names_the_copies(tmp_path):
    files = Files()
    counts = CopiesThatCount("run", ((20, "a" * 32), (30, "b" * 32)), -1)
    lock = files.lock(tmp_path / LOCK)
    texts = []
    for said in (counts._replace(copies=counts.copies * 3), counts):
        name_holder(lock, "run", said)
        texts.append((tmp_path / LOCK).read_text())
    lock.release()
    (tmp_path / LOCK).write_text(texts[1] + texts[0][len(texts[1]) :])
    assert copies_that_count(files, tmp_path) == (counts, "")


def folder_of_dead_run(
    root, name, processes, copies=("step-00000001", ".tmp-step-00000002-0badf00d")
):
    folder = root / (name * 32)
    for copy in copies:
        (folder / copy).mkdir(parents=True)
        (folder / copy / "rank00000.json").write_text("12345")
    said = {"checkpoints": "/runs/a", "processes": [asdict(each) for each in processes]}
    (folder / LOCK).write_text(json.dumps(said) + "\n")
    return folder


def test_only_folders_of_runs_whose_processes_are_gone_are_removed(tmp_path):
    here = own_process()
    dead = replace(here, born="1")  # the number is another process's now
    gone = folder_of_dead_run(tmp_path, "0", [dead, dead])
    kept = [
        folder_of_dead_run(tmp_path, "1", [dead, here]),  # a launcher that may start it again
        folder_of_dead_run(tmp_path, "2", [replace(dead, machine="another container")]),
        folder_of_dead_run(tmp_path, "3", []),
        folder_of_dead_run(tmp_path, "4", [dead], copies=["notes"]),
        folder_of_dead_run(tmp_path, "5", [dead]),  # its lock is held
        folder_of_dead_run(tmp_path, "6", [dead]),  # this run's own
    ]
    (folder_of_dead_run(tmp_path, "7", [dead]) / "step-00000001" / "mine").write_text("mine")
    (tmp_path / "notes").mkdir()
    lock, news = Files().lock(kept[4] / LOCK), []
    before = {path for path in tmp_path.rglob("*") if gone not in (path, *path.parents)}
    remove_dead_runs(Files(), kept[5], news)
    assert set(tmp_path.rglob("*")) == before
    (text,) = news
    assert f"{gone}: 10 bytes of copies in memory were removed" in text and "/runs/a" in text
    lock.release()


def test_what_stands_in_the_place_of_the_folder_or_its_lock_is_kept_under_another_name(
    trained, tmp_path
):
    truths = trained(tmp_path)
    folder = folder_in_memory(tmp_path / "run", tmp_path / "host0")
    (folder / LOCK).unlink()
    (folder / LOCK).mkdir()
    folder.chmod(0o755)
    same_on_all(run_ranks(resume_quietly, 2, tmp_path), END - 1, True, truths)
    shutil.rmtree(folder)
    folder.write_text("mine")
    assert run_ranks(resume_quietly, 2, tmp_path)[0][:2] == (1, False)
    assert [path.read_text() for path in folder.parent.iterdir()] == ["mine"]


@on_ranks(2)
def test_a_third_copy_reuses_the_files_of_the_first(rank, tmp_path):
    with run_of(rank, tmp_path) as (run, checkpoints):
        numbers = []
        for step in (1, 2, 3, 4):
            take_step(run, step)
            checkpoints.copy_to_memory(step, extra=run.extra)
            checkpoints.finish()
            (path,) = files_of(tmp_path, 0, f"step-*{step}/rank0000{rank}-0.safetensors")
            numbers.append(path.stat().st_ino)
            dist.barrier()
        assert numbers[:2] == numbers[2:] and numbers[0] != numbers[1]
        assert checkpoints.load(extra=run.extra).from_memory


def load_raises(rank, num_ranks, root, match, **options):
    with pytest.raises((CheckpointError, ConfigError), match=match):
        resume(rank, num_ranks, root, **options)


def test_where_both_copies_are_damaged_and_nothing_was_saved_the_load_says_so(trained, tmp_path):
    trained(tmp_path, saved=None)
    for path in files_of(tmp_path, 0, "rank00001-0.safetensors"):
        flip(path)
    run_ranks(load_raises, 2, tmp_path, "no checkpoint can be used.*rank00001-0")


def go_back(rank, num_ranks, root):
    with suppress(Crash), run_of(rank, root) as (run, checkpoints):
        assert checkpoints.load(step=1, extra=run.extra) is not None
        raise Crash


def test_after_a_load_of_an_older_step_no_restart_returns_to_a_newer_copy(trained, tmp_path):
    truths = trained(tmp_path)
    run_ranks(go_back, 2, tmp_path)
    same_on_all(run_ranks(resume, 2, tmp_path), 1, False, truths)


def save_without_copies(rank, num_ranks, root):
    with suppress(Crash), run_of(rank, root, memory_every=None) as (run, checkpoints):
        assert checkpoints.load(extra=run.extra).step == 1
        take_step(run, 7, norm=False)
        checkpoints.save(2, extra=run.extra, wait=True)
        truth = truth_of(run)
        raise Crash
    return truth


def test_copies_do_not_count_once_the_run_has_gone_on_without_them(trained, tmp_path):
    truths = trained(tmp_path)  # step 1 on disk, 2 and 3 in memory
    again = run_ranks(save_without_copies, 2, tmp_path)
    found = run_ranks(resume, 2, tmp_path, warned="step 3 in memory .* another state since")
    same_on_all(found, 2, False, [[{}, truth] for truth in again])
    assert differences(again[0], truths[0][1]), "the run went another way"


def test_a_folder_of_another_user_or_job_is_refused_and_what_is_not_ours_stays(tmp_path):
    root = tmp_path / "host0"
    folder = folder_in_memory(tmp_path / "run", root)
    folder.parent.mkdir(parents=True)
    folder.parent.chmod(0o755)
    run_ranks(load_raises, 2, tmp_path, "only this user may read and write")
    folder.parent.chmod(0o700)
    folder.mkdir(0o700)
    (folder / "notes").mkdir()
    lock = Files().lock(folder / LOCK)
    run_ranks(load_raises, 2, tmp_path, "another job of this user keeps its copies there")
    lock.release()
    run_ranks(train, 2, tmp_path, (2,))
    assert (folder / "notes").is_dir()


@on_ranks(2)
def test_memory_that_somebody_has_emptied_ends_no_run(rank, tmp_path):
    with run_of(rank, tmp_path) as (run, checkpoints):
        for step in (1, 2, 3):
            take_step(run, step)
            assert checkpoints.copy_to_memory(step) is not None
            checkpoints.finish()
            dist.barrier()
            if rank == 0:
                shutil.rmtree(tmp_path / "host0")
            dist.barrier()


def full_disk(files, path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@on_ranks(2)
def test_a_later_copy_that_fails_is_a_warning_and_the_run_goes_on(rank, tmp_path):
    with run_of(rank, tmp_path) as (run, checkpoints):
        take_step(run, 1)
        checkpoints.copy_to_memory(1)
        checkpoints.finish()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Files, "create", full_disk)
            assert checkpoints.copy_to_memory(2) is not None
            with warns_on_rank_0(rank, "no copy of step 2 in memory: rank 1: "):
                checkpoints.finish()
        take_step(run, 3)
        assert checkpoints.copy_to_memory(3, extra=run.extra) is not None
        checkpoints.finish()
        truth = truth_of(run)
        take_step(run, 4)
        loaded = checkpoints.load(extra=run.extra)
        assert (loaded.step, loaded.from_memory) == (3, True)
        assert not differences(truth_of(run), truth)


def goes_on_and_saves(rank, num_ranks, root):
    with run_of(rank, root) as (run, checkpoints):
        with warns_on_rank_0(rank, "a newer checkpoint is damaged"):
            loaded = checkpoints.load(extra=run.extra)
        assert (loaded.step, loaded.from_memory) == (END - 2, True)
        assert checkpoints.copy_to_memory(END - 2) is None, "it is there"
        take_step(run, END - 1, norm=False)
        checkpoints.save(END - 1, extra=run.extra, wait=True)


def test_a_damaged_checkpoint_above_the_copy_that_is_loaded_may_be_replaced(trained, tmp_path):
    trained(tmp_path, saved=END - 1)
    flip(tmp_path / f"run/step-{END - 1:08d}/rank00001-0.safetensors")
    run_ranks(goes_on_and_saves, 2, tmp_path)


@on_ranks(2)
def test_memory_that_is_too_small_is_refused_with_its_size_before_anything_is_written(
    rank, tmp_path
):
    said = r"rank 0: .* bytes .* and 1000 are free.*shm-size"
    with run_of(rank, tmp_path) as (run, checkpoints), pytest.MonkeyPatch.context() as patch:
        take_step(run, 1)
        patch.setattr(Files, "free_bytes", lambda *_: 1000 + 10**9 * rank)
        with pytest.raises(CheckpointError, match=said):
            checkpoints.copy_to_memory(1)
        patch.undo()
        assert checkpoints.copy_to_memory(1) is not None


@on_ranks(2)
def test_ranks_with_other_settings_are_told_so(rank, tmp_path):
    match = r"memory_every, copies: .*rank 0: \(0, 1\), rank 1: \(2, 1\)"
    load_raises(rank, 2, tmp_path, match, memory_every=2 if rank else None)


@pytest.mark.parametrize("copies", [0, 1])
def test_a_run_that_is_killed_at_any_moment_goes_on_from_a_state_it_had(copies, tmp_path):
    hosts = (1, 1)
    truths = run_ranks(train, 2, tmp_path / "quiet", hosts, copies=copies)
    for trial in range(2):
        root = tmp_path / f"trial{trial}"
        killed = start_ranks(train, 2, root, hosts, copies=copies)
        until(lambda root=root: (root / "run/step-00000001/manifest.json").exists())
        until(lambda root=root: bool(files_of(root, 0, ".tmp-*")) or gone(root))
        time.sleep(0.01 * trial)  # the moments differ, nothing depends on them
        killed.kill(trial % 2)
        killed.kill(1 - trial % 2)
        killed.wait(HANG_S)
        found = run_ranks(resume_quietly, 2, root, hosts, copies=copies)
        steps = {step for step, *_ in found}
        assert len(steps) == 1 and steps <= {1, 2, 3}
        (step,) = steps
        same_on_all(found, step, found[0][1], truths)


def gone(root):
    return len(files_of(root, 0, "manifest.json")) == 2
