"""Values without parts, as JSON and back: numbers, text, bytes, dtypes, numpy's scalars and arrays.

What JSON itself gives back as it was is *plain*; the rest is an object with a tag.
"""

import base64
import math
import re
import reprlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_MAX_ARRAY_BYTES = 2**20
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1  # every JSON reader with 64-bit integers is exact here

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
}
_ARRAY_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
_ARRAY_DTYPES = {
    dtype.str: dtype
    for kind, sizes in _ARRAY_SIZES.items()
    for size in sizes
    for dtype in (np.dtype(f"<{kind}{size}"), np.dtype(f">{kind}{size}"))
}


def is_plain(value: Any) -> bool:
    """Tell whether JSON's own form of a value comes back as the same value."""
    kind = type(value)
    if kind is int:
        return bool(_MIN_INT <= value <= _MAX_INT)
    if kind is float:
        return math.isfinite(value)
    if kind is str:
        return value.isascii() or _is_utf8(value)
    return value is None or kind is bool


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a character, as os.fsdecode makes them
        return False
    return True


def write_leaf(value: Any) -> dict[str, Any] | None:
    """Return a leaf that is not plain as an object with a tag; None for what is no leaf.

    **Raises** ValueError for numpy values that are too large or no plain numbers.
    """
    if type(value) in _LEAVES:
        tag, write, _ = _LEAVES[type(value)]
        return {"$": tag, "of": write(value)}
    return _write_array(value) if isinstance(value, np.generic | np.ndarray) else None


def _write_array(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    is_scalar = isinstance(value, np.generic)
    if array.dtype.str not in _ARRAY_DTYPES or not (is_scalar or type(value) is np.ndarray):
        raise ValueError(
            f"a numpy {type(value).__name__} of {array.dtype} is not plain numbers; give an array "
            "of bool, int, uint, float or complex, or a list"
        )
    if array.nbytes > _MAX_ARRAY_BYTES:
        raise ValueError(
            f"a numpy array of {array.nbytes} bytes is too large for text (at most "
            f"{_MAX_ARRAY_BYTES}); give torch.from_numpy(array), which is saved as a tensor"
        )
    tagged = {"$": "numpy.scalar" if is_scalar else "numpy.array", "dtype": array.dtype.str}
    shape = {} if is_scalar else {"shape": list(array.shape)}
    return tagged | shape | {"of": _write_base64(array.tobytes())}


def _read_array(of: Any, dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    data, found = _read_base64(of), _ARRAY_DTYPES[read_text(dtype)]
    sizes = _sizes(shape)
    if len(data) > _MAX_ARRAY_BYTES or len(data) != math.prod(sizes) * found.itemsize:
        raise ValueError(f"{len(data)} bytes for shape {reprlib.repr(sizes)} of {found}")
    if found.kind == "b" and data.translate(None, b"\0\1"):
        raise ValueError("a bool that is neither 0 nor 1")
    return np.frombuffer(data, found).reshape(sizes).copy()


def _read_scalar(of: Any, dtype: Any) -> Any:
    return _read_array(of, dtype, [])[()]


def _write_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _read_base64(of: Any) -> bytes:
    return base64.b64decode(read_text(of), validate=True)


def read_text(of: Any) -> str:
    """Return a text that was read; a TypeError for everything else."""
    if type(of) is not str:
        raise TypeError(f"expected text, got {reprlib.repr(of)}")
    return of


def _sizes(of: Any) -> list[int]:
    if type(of) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in of):
        raise TypeError(f"expected a list of sizes, got {reprlib.repr(of)}")
    return of


def _read_int(of: Any) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", read_text(of)):
        raise ValueError("expected hexadecimal digits")
    return int(of, 16)


def _read_float(of: Any) -> float:
    return float(struct.unpack(">d", bytes.fromhex(read_text(of)))[0])


def _read_complex(of: Any) -> complex:
    return complex(*struct.unpack(">2d", bytes.fromhex(read_text(of))))


def _write_dtype(value: torch.dtype) -> str:
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"{value} is not a dtype that a checkpoint knows; save its name as text")
    return name


def _read_device(of: Any) -> torch.device:
    if not re.fullmatch(r"[a-z0-9]{1,20}(:[0-9]{1,3})?", read_text(of)):
        raise ValueError("expected a name like 'cuda:0'")
    device = torch.device(of)
    if str(device) != of:  # torch keeps 8 bits of an index and drops the rest
        raise ValueError(f"{of} is not a device of torch")
    return device


# Each type without parts: its tag, the writer of its "of", and the reader.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[..., Any]]] = {
    int: ("int", hex, _read_int),
    float: ("float", lambda value: struct.pack(">d", value).hex(), _read_float),
    str: (
        "str",
        lambda value: _write_base64(value.encode("utf-8", "surrogatepass")),
        lambda of: _read_base64(of).decode("utf-8", "surrogatepass"),
    ),
    bytes: ("bytes", _write_base64, _read_base64),
    complex: (
        "complex",
        lambda value: struct.pack(">2d", value.real, value.imag).hex(),
        _read_complex,
    ),
    torch.device: ("torch.device", str, _read_device),
    torch.dtype: ("torch.dtype", _write_dtype, lambda of: _DTYPES[read_text(of)]),
    torch.Size: ("torch.Size", list, lambda of: torch.Size(_sizes(of))),
}
LEAF_READERS: dict[str, Callable[..., Any]] = {
    **{tag: read for tag, _, read in _LEAVES.values()},
    "numpy.scalar": _read_scalar,
    "numpy.array": _read_array,
}  # by tag; each takes the fields of its object, and raises what Python raises on wrong ones
