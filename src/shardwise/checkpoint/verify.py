"""Check every byte of one checkpoint, offline; all damage is listed, not only the first.

Note [Every byte is covered]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The manifest is sealed by its own digest, an index by the manifest's. An index says where the header
of a file ends and where each tensor of it lies: these places follow one another without a gap up to
the end of the file, so that the header's digest and those of the chunks cover it whole. What the
header says of its tensors is compared with the manifest, so a reader who knows only safetensors
gets the same tensors as we do.

It needs no torch and no other rank: it runs anywhere, on somebody else's checkpoint too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint.all_ranks import explain
from shardwise.checkpoint.container import MAX_HEADER_BYTES, Stored, element_bytes, parse_header
from shardwise.checkpoint.digest import DIGEST_CHARS, chunk_digest, chunks_of, digest_of, num_chunks
from shardwise.checkpoint.files import Entry, Files, Reader
from shardwise.checkpoint.folder import check_quickly
from shardwise.checkpoint.manifest import Manifest, parse_manifest
from shardwise.checkpoint.rank_index import RankIndex, differences, parse_index, two_saves
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.sealed import MANIFEST, file_name, index_name, is_ours
from shardwise.errors import CheckpointError, DamagedCheckpoint

_READ_BYTES = 4 << 20
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Finding:
    """One damage: in which file, of which tensor ("" if of none), and what it is."""

    file: str
    tensor: str
    text: str

    def __str__(self) -> str:
        """Return all of it in one line."""
        where = f"{self.file}: tensor '{self.tensor}'" if self.tensor else self.file
        return f"{where}: {self.text}"


@dataclass(frozen=True)
class Verified:
    """What was read of a checkpoint, all damage in it, and what is not the checkpoint's."""

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

    ``progress`` is told the bytes of each read.

    **Cost** reads each file once, from its start to its end; one index and 4 MiB in memory.

    **Raises** CheckpointError when this version does not know the format, or the folder cannot be
    listed; all else that is wrong is a finding.
    """
    check = _Check(files, path, progress)
    manifest = check.manifest()
    if manifest is not None:
        for rank in range(len(manifest.ranks)):
            check.rank(manifest, rank)
        check.names(manifest)
    return Verified(
        path,
        manifest.step if manifest else None,
        tuple(check.findings),
        tuple(f"'{name}' is not the checkpoint's" for name in check.entries if not is_ours(name)),
        check.num_bytes,
        check.num_files,
    )


@dataclass(frozen=True)
class _Span:
    """Bytes [begin, end) of a file that have one digest; ``label`` is a key, or the header's."""

    label: str
    begin: int
    end: int
    digest: str


@dataclass(frozen=True)
class _Expected:
    """One tensor of a file as manifest and index have it."""

    stored: Stored
    name: str
    digests: str

    @property
    def has_all_digests(self) -> bool:
        num_bytes = self.stored.end - self.stored.begin
        return len(self.digests) == num_chunks(num_bytes) * DIGEST_CHARS

    def spans(self) -> Iterator[_Span]:
        begin = self.stored.begin
        if not self.has_all_digests:  # a shape can claim more chunks than anybody could list
            return
        for n, (lo, hi) in enumerate(chunks_of(self.stored.end - begin)):
            digest = self.digests[n * DIGEST_CHARS : (n + 1) * DIGEST_CHARS]
            yield _Span(self.stored.key, begin + lo, begin + hi, digest)


@dataclass
class _Bad:
    """Damaged spans of one tensor."""

    spans: list[_Span] = field(default_factory=list)
    reason: str = ""


class _Check:
    """One run over one checkpoint: what was found so far."""

    def __init__(self, files: Files, path: Path, progress: Callable[[int], None] | None) -> None:
        self.findings: list[Finding] = []
        self.num_bytes = 0
        self.num_files = 0
        self._files = files
        self._path = path
        self._progress = progress
        self._expected_names = {MANIFEST}
        self._buffer = memoryview(bytearray(_READ_BYTES))
        try:
            self.entries: dict[str, Entry] = {entry.name: entry for entry in files.list(path)}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be listed: {explain(error)}") from error

    def manifest(self) -> Manifest | None:
        """Read the manifest; without it nothing else can be known."""
        data = self._small(MANIFEST)
        if data is None:
            return None
        try:
            manifest = parse_manifest(data, str(self._path / MANIFEST))
        except DamagedCheckpoint as error:
            text = f"{self._short(error, MANIFEST)}; nothing else can be checked"
            self._found(MANIFEST, "", text)
            return None
        if len(manifest.ranks) != manifest.num_ranks:
            text = f"it names {len(manifest.ranks)} ranks, expected {manifest.num_ranks}"
            self._found(MANIFEST, "", text)
        return manifest

    def rank(self, manifest: Manifest, rank: int) -> None:
        """Check the index and the files of one rank."""
        row, name = manifest.ranks[rank], index_name(rank)
        names = [file_name(rank, number) for number in range(row.num_files)]
        self._expected_names |= {name, *names}
        data = self._small(name)
        if data is None:
            self._unchecked(names, name)
            return
        if len(data) != row.index_bytes or digest_of(data) != row.digest:
            found = two_saves(manifest, rank, data)
            self._found(name, "", found or "it is damaged: not the one that the manifest names")
            self._unchecked(names, name)
            return
        try:
            index = parse_index(data, str(self._path / name))
        except DamagedCheckpoint as error:
            self._found(name, "", self._short(error, name))
            self._unchecked(names, name)
            return
        expected = list(self._expected(manifest, index, rank))
        for text in differences(manifest, rank, index):
            self._found(name, "", text)
        for place, tensor in expected:
            if place >= len(index.files):
                self._found(name, tensor.name, f"it lies in file {place}, which is not named")
        for number, (file, wanted) in enumerate(zip(index.files, names, strict=False)):
            tensors = [tensor for place, tensor in expected if place == number]
            self._file(wanted, file.num_bytes, file.header, tensors)

    def names(self, manifest: Manifest) -> None:
        """Check that there is no file that could be taken for one of this checkpoint."""
        for name in self.entries:
            if is_ours(name) and name not in self._expected_names:
                self._found(name, "", "the manifest does not name this file")
        if not self.findings:  # what loading asks first; it must never refuse what passed here
            try:
                check_quickly(self._files, self._path)
            except (OSError, DamagedCheckpoint) as error:  # OSError: it was removed meanwhile
                self._found(MANIFEST, "", explain(error))

    def _expected(
        self, manifest: Manifest, index: RankIndex, rank: int
    ) -> Iterator[tuple[int, _Expected]]:
        """Yield (number of the file, tensor) for all that must lie in the files of a rank."""
        rows, name = dict(index.box_places), index_name(rank)
        for number, place, box in manifest.all_boxes(rank):
            tensor = manifest.tensors[number]
            row, key = rows.pop((number, place), None), tensor.info.key
            num_bytes = (box.hi - box.lo) * element_bytes(tensor.dtype)
            if row is None or row.end - row.begin != num_bytes:
                text = f"cut otherwise than the manifest says: expected {box}, got {row}"
                self._found(name, key, text)
                continue
            stored = Stored(key, tensor.dtype, box.lengths, box.offsets, row.begin, row.end)
            yield place, _Expected(stored, key, row.digests)
        for number, place in rows:
            text = f"box {place} of tensor {number} is none of this rank's"
            self._found(name, "", text)
        for own in index.own:
            key = f"rank{rank:05d}.{own.info.key}"
            end = own.begin + own.num_bytes
            stored = Stored(key, own.dtype, own.shape, own.region.at, own.begin, end)
            yield 0, _Expected(stored, own.info.key, own.digests)

    def _file(self, name: str, num_bytes: int, header: str, tensors: list[_Expected]) -> None:
        """Check one file of tensors: its size, its header, and every chunk."""
        tensors.sort(key=lambda t: (t.stored.begin, t.stored.end))
        header_end = tensors[0].stored.begin if tensors else num_bytes
        self._check_places(name, num_bytes, header_end, tensors)
        entry = self.entries.get(name)
        if entry is None or entry.kind != "file":
            what = "it is missing" if entry is None else "it is no regular file"
            plural = "s" if len(tensors) != 1 else ""
            self._found(name, "", f"{what}, with {len(tensors)} tensor{plural}")
            return
        try:
            reader = self._files.open(self._path / name)
        except (OSError, CheckpointError) as error:
            self._found(name, "", self._short(error, name))
            return
        with reader:
            if reader.size != num_bytes:
                self._found(name, "", f"{reader.size} bytes, expected {num_bytes}")
            self.num_files += 1
            bad: dict[str, _Bad] = {}
            self._header(reader, name, header_end, header, tensors)
            for spans in _pieces(span for tensor in tensors for span in tensor.spans()):
                self._read(reader, spans, bad)
        by_key = {t.stored.key: t for t in tensors}
        for key, damage in bad.items():
            chunks = num_chunks(by_key[key].stored.end - by_key[key].stored.begin)
            self._found(name, by_key[key].name, _describe(damage, chunks))

    def _check_places(
        self, name: str, num_bytes: int, header_end: int, tensors: list[_Expected]
    ) -> None:
        """Check that the places follow one another, and that each chunk has its digest."""
        at = header_end
        for tensor in tensors:
            stored = tensor.stored
            if stored.begin != at:
                text = f"the index puts it at byte {stored.begin}, expected {at}"
                self._found(name, tensor.name, text)
            if not tensor.has_all_digests:
                self._found(name, tensor.name, "the index has not one digest for each chunk")
            at = stored.end
        if at != num_bytes:
            self._found(name, "", f"the index describes {at} bytes of it, expected {num_bytes}")

    def _header(
        self, reader: Reader, name: str, end: int, digest: str, tensors: list[_Expected]
    ) -> None:
        """Check the digest of a header, and that it says the same as manifest and index."""
        if not _LENGTH_BYTES <= end <= MAX_HEADER_BYTES + _LENGTH_BYTES or end > reader.size:
            self._found(name, "", f"its header should have {end} bytes, which cannot be")
            return
        try:
            data = reader.read(0, end)
        except (OSError, DamagedCheckpoint) as error:
            self._found(name, "", f"its header cannot be read: {self._short(error, name)}")
            return
        self._count(end)
        if digest_of(data) != digest:
            self._found(name, "", "its header is damaged")
            return
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        if length != end - _LENGTH_BYTES:
            self._found(name, "", f"its header claims {length} bytes, expected {end - 8}")
            return
        told = {t.stored.key: (t.stored, t.name) for t in tensors}
        data_bytes = max((t.stored.end for t in tensors), default=end) - end
        try:
            found = parse_header(data[_LENGTH_BYTES:], data_bytes, str(self._path / name))
        except CheckpointError as error:
            self._found(name, "", self._short(error, name))
            return
        for key in sorted({*told, *found}):
            if key not in found or key not in told:
                who = "is not in its header" if key in told else "is in its header alone"
                self._found(name, told[key][1] if key in told else key, who)
                continue
            here, (there, tensor) = found[key], told[key]
            moved = Stored(
                key, here.dtype, here.lengths, here.offsets, here.begin + end, here.end + end
            )
            if moved != there:
                self._found(name, tensor, f"its header says {moved}, the manifest {there}")

    def _read(self, reader: Reader, spans: list[_Span], bad: dict[str, _Bad]) -> None:
        """Read spans that follow one another, and check each; if that fails, one by one."""
        begin, end = spans[0].begin, spans[-1].end
        data = self._buffer[: end - begin]
        try:
            if end > reader.size:
                raise DamagedCheckpoint("the file ends before it")
            reader.read_into(begin, data)
        except (OSError, DamagedCheckpoint) as error:
            if len(spans) > 1:
                for span in spans:
                    self._read(reader, [span], bad)
            else:
                damage = bad.setdefault(spans[0].label, _Bad())
                damage.reason = explain(error)
                damage.spans.append(spans[0])
            return
        self._count(end - begin)
        for span in spans:
            if chunk_digest(data[span.begin - begin : span.end - begin]) != span.digest:
                bad.setdefault(span.label, _Bad()).spans.append(span)

    def _small(self, name: str) -> bytes | None:
        """Read a manifest or an index; None, and a finding, if that fails."""
        try:
            data = read_small(self._files, self._path / name)
        except (OSError, CheckpointError) as error:
            self._found(name, "", self._short(error, name))
            return None
        self.num_files += 1
        self._count(len(data))
        return data

    def _unchecked(self, names: list[str], index: str) -> None:
        if names:
            self._found(", ".join(names), "", f"not checked, for want of {index}")

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._progress is not None:
            self._progress(num_bytes)

    def _found(self, file: str, tensor: str, text: str) -> None:
        self.findings.append(Finding(file, tensor, text))

    def _short(self, error: Exception, name: str) -> str:
        """Write an error without the path, which a finding has anyway."""
        return explain(error).replace(f"{self._path / name}: ", "").replace(f"{self._path}/", "")


def _pieces(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Put spans that follow one another together, up to the size of one read."""
    piece: list[_Span] = []
    for span in spans:
        if piece and (span.begin != piece[-1].end or span.end - piece[0].begin > _READ_BYTES):
            yield piece
            piece = []
        piece.append(span)
    if piece:
        yield piece


def _describe(bad: _Bad, num_all: int) -> str:
    first = bad.spans[0]
    text = f"{len(bad.spans)} of its {num_all} chunks " if num_all > 1 else ""
    text += f"cannot be read ({bad.reason})" if bad.reason else "damaged"
    return f"{text}, from byte {first.begin} of the file"
