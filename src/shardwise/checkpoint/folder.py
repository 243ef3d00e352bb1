"""All checkpoints of one run in one folder: its steps, locks and leftovers, and the one to load.

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
proves that its writer is gone. Machines may not see each other's locks: therefore a leftover is
renamed to ``.old-...`` before its files are removed. If the rename of its save fails then, the save
raises; a checkpoint that lacks files never appears. See docs/decisions/0018.

Note [Beside a running run]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The run whose folder is read may remove a checkpoint at any moment, usually because there is a newer
one. If the chosen checkpoint is gone, or was replaced, it is not damaged: the folder is listed
again, from the newest. A checkpoint is damaged only if it is unchanged and cannot be read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.checkpoint.all_ranks import ask_first_rank, on_all_ranks
from shardwise.checkpoint.files import Entry, Files, Lock, read_text
from shardwise.checkpoint.manifest import MANIFEST, STEP, Manifest, is_ours, parse_manifest
from shardwise.checkpoint.verify import MAX_LOOKS, check_quickly, manifest_now, too_fast
from shardwise.errors import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from shardwise.comm.control import Control

LOCK = ".shardwise.lock"
_LOCK_CHARS = 4096
# A process that tests a lock holds it for an instant, which is long under load. A process that is
# stopped in that instant holds it until it is continued.
_LOCK_RETRY_S = 0.1
_LOCK_ATTEMPTS = 600
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_SHOWN = 5
_TEMPORARY, _REMOVED, _LOCKED = ".tmp-", ".old-", ".lock"
_LEFTOVER = re.compile(r"\.(tmp|old)-(?P<target>.+)-(?P<nonce>[0-9a-f]{8})")
_OTHER_FILES = "-other-files"
_NFS_REMOVED = ".nfs"  # a removed file that is still open, on NFS; NFS removes it later


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def temporary(target: Path, nonce: bytes) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name."""
    return target.parent / f"{_TEMPORARY}{target.name}-{nonce.hex()}"


def is_step(name: str) -> bool:
    """Tell whether this is the name of a step's checkpoint."""
    return STEP.fullmatch(name) is not None


def steps_in(files: Files, folder: Path) -> list[int]:
    """Return the steps that have a folder of their name, the highest first."""
    try:
        entries = files.list(folder)
    except FileNotFoundError:
        return []
    names = [STEP.fullmatch(entry.name) for entry in entries if entry.kind == "folder"]
    return sorted((int(n[1]) for n in names if n and step_name(int(n[1])) == n[0]), reverse=True)


def is_usable(files: Files, folder: Path, step: int) -> bool:
    """Tell whether a load of the newest would take this step, or be stopped by it."""
    try:
        check_quickly(files, folder / step_name(step))
    except (DamagedCheckpoint, OSError):
        return False
    except CheckpointError:  # of a newer version
        return True
    return True


# -- locks


def take(files: Files, path: Path) -> Lock | None:
    """Take a lock; return None if another process holds it.

    Waits for processes that only test it (`is_held`), a minute at most. **Raises** CheckpointError
    then; OSError.
    """
    for _ in range(_LOCK_ATTEMPTS):
        if (lock := files.lock(path)) is not None:
            return lock
        if (asking := files.lock(path, shared=True)) is None:
            return None
        asking.release()
        time.sleep(_LOCK_RETRY_S)
    raise CheckpointError(
        f"{path}: processes that only test this lock (`shardwise ckpt`) have held it for a "
        "minute; one may be stopped: end it"
    )


def hold(files: Files, folder: Path) -> Lock | None:
    """Lock a temporary folder before it is made; return None if the file system has no locks.

    See Note [Who writes there]. **Raises** OSError.
    """
    path = _lock_of(folder)
    try:
        lock = take(files, path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        with suppress(OSError):
            files.remove_file(path)
        return None
    if lock is None:
        raise CheckpointError(f"{path}: another process holds it, and should not")
    return lock


def let_go(files: Files, folder: Path, lock: Lock | None) -> None:
    """Unlock a temporary folder, which has its final name or is a leftover."""
    if lock is not None:
        with suppress(OSError):
            files.remove_file(_lock_of(folder))
        with suppress(OSError):
            lock.release()


def is_held(files: Files, folder: Path) -> bool:
    """Tell whether a save is writing in a temporary folder. **Raises** OSError."""
    return _is_locked(files, _lock_of(folder))


def _is_locked(files: Files, path: Path) -> bool:
    """Tell whether a process holds a lock, by a shared one for an instant. **Raises** OSError."""
    if not any(entry.name == path.name for entry in files.list(path.parent)):
        return False
    lock = files.lock(path, shared=True)
    if lock is not None:
        with suppress(OSError):
            if path.name != LOCK:  # the save may have ended just now: then this made the file anew
                files.remove_file(path)
        lock.release()
    return lock is None


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}{_LOCKED}"


class CopiesThatCount(NamedTuple):
    """Which copies in memory may be loaded: those of ``run`` with these steps and digests.

    A digest is that of the copy's manifest. ``on_disk`` is the newest step on disk that the run
    knew of: if it has been removed or moved since, no copy counts. -1: none.
    """

    run: str = ""
    copies: tuple[tuple[int, str], ...] = ()
    on_disk: int = -1


NO_COPIES = CopiesThatCount()


def take_lock(files: Files, folder: Path, run: str, copies: CopiesThatCount = NO_COPIES) -> Lock:
    """Make the folder and lock it for this run.

    **Raises** CheckpointError while another run holds it.
    """
    files.make_folders(folder)
    lock = take(files, folder / LOCK)
    if lock is None:
        raise CheckpointError(
            f"{folder}: {_holder(files, folder / LOCK)} saves checkpoints there; choose another "
            "folder, or end that run"
        )
    name_holder(lock, run, copies)
    return lock


def name_holder(lock: Lock, run: str, copies: CopiesThatCount) -> None:
    """Write this process and the copies that count into a lock's file.

    They are its first line: a process that is killed while it writes leaves the rest of a longer
    text behind it.
    """
    content = {"pid": os.getpid(), "host": socket.gethostname(), "run": run, "in_memory": copies}
    lock.write(json.dumps(content) + "\n")


def lock_text(files: Files, path: Path) -> Any:
    """Return what the last holder of a lock wrote. **Raises** OSError, ValueError, or damage."""
    return json.loads(read_text(files, path, _LOCK_CHARS).partition("\n")[0])


def copies_that_count(files: Files, folder: Path) -> tuple[CopiesThatCount, str]:
    """Return which copies in memory count, as the last holder of the lock wrote it.

    The second value is the reason if they do not count any more; else "".
    """
    try:
        run, copies, on_disk = lock_text(files, folder / LOCK)["in_memory"]
        pairs = tuple((int(step), str(digest)) for step, digest in copies)
        found = CopiesThatCount(str(run), pairs, int(on_disk))
    except (OSError, ValueError, LookupError, TypeError, CheckpointError):
        return NO_COPIES, f"{folder} does not say that they are of its run"
    if found.on_disk >= 0 and found.on_disk not in steps_in(files, folder):
        newest = folder / step_name(found.on_disk)
        return found, f"{newest} was removed or moved after they were made"
    return found, ""


def lock_holder(files: Files, folder: Path) -> str | None:
    """Return which process saves checkpoints there at this moment; None if no process does.

    The lock is taken for an instant, shared with other callers. **Raises** OSError.
    """
    return _holder(files, folder / LOCK) if _is_locked(files, folder / LOCK) else None


def _holder(files: Files, path: Path) -> str:
    try:
        holder = lock_text(files, path)
        return f"process {holder['pid']} on {holder['host']} (run {holder['run']})"
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return "another process"


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
                hidden = _claim(files, path, entry)
                going += [(entry.name, hidden)] if hidden is not None else []
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
    for name, hidden in going:
        left: Path | None = folder / name
        with suppress(OSError):
            left = _empty(files, hidden)
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
    """Give a leftover a hidden name; return its new path, or None if its writer is alive.

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
        return _hide_folder(files, path)
    finally:
        let_go(files, path, lock)


def _check_ours(files: Files, path: Path) -> None:
    for entry in files.list(path):
        if entry.kind != "file" or not is_ours(entry.name):
            raise CheckpointError(f"{path / entry.name} is none of ours")


# -- removal


def remove_checkpoint(files: Files, path: Path) -> Path | None:
    """Remove a checkpoint, or one under the temporary name of that which replaced it.

    The name never holds half of a checkpoint.

    Returns the folder of the files in it that are not ours, if it held any. **Raises** OSError; a
    checkpoint or a leftover remains then.
    """
    hidden = _hide_folder(files, path)
    files.sync_folder(path.parent)
    return _empty(files, hidden)


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


def set_aside(files: Files, path: Path) -> Path:
    """Rename what is not ours to a free name, and return that. **Raises** OSError."""
    left = path.parent / f"{_target_of(path.name) or path.name}{_OTHER_FILES}"
    try:
        files.rename(path, left)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        left = left.with_name(f"{left.name}-{os.urandom(4).hex()}")
        files.rename(path, left)
    files.sync_folder(left.parent)
    return left


def _hide_folder(files: Files, path: Path) -> Path:
    target = _target_of(path.name) or path.name
    hidden = path.parent / f"{_REMOVED}{target}-{os.urandom(4).hex()}"
    files.rename(path, hidden)
    return hidden


def _empty(files: Files, hidden: Path) -> Path | None:
    """Remove our files from an ``.old-...`` folder, and the folder if nothing else is in it.

    Returns the folder that holds the rest, under a name that is not hidden.
    """
    others = False
    try:
        entries = files.list(hidden)
    except FileNotFoundError:  # another process is removing it too
        return None
    for entry in entries:
        if entry.kind == "file" and is_ours(entry.name):
            with suppress(FileNotFoundError):
                files.remove_file(hidden / entry.name)
        else:
            others |= not entry.name.startswith(_NFS_REMOVED)
    if not others:
        with suppress(FileNotFoundError):
            files.remove_folder(hidden)
        return None
    return set_aside(files, hidden)


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


class Refused(NamedTuple):
    """A copy in memory that is not loaded, and the reason."""

    step: int
    text: str
    is_damaged: bool  # it counted, and something has happened to it


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

    def search() -> tuple[Chosen | None, dict[int, str]]:
        return _search(files, folder, skipped, only) if control.rank == 0 else (None, {})

    chosen, reasons = on_all_ranks(control, search)
    answer = json.dumps([chosen and chosen.step, [*reasons.items()]]).encode()
    step, found = json.loads(control.broadcast(answer))
    skipped.update(found)
    if step is None:
        return None
    data = control.broadcast(chosen.data if chosen else b"")
    path = only or folder / step_name(step)
    return chosen or Chosen(path, step, parse_manifest(data, str(path / MANIFEST)), data)


def _search(
    files: Files, folder: Path, known: Collection[int], only: Path | None
) -> tuple[Chosen | None, dict[int, str]]:
    """Return the newest checkpoint that passes, and the reasons of newer ones that do not."""
    if only is not None:
        steps = [step_name(step) for step in steps_in(files, only.parent)]
        if only.name.startswith("step-") and steps and only.name not in steps:
            there = ", ".join(steps[:_SHOWN])
            raise CheckpointError(f"{folder}: there is no {only.name}; the newest are {there}")
        manifest, data = check_quickly(files, only)
        return Chosen(only, manifest.step or 0, manifest, data), {}
    for _ in range(MAX_LOOKS):
        skipped: dict[int, str] = {}
        for step in (step for step in steps_in(files, folder) if step not in known):
            path = folder / step_name(step)
            try:
                return Chosen(path, step, *check_quickly(files, path)), skipped
            except (CheckpointError, OSError) as error:
                if not _is_there(files, path):
                    break  # list again: there may be a newer one
                if not isinstance(error, (DamagedCheckpoint, FileNotFoundError)):
                    raise
                skipped[step] = str(error)
        else:
            return None, skipped
    raise too_fast(folder)


def has_changed(control: Control, files: Files, chosen: Chosen) -> bool:
    """Tell whether a checkpoint was removed or replaced since it was chosen; all ranks call it."""

    def differs() -> bool:
        now = manifest_now(files, chosen.path)
        return now != chosen.data if now is not None else not _is_there(files, chosen.path)

    return ask_first_rank(control, differs)


def _is_there(files: Files, path: Path) -> bool:
    return any(entry.name == path.name for entry in files.list(path.parent))
