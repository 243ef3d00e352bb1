"""State beside tensors as JSON and back: every type and every bit, and never a pickle.

Values that JSON can represent are unchanged. Others are an object with a tag, ``{"$": "tuple",
"of": [1, 2]}``. A dict with other keys than text, or with a key "$", is ``{"$": "dict", "keys":
[...], "values": [...]}``. A tensor is ``{"$": "tensor", "of": place}``; its bytes are in the
files of tensors. A tag is looked up in a table, so no file can name code to run.

Depth counts JSON's own levels (a tuple takes two): a value may have 48, a file 64. So each value
that was saved can be read, with the levels that the file has around it.
"""

import base64
import math
import re
import reprlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError
from shardwise.strict_json import MAX_DEPTH, dumps

_Fields = dict[str, Any]  # of a value in JSON, beside its tag
_MAX_VALUE_DEPTH = 48
_MAX_COLLISIONS = 1000
_MAX_ARRAY_BYTES = 2**20
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1  # every JSON reader with 64-bit integers is exact here


class _Spot(NamedTuple):
    """The path to a value by keys, and its depth. Inside a key there are no places for tensors."""

    name: str
    keys: tuple[object, ...] = ()
    depth: int = 0
    is_key: bool = False

    def inside(self, key: object, levels: int) -> "_Spot":
        if self.is_key:
            return self._replace(depth=self.depth + levels)
        return self._replace(keys=(*self.keys, key), depth=self.depth + levels)

    def as_key(self) -> "_Spot":
        """Return the spot of all keys or members of this one."""
        return _Spot(f"a key or member of {self.where}", (), self.depth + 2, True)

    @property
    def where(self) -> str:
        """The path for error messages."""
        return self.name + "".join(f"[{_shown(key, reprlib.repr)}]" for key in self.keys)

    @property
    def place(self) -> str:
        """The path as a tensor's place: its keys, joined by dots."""
        text = ".".join(_shown(key, str) for key in self.keys).lstrip(".")
        return text.encode("utf-8", "backslashreplace").decode()

    def refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {reason}")


def _shown(key: object, write: Callable[[object], str]) -> str:
    try:
        return write(key)
    except ValueError:  # an int with more digits than Python writes
        return type(key).__name__


def encode(
    value: object, where: str, before: Mapping[str, torch.Tensor] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the value for `dumps`, and its tensors by their place in it.

    A place is the path of keys in ``value``, joined by dots ("scheduler.base.0"). Tensors are
    detached, and copied only if they are lazily conjugated. A value at two places becomes two.
    ``before`` are the tensors of another value that is saved beside this one: they are returned
    too, and no place is used twice.

    **Raises** CheckpointError for values that are not data (functions, objects, shards of
    parameters) and for nesting beyond 48 levels, as in cycles; it names the place as
    ``where['scheduler'][0]``.
    """
    tensors = dict(before or {})
    return _encode(value, _Spot(where), tensors), tensors


def decode(value: object, tensors: Callable[[str], torch.Tensor], where: str = "value") -> Any:
    """Return the value that was encoded; ``tensors`` returns the tensor of a place.

    Lists and dicts without tagged values inside are those of ``value`` itself.

    **Raises** CheckpointError for JSON that `encode` does not write.
    """
    return _decode(value, _Spot(where), tensors)


def _encode(value: Any, spot: _Spot, tensors: dict[str, torch.Tensor]) -> object:
    if _is_plain(value):
        return value
    if isinstance(value, torch.Tensor):
        return {"$": "tensor", "of": _add_tensor(value, spot, tensors)}
    kind = type(value)
    codec = _ARRAY if isinstance(value, np.generic | np.ndarray) else _CODECS.get(kind)
    if codec is None:
        spot.refuse(
            f"a {kind.__module__}.{kind.__qualname__} is not data; a checkpoint holds numbers, "
            "text, plain containers and tensors, never functions or objects. Give its "
            "state_dict(), or its values in a dict or list"
        )
    try:
        fields = codec.write(value)
    except ValueError as error:
        spot.refuse(str(error))
    if not codec.members:
        return {"$": codec.tag, **fields}
    if spot.depth >= _MAX_VALUE_DEPTH:
        spot.refuse(
            f"containers lie in one another more than {_MAX_VALUE_DEPTH} levels deep (a tuple or "
            "set counts as two), or one contains itself; save it as a flat list or dict"
        )
    members, keys = fields[codec.members], fields.get("keys")
    is_object = kind is dict and all(type(k) is str and k != "$" and _is_plain(k) for k in value)
    is_json = is_object or kind is list
    names = range(len(members)) if keys is None else keys
    fields[codec.members] = [
        each
        if _is_plain(each)
        else _encode(each, spot.inside(n, 2 - is_json) if codec.ordered else spot.as_key(), tensors)
        for n, each in zip(names, members, strict=True)
    ]
    if is_json:
        return dict(zip(names, fields["values"], strict=True)) if is_object else fields["of"]
    if keys is not None:
        fields["keys"] = [_encode(key, spot.as_key(), tensors) for key in keys]
    if not codec.ordered:
        fields["of"].sort(key=dumps)  # a set's order differs from process to process
    return {"$": codec.tag, **fields}


def _add_tensor(value: torch.Tensor, spot: _Spot, tensors: dict[str, torch.Tensor]) -> str:
    if isinstance(value, DTensor):
        spot.refuse(
            "it is a shard of a larger tensor; put parameters into the model and their state "
            "into the optimizer, which are saved as such, or give t.full_tensor()"
        )
    if type(value) is not torch.Tensor:
        spot.refuse(f"a {type(value).__name__} is not a plain tensor; give t.detach().clone()")
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        spot.refuse("a sparse, quantized or meta tensor has no plain bytes; give a dense tensor")
    if spot.is_key:
        spot.refuse("a tensor cannot be a key; give its value, t.item() or t.tolist()")
    place, number = spot.place, 2
    while place in tensors:  # {"a.b": t} and {"a": {"b": t}} have the same place
        place, number = f"{spot.place}~{number}", number + 1
    tensors[place] = value.detach().resolve_conj().resolve_neg()
    return place


def _decode(value: Any, spot: _Spot, tensors: Callable[[str], torch.Tensor]) -> object:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is not list and kind is not dict:
        spot.refuse(f"expected a value read from JSON, got a {kind.__name__}")
    if spot.depth >= MAX_DEPTH:
        spot.refuse(f"it is nested deeper than {MAX_DEPTH} levels")
    if "$" in value and kind is dict:
        return _decode_tagged(dict(value), spot, tensors)
    items = value.items() if kind is dict else enumerate(value)
    made = [v if _is_plain(v) else _decode(v, spot.inside(k, 1), tensors) for k, v in items]
    if all(map(is_, made, value.values() if kind is dict else value)):
        return value  # containers without tags stay the same objects: they may be large
    return dict(zip(value, made, strict=True)) if kind is dict else made


def _decode_tagged(fields: _Fields, spot: _Spot, tensors: Callable[[str], torch.Tensor]) -> object:
    tag = fields.pop("$")
    codec = _BY_TAG.get(tag) if isinstance(tag, str) else None
    if codec is None and tag != "tensor":
        spot.refuse(f"unknown tag {reprlib.repr(tag)}; a newer Shardwise may have written it")
    if codec is not None and codec.members:
        for name in {codec.members, "keys"} & fields.keys():
            # The list itself is not a container of the user: only its members are decoded.
            if type(fields[name]) is not list:
                spot.refuse(f"expected a list as {name!r} of a {tag}")
            fields[name] = _decode(fields[name], spot._replace(depth=spot.depth + 1), tensors)
    read = codec.read if codec is not None else lambda of: tensors(_read_text(of))
    try:
        return read(**fields)
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        spot.refuse(f"not a {tag} as Shardwise writes it: {reason[:200]}")


def _is_plain(value: Any) -> bool:
    """Tell whether JSON's own form of a value is read as the same value."""
    kind = type(value)
    if kind is int:
        return bool(_MIN_INT <= value <= _MAX_INT)
    if kind is float:
        return math.isfinite(value)
    if kind is str:
        # Half of a character, as os.fsdecode makes them, is no UTF-8.
        return value.isascii() or not any("\ud800" <= character < "\ue000" for character in value)
    return value is None or kind is bool


# -- readers; each raises Python's errors on wrong values


def _read_text(of: object) -> str:
    if type(of) is not str:
        raise TypeError(f"expected text, got {reprlib.repr(of)}")
    return of


def _read_base64(of: object) -> bytes:
    return base64.b64decode(_read_text(of), validate=True)


def _write_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _sizes(of: object) -> list[int]:
    if type(of) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in of):
        raise TypeError(f"expected a list of sizes, got {reprlib.repr(of)}")
    return of


def _read_int(of: object) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", text := _read_text(of)):
        raise ValueError("expected hexadecimal digits")
    return int(text, 16)


def _read_doubles(of: object, form: str) -> tuple[float, ...]:
    return struct.unpack(form, bytes.fromhex(_read_text(of)))


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


def _write_dtype(value: torch.dtype) -> str:
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"{value} is not a dtype that a checkpoint knows; save its name as text")
    return name


def _read_device(of: object) -> torch.device:
    if not re.fullmatch(r"[a-z0-9]{1,20}(:[0-9]{1,3})?", text := _read_text(of)):
        raise ValueError("expected a name like 'cuda:0'")
    device = torch.device(text)
    if str(device) != text:  # torch keeps 8 bits of an index and drops the rest
        raise ValueError(f"{text} is not a device of torch")
    return device


_ARRAY_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
_ARRAY_DTYPES = {
    dtype.str: dtype
    for kind, sizes in _ARRAY_SIZES.items()
    for size in sizes
    for dtype in (np.dtype(f"<{kind}{size}"), np.dtype(f">{kind}{size}"))
}


def _write_array(value: np.generic | NDArray[np.generic]) -> _Fields:
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


def _read_array(of: object, dtype: object, shape: object) -> NDArray[np.generic]:
    data, found = _read_base64(of), _ARRAY_DTYPES[_read_text(dtype)]
    sizes = _sizes(shape)
    if len(data) > _MAX_ARRAY_BYTES or len(data) != math.prod(sizes) * found.itemsize:
        raise ValueError(f"{len(data)} bytes for shape {reprlib.repr(sizes)} of {found}")
    if found.kind == "b" and data.translate(None, b"\0\1"):
        raise ValueError("a bool that is neither 0 nor 1")
    return np.frombuffer(data, found).reshape(sizes).copy()


def _check_hashes(keys: list[object]) -> None:
    """Refuse keys chosen to collide: a dict of them takes quadratic time."""
    if len(keys) - len({hash(key) for key in keys}) > _MAX_COLLISIONS:
        raise ValueError("keys of one hash")


def _read_set(of: list[object]) -> set[object]:
    _check_hashes(of)
    if len(members := set(of)) != len(of):
        raise ValueError("a member occurs twice")
    return members


def _read_deque(of: list[object], maxlen: object) -> deque[object]:
    if maxlen is None:
        return deque(of)
    if type(maxlen) is not int or not len(of) <= maxlen:
        raise ValueError(f"{len(of)} members, and a maxlen of {reprlib.repr(maxlen)}")
    return deque(of, maxlen)


def _read_dict(keys: list[object], values: list[object]) -> dict[object, object]:
    _check_hashes(keys)
    made = dict(zip(keys, values, strict=True))
    if len(made) != len(keys):
        raise ValueError("a key occurs twice")
    return made


_FACTORIES: dict[str, Callable[[], object] | None] = {
    "none": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)},
}


def _write_default(value: defaultdict[object, object]) -> _Fields:
    names = [n for n, kind in _FACTORIES.items() if kind is value.default_factory]
    if not names:
        raise ValueError(
            f"the default_factory {reprlib.repr(value.default_factory)} of a defaultdict is code, "
            "not data; save dict(...) of it"
        )
    return _parts(value) | {"factory": names[0]}


def _parts(value: Mapping[object, object]) -> _Fields:
    return {"keys": list(value), "values": list(value.values())}


# -- the table


class _Codec(NamedTuple):
    """How values of one type are written and read.

    ``write`` returns the fields beside the tag, and raises ValueError with the reason for values
    that are not data. ``read`` takes the fields. ``members`` names the field with values inside,
    if the type is a container; keys are in a field ``keys``.
    """

    tag: str
    write: Callable[[Any], _Fields]
    read: Callable[..., object]
    members: str = ""
    ordered: bool = True


def _leaf(tag: str, write: Callable[[Any], object], read: Callable[..., object]) -> _Codec:
    return _Codec(tag, lambda value: {"of": write(value)}, read)


_ARRAY = _Codec("numpy.array", _write_array, _read_array)  # or a scalar
_CODECS: dict[type, _Codec] = {
    int: _leaf("int", hex, _read_int),
    float: _leaf(
        "float", lambda v: struct.pack(">d", v).hex(), lambda of: _read_doubles(of, ">d")[0]
    ),
    complex: _leaf(
        "complex",
        lambda v: struct.pack(">2d", v.real, v.imag).hex(),
        lambda of: complex(*_read_doubles(of, ">2d")),
    ),
    str: _leaf(
        "str",
        lambda v: _write_base64(v.encode("utf-8", "surrogatepass")),
        lambda of: _read_base64(of).decode("utf-8", "surrogatepass"),
    ),
    bytes: _leaf("bytes", _write_base64, _read_base64),
    torch.device: _leaf("torch.device", str, _read_device),
    torch.dtype: _leaf("torch.dtype", _write_dtype, lambda of: _DTYPES[_read_text(of)]),
    torch.Size: _leaf("torch.Size", list, lambda of: torch.Size(_sizes(of))),
    list: _Codec("list", lambda v: {"of": v}, list, "of"),
    tuple: _Codec("tuple", lambda v: {"of": v}, lambda of: tuple(of), "of"),
    set: _Codec("set", lambda v: {"of": v}, _read_set, "of", False),
    frozenset: _Codec(
        "frozenset", lambda v: {"of": v}, lambda of: frozenset(_read_set(of)), "of", False
    ),
    deque: _Codec("deque", lambda v: {"of": v, "maxlen": v.maxlen}, _read_deque, "of"),
    dict: _Codec("dict", _parts, _read_dict, "values"),
    OrderedDict: _Codec(
        "OrderedDict", _parts, lambda keys, values: OrderedDict(_read_dict(keys, values)), "values"
    ),
    Counter: _Codec(
        "Counter", _parts, lambda keys, values: Counter(_read_dict(keys, values)), "values"
    ),
    defaultdict: _Codec(
        "defaultdict",
        _write_default,
        lambda keys, values, factory: defaultdict(
            _FACTORIES[_read_text(factory)], _read_dict(keys, values)
        ),
        "values",
    ),
}
_BY_TAG = {codec.tag: codec for kind, codec in _CODECS.items() if kind is not list} | {
    "numpy.array": _ARRAY,
    "numpy.scalar": _Codec("", _write_array, lambda of, dtype: _read_array(of, dtype, [])[()]),
}
