"""Saves behind training: a copy is written, one at a time, and a failure is told on every rank."""

import errno
import threading

import pytest
import torch

import shardwise
from disk import Fault, FaultyFiles
from ranks import HANG_S, on_ranks
from saving import (
    Setting,
    build,
    differences,
    local_bytes,
    same_on_all_ranks,
    take_step,
    truth_of,
    until,
)
from shardwise.checkpoint import checkpoints as module
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import steps_in
from shardwise.errors import CheckpointError

SIZES = (1, 3)


class Gate:
    """Files whose operations in another thread wait while the gate is shut."""

    def __init__(self):
        self._open = threading.Event()
        self._open.set()
        self._main = threading.get_ident()
        self.files = FaultyFiles(Files(), before=self._pass)

    def _pass(self):
        if threading.get_ident() != self._main:
            assert self._open.wait(HANG_S)

    def shut(self):
        self._open.clear()

    def open(self, after_s=0.0):
        if after_s:
            threading.Timer(after_s, self._open.set).start()
        else:
            self._open.set()


def scribble(run):
    """Overwrite all state in place."""
    with torch.no_grad():
        for p in run.model.parameters():
            p.fill_(7.0)
        for buffer in run.model.buffers():
            buffer.fill_(7)
        for state in run.optimizer.state.values():
            for value in state.values():
                value.fill_(7.0)
    run.optimizer.param_groups[0]["lr"] = 7.0
    run.schedule.last_epoch = 7


@on_ranks(*SIZES, 4)
def test_what_is_overwritten_right_after_is_saved_as_it_was(rank, world_size, tmp_path):
    for stage, layout, precision in ((0, "rows", "fp32"), (1, "flat", "bf16"), (3, "flat", "fp32")):
        gate = Gate()
        num_replicas = 2 if world_size == 4 else 1
        setting = Setting(world_size, stage, layout, "found", precision, num_replicas)
        run = build(setting)
        take_step(run, 0)
        mine = torch.arange(4) + rank
        with Checkpoints(tmp_path / str(setting), run.model, run.optimizer, files=gate.files) as c:
            before = truth_of(run)
            gate.shut()
            saving = c.save(1, extra={**run.extra, "mine": mine, "text": [rank]})
            scribble(run)
            mine.fill_(7)
            assert not saving.done
            gate.open()
            saving.wait()
            other = build(setting, seed=3)
            loaded = shardwise.load(
                saving.wait().path, other.model, other.optimizer, extra=other.extra
            )
            assert not differences(truth_of(other), before)
            assert loaded.extra["mine"].tolist() == [rank, rank + 1, rank + 2, rank + 3]
            assert loaded.extra["text"] == [rank]


@on_ranks(*SIZES)
def test_a_second_save_and_the_end_wait_for_the_save_in_flight(world_size, tmp_path):
    gate = Gate()
    run = build(Setting(world_size))
    with Checkpoints(tmp_path, run.model, run.optimizer, files=gate.files) as c:
        gate.shut()
        first = c.save(1)
        take_step(run, 0)
        join, waits = first.join, []

        def joined():
            waits.append(first.done)
            gate.open(after_s=0.1)  # not before the second one waits
            join()

        first.join = joined
        second = c.save(2)
        assert first.done and waits[0] is False
        assert first.waited_s >= 0 and second.waited_s > 0.05
        second.wait()
        idle = c.save(3, wait=True)
        assert second.done and idle.done
        gate.shut()
        last = c.save(4)
        gate.open(after_s=0.1)
    assert last.done
    assert steps_in(Files(), tmp_path) == [4, 3, 2, 1]


@on_ranks(*SIZES)
def test_a_wait_that_is_interrupted_leaves_the_save_in_flight_and_its_copy_alone(
    world_size, tmp_path
):
    def interrupted():
        raise KeyboardInterrupt

    gate = Gate()
    run = build(Setting(world_size))
    truths = []
    with Checkpoints(tmp_path, run.model, run.optimizer, files=gate.files) as c:
        truths.append(truth_of(run))
        gate.shut()
        saving = c.save(1, extra=run.extra)
        joined, saving.join = saving.join, interrupted
        with pytest.raises(KeyboardInterrupt):
            c.finish()
        saving.join = joined
        take_step(run, 0)
        truths.append(truth_of(run))
        gate.open(after_s=0.1)  # while the second one begins
        c.save(2, extra=run.extra, wait=True)
    for step, truth in enumerate(truths, 1):
        shardwise.load(tmp_path, run.model, run.optimizer, step=step, extra=run.extra)
        assert not differences(truth_of(run), truth)


@on_ranks(*SIZES)
def test_a_failure_is_raised_by_the_same_pass_on_every_rank_once(rank, world_size, tmp_path):
    """Let the last rank's disk be full during the second save."""
    files = FaultyFiles(Files())
    run = build(Setting(world_size))
    take_step(run, 0)
    with Checkpoints(tmp_path, run.model, run.optimizer, files=files) as c:
        c.save(1, extra=run.extra, wait=True)
        at_1 = truth_of(run)
        take_step(run, 1)
        if rank == world_size - 1:
            written = sum(1 for op, _ in files.operations if op == "write")
            files._faults = (Fault(written, errno.ENOSPC, op="write"),)
        c.save(2)
        passes, text = 0, ""
        while not text:  # as many as the background's thread takes to fail
            try:
                take_step(run, 2)
                passes += 1
            except CheckpointError as error:
                text = str(error)
        same_on_all_ranks((passes, text))
        take_step(run, 2)  # told once, and training goes on
        other = build(Setting(world_size), seed=3)
        loaded = shardwise.load(tmp_path, other.model, other.optimizer, extra=other.extra)
        assert loaded.step == 1 and not differences(truth_of(other), at_1)
        assert c.save(2, wait=True).wait().path.name == "step-00000002"
    victim = world_size - 1
    assert "No space left" in text and f"rank{victim:05d}-0.safetensors" in text
    assert (f"rank {victim}: " in text) == (world_size > 1)
    names = sorted(p.name for p in tmp_path.iterdir() if p.name != ".shardwise.lock")
    assert names == ["step-00000001", "step-00000002"]


@on_ranks(*SIZES)
def test_a_failure_is_raised_by_the_next_call_and_the_folder_is_free_again(
    rank, world_size, tmp_path
):
    run = build(Setting(world_size))
    for call in ("save", "finish", "load", "close", "wait"):
        fault = Fault(0, errno.EIO, op="sync") if rank == 0 else Fault(0, errno.EIO, op="never")
        with pytest.raises(CheckpointError) as caught:  # noqa: SIM117 - it leaves the context
            with Checkpoints(tmp_path, run.model, files=FaultyFiles(Files(), fault)) as c:
                saving = c.save(1, wait=call == "wait")
                until(lambda saving=saving: saving.done)
                assert call != "wait"
                if call == "save":
                    c.save(2)
                elif call in ("finish", "load"):
                    getattr(c, call)()
        assert "(errno 5)" in str(caught.value)
        take_step(run, 0)  # a closed folder says nothing any more
        assert not [p for p in tmp_path.iterdir() if p.name != ".shardwise.lock"]


@on_ranks(*SIZES)
def test_after_reserve_saves_allocate_nothing_and_bytes_are_counted(world_size, tmp_path):
    sizes = []
    host_buffer = module.host_buffer

    def counted(num_bytes, device):
        sizes.append(num_bytes)
        return host_buffer(num_bytes, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "host_buffer", counted)
        run = build(Setting(world_size))
        take_step(run, 0)
        with Checkpoints(tmp_path, run.model, run.optimizer) as c:
            c.reserve()
            after_reserve = len(sizes)
            saves = []
            for step in range(1, 4):
                take_step(run, step)
                saves.append(c.save(step, extra={"a": step}).held_bytes)
    assert after_reserve == 1 and len(sizes) == 1
    assert saves == [sizes[0]] * 3
    # Parameters and two moments of most of them, each rounded up to 64 bytes; some scalars.
    params = local_bytes(run.model)
    assert 2 * params < sizes[0] < 3 * params + 64 * 120


@on_ranks(*SIZES)
def test_written_bytes_are_those_on_disk(rank, world_size, tmp_path):
    run = build(Setting(world_size))
    take_step(run, 0)
    seen = []
    with Checkpoints(tmp_path, run.model, run.optimizer) as c:
        written = c.save(1, extra=run.extra, progress=seen.append, wait=True).wait()
    sizes = {p.name: p.stat().st_size for p in written.path.iterdir()}
    assert sizes.pop("manifest.json") > 0 and written.num_bytes == sum(sizes.values())
    own = {name: size for name, size in sizes.items() if name.startswith(f"rank{rank:05d}")}
    assert written.rank_bytes == sum(own.values())
    assert sum(seen) == sum(size for name, size in own.items() if name.endswith(".safetensors"))
