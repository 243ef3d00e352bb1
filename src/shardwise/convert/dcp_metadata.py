"""The ``.metadata`` of a torch.distributed.checkpoint folder, read as data and checked.

What comes out is a table of tensors and values with the place of each of their pieces. Before it
is used, everything is held against everything: pieces lie inside their tensor, cover each element
once, are in a file of this very folder, inside of that file, and do not share bytes.
"""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shardwise.convert.foreign import is_plain_name
from shardwise.convert.plain_names import PLAIN
from shardwise.convert.torch_file import open_file
from shardwise.convert.torch_names import DTYPES
from shardwise.convert.unpickle import MAX_PICKLE_BYTES, Builder, Made, Name, read_pickle
from shardwise.errors import CheckpointError, DamagedCheckpoint

METADATA = ".metadata"
_MAX_INDEX = 1 << 50
_MAX_DIMS = 64
_BYTES_PER_PART = 16  # of the table, at the least
_FREE_COMPARES, _COMPARES_PER_CHUNK = 1_000_000, 100
_PREFIX = "torch.distributed.checkpoint."
_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _STORAGE = (
    _PREFIX + name
    for name in (
        "metadata.Metadata",
        "metadata.TensorStorageMetadata",
        "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata",
        "metadata.TensorProperties",
        "metadata.MetadataIndex",
        "filesystem._StorageInfo",
    )
)


def _sizes(sizes: Any = ()) -> tuple[int, ...]:
    if len(sizes) > _MAX_DIMS or not all(type(n) is int and 0 <= n < _MAX_INDEX for n in sizes):
        raise ValueError(f"a size was expected, {reprlib.repr(sizes)} came")
    return tuple(sizes)


_NAMES: Mapping[str, Builder | None] = {
    **PLAIN,
    **dict.fromkeys((_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _STORAGE)),
    **dict.fromkeys(DTYPES),
    _PREFIX + "metadata.StorageMeta": None,
    _PREFIX + "metadata._MEM_FORMAT_ENCODING": None,
    "torch.serialization._get_layout": None,
    "torch.Size": _sizes,
    # Layouts and dtypes that are described but cannot be read: refused with their tensor's name.
    "torch.float8_e4m3fnuz": None,
    "torch.float8_e5m2fnuz": None,
    "torch.float8_e8m0fnu": None,
    "torch.float4_e2m1fn_x2": None,
    "torch.complex32": None,
    "torch.complex128": None,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [begin, begin + length) of a file of the folder: one stream of torch.save."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, saved as a tensor of its own."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor: its dtype (safetensors spelling), its shape, its boxes."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a folder holds, by flattened key; ``paths`` are the keys before they were flattened."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Place]
    paths: Mapping[str, tuple[str | int, ...]]


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Read and check the table of a folder.

    **Raises** CheckpointError when it is no such folder, or names what it must not: a class, a
    path out of the folder; DamagedCheckpoint when a piece of a tensor is missing or cut short.
    """
    path = folder / METADATA
    if not folder.is_dir() or not path.exists():
        raise CheckpointError(
            f"{folder}: expected a folder written by torch.distributed.checkpoint, with a "
            f"'{METADATA}' file in it; there is none. Give the folder of one checkpoint; a save "
            "that did not end leaves no such file"
        )
    with open_file(path) as reader:
        if reader.size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"{path}: {reader.size} bytes; at most {MAX_PICKLE_BYTES} fit")
        data = reader.read(0, reader.size)
    tree = read_pickle(data, str(path), _NAMES)
    try:
        metadata = _Table(folder, tree, len(data)).read()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{path}: not a table as torch.distributed.checkpoint writes it: "
            f"{type(error).__name__} {error}"
        ) from None
    _check_files(folder, metadata)
    return metadata


class _Table:
    """The tree of one ``.metadata``, taken apart."""

    def __init__(self, folder: Path, tree: Any, num_bytes: int) -> None:
        self._folder = folder
        self._where = str(folder / METADATA)
        self._tree = _made(tree, _METADATA)
        self._compares_left = _FREE_COMPARES
        self._parts_left = num_bytes // _BYTES_PER_PART
        self._places: dict[tuple[str, tuple[int, ...] | None], Place] = {}

    def read(self) -> DcpMetadata:
        for index, info in self._tree.field("storage_data").items():
            key, offset = _text(_made(index, _INDEX).field("fqn")), index.field("offset")
            self._places[key, None if offset is None else _sizes(offset)] = self._place(key, info)
        tensors, values = {}, {}
        for key, entry in self._tree.field("state_dict_metadata").items():
            if entry.name == _BYTES:
                values[_text(key)] = self._find(key, None)
            else:
                tensors[_text(key)] = self._tensor(key, _made(entry, _TENSOR))
        paths = self._tree.field("planner_data")
        known = {key: _path(path) for key, path in paths.items()} if paths else {}
        return DcpMetadata(tensors, values, {k: known.get(k, (k,)) for k in (*tensors, *values)})

    def _place(self, key: str, info: Any) -> Place:
        info = _made(info, _STORAGE)
        name = _text(info.field("relative_path"))
        if not is_plain_name(name):
            raise CheckpointError(
                f"{self._where}: '{key}' is said to be in {name!r}, which is no plain file name of "
                "this folder: nothing outside of it is read"
            )
        if info.field("transform_descriptors"):
            raise CheckpointError(
                f"{self._folder / name}: '{key}' was compressed or encrypted by an extension of "
                "the writer, which cannot be undone here; save it again without"
            )
        begin, length = _sizes((info.field("offset"), info.field("length")))
        return Place(name, begin, length)

    def _find(self, key: str, offset: tuple[int, ...] | None) -> Place:
        if (key, offset) not in self._places:
            at = "" if offset is None else f", its part at {offset}"
            raise DamagedCheckpoint(f"{self._where}: '{key}'{at} is in no file of the folder")
        return self._places[key, offset]

    def _tensor(self, key: str, entry: Made) -> DcpTensor:
        properties = _made(entry.field("properties"), _PROPERTIES).state
        named = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        if not isinstance(named, Name) or named.text not in DTYPES:
            name = named.text if isinstance(named, Name) else reprlib.repr(named)
            raise CheckpointError(f"{self._where}: '{key}' has dtype {name}, which cannot be read")
        shape = _sizes(entry.field("size"))
        chunks = []
        for chunk in entry.field("chunks"):
            self._parts_left -= 1  # one list may stand in many tensors, or one part often in a list
            if self._parts_left < 0:
                raise CheckpointError(
                    f"{self._where}: it names more parts of tensors than it has room to describe: "
                    "the file is damaged or hostile"
                )
            offsets = _sizes(_made(chunk, _CHUNK).field("offsets"))
            lengths = _sizes(chunk.field("sizes"))
            ends = zip(offsets, lengths, shape, strict=True)
            if any(offset + length > size for offset, length, size in ends):
                raise DamagedCheckpoint(
                    f"{self._where}: '{key}' of shape {shape} has a part at {offsets} of "
                    f"{lengths}, outside of it"
                )
            if prod(lengths):
                chunks.append(Chunk(offsets, lengths, self._find(key, offsets)))
        self._check_cover(key, shape, chunks)
        return DcpTensor(DTYPES[named.text], shape, tuple(chunks))

    def _check_cover(self, key: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
        """Boxes that lie inside, do not overlap and have all elements together cover all."""
        covered = sum(prod(chunk.lengths) for chunk in chunks)
        if covered < prod(shape):
            files = ", ".join(sorted({chunk.place.file for chunk in chunks})) or "no file"
            raise DamagedCheckpoint(
                f"{self._where}: only {covered} of {prod(shape)} elements of '{key}' are there, in "
                f"{files}: parts of it were not saved, or a rank's file is missing"
            )
        self._compares_left += _COMPARES_PER_CHUNK * len(chunks)
        overlap, num_compares = _overlap(chunks, self._compares_left)
        self._compares_left -= num_compares
        if self._compares_left < 0:
            raise CheckpointError(
                f"{self._where}: '{key}' is cut into {len(chunks)} parts in such a way that it "
                "takes too long to see that none overlap; save it again, with parts in a grid"
            )
        if covered > prod(shape) or overlap:
            raise DamagedCheckpoint(f"{self._where}: parts of '{key}' overlap")


def _overlap(chunks: list[Chunk], max_compares: int) -> tuple[bool, int]:
    """Tell whether two boxes share an element, and how many comparisons that took, more or less.

    Swept along the dim that is cut most; given up after ``max_compares``.
    """
    num_dims = len(chunks[0].offsets) if chunks else 0
    if len(chunks) < 2 or not num_dims:
        return len(chunks) > 1, 0
    num_compares = 0
    dim = max(range(num_dims), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    open_boxes: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[dim]):
        num_compares += len(open_boxes)
        if num_compares > max_compares:
            break
        at = chunk.offsets[dim]
        open_boxes = [c for c in open_boxes if c.offsets[dim] + c.lengths[dim] > at]
        if any(_meet(chunk, other) for other in open_boxes):
            return True, num_compares
        open_boxes.append(chunk)
    return False, num_compares


def _meet(a: Chunk, b: Chunk) -> bool:
    sides = zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    return all(ao < bo + bl and bo < ao + al for ao, al, bo, bl in sides)


def _check_files(folder: Path, metadata: DcpMetadata) -> None:
    """Hold every place against its file, before anything is read."""
    by_file: dict[str, list[tuple[Place, str]]] = {}
    for place, key in _all_places(metadata):
        by_file.setdefault(place.file, []).append((place, key))
    for name, places in by_file.items():
        with open_file(folder / name) as reader:
            size = reader.size
        end = 0
        for place, key in sorted(places, key=lambda p: p[0].begin):
            if place.begin < end:
                raise DamagedCheckpoint(f"{folder / name}: '{key}' shares bytes with another entry")
            end = place.begin + place.length
            if end > size:
                raise DamagedCheckpoint(
                    f"{folder / name}: '{key}' should end at byte {end}, but the file has {size}: "
                    "it was cut short; load another checkpoint"
                )


def _all_places(metadata: DcpMetadata) -> Iterator[tuple[Place, str]]:
    for key, tensor in metadata.tensors.items():
        yield from ((chunk.place, key) for chunk in tensor.chunks)
    yield from ((place, key) for key, place in metadata.values.items())


def _made(value: Any, name: str) -> Made:
    if not isinstance(value, Made) or value.name != name:
        raise ValueError(f"{name} was expected, {reprlib.repr(value)} came")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text was expected, {reprlib.repr(value)} came")
    return value


def _path(value: Any) -> tuple[str | int, ...]:
    right = isinstance(value, tuple) and all(type(part) in (str, int) for part in value)
    if not right or not 0 < len(value) <= _MAX_DIMS:
        raise ValueError(f"a path was expected, {reprlib.repr(value)} came")
    return value
