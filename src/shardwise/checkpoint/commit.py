"""How a checkpoint gets its name: a temporary folder, then one rename. Rank 0 alone does this."""

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from shardwise.checkpoint.files import Entry, Files
from shardwise.checkpoint.leftovers import (
    clean_up_before,
    discard_replaced,
    hold,
    is_step,
    let_go,
    remove_tree,
    temporary,
)
from shardwise.checkpoint.manifest import IndexRow
from shardwise.checkpoint.sealed import MANIFEST, file_name, index_name, is_ours
from shardwise.errors import CheckpointError, DamagedCheckpoint


def prepare(files: Files, target: Path, nonce: bytes, replace: bool, held: ExitStack) -> Path:
    """Make the temporary folder, and hold its lock; return it."""
    files.make_folders(target.parent)
    entries = files.list(target.parent)
    there = next((entry for entry in entries if entry.name == target.name), None)
    if there is not None:
        if not replace:
            raise CheckpointError(_exists(target))
        _check_replaceable(files, target, there)
    clean_up_before(files, target, entries)
    folder = temporary(target, nonce)
    held.callback(let_go, files, folder, hold(files, folder))
    files.make_folder(folder)
    return folder


def _exists(target: Path) -> str:
    return f"{target} exists already; save under another name or step, or pass replace=True"


def _check_replaceable(files: Files, target: Path, there: Entry) -> None:
    """Refuse to put a checkpoint in the place of what is none."""
    if there.kind != "folder":
        raise CheckpointError(
            f"{target} is a link or a file, and replace=True replaces a checkpoint's own folder: "
            "save to the folder that the link leads to, or remove it first"
        )
    names = [entry.name for entry in files.list(target)]
    if names and not is_step(target.name) and not any(is_ours(name) for name in names):
        raise CheckpointError(
            f"{target} is a folder that holds no checkpoint ({names[0]!r} is in it): replace=True "
            "does not replace it. Save under another name, or with step= to save inside it"
        )


def commit(
    files: Files,
    folder: Path,
    target: Path,
    ranks: Sequence[IndexRow],
    write_manifest: Callable[[], None],
    replace: bool,
) -> Path | None:
    """See that all is there, seal it, and give the folder its name; see Note [Commit] in `write`.

    Returns where what a replaced checkpoint held beside our files was left, if anything.
    """
    try:
        _check_shared(files, folder, ranks)
        write_manifest()
        files.sync_folder(folder)
        replaces = replace and any(e.name == target.name for e in files.list(target.parent))
        if replaces:
            _exchange(files, folder, target)
        else:
            _rename(files, folder, target)
    except (OSError, CheckpointError):
        discard(files, folder)
        raise
    try:
        files.sync_folder(target.parent)
    except OSError:
        _take_back(files, folder, target, replaces)
        raise
    if replaces:  # the new one is safe; should the old one resist, it is a leftover
        with suppress(OSError):
            return discard_replaced(files, folder)
    return None


def _rename(files: Files, folder: Path, target: Path) -> None:
    try:
        files.rename(folder, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise CheckpointError(f"{_exists(target)} (another save made it meanwhile)") from error


def _take_back(files: Files, folder: Path, target: Path, replaces: bool) -> None:
    """Give the names back that could not be made durable, so that the target is as it was.

    Only once that is durable is the new one removed: until then a power cut may bring either back.
    """
    with suppress(OSError, CheckpointError):
        if replaces:
            files.exchange(folder, target)
        else:
            files.rename(target, folder)
        files.sync_folder(target.parent)
        remove_tree(files, folder)


def _check_shared(files: Files, folder: Path, ranks: Sequence[IndexRow]) -> None:
    """See that what the other ranks wrote arrived in the folder that this rank sees."""
    try:
        check_presence(folder, files.list(folder), ranks)
    except DamagedCheckpoint as error:
        raise CheckpointError(
            f"what the ranks wrote is not all there ({error}). Does every machine see the same "
            "folder? A checkpoint goes to a file system that all ranks share"
        ) from error


def _exchange(files: Files, folder: Path, target: Path) -> None:
    try:
        files.exchange(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        raise CheckpointError(
            f"{target}: this file system cannot swap two folders at once, so the old checkpoint "
            "cannot be replaced safely; save under another name and remove the old one afterwards"
        ) from error


def discard(files: Files, folder: Path) -> None:
    """Remove what a save wrote that failed; should it resist, it is a leftover."""
    with suppress(OSError, CheckpointError):
        remove_tree(files, folder)


def check_presence(path: Path, entries: Iterable[Entry], ranks: Sequence[IndexRow]) -> None:
    """Compare a folder's listing with what the manifest says of each rank.

    **Raises** DamagedCheckpoint naming the first file that is missing, of another size, or one too
    many; what has no name of ours is left alone.
    """
    found = {entry.name: entry for entry in entries if is_ours(entry.name)}
    expected = {MANIFEST}
    for rank, row in enumerate(ranks):
        names = [file_name(rank, number) for number in range(row.num_files)]
        expected |= {index_name(rank), *names}
        for name in (index_name(rank), *names):
            if name not in found or found[name].kind != "file":
                raise DamagedCheckpoint(f"{path / name}: it is missing, or no regular file")
        _check_size(path, index_name(rank), found[index_name(rank)].size, row.index_bytes)
        _check_size(path, ", ".join(names), sum(found[n].size for n in names), row.file_bytes)
    unknown = sorted(set(found) - expected)
    if unknown:
        raise DamagedCheckpoint(f"{path / unknown[0]}: the manifest does not name this file")


def _check_size(path: Path, names: str, found: int, expected: int) -> None:
    if found != expected:
        raise DamagedCheckpoint(f"{path / names}: {found} bytes, expected {expected}")
