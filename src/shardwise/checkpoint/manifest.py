"""What a checkpoint holds: the manifest, one index per rank; parsed with limits, sealed by digests.

Note [One manifest, one index per rank]
``manifest.json`` names every tensor with its shape and how it was cut, in integers: which rank
holds which elements is computed from that, never listed. What only one rank knows (digests of its
chunks, its generators, its part of the user's state) stands in its own index,
``rank00000.json``; the manifest holds the size and digest of each index. So ranks never collect
objects, and a reader opens the indexes of those ranks only whose tensors it needs.

A file ends with the digest of all that stands before it, which makes the manifest the seal of the
whole: manifest -> indexes -> headers and chunks.

Note [Pieces and meshes]
~~~~~~~~~~~~~~~~~~~~~~~~
Where all ranks cut whole tensors together, the checkpoint is of format 1 and has no word of this.
With tensor, expert or pipeline parallelism, groups of ranks cut what others do not have. Then the
format is 2: ``meshes`` are tables of ranks, a layout says over which of them it cuts, and a row may
be a *piece*: the box that begins at ``at`` of a tensor of shape ``of``, which is cut as a tensor of
its own. The rows of one key are a grid, in which each element stands once. Of several groups that
hold a piece, one is named, and of its replicas the key chooses one: each rank knows that of its own
tensors before it knows those of the others.
"""

import reprlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import prod
from operator import add
from typing import Annotated, Any, Literal, Self
from zlib import crc32

from pydantic import Field, field_validator, model_validator

from shardwise.checkpoint.container import element_bytes, is_dtype
from shardwise.checkpoint.pieces import is_grid
from shardwise.checkpoint.sealed import (
    FORMAT,
    PIECES_FORMAT,
    Count,
    Digest,
    Format,
    Name,
    Part,
    Rank,
    Rows,
    Shape,
    unseal,
    validated,
)
from shardwise.checkpoint.source import Kind, OptimizerInfo, TensorInfo
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.layout.boxes import Box, Region, boxes_of_range, full_region
from shardwise.layout.segments import Layout, build_layout

_MAX_BYTES = 1 << 40


class TensorRow(Part):
    """One tensor, and how it lies in the files.

    It is parameter ``index`` of ``layouts[layout]``, cut over the ranks; or, without a layout, it
    is whole in the files of ``rank``. With ``of`` it is a piece: the box of this ``shape`` that
    begins at ``at`` of a tensor of that shape.
    """

    kind: Kind
    name: Name
    state: Name = ""
    dtype: Name
    shape: Shape
    layout: Count | None = None
    index: Count | None = None
    rank: Rank = 0
    at: Shape = ()
    of: Shape = ()

    @property
    def info(self) -> TensorInfo:
        """What the whole tensor is, without where it lies."""
        return TensorInfo(self.kind, self.name, self.dtype, self.of or self.shape, self.state)

    @property
    def region(self) -> Region:
        """The box of the whole tensor that this row is."""
        return Region(self.at, self.shape) if self.of else full_region(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * element_bytes(self.dtype)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not is_dtype(self.dtype):
            raise ValueError(f"dtype of '{self.name}': unknown {self.dtype!r}")
        whole = self.of or self.shape
        # A size of 0 must not hide the others: torch computes strides from them.
        if prod(n or 1 for n in whole) * element_bytes(self.dtype) > _MAX_BYTES:
            raise ValueError(f"shape of '{self.name}': {whole} is more than a tensor can be")
        if len(self.at) != len(self.of) or (self.of and len(self.of) != len(self.shape)):
            raise ValueError(f"tensors: a piece of '{self.name}' has other dims than the tensor")
        if any(map(int.__gt__, map(add, self.at, self.shape), self.of)):
            raise ValueError(f"tensors: a piece of '{self.name}' is not inside the tensor")
        return self


class MeshRow(Part):
    """Ranks that cut tensors together: ``ranks[replica][shard]``."""

    ranks: Rows[Rows[Rank]]

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


class LayoutRow(Part):
    """The layout of one buffer: its kind, the shapes that lie in it, and which mesh cuts it."""

    kind: Literal["rows", "flat"]
    shapes: Rows[Shape]
    mesh: Count = 0


class OptimizerRow(Part):
    """What the optimizer has beside tensors; values as `values.encode` wrote them."""

    class_name: Name
    groups: Any
    state: Any


class IndexRow(Part):
    """What the manifest says of one rank: its index, and how much its files hold."""

    index_bytes: Count
    digest: Digest
    num_files: Annotated[int, Field(ge=0, le=64, strict=True)]
    file_bytes: Count


class Manifest(Part):
    """What a checkpoint holds; the last file that is written."""

    format: Format
    shardwise: Name
    torch: Name
    run: Name
    step: Count | None
    saved_at: Name
    stage: Annotated[int, Field(ge=0, le=3, strict=True)]
    num_shards: Annotated[int, Field(ge=1, lt=1 << 24, strict=True)]
    num_replicas: Annotated[int, Field(ge=1, lt=1 << 24, strict=True)]
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
    def built_layouts(self) -> tuple[Layout, ...]:
        """The layouts, as the ranks that saved had them."""
        sizes = [len(mesh.ranks[0]) for mesh in self.meshes] or [self.num_shards]
        return tuple(build_layout(row.kind, row.shapes, sizes[row.mesh]) for row in self.layouts)

    def turn_of(self, number: int) -> int:
        """Return which replica writes tensor ``number``, which is cut.

        Replicas take turns, so that each part is written once and all of them write.
        """
        row = self.tensors[number]
        if not self.meshes:
            return number % self.num_replicas
        return turn_of_key(row.info.key, len(self._mesh_of(row).ranks))

    def writer_of(self, number: int, shard_rank: int) -> int:
        """Return which rank wrote the part of tensor ``number`` that belongs to ``shard_rank``."""
        turn = self.turn_of(number)
        if not self.meshes:
            return turn * self.num_shards + shard_rank
        return self._mesh_of(self.tensors[number]).ranks[turn][shard_rank]

    def boxes_of(self, number: int, rank: int) -> tuple[Box, ...]:
        """Return the boxes of tensor ``number`` that lie in the files of ``rank``.

        ``offsets`` are in the whole tensor, elements [lo, hi) are those of the row's piece.
        """
        row = self.tensors[number]
        if row.layout is None:
            lo, hi = 0, prod(row.shape) if row.rank == rank else 0
        else:
            replica, shard = divmod(rank, self.num_shards)
            if self.meshes:
                replica, shard = self._mesh_of(row).places.get(rank, (-1, 0))
            if replica < 0 or self.turn_of(number) != replica:
                return ()
            held = self.built_layouts[row.layout].piece(row.index or 0, shard)
            lo, hi = held.lo, held.hi
        boxes = boxes_of_range(row.shape, lo, hi)
        if not row.of:
            return boxes
        return tuple(replace(box, offsets=tuple(map(add, row.at, box.offsets))) for box in boxes)

    def _mesh_of(self, row: TensorRow) -> MeshRow:
        return self.meshes[self.layouts[row.layout or 0].mesh]

    @cached_property
    def rows_of(self) -> dict[TensorInfo, tuple[int, ...]]:
        """The numbers of the rows that each tensor is made of, in the order of the first ones."""
        found: dict[TensorInfo, list[int]] = {}
        for number, row in enumerate(self.tensors):
            found.setdefault(row.info, []).append(number)
        return {info: tuple(numbers) for info, numbers in found.items()}

    def all_boxes(self, rank: int) -> Iterator[tuple[int, int, Box]]:
        """Yield (tensor number, number of the box in its tensor, box) of one rank, in file order.

        The n-th box of a tensor lies in the n-th file of its rank; wide dtypes come first, so that
        every tensor is aligned to its own elements.
        """
        by_width = sorted(
            range(len(self.tensors)), key=lambda n: -element_bytes(self.tensors[n].dtype)
        )
        for number in by_width:
            for place, box in enumerate(self.boxes_of(number, rank)):
                yield number, place, box

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Sealed or not, no number of a file is used before it was checked against the others.
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
            if len(rows) > 1 and not any(row.of for row in rows):
                raise ValueError("tensors: two have one name")
            if any(row.of for row in rows) and not is_grid(
                info.shape, [row.region for row in rows]
            ):
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
    def _check_tied(cls, tied: Any) -> Any:
        if isinstance(tied, dict) and not all(type(name) is str for name in tied.values()):
            raise ValueError("expected names")  # one error, however many are wrong
        return tied


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest. **Raises** DamagedCheckpoint naming what is wrong."""
    value = unseal(data, where)
    found = value.get("format") if isinstance(value, dict) else FORMAT
    if type(found) is not int or found not in (FORMAT, PIECES_FORMAT):
        raise CheckpointError(
            f"{where}: format {reprlib.repr(found)}; this version reads formats {FORMAT} and "
            f"{PIECES_FORMAT}. It was saved by shardwise {reprlib.repr(value.get('shardwise'))}; "
            "use that version or a newer one"
        )
    manifest: Manifest = validated(Manifest, value, where)
    if not manifest.ranks:
        raise DamagedCheckpoint(f"{where}: ranks: there are none")
    return manifest


def turn_of_key(key: str, num_replicas: int) -> int:
    """Return which replica writes the tensor of this key, in format 2."""
    return crc32(key.encode(errors="surrogatepass")) % num_replicas


def optimizer_info(row: OptimizerRow, decode: Any) -> OptimizerInfo:
    """Return the optimizer's values as they were, through ``decode``.

    **Raises** DamagedCheckpoint when they are none of an optimizer.
    """
    groups, state = decode(row.groups), decode(row.state)
    if not (
        isinstance(groups, list)
        and all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups)
        and isinstance(state, dict)
        and _are_names(list(state))
        and all(isinstance(of_param, dict) for of_param in state.values())
    ):
        raise DamagedCheckpoint("the optimizer's groups or state are not those of an optimizer")
    return OptimizerInfo(row.class_name, tuple(groups), state)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
