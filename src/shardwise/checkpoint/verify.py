"""Check one checkpoint: quickly before it is read, or every byte of it, with a list of all damage.

Note [Every byte is covered]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The manifest is sealed by its own digest, an index by the manifest's. An index gives the end of each
file's header and the place of each tensor. The places follow one another without a gap up to the
end of the file, so the header's digest and those of the chunks cover the whole file. The header's
description of its tensors is compared with the manifest, so any safetensors reader gets the same
tensors as we do.

This needs no other ranks: it runs anywhere, on any user's checkpoint. Torch is imported at the end
of a check of every byte, to decode the values as a load does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.all_ranks import explain
from shardwise.checkpoint.container import MAX_HEADER_BYTES, Stored, digest_of, parse_header
from shardwise.checkpoint.files import Entry, Files, reading
from shardwise.checkpoint.manifest import (
    MANIFEST,
    STEP,
    FileRow,
    IndexRow,
    Manifest,
    file_name,
    index_name,
    is_ours,
    parse_manifest,
)
from shardwise.checkpoint.read import Checkpoint, Chunk, chunks_in, read_small
from shardwise.errors import CheckpointError, DamagedCheckpoint

MAX_LOOKS = 100  # how often a checkpoint may vanish or change while it is checked or read
_LENGTH_BYTES = 8


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
            if manifest_now(files, path) == data:
                raise
    raise too_fast(path)


def manifest_now(files: Files, path: Path) -> bytes | None:
    """Return the bytes of a checkpoint's manifest; None if it cannot be read."""
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
    checkpoint = Checkpoint(files, path, manifest)
    for each in sorted({0, rank}):
        with suppress(OSError):
            for number, file in enumerate(checkpoint.index_of(each).files):
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


def too_fast(path: Path) -> CheckpointError:
    """Return the error for a folder whose run changes each checkpoint while it is read."""
    return CheckpointError(
        f"{path}: checkpoints are removed or replaced faster than they can be read; load later, or "
        "let the run that saves there keep more of them (keep_last)"
    )


# -- every byte


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

    **Cost** reads each file once, from its start to its end; one index and 1 MiB in memory.

    **Raises** CheckpointError when this version does not know the format, or the folder cannot be
    listed; all other damage is a finding.
    """
    try:
        names = [entry.name for entry in files.list(path)]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {explain(error)}") from error
    check = _Check(files, path, progress)
    manifest = check.run(names)
    return Verified(
        path,
        manifest.step if manifest else None,
        tuple(check.findings),
        tuple(f"'{name}' is not the checkpoint's" for name in names if not is_ours(name)),
        check.num_bytes,
        check.num_files,
    )


class _Check:
    """One run over one checkpoint, with its findings so far."""

    def __init__(self, files: Files, path: Path, progress: Callable[[int], None] | None) -> None:
        self.findings: list[Finding] = []
        self.num_bytes = self.num_files = 0
        self._files, self._path, self._progress = files, path, progress

    def run(self, names: Sequence[str]) -> Manifest | None:
        """Check the files of these names; return the manifest, without which there is no check."""
        try:
            data = read_small(self._files, self._path / MANIFEST)
            self._count(len(data))
            self.num_files = 1
            manifest = parse_manifest(data, str(self._path / MANIFEST))
        except (OSError, DamagedCheckpoint) as error:
            self._found(MANIFEST, "", error, "; nothing else can be checked")
            return None
        expected = {MANIFEST}
        with closing(Checkpoint(self._files, self._path, manifest)) as checkpoint:
            for rank, row in enumerate(manifest.ranks):
                index, *others = names_of_rank(rank, row)
                expected |= {index, *others}
                self._check_rank(checkpoint, rank, others)
            if not self.findings:
                self._check_values(checkpoint, manifest)
        self.num_files += len(checkpoint.opened)
        for name in names:
            if is_ours(name) and name not in expected:
                self._found(name, "", "the manifest does not name this file")
        if not self.findings:  # a load begins with this check, which must not refuse it now
            try:
                check_quickly(self._files, self._path)
            except (OSError, DamagedCheckpoint) as error:  # OSError: it was removed meanwhile
                self._found(MANIFEST, "", explain(error))
        return manifest

    def _check_rank(self, checkpoint: Checkpoint, rank: int, names: Sequence[str]) -> None:
        name, before = index_name(rank), checkpoint.num_bytes
        try:
            index, extents = checkpoint.index_of(rank), checkpoint.extents_of(rank)
        except (OSError, CheckpointError) as error:
            self._found(name, "", error)
            if names:
                self._found(", ".join(names), "", f"not checked, for want of {name}")
            return
        finally:
            self._count(checkpoint.num_bytes - before)
        for name, row in zip(names, index.files, strict=True):
            tensors = [each for boxes in extents.values() for each in boxes if each.name == name]
            try:
                self._check_header(checkpoint, name, row, [each.stored for each in tensors])
            except (OSError, CheckpointError) as error:
                self._found(name, "", error)
            for each in tensors:
                self._check_tensor(checkpoint, list(chunks_in(each)))

    def _check_values(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        """Decode the values of all ranks and of the optimizer: a load refuses what is not right."""
        import torch

        from shardwise.checkpoint.generators import check_generators

        for rank in range(manifest.num_ranks):
            try:
                generators = checkpoint.values_of(rank)["generators"]
                if generators:
                    check_generators(generators, torch.device("cpu"))
            except (OSError, CheckpointError) as error:
                self._found(index_name(rank), "", error)
        try:
            _ = checkpoint.optimizer
        except (OSError, CheckpointError) as error:
            self._found(MANIFEST, "", error)

    def _check_tensor(self, checkpoint: Checkpoint, chunks: Sequence[Chunk]) -> None:
        """Check a tensor chunk by chunk."""
        damaged: list[Chunk] = []
        how = "damaged"
        for chunk in chunks:
            try:
                self._count(sum(checkpoint.read_chunks([chunk])))
            except CheckpointError as error:
                damaged.append(chunk)
                if isinstance(error.__cause__, OSError):
                    how = f"cannot be read ({explain(error.__cause__)})"
                elif error.__cause__ is not None:
                    how = "cannot be read (the file ends before it)"
        if damaged:
            first = damaged[0]
            text = f"{len(damaged)} of its {len(chunks)} chunks " if len(chunks) > 1 else ""
            self._found(first.name, first.key, f"{text}{how}, from byte {first.begin} of the file")

    def _check_header(
        self, checkpoint: Checkpoint, name: str, row: FileRow, tensors: Sequence[Stored]
    ) -> None:
        """Compare a file's header with manifest and index. **Raises** DamagedCheckpoint."""
        reader = checkpoint.open(name)
        if reader.size != row.num_bytes:
            self._found(name, "", f"{reader.size} bytes, expected {row.num_bytes}")
        end = tensors[0].begin if tensors else row.num_bytes
        if not _LENGTH_BYTES <= end <= MAX_HEADER_BYTES + _LENGTH_BYTES or end > reader.size:
            raise DamagedCheckpoint(f"its header should have {end} bytes, which is impossible")
        data = reader.read(0, end)
        self._count(end)
        if digest_of(data) != row.header:
            raise DamagedCheckpoint("its header is damaged")
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        if length != end - _LENGTH_BYTES:
            raise DamagedCheckpoint(f"its header claims {length} bytes, expected {end - 8}")
        found = parse_header(data[_LENGTH_BYTES:], row.num_bytes - end, str(self._path / name))
        here = {key: s._replace(begin=s.begin + end, end=s.end + end) for key, s in found.items()}
        there = {stored.key: stored for stored in tensors}
        for key in sorted({*here, *there}):
            if here.get(key) != there.get(key):
                text = f"its header says {here.get(key)}, the manifest {there.get(key)}"
                self._found(name, key, text)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._progress is not None:
            self._progress(num_bytes)

    def _found(self, file: str, tensor: str, text: str | Exception, more: str = "") -> None:
        if isinstance(text, Exception):  # without the path, which a finding has anyway
            text = explain(text).replace(f"{self._path / file}: ", "")
            text = text.replace(f"{self._path}/", "").removeprefix(f"{self._path}: ")
        self.findings.append(Finding(file, tensor, text + more))
