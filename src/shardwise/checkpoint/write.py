"""Write one checkpoint: every rank its own files, then one rename that makes them a checkpoint.

Note [Commit]
~~~~~~~~~~~~~
docs/checkpoint-format.md has the steps: rank 0 makes a temporary folder under a lock, every rank
writes and syncs its files there, rank 0 adds the manifest and renames the folder. So a folder with
that name is complete, and once the call has returned it survives a power cut. All other folders are
leftovers. A failure anywhere raises the same error on all ranks, and rank 0 removes the files.
Nothing but its name points at a checkpoint.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Self

from shardwise.checkpoint.all_ranks import on_all_ranks, rows_of_all_ranks
from shardwise.checkpoint.container import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    Stored,
    build_header,
    chunk_digests,
    digest_of,
)
from shardwise.checkpoint.files import Entry, Files, Writer
from shardwise.checkpoint.folder import (
    clean_up,
    hold,
    is_step,
    let_go,
    remove_checkpoint,
    remove_tree,
    temporary,
)
from shardwise.checkpoint.manifest import (
    MANIFEST,
    BoxRow,
    FileRow,
    IndexRow,
    Manifest,
    OwnRow,
    RankIndex,
    TensorRow,
    file_name,
    index_name,
    is_ours,
    seal,
)
from shardwise.checkpoint.verify import find_difference
from shardwise.errors import CheckpointError, CollectiveError
from shardwise.layout.boxes import Box

if TYPE_CHECKING:
    from shardwise.comm.control import Control

NONCE_BYTES = 4
_ROW = Struct(f"<3Q{DIGEST_BYTES}s")  # bytes of the index, files, their bytes, digest of the index
_BATCH_BYTES = 8 * CHUNK_BYTES
_BATCH_BUFFERS = 256

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Part:
    """The content of one rank's files.

    ``read(number, box)`` returns the bytes of a box of tensor ``number`` of the manifest. ``own``
    are tensors of this rank alone, whole; ``values`` go into its index. Tensors are read one at a
    time.
    """

    rank: int
    read: Callable[[int, Box], memoryview]
    own: Sequence[tuple[TensorRow, Callable[[], memoryview]]]
    values: Mapping[str, object]


@dataclass(frozen=True)
class Written:
    """A checkpoint that is on disk: its folder, the bytes of all ranks and of this rank.

    ``other_files``, on rank 0, is the folder of the files in a replaced checkpoint that are not
    ours, if there were any.
    """

    path: Path
    num_bytes: int
    rank_bytes: int
    other_files: Path | None = None

    @classmethod
    def of(cls, path: Path, manifest: Manifest, rank: int, other_files: Path | None = None) -> Self:
        """Return what ``rank`` and all ranks wrote, as the manifest says."""
        sizes = [row.index_bytes + row.file_bytes for row in manifest.ranks]
        return cls(path, sum(sizes), sizes[rank], other_files)


def write_checkpoint(
    files: Files,
    control: Control,
    target: Path,
    nonce: bytes,
    manifest: Manifest,
    part: Part,
    replace: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write and commit one checkpoint; all ranks call it. See Note [Commit].

    ``manifest`` has no ``ranks`` yet and is the same on all ranks. Rank 0's nonce is used.

    **Cost** this rank's bytes once to disk; three exchanges of at most 34 bytes per rank.

    **Raises** CheckpointError, the same on all ranks; the target is as it was then.
    """
    assert len(nonce) == NONCE_BYTES
    made: list[Path] = []  # by rank 0: the temporary folder

    def begin() -> bytes:
        if control.rank == 0:
            made.append(_prepare(files, target, nonce, replace, held))
        return nonce

    def give_name() -> Path | None:
        if control.rank != 0:
            return None
        with held:
            return _commit(files, folder, target, whole, replace)

    with ExitStack() as held:  # of rank 0: the lock of the temporary folder
        try:
            folder = temporary(target, rows_of_all_ranks(control, begin, NONCE_BYTES)[0])
            whole = write_ranks(files, control, folder, manifest, part, progress)
        except CollectiveError:
            raise  # the others may still be writing; the next save or run removes the leftovers
        except Exception:
            for each in made:
                _discard(files, each)
            raise
        left = on_all_ranks(control, give_name)
    return Written.of(target, whole, control.rank, left)


def write_ranks(
    files: Files,
    control: Control,
    folder: Path,
    manifest: Manifest,
    part: Part,
    progress: Progress | None = None,
    rewrites: bool = False,
) -> Manifest:
    """Write the files of every rank into a folder; return the manifest with their rows.

    ``rewrites``: files of these names may be there, and their memory is used again.
    """

    def write() -> bytes:
        return write_rank(files, folder, manifest, part, progress, rewrites)

    rows = rows_of_all_ranks(control, write, _ROW.size)
    return manifest.model_copy(update={"ranks": tuple(map(index_row, rows))})


def write_rank(
    files: Files,
    folder: Path,
    manifest: Manifest,
    part: Part,
    progress: Progress | None = None,
    rewrites: bool = False,
) -> bytes:
    """Write the files and the index of one rank, synced; return the row for the manifest."""
    file_rows: list[FileRow] = []
    boxes: list[BoxRow] = []
    own: list[OwnRow] = []
    for file, contents in enumerate(manifest.files_of(part.rank, [row for row, _ in part.own])):
        header = build_header([content.stored for content in contents])
        num_bytes = len(header) + contents[-1].stored.end
        path = folder / file_name(part.rank, file)
        with _new_file(files, path, num_bytes, rewrites) as writer:
            batch = _Batch(writer, progress)
            batch.add(memoryview(header))
            for number, box, stored in contents:
                begin, place = len(header) + stored.begin, number - len(manifest.tensors)
                if place < 0:
                    digests = _add_tensor(batch, part.read(number, box), stored)
                    boxes.append(BoxRow(number, file, begin, digests))
                else:
                    row, read = part.own[place]
                    digests = _add_tensor(batch, read(), stored)
                    own.append(OwnRow(**row.model_dump(), begin=begin, digests=digests))
            batch.flush()
        file_rows.append(FileRow(num_bytes=num_bytes, header=digest_of(header)))
    index = seal(
        RankIndex(
            format=manifest.format,
            run=manifest.run,
            step=manifest.step,
            rank=part.rank,
            files=tuple(file_rows),
            boxes=tuple(boxes),
            own=tuple(own),
            values=dict(part.values),
        )
    )
    write_small(files, folder / index_name(part.rank), index, rewrites)
    total = sum(row.num_bytes for row in file_rows)
    return _ROW.pack(len(index), len(file_rows), total, bytes.fromhex(digest_of(index)))


def index_row(row: bytes) -> IndexRow:
    """Return the manifest's row from the bytes that `write_rank` returned."""
    index_bytes, num_files, file_bytes, digest = _ROW.unpack(row)
    return IndexRow(
        index_bytes=index_bytes, num_files=num_files, file_bytes=file_bytes, digest=digest.hex()
    )


@contextmanager
def _new_file(files: Files, path: Path, wanted: int, rewrites: bool = False) -> Iterator[Writer]:
    """Make a file of ``wanted`` bytes and sync it; a full disk's error gets both sizes."""
    try:
        with files.rewrite(path, wanted) if rewrites else files.create(path) as writer:
            yield writer
            writer.sync()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with suppress(OSError):
                free = files.free_bytes(path.parent)
                error.wanted = f"This file wants {wanted} bytes, {free} are free there"  # type: ignore[attr-defined]
        raise


def _add_tensor(batch: _Batch, data: memoryview, stored: Stored) -> str:
    """Write a tensor; return the digests of its chunks. A large one is flushed, to free it."""
    assert len(data) == stored.end - stored.begin, stored
    parts = []
    for begin in range(0, len(data), _BATCH_BYTES):
        piece = data[begin : begin + _BATCH_BYTES]
        parts.append(chunk_digests(piece))  # just before the write: it is in the cache
        batch.add(piece)
    if len(data) > _BATCH_BYTES:
        batch.flush()
    return "".join(parts)


class _Batch:
    """Buffers that are written with one call."""

    def __init__(self, writer: Writer, progress: Progress | None) -> None:
        self._writer = writer
        self._progress = progress
        self._buffers: list[memoryview] = []
        self._num_bytes = 0

    def add(self, data: memoryview) -> None:
        """Add bytes, which must not change before the flush."""
        self._buffers.append(data)
        self._num_bytes += len(data)
        if self._num_bytes >= _BATCH_BYTES or len(self._buffers) >= _BATCH_BUFFERS:
            self.flush()

    def flush(self) -> None:
        """Write the buffers."""
        self._writer.write(self._buffers)
        if self._progress is not None:
            self._progress(self._num_bytes)
        self._buffers, self._num_bytes = [], 0


def write_small(files: Files, path: Path, data: bytes, rewrites: bool = False) -> None:
    """Write a manifest or an index, synced."""
    with _new_file(files, path, len(data), rewrites) as writer:
        writer.write([memoryview(data)])


# -- the commit, by rank 0 alone


def _prepare(files: Files, target: Path, nonce: bytes, replace: bool, held: ExitStack) -> Path:
    """Make the temporary folder and hold its lock; return the folder."""
    files.make_folders(target.parent)
    there = next((e for e in files.list(target.parent) if e.name == target.name), None)
    if there is not None:
        if not replace:
            raise CheckpointError(_exists(target))
        _check_replaceable(files, target, there)
    with suppress(OSError):  # a leftover that cannot be removed does not fail the save
        clean_up(files, target.parent, target.name)
    folder = temporary(target, nonce)
    held.callback(let_go, files, folder, hold(files, folder))
    files.make_folder(folder)
    return folder


def _exists(target: Path) -> str:
    return f"{target} exists already; save under another name or step, or pass replace=True"


def _check_replaceable(files: Files, target: Path, there: Entry) -> None:
    """Refuse to replace a folder that is not a checkpoint."""
    if there.kind != "folder":
        raise CheckpointError(
            f"{target} is a link or a file, and replace=True expects a checkpoint's own folder: "
            "save to the folder that the link leads to, or remove it first"
        )
    names = [entry.name for entry in files.list(target)]
    if names and not is_step(target.name) and not any(is_ours(name) for name in names):
        raise CheckpointError(
            f"{target} is a folder that holds no checkpoint ({names[0]!r} is in it): replace=True "
            "does not replace it. Save under another name, or with step= to save inside it"
        )


def _commit(
    files: Files, folder: Path, target: Path, manifest: Manifest, replace: bool
) -> Path | None:
    """Check that all files are there, seal them, and rename the folder; see Note [Commit].

    Returns the folder of a replaced checkpoint's files that are not ours, if there are any.
    """
    try:
        if difference := find_difference(folder, files.list(folder), manifest.ranks):
            raise CheckpointError(
                f"what the ranks wrote is not all there ({difference[1]}). Does every machine see "
                "the same folder? A checkpoint goes to a file system that all ranks share"
            )
        write_small(files, folder / MANIFEST, seal(manifest))
        files.sync_folder(folder)
        replaces = replace and any(e.name == target.name for e in files.list(target.parent))
        _give_name(files, folder, target, replaces)
    except (OSError, CheckpointError):
        _discard(files, folder)
        raise
    try:
        files.sync_folder(target.parent)
    except OSError:
        # The rename may not be durable: it is undone. Until that is durable, a power cut may
        # bring back either name; the new checkpoint is removed only afterwards.
        with suppress(OSError, CheckpointError):
            if replaces:
                files.exchange(folder, target)
            else:
                files.rename(target, folder)
            files.sync_folder(target.parent)
            remove_tree(files, folder)
        raise
    if replaces:  # the new one is durable; if the old one cannot be removed, it is a leftover
        with suppress(OSError):
            return remove_checkpoint(files, folder)
    return None


def _give_name(files: Files, folder: Path, target: Path, replaces: bool) -> None:
    try:
        (files.exchange if replaces else files.rename)(folder, target)
    except OSError as error:
        if replaces and error.errno in (errno.ENOSYS, errno.EINVAL):
            raise CheckpointError(
                f"{target}: this file system cannot swap two folders at once, as replace=True "
                "needs; save under another name and remove the old one afterwards"
            ) from error
        if not replaces and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise CheckpointError(f"{_exists(target)} (another save made it meanwhile)") from error
        raise


def _discard(files: Files, folder: Path) -> None:
    """Remove the files of a failed save; if that fails, they are a leftover."""
    with suppress(OSError, CheckpointError):
        remove_tree(files, folder)
