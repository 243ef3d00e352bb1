"""Small checkpoints made by hand, every number stamped with its save; and what a reader finds.

A save is one letter. The checkpoint of save "B" holds tensors cut by rows and flat, one that a
single rank writes, one of each rank's own, and values; every element says which save, tensor and
place it is of, so that a checkpoint of two saves cannot pass for one of either.
"""

import errno
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from disk import FaultyFiles, Lockstep, SimulatedDisk, all_crashes
from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.folder import clean_up, rotate, step_name, steps_in
from shardwise.checkpoint.manifest import LayoutRow, Manifest, OptimizerRow, TensorRow
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.values import encode
from shardwise.checkpoint.verify import check_quickly
from shardwise.checkpoint.write import Part, Written, write_checkpoint
from shardwise.errors import CheckpointError, DamagedCheckpoint

RUN = Path("/run")
NONCE = b"\x01\x02\x03\x04"
ROWS = ((5, 3), (4,), ())
FLAT = ((2, 2, 3), (3,), (7,))


def numbers(save, tensor, numel):
    """Return all elements of one tensor of a save."""
    return np.arange(numel, dtype=np.int32) + 10_000 * ord(save) + 100 * tensor


def manifest_of(save, ranks, step=None, run="run"):
    """Describe what a save holds; without ``step`` it is the place of the letter from "A" = 1."""
    cut = [("param", f"r{n}", "", 0, n, shape) for n, shape in enumerate(ROWS)]
    cut += [("optimizer", f"f{n}", "exp_avg", 1, n, shape) for n, shape in enumerate(FLAT)]
    rows = [
        TensorRow(kind=k, name=n, state=s, dtype="I32", shape=shape, layout=layout, index=index)
        for k, n, s, layout, index, shape in cut
    ]
    rows.append(TensorRow(kind="buffer", name="b", dtype="I32", shape=(3, 2), rank=ranks - 1))
    return Manifest(
        format=1,
        shardwise="1",
        torch="2",
        run=run,
        step=ord(save) - ord("A") + 1 if step is None else step,
        saved_at="",
        stage=3,
        num_shards=ranks,
        num_replicas=1,
        layouts=(LayoutRow(kind="rows", shapes=ROWS), LayoutRow(kind="flat", shapes=FLAT)),
        tensors=tuple(rows),
        tied={},
        optimizer=OptimizerRow(class_name="Adam", groups=[], state={}),
        ranks=(),
    )


def part_of(save, rank, manifest):
    """Return what one rank writes of a save."""

    def read(number, box):
        whole = numbers(save, number, manifest.tensors[number].info.numel)
        return memoryview(whole[box.lo : box.hi].tobytes())

    own = torch.from_numpy(numbers(save, 50 + rank, 5))
    encoded, tensors = encode({"save": save, "rank": rank, "own": own}, "extra")
    rows = [TensorRow(kind="extra", name=key, dtype="I32", shape=(5,)) for key in tensors]
    data = memoryview(own.numpy().tobytes())
    values = {"extra": encoded}
    return Part(rank, read, [(row, lambda: data) for row in rows], values)


def write(files, control, save, step=None, **options):
    """Write one save as the checkpoint of its step; every rank calls it."""
    manifest = manifest_of(save, control.num_ranks, step)
    target = RUN / step_name(manifest.step or 0)
    part = part_of(save, control.rank, manifest)
    return write_checkpoint(files, control, target, NONCE, manifest, part, **options)


def write_and_rotate(files, control, save, step, keep_last=1):
    """Write one save, then remove older ones, as `Checkpoints` does."""
    written = write(files, control, save, step)

    def remove():
        if control.rank == 0:
            rotate(files, RUN, "run", keep_last, None, step)

    on_all_ranks(control, remove)
    return written


def contents(save, ranks):
    """Return what a reader must find of a save."""
    tensors = {
        row.info.key: numbers(save, number, row.info.numel).tolist()
        for number, row in enumerate(manifest_of(save, ranks).tensors)
    }
    own = {
        rank: {"save": save, "rank": rank, "own": numbers(save, 50 + rank, 5).tolist()}
        for rank in range(ranks)
    }
    return {"tensors": tensors, "own": own}


def read_all(files, path):
    """Read and check every byte of a checkpoint. **Raises** DamagedCheckpoint."""
    manifest, _ = check_quickly(files, path)
    with closing(Checkpoint(files, path, manifest)) as found:
        tensors = {info.key: found.read(info, 0, info.numel).tolist() for info in found.tensors}
        own = {}
        for rank in range(manifest.num_ranks):
            own[rank] = found.values_of(rank)["extra"]
            own[rank]["own"] = own[rank]["own"].tolist()
    return {"tensors": tensors, "own": own}


def newest(files, ranks):
    """Return the step and the letter of the newest checkpoint that verifies to its last byte."""
    for step in steps_in(files, RUN):
        try:
            found = read_all(files, RUN / step_name(step))
        except DamagedCheckpoint:
            continue
        save = found["own"][0]["save"]
        assert found == contents(save, ranks), f"step {step} verifies and is no save: {found}"
        return step, save
    return None


class Verdicts:
    """`newest` of many disks that differ little: disks with the same files are read once."""

    _known: ClassVar[dict[Any, tuple[int, str] | None]] = {}

    def __init__(self, ranks):
        self._ranks = ranks

    def of(self, disk):
        """Return the verdict on one disk; what stands under a temporary name does not count."""
        found = (
            self._ranks,
            frozenset(
                (name, data) for name, data in disk.tree().items() if not name.startswith("/run/.")
            ),
        )
        if found not in self._known:
            self._known[found] = newest(disk, self._ranks)
        return self._known[found]

    def after_power_cut(self, disk, limit, seed):
        """Yield the verdict on every disk that a power cut now may leave."""
        for after in all_crashes(disk, limit, seed):
            yield self.of(after)


def kept(disk):
    """Return a copy of a disk, everything on it durable."""
    return disk.crash(lambda _, options: options - 1)


def disk_with(ranks, saves):
    """Return a disk that holds these saves, by step, written by the code under test."""
    return kept(_written_disk(ranks, tuple(saves.items())))


@cache
def _written_disk(ranks, saves):
    disk = SimulatedDisk()
    for step, save in saves:
        results = Lockstep().run(ranks, lambda c, s=save, n=step: write(disk, c, s, n))
        assert all(isinstance(r, Written) for r in results), results
    return disk


def run_ranks_on(disk, ranks, body, seed=None, faults=None):
    """Run a body on every rank, in an order given by the seed; return results and files."""
    lockstep = Lockstep()
    all_files = [
        FaultyFiles(disk, *((faults or {}).get(rank, ())), before=lockstep.pause)
        for rank in range(ranks)
    ]
    return lockstep.run(ranks, lambda c: body(all_files[c.rank], c), seed), all_files


def failed_operations(files, fault):
    """Return the operations, with the names of their files, that a fault met."""
    found = [(op, name) for op, name in files.operations if fault.op in (None, op)][fault.at :]
    return found if fault.lasting else found[:1]


CLEAN_UP = ("list", "remove_file", "remove_folder", "release")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def assert_an_error_leaves_nothing(ranks, faults, replace, seed=None):
    """Fail operations of some ranks while they save B beside, or in the place of, A.

    All ranks must say the same, with the rank, the file and the errno; A is as it was, nothing of B
    is left, even after a power cut, and the next save works. Returns what happened.
    """
    start, step = disk_with(ranks, {1: "A"}), 1 if replace else 2
    disk, before = kept(start), start.tree()

    def body(files, control):
        return write(files, control, "B", step, replace=replace)

    results, files = run_ranks_on(disk, ranks, body, seed, {r: (f,) for r, f in faults.items()})
    failed = {rank: failed_operations(files[rank], fault) for rank, fault in faults.items()}
    met, where = [rank for rank in sorted(faults) if failed[rank]], f"{faults}: {failed}"
    if all(isinstance(result, Written) for result in results):
        assert newest(disk, ranks) == (step, "B"), where
        # What may fail with no more than a leftover is the removal of what was replaced, and of
        # the lock of the temporary folder.
        left = [name for name in disk.tree() if name.startswith("/run/.")]
        assert replace or all(name.endswith(".lock") for name in left), left
        assert met or not left, left
        if not any(op == "release" for met_by in failed.values() for op, _ in met_by):
            clean_up(disk, RUN)  # else the lock is held still: as by a process that lives
            left = [name for name in disk.tree() if name.startswith("/run/.")]
            assert not left, (where, left)
        return "saved, leftovers" if met else "saved"
    texts = {str(result) for result in results}
    assert {type(result) for result in results} == {CheckpointError} and len(texts) == 1, results
    text = texts.pop()
    # While the others write, rank 0 lists and removes only to clean up after one that failed: what
    # fails then is told by nobody, and leaves a leftover.
    in_clean_up = len(met) > 1 and met[0] == 0 and failed[0][0][0] in CLEAN_UP
    met = met[1:] if in_clean_up else met
    rank = met[0]
    # A lasting fault may meet a clean-up first, that of the names that earlier saves left.
    told = (each for each in failed[rank] if each[0] not in CLEAN_UP)
    op, name = next(told, failed[rank][0])
    assert f"{name}: " in text and f"(errno {faults[rank].number})" in text, (where, text)
    assert (f"rank {rank}: " in text) == (ranks > 1), (where, text)
    assert ("one other rank" in text or "other ranks" in text) == (len(met) > 1), (where, text)
    in_file = op in ("create", "write", "sync", "close")
    if in_file and faults[rank].number in FULL and not faults[rank].lasting:
        assert " bytes, " in text and "are free there" in text, text
    if in_clean_up or any(
        fault.lasting for fault in faults.values()
    ):  # names may resist being given back
        assert newest(disk, ranks) in ((1, "A"), (step, "B")), where
    else:
        assert newest(disk, ranks) == (1, "A"), where
        assert disk.tree() == before, (where, sorted(disk.tree()))
    assert set(Verdicts(ranks).after_power_cut(disk, 64, 0)) <= {(1, "A"), (step, "B")}, where
    again, _ = run_ranks_on(disk, ranks, lambda f, c: write(f, c, "C", 3), seed)
    assert all(isinstance(result, Written) for result in again), again
    assert newest(disk, ranks) == (3, "C")
    return "refused"
