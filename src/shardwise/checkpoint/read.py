"""Read one checkpoint: only the bytes that are asked for, each chunk checked before it is used.

Note [Straight into place]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A chunk that is wanted whole is read into the memory of its tensor, without a copy, and hashed there
while it is in the processor's cache. Small chunks that follow one another (step counts, norms,
biases) are read with one call and copied from there: a call for each costs more than its bytes.

Note [One piece into another]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint has a tensor in pieces (of tensor parallelism), and a reader wants a range of another
box of it. If both have the same sizes behind the first dim, the range is a range of the piece too,
and is read straight into place: whole tensors, equal pieces, and pieces of rows. Otherwise each
chunk of the piece that has some of the elements is read once, checked, and its elements are copied
to their places (`Scattered`). At most one chunk is in memory beside the target, and a row of the
target is never read by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.checkpoint.container import (
    CHUNK_BYTES,
    DIGEST_CHARS,
    chunk_digest,
    digest_of,
    element_bytes,
    memory_of,
    num_chunks,
    torch_dtype,
)
from shardwise.checkpoint.files import Files, Reader, read_file, reading
from shardwise.checkpoint.manifest import (
    MANIFEST,
    MAX_PART_BYTES,
    Extent,
    Extents,
    Manifest,
    OptimizerRow,
    OwnRow,
    RankIndex,
    find_extents,
    index_name,
    parse_index,
    parse_manifest,
)
from shardwise.checkpoint.source import OptimizerInfo, TensorInfo
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.layout.boxes import Region, full_region, owners_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_OPEN_FILES = 64
_SMALL_BYTES = 64 << 10
_VALUES = ("extra", "modules", "generators")


def read_small(files: Files, path: Path) -> bytes:
    """Return the bytes of a manifest or an index.

    **Raises** DamagedCheckpoint if it is missing, no regular file, lost by the disk or not readable
    by this user; OSError if the disk does not answer.
    """
    with reading(path):
        return read_file(files, path, MAX_PART_BYTES)


class Checkpoint:
    """One checkpoint of ours, as a `Source`; files are opened when they are needed.

    ``rank`` is the saved rank whose own state is read, where ranks differ. It has read
    ``num_bytes`` so far, from the files in ``opened``, without the manifest.
    """

    left_out: Sequence[str] = ()

    def __init__(
        self, files: Files, folder: Path, manifest: Manifest | None = None, rank: int = 0
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.where = str(folder)
        self.num_bytes = 0
        self.opened: set[str] = set()
        self._files = files
        if manifest is None:
            manifest = parse_manifest(read_small(files, folder / MANIFEST), str(folder / MANIFEST))
        self.manifest = manifest
        self.tensors = tuple(manifest.rows_of)  # in the manifest's order
        self.step, self.tied = manifest.step, manifest.tied
        self.is_imported = not manifest.layouts  # whole, from a checkpoint of another format
        self._readers: dict[str, Reader] = {}
        self._indexes: dict[int, tuple[RankIndex, Extents]] = {}

    @cached_property
    def optimizer(self) -> OptimizerInfo | None:
        """The optimizer's groups and values."""
        from shardwise.checkpoint.values import decode

        row = self.manifest.optimizer
        if row is None:
            return None
        own = {i.state: i for i in self.tensors if i.kind == "optimizer" and not i.name}

        def tensor(place: str) -> torch.Tensor:
            info = own.pop(place, None)  # each is at one place only
            if info is None:
                raise DamagedCheckpoint(f"{self.where}: the optimizer's '{place}' is missing")
            return self.read(info, 0, info.numel).view(info.shape)

        return optimizer_info(row, lambda value: decode(value, tensor))

    @property
    def extra(self) -> Mapping[str, object]:
        """The user's own state, as this rank saved it."""
        return self.values_of(self.rank)["extra"]

    def values_of(self, rank: int) -> dict[str, dict[str, object]]:
        """Return the values of a rank, decoded, with their tensors."""
        import torch

        from shardwise.checkpoint.values import decode

        index = self.index_of(rank)
        own = {row.name: (row, e) for row, e in self._own_of(rank) if row.kind == "extra"}
        where = str(self.folder / index_name(rank))

        def tensor(place: str) -> torch.Tensor:
            if place not in own:  # each is at one place only
                raise DamagedCheckpoint(f"{where}: there is no tensor '{place}', or not twice")
            row, extent = own.pop(place)
            out = torch.empty(row.shape, dtype=torch_dtype(row.dtype), device="cpu")
            self._fill(list(chunks_in(extent, memory_of(out))))
            return out

        values = {key: decode(value, tensor) for key, value in index.values.items()}
        wrong = [k for k in _VALUES if not isinstance(values.setdefault(k, {}), dict)]
        if wrong:
            raise DamagedCheckpoint(f"{where}: there are no values under '{wrong[0]}'")
        if own:
            raise DamagedCheckpoint(f"{where}: no value has the tensor '{next(iter(own))}'")
        return values

    def index_of(self, rank: int) -> RankIndex:
        """Return the index of a rank, read and checked against the manifest on first use.

        **Raises** DamagedCheckpoint naming the first difference. An index that is whole, with
        another digest than the manifest says, is of another save.
        """
        if rank not in self._indexes:
            data = read_small(self._files, self.folder / index_name(rank))
            self.opened.add(index_name(rank))
            self.num_bytes += len(data)
            self._indexes[rank] = self._checked_index(rank, data)
        return self._indexes[rank][0]

    def extents_of(self, rank: int) -> Extents:
        """Return where the tensors of a rank are, as its index says."""
        self.index_of(rank)
        return self._indexes[rank][1]

    def is_cut(self, tensor: TensorInfo) -> bool:
        """Tell whether the ranks that saved held slices of it; else it was whole on each."""
        return self.manifest.tensors[self.manifest.rows_of[tensor][0]].layout is not None

    def ranges(self, tensor: TensorInfo, piece: Region) -> tuple[tuple[int, int], ...]:
        """Return the elements [lo, hi) of a piece that each rank of one replica worked on.

        The ranks are those that saved. Returns () if they had other pieces.
        """
        rows = (self.manifest.tensors[number] for number in self.manifest.rows_of[tensor])
        row = next((row for row in rows if row.region == piece), None)
        if row is None:
            return ()
        if row.layout is None or self.manifest.stage == 0:
            return ((0, piece.numel),)
        layout = self.manifest.built_layouts[row.layout]
        pieces = [layout.piece(row.index or 0, rank) for rank in range(layout.num_ranks)]
        return tuple((piece.lo, piece.hi) for piece in pieces)

    def read(
        self, tensor: TensorInfo, lo: int, hi: int, piece: Region | None = None
    ) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, or of a piece of it, on the CPU."""
        import torch

        out = torch.empty(hi - lo, dtype=torch_dtype(tensor.dtype), device="cpu")
        self._fill(self.chunks(tensor, lo, hi, memory_of(out), piece))
        return out

    def chunks(
        self, tensor: TensorInfo, lo: int, hi: int, out: memoryview, piece: Region | None = None
    ) -> list[Chunk]:
        """List the chunks to be read to fill ``out`` with the bytes of elements [lo, hi).

        They are elements of the flattened ``piece``, or of the whole tensor without one.

        **Cost** at most two chunks more than was asked for, from the files of those ranks only that
        hold some of it; opens the indexes of those ranks. For pieces cut otherwise: see Note
        [One piece into another].
        """
        want, width = piece or full_region(tensor.shape), element_bytes(tensor.dtype)
        if self._own and (tensor, want) in self._own:
            own = self._own[tensor, want]
            return list(chunks_in(own, out, lo * width, hi * width)) if lo < hi else []
        chunks: list[Chunk] = []
        for number in self.manifest.rows_of[tensor]:
            have = self.manifest.tensors[number].region
            shift = have.shift_from(want)
            if shift is not None:
                begin, end = max(lo - shift, 0), min(hi - shift, have.numel)
                inside = out[(begin + shift - lo) * width : (end + shift - lo) * width]
                chunks += self._chunks_of(number, begin, end, inside)
                continue
            parts = [(box, _array(out, width, box, at - lo)) for box, at, _ in want.parts(lo, hi)]
            inside_of = (common for box, _ in parts if (common := have.common(box)) is not None)
            if ranges := [have.flat(common) for common in inside_of]:
                begin, end = min(ranges)[0], max(hi for _, hi in ranges)
                into = Scattered(have, begin * width, end * width, width, parts)
                chunks += [c for c in self._chunks_of(number, begin, end, into) if c.out]
        return chunks

    def read_chunks(self, chunks: Sequence[Chunk]) -> Iterator[int]:
        """Read the chunks, sorted by file and place; yield the wanted bytes of each call.

        **Raises** DamagedCheckpoint naming file, tensor and bytes; CheckpointError with the errno.
        """
        ordered = sorted(chunks, key=lambda c: (c.name, c.begin))
        at = 0
        while at < len(ordered):
            end = _end_of_run(ordered, at)
            run = ordered[at:end]
            first = run[0]
            is_one = len(run) == 1 and first.hi - first.lo == first.num_bytes
            if is_one and isinstance(first.out, memoryview):
                self._read_into(first, first.out)
                self._check(first, first.out)
            else:
                span = memoryview(bytearray(run[-1].begin + run[-1].num_bytes - first.begin))
                self._read_into(first, span)
                for chunk in run:
                    data = span[chunk.begin - first.begin :][: chunk.num_bytes]
                    self._check(chunk, data)
                    if chunk.out is not None:
                        chunk.out[:] = data[chunk.lo : chunk.hi]
            yield sum(chunk.hi - chunk.lo for chunk in run)
            at = end

    def open(self, name: str) -> Reader:
        """Return a file of the checkpoint, opened on first use; few are open at once."""
        if name not in self._readers:
            if len(self._readers) >= _OPEN_FILES:
                oldest = next(iter(self._readers))
                self._readers.pop(oldest).close()
            with reading(self.folder / name):
                self._readers[name] = self._files.open(self.folder / name)
            self.opened.add(name)
        return self._readers[name]

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    @cached_property
    def _own(self) -> dict[tuple[TensorInfo, Region], Extent]:
        """Buffers and optimizer tensors that the rank saved for itself, as ranks differ."""
        own = self._own_of(self.rank)
        return {(row.info, row.region): extent for row, extent in own if row.kind != "extra"}

    def _own_of(self, rank: int) -> list[tuple[OwnRow, Extent]]:
        own, extents = self.index_of(rank).own, self.extents_of(rank)
        first = len(self.manifest.tensors)
        return [(row, extents[number][0]) for number, row in enumerate(own, first)]

    def _chunks_of(
        self, number: int, lo: int, hi: int, out: memoryview | Scattered
    ) -> Iterator[Chunk]:
        """Yield the chunks around elements [lo, hi) of one row of the manifest."""
        if hi <= lo:
            return
        row, manifest = self.manifest.tensors[number], self.manifest
        width, ranks = element_bytes(row.dtype), [row.rank]
        if row.layout is not None:
            owners = owners_of(manifest.built_layouts[row.layout], row.index or 0, lo, hi)
            ranks = [manifest.writer_of(number, owner.rank) for owner in owners]
        for rank in ranks:
            for extent in self.extents_of(rank).get(number, ()):
                box = extent.box
                begin, end = max(box.lo, lo), min(box.hi, hi)
                if begin < end:
                    inside = out[(begin - lo) * width : (end - lo) * width]
                    bounds = (begin - box.lo) * width, (end - box.lo) * width
                    yield from chunks_in(extent, inside, *bounds)

    def _checked_index(self, rank: int, data: bytes) -> tuple[RankIndex, Extents]:
        name, manifest = index_name(rank), self.manifest
        where, expected = str(self.folder / name), manifest.ranks[rank]
        index = parse_index(data, where)
        if digest_of(data) != expected.digest and index.rank == rank:
            raise DamagedCheckpoint(
                f"{self.folder}: {MANIFEST} and {name} are whole and of two saves: step "
                f"{manifest.step} of run {manifest.run} and step {index.step} of run {index.run}. "
                "One of the two was copied there from another checkpoint"
            )
        for what, found, wanted in (
            ("run", index.run, manifest.run),
            ("step", index.step, manifest.step),
            ("rank", index.rank, rank),
            ("format", index.format, manifest.format),
            ("files", len(index.files), expected.num_files),
            ("bytes of files", sum(file.num_bytes for file in index.files), expected.file_bytes),
        ):
            if found != wanted:
                raise DamagedCheckpoint(f"{where}: it names {what} {found}, expected {wanted}")
        try:
            return index, find_extents(manifest, index)
        except ValueError as error:
            raise DamagedCheckpoint(f"{where}: {error}") from None

    def _fill(self, chunks: Sequence[Chunk]) -> None:
        for _ in self.read_chunks(chunks):
            pass

    def _read_into(self, first: Chunk, out: memoryview) -> None:
        """Fill memory with the bytes from a chunk's begin on, unchecked."""
        path = self.folder / first.name
        try:
            with reading(path):
                self.open(first.name).read_into(first.begin, out)
        except DamagedCheckpoint as error:
            cause = error.__cause__ or error
            raise DamagedCheckpoint(f"{error} (tensor '{first.key}')") from cause
        except OSError as error:
            text = f"{path}: tensor '{first.key}': {error.strerror} (errno {error.errno})"
            raise CheckpointError(text) from error
        self.num_bytes += len(out)

    def _check(self, chunk: Chunk, data: memoryview) -> None:
        if chunk_digest(data) != chunk.digest:
            raise DamagedCheckpoint(
                f"{self.folder / chunk.name}: tensor '{chunk.key}' is damaged in the bytes "
                f"{chunk.begin} to {chunk.begin + chunk.num_bytes} of the file"
            )


def optimizer_info(row: OptimizerRow, decode: Callable[[Any], object]) -> OptimizerInfo:
    """Return the optimizer's values as they were saved, through ``decode``.

    **Raises** DamagedCheckpoint when they are not an optimizer's groups and state.
    """
    groups, state = decode(row.groups), decode(row.state)

    def is_of(kind: type, value: object) -> bool:
        return isinstance(value, list) and all(isinstance(each, kind) for each in value)

    if isinstance(groups, list) and isinstance(state, dict) and is_of(dict, groups):
        of_groups = all(is_of(str, group.get("params")) for group in groups)
        if of_groups and is_of(str, list(state)) and is_of(dict, list(state.values())):
            return OptimizerInfo(row.class_name, tuple(groups), state)
    raise DamagedCheckpoint("the optimizer's groups or state are not those of an optimizer")


# -- chunks


class Chunk(NamedTuple):
    """A chunk of ``num_bytes`` at ``begin`` of a file; bytes [lo, hi) of it are wanted in ``out``.

    ``key`` names its tensor. Without ``out`` it is only checked.
    """

    name: str
    begin: int
    num_bytes: int
    digest: str
    key: str
    lo: int
    hi: int
    out: memoryview | Scattered | None


def chunks_in(
    extent: Extent,
    out: memoryview | Scattered | None = None,
    first: int = 0,
    last: int | None = None,
) -> Iterator[Chunk]:
    """Yield the chunks around bytes [first, last) of a box, which are wanted in ``out``."""
    num_bytes, key = extent.stored.end - extent.stored.begin, extent.key
    last = num_bytes if last is None else last
    for number in range(first // CHUNK_BYTES, num_chunks(last)):
        begin = number * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, num_bytes)
        lo, hi = max(begin, first), min(end, last)
        yield Chunk(
            extent.name,
            extent.stored.begin + begin,
            end - begin,
            extent.digests[number * DIGEST_CHARS : (number + 1) * DIGEST_CHARS],
            key,
            lo - begin,
            hi - begin,
            None if out is None else out[lo - first : hi - first],
        )


def _end_of_run(chunks: Sequence[Chunk], at: int) -> int:
    """Return the end of the run of adjacent small chunks that begins at ``at``."""
    first = last = chunks[at]
    end = at + 1
    while (
        end < len(chunks)
        and last.num_bytes <= _SMALL_BYTES >= chunks[end].num_bytes
        and chunks[end].name == first.name
        and chunks[end].begin == last.begin + last.num_bytes
        and last.begin + last.num_bytes - first.begin < CHUNK_BYTES
    ):
        last = chunks[end]
        end += 1
    return end


# -- pieces


@dataclass(frozen=True, slots=True)
class Scattered:
    """Bytes [first, last) of a saved piece, to be copied to the elements of boxes of another one.

    It is sliced and assigned like a memoryview of those bytes; bytes that are not wanted are left
    out. See Note [One piece into another].
    """

    have: Region
    first: int
    last: int
    width: int
    into: Sequence[tuple[Region, NDArray[np.generic]]]

    def __getitem__(self, part: slice) -> Scattered:
        """Return the target of some of the bytes."""
        begin, end, _ = part.indices(self.last - self.first)
        return replace(self, first=self.first + begin, last=self.first + end)

    def __setitem__(self, all_of_it: slice, data: memoryview) -> None:
        """Copy the bytes, which are whole elements, to their places."""
        for source, begin, target, ours, common in self._copies():
            theirs = _array(data, self.width, source, begin - self.first // self.width)
            ours[target.inside(common)] = theirs[source.inside(common)]

    def __bool__(self) -> bool:
        """Tell whether any element of it is wanted."""
        return any(True for _ in self._copies())

    def _copies(self) -> Iterator[tuple[Region, int, Region, NDArray[np.generic], Region]]:
        """Yield a box of the bytes and its place, a box of the target, and what both share."""
        for source, begin, _ in self.have.parts(self.first // self.width, self.last // self.width):
            for target, ours in self.into:
                if (common := source.common(target)) is not None:
                    yield source, begin, target, ours, common


def _array(data: memoryview, width: int, box: Region, first: int) -> NDArray[np.generic]:
    """Return the elements of a box, which are contiguous in ``data``, as an array."""
    import numpy as np

    return np.frombuffer(data, f"u{width}", box.numel, first * width).reshape(box.shape)
