"""The JSON parts of a checkpoint: the manifest, and one index per rank.

docs/checkpoint-format.md describes their fields, and format 2 with its pieces and meshes. The
manifest says how each tensor is cut, in integers; which rank holds which elements is computed from
that, never listed. What only one rank knows (the digests of its chunks, its generators, its part of
the user's state) is in the rank's index. So ranks never collect objects, and a reader opens the
indexes of only those ranks that hold the tensors it needs. A part is used only after its digest is
checked.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from operator import add
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar
from zlib import crc32

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from shardwise.checkpoint.container import (
    DIGEST_CHARS,
    Stored,
    digest_of,
    element_bytes,
    is_dtype,
    num_chunks,
    place,
)
from shardwise.checkpoint.source import Kind, TensorInfo
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.layout.boxes import Box, Region, boxes_of_range, full_region
from shardwise.layout.segments import Layout, build_layout
from shardwise.strict_json import check_containers, dumps, loads

FORMAT, PIECES_FORMAT = 1, 2  # 2: of pieces, or of several meshes
MANIFEST = "manifest.json"
MAX_PART_BYTES = 256 << 20  # of a manifest or an index; parsing takes a few times as much memory
STEP = re.compile(r"step-([0-9]{8,12})")  # the name of a step's checkpoint
_MAX_TENSOR_BYTES = 1 << 40
_SEAL = b',"digest":"'
_SHOWN_CHARS = 200
_NAMES = re.compile(rf"rank[0-9]{{5,8}}(\.json|-[0-9]{{1,2}}\.safetensors)|{re.escape(MANIFEST)}")

Count = Annotated[int, Field(ge=0, lt=1 << 50, strict=True)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(max_length=4096)]
_T = TypeVar("_T")
Rows = Annotated[tuple[_T, ...], FailFast()]  # a million wrong rows are one error
_Format = Annotated[int, Field(ge=FORMAT, le=PIECES_FORMAT, strict=True)]
_NumFiles = Annotated[int, Field(ge=0, le=64, strict=True)]
_Rank = Annotated[int, Field(ge=0, lt=1 << 24, strict=True)]
_Shape = Annotated[tuple[Count, ...], Field(max_length=32)]
_Size = Annotated[int, Field(ge=1, lt=1 << 24, strict=True)]
_Stage = Annotated[int, Field(ge=0, le=3, strict=True)]


def index_name(rank: int) -> str:
    """Return the name of a rank's index."""
    return f"rank{rank:05d}.json"


def file_name(rank: int, number: int) -> str:
    """Return the name of a rank's file; it holds box ``number`` of each tensor."""
    return f"rank{rank:05d}-{number}.safetensors"


def is_ours(name: str) -> bool:
    """Tell whether a file of this name may be part of a checkpoint."""
    return _NAMES.fullmatch(name) is not None


# -- sealed JSON


class SealedPart(BaseModel):
    """A sealed JSON object or a row of one: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_PartT = TypeVar("_PartT", bound=SealedPart)


def seal(part: SealedPart) -> bytes:
    """Write a part as JSON, with the digest of all that precedes it as last key.

    **Raises** CheckpointError when it would be too large to be read.
    """
    body = dumps(part.model_dump(mode="json", exclude_defaults=True))[:-1]
    sealed = body + _SEAL + digest_of(body).encode() + b'"}\n'
    if len(sealed) > MAX_PART_BYTES:
        raise CheckpointError(
            f"names and values have {len(sealed)} bytes, at most {MAX_PART_BYTES} were expected; "
            "put large state into tensors (torch.from_numpy)"
        )
    try:
        check_containers(body)
    except ValueError as error:
        raise CheckpointError(f"names and values cannot be saved: {error}") from None
    return sealed


def unseal(data: bytes, where: str) -> Any:
    """Check the digest and return the JSON value without it. **Raises** DamagedCheckpoint."""
    body, mark, rest = data.rpartition(_SEAL)
    if not mark or rest != digest_of(body).encode() + b'"}\n':
        raise DamagedCheckpoint(f"{where}: it is damaged: its digest is not that of its content")
    try:
        return loads(body + b"}", where)
    except DamagedCheckpoint:
        raise
    except CheckpointError as error:
        raise DamagedCheckpoint(str(error)) from error


def validated(kind: type[_PartT], value: object, where: str) -> _PartT:
    """Return a JSON value as a part. **Raises** DamagedCheckpoint naming the wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))[:_SHOWN_CHARS]
        raise DamagedCheckpoint(f"{where}: {field}: {first['msg']}") from None


# -- the manifest


class Key(NamedTuple):
    """A tensor, or a piece of one, as all ranks that hold it identify it."""

    info: TensorInfo
    region: Region


class TensorRow(SealedPart):
    """One tensor, and where it is in the files.

    With a ``layout`` it is parameter ``index`` of ``layouts[layout]``, cut over the ranks. Without
    one it is whole in the files of ``rank``. With ``of`` the row is a piece: the box of this
    ``shape`` that begins at ``at`` in a tensor of shape ``of``.
    """

    kind: Kind
    name: Name
    state: Name = ""
    dtype: Name
    shape: _Shape
    layout: Count | None = None
    index: Count | None = None
    rank: _Rank = 0
    at: _Shape = ()
    of: _Shape = ()

    @classmethod
    @lru_cache(maxsize=1 << 15)  # some 2 KB each
    def of_piece(
        cls, info: TensorInfo, piece: Region, layout: int | None = None, index: int | None = None
    ) -> Self:
        """Return the row of a piece of a tensor, or of all; kept, as each save has the same."""
        row = {"kind": info.kind, "name": info.name, "state": info.state, "dtype": info.dtype}
        at = {} if piece.shape == info.shape else {"at": piece.at, "of": info.shape}
        return cls(**row, shape=piece.shape, layout=layout, index=index, **at)

    # Copies of a row may change its rank and layout only: they have these values too.
    @cached_property
    def info(self) -> TensorInfo:
        """The whole tensor's description."""
        return TensorInfo(self.kind, self.name, self.dtype, self.of or self.shape, self.state)

    @cached_property
    def region(self) -> Region:
        """The row's box in the whole tensor."""
        return Region(self.at, self.shape) if self.of else full_region(self.shape)

    @cached_property
    def key(self) -> Key:
        """What other ranks know it by."""
        return Key(self.info, self.region)

    @property
    def num_bytes(self) -> int:
        """Bytes of the row's elements."""
        return prod(self.shape) * element_bytes(self.dtype)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not is_dtype(self.dtype):
            raise ValueError(f"dtype of '{self.name}': unknown {self.dtype!r}")
        whole = self.of or self.shape
        # A size of 0 must not hide the others: torch computes strides from them.
        if prod(n or 1 for n in whole) * element_bytes(self.dtype) > _MAX_TENSOR_BYTES:
            raise ValueError(f"shape of '{self.name}': {whole} is more than a tensor can be")
        if len(self.at) != len(self.of) or (self.of and len(self.of) != len(self.shape)):
            raise ValueError(f"tensors: a piece of '{self.name}' has other dims than the tensor")
        if any(map(int.__gt__, map(add, self.at, self.shape), self.of)):
            raise ValueError(f"tensors: a piece of '{self.name}' is not inside the tensor")
        return self


class MeshRow(SealedPart):
    """Ranks that cut tensors together: ``ranks[replica][shard]``."""

    ranks: Rows[Rows[_Rank]]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Replica and shard of each rank."""
        return {rank: (r, s) for r, row in enumerate(self.ranks) for s, rank in enumerate(row)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = {len(row) for row in self.ranks}
        if len(sizes) != 1 or 0 in sizes or len(self.places) != len(self.ranks) * max(sizes):
            raise ValueError("a mesh is no table of ranks")
        return self


class LayoutRow(SealedPart):
    """One layout: its kind, the shapes of its tensors, and the number of the mesh that cuts it."""

    kind: Literal["rows", "flat"]
    shapes: Rows[_Shape]
    mesh: Count = 0


class OptimizerRow(SealedPart):
    """The optimizer's groups and state that are not tensors, as `values.encode` wrote them."""

    class_name: Name
    groups: Any
    state: Any


class IndexRow(SealedPart):
    """The size and digest of one rank's index, and how many files and bytes that rank wrote."""

    index_bytes: Count
    digest: Digest
    num_files: _NumFiles
    file_bytes: Count


class Content(NamedTuple):
    """One ``box`` of a tensor in a file of a rank, with its entry in the header.

    ``number`` counts the tensors of the manifest, and behind them the rank's own. Bytes count from
    the end of the header.
    """

    number: int
    box: Box
    stored: Stored


class Manifest(SealedPart):
    """The description of a whole checkpoint; its file is written last."""

    format: _Format
    shardwise: Name
    torch: Name
    run: Name
    step: Count | None
    saved_at: Name
    stage: _Stage
    num_shards: _Size
    num_replicas: _Size
    layouts: Rows[LayoutRow]
    tensors: Rows[TensorRow]
    tied: dict[Name, Name]
    optimizer: OptimizerRow | None
    ranks: Rows[IndexRow]

    meshes: Rows[MeshRow] = ()

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks that wrote it."""
        found = self.num_shards * self.num_replicas
        return max((1 + max(mesh.places) for mesh in self.meshes), default=found)

    @cached_property
    def tables(self) -> tuple[MeshRow, ...]:
        """The meshes; in format 1, the one mesh of all ranks."""
        size = self.num_shards
        rows = (tuple(range(r * size, (r + 1) * size)) for r in range(self.num_replicas))
        return self.meshes or (MeshRow(ranks=tuple(rows)),)

    @cached_property
    def built_layouts(self) -> tuple[Layout, ...]:
        """The layouts, as the ranks that saved had them."""
        sizes = [len(table.ranks[0]) for table in self.tables]
        return tuple(build_layout(row.kind, row.shapes, sizes[row.mesh]) for row in self.layouts)

    @cached_property
    def rows_of(self) -> dict[TensorInfo, tuple[int, ...]]:
        """The row numbers of each tensor, in the order of each tensor's first row."""
        found: dict[TensorInfo, list[int]] = {}
        for number, row in enumerate(self.tensors):
            found.setdefault(row.info, []).append(number)
        return {info: tuple(numbers) for info, numbers in found.items()}

    def turn_of(self, number: int) -> int:
        """Return which replica writes tensor ``number``, which is cut.

        Replicas take turns, so each part is written once and all ranks write.
        """
        row = self.tensors[number]
        num_replicas = len(self._mesh_of(row).ranks)
        return turn_of_key(row.info.key, num_replicas) if self.meshes else number % num_replicas

    def writer_of(self, number: int, shard_rank: int) -> int:
        """Return which rank wrote the part of tensor ``number`` that belongs to ``shard_rank``."""
        return self._mesh_of(self.tensors[number]).ranks[self.turn_of(number)][shard_rank]

    def boxes_of(self, number: int, rank: int) -> tuple[Box, ...]:
        """Return the boxes of tensor ``number`` in the files of ``rank``.

        ``offsets`` are in the whole tensor; elements [lo, hi) are those of the row's piece.
        """
        row = self.tensors[number]
        if row.layout is None:
            lo, hi = 0, prod(row.shape) if row.rank == rank else 0
        else:
            replica, shard = self._mesh_of(row).places.get(rank, (-1, 0))
            if replica != self.turn_of(number):
                return ()
            held = self.built_layouts[row.layout].piece(row.index or 0, shard)
            lo, hi = held.lo, held.hi
        # A parameter and its optimizer state are cut in the same way: computed once.
        same = row.shape, lo, hi
        boxes = self._boxes.get(same) or self._boxes.setdefault(same, boxes_of_range(*same))
        if not row.of:
            return boxes
        return tuple(replace(box, offsets=tuple(map(add, row.at, box.offsets))) for box in boxes)

    def all_boxes(self, rank: int) -> Iterator[tuple[int, int, Box]]:
        """Yield (tensor number, number of the box in its tensor, box) of one rank, in file order.

        Box n of a tensor is in file n of its rank. Wide dtypes come first, so every tensor is
        aligned to its elements.
        """
        by_width = sorted(
            range(len(self.tensors)), key=lambda n: -element_bytes(self.tensors[n].dtype)
        )
        for number in by_width:
            for file, box in enumerate(self.boxes_of(number, rank)):
                yield number, file, box

    def files_of(self, rank: int, own: Sequence[TensorRow]) -> list[list[Content]]:
        """Lay out the tensors in each file of a rank; those of its ``own`` end the first file."""
        asked = rank, tuple(own)
        if asked not in self._files:
            self._files.clear()  # the last answer is kept: the next copy in memory has it again
            self._files[asked] = self._lay_out(rank, own)
        return self._files[asked]

    def _lay_out(self, rank: int, own: Sequence[TensorRow]) -> list[list[Content]]:
        rows, num_shared = (*self.tensors, *own), len(self.tensors)
        files: dict[int, list[tuple[int, Box]]] = {}
        for number, file, box in self.all_boxes(rank):
            files.setdefault(file, []).append((number, box))
        for number, row in enumerate(own, num_shared):
            box = Box(row.region.at, row.shape, 0, prod(row.shape))
            files.setdefault(0, []).append((number, box))
        found = []
        for _, listed in sorted(files.items()):
            keys = [f"rank{rank:05d}." * (n >= num_shared) + rows[n].info.key for n, _ in listed]
            named = zip(keys, listed, strict=True)
            boxes = [(key, rows[n].dtype, box.lengths, box.offsets) for key, (n, box) in named]
            stored = zip(listed, place(boxes), strict=True)
            found.append([Content(number, box, each) for (number, box), each in stored])
        return found

    @cached_property
    def _files(self) -> dict[tuple[int, tuple[TensorRow, ...]], list[list[Content]]]:
        return {}

    @cached_property
    def _boxes(self) -> dict[tuple[tuple[int, ...], int, int], tuple[Box, ...]]:
        return {}

    def _mesh_of(self, row: TensorRow) -> MeshRow:
        return self.tables[self.layouts[row.layout or 0].mesh]

    @model_validator(mode="after")
    def _check(self) -> Self:
        # No number of a file is used before it is checked against the others, sealed or not.
        self._check_meshes()
        for row in self.tensors:
            if row.layout is not None:
                shapes = self.layouts[row.layout].shapes if row.layout < len(self.layouts) else ()
                if row.index is None or row.index >= len(shapes) or shapes[row.index] != row.shape:
                    raise ValueError(f"tensors: '{row.name}' does not lie in its layout")
            elif row.rank >= self.num_ranks:
                raise ValueError(f"tensors: '{row.name}' is of rank {row.rank} of {self.num_ranks}")
        keys = {info.key for info in self.rows_of}
        if len(keys) != len(self.rows_of):
            raise ValueError("tensors: two have one name")
        for info, numbers in self.rows_of.items():
            rows = [self.tensors[number] for number in numbers]
            has_pieces = any(row.of for row in rows)
            if len(rows) > 1 and not has_pieces:
                raise ValueError("tensors: two have one name")
            if has_pieces and not is_grid(info.shape, [row.region for row in rows]):
                raise ValueError(f"tensors: the pieces of '{info.key}' are not the whole tensor")
        if self.ranks and len(self.ranks) != self.num_ranks:
            raise ValueError(f"ranks: {len(self.ranks)} rows for {self.num_ranks} ranks")
        num_bytes = sum(row.num_bytes for row in self.tensors)
        if self.ranks and num_bytes > sum(row.file_bytes for row in self.ranks):
            raise ValueError(f"tensors: they take {num_bytes} bytes, more than the files have")
        params = {row.name for row in self.tensors if row.kind == "param"}
        for name, holder in self.tied.items():
            if holder not in params or name in keys:
                raise ValueError(f"tied: '{name}' cannot be another name of '{holder}'")
        return self

    def _check_meshes(self) -> None:
        found = {rank for mesh in self.meshes for rank in mesh.places}
        if self.meshes and len(found) != self.num_ranks:
            raise ValueError(f"meshes: {len(found)} of {self.num_ranks} ranks are in them")
        first = (self.num_replicas, self.num_shards)
        if self.meshes and (len(self.meshes[0].ranks), len(self.meshes[0].ranks[0])) != first:
            raise ValueError(f"meshes: the first is not {' x '.join(map(str, first))} ranks")
        if any(row.mesh >= max(len(self.meshes), 1) for row in self.layouts):
            raise ValueError("layouts: one is cut over a mesh that is not there")
        has_pieces = any(row.of for row in self.tensors)
        if (self.format == PIECES_FORMAT) != bool(self.meshes) or (has_pieces > bool(self.meshes)):
            raise ValueError(f"format: {self.format} does not fit the meshes and pieces in it")

    @field_validator("tied", mode="before")
    @classmethod
    def _check_tied(cls, tied: object) -> object:
        if isinstance(tied, dict) and not all(type(name) is str for name in tied.values()):
            raise ValueError("expected names")  # one error, however many are wrong
        return tied


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return a manifest from its file. **Raises** DamagedCheckpoint naming the wrong field."""
    value = unseal(data, where)
    found = value.get("format") if isinstance(value, dict) else FORMAT
    if type(found) is not int or found not in (FORMAT, PIECES_FORMAT):
        raise CheckpointError(
            f"{where}: format {reprlib.repr(found)}; this version reads formats {FORMAT} and "
            f"{PIECES_FORMAT}. It was saved by shardwise {reprlib.repr(value.get('shardwise'))}; "
            "use that version or a newer one"
        )
    manifest = validated(Manifest, value, where)
    if not manifest.ranks:
        raise DamagedCheckpoint(f"{where}: ranks: there are none")
    return manifest


def turn_of_key(key: str, num_replicas: int) -> int:
    """Return which replica writes the tensor of this key, in format 2.

    A rank knows it before it knows the tensors of other ranks.
    """
    return crc32(key.encode(errors="surrogatepass")) % num_replicas


def is_grid(of: tuple[int, ...], pieces: Sequence[Region]) -> bool:
    """Tell whether pieces of a tensor of shape ``of`` form a grid, with each element in one piece.

    Empty pieces are ignored. **Cost** O(pieces log pieces) for each dim.
    """
    filled = [piece for piece in pieces if piece.numel]
    if 0 in of:
        return not filled
    cells = 1
    for dim, size in enumerate(of):
        end = 0
        cuts = sorted({(piece.at[dim], piece.shape[dim]) for piece in filled})
        for at, count in cuts:
            if at != end:
                return False
            end += count
        if end != size:
            return False
        cells *= len(cuts)
    return len({piece.at for piece in filled}) == len(filled) == cells


# -- the index of a rank


class BoxRow(NamedTuple):
    """One box in the files of a rank: its tensor, its place, and the digests of its chunks.

    Its shape and its size are computed from the manifest.
    """

    tensor: Count
    file: _NumFiles
    begin: Count
    digests: str


class OwnRow(TensorRow):
    """A tensor of this rank alone, whole, with the digests of its chunks."""

    begin: Count
    digests: str


class FileRow(SealedPart):
    """One file of a rank: its size, and the digest of its header."""

    num_bytes: Count
    header: Digest


class RankIndex(SealedPart):
    """The description of one rank's files.

    ``values`` are the rank's generators and its part of the user's state. Boxes are JSON arrays, to
    keep an index small.
    """

    format: _Format
    run: Name
    step: Count | None
    rank: _Rank
    files: Rows[FileRow]
    boxes: Rows[BoxRow]
    own: Rows[OwnRow]
    values: dict[str, Any]


class Extent(NamedTuple):
    """One box of a tensor in the file ``name``, with the digests of its chunks.

    ``stored`` is its entry in the header; bytes count from the begin of the file.
    """

    name: str
    stored: Stored
    digests: str
    box: Box

    @property
    def key(self) -> str:
        """The tensor's name, without the rank to which it belongs alone."""
        return self.stored.key.removeprefix(f"{self.name.partition('-')[0]}.")


Extents = Mapping[int, Sequence[Extent]]  # by the number of the tensor, as in `Content`


def find_extents(manifest: Manifest, index: RankIndex) -> Extents:
    """Return the bytes of a rank's tensors, which must be those of the manifest.

    They stand in the order of `Manifest.files_of`, without a gap up to the end of each file.

    **Raises** ValueError naming the first tensor that is not described right.
    """
    whole = {row.info for row in manifest.tensors if row.layout is None} if index.own else ()
    for own in index.own:
        if own.kind != "extra" and own.info not in whole:
            raise ValueError(f"a rank cannot have its own '{own.name}'")
    if len({own.info.key for own in index.own}) != len(index.own):
        raise ValueError("one of its own tensors occurs twice")
    rows = [*index.boxes]
    for number, own in enumerate(index.own, len(manifest.tensors)):
        rows.append(BoxRow(number, 0, own.begin, own.digests))
    rows.sort(key=lambda row: row.file)
    files = manifest.files_of(index.rank, index.own)
    expected = [(c.number, file) for file, contents in enumerate(files) for c in contents]
    if len(files) != len(index.files) or [(row.tensor, row.file) for row in rows] != expected:
        raise ValueError("its tensors are not those that the manifest gives this rank")
    extents: dict[int, list[Extent]] = {}
    for file, contents in enumerate(files):
        name, of_file = file_name(index.rank, file), rows[: len(contents)]
        del rows[: len(contents)]
        for (number, box, stored), row in zip(contents, of_file, strict=True):
            begin, end = (of_file[0].begin + at for at in (stored.begin, stored.end))
            if row.begin != begin or len(row.digests) != num_chunks(end - begin) * DIGEST_CHARS:
                raise ValueError(f"{name}: '{stored.key}' is not described right")
            placed = stored._replace(begin=begin, end=end)
            extents.setdefault(number, []).append(Extent(name, placed, row.digests, box))
        if end != index.files[file].num_bytes:
            raise ValueError(f"{name} does not end with its last tensor")
    return extents


def parse_index(data: bytes, where: str) -> RankIndex:
    """Return a rank's index from its file. **Raises** DamagedCheckpoint naming the wrong field."""
    return validated(RankIndex, unseal(data, where), where)
