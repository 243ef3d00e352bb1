"""Check every byte of one checkpoint, offline; all damage is listed, not only the first.

Note [Every byte is covered]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The manifest is sealed by its own digest, an index by the manifest's. An index gives the end of each
file's header and the place of each tensor. The places follow one another without a gap up to the
end of the file, so the header's digest and those of the chunks cover the whole file. The header's
description of its tensors is compared with the manifest, so any safetensors reader gets the same
tensors as we do.

This needs neither torch nor other ranks: it runs anywhere, on any user's checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.all_ranks import explain
from shardwise.checkpoint.container import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    Stored,
    chunk_digest,
    digest_of,
    parse_header,
)
from shardwise.checkpoint.files import Entry, Files, Reader
from shardwise.checkpoint.folder import check_quickly
from shardwise.checkpoint.manifest import (
    MANIFEST,
    BoxPlace,
    FileRow,
    Manifest,
    OwnRow,
    file_name,
    index_name,
    is_ours,
    parse_manifest,
)
from shardwise.checkpoint.read import Checkpoint, Chunk, chunks_around, read_small
from shardwise.errors import CheckpointError, DamagedCheckpoint

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Finding:
    """One damage: its file, its tensor ("" if it concerns no tensor), and a description."""

    file: str
    tensor: str
    text: str

    def __str__(self) -> str:
        """Return all of it in one line."""
        where = f"{self.file}: tensor '{self.tensor}'" if self.tensor else self.file
        return f"{where}: {self.text}"


@dataclass(frozen=True)
class Verified:
    """All damage of a checkpoint, notes on foreign files in it, and how much was read."""

    path: Path
    step: int | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    num_bytes: int
    num_files: int

    @property
    def ok(self) -> bool:
        """Tell whether every byte is as it was saved."""
        return not self.findings


def verify(files: Files, path: Path, progress: Callable[[int], None] | None = None) -> Verified:
    """Check every byte of one checkpoint. See Note [Every byte is covered].

    ``progress`` is called with the bytes of each read.

    **Cost** reads each file once, from its start to its end, and a damaged one twice; one index and
    1 MiB in memory.

    **Raises** CheckpointError when this version does not know the format, or the folder cannot be
    listed; all other damage is a finding.
    """
    check = _Check(files, path, progress)
    manifest = check.manifest()
    if manifest is not None:
        check.ranks(manifest)
    return Verified(
        path,
        manifest.step if manifest else None,
        tuple(check.findings),
        tuple(f"'{name}' is not the checkpoint's" for name in check.entries if not is_ours(name)),
        check.num_bytes,
        check.num_files,
    )


class _Expected(NamedTuple):
    """One tensor of a rank's files as manifest and index have it; bytes count from the file's."""

    file: int
    name: str
    stored: Stored
    box: BoxPlace | OwnRow


class _Scratch:
    """Memory for one chunk at a time, sliced as if it were that of the whole tensor."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(CHUNK_BYTES))

    def __getitem__(self, part: slice) -> memoryview:
        return self._memory[: part.stop - part.start]


class _Check:
    """One run over one checkpoint, with its findings so far."""

    def __init__(self, files: Files, path: Path, progress: Callable[[int], None] | None) -> None:
        self.findings: list[Finding] = []
        self.num_bytes = 0
        self.num_files = 0
        self._files, self._path, self._progress = files, path, progress
        self._scratch = _Scratch()
        try:
            self.entries: dict[str, Entry] = {entry.name: entry for entry in files.list(path)}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be listed: {explain(error)}") from error

    def manifest(self) -> Manifest | None:
        """Read the manifest; without it nothing else can be checked."""
        try:
            data = read_small(self._files, self._path / MANIFEST)
            self._count(len(data))
            self.num_files = 1
            return parse_manifest(data, str(self._path / MANIFEST))
        except (OSError, DamagedCheckpoint) as error:
            text = self._short(error, MANIFEST)
            self._found(MANIFEST, "", f"{text}; nothing else can be checked")
            return None

    def ranks(self, manifest: Manifest) -> None:
        """Check the files of all ranks, and that no other file has such a name."""
        checkpoint = Checkpoint(self._files, self._path, manifest)
        expected = {MANIFEST}
        try:
            for rank, row in enumerate(manifest.ranks):
                names = [file_name(rank, number) for number in range(row.num_files)]
                expected |= {index_name(rank), *names}
                self._rank(checkpoint, rank, names)
        finally:
            checkpoint.close()
        self.num_files += len(checkpoint.opened)
        for name in self.entries:
            if is_ours(name) and name not in expected:
                self._found(name, "", "the manifest does not name this file")
        if not self.findings:  # a load begins with this check, which must not refuse it now
            try:
                check_quickly(self._files, self._path)
            except (OSError, DamagedCheckpoint) as error:  # OSError: it was removed meanwhile
                self._found(MANIFEST, "", explain(error))

    def _rank(self, checkpoint: Checkpoint, rank: int, names: Sequence[str]) -> None:
        """Check the index and the files of one rank."""
        name, before = index_name(rank), checkpoint.num_bytes
        try:
            index = checkpoint.index_of(rank)
            expected = list(_expected(checkpoint, rank))
        except (OSError, CheckpointError) as error:
            self._found(name, "", self._short(error, name))
            if names:
                self._found(", ".join(names), "", f"not checked, for want of {name}")
            return
        finally:
            self._count(checkpoint.num_bytes - before)
        for number, row in enumerate(index.files):
            tensors = sorted(
                (each for each in expected if each.file == number),
                key=lambda each: (each.stored.begin, each.stored.end),
            )
            try:
                reader = checkpoint.reader.open(names[number])
            except (OSError, CheckpointError) as error:
                self._found(names[number], "", self._short(error, names[number]))
            else:
                self._file(checkpoint, reader, names[number], row, tensors)

    def _file(
        self,
        checkpoint: Checkpoint,
        reader: Reader,
        name: str,
        row: FileRow,
        tensors: list[_Expected],
    ) -> None:
        """Check one file of tensors: its size, its header, and every chunk."""
        if reader.size != row.num_bytes:
            self._found(name, "", f"{reader.size} bytes, expected {row.num_bytes}")
        end = tensors[0].stored.begin if tensors else row.num_bytes
        try:
            self._header(reader, name, end, row, tensors)
        except (OSError, CheckpointError) as error:
            self._found(name, "", self._short(error, name))
        chunks = [self._chunks(name, each) for each in tensors]
        try:
            for num_bytes in checkpoint.reader.read([chunk for each in chunks for chunk in each]):
                self._count(num_bytes)
        except CheckpointError:
            for each, listed in zip(tensors, chunks, strict=True):
                self._tensor(checkpoint, name, each, listed)

    def _chunks(self, name: str, each: _Expected) -> list[Chunk]:
        num_bytes = each.stored.end - each.stored.begin
        return list(
            chunks_around(name, each.stored.key, each.box, num_bytes, 0, num_bytes, self._scratch)
        )

    def _tensor(
        self, checkpoint: Checkpoint, name: str, each: _Expected, chunks: Sequence[Chunk]
    ) -> None:
        """Check a tensor of a damaged file chunk by chunk."""
        damaged: list[Chunk] = []
        reason = ""
        for chunk in chunks:
            data = self._scratch[slice(0, chunk.num_bytes)]
            try:
                checkpoint.reader.fill(chunk, data)
                self._count(chunk.num_bytes)
                if chunk_digest(data) != chunk.digest:
                    damaged.append(chunk)
            except CheckpointError as error:
                cut_short = "the file ends before it"
                cause = error.__cause__
                reason = explain(cause) if isinstance(cause, OSError) else cut_short
                damaged.append(chunk)
        if damaged:
            text = f"{len(damaged)} of its {len(chunks)} chunks " if len(chunks) > 1 else ""
            text += f"cannot be read ({reason})" if reason else "damaged"
            self._found(name, each.name, f"{text}, from byte {damaged[0].begin} of the file")

    def _header(
        self, reader: Reader, name: str, end: int, row: FileRow, tensors: list[_Expected]
    ) -> None:
        """Compare a file's header with manifest and index. **Raises** DamagedCheckpoint."""
        if not _LENGTH_BYTES <= end <= MAX_HEADER_BYTES + _LENGTH_BYTES or end > reader.size:
            raise DamagedCheckpoint(f"its header should have {end} bytes, which is impossible")
        try:
            data = reader.read(0, end)
        except (OSError, DamagedCheckpoint) as error:
            text = self._short(error, name)
            raise DamagedCheckpoint(f"its header cannot be read: {text}") from error
        self._count(end)
        if digest_of(data) != row.header:
            raise DamagedCheckpoint("its header is damaged")
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        if length != end - _LENGTH_BYTES:
            raise DamagedCheckpoint(f"its header claims {length} bytes, expected {end - 8}")
        found = parse_header(data[_LENGTH_BYTES:], row.num_bytes - end, str(self._path / name))
        expected = {each.stored.key: each for each in tensors}
        for key in sorted({*expected, *found}):
            if key not in found or key not in expected:
                where = "is not in its header" if key in expected else "is in its header alone"
                self._found(name, expected[key].name if key in expected else key, where)
                continue
            here = found[key]
            moved = here._replace(begin=here.begin + end, end=here.end + end)
            if moved != expected[key].stored:
                text = f"its header says {moved}, the manifest {expected[key].stored}"
                self._found(name, expected[key].name, text)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._progress is not None:
            self._progress(num_bytes)

    def _found(self, file: str, tensor: str, text: str) -> None:
        self.findings.append(Finding(file, tensor, text))

    def _short(self, error: Exception, name: str) -> str:
        """Return an error's text without the path, which a finding has anyway."""
        text = explain(error).replace(f"{self._path / name}: ", "")
        return text.replace(f"{self._path}/", "").removeprefix(f"{self._path}: ")


def _expected(checkpoint: Checkpoint, rank: int) -> Iterator[_Expected]:
    """Yield the tensors that must be in the files of a rank. **Raises** DamagedCheckpoint."""
    manifest, index = checkpoint.manifest, checkpoint.index_of(rank)
    boxes = list(manifest.all_boxes(rank))
    for number, file, box in boxes:
        row, place = manifest.tensors[number], checkpoint.place_of(number, file, box, rank)
        key, bounds = row.info.key, (place.begin, place.end)
        stored = Stored(key, row.dtype, box.lengths, box.offsets, *bounds)
        yield _Expected(file, key, stored, place)
    if len(index.boxes) != len(boxes):
        text = f"{len(index.boxes)} boxes, expected {len(boxes)}: some are not this rank's"
        raise DamagedCheckpoint(f"{checkpoint.folder / index_name(rank)}: {text}")
    for own in index.own:
        key, end = f"rank{rank:05d}.{own.info.key}", own.begin + own.num_bytes
        stored = Stored(key, own.dtype, own.shape, own.region.at, own.begin, end)
        yield _Expected(0, own.info.key, stored, own)
