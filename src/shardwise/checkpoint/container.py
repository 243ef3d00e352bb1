"""One safetensors file: its dtypes, its header, and the digests of the bytes in it.

Note [A file is a safetensors file that DCP reads]
The header's ``__metadata__`` gives each tensor's offsets in the whole tensor, in the form of
torch's ``HuggingFaceStorageReader``, so stock ``dcp.load`` reads and reshards these files. The
constants of that form are in ``torch/distributed/checkpoint/_hf_utils.py``; a test compares them.

Tensors are hashed in chunks of one MiB, from the memory that holds them and not from the file that
was written, while it is in the processor's cache. Digests are xxh3-128, a checksum: 2 of 10^38
damaged chunks pass. Source: xxHash, github.com/Cyan4973/xxHash, XXH3 128 bits.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.strict_json import loads

if TYPE_CHECKING:
    import torch

    from shardwise.checkpoint.files import Reader

CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 16
DIGEST_CHARS = 22  # of a chunk
MAX_HEADER_BYTES = 100 << 20  # the safetensors library's own limit
_MAX_DIMS = 32
_LENGTH_BYTES = 8

# Spelling in safetensors: (bytes per element, name in torch).
_DTYPES: Mapping[str, tuple[int, str]] = {
    "F64": (8, "float64"),
    "I64": (8, "int64"),
    "U64": (8, "uint64"),
    "C64": (8, "complex64"),
    "F32": (4, "float32"),
    "I32": (4, "int32"),
    "U32": (4, "uint32"),
    "BF16": (2, "bfloat16"),
    "F16": (2, "float16"),
    "I16": (2, "int16"),
    "U16": (2, "uint16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
}
SPELLINGS = {f"torch.{name}": spelling for spelling, (_, name) in _DTYPES.items()}


def is_dtype(name: str) -> bool:
    """Tell whether a file can hold this dtype."""
    return name in _DTYPES


def element_bytes(name: str) -> int:
    """Return the bytes per element of a dtype as safetensors spells it."""
    return _DTYPES[name][0]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for safetensors' spelling."""
    import torch

    found: torch.dtype = getattr(torch, _DTYPES[name][1])
    return found


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return safetensors' spelling. **Raises** CheckpointError if safetensors lacks the dtype."""
    if str(dtype) not in SPELLINGS:
        raise CheckpointError(f"{where}: safetensors files hold no {dtype}; convert it first")
    return SPELLINGS[str(dtype)]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; they share its memory."""
    import torch

    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    found: memoryview = flat.view(torch.uint8).numpy().data
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of any tensor, which is copied to the CPU if it is elsewhere."""
    return memory_of(tensor.cpu().contiguous())


class Stored(NamedTuple):
    """One tensor of a file: bytes [begin, end) after the header, its box in the whole tensor."""

    key: str
    dtype: str
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int


def place(boxes: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]]) -> list[Stored]:
    """Lay boxes (key, dtype, lengths, offsets) one after the other in a file."""
    placed, begin = [], 0
    for key, dtype, lengths, offsets in boxes:
        end = begin + prod(lengths) * element_bytes(dtype)
        placed.append(Stored(key, dtype, lengths, offsets, begin, end))
        begin = end
    return placed


def build_header(stored: Sequence[Stored], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes before the tensors. See Note [A file is a safetensors file ...]."""
    sharding = {s.key: {"saved_offsets": s.offsets} for s in stored}
    described: dict[str, str] = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
    }
    header: dict[str, object] = {"__metadata__": described if metadata is None else dict(metadata)}
    for s in stored:
        header[s.key] = {"dtype": s.dtype, "shape": s.lengths, "data_offsets": (s.begin, s.end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(reader: Reader, where: str) -> tuple[dict[str, Stored], int]:
    """Return the whole tensors of a file by key, and the offset of the first byte after the header.

    **Raises** DamagedCheckpoint when the header is incomplete, or does not cover the file exactly;
    CheckpointError when the tensors may be slices.
    """
    if reader.size < _LENGTH_BYTES:
        raise DamagedCheckpoint(f"{where}: {reader.size} bytes are no safetensors file")
    header_bytes = int.from_bytes(reader.read(0, _LENGTH_BYTES), "little")
    if header_bytes > min(MAX_HEADER_BYTES, reader.size - _LENGTH_BYTES):
        raise DamagedCheckpoint(
            f"{where}: its header claims {header_bytes} bytes; the file has {reader.size}"
        )
    text = reader.read(_LENGTH_BYTES, header_bytes)
    if b'"DCP_SHARDING_INFO"' in text:
        raise CheckpointError(
            f"{where} is a part of a sharded checkpoint; open that by its own format, or "
            "consolidate it first"
        )
    begin = _LENGTH_BYTES + header_bytes
    return parse_header(text, reader.size - begin, where), begin


def parse_header(text: bytes, data_bytes: int, where: str) -> dict[str, Stored]:
    """Check a header against the number of bytes behind it; return the tensors by key."""
    header = loads(text, where)
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{where}: its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    offsets = _saved_offsets(metadata, where)
    stored = [_stored(key, entry, offsets.get(key), where) for key, entry in header.items()]
    stored.sort(key=lambda s: (s.begin, s.end))
    expected = 0
    for s in stored:
        if s.begin != expected:
            raise DamagedCheckpoint(
                f"{where}: tensor '{s.key}' begins at byte {s.begin}, expected {expected}"
            )
        expected = s.end
    if expected != data_bytes:
        raise DamagedCheckpoint(f"{where}: tensors take {expected} bytes, got {data_bytes}")
    return {s.key: s for s in stored}


def _saved_offsets(metadata: object, where: str) -> dict[str, object]:
    text = metadata.get("DCP_SHARDING_INFO", "{}") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise DamagedCheckpoint(f"{where}: __metadata__ is no map of strings")
    info = loads(text.encode(), where)
    if not isinstance(info, dict) or not all(isinstance(v, dict) for v in info.values()):
        raise DamagedCheckpoint(f"{where}: DCP_SHARDING_INFO is no map")
    return {key: value.get("saved_offsets") for key, value in info.items()}


def _stored(key: str, entry: Any, offsets: Any, where: str) -> Stored:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        places = (0,) * len(shape) if offsets is None else tuple(offsets)
        numbers = (*shape, *places, begin, end)
        well_formed = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        fits = len(places) == len(shape) <= _MAX_DIMS
        if not (well_formed and dtype in _DTYPES and fits):
            raise ValueError(entry)
    except (TypeError, KeyError, ValueError):
        raise DamagedCheckpoint(f"{where}: tensor '{key}' is not described right") from None
    if end - begin != prod(shape) * element_bytes(dtype):
        raise DamagedCheckpoint(
            f"{where}: tensor '{key}' of {dtype} {shape} takes {end - begin} bytes, expected "
            f"{prod(shape) * element_bytes(dtype)}"
        )
    return Stored(key, dtype, shape, places, begin, end)


# -- digests


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of some bytes: 32 hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


def chunk_digest(data: bytes | memoryview) -> str:
    """Return the digest of a chunk: 22 characters of base64, to keep indexes small."""
    return b64encode(xxhash.xxh3_128_digest(data))[:DIGEST_CHARS].decode()


def chunk_digests(data: memoryview) -> str:
    """Return the digests of all chunks of some bytes, one after the other; "" for no bytes."""
    begins = range(0, len(data), CHUNK_BYTES)
    return "".join(chunk_digest(data[begin : begin + CHUNK_BYTES]) for begin in begins)


def num_chunks(num_bytes: int) -> int:
    """Return how many chunks a tensor of ``num_bytes`` has."""
    return -(-num_bytes // CHUNK_BYTES)
