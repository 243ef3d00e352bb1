"""Trials of the campaigns `kill` and `power`: a real save is stopped, then somebody looks."""

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import gcd

import torch

import shardwise
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import step_name, steps_in
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.verify import check_quickly
from shardwise.errors import DamagedCheckpoint
from stamped import build, count, stamp, stamped_value
from worlds import TIMEOUT_S, World, in_a_world

WIDTH, DEPTH = 256, 4  # 3.2 MB of parameters and moments
MODES = ("new", "replace", "background", "rotating")
# Moments before FIRST: one rank never begins, so the save cannot end. After LAST: it has returned.
# Between them the clock decides, so how many end before a kill depends on the machine.
FIRST, LAST = 0.1, 1.0


@dataclass(frozen=True)
class Trial:
    """One save of B while A is there, and when and how it is stopped."""

    ranks: int
    stage: int
    layout: str
    mode: str
    one_first: bool
    moment: float  # in units of the time that such a save takes; see FIRST and LAST
    look_with: int = 0  # so many fresh ranks load; without, the files are compared


def draw(rng, fresh=0.1):
    """Draw a trial; a share of ``fresh`` is looked at by fresh ranks."""
    stage, layout = rng.choice(((3, "rows"), (3, "flat"), (1, "flat")))
    return Trial(
        ranks=rng.randint(1, 4),
        stage=stage,
        layout=layout,
        mode=rng.choice(MODES),
        one_first=rng.random() < 0.3,
        moment=rng.uniform(0, 1.1),
        look_with=rng.randint(1, 4) if rng.random() < fresh else 0,
    )


def spread(rng, number, trials):
    """Return one of so few trials that together they cover every phase, mode and number of ranks.

    The moments lie evenly over the save and a little beyond; neighbours differ in all else.
    """
    drawn = draw(rng)
    return replace(
        drawn,
        ranks=1 + number // len(MODES) % 4,
        mode=MODES[(number + number // 16) % len(MODES)],
        moment=1.1 * ((_step(trials) * number) % trials + rng.random()) / trials,
        look_with=drawn.ranks if number % 8 == 5 else 0,
    )


def _step(trials):
    """Return how far the moments of neighbours lie apart: every moment is met once."""
    return next(step for step in (7, 11, 13, 17, 1) if gcd(step, trials) == 1)


# ------------------------------------------------------------------------------- what the ranks do


def save_a(trial, folder):
    """Save A as step 1, in a world that ends well."""

    def body(rank, say, hear):
        model, optimizer = build(trial.stage, trial.layout, WIDTH, DEPTH)
        stamp(model, optimizer, "A")
        shardwise.save(folder, model, optimizer, step=1, extra={"save": "A", "rank": rank})
        say("done")

    in_a_world(trial.ranks, body)


def save_b(trial, folder):
    """Return a body that gets ready, waits for the word, saves B, and says so when it returned."""

    def body(rank, say, hear):
        model, optimizer = build(trial.stage, trial.layout, WIDTH, DEPTH)
        extra = {"save": "B", "rank": rank}
        if trial.mode in ("new", "replace"):
            stamp(model, optimizer, "B")
            say("ready")
            hear()
            begin = time.monotonic()
            replace = trial.mode == "replace"
            step = 1 if replace else 2
            shardwise.save(folder, model, optimizer, step=step, extra=extra, replace=replace)
            say("saved", seconds=time.monotonic() - begin)
            return
        keep_last = 1 if trial.mode == "rotating" else None
        with Checkpoints(folder, model, optimizer, keep_last=keep_last) as checkpoints:
            checkpoints.load()  # so that A belongs to this run, and may be removed after B
            stamp(model, optimizer, "B")
            checkpoints.reserve()
            say("ready")
            hear()
            begin = time.monotonic()
            saving = checkpoints.save(2, extra=extra)
            stamp(model, optimizer, "C")  # training goes on
            saving.wait()
            say("saved", seconds=time.monotonic() - begin)
            hear()  # hold the lock until the end

    return body


# ---------------------------------------------------------------------------------- who looks, how


@cache
def _expected(name, numel, save):
    return stamped_value(name, 0, numel, save)


def look(folder, ranks):
    """Return which save the newest checkpoint that verifies is, to the last byte; "-" if none is.

    **Raises** AssertionError for a checkpoint that verifies and holds anything else.
    """
    files = Files()
    for step in steps_in(files, folder):
        path = folder / step_name(step)
        try:
            manifest, _ = check_quickly(files, path)
            with closing(Checkpoint(files, path, manifest)) as found:
                values = [found.values_of(rank)["extra"] for rank in range(ranks)]
                save = str(values[0]["save"])
                assert values == [{"save": save, "rank": rank} for rank in range(ranks)], values
                for info in found.tensors:
                    name = f"{info.name}.{info.state}" if info.state else info.name
                    data = found.read(info, 0, info.numel)
                    same = torch.equal(data, _expected(name, info.numel, save))
                    assert same, f"{path}: {info.key} is not that of {save}"
                assert len(found.tensors) == 4 * (2 * DEPTH + 3) + 1
            return save
        except DamagedCheckpoint:
            continue
    return "-"


def look_with_ranks(trial, folder):
    """Let fresh ranks, perhaps of another number, load the newest and save again."""

    def body(rank, say, hear):
        model, optimizer = build(trial.stage, trial.layout, WIDTH, DEPTH)
        stamp(model, optimizer, "Z")
        with Checkpoints(folder, model, optimizer) as checkpoints:
            loaded = checkpoints.load()
            found = count(model, optimizer)
            checkpoints.save(7, extra={"save": "D", "rank": rank}, wait=True)
        say("done", found="".join(found), step=loaded.step if loaded else None)

    answers = in_a_world(trial.look_with, body)
    found = {answer["found"] for answer in answers}
    assert len(found) == 1 and len({answer["step"] for answer in answers}) == 1, answers
    left = [p.name for p in folder.iterdir() if p.name.startswith((".tmp-", ".old-"))]
    assert not left and (folder / step_name(7)).is_dir(), left
    return found.pop()


# -------------------------------------------------------------------------------------- the trials


class Kills:
    """Trials with SIGKILL in one folder; saves of A are made once and linked to."""

    def __init__(self, folder):
        self._folder = folder
        self._seconds = {}

    def with_a(self, trial, folder):
        """Make a folder that holds A as step 1."""
        shutil.rmtree(folder, ignore_errors=True)  # of a trial that was a violation
        shutil.copytree(self.template(trial), folder, copy_function=os.link)
        return folder

    def template(self, trial):
        """Return a folder with such an A, saved on first use."""
        template = self._folder / f"A-{trial.ranks}-{trial.stage}-{trial.layout}"
        if not template.exists():
            save_a(trial, template)
        return template

    def seconds_of(self, trial):
        """Return how long such a save takes, as far as is known."""
        return self._seconds.get((trial.ranks, trial.mode), 0.1)

    def learn(self, trial, world):
        """Learn from a trial how long a save takes, so that the next ones are stopped within."""
        told = [m["seconds"] for said in world.said for m in said if m["kind"] == "saved"]
        before = self.seconds_of(trial)
        if told:
            self._seconds[trial.ranks, trial.mode] = (before + max(told)) / 2
        elif trial.moment > 0.8:
            self._seconds[trial.ranks, trial.mode] = 1.4 * before

    def run(self, trial, rng):
        """Return the verdict ("A", "B"), and whether a rank's save had returned."""
        delay_s = trial.moment * self.seconds_of(trial)
        folder = self.with_a(trial, self._folder / "run")
        with World(trial.ranks, save_b(trial, folder)) as world:
            world.wait("ready")
            world.all_of("ready")
            world.go(but=trial.moment < FIRST)
            if trial.moment > LAST:
                world.wait("saved")
                world.all_of("saved")
            else:
                time.sleep(delay_s)
            if trial.one_first:
                world.kill(rng.randrange(trial.ranks))
                time.sleep(rng.choice((0.002, 0.02)))
        self.learn(trial, world)
        told = world.any_said("saved")
        if any(world.has_said(rank, "error") for rank in range(trial.ranks)):
            assert trial.one_first, world.said  # the others may say that one is gone
        verdict = look(folder, trial.ranks)
        if trial.look_with:
            by_ranks = look_with_ranks(trial, folder)
            assert by_ranks == verdict, f"ranks load {by_ranks}, the files say {verdict}"
        shutil.rmtree(folder)
        assert verdict in ("A", "B"), f"{verdict} is left"
        assert verdict == "B" or not told, "A is left, though the save of B had returned"
        return verdict, told


class PowerCuts(Kills):
    """Trials on an ext4 of their own that is stopped as a power cut would stop it; needs root."""

    LAGS = (0.0, 0.0, 1.0, 7.0)

    def __init__(self, folder):
        super().__init__(folder)
        self._disk = LoopDisk(folder)

    def run(self, trial, rng):
        """Return the verdict, and whether the save had returned before the cut."""
        during, delay_s = rng.random() < 0.5, trial.moment * self.seconds_of(trial)
        root = self._disk.mounted / "run"
        folder = self.with_a_on_the_disk(trial, root)
        with World(trial.ranks, save_b(trial, folder)) as world:
            world.wait("ready")
            world.all_of("ready")
            world.go()
            if during:
                time.sleep(delay_s)
            else:
                world.wait("saved")
                world.all_of("saved")
                time.sleep(rng.choice(self.LAGS))
            self._disk.cut()
            world.wait("saved")
        told = world.any_said("saved")  # before the cut, or after it, which is no better a promise
        if during:
            self.learn(trial, world)
        self._disk.restart()
        verdict = look(folder, trial.ranks)
        if trial.look_with:
            assert look_with_ranks(trial, folder) == verdict
        shutil.rmtree(root)
        assert verdict in ("A", "B"), f"{verdict} is left"
        assert verdict == "B" or not told, "A is left, though the save of B had returned"
        return verdict, told

    def with_a_on_the_disk(self, trial, root):
        """Copy A to the disk, and wait until it is on it for good."""
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.template(trial), root)
        self._disk.sync()
        return root

    def close(self):
        """Take the disk away."""
        self._disk.close()


class LoopDisk:
    """An ext4 in a file; `cut` stops it at once: what its journal does not have is gone."""

    _SHUTDOWN, _NO_FLUSH = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN; leave the journal as it is

    def __init__(self, folder, num_bytes=192 << 20):
        enter_own_mounts()
        self.image, self.mounted = folder / "image", folder / "disk"
        self.mounted.mkdir()
        with self.image.open("wb") as file:
            file.truncate(num_bytes)
        subprocess.run(["mkfs.ext4", "-q", "-F", self.image], check=True)
        self._mount()

    def _mount(self):
        subprocess.run(["mount", "-o", "loop", self.image, self.mounted], check=True)

    def sync(self):
        """Bring everything to the disk."""
        with self._opened() as fd:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd):
                raise OSError(ctypes.get_errno(), "syncfs")

    def cut(self):
        """Cut the power: nothing is written any more, every call fails."""
        with self._opened() as fd:
            fcntl.ioctl(fd, self._SHUTDOWN, struct.pack("I", self._NO_FLUSH))

    def restart(self):
        """Mount it again, which replays the journal."""
        self.close()
        self._mount()

    def close(self):
        """Unmount it, waiting for processes that die."""
        deadline = time.monotonic() + TIMEOUT_S
        while subprocess.run(["umount", self.mounted], capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.mounted} cannot be unmounted")
            time.sleep(0.02)

    @contextmanager
    def _opened(self):
        fd = os.open(self.mounted, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)


@cache
def enter_own_mounts():
    """Let mounts be seen by this process and its children only. **Raises** PermissionError."""
    clone_newns = 0x20000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newns):
        raise PermissionError(ctypes.get_errno(), "power cuts need root (a mount namespace)")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
