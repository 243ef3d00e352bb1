"""One file of torch.save, its values as data and its tensors read by slices.

Note [Why not torch.load]
A file of torch.save is a zip archive, stored and not compressed: ``data.pkl`` holds the values and
says of each tensor which record ``data/<n>`` has its bytes. Read so, with `unpickle`, nothing is
imported, made or loaded: a tensor is a few integers until a slice of it is asked for, and that
slice is read straight from its place in the file. ``torch.load(weights_only=True, mmap=True)``
would do the same for whole files, but it cannot read the slices of a file that DCP keeps, its list
of classes has to be changed for the whole process, and it must import the classes on that list.

Note [Flipped bits are found]
torch.save writes the CRC-32 of every record (unless it was switched off, which writes 0), and
torch.load does not look at it. Here each record is summed up once before its first bytes are used,
so a record is read twice: that costs time, and no memory.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import element_bytes, memory_of, torch_dtype
from shardwise.checkpoint.files import Files, Reader
from shardwise.convert.plain_names import ARRAYS, numpy_array
from shardwise.convert.torch_names import (
    DTYPES,
    NAMES,
    STORAGES,
    UNTYPED,
    Storage,
    StoredTensor,
    extent,
    index_of,
)
from shardwise.convert.unpickle import Builder, Made, Name, read_pickle
from shardwise.errors import CheckpointError, DamagedCheckpoint

_READ_BYTES = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAX_DEPTH = 48
_MAX_MENTIONS = 16  # of all bytes of a file, in one value
_SHARED_VALUES = 100_000


class NoData(CheckpointError):
    """A value is an object, which is described and not made."""


class TorchFile:
    """One stream of torch.save in bytes [begin, begin + length) of a file, opened when needed.

    **Raises** DamagedCheckpoint naming the file when it is cut short or not what torch writes;
    CheckpointError naming a class that it must not hold. ``allowed`` are names beside torch's own;
    with ``any_name`` all others may be in it, and what they stand for can only be left out.
    """

    def __init__(
        self,
        path: Path,
        allowed: Mapping[str, Builder | None] | None = None,
        begin: int = 0,
        length: int | None = None,
        what: str = "",
        any_name: bool = False,
    ) -> None:
        self.where = f"{path}, {what}" if what else str(path)
        self._path = path
        self._begin = begin
        self._good: set[str] = set()
        with open_file(path) as reader:
            self._length = reader.size - begin if length is None else length
            self._records, self._prefix = self._list_records(reader)
            order = self._small(reader, "byteorder", 16) if self._has("byteorder") else b"little"
            if order != b"little":
                raise CheckpointError(f"{self.where}: written on a machine of {order!r} byte order")
            data = self._small(reader, "data.pkl", self._length)
            names = {**NAMES, **(allowed or {})}
            # Each value takes a byte or more; beyond that, one of them stands in many places.
            self.max_values = max(_SHARED_VALUES, len(data))
            self.value = read_pickle(data, self.where, names, self._storage, any_name)

    @property
    def num_bytes(self) -> int:
        """Length of the stream."""
        return self._length

    def read(self, tensor: StoredTensor, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, shape [hi - lo].

        **Cost** the slice; for a tensor that is not contiguous, all that lies between its ends.
        """
        dtype, width = torch_dtype(tensor.dtype), element_bytes(tensor.dtype)
        if hi <= lo:
            return torch.empty(0, dtype=dtype)
        first, last = (lo, hi - 1) if tensor.contiguous else (0, extent(tensor) - 1)
        out = torch.empty(last + 1 - first, dtype=dtype)
        with open_file(self._path) as reader:
            begin = self._checked(reader, tensor.storage.record)
            begin += (tensor.offset + first) * width
            reader.read_into(begin, memory_of(out))
        if tensor.contiguous:
            return out
        return out.as_strided(tensor.shape, tensor.strides, 0).reshape(-1)[lo:hi].clone()

    def read_whole(self, tensor: StoredTensor) -> torch.Tensor:
        """Return a tensor in its shape."""
        return self.read(tensor, 0, tensor.numel).view(tensor.shape)

    def plain(self, value: Any, what: str, left_out: list[str] | None = None) -> Any:
        """Return a value of this file with its tensors read, as what `values` can write.

        Given ``left_out``, entries of dicts that hold an object are left out, and added to it.

        **Raises** NoData when it holds an object; CheckpointError when it is nested without end.
        """
        return _Plain(self, what, left_out).convert(value, 0, what)

    # -- the archive
    def _list_records(self, reader: Reader) -> tuple[dict[str, zipfile.ZipInfo], str]:
        if self._begin + self._length > reader.size:
            raise DamagedCheckpoint(
                f"{self.where}: expected bytes [{self._begin}, {self._begin + self._length}), the "
                f"file has {reader.size}: it was cut short"
            )
        window = _Window(reader, self._begin, self._length)
        try:
            with zipfile.ZipFile(window) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as error:
            raise DamagedCheckpoint(
                f"{self.where}: not a whole file of torch.save (a zip archive; torch's format "
                f"from before 1.6 is not read): {error}"
            ) from None
        records = {info.filename: info for info in infos}
        pickles = [name for name in records if name.endswith("/data.pkl")]
        if len(records) != len(infos) or len(pickles) != 1:
            raise DamagedCheckpoint(f"{self.where}: not an archive as torch.save writes it")
        return records, pickles[0].removesuffix("data.pkl")

    def _has(self, record: str) -> bool:
        return self._prefix + record in self._records

    def _info(self, record: str) -> zipfile.ZipInfo:
        if not self._has(record):
            raise DamagedCheckpoint(f"{self.where}: its record '{record}' is missing")
        return self._records[self._prefix + record]

    def _place(self, reader: Reader, record: str) -> int:
        """Return where in the file the bytes of a record begin."""
        info = self._info(record)
        header = bytearray(_LOCAL_HEADER.size)
        end = info.header_offset + len(header)
        if info.header_offset >= 0 and end <= self._length:
            reader.read_into(self._begin + info.header_offset, memoryview(header))
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin = end + name_bytes + extra_bytes
        if info.compress_type == zipfile.ZIP_DEFLATED:
            raise CheckpointError(
                f"{self.where}: its record '{record}' is compressed, which torch.save does not do; "
                "load the file with torch and save it again"
            )
        right = signature == b"PK\x03\x04" and info.compress_type == zipfile.ZIP_STORED
        if not right or info.flag_bits & 1 or begin + info.file_size > self._length:
            raise DamagedCheckpoint(
                f"{self.where}: its record '{record}' is not where it should be"
            )
        return self._begin + begin

    def _checked(self, reader: Reader, record: str) -> int:
        """Return where a record begins. See Note [Flipped bits are found]."""
        begin, info = self._place(reader, record), self._info(record)
        if record not in self._good and info.CRC:
            crc, buffer = 0, memoryview(bytearray(min(_READ_BYTES, info.file_size)))
            for at in range(0, info.file_size, _READ_BYTES):
                part = buffer[: info.file_size - at]
                reader.read_into(begin + at, part)
                crc = zlib.crc32(part, crc)
            if crc != info.CRC:
                raise DamagedCheckpoint(
                    f"{self.where}: the bytes of record '{record}' are not those that were saved: "
                    f"expected CRC {info.CRC:08x}, got {crc:08x}; load another checkpoint"
                )
        self._good.add(record)
        return begin

    def _small(self, reader: Reader, record: str, limit: int) -> bytes:
        size = self._info(record).file_size
        if size > limit:
            raise DamagedCheckpoint(f"{self.where}: record '{record}' of {size} bytes")
        return reader.read(self._checked(reader, record), size)

    def _storage(self, key: Any) -> Storage:
        """Answer a persistent id: the record of a tensor's bytes."""
        word, kind, record, _, numel = key
        if word != "storage" or not isinstance(kind, Name) or not isinstance(record, str):
            raise ValueError("a persistent id that is no storage")
        dtype = "" if kind.text == UNTYPED else STORAGES[kind.text]
        num_bytes = index_of(numel) * (element_bytes(dtype) if dtype else 1)
        if num_bytes > self._info(f"data/{record}").file_size:
            raise DamagedCheckpoint(
                f"{self.where}: record 'data/{record}' should have {num_bytes} bytes, has "
                f"{self._info(f'data/{record}').file_size}"
            )
        return Storage(f"data/{record}", dtype, numel)


def open_file(path: Path) -> Reader:
    """Open a regular file of a checkpoint. **Raises** DamagedCheckpoint if it is not there."""
    try:
        return Files().open(path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing; load another checkpoint") from None


class _Window(io.RawIOBase):
    """A part of a file as a file, for `zipfile`."""

    def __init__(self, reader: Reader, begin: int, length: int) -> None:
        super().__init__()
        self._reader, self._begin, self._length, self._at = reader, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise io.UnsupportedOperation(f"a place before the start: {start + offset}")
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        out = self._reader.read(self._begin + self._at, left if size < 0 else min(size, left))
        self._at += len(out)
        return out


class _Plain:
    """One walk over one value; counts, as a small pickle can describe an endless tree."""

    def __init__(self, file: TorchFile, what: str, left_out: list[str] | None) -> None:
        self._file = file
        self._what = what
        self._left_out = left_out
        self._count = 0
        self._bytes_left = _MAX_MENTIONS * file.num_bytes
        self._tensors: dict[int, torch.Tensor] = {}  # each is read once

    def convert(self, value: Any, depth: int, at: str) -> Any:
        self._count += 1
        if depth > _MAX_DEPTH or self._count > self._file.max_values:
            raise CheckpointError(f"{self._file.where}: {self._what} is nested without end")
        match value:
            case StoredTensor():
                self._charge(value.numel * element_bytes(value.dtype))
                if id(value) not in self._tensors:
                    self._tensors[id(value)] = self._file.read_whole(value)
                return self._tensors[id(value)]
            case Name(text) if text in DTYPES:
                return torch_dtype(DTYPES[text])
            case Made("argparse.Namespace", state=dict(attributes)):
                return self.convert(attributes, depth + 1, at)
            case Made(name, state=tuple((_, _, _, _, bytes(data)))) if name in ARRAYS:
                self._charge(len(data))
                try:
                    return numpy_array(value)
                except (ValueError, TypeError, IndexError):
                    raise self._no_data("a NumPy array of other than numbers") from None
            case Name() | Made():
                raise self._no_data(value.text if isinstance(value, Name) else value.name)
            case dict():
                return type(value)(dict(self._pairs(value, depth + 1, at)))
            case list() | tuple() | set() | frozenset():
                return type(value)([self.convert(v, depth + 1, at) for v in value])
        return value

    def _pairs(self, value: dict[Any, Any], depth: int, at: str) -> Iterator[tuple[Any, Any]]:
        for key, member in value.items():
            inside = f"{at}.{key!r:.80}"
            try:
                members = key if type(key) is tuple else (key,)
                parts = tuple(self.convert(part, depth, at) for part in members)
                yield parts if type(key) is tuple else parts[0], self.convert(member, depth, inside)
            except NoData:
                if self._left_out is None:
                    raise
                self._left_out.append(inside)

    def _charge(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise CheckpointError(
                f"{self._file.where}: {self._what} holds the same tensors many times over, more "
                f"than {_MAX_MENTIONS} times the bytes of the file"
            )

    def _no_data(self, name: str) -> NoData:
        return NoData(f"{self._file.where}: {self._what} holds a {name}, no data")
