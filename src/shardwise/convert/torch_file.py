"""One file of torch.save: its values as data, its tensors by slices.

Note [Why not torch.load]
A file of torch.save is a zip archive, stored and not compressed: ``data.pkl`` holds the values and
names, for each tensor, the record ``data/<n>`` with its bytes. Here `unpickle` reads the values, so
nothing is imported or loaded: a tensor is a few integers until a slice of it is asked for, and that
slice is read straight from its place in the file. ``torch.load(weights_only=True, mmap=True)``
does the same for whole files, but it cannot read the slices of a file that DCP keeps, its list of
classes is one for the whole process, and it must import the classes on that list.

Note [Flipped bits are found]
torch.save writes the CRC-32 of every record (unless it was switched off, which writes 0), and
torch.load ignores it. Here the sum of a record is checked before its first bytes are used. The
record is read twice for that: it costs time and no memory.
"""

import io
import reprlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import (
    SPELLINGS,
    element_bytes,
    is_dtype,
    memory_of,
    torch_dtype,
)
from shardwise.checkpoint.files import Files, Reader
from shardwise.convert.unpickle import (
    ARRAYS,
    PLAIN,
    Builder,
    Made,
    Name,
    expect,
    numpy_array,
    read_pickle,
)
from shardwise.errors import CheckpointError, DamagedCheckpoint

_READ_BYTES = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAX_NAME_BYTES = 255
_MAX_DIMS = 64
_MAX_INDEX = 1 << 50
_MAX_DEPTH = 48
_MAX_MENTIONS = 16  # of all bytes of a file, in one value
_SHARED_VALUES = 100_000

_STORAGES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        "Double": "F64",
        "Float": "F32",
        "Half": "F16",
        "BFloat16": "BF16",
        "Long": "I64",
        "Int": "I32",
        "Short": "I16",
        "Char": "I8",
        "Byte": "U8",
        "Bool": "BOOL",
        "ComplexFloat": "C64",
    }.items()
}
_UNTYPED = "torch.storage.UntypedStorage"


class ObjectFound(CheckpointError):
    """A value that should be data is an object, which is described and not made."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One record of bytes; ``dtype`` is "" if each tensor on it has its own."""

    record: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor that is not loaded: the elements of a record that it has."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Storage

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are adjacent and in order."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    @property
    def extent(self) -> int:
        """Number of elements of the record from the first one to the last one, both included."""
        sizes = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in sizes)


class TorchFile:
    """One stream of torch.save in bytes [begin, begin + length) of a file, opened when needed.

    ``allowed`` are names beside torch's own. With ``any_name`` all other names may occur too, and
    the values that they stand for can only be left out.

    **Raises** DamagedCheckpoint naming the file when it is cut short or not as torch writes it;
    CheckpointError naming a class that it must not hold.
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
        self._checked: set[str] = set()
        with open_file(path) as reader:
            self.num_bytes = reader.size - begin if length is None else length
            self._records, self._prefix = self._list_records(reader)
            if self._prefix + "byteorder" in self._records:
                order = self._read_record(reader, "byteorder", 16)
                if order != b"little":
                    raise CheckpointError(
                        f"{self.where}: written on a machine of {order!r} byte order"
                    )
            data = self._read_record(reader, "data.pkl", self.num_bytes)
            names = {**_NAMES, **(allowed or {})}
            # Each value takes a byte or more; if there are more, one of them has many places.
            self.max_values = max(_SHARED_VALUES, len(data))
            self.value = read_pickle(data, self.where, names, self._storage, any_name)

    def read(self, tensor: StoredTensor, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, shape [hi - lo].

        **Cost** the slice; of a tensor that is not contiguous, its whole extent.
        """
        dtype, width = torch_dtype(tensor.dtype), element_bytes(tensor.dtype)
        if hi <= lo:
            return torch.empty(0, dtype=dtype)
        first, last = (lo, hi - 1) if tensor.is_contiguous else (0, tensor.extent - 1)
        out = torch.empty(last + 1 - first, dtype=dtype)
        with open_file(self._path) as reader:
            begin = self._begin_of(reader, tensor.storage.record)
            reader.read_into(begin + (tensor.offset + first) * width, memory_of(out))
        if tensor.is_contiguous:
            return out
        return out.as_strided(tensor.shape, tensor.strides, 0).reshape(-1)[lo:hi].clone()

    def read_whole(self, tensor: StoredTensor) -> torch.Tensor:
        """Return a tensor in its shape."""
        return self.read(tensor, 0, tensor.numel).view(tensor.shape)

    def plain(self, value: Any, what: str, left_out: list[str] | None = None) -> Any:
        """Return a value of this file with its tensors read, as data that `values` can write.

        Given ``left_out``, entries of dicts that hold an object are left out and added to it.

        **Raises** ObjectFound when it holds an object; CheckpointError when it is nested too
        deeply or holds more values than the file has room for.
        """
        return _Plain(self, what, left_out).convert(value, 0, what)

    # -- the archive
    def _list_records(self, reader: Reader) -> tuple[dict[str, zipfile.ZipInfo], str]:
        """Return the records by name, and the prefix of all their names."""
        end = self._begin + self.num_bytes
        if end > reader.size:
            raise DamagedCheckpoint(
                f"{self.where}: expected bytes [{self._begin}, {end}), the file has {reader.size}: "
                "it was cut short"
            )
        try:
            with zipfile.ZipFile(_Window(reader, self._begin, self.num_bytes)) as archive:
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

    def _info(self, record: str) -> zipfile.ZipInfo:
        if self._prefix + record not in self._records:
            raise DamagedCheckpoint(f"{self.where}: its record '{record}' is missing")
        return self._records[self._prefix + record]

    def _begin_of(self, reader: Reader, record: str) -> int:
        """Return where in the file the bytes of a record begin. See Note [Flipped bits are found].

        The sum of the bytes is checked by the first call for a record.
        """
        info = self._info(record)
        header = bytearray(_LOCAL_HEADER.size)
        end = info.header_offset + len(header)
        if info.header_offset >= 0 and end <= self.num_bytes:
            reader.read_into(self._begin + info.header_offset, memoryview(header))
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin = end + name_bytes + extra_bytes
        if info.compress_type == zipfile.ZIP_DEFLATED:
            raise CheckpointError(
                f"{self.where}: its record '{record}' is compressed, which torch.save does not do; "
                "load the file with torch and save it again"
            )
        is_right = signature == b"PK\x03\x04" and info.compress_type == zipfile.ZIP_STORED
        if not is_right or info.flag_bits & 1 or begin + info.file_size > self.num_bytes:
            raise DamagedCheckpoint(
                f"{self.where}: its record '{record}' is not where it should be"
            )
        if record not in self._checked and info.CRC:
            self._check_sum(reader, record, self._begin + begin)
        self._checked.add(record)
        return self._begin + begin

    def _check_sum(self, reader: Reader, record: str, begin: int) -> None:
        info, crc = self._info(record), 0
        buffer = memoryview(bytearray(min(_READ_BYTES, info.file_size)))
        for at in range(0, info.file_size, _READ_BYTES):
            part = buffer[: info.file_size - at]
            reader.read_into(begin + at, part)
            crc = zlib.crc32(part, crc)
        if crc != info.CRC:
            raise DamagedCheckpoint(
                f"{self.where}: the bytes of record '{record}' are not those that were saved: "
                f"expected CRC {info.CRC:08x}, got {crc:08x}; load another checkpoint"
            )

    def _read_record(self, reader: Reader, record: str, max_bytes: int) -> bytes:
        size = self._info(record).file_size
        if size > max_bytes:
            raise DamagedCheckpoint(f"{self.where}: record '{record}' of {size} bytes")
        return reader.read(self._begin_of(reader, record), size)

    def _storage(self, key: Any) -> Storage:
        """Answer a persistent id: the record of a tensor's bytes."""
        word, kind, record, _, numel = key
        if word != "storage":
            raise ValueError("a persistent id that is no storage")
        text = expect(Name, kind).text
        dtype = "" if text == _UNTYPED else _STORAGES[text]
        num_bytes = _index(numel) * (element_bytes(dtype) if dtype else 1)
        has_bytes = self._info(f"data/{expect(str, record)}").file_size
        if num_bytes > has_bytes:
            raise DamagedCheckpoint(
                f"{self.where}: record 'data/{record}' should have {num_bytes} bytes, has "
                f"{has_bytes}"
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

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        if self._at < 0:
            raise ValueError(f"a place before the start: {self._at}")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        out = self._reader.read(self._begin + self._at, left if size < 0 else min(size, left))
        self._at += len(out)
        return out


class _Plain:
    """One walk over one value. It counts, because a small pickle can describe an endless tree."""

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
            case Name(text) if text in SPELLINGS:
                return torch_dtype(SPELLINGS[text])
            case Made("argparse.Namespace", state=dict(attributes)):
                return self.convert(attributes, depth + 1, at)
            case Made(name, state=tuple((_, _, _, _, bytes(data)))) if name in ARRAYS:
                self._charge(len(data))
                try:
                    return numpy_array(value)
                except (ValueError, TypeError, IndexError):
                    raise self._object("a NumPy array of other than numbers") from None
            case Name() | Made():
                raise self._object(f"a {value.text if isinstance(value, Name) else value.name}")
            case dict():
                return type(value)(dict(self._pairs(value, depth + 1, at)))
            case list() | tuple() | set() | frozenset():
                return type(value)([self.convert(v, depth + 1, at) for v in value])
        return value

    def _pairs(
        self, value: dict[object, object], depth: int, at: str
    ) -> Iterator[tuple[object, object]]:
        for key, member in value.items():
            inside = f"{at}.{key!r:.80}"
            try:
                members = key if type(key) is tuple else (key,)
                parts = tuple(self.convert(part, depth, at) for part in members)
                yield parts if type(key) is tuple else parts[0], self.convert(member, depth, inside)
            except ObjectFound:
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

    def _object(self, described: str) -> ObjectFound:
        return ObjectFound(f"{self._file.where}: {self._what} holds {described}, no data")


# -- names that torch's pickles hold, and their values
def sizes_of(sizes: Any = ()) -> tuple[int, ...]:
    """Return a shape, strides or offsets. **Raises** ValueError for anything else."""
    if len(sizes) > _MAX_DIMS:
        raise ValueError(f"a size was expected, one of {len(sizes)} dims came")
    return tuple(map(_index, sizes))


def _index(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INDEX:
        raise ValueError(f"a size was expected, {reprlib.repr(value)} came")
    return value


def _tensor(
    storage: object, offset: object, shape: Any, strides: Any, *rest: object, dtype: str = ""
) -> StoredTensor:
    held, sizes, steps = expect(Storage, storage), sizes_of(shape), sizes_of(strides)
    dtype = dtype or held.dtype
    if len(sizes) != len(steps) or not is_dtype(dtype):
        raise ValueError(f"a tensor of {dtype!r} with shape {sizes} and strides {steps}")
    tensor = StoredTensor(dtype, sizes, steps, _index(offset), held)
    has = held.numel // (1 if held.dtype else element_bytes(dtype))
    if tensor.numel > has or (tensor.numel and tensor.offset + tensor.extent > has):
        raise ValueError(f"a tensor of {tensor.offset} + {tensor.extent} elements of {has}")
    return tensor


def _tensor_v3(
    storage: object, offset: object, shape: object, strides: object, *rest: Any
) -> StoredTensor:
    return _tensor(storage, offset, shape, strides, dtype=SPELLINGS[rest[2].text])


def _tensor_of_type(function: object, kind: object, args: Any, state: object) -> object:
    return _TENSORS[expect(Name, function).text](*args)


def _device(kind: object, index: object = None) -> str:
    name = expect(str, kind)
    return name if index is None else f"{name}:{_index(index)}"


_TENSORS: Mapping[str, Builder] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}
_NAMES: Mapping[str, Builder | None] = {
    **PLAIN,
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "argparse.Namespace": None,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    "torch.Size": sizes_of,
    "torch.device": _device,
    _UNTYPED: None,
    **dict.fromkeys(_STORAGES),
    **dict.fromkeys(SPELLINGS),
}


# -- for the readers of folders of such files
def is_plain_name(name: str) -> bool:
    """Tell whether a name, joined to a folder, can only lead to an entry of that folder."""
    try:
        fits = len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
    return fits and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
