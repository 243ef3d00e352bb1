"""What a checkpoint holds: the manifest, one index per rank; parsed with limits, sealed by digests.

Note [One manifest, one index per rank]
``manifest.json`` names every tensor with its shape and how it was cut, in integers: which rank
holds which elements is computed from that, never listed. What only one rank knows (digests of its
chunks, its generators, its part of the user's state) stands in its own index,
``rank00000.json``; the manifest holds the size and digest of each index. So ranks never collect
objects, and a reader opens the indexes of those ranks only whose tensors it needs.

A file ends with the digest of all that stands before it, which makes the manifest the seal of the
whole: manifest -> indexes -> headers and chunks.
"""

import reprlib
from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shardwise.checkpoint.container import element_bytes, is_dtype
from shardwise.checkpoint.sealed import (
    FORMAT,
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
from shardwise.layout.boxes import Box, boxes_of_range
from shardwise.layout.segments import Layout, build_layout

_MAX_BYTES = 1 << 40


class TensorRow(Part):
    """One tensor, and how it lies in the files.

    It is parameter ``index`` of ``layouts[layout]``, cut over the ranks; or, without a layout, it
    is whole in the files of ``rank``.
    """

    kind: Kind
    name: Name
    state: Name = ""
    dtype: Name
    shape: Shape
    layout: Count | None = None
    index: Count | None = None
    rank: Rank = 0

    @property
    def info(self) -> TensorInfo:
        """What the tensor is, without where it lies."""
        return TensorInfo(self.kind, self.name, self.dtype, self.shape, self.state)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not is_dtype(self.dtype):
            raise ValueError(f"dtype of '{self.name}': unknown {self.dtype!r}")
        # A size of 0 must not hide the others: torch computes strides from them.
        if prod(n or 1 for n in self.shape) * element_bytes(self.dtype) > _MAX_BYTES:
            raise ValueError(f"shape of '{self.name}': {self.shape} is more than a tensor can be")
        return self


class LayoutRow(Part):
    """The layout of one buffer: its kind and the shapes that lie in it."""

    kind: Literal["rows", "flat"]
    shapes: Rows[Shape]


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

    @property
    def num_ranks(self) -> int:
        """Number of ranks that wrote it."""
        return self.num_shards * self.num_replicas

    @cached_property
    def built_layouts(self) -> tuple[Layout, ...]:
        """The layouts, as the ranks that saved had them."""
        return tuple(build_layout(row.kind, row.shapes, self.num_shards) for row in self.layouts)

    def writer_of(self, number: int, shard_rank: int) -> int:
        """Return which rank wrote the part of tensor ``number`` that belongs to ``shard_rank``.

        Replicas take turns, so that each part is written once and all of them write.
        """
        return (number % self.num_replicas) * self.num_shards + shard_rank

    def boxes_of(self, number: int, rank: int) -> tuple[Box, ...]:
        """Return the boxes of tensor ``number`` that lie in the files of ``rank``."""
        row = self.tensors[number]
        if row.layout is None:
            return boxes_of_range(row.shape, 0, row.info.numel) if row.rank == rank else ()
        shard_rank = rank % self.num_shards
        if self.writer_of(number, shard_rank) != rank:
            return ()
        piece = self.built_layouts[row.layout].piece(row.index or 0, shard_rank)
        return boxes_of_range(row.shape, piece.lo, piece.hi)

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
        keys = set()
        for row in self.tensors:
            if row.layout is not None:
                shapes = self.layouts[row.layout].shapes if row.layout < len(self.layouts) else ()
                if row.index is None or row.index >= len(shapes) or shapes[row.index] != row.shape:
                    raise ValueError(f"tensors: '{row.name}' does not lie in its layout")
            elif row.rank >= self.num_ranks:
                raise ValueError(f"tensors: '{row.name}' is of rank {row.rank} of {self.num_ranks}")
            keys.add(row.info.key)
        if len(keys) != len(self.tensors):
            raise ValueError("tensors: two have one name")
        if self.ranks and len(self.ranks) != self.num_ranks:
            raise ValueError(f"ranks: {len(self.ranks)} rows for {self.num_ranks} ranks")
        num_bytes = sum(row.info.numel * element_bytes(row.dtype) for row in self.tensors)
        if self.ranks and num_bytes > sum(row.file_bytes for row in self.ranks):
            raise ValueError(f"tensors: they take {num_bytes} bytes, more than the files have")
        params = {row.name for row in self.tensors if row.kind == "param"}
        for name, holder in self.tied.items():
            if holder not in params or name in keys:
                raise ValueError(f"tied: '{name}' cannot be another name of '{holder}'")
        return self

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
    if type(found) is not int or found != FORMAT:
        raise CheckpointError(
            f"{where}: format {reprlib.repr(found)}; this version reads format {FORMAT}. It was "
            f"saved by shardwise {reprlib.repr(value.get('shardwise'))}; use that version or a "
            "newer one"
        )
    manifest: Manifest = validated(Manifest, value, where)
    if not manifest.ranks:
        raise DamagedCheckpoint(f"{where}: ranks: there are none")
    return manifest


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
