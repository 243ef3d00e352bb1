"""Write one checkpoint: every rank its own files, then one rename that makes them a checkpoint.

Note [Commit]
~~~~~~~~~~~~~
1. Rank 0 makes ``.tmp-<name>-<nonce>`` beside the target, under a lock (Note [Who writes there]);
   the others learn the nonce.
2. Every rank writes its tensors there, hashing the memory as it goes, then its index; each file is
   synced. The ranks exchange a row: whether it worked, and the size and digest of the index.
3. Rank 0 writes the manifest with those rows, syncs it and the folder, renames the folder to its
   name, and syncs the folder above (`commit`). A last exchange, and `write_checkpoint` returns.

So a folder of that name is complete, and complete for good once the call has returned; everything
else is a leftover. A failure anywhere raises the same error on all ranks, and rank 0 removes what
was written. Nothing points at a checkpoint but its name.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.commit import commit, discard, prepare
from shardwise.checkpoint.container import Stored, build_header, place
from shardwise.checkpoint.digest import CHUNK_BYTES, DIGEST_BYTES, chunk_digests, digest_of
from shardwise.checkpoint.files import Files, Writer
from shardwise.checkpoint.leftovers import temporary
from shardwise.checkpoint.manifest import IndexRow, Manifest, TensorRow
from shardwise.checkpoint.rank_index import BoxRow, FileRow, OwnRow, RankIndex
from shardwise.checkpoint.sealed import MANIFEST, file_name, index_name, seal
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
    """What one rank writes.

    ``read(number, box)`` returns the bytes of a box of tensor ``number`` of the manifest; ``own``
    are tensors of this rank alone, whole; ``values`` go into its index. One tensor at a time is
    asked for.
    """

    rank: int
    read: Callable[[int, Box], memoryview]
    own: Sequence[tuple[TensorRow, Callable[[], memoryview]]]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """What the ranks wrote: the checkpoint's folder, the bytes of all ranks and of this one.

    ``other_files`` is, on rank 0, the folder of what lay in a replaced checkpoint and is none of
    ours, if there was anything.
    """

    path: Path
    num_bytes: int
    rank_bytes: int
    other_files: Path | None = None


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

    ``manifest`` has no ``ranks`` yet and is the same on all ranks; of the nonces rank 0's counts.

    **Cost** this rank's bytes once to disk; three exchanges of at most 34 bytes per rank.

    **Raises** CheckpointError, the same on all ranks; the target is as it was then.
    """
    assert len(nonce) == NONCE_BYTES
    made: list[Path] = []  # by rank 0: the temporary folder
    left: list[Path | None] = []

    def begin() -> bytes:
        meant = bytes.fromhex(digest_of(manifest.model_dump_json(include=_COMPARED).encode()))
        if control.rank == 0:
            made.append(prepare(files, target, nonce, replace, held))
        return nonce + meant

    def write_manifest() -> None:
        whole = manifest.model_copy(update={"ranks": tuple(ranks)})
        _write_small(files, folder / MANIFEST, seal(whole))

    def give_name() -> None:
        if control.rank == 0:
            with held:
                left.append(commit(files, folder, target, ranks, write_manifest, replace))

    with ExitStack() as held:  # of rank 0: the lock of the temporary folder
        try:
            rows = on_all_ranks(control, begin, NONCE_BYTES + DIGEST_BYTES)
            folder = temporary(target, rows[0][:NONCE_BYTES])
            _check_same(rows, NONCE_BYTES)
            rows = on_all_ranks(
                control, lambda: write_rank(files, folder, manifest, part, progress), _ROW.size
            )
        except CollectiveError:
            raise  # the others may be writing still; the next save or run finds what they leave
        except Exception:
            for each in made:
                discard(files, each)
            raise
        ranks = [_index_row(row) for row in rows]
        on_all_ranks(control, give_name)
    mine = ranks[control.rank]
    return Written(
        target,
        sum(row.index_bytes + row.file_bytes for row in ranks),
        mine.index_bytes + mine.file_bytes,
        left[0] if left else None,
    )


# What all ranks mean to save alike.
_COMPARED = {"run", "step", "stage", "meshes", "layouts", "tensors", "tied", "optimizer"}


def _check_same(rows: Sequence[bytes], begin: int) -> None:
    other = [n for n, row in enumerate(rows) if row[begin:] != rows[0][begin:]]
    if other:
        raise CheckpointError(
            f"rank {other[0]} has other tensors to save than rank 0: parameters, optimizer state, "
            "step, run and stage must agree. Was an optimizer stepped on some ranks only?"
        )


def write_rank(
    files: Files, folder: Path, manifest: Manifest, part: Part, progress: Progress | None = None
) -> bytes:
    """Write the files and the index of one rank, synced; return the row for the manifest."""
    boxes: dict[int, list[tuple[int, Box]]] = {}
    for number, file, box in manifest.all_boxes(part.rank):
        boxes.setdefault(file, []).append((number, box))
    if part.own:
        boxes.setdefault(0, [])
    file_rows, box_rows, own_rows, total = [], [], [], 0
    for file, listed in sorted(boxes.items()):
        own = part.own if file == 0 else ()
        described = [
            (row.info.key, row.dtype, box.lengths, box.offsets)
            for row, box in ((manifest.tensors[number], box) for number, box in listed)
        ]
        described += [
            (f"rank{part.rank:05d}.{row.info.key}", row.dtype, row.shape, row.region.at)
            for row, _ in own
        ]
        assert len({key for key, *_ in described}) == len(described), "one key twice in a file"
        stored = place(described)
        header = build_header(stored)
        reads: list[Callable[[], memoryview]] = [
            lambda number=number, box=box: part.read(number, box)  # type: ignore[misc]
            for number, box in listed
        ]
        reads += [read for _, read in own]
        path = folder / file_name(part.rank, file)
        digests = _write_file(files, path, header, stored, reads, progress)
        num_bytes = len(header) + (stored[-1].end if stored else 0)
        total += num_bytes
        file_rows.append(FileRow(num_bytes=num_bytes, header=digest_of(header)))
        begin = len(header)
        for (number, _), s, digest in zip(listed, stored, digests, strict=False):
            box_rows.append(BoxRow(number, file, begin + s.begin, digest))
        for (row, _), s, digest in zip(
            own, stored[len(listed) :], digests[len(listed) :], strict=True
        ):
            fields = row.model_dump()
            own_rows.append(OwnRow(**fields, begin=begin + s.begin, digests=digest))
    index = seal(
        RankIndex(
            format=manifest.format,
            run=manifest.run,
            step=manifest.step,
            rank=part.rank,
            files=tuple(file_rows),
            boxes=tuple(box_rows),
            own=tuple(own_rows),
            values=dict(part.values),
        )
    )
    _write_small(files, folder / index_name(part.rank), index)
    return _ROW.pack(len(index), len(file_rows), total, bytes.fromhex(digest_of(index)))


def _write_file(
    files: Files,
    path: Path,
    header: bytes,
    stored: Sequence[Stored],
    reads: Sequence[Callable[[], memoryview]],
    progress: Progress | None,
) -> list[str]:
    """Write one file of tensors, synced; return the digests of each tensor's chunks."""
    digests = []
    with _new_file(files, path, len(header) + (stored[-1].end if stored else 0)) as writer:
        batch = _Batch(writer, progress)
        batch.add(memoryview(header))
        for s, read in zip(stored, reads, strict=True):
            digests.append(_add_tensor(batch, read(), s))
        batch.flush()
    return digests


@contextmanager
def _new_file(files: Files, path: Path, wanted: int) -> Iterator[Writer]:
    """Make a file of ``wanted`` bytes and sync it; when the disk is full, say what was wanted."""
    try:
        with files.create(path) as writer:
            yield writer
            writer.sync()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with suppress(OSError):
                free = files.free_bytes(path.parent)
                error.wanted = f"This file wants {wanted} bytes, {free} are free there"  # type: ignore[attr-defined]
        raise


def _add_tensor(batch: _Batch, data: memoryview, stored: Stored) -> str:
    """Write a tensor; return the digests of its chunks. A large one is in memory no longer then."""
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
    """Buffers to be written with one call."""

    def __init__(self, writer: Writer, progress: Progress | None) -> None:
        self._writer = writer
        self._progress = progress
        self._buffers: list[memoryview] = []
        self._num_bytes = 0

    def add(self, data: memoryview) -> None:
        """Add bytes; they must stay as they are until the flush."""
        self._buffers.append(data)
        self._num_bytes += len(data)
        if self._num_bytes >= _BATCH_BYTES or len(self._buffers) >= _BATCH_BUFFERS:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        self._writer.write(self._buffers)
        if self._progress is not None:
            self._progress(self._num_bytes)
        self._buffers, self._num_bytes = [], 0


def _write_small(files: Files, path: Path, data: bytes) -> None:
    with _new_file(files, path, len(data)) as writer:
        writer.write([memoryview(data)])


def _index_row(row: bytes) -> IndexRow:
    index_bytes, num_files, file_bytes, digest = _ROW.unpack(row)
    return IndexRow(
        index_bytes=index_bytes, num_files=num_files, file_bytes=file_bytes, digest=digest.hex()
    )
