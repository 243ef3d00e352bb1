"""Values of plain Python and NumPy as protocols 2 to 5 of pickle write them: names, builders."""

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from shardwise.convert.unpickle import Builder, Made, Name, check_keys

_MAX_PATH = 4096


def _encode(text: str, codec: str) -> bytes:
    if codec != "latin1":
        raise ValueError("bytes in a codec that pickle does not use")
    return text.encode("latin-1")


def _bytearray(data: Any = b"") -> bytearray:
    if not isinstance(data, bytes):  # of a number it would make that many zeros
        raise ValueError("a bytearray of what is no bytes")
    return bytearray(data)


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    items = [(key, value) for key, value in pairs]
    check_keys([key for key, _ in items])
    return OrderedDict(items)


def _counter(counts: Any = None) -> Counter[Any]:
    if not isinstance(counts, dict | None):
        raise ValueError("a Counter of what is no dict")
    return Counter(counts)


def _members(kind: Callable[[Any], Any]) -> Builder:
    return lambda members=(): kind(check_keys(list(members)))


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts) or sum(map(len, parts)) > _MAX_PATH:
        raise ValueError(f"a path of more than {_MAX_PATH} characters")
    return str(PurePosixPath(*parts))


_NUMPY_FORMS = {
    f"{kind}{size}": f"<{form}"
    for kind, forms in {"f": {2: "e", 4: "f", 8: "d"}, "b": {1: "?"}}.items()
    for size, form in forms.items()
} | {
    f"{kind}{size}": f"<{form.upper() if kind == 'u' else form}"
    for kind in "iu"
    for size, form in {1: "b", 2: "h", 4: "i", 8: "q"}.items()
}


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    if not (isinstance(dtype, Made) and dtype.name == "numpy.dtype" and isinstance(data, bytes)):
        raise ValueError("a NumPy scalar without its dtype")
    (form, *_) = dtype.args
    if not isinstance(form, str):
        raise ValueError("a NumPy dtype without its name")
    return struct.unpack(_NUMPY_FORMS[form], data)[0]


ARRAYS = tuple(f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core"))
_ARRAY_FORMS = {*_NUMPY_FORMS, "c8", "c16"}


def numpy_array(made: Made) -> np.ndarray[Any, Any]:
    """Return the array of numbers that a call of `ARRAYS` and its state describe.

    **Raises** ValueError when it is of other values, or its bytes are not those of its shape.
    """
    _, shape, dtype, by_columns, data = made.state
    if not (isinstance(dtype, Made) and dtype.name == "numpy.dtype" and isinstance(data, bytes)):
        raise ValueError("an array without dtype and bytes")
    form, byte_order = dtype.args[0], dtype.state[1]
    plain = made.args[:1] == (Name("numpy.ndarray"),) and form in _ARRAY_FORMS
    if not plain or byte_order not in ("<", ">", "|"):
        raise ValueError("an array of what are no plain numbers")
    flat = np.frombuffer(data, np.dtype(f"{byte_order}{form}"))
    array = flat.reshape(shape, order="F" if by_columns else "C")
    return array.astype(array.dtype.newbyteorder("<"))


_BUILTINS: Mapping[str, Builder] = {
    "set": _members(set),
    "frozenset": _members(frozenset),
    "bytearray": _bytearray,
    "bytes": lambda: b"",
    "complex": lambda real, imag: complex(float(real), float(imag)),
}

PLAIN: Mapping[str, Builder | None] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "_codecs.encode": _encode,
    **{f"builtins.{name}": builder for name, builder in _BUILTINS.items()},
    **{f"__builtin__.{name}": builder for name, builder in _BUILTINS.items()},
    **{
        f"{module}.{name}": _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    "numpy.dtype": None,
    "numpy.ndarray": None,
    **dict.fromkeys(ARRAYS),
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray.scalar": _numpy_scalar,
}
