"""The ``.metadata`` of a torch.distributed.checkpoint folder, read as data and checked.

The result is a table of tensors and values with the place of each of their pieces. All of it is
checked before it is used: the pieces of a tensor are a grid that has each element once, places lie
inside a file of this folder and do not share bytes.
"""

import reprlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.checkpoint.container import SPELLINGS
from shardwise.checkpoint.manifest import is_grid
from shardwise.convert.pieces import explained
from shardwise.convert.torch_file import is_plain_name, open_file, sizes_of
from shardwise.convert.unpickle import (
    MAX_PICKLE_BYTES,
    PLAIN,
    Builder,
    Made,
    Name,
    expect,
    expect_made,
    read_pickle,
)
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.layout.boxes import Region

METADATA = ".metadata"
WRITER = "torch.distributed.checkpoint"
_MAX_PATH_PARTS = 64
_BYTES_PER_PART = 16  # of the table, at the least
_PREFIX = f"{WRITER}."
_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _STORAGE = _CLASSES = tuple(
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
_NAMES: Mapping[str, Builder | None] = {
    **PLAIN,
    **dict.fromkeys(_CLASSES),
    **dict.fromkeys(SPELLINGS),
    _PREFIX + "metadata.StorageMeta": None,
    _PREFIX + "metadata._MEM_FORMAT_ENCODING": None,
    "torch.serialization._get_layout": None,
    "pathlib.PosixPath": None,  # of the folder that was saved to
    "pathlib._local.PosixPath": None,
    "torch.Size": sizes_of,
    # Layouts and dtypes that are described but cannot be read: refused with their tensor's name.
    "torch.float8_e4m3fnuz": None,
    "torch.float8_e5m2fnuz": None,
    "torch.float8_e8m0fnu": None,
    "torch.float4_e2m1fn_x2": None,
    "torch.complex32": None,
    "torch.complex128": None,
}


class FileRange(NamedTuple):
    """Bytes [begin, begin + length) of a file of the folder: one stream of torch.save."""

    file: str
    begin: int
    length: int


class Chunk(NamedTuple):
    """A box of a tensor, saved as a separate tensor."""

    region: Region
    place: FileRange


class DcpTensor(NamedTuple):
    """One tensor: its dtype (safetensors spelling), its shape, its boxes."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class DcpMetadata(NamedTuple):
    """The entries of a folder by flattened key; ``paths`` are the keys before flattening."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, FileRange]
    paths: Mapping[str, tuple[str | int, ...]]


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Read and check the table of a folder.

    **Raises** CheckpointError when it is no such folder, or names a class that is not allowed or a
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
    with explained(str(path), WRITER):
        metadata = _Table(folder, len(data)).read(tree)
    _check_files(folder, metadata)
    return metadata


class _Table:
    """Reads the tree of one ``.metadata``; what may still be read is counted."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        self._where = str(folder / METADATA)
        self._parts_left = num_bytes // _BYTES_PER_PART
        self._places: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}

    def read(self, tree: Any) -> DcpMetadata:
        tree = expect_made(tree, _METADATA)
        for index, info in tree.field("storage_data").items():
            place = expect_made(index, _INDEX)
            key, offset = expect(str, place.field("fqn")), place.field("offset")
            self._places[key, None if offset is None else sizes_of(offset)] = self._place(key, info)
        tensors, values = {}, {}
        for key, entry in tree.field("state_dict_metadata").items():
            if entry.name == _BYTES:
                values[expect(str, key)] = self._find(key, None)
            else:
                tensors[expect(str, key)] = self._tensor(key, expect_made(entry, _TENSOR))
        paths = tree.field("planner_data")
        known = {key: _path(path) for key, path in paths.items()} if paths else {}
        return DcpMetadata(tensors, values, {k: known.get(k, (k,)) for k in (*tensors, *values)})

    def _place(self, key: str, info: Any) -> FileRange:
        info = expect_made(info, _STORAGE)
        name = expect(str, info.field("relative_path"))
        if not is_plain_name(name):
            raise CheckpointError(
                f"{self._where}: '{key}' is placed in {name!r}, which is no plain file name of "
                "this folder: nothing outside of it is read"
            )
        if info.field("transform_descriptors"):
            raise CheckpointError(
                f"{self._folder / name}: '{key}' was compressed or encrypted by an extension of "
                "the writer, which cannot be undone here; save it again without"
            )
        begin, length = sizes_of((info.field("offset"), info.field("length")))
        return FileRange(name, begin, length)

    def _find(self, key: str, offset: tuple[int, ...] | None) -> FileRange:
        if (key, offset) not in self._places:
            at = "" if offset is None else f", its part at {offset}"
            raise DamagedCheckpoint(f"{self._where}: '{key}'{at} is in no file of the folder")
        return self._places[key, offset]

    def _tensor(self, key: str, entry: Made) -> DcpTensor:
        properties = expect_made(entry.field("properties"), _PROPERTIES).state
        named = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        if not isinstance(named, Name) or named.text not in SPELLINGS:
            name = named.text if isinstance(named, Name) else reprlib.repr(named)
            raise CheckpointError(f"{self._where}: '{key}' has dtype {name}, which cannot be read")
        shape = sizes_of(entry.field("size"))
        chunks = []
        for chunk in entry.field("chunks"):
            self._parts_left -= 1  # one list may be in many tensors, or one part often in a list
            if self._parts_left < 0:
                raise CheckpointError(
                    f"{self._where}: it names more parts of tensors than it has room to describe: "
                    "the file is damaged or hostile"
                )
            offsets = sizes_of(expect_made(chunk, _CHUNK).field("offsets"))
            lengths = sizes_of(chunk.field("sizes"))
            ends = zip(offsets, lengths, shape, strict=True)
            if any(offset + length > size for offset, length, size in ends):
                raise DamagedCheckpoint(
                    f"{self._where}: '{key}' of shape {shape} has a part at {offsets} of "
                    f"{lengths}, outside of it"
                )
            if prod(lengths):
                chunks.append(Chunk(Region(offsets, lengths), self._find(key, offsets)))
        self._check_cover(key, shape, chunks)
        return DcpTensor(SPELLINGS[named.text], shape, tuple(chunks))

    def _check_cover(self, key: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
        """Check that boxes inside a tensor are a grid that has each element once."""
        covered = sum(chunk.region.numel for chunk in chunks)
        if covered < prod(shape):
            files = ", ".join(sorted({chunk.place.file for chunk in chunks})) or "no file"
            raise DamagedCheckpoint(
                f"{self._where}: only {covered} of {prod(shape)} elements of '{key}' are there, in "
                f"{files}: parts of it were not saved, or a rank's file is missing"
            )
        if not is_grid(shape, [chunk.region for chunk in chunks]):
            raise DamagedCheckpoint(
                f"{self._where}: parts of '{key}' overlap, or are no grid: save it again"
            )


def _check_files(folder: Path, metadata: DcpMetadata) -> None:
    """Compare every place with the size of its file, before anything is read."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    pieces = [(c.place, key) for key, t in metadata.tensors.items() for c in t.chunks]
    for place, key in (*pieces, *((place, key) for key, place in metadata.values.items())):
        by_file.setdefault(place.file, []).append((place.begin, place.length, key))
    for name, ranges in by_file.items():
        with open_file(folder / name) as reader:
            size = reader.size
        end = 0
        for begin, length, key in sorted(ranges):
            if begin < end:
                raise DamagedCheckpoint(f"{folder / name}: '{key}' shares bytes with another entry")
            end = begin + length
            if end > size:
                raise DamagedCheckpoint(
                    f"{folder / name}: '{key}' should end at byte {end}, but the file has {size}: "
                    "it was cut short; load another checkpoint"
                )


def _path(value: object) -> tuple[str | int, ...]:
    is_path = isinstance(value, tuple) and 0 < len(value) <= _MAX_PATH_PARTS
    if isinstance(value, tuple) and is_path and all(type(part) in (str, int) for part in value):
        return value
    raise ValueError(f"a path was expected, {reprlib.repr(value)} came")
