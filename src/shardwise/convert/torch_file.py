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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.container import element_bytes, is_dtype, memory_of, torch_dtype
from shardwise.checkpoint.files import Reader, RealFiles
from shardwise.convert.unpickle import PLAIN, Builder, Made, Name, read_pickle
from shardwise.errors import CheckpointError, DamagedCheckpoint

_READ_BYTES = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAX_DIMS = 64
_MAX_INDEX = 1 << 50
_MAX_DEPTH = 48
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
_SPELLINGS = (
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64", "BOOL"),
    *("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"),
)
DTYPES = {str(torch_dtype(spelling)): spelling for spelling in _SPELLINGS}


@dataclass(frozen=True, slots=True)
class Storage:
    """One record of bytes; ``dtype`` is "" where each tensor on it says its own."""

    record: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor that is not loaded: which elements of which record it has."""

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
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


class TorchFile:
    """One stream of torch.save in bytes [begin, begin + length) of a file, opened when needed.

    **Raises** DamagedCheckpoint naming the file when it is cut short or not what torch writes;
    CheckpointError naming a class that it must not hold. ``allowed`` are names beside torch's own.
    """

    def __init__(
        self,
        path: Path,
        allowed: Mapping[str, Builder | None] | None = None,
        begin: int = 0,
        length: int | None = None,
        what: str = "",
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
            names = {**_NAMES, **(allowed or {})}
            # Each value takes a byte or more; beyond that, one of them stands in many places.
            self.max_values = max(_SHARED_VALUES, len(data))
            self.value = read_pickle(data, self.where, names, self._storage)

    def read(self, tensor: StoredTensor, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the flattened tensor, shape [hi - lo].

        **Cost** the slice; for a tensor that is not contiguous, all that lies between its ends.
        """
        dtype, width = torch_dtype(tensor.dtype), element_bytes(tensor.dtype)
        if hi <= lo:
            return torch.empty(0, dtype=dtype)
        first, last = (lo, hi - 1) if tensor.contiguous else (0, _extent(tensor) - 1)
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

    def plain(self, value: Any, what: str) -> Any:
        """Return a value of this file with its tensors read, as what `values` can write.

        **Raises** CheckpointError when it holds an object, or is nested without end.
        """
        return _Plain(self, what).convert(value, 0)

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
        out = bytearray(size)
        reader.read_into(self._checked(reader, record), memoryview(out))
        return bytes(out)

    def _storage(self, key: Any) -> Storage:
        """Answer a persistent id: the record of a tensor's bytes."""
        word, kind, record, _, numel = key
        if word != "storage" or not isinstance(kind, Name) or not isinstance(record, str):
            raise ValueError("a persistent id that is no storage")
        dtype = "" if kind.text == _UNTYPED else _STORAGES[kind.text]
        num_bytes = _index(numel) * (element_bytes(dtype) if dtype else 1)
        if num_bytes > self._info(f"data/{record}").file_size:
            raise DamagedCheckpoint(
                f"{self.where}: record 'data/{record}' should have {num_bytes} bytes, has "
                f"{self._info(f'data/{record}').file_size}"
            )
        return Storage(f"data/{record}", dtype, numel)


def open_file(path: Path) -> Reader:
    """Open a regular file of a checkpoint. **Raises** DamagedCheckpoint if it is not there."""
    try:
        return RealFiles().open(path)
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
        out = bytearray(left if size < 0 else min(size, left))
        self._reader.read_into(self._begin + self._at, memoryview(out))
        self._at += len(out)
        return bytes(out)


class _Plain:
    """One walk over one value; counts, as a small pickle can describe an endless tree."""

    def __init__(self, file: TorchFile, what: str) -> None:
        self._file = file
        self._what = what
        self._count = 0

    def convert(self, value: Any, depth: int) -> Any:
        self._count += 1
        if depth > _MAX_DEPTH or self._count > self._file.max_values:
            raise CheckpointError(f"{self._file.where}: {self._what} is nested without end")
        match value:
            case StoredTensor():
                return self._file.read_whole(value)
            case Name(text) if text in DTYPES:
                return torch_dtype(DTYPES[text])
            case Made("argparse.Namespace", state=dict(attributes)):
                return self.convert(attributes, depth + 1)
            case Name() | Made():
                name = value.text if isinstance(value, Name) else value.name
                raise CheckpointError(f"{self._file.where}: {self._what} holds a {name}, no data")
            case dict():
                pairs = {key: self.convert(v, depth + 1) for key, v in value.items()}
                return type(value)(pairs)
            case list() | tuple():
                return type(value)(self.convert(v, depth + 1) for v in value)
        return value


def _index(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INDEX:
        raise ValueError("a size or place that is none")
    return value


def _extent(tensor: StoredTensor) -> int:
    """Return how many elements lie between its first and its last one, both counted."""
    sizes = zip(tensor.shape, tensor.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any, dtype: str = ""
) -> StoredTensor:
    if not isinstance(storage, Storage) or len(shape) > _MAX_DIMS:
        raise ValueError("a tensor without its bytes")
    sizes, steps = tuple(map(_index, shape)), tuple(map(_index, strides))
    dtype = dtype or storage.dtype
    if len(sizes) != len(steps) or not is_dtype(dtype):
        raise ValueError(f"a tensor of {dtype!r} with shape {sizes} and strides {steps}")
    tensor = StoredTensor(dtype, sizes, steps, _index(offset), storage)
    has = storage.numel // (1 if storage.dtype else element_bytes(dtype))
    if tensor.numel > has or (tensor.numel and tensor.offset + _extent(tensor) > has):
        raise ValueError(f"a tensor of {tensor.offset} + {_extent(tensor)} elements of {has}")
    return tensor


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> StoredTensor:
    return _tensor(storage, offset, shape, strides, dtype=DTYPES[dtype.text])


def _tensor_of_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(function, Name) or function.text not in _TENSORS:
        raise ValueError("a tensor that is not rebuilt as torch does")
    return _TENSORS[function.text](*args)


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str):
        raise ValueError("a device that is no text")
    return kind if index is None else f"{kind}:{_index(index)}"


_TENSORS: Mapping[str, Callable[..., Any]] = {
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
    "torch.Size": lambda sizes=(): tuple(map(_index, sizes)),
    "torch.device": _device,
    _UNTYPED: None,
    **dict.fromkeys(_STORAGES),
    **dict.fromkeys(DTYPES),
}
