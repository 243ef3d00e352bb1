"""Read one checkpoint: only the bytes that are asked for, each chunk checked before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.chunks import Chunk, ChunkReader
from shardwise.checkpoint.container import element_bytes, memory_of, torch_dtype
from shardwise.checkpoint.digest import CHUNK_BYTES, DIGEST_CHARS, digest_of, num_chunks
from shardwise.checkpoint.files import Files, is_unreadable
from shardwise.checkpoint.manifest import Manifest, optimizer_info, parse_manifest
from shardwise.checkpoint.pieces import Scattered, spans
from shardwise.checkpoint.rank_index import (
    BoxPlace,
    OwnRow,
    RankIndex,
    check_index,
    parse_index,
    two_saves,
)
from shardwise.checkpoint.sealed import MANIFEST, MAX_PART_BYTES, file_name, index_name
from shardwise.checkpoint.source import OptimizerInfo, TensorInfo
from shardwise.errors import DamagedCheckpoint
from shardwise.layout.boxes import Box, Overlap, Region, full_region, owners_of

if TYPE_CHECKING:
    import torch

_VALUES = ("extra", "modules", "generators")


def read_small(files: Files, path: Path) -> bytes:
    """Return the bytes of a manifest or an index.

    **Raises** DamagedCheckpoint if it is missing, no regular file, lost by the disk or not for this
    user to read; OSError where the disk does not answer.
    """
    try:
        with files.open(path) as reader:
            if reader.size > MAX_PART_BYTES:
                raise DamagedCheckpoint(f"{path}: {reader.size} bytes are too many for its kind")
            return reader.read(0, reader.size)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{path}: it is missing") from None
    except OSError as error:
        if is_unreadable(error):
            raise DamagedCheckpoint(f"{path}: {error.strerror} (errno {error.errno})") from error
        raise


class Checkpoint:
    """One checkpoint of ours, as a `Source`; opens what it needs when it needs it.

    ``rank`` is the saved rank whose own state is read, where ranks differ.
    """

    def __init__(
        self, files: Files, folder: Path, manifest: Manifest | None = None, rank: int = 0
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.where = str(folder)
        self._files = files
        self._reader = ChunkReader(files, folder)
        if manifest is None:
            manifest = parse_manifest(read_small(files, folder / MANIFEST), str(folder / MANIFEST))
        self.manifest = manifest
        self._indexes: dict[int, RankIndex] = {}
        self._cuts: dict[tuple[int | None, ...], list[tuple[int, int, Box, int, int]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes read so far, the manifest left out."""
        return self._reader.num_bytes

    @property
    def opened(self) -> set[str]:
        """The files that were opened so far, the manifest left out."""
        return self._reader.opened

    # -- checkpoint.source.Source
    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Every tensor, in the manifest's order."""
        return tuple(self.manifest.rows_of)

    @property
    def step(self) -> int | None:
        """The optimizer step it was saved at."""
        return self.manifest.step

    @property
    def tied(self) -> Mapping[str, str]:
        """Further names of shared parameters."""
        return self.manifest.tied

    @cached_property
    def optimizer(self) -> OptimizerInfo | None:
        """The optimizer's groups and values."""
        from shardwise.checkpoint.values import decode

        row = self.manifest.optimizer
        if row is None:
            return None
        own = {i.state: i for i in self.tensors if i.kind == "optimizer" and not i.name}

        def tensor(place: str) -> torch.Tensor:
            info = own.pop(place, None)  # each stands in one place only
            if info is None:
                raise DamagedCheckpoint(f"{self.where}: the optimizer's '{place}' is missing")
            return self.read(info, 0, info.numel).view(info.shape)

        return optimizer_info(row, lambda value: decode(value, tensor))

    @property
    def extra(self) -> Mapping[str, Any]:
        """The user's own state, as this rank saved it."""
        return self.values_of(self.rank)["extra"]

    @cached_property
    def _own(self) -> dict[tuple[TensorInfo, Region], OwnRow]:
        """Buffers and optimizer tensors of which this rank had one of its own."""
        own = self.index_of(self.rank).own
        return {(row.info, row.region): row for row in own if row.kind != "extra"}

    def read(
        self, tensor: TensorInfo, lo: int, hi: int, piece: Region | None = None
    ) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, or of a piece of it, on the CPU."""
        import torch

        out = torch.empty(hi - lo, dtype=torch_dtype(tensor.dtype), device="cpu")
        self._read(self.chunks(tensor, lo, hi, memory_of(out), piece))
        return out

    def is_cut(self, tensor: TensorInfo) -> bool:
        """Tell whether the ranks that saved held slices of it; else it was whole on each."""
        return self.manifest.tensors[self.manifest.rows_of[tensor][0]].layout is not None

    def ranges(self, tensor: TensorInfo, piece: Region) -> tuple[tuple[int, int], ...]:
        """Return the elements [lo, hi) of a piece that each rank of one replica worked on.

        Those of the ranks that saved it; nothing if they had other pieces.
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

    @property
    def is_imported(self) -> bool:
        """Tell whether it was written whole, from a checkpoint of somebody else."""
        return not self.manifest.layouts

    # -- what a rank reads
    def chunks(
        self,
        tensor: TensorInfo,
        lo: int,
        hi: int,
        out: memoryview,
        piece: Region | None = None,
    ) -> list[Chunk]:
        """List what must be read to fill ``out`` with the bytes of elements [lo, hi).

        They are elements of the flattened ``piece``, which is the whole tensor if none is given.

        **Cost** at most two chunks more than was asked for, from the files of those ranks only that
        hold some of it; opens the indexes of those ranks. For pieces that were saved as others: see
        Note [One piece into another].
        """
        want, width = piece or full_region(tensor.shape), element_bytes(tensor.dtype)
        if self._own and (tensor, want) in self._own:
            return _chunks_of_own(self.rank, self._own[tensor, want], lo, hi, out)
        chunks: list[Chunk] = []
        for number in self.manifest.rows_of[tensor]:
            have = self.manifest.tensors[number].region
            shift = have.shift_from(want)
            if shift is not None:
                begin, end = max(lo - shift, 0), min(hi - shift, have.numel)
                inside = out[(begin + shift - lo) * width : (end + shift - lo) * width]
                chunks += self._chunks_of(number, begin, end, inside)
            elif found := spans(have, want, lo, hi):
                begin, end = found
                into = Scattered(have, begin * width, end * width, want, lo, out, width)
                chunks += [c for c in self._chunks_of(number, begin, end, into) if c.out]
        return chunks

    def _chunks_of(
        self, number: int, lo: int, hi: int, out: memoryview | Scattered
    ) -> Iterator[Chunk]:
        """Yield the chunks around elements [lo, hi) of one row of the manifest."""
        row = self.manifest.tensors[number]
        width = element_bytes(row.dtype)
        for rank, place, box, begin, end in self._parts(number, lo, hi):
            found = self._find(number, place, box, rank)
            yield from _chunks(
                file_name(rank, place),
                row.info.key,
                found,
                (box.hi - box.lo) * width,
                (begin - box.lo) * width,
                (end - box.lo) * width,
                out[(begin - lo) * width : (end - lo) * width],
            )

    def _parts(self, number: int, lo: int, hi: int) -> list[tuple[int, int, Box, int, int]]:
        """Return (rank, file, box, begin, end) for each box that has some of elements [lo, hi)."""
        row, manifest = self.manifest.tensors[number], self.manifest
        # A parameter and its optimizer state are cut alike.
        if hi <= lo:
            return []
        turn = manifest.turn_of(number) if row.layout is not None else None
        same = (row.layout, row.index, turn, lo, hi)
        if row.layout is not None and same in self._cuts:
            return self._cuts[same]
        if row.layout is None:
            owners = [Overlap(row.rank, lo, hi)]
        else:
            layout = manifest.built_layouts[row.layout]
            owners = [
                Overlap(manifest.writer_of(number, o.rank), o.lo, o.hi)
                for o in owners_of(layout, row.index or 0, lo, hi)
            ]
        self._cuts[same] = [
            (owner.rank, place, box, max(box.lo, owner.lo), min(box.hi, owner.hi))
            for owner in owners
            for place, box in enumerate(manifest.boxes_of(number, owner.rank))
            if max(box.lo, owner.lo) < min(box.hi, owner.hi)
        ]
        return self._cuts[same]

    def read_chunks(self, chunks: Sequence[Chunk]) -> Iterator[int]:
        """Read and check chunks; yield bytes as they come. **Raises** DamagedCheckpoint."""
        return self._reader.read(chunks)

    def index_of(self, rank: int) -> RankIndex:
        """Return the index of a rank, read and checked on first use."""
        if rank not in self._indexes:
            name = index_name(rank)
            path = self.folder / name
            data = read_small(self._files, path)
            self._reader.opened.add(name)
            self._reader.num_bytes += len(data)
            expected = self.manifest.ranks[rank]
            if len(data) != expected.index_bytes or digest_of(data) != expected.digest:
                found = two_saves(self.manifest, rank, data)
                text = f"{path}: it is not the one that the manifest names"
                raise DamagedCheckpoint(f"{self.folder}: {found}" if found else text)
            index = parse_index(data, str(path))
            check_index(self.manifest, rank, index, str(path))
            self._indexes[rank] = index
        return self._indexes[rank]

    def values_of(self, rank: int) -> dict[str, Any]:
        """Return the values of a rank, decoded, with their tensors."""
        import torch

        from shardwise.checkpoint.values import decode

        index = self.index_of(rank)
        own = {row.name: row for row in index.own if row.kind == "extra"}
        where = str(self.folder / index_name(rank))

        def tensor(place: str) -> torch.Tensor:
            row = own.pop(place, None)  # each stands in one place only
            if row is None:
                raise DamagedCheckpoint(f"{where}: there is no tensor '{place}', or not twice")
            out = torch.empty(row.shape, dtype=torch_dtype(row.dtype), device="cpu")
            self._read(_chunks_of_own(rank, row, 0, row.region.numel, memory_of(out)))
            return out

        values = {key: decode(value, tensor) for key, value in index.values.items()}
        wrong = [k for k in _VALUES if not isinstance(values.setdefault(k, {}), dict)]
        if wrong:
            raise DamagedCheckpoint(f"{where}: there are no values under '{wrong[0]}'")
        if own:
            raise DamagedCheckpoint(f"{where}: no value has the tensor '{next(iter(own))}'")
        return values

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def _read(self, chunks: Sequence[Chunk]) -> None:
        for _ in self._reader.read(chunks):
            pass

    def _find(self, number: int, place: int, box: Box, rank: int) -> BoxPlace:
        """Return where a box lies. **Raises** DamagedCheckpoint if it is not there in its size."""
        row = self.manifest.tensors[number]
        found = self.index_of(rank).box_places.get((number, place))
        expected = (box.hi - box.lo) * element_bytes(row.dtype)
        if found is None or found.end - found.begin != expected:
            raise DamagedCheckpoint(
                f"{self.folder / index_name(rank)}: tensor '{row.name}' is cut otherwise than the "
                f"manifest says: expected {expected} bytes for {box}, got {found}"
            )
        return found


def _chunks(
    name: str,
    key: str,
    box: BoxPlace | OwnRow,
    box_bytes: int,
    first: int,
    last: int,
    out: memoryview | Scattered,
) -> Iterator[Chunk]:
    """Yield the chunks around bytes [first, last) of a box of ``box_bytes`` in file ``name``."""
    digests = box.digests
    if len(digests) != num_chunks(box_bytes) * DIGEST_CHARS:
        raise DamagedCheckpoint(f"{name}: tensor '{key}' has not one digest for each chunk")
    for number in range(first // CHUNK_BYTES, num_chunks(last)):
        begin = number * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, box_bytes)
        lo, hi = max(begin, first), min(end, last)
        yield Chunk(
            name,
            box.begin + begin,
            end - begin,
            digests[number * DIGEST_CHARS : (number + 1) * DIGEST_CHARS],
            key,
            lo - begin,
            hi - begin,
            out[lo - first : hi - first],
        )


def _chunks_of_own(rank: int, row: OwnRow, lo: int, hi: int, out: memoryview) -> list[Chunk]:
    if hi <= lo:
        return []
    name, width = file_name(rank, 0), element_bytes(row.dtype)
    key, size = row.info.key, row.num_bytes
    return list(_chunks(name, key, row, size, lo * width, hi * width, out))
