"""Temporary and removed folders of checkpoints: their names, their locks, their removal.

Note [What may be removed]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A run removes a checkpoint only if the manifest names that run, and only while another checkpoint
that the run keeps passes `check_quickly`. The folder is first renamed to ``.old-...``, so an
interrupted removal leaves a leftover and never half a checkpoint. Only files with names of ours are
removed. Other files stay, in a folder ``<name>-other-files``.

Note [Who writes there]
~~~~~~~~~~~~~~~~~~~~~~~
A save to ``.tmp-<name>-<nonce>`` holds the lock ``.tmp-<name>-<nonce>.lock`` from before the folder
is made until the folder has its final name. A leftover is removed only under that lock, which
proves that its writer is gone: a save in another process or on another machine is left alone. If
the file system has no locks, nothing is proved and nothing is removed. If machines do not see each
other's locks, a save of another machine may look like a leftover. Therefore a leftover is renamed
to ``.old-...`` before its files are removed. One of the two renames fails, and if it is the save's,
the save raises; a checkpoint that lacks files never appears.
"""

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files import Entry, Files, Lock
from shardwise.checkpoint.manifest import is_ours
from shardwise.errors import CheckpointError

# A process that tests a lock holds it for an instant, which is long under load. A process that is
# stopped in that instant holds it until it is continued.
_LOCK_RETRY_S = 0.1
_LOCK_ATTEMPTS = 600
STEP = re.compile(r"step-([0-9]{8,12})")
_TEMPORARY = ".tmp-"
_REMOVED = ".old-"
_LOCKED = ".lock"
_LEFTOVER = re.compile(
    rf"({re.escape(_TEMPORARY)}|{re.escape(_REMOVED)})(?P<target>.+)-(?P<nonce>[0-9a-f]{{8}})"
)
_OTHER_FILES = "-other-files"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_NFS_REMOVED = ".nfs"  # a removed file that is still open, on NFS; NFS removes it later


def temporary(target: Path, nonce: bytes) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name."""
    return target.parent / f"{_TEMPORARY}{target.name}-{nonce.hex()}"


def is_temporary(name: str) -> bool:
    """Tell whether this is the folder of a checkpoint that is being written."""
    return name.startswith(_TEMPORARY) and _LEFTOVER.fullmatch(name) is not None


def is_step(name: str) -> bool:
    """Tell whether this is the name of a step's checkpoint."""
    return STEP.fullmatch(name) is not None


# -- locks


def take(files: Files, path: Path, busy: Callable[[], str]) -> Lock:
    """Take a lock; wait for processes that only test it (`is_held`), a minute at most.

    **Raises** CheckpointError with the text of ``busy`` if another process holds it; OSError.
    """
    for _ in range(_LOCK_ATTEMPTS):
        lock = files.lock(path)
        if lock is not None:
            return lock
        asking = files.lock(path, shared=True)
        if asking is None:
            raise CheckpointError(busy())
        asking.release()
        time.sleep(_LOCK_RETRY_S)
    raise CheckpointError(
        f"{path}: processes that only test this lock (`shardwise ckpt`) have held it for a minute. "
        "One of them may be stopped: end it"
    )


def hold(files: Files, folder: Path) -> Lock | None:
    """Lock a temporary folder before it is made; return None if the file system has no locks.

    See Note [Who writes there]. **Raises** OSError.
    """
    path = _lock_of(folder)
    try:
        return take(files, path, lambda: f"{path}: another process holds it, and should not")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        with suppress(OSError):
            files.remove_file(path)
        return None


def let_go(files: Files, folder: Path, lock: Lock | None) -> None:
    """Unlock a temporary folder, which has its final name or is a leftover."""
    if lock is not None:
        with suppress(OSError):
            files.remove_file(_lock_of(folder))
        with suppress(OSError):
            lock.release()


def is_held(files: Files, folder: Path) -> bool:
    """Tell whether a save is writing in a temporary folder. **Raises** OSError."""
    if not any(entry.name == _lock_of(folder).name for entry in files.list(folder.parent)):
        return False
    lock = files.lock(_lock_of(folder), shared=True)
    let_go(files, folder, lock)  # the save may have ended just now: then this made the file anew
    return lock is None


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}{_LOCKED}"


# -- leftovers


@dataclass(frozen=True)
class Leftovers:
    """Names that interrupted saves and removals left: removed now, or kept as not provably ours."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]


def leftovers_in(files: Files, folder: Path) -> list[Entry]:
    """Return the entries named like a save or a removal, in progress or interrupted."""
    return [entry for entry in files.list(folder) if _target_of(entry.name)]


def clean_up(files: Files, folder: Path, of: str = "") -> Leftovers:
    """Remove leftovers of interrupted saves, or only those of saves to the name ``of``.

    If that is a step's name, those of any step are removed. A save in progress is left alone and
    not listed. See Note [What may be removed] and Note [Who writes there].
    """
    going: list[tuple[str, Path]] = []
    removed, kept = [], []
    for entry in files.list(folder):
        path = folder / entry.name.removesuffix(_LOCKED)
        target = _target_of(path.name)
        is_step_too = is_step(of) and is_step(target)
        if not target or (of and of != target and not is_step_too):
            continue
        try:
            if not entry.name.endswith(_LOCKED):
                away = _claim(files, path, entry)
                going += [(entry.name, away)] if away is not None else []
            elif entry.kind == "file" and not entry.size:  # ours are empty
                let_go(files, path, files.lock(folder / entry.name, shared=True))
        except FileNotFoundError:  # the save was committed, or another process removed it
            continue
        except (OSError, CheckpointError):
            kept += [] if entry.name.endswith(_LOCKED) else [entry.name]
    if going:
        # A killed run may have renamed folders without syncing that. If a power cut brought the
        # old names back, they would name the folders that are emptied here.
        files.sync_folder(folder)
    for name, away in going:
        left: Path | None = folder / name
        with suppress(OSError):
            left = empty(files, away)
        if left is None:
            removed.append(name)
        else:
            kept.append(left.name)
    return Leftovers(tuple(removed), tuple(kept))


def _target_of(name: str) -> str:
    """Return the name of the checkpoint that a leftover belongs to; "" for other names."""
    match = _LEFTOVER.fullmatch(name)
    return match["target"] if match is not None else ""


def _claim(files: Files, path: Path, entry: Entry) -> Path | None:
    """Rename a leftover away; return its new path, or None if its writer is alive.

    **Raises** OSError or CheckpointError if it is not provably ours.
    """
    if entry.kind != "folder":
        raise CheckpointError(f"{path} is no folder")
    if not entry.name.startswith(_TEMPORARY):
        if not is_step(_target_of(entry.name)):
            _check_ours(files, path)
        return path
    lock = files.lock(_lock_of(path), shared=True)  # a writer's lock is not shared
    if lock is None:
        return None
    try:
        _check_ours(files, path)
        return _rename_away(files, path)
    finally:
        let_go(files, path, lock)


def _check_ours(files: Files, path: Path) -> None:
    for entry in files.list(path):
        if entry.kind != "file" or not is_ours(entry.name):
            raise CheckpointError(f"{path / entry.name} is none of ours")


# -- removal


def remove_checkpoint(files: Files, path: Path) -> Path | None:
    """Remove a checkpoint, or one under the temporary name of that which replaced it.

    Half of one never stands under its name.

    Returns the folder of the files in it that are not ours, if it held any. **Raises** OSError; a
    checkpoint or a leftover remains then.
    """
    away = _rename_away(files, path)
    files.sync_folder(path.parent)
    return empty(files, away)


def remove_tree(files: Files, path: Path) -> None:
    """Remove a folder that holds only files, if it is there; links are never followed.

    **Raises** CheckpointError, with nothing removed, if ``path`` is no folder or holds another.
    """
    kinds = {entry.name: entry.kind for entry in files.list(path.parent)}
    if path.name not in kinds:
        return
    if kinds[path.name] != "folder":
        raise CheckpointError(f"{path} was to be removed but is no folder: remove it by hand")
    entries = files.list(path)
    if folders := [entry.name for entry in entries if entry.kind == "folder"]:
        raise CheckpointError(
            f"{path} was to be removed but holds the folder {folders[0]!r}, which no checkpoint "
            "does: remove it by hand"
        )
    for entry in entries:
        files.remove_file(path / entry.name)
    files.remove_folder(path)


def _rename_away(files: Files, path: Path) -> Path:
    target = _target_of(path.name) or path.name
    away = path.parent / f"{_REMOVED}{target}-{os.urandom(4).hex()}"
    files.rename(path, away)
    return away


def empty(files: Files, away: Path) -> Path | None:
    """Remove our files from an ``.old-...`` folder, and the folder if nothing else is in it.

    Returns the folder that holds the rest, under a name that is not hidden.
    """
    others = False
    try:
        entries = files.list(away)
    except FileNotFoundError:  # another process is removing it too
        return None
    for entry in entries:
        if entry.kind == "file" and is_ours(entry.name):
            with suppress(FileNotFoundError):
                files.remove_file(away / entry.name)
        else:
            others |= not entry.name.startswith(_NFS_REMOVED)
    if not others:
        with suppress(FileNotFoundError):
            files.remove_folder(away)
        return None
    left = away.parent / f"{_target_of(away.name)}{_OTHER_FILES}"
    try:
        files.rename(away, left)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        left = left.with_name(f"{left.name}-{os.urandom(4).hex()}")
        files.rename(away, left)
    files.sync_folder(left.parent)
    return left
