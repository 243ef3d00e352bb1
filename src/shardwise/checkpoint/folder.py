"""All checkpoints of one run, in one folder: its lock, its steps, rotation, and the one to load.

What may be removed: Note [What may be removed] in `trash`.

Note [Beside a running run]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The run whose folder is read may remove a checkpoint at any moment, usually because there is a newer
one. If the chosen checkpoint is gone, or was replaced, it is not damaged: the folder is listed
again, from the newest. A checkpoint is damaged only if it is unchanged and cannot be read.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise.checkpoint.all_ranks import ask_first_rank, on_all_ranks
from shardwise.checkpoint.files import Entry, Files, Lock, read_text, reading
from shardwise.checkpoint.manifest import (
    MANIFEST,
    IndexRow,
    Manifest,
    file_name,
    index_name,
    index_of,
    is_ours,
    parse_manifest,
)
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.trash import STEP, remove_checkpoint, take
from shardwise.errors import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from shardwise.comm.control import Control

LOCK = ".shardwise.lock"
MAX_LOOKS = 100  # how often a checkpoint may vanish or change while it is checked or read
_LOCK_CHARS = 4096
_SIZE_BYTES = 8
_SHOWN = 5


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_in(files: Files, folder: Path) -> list[int]:
    """Return the steps that have a folder of their name, the highest first."""
    try:
        entries = files.list(folder)
    except FileNotFoundError:
        return []
    names = [STEP.fullmatch(entry.name) for entry in entries if entry.kind == "folder"]
    return sorted((int(n[1]) for n in names if n and step_name(int(n[1])) == n[0]), reverse=True)


# -- the quick check of a checkpoint


def check_quickly(files: Files, path: Path) -> tuple[Manifest, bytes]:
    """Check a checkpoint's manifest, and that its files are there in their sizes.

    The digests of tensors are checked when they are read. Returns the manifest and its bytes. If
    the checkpoint is replaced meanwhile, it is checked again.

    **Cost** one listing and one small file, whatever the number of ranks; four more for damage.

    **Raises** DamagedCheckpoint naming the file.
    """
    for _ in range(MAX_LOOKS):
        data = None
        try:
            data = read_small(files, path / MANIFEST)
            return _check_against(files, path, data), data
        except (DamagedCheckpoint, OSError):  # OSError: on NFS, of a folder that was replaced
            if _manifest_now(files, path) == data:
                raise
    raise too_fast(path)


def _manifest_now(files: Files, path: Path) -> bytes | None:
    try:
        return read_small(files, path / MANIFEST)
    except (CheckpointError, OSError):
        return None


def _check_against(files: Files, path: Path, data: bytes) -> Manifest:
    """Check a folder against the bytes of its manifest; return the manifest."""
    manifest = parse_manifest(data, str(path / MANIFEST))
    named = STEP.fullmatch(path.name)
    if named and manifest.step is not None and int(named[1]) != manifest.step:
        raise DamagedCheckpoint(f"{path}: it is the checkpoint of step {manifest.step}")
    with reading(path):
        entries = files.list(path)
    found = find_difference(path, entries, manifest.ranks)
    if found is None:
        return manifest
    # The manifest has the total size of a rank's files, the index has the size of each, and the
    # manifest itself may be of another save: what the indexes say is more exact.
    sizes = {entry.name: entry.size for entry in entries if entry.kind == "file"}
    rank, text = found
    for each in sorted({0, rank}):
        with suppress(OSError):
            index, _ = index_of(manifest, each, read_small(files, path / index_name(each)), path)
            for number, file in enumerate(index.files):
                name = file_name(each, number)
                if sizes.get(name, file.num_bytes) != file.num_bytes:
                    text = f"{path / name}: {sizes[name]} bytes, expected {file.num_bytes}"
    raise DamagedCheckpoint(text)


def find_difference(
    path: Path, entries: Iterable[Entry], ranks: Sequence[IndexRow]
) -> tuple[int, str] | None:
    """Compare a folder's listing with the manifest's row of each rank.

    Return the rank and the first file that is missing, of another size, or one too many. Files with
    other names than ours are ignored.
    """
    found = {entry.name: entry for entry in entries if is_ours(entry.name)}
    expected = {MANIFEST}
    for rank, row in enumerate(ranks):
        expected |= set(names_of_rank(rank, row))
        if text := difference_of_rank(path, found, rank, row):
            return rank, text
    unknown = sorted(set(found) - expected)
    return (0, f"{path / unknown[0]}: the manifest does not name this file") if unknown else None


def names_of_rank(rank: int, row: IndexRow) -> list[str]:
    """Return the names of a rank's files, its index first."""
    return [index_name(rank), *(file_name(rank, number) for number in range(row.num_files))]


def difference_of_rank(path: Path, found: Mapping[str, Entry], rank: int, row: IndexRow) -> str:
    """Describe which file of a rank is missing or has another size; return "" if none."""
    index, *names = names_of_rank(rank, row)
    for name in (index, *names):
        if name not in found or found[name].kind != "file":
            return f"{path / name}: it is missing, or no regular file"
    for text, size, wanted in (
        (index, found[index].size, row.index_bytes),
        (", ".join(names), sum(found[n].size for n in names), row.file_bytes),
    ):
        if size != wanted:
            return f"{path / text}: {size} bytes, expected {wanted}"
    return ""


def is_usable(files: Files, folder: Path, step: int) -> bool:
    """Tell whether a load of the newest would take this step, or be stopped by it."""
    try:
        check_quickly(files, folder / step_name(step))
    except (DamagedCheckpoint, OSError):
        return False
    except CheckpointError:  # of a newer version
        return True
    return True


# -- the lock of a run


class CopiesThatCount(NamedTuple):
    """Which copies in memory may be loaded: those of ``run`` up to ``step``.

    ``on_disk`` is the newest step on disk that the run knew of: if it has been removed or moved
    away since, no copy counts. -1: none.
    """

    run: str = ""
    step: int = -1
    on_disk: int = -1


NO_COPIES = CopiesThatCount()


def take_lock(files: Files, folder: Path, run: str, copies: CopiesThatCount = NO_COPIES) -> Lock:
    """Make the folder and lock it for this run.

    **Raises** CheckpointError while another run holds it.
    """
    files.make_folders(folder)
    path = folder / LOCK

    def busy() -> str:
        holder = _holder(files, path)
        return f"{folder}: {holder} saves checkpoints there; choose another folder, or end that run"

    lock = take(files, path, busy)
    name_holder(lock, run, copies)
    return lock


def name_holder(lock: Lock, run: str, copies: CopiesThatCount) -> None:
    """Write this process and the copies that count into a lock's file."""
    said = {"pid": os.getpid(), "host": socket.gethostname(), "run": run, "in_memory": copies}
    lock.write(json.dumps(said))


def copies_that_count(files: Files, folder: Path) -> CopiesThatCount:
    """Return which copies in memory count, as the last holder of the lock wrote it."""
    try:
        said = json.loads(read_text(files, folder / LOCK, _LOCK_CHARS))["in_memory"]
        found = CopiesThatCount(str(said[0]), int(said[1]), int(said[2]))
    except (OSError, ValueError, LookupError, TypeError, CheckpointError):
        return NO_COPIES
    is_there = found.on_disk < 0 or found.on_disk in steps_in(files, folder)
    return found if is_there else NO_COPIES


def lock_holder(files: Files, folder: Path) -> str | None:
    """Return which process saves checkpoints there at this moment; None if no process does.

    The lock is taken for an instant, shared with other callers. **Raises** OSError.
    """
    if not any(entry.name == LOCK for entry in files.list(folder)):
        return None
    lock = files.lock(folder / LOCK, shared=True)
    if lock is None:
        return _holder(files, folder / LOCK)
    lock.release()
    return None


def _holder(files: Files, path: Path) -> str:
    try:
        said = json.loads(read_text(files, path, _LOCK_CHARS))
        return f"process {said['pid']} on {said['host']} (run {said['run']})"
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return "another process"


# -- rotation


def rotate(
    files: Files,
    folder: Path,
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    saved: int,
    damaged: Collection[int] = (),
) -> list[Path]:
    """Remove this run's checkpoints that are neither the newest ``keep_last`` nor multiples.

    Returns the folders of files in them that are not ours. ``saved`` is the step that was saved
    just now; it stays. ``damaged`` are steps that a load found damaged, which only shows when they
    are read: they do not count and are not removed.

    See Note [What may be removed]. **Raises** OSError; a checkpoint or a leftover remains then.
    """
    ours = []
    for step in steps_in(files, folder) if keep_last is not None else ():
        if step in damaged:
            continue
        with suppress(CheckpointError, OSError):
            if check_quickly(files, folder / step_name(step))[0].run == run:
                ours.append(step)
    if saved not in ours:
        return []
    going = [
        step
        for step in sorted(ours[keep_last:])
        if step != saved and not (keep_every and step % keep_every == 0)
    ]
    left = [remove_checkpoint(files, folder / step_name(step)) for step in going]
    return [path for path in left if path is not None]


# -- the checkpoint to load


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to load: its step, its manifest and the manifest's bytes.

    ``in_memory`` are the files of a copy in the memory of hosts; None for a checkpoint on disk.
    """

    path: Path
    step: int
    manifest: Manifest
    data: bytes
    in_memory: Files | None = None


def choose(
    control: Control,
    files: Files,
    folder: Path,
    skipped: dict[int, str],
    only: Path | None = None,
) -> Chosen | None:
    """Find the highest step that passes the quick check and was not ``skipped``, on all ranks.

    Rank 0 searches and sends the others the manifest. Adds to ``skipped`` the reasons of newer
    steps that do not pass. With ``only`` that checkpoint is taken, or its damage raised.
    **Raises** CheckpointError.
    """

    def search() -> tuple[Manifest | None, bytes]:
        return _search(files, folder, skipped, only) if control.rank == 0 else (None, b"")

    manifest, said = on_all_ranks(control, search)
    said = control.broadcast(said)
    size = int.from_bytes(said[:_SIZE_BYTES], "little")
    answer = json.loads(said[_SIZE_BYTES : _SIZE_BYTES + size])
    skipped.update(answer["skipped"])
    if answer["step"] is None:
        return None
    path, data = only or folder / step_name(answer["step"]), said[_SIZE_BYTES + size :]
    if manifest is None:
        manifest = parse_manifest(data, str(path / MANIFEST))
    return Chosen(path, answer["step"], manifest, data)


def _search(
    files: Files, folder: Path, known: Collection[int], only: Path | None
) -> tuple[Manifest | None, bytes]:
    """Return the newest manifest that passes, and the answer for the other ranks."""

    def answer(step: int | None) -> bytes:
        text = json.dumps({"step": step, "skipped": skipped}).encode()
        return len(text).to_bytes(_SIZE_BYTES, "little") + text

    skipped: list[tuple[int, str]] = []
    if only is not None:
        steps = [step_name(step) for step in steps_in(files, only.parent)]
        if only.name.startswith("step-") and steps and only.name not in steps:
            there = ", ".join(steps[:_SHOWN])
            raise CheckpointError(f"{folder}: there is no {only.name}; the newest are {there}")
        manifest, data = check_quickly(files, only)
        return manifest, answer(manifest.step or 0) + data
    for _ in range(MAX_LOOKS):
        skipped.clear()
        for step in (step for step in steps_in(files, folder) if step not in known):
            path = folder / step_name(step)
            try:
                manifest, data = check_quickly(files, path)
            except (CheckpointError, OSError) as error:
                if not _is_there(files, path):
                    break  # list again: there may be a newer one
                if not isinstance(error, (DamagedCheckpoint, FileNotFoundError)):
                    raise
                skipped.append((step, str(error)))
                continue
            return manifest, answer(step) + data
        else:
            return None, answer(None)
    raise too_fast(folder)


def too_fast(path: Path) -> CheckpointError:
    """Return the error for a folder whose run changes each checkpoint while it is read."""
    return CheckpointError(
        f"{path}: checkpoints are removed or replaced faster than they can be read; load later, or "
        "let the run that saves there keep more of them (keep_last)"
    )


def has_changed(control: Control, files: Files, chosen: Chosen) -> bool:
    """Tell whether a checkpoint was removed or replaced since it was chosen; all ranks call it."""

    def differs() -> bool:
        try:
            return read_small(files, chosen.path / MANIFEST) != chosen.data
        except (CheckpointError, OSError):
            return not _is_there(files, chosen.path)

    return ask_first_rank(control, differs)


def _is_there(files: Files, path: Path) -> bool:
    return any(entry.name == path.name for entry in files.list(path.parent))
