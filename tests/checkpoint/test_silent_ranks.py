"""The process group's timeout is how long a rank may be silent, not how long its disk takes."""

import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from disk import FaultyFiles
from models import Stack
from ranks import HANG_S, Ranks, on_ranks, start_ranks
from saving import until
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import steps_in
from shardwise.comm.control import timeout_of
from shardwise.errors import CollectiveError
from shardwise.mesh import resolve_axes
from stamped import build

TIMEOUT_S = 4.0
VICTIM = 1


def short_mesh(world_size):
    """Return a mesh whose group waits for a rank for a few seconds only, once all are there."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    return type(mesh).from_group(group, "cpu", mesh_dim_names=("shard",))


@on_ranks(3)
def test_small_exchanges_wait_as_long_as_the_groups_of_the_mesh(world_size):
    axes = resolve_axes(short_mesh(world_size), "cpu")
    assert timeout_of(axes) == timedelta(seconds=TIMEOUT_S)
    assert timeout_of(resolve_axes(None, "cpu")) == timedelta(minutes=5)


def call_while_one_is_stopped(rank, world_size, what, folder):
    """Make a call that the victim, stopped by the test, never joins; return what it raised."""
    model, optimizer = build(mesh=short_mesh(world_size), save="A")
    shardwise.save(folder, model, optimizer, step=1)
    checkpoints = Checkpoints(Path(folder, "run"), model, optimizer)
    dist.barrier()
    Path(folder, f"ready{rank}").touch()
    until(lambda: rank != VICTIM and Path(folder, "stopped").exists())
    with pytest.raises(CollectiveError) as caught:
        if what == "save":
            shardwise.save(folder, model, optimizer, step=2)
        elif what == "load":
            shardwise.load(folder, model, optimizer)
        elif what == "behind":
            checkpoints.save(2, wait=True)
        else:
            shardwise.shard(Stack(), mesh=short_mesh_of(model))
    return str(caught.value), steps_in(Files(), Path(folder))


def short_mesh_of(model):
    from shardwise.engine.api import engine_of

    return engine_of(model).comm.axes.mesh


CALLS = ("save", "load", "behind", "shard")


@dataclass
class Stopped:
    """Ranks of which one was stopped in its turn."""

    folder: Path
    ranks: Ranks

    def stop_one(self):
        until(lambda: len(list(self.folder.glob("ready*"))) == 3)
        self.ranks.kill(VICTIM, signal.SIGSTOP)
        (self.folder / "stopped").touch()

    def outcomes(self):
        for rank in (0, 2):
            self.ranks.processes[rank].join(HANG_S)
        self.ranks.kill(VICTIM)
        return self.ranks.wait(HANG_S)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Let all wait at once; none starts beside others, as ranks that start are slow for others."""
    found = {}
    for what in CALLS:
        folder = tmp_path_factory.mktemp(what)
        ranks = start_ranks(call_while_one_is_stopped, 3, what, str(folder))
        found[what] = Stopped(folder, ranks)
        found[what].stop_one()
    return found


@pytest.fixture(scope="module", autouse=True)
def slow_disk(stopped, tmp_path_factory):
    """Start what waits for a disk while the others wait for ranks that are stopped."""
    return start_ranks(save_with_a_slow_disk, 3, str(tmp_path_factory.mktemp("slow")), 2)


@pytest.fixture(scope="module", autouse=True)
def interrupted(stopped):
    return start_ranks(meet_after_an_interrupt, 3)


@pytest.mark.slow
@pytest.mark.parametrize("what", CALLS)
def test_a_stopped_rank_ends_what_waits_for_it_and_is_named(stopped, what):
    folder = str(stopped[what].folder)
    for outcome in stopped[what].outcomes():
        if outcome.rank != VICTIM:
            assert outcome.ok, outcome.describe()
            text, steps = outcome.result
            assert steps == [1]
            if what != "shard":  # training's own group finds it first
                assert "rank 1 did not come within 4 s" in text and folder in text, text


def results_of(ranks):
    outcomes = ranks.wait(HANG_S)
    assert all(outcome.ok for outcome in outcomes), [each.describe() for each in outcomes]
    return [outcome.result for outcome in outcomes]


class SlowFiles(FaultyFiles):
    """A disk that takes longer for one file than the group waits for a rank."""

    def __init__(self, slow):
        super().__init__(Files())
        self._slow = slow

    def create(self, path):
        if self._slow and path.suffix == ".safetensors":
            time.sleep(1.5 * TIMEOUT_S)
        return super().create(path)


def save_with_a_slow_disk(rank, world_size, folder, slow):
    model, optimizer = build(mesh=short_mesh(world_size), save="A")
    files = SlowFiles(rank == slow)
    with Checkpoints(Path(folder), model, optimizer, files=files) as checkpoints:
        written = checkpoints.save(1, wait=True).wait()
    return [written.num_bytes, shardwise.load(folder, model, optimizer).step]


@pytest.mark.slow
def test_a_disk_that_is_slower_than_the_timeout_is_waited_for(slow_disk):
    found = results_of(slow_disk)
    assert all(row == found[0] and row[1] == 1 for row in found)


def meet_after_an_interrupt(rank, world_size):
    from shardwise.checkpoint.all_ranks import rows_of_all_ranks
    from shardwise.comm.control import control_over

    control = control_over(resolve_axes(short_mesh(world_size), "cpu"))
    seen = []

    def work():
        if rank == VICTIM:
            raise KeyboardInterrupt
        return bytes([rank])

    try:
        rows_of_all_ranks(control, work, 1)
    except (KeyboardInterrupt, CollectiveError) as error:
        seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_a_rank_that_is_interrupted_in_its_work_is_missed_and_no_row_of_it_counts(interrupted):
    found = results_of(interrupted)
    assert found[VICTIM] == ["KeyboardInterrupt: "]
    for rank in (0, 2):
        assert "CollectiveError" in found[rank][0] and "rank 1 did not come" in found[rank][0]
