"""Folders that are being written or removed, under names of their own, and what becomes of them.

Note [What may be removed]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint is removed only if its manifest says that this run wrote it, and only while another of
this run that is kept passes `check_quickly`. It is first renamed to ``.old-...``, so that a removal
that is cut short leaves a leftover and never half a checkpoint. Only files of our names go. What
else lies in the folder is somebody's: it stays, in a folder ``<name>-other-files``.

Note [Who writes there]
~~~~~~~~~~~~~~~~~~~~~~~
Whoever writes ``.tmp-<name>-<nonce>`` holds ``.tmp-<name>-<nonce>.lock`` from before the folder is
made until after it has its name. A leftover is removed only by one who got that lock, so its writer
is gone: a save that runs elsewhere, in another process or on another machine, is left alone. Where
the file system has no locks, nothing is proved and nothing removed. Where machines do not see each
other's locks, a save of another machine may be taken for a leftover; so a leftover is renamed to
``.old-...`` before a file of it goes. Of two renames one fails: then it is that save, with an
error, and never a checkpoint that stands and lacks files.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files import Entry, Files, Lock
from shardwise.checkpoint.sealed import is_ours
from shardwise.errors import CheckpointError

# Who only asks whether a lock is free holds it for an instant, which is long under load; one that
# is stopped meanwhile does not end.
LOCK_RETRY_S = 0.1
LOCK_ATTEMPTS = 600
_TEMPORARY = ".tmp-"
_REMOVED = ".old-"
_LOCKED = ".lock"
_LEFTOVER = re.compile(
    rf"({re.escape(_TEMPORARY)}|{re.escape(_REMOVED)})(?P<target>.+)-(?P<nonce>[0-9a-f]{{8}})"
)
STEP = re.compile(r"step-([0-9]{8,12})")
_OTHER_FILES = "-other-files"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_NFS_REMOVED = ".nfs"  # a removed file that somebody has open, on NFS; it goes by itself


def temporary(target: Path, nonce: bytes) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name."""
    return target.parent / f"{_TEMPORARY}{target.name}-{nonce.hex()}"


def hold(files: Files, folder: Path) -> Lock | None:
    """Lock a temporary folder that is about to be made; None where the file system has no locks.

    See Note [Who writes there]. **Raises** OSError.
    """
    path = _lock_of(folder)
    try:
        for _ in range(LOCK_ATTEMPTS):
            lock = files.lock(path)
            if lock is not None:
                return lock
            time.sleep(LOCK_RETRY_S)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        with suppress(OSError):
            files.remove_file(path)
        return None
    raise CheckpointError(f"{path}: another process holds it, and should not: remove it by hand")


def let_go(files: Files, folder: Path, lock: Lock | None) -> None:
    """Give a temporary folder up: it has its name, or is a leftover."""
    if lock is not None:
        with suppress(OSError):
            files.remove_file(_lock_of(folder))
        with suppress(OSError):
            lock.release()


def is_held(files: Files, folder: Path) -> bool:
    """Tell whether somebody writes in a temporary folder. **Raises** OSError."""
    if not any(entry.name == _lock_of(folder).name for entry in files.list(folder.parent)):
        return False
    lock = files.lock(_lock_of(folder), shared=True)
    if lock is not None:
        _give_back(files, folder, lock)
    return lock is None


def is_step(name: str) -> bool:
    """Tell whether this is the name of a step's checkpoint."""
    return STEP.fullmatch(name) is not None


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}{_LOCKED}"


def leftovers_in(files: Files, folder: Path) -> list[Entry]:
    """Return what has the name of a save or a removal, under way or interrupted."""
    return [entry for entry in files.list(folder) if _LEFTOVER.fullmatch(entry.name)]


@dataclass(frozen=True)
class Leftovers:
    """What interrupted saves and removals left: removed now, or kept as not proved to be ours."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]


def clean_up(
    files: Files, folder: Path, of: Callable[[str], bool] = lambda target: True
) -> Leftovers:
    """Remove what interrupted saves left, if ``of`` says yes to the name that it was to have.

    What is being written is left alone and not listed. See Note [What may be removed] and Note
    [Who writes there].
    """
    going, kept = [], []
    for entry in files.list(folder):
        target = _target_of(entry.name.removesuffix(_LOCKED))
        if not target or not of(target):
            continue
        if entry.name.endswith(_LOCKED):
            with suppress(OSError, CheckpointError):
                _remove_lock(files, folder, entry)
            continue
        try:
            away = _claim(files, folder, entry)
        except FileNotFoundError:  # its save ended well, or somebody else removed it
            continue
        except (OSError, CheckpointError):
            kept.append(entry.name)
            continue
        if away is not None:
            going.append((entry.name, away))
    if going:
        # A run that was killed may have swapped or renamed folders and not synced that; were the
        # names to come back after a power cut, they would be those of folders emptied here.
        files.sync_folder(folder)
    removed = []
    for name, away in going:
        left: Path | None = folder / name  # unless it goes
        with suppress(OSError):
            left = empty(files, away)
        if left is None:
            removed.append(name)
        else:
            kept.append(left.name)
    return Leftovers(tuple(removed), tuple(kept))


def clean_up_before(files: Files, target: Path, entries: Iterable[Entry]) -> None:
    """Remove what interrupted saves of this checkpoint left, or of any step, if it is of a step.

    ``entries`` is the folder's listing. What resists stays: a save does not fail for it.
    """

    def of(name: str) -> bool:
        return name == target.name or (is_step(target.name) and is_step(name))

    if any(of(_target_of(entry.name.removesuffix(_LOCKED))) for entry in entries):
        with suppress(OSError):
            clean_up(files, target.parent, of)


def _target_of(name: str) -> str:
    """Return which checkpoint a leftover was to become, or has been; "" for any other name."""
    match = _LEFTOVER.fullmatch(name)
    return match["target"] if match is not None else ""


def _claim(files: Files, folder: Path, entry: Entry) -> Path | None:
    """Take a leftover away from its writer if there is one no more; None if there is.

    **Raises** OSError or CheckpointError if it is not proved to be ours.
    """
    path = folder / entry.name
    if entry.kind != "folder":
        raise CheckpointError(f"{path} is no folder")
    if not entry.name.startswith(_TEMPORARY):
        if not is_step(_target_of(entry.name)):
            _check_ours(files, path)
        return path
    lock = files.lock(_lock_of(path))
    if lock is None:
        return None
    try:
        _check_ours(files, path)
        away = _rename_away(files, path, _target_of(entry.name))
    finally:
        let_go(files, path, lock)
    return away


def _check_ours(files: Files, path: Path) -> None:
    for entry in files.list(path):
        if entry.kind != "file" or not is_ours(entry.name):
            raise CheckpointError(f"{path / entry.name} is none of ours")


def _remove_lock(files: Files, folder: Path, entry: Entry) -> None:
    """Remove a lock whose writer is gone, once its folder is gone too."""
    path = folder / entry.name.removesuffix(_LOCKED)
    if entry.kind != "file" or entry.size:  # ours are empty
        return
    lock = files.lock(_lock_of(path))
    if lock is not None:
        _give_back(files, path, lock)


def _give_back(files: Files, folder: Path, lock: Lock) -> None:
    """Release a lock that nobody else held; its file goes if the folder has gone."""
    try:
        is_left = any(entry.name == folder.name for entry in files.list(folder.parent))
    except OSError:
        lock.release()
        raise
    if is_left:
        lock.release()
    else:  # its save has ended, perhaps since it was asked about: then this made the file anew
        let_go(files, folder, lock)


def remove_checkpoint(files: Files, path: Path) -> Path | None:
    """Remove a checkpoint, so that at no moment half of one stands under its name.

    Returns the folder that holds what was in it and is none of ours, if there was anything.
    **Raises** OSError; what is left then is a checkpoint or a leftover.
    """
    away = _rename_away(files, path, path.name)
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


def discard_replaced(files: Files, folder: Path) -> Path | None:
    """Remove a checkpoint that another has taken the name of; it has that one's temporary name."""
    return empty(files, _rename_away(files, folder, _target_of(folder.name)))


def _rename_away(files: Files, path: Path, target: str) -> Path:
    away = path.parent / f"{_REMOVED}{target}-{os.urandom(4).hex()}"
    files.rename(path, away)
    return away


def empty(files: Files, away: Path) -> Path | None:
    """Remove our files from a folder that nobody uses any more, and the folder if that was all.

    Returns the folder that holds the rest, which gets a name that can be seen.
    """
    others = False
    try:
        entries = files.list(away)
    except FileNotFoundError:  # somebody else was at it too
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
