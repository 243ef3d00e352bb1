"""All checkpoints of one run, in one folder: who may write there, which is the newest, what goes.

What may be removed: Note [What may be removed] in `leftovers`.
"""

import json
import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.commit import check_presence
from shardwise.checkpoint.digest import digest_of
from shardwise.checkpoint.files import Entry, Files, Lock, is_unreadable, read_text
from shardwise.checkpoint.leftovers import LOCK_ATTEMPTS, LOCK_RETRY_S, STEP, remove_checkpoint
from shardwise.checkpoint.manifest import Manifest, parse_manifest
from shardwise.checkpoint.rank_index import parse_index, two_saves
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.sealed import MANIFEST, file_name, index_name
from shardwise.errors import CheckpointError, DamagedCheckpoint

LOCK = ".shardwise.lock"
MAX_LOOKS = 100  # so often a checkpoint may vanish or change while it is looked at or read
_LOCK_CHARS = 4096


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


def check_quickly(files: Files, path: Path) -> tuple[Manifest, bytes]:
    """Check a checkpoint's manifest, and that its files are there in their sizes.

    The digests of tensors are checked when they are read. Returns the manifest and its bytes. What
    is replaced meanwhile is no damage: it is looked at again.

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
    raise CheckpointError(f"{path}: it is replaced faster than it can be read; load it again later")


def _manifest_now(files: Files, path: Path) -> bytes | None:
    try:
        return read_small(files, path / MANIFEST)
    except (CheckpointError, OSError):
        return None


def _check_against(files: Files, path: Path, data: bytes) -> Manifest:
    """Check a folder against the bytes of its manifest; return what they say."""
    manifest = parse_manifest(data, str(path / MANIFEST))
    named = STEP.fullmatch(path.name)
    if named and manifest.step is not None and int(named[1]) != manifest.step:
        raise DamagedCheckpoint(f"{path}: it is the checkpoint of step {manifest.step}")
    try:
        entries = files.list(path)
    except OSError as error:
        if is_unreadable(error):
            raise DamagedCheckpoint(f"{path}: {error.strerror} (errno {error.errno})") from error
        raise
    try:
        check_presence(path, entries, manifest.ranks)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(_find_wrong(files, path, manifest, entries) or str(error)) from None
    return manifest


def _find_wrong(files: Files, path: Path, manifest: Manifest, entries: Sequence[Entry]) -> str:
    """Name what is wrong where files and manifest do not fit; "" if their sizes say all there is.

    The manifest has the size of all files of a rank together, the index has that of each; and it
    may be the manifest that is of another save.

    **Cost** two indexes, that of rank 0 and that of the first rank whose files do not fit.
    """
    sizes = {entry.name: entry.size for entry in entries if entry.kind == "file"}
    names = [
        [file_name(r, n) for n in range(row.num_files)] for r, row in enumerate(manifest.ranks)
    ]
    first = (
        rank
        for rank, row in enumerate(manifest.ranks)
        if sizes.get(index_name(rank)) != row.index_bytes
        or sum(sizes.get(name, 0) for name in names[rank]) != row.file_bytes
    )
    for rank in sorted({0, next(first, 0)}):
        row = manifest.ranks[rank]
        try:
            data = read_small(files, path / index_name(rank))
            if digest_of(data) != row.digest:
                found = two_saves(manifest, rank, data)
                return f"{path}: {found}" if found else ""
            index = parse_index(data, str(path / index_name(rank)))
        except (OSError, CheckpointError):
            return ""
        for name, file in zip(names[rank], index.files, strict=False):
            if sizes.get(name, file.num_bytes) != file.num_bytes:
                return f"{path / name}: {sizes[name]} bytes, expected {file.num_bytes}"
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


def take_lock(files: Files, folder: Path, run: str) -> Lock:
    """Make the folder and hold it for this run. **Raises** CheckpointError while another does.

    Who only asks (`lock_holder`) is waited for, a minute at most.
    """
    files.make_folders(folder)
    path = folder / LOCK
    for _ in range(LOCK_ATTEMPTS):
        lock = files.lock(path)
        if lock is not None:
            lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "run": run}))
            return lock
        asking = files.lock(path, shared=True)
        if asking is None:
            raise CheckpointError(
                f"{folder}: {_holder(files, path)} saves checkpoints there; choose another folder, "
                "or end that run"
            )
        asking.release()
        time.sleep(LOCK_RETRY_S)
    raise CheckpointError(
        f"{path}: processes that only ask who saves there (`shardwise ckpt`) have held it for a "
        "minute. One of them may be stopped: end it"
    )


def lock_holder(files: Files, folder: Path) -> str | None:
    """Return who saves checkpoints there at this moment, if anybody does.

    The kernel is asked by taking the lock, for an instant, along with others who ask. **Raises**
    OSError.
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


@dataclass(frozen=True)
class Rotated:
    """Which steps a rotation removed, and the folders of what lay in them and is none of ours."""

    steps: tuple[int, ...] = ()
    other_files: tuple[Path, ...] = ()


def rotate(
    files: Files,
    folder: Path,
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    saved: int,
    damaged: Collection[int] = (),
) -> Rotated:
    """Remove the checkpoints of this run that need not be kept.

    ``saved`` is the step that was saved just now. It stays. ``damaged`` are steps that a load
    passed over, which only shows when they are read: they neither count nor go.

    See Note [What may be removed]. **Raises** OSError; what is left is a checkpoint or a leftover.
    """
    ours = []
    for step in steps_in(files, folder) if keep_last is not None else ():
        if step in damaged:
            continue
        with suppress(CheckpointError, OSError):
            if check_quickly(files, folder / step_name(step))[0].run == run:
                ours.append(step)
    if saved not in ours:
        return Rotated()
    going = [step for step in steps_to_remove(ours, keep_last, keep_every) if step != saved]
    left = [remove_checkpoint(files, folder / step_name(step)) for step in going]
    return Rotated(tuple(going), tuple(path for path in left if path is not None))
