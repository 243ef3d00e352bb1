"""All checkpoints of one run, in one folder: who may write there, which is the newest, what goes.

Note [What may be removed]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint is removed only if its manifest says that this run wrote it, and only while another of
this run that is kept passes `check_quickly`. It is first renamed to ``.old-...``, so that a removal
that is cut short leaves a leftover and never half a checkpoint. A leftover is removed only by the
holder of the folder's lock, and only if every name in it is one that we give. Anything else stays.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files import Entry, Files, Lock, is_unreadable, read_text, remove_tree
from shardwise.checkpoint.manifest import Manifest, parse_manifest
from shardwise.checkpoint.presence import check_presence
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.sealed import MANIFEST, is_ours
from shardwise.checkpoint.write import TEMPORARY
from shardwise.errors import CheckpointError, DamagedCheckpoint

LOCK = ".shardwise.lock"
_REMOVED = ".old-"
_STEP = re.compile(r"step-([0-9]{8,12})")
_LEFTOVER = re.compile(rf"({re.escape(TEMPORARY)}|{re.escape(_REMOVED)}).+-[0-9a-f]{{8}}")
_LOCK_CHARS = 4096
_RETRY_S = 0.1


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_in(files: Files, folder: Path) -> list[int]:
    """Return the steps that have a folder of their name, the highest first."""
    try:
        entries = files.list(folder)
    except FileNotFoundError:
        return []
    names = [_STEP.fullmatch(entry.name) for entry in entries if entry.kind == "folder"]
    return sorted((int(n[1]) for n in names if n and step_name(int(n[1])) == n[0]), reverse=True)


def check_quickly(files: Files, path: Path) -> tuple[Manifest, bytes]:
    """Check a checkpoint's manifest, and that its files are there in their sizes.

    The digests of tensors are checked when they are read. Returns the manifest and its bytes.

    **Cost** one listing and one small file, whatever the number of ranks.

    **Raises** DamagedCheckpoint naming the file.
    """
    data = read_small(files, path / MANIFEST)
    manifest = parse_manifest(data, str(path / MANIFEST))
    named = _STEP.fullmatch(path.name)
    if named and manifest.step is not None and int(named[1]) != manifest.step:
        raise DamagedCheckpoint(f"{path}: it is the checkpoint of step {manifest.step}")
    try:
        entries = files.list(path)
    except OSError as error:
        if is_unreadable(error):
            raise DamagedCheckpoint(f"{path}: {error.strerror} (errno {error.errno})") from error
        raise
    check_presence(path, entries, manifest.ranks)
    return manifest, data


@dataclass(frozen=True)
class Leftovers:
    """What interrupted saves and removals left: removed now, or kept as not proved to be ours."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]


def leftovers_in(files: Files, folder: Path) -> list[Entry]:
    """Return what has the name of an interrupted save or removal."""
    return [entry for entry in files.list(folder) if _LEFTOVER.fullmatch(entry.name)]


def clean_up(files: Files, folder: Path) -> Leftovers:
    """Remove what interrupted saves left; only the holder of the lock may call it.

    See Note [What may be removed].
    """
    # A run that was killed may have swapped or renamed folders and not synced that; were the names
    # to come back after a power cut, they would be those of folders that are emptied here.
    files.sync_folder(folder)
    removed, kept = [], []
    for entry in leftovers_in(files, folder):
        path = folder / entry.name
        with suppress(OSError):
            ours = entry.kind == "folder" and all(
                e.kind == "file" and is_ours(e.name) for e in files.list(path)
            )
            if ours:
                remove_tree(files, path)
                removed.append(entry.name)
                continue
        kept.append(entry.name)
    return Leftovers(tuple(removed), tuple(kept))


def take_lock(files: Files, folder: Path, run: str) -> Lock:
    """Make the folder and hold it for this run. **Raises** CheckpointError while another does."""
    files.make_folders(folder)
    path = folder / LOCK
    lock = files.lock(path)
    if lock is None:
        time.sleep(_RETRY_S)  # `lock_holder` holds it for an instant
        lock = files.lock(path)
    if lock is None:
        raise CheckpointError(
            f"{folder}: {_holder(files, path)} saves checkpoints there; choose another folder, or "
            "end that run"
        )
    lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "run": run}))
    return lock


def lock_holder(files: Files, folder: Path) -> str | None:
    """Return who saves checkpoints there at this moment, if anybody does.

    The kernel is asked by taking the lock, for an instant. **Raises** OSError.
    """
    if not any(entry.name == LOCK for entry in files.list(folder)):
        return None
    lock = files.lock(folder / LOCK)
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


def steps_to_remove(
    steps: Sequence[int], keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Return the steps that are neither among the newest ``keep_last`` nor multiples."""
    if keep_last is None:
        return []
    newest = sorted(steps, reverse=True)[:keep_last]
    return [
        step
        for step in sorted(steps)
        if step not in newest and not (keep_every and step % keep_every == 0)
    ]


def rotate(
    files: Files, folder: Path, run: str, keep_last: int | None, keep_every: int | None, saved: int
) -> list[int]:
    """Remove the checkpoints of this run that need not be kept; return their steps.

    ``saved`` is the step that was saved just now. It stays: a higher step may be one that a load
    passed over as damaged, which only shows when it is read.

    See Note [What may be removed]. **Raises** OSError; what is left is a checkpoint or a leftover.
    """
    ours = []
    for step in steps_in(files, folder) if keep_last is not None else ():
        with suppress(CheckpointError, OSError):
            if check_quickly(files, folder / step_name(step))[0].run == run:
                ours.append(step)
    if saved not in ours:
        return []
    going = [step for step in steps_to_remove(ours, keep_last, keep_every) if step != saved]
    for step in going:
        remove_checkpoint(files, folder / step_name(step))
    return going


def remove_checkpoint(files: Files, path: Path) -> None:
    """Remove a checkpoint, so that at no moment half of one stands under its name."""
    away = path.parent / f"{_REMOVED}{path.name}-{os.urandom(4).hex()}"
    files.rename(path, away)
    files.sync_folder(path.parent)
    remove_tree(files, away)
