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
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import is_
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError
from shardwise.strict_json import MAX_DEPTH, dumps, loads

__all__ = ["decode", "dumps", "encode", "loads"]

_MAX_VALUE_DEPTH = 48
_MAX_COLLISIONS = 1000

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)},
}
_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "OrderedDict",
    Counter: "Counter",
    defaultdict: "defaultdict",
}


class _Spot(NamedTuple):
    """The path to a value by keys, and its depth. Inside a key there are no places for tensors."""

    name: str
    keys: tuple[object, ...] = ()
    depth: int = 0
    is_key: bool = False

    def inside(self, key: object, levels: int) -> "_Spot":
        return self._replace(keys=(*self.keys, key), depth=self.depth + levels)

    def as_key(self, levels: int) -> "_Spot":
        """Return the spot of all keys or members of this one."""
        return _Spot(f"a key or member of {self.where}", (), self.depth + levels, True)

    @property
    def where(self) -> str:
        """The path for error messages."""
        return self.name + "".join(f"[{_shown(key)}]" for key in self.keys)

    @property
    def place(self) -> str:
        """The path as a tensor's place: its keys, joined by dots."""
        return reduce(lambda p, key: f"{p}.{_text(key)}" if p else _text(key), self.keys, "")


def encode(
    value: object, where: str, before: Mapping[str, torch.Tensor] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the value for `dumps`, and its tensors by their place in it.

    A place is the path of keys in ``value``, joined by dots ("scheduler.base.0"). Tensors are
    detached, and copied only if they are lazily conjugated. A value at two places becomes two.
    ``before`` are the tensors of another value that is saved beside this one: they are returned
    too, and no place is used twice.

    **Raises** CheckpointError for values that are not data (functions, objects, shards of
    parameters), for cycles and for nesting beyond 48 levels; it names the place as
    ``where['scheduler'][0]``.
    """
    encoder = _Encoder()
    encoder.tensors.update(before or {})
    return encoder.encode(value, _Spot(where)), encoder.tensors


def decode(value: object, tensors: Callable[[str], torch.Tensor], where: str = "value") -> Any:
    """Return the value that was encoded; ``tensors`` returns the tensor of a place.

    Lists and dicts without tagged values inside are those of ``value`` itself.

    **Raises** CheckpointError for JSON that `encode` does not write.
    """
    return _Decoder(tensors).decode(value, _Spot(where))


class _Encoder:
    """One walk over one value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._open: set[int] = set()  # containers around the current value

    def encode(self, value: object, spot: _Spot) -> Any:
        if _is_plain(value):
            return value
        kind = type(value)
        if kind is list or kind in _SEQUENCES or kind in _MAPPINGS:
            return self._container(value, spot)
        if isinstance(value, torch.Tensor):
            return {"$": "tensor", "of": self._tensor(value, spot)}
        try:
            leaf = _write_leaf(value)
        except ValueError as error:
            _refuse(spot, str(error))
        if leaf is not None:
            return leaf
        _refuse(
            spot,
            f"a {kind.__module__}.{kind.__qualname__} is not data; a checkpoint holds numbers, "
            "text, plain containers and tensors, never functions or objects. Give its "
            "state_dict(), or its values in a dict or list",
        )

    def _container(self, value: Any, spot: _Spot) -> Any:
        if id(value) in self._open:
            _refuse(spot, "it contains itself; save each part once, without the way back")
        if spot.depth >= _MAX_VALUE_DEPTH:
            _refuse(
                spot,
                f"containers lie in one another more than {_MAX_VALUE_DEPTH} levels deep (a "
                "tuple or set counts as two); save it as a flat list or dict",
            )
        self._open.add(id(value))
        try:
            if type(value) in _MAPPINGS:
                return self._mapping(value, spot)
            return self._sequence(value, spot)
        finally:
            self._open.discard(id(value))

    def _sequence(self, value: Iterable[Any], spot: _Spot) -> Any:
        if isinstance(value, set | frozenset):
            members = self._keys(value, spot)
            members.sort(key=dumps)  # its order differs from process to process
            return {"$": _SEQUENCES[type(value)], "of": members}
        plain = type(value) is list
        levels = 1 if plain else 2
        members = [
            member if _is_plain(member) else self.encode(member, spot.inside(i, levels))
            for i, member in enumerate(value)
        ]
        if plain:
            return members
        tagged: dict[str, Any] = {"$": _SEQUENCES[type(value)], "of": members}
        return tagged | {"maxlen": value.maxlen} if isinstance(value, deque) else tagged

    def _mapping(self, value: Mapping[Any, Any], spot: _Spot) -> Any:
        plain = type(value) is dict and all(
            type(key) is str and key != "$" and _is_plain(key) for key in value
        )
        levels = 1 if plain else 2
        values = [
            member if _is_plain(member) else self.encode(member, spot.inside(key, levels))
            for key, member in value.items()
        ]
        if plain:
            return dict(zip(value, values, strict=True))
        tagged: dict[str, Any] = {"$": _MAPPINGS[type(value)], "keys": self._keys(value, spot)}
        tagged["values"] = values
        if isinstance(value, defaultdict):
            names = [n for n, kind in _FACTORIES.items() if kind is value.default_factory]
            if not names:
                _refuse(
                    spot,
                    f"the default_factory {reprlib.repr(value.default_factory)} of a defaultdict "
                    "is code, not data; save dict(...) of it",
                )
            tagged["factory"] = names[0]
        return tagged

    def _keys(self, keys: Iterable[object], spot: _Spot) -> list[Any]:
        inside = spot.as_key(2)
        return [self.encode(key, inside) for key in keys]

    def _tensor(self, value: torch.Tensor, spot: _Spot) -> str:
        if isinstance(value, DTensor):
            _refuse(
                spot,
                "it is a shard of a larger tensor; put parameters into the model and their state "
                "into the optimizer, which are saved as such, or give t.full_tensor()",
            )
        if type(value) is not torch.Tensor:
            _refuse(
                spot, f"a {type(value).__name__} is not a plain tensor; give t.detach().clone()"
            )
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            _refuse(
                spot,
                "a sparse, quantized or meta tensor has no plain bytes; give a dense tensor",
            )
        if spot.is_key:
            _refuse(spot, "a tensor cannot be a key; give its value, t.item() or t.tolist()")
        place, number = spot.place, 2
        while place in self.tensors:  # {"a.b": t} and {"a": {"b": t}} have the same place
            place, number = f"{spot.place}~{number}", number + 1
        self.tensors[place] = value.detach().resolve_conj().resolve_neg()
        return place


class _Decoder:
    """One walk over one value that was read."""

    def __init__(self, tensors: Callable[[str], torch.Tensor]) -> None:
        self._tensors = tensors

    def decode(self, value: Any, spot: _Spot) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is not list and kind is not dict:
            _refuse(spot, f"expected a value read from JSON, got a {kind.__name__}")
        if spot.depth >= MAX_DEPTH:
            _refuse(spot, f"it is nested deeper than {MAX_DEPTH} levels")
        # Containers without tags stay the same objects: they may be large.
        if kind is list:
            members = [
                member if _is_plain(member) else self.decode(member, spot.inside(i, 1))
                for i, member in enumerate(value)
            ]
            return value if all(map(is_, members, value)) else members
        if "$" not in value:
            made = {
                key: member if _is_plain(member) else self.decode(member, spot.inside(key, 1))
                for key, member in value.items()
            }
            return value if all(map(is_, made.values(), value.values())) else made
        return self._tagged(value, spot)

    def _tagged(self, value: dict[str, Any], spot: _Spot) -> Any:
        tag, fields = value["$"], {key: of for key, of in value.items() if key != "$"}
        make = _READERS.get(tag) if isinstance(tag, str) else None
        if make is None and tag != "tensor":
            _refuse(spot, f"unknown tag {reprlib.repr(tag)}; a newer Shardwise may have written it")
        for name in ("of", "keys", "values"):
            if tag in _CONTAINER_TAGS and name in fields:
                # The list itself is not a container of the user: only its members are decoded.
                if type(fields[name]) is not list:
                    _refuse(spot, f"expected a list as {name!r} of a {tag}")
                inside = spot._replace(depth=spot.depth + 1)
                fields[name] = self.decode(fields[name], inside)
        try:
            if make is None:
                return self._tensor(**fields)
            return make(**fields)
        except CheckpointError:
            raise
        except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error) as e:
            reason = (str(e).strip() or type(e).__name__).splitlines()[0]
            _refuse(spot, f"not a {tag} as Shardwise writes it: {reason[:200]}")

    def _tensor(self, of: object) -> torch.Tensor:
        return self._tensors(_read_text(of))


def _text(key: object) -> str:
    try:
        return str(key).encode("utf-8", "backslashreplace").decode()
    except ValueError:  # an int with more digits than Python writes
        return type(key).__name__


def _shown(key: object) -> str:
    try:
        return reprlib.repr(key)
    except ValueError:
        return type(key).__name__


def _refuse(spot: _Spot, reason: str) -> NoReturn:
    raise CheckpointError(f"{spot.where}: {reason}")


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


def _is_plain(value: Any) -> bool:
    """Tell whether JSON's own form of a value is read as the same value."""
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


def _write_leaf(value: Any) -> dict[str, Any] | None:
    """Return a leaf that is not plain as an object with a tag; None for values of other types.

    **Raises** ValueError for numpy values that are too large or not plain numbers.
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


def _read_array(of: object, dtype: object, shape: object) -> np.ndarray[Any, Any]:
    data, found = _read_base64(of), _ARRAY_DTYPES[_read_text(dtype)]
    sizes = _sizes(shape)
    if len(data) > _MAX_ARRAY_BYTES or len(data) != math.prod(sizes) * found.itemsize:
        raise ValueError(f"{len(data)} bytes for shape {reprlib.repr(sizes)} of {found}")
    if found.kind == "b" and data.translate(None, b"\0\1"):
        raise ValueError("a bool that is neither 0 nor 1")
    return np.frombuffer(data, found).reshape(sizes).copy()


def _write_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _read_base64(of: object) -> bytes:
    return base64.b64decode(_read_text(of), validate=True)


def _read_text(of: object) -> str:
    """Return the text. **Raises** TypeError for other values."""
    if type(of) is not str:
        raise TypeError(f"expected text, got {reprlib.repr(of)}")
    return of


def _sizes(of: object) -> list[int]:
    if type(of) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in of):
        raise TypeError(f"expected a list of sizes, got {reprlib.repr(of)}")
    return of


def _read_int(of: Any) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", _read_text(of)):
        raise ValueError("expected hexadecimal digits")
    return int(of, 16)


def _write_dtype(value: torch.dtype) -> str:
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"{value} is not a dtype that a checkpoint knows; save its name as text")
    return name


def _read_device(of: Any) -> torch.device:
    if not re.fullmatch(r"[a-z0-9]{1,20}(:[0-9]{1,3})?", _read_text(of)):
        raise ValueError("expected a name like 'cuda:0'")
    device = torch.device(of)
    if str(device) != of:  # torch keeps 8 bits of an index and drops the rest
        raise ValueError(f"{of} is not a device of torch")
    return device


# By type without parts: its tag, the writer of its "of", and the reader.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[..., Any]]] = {
    int: ("int", hex, _read_int),
    float: (
        "float",
        lambda value: struct.pack(">d", value).hex(),
        lambda of: float(struct.unpack(">d", bytes.fromhex(_read_text(of)))[0]),
    ),
    str: (
        "str",
        lambda value: _write_base64(value.encode("utf-8", "surrogatepass")),
        lambda of: _read_base64(of).decode("utf-8", "surrogatepass"),
    ),
    bytes: ("bytes", _write_base64, _read_base64),
    complex: (
        "complex",
        lambda value: struct.pack(">2d", value.real, value.imag).hex(),
        lambda of: complex(*struct.unpack(">2d", bytes.fromhex(_read_text(of)))),
    ),
    torch.device: ("torch.device", str, _read_device),
    torch.dtype: ("torch.dtype", _write_dtype, lambda of: _DTYPES[_read_text(of)]),
    torch.Size: ("torch.Size", list, lambda of: torch.Size(_sizes(of))),
}


def _check_hashes(keys: Any) -> None:
    """Refuse keys chosen to collide: a dict of them takes quadratic time."""
    if len(keys) - len({hash(key) for key in keys}) > _MAX_COLLISIONS:
        raise ValueError("keys of one hash")


def _read_set(of: Any) -> set[Any]:
    _check_hashes(of)
    members = set(of)
    if len(members) != len(of):
        raise ValueError("a member stands in it twice")
    return members


def _read_deque(of: Any, maxlen: Any) -> deque[Any]:
    if maxlen is not None and (type(maxlen) is not int or not len(of) <= maxlen):
        raise ValueError(f"{len(of)} members, and a maxlen of {reprlib.repr(maxlen)}")
    return deque(of, maxlen)


def _read_dict(keys: Any, values: Any) -> dict[Any, Any]:
    _check_hashes(keys)
    made = dict(zip(keys, values, strict=True))
    if len(made) != len(keys):
        raise ValueError("a key stands in it twice")
    return made


_CONTAINER_TAGS = {*_SEQUENCES.values(), *_MAPPINGS.values()}
# By tag: each takes the fields of its object, and raises Python's errors on wrong ones.
_READERS: dict[str, Callable[..., Any]] = {
    **{tag: read for tag, _, read in _LEAVES.values()},
    "numpy.scalar": lambda of, dtype: _read_array(of, dtype, [])[()],
    "numpy.array": _read_array,
    "tuple": lambda of: tuple(of),
    "set": _read_set,
    "frozenset": lambda of: frozenset(_read_set(of)),
    "deque": _read_deque,
    "dict": _read_dict,
    "OrderedDict": lambda keys, values: OrderedDict(_read_dict(keys, values)),
    "Counter": lambda keys, values: Counter(_read_dict(keys, values)),
    "defaultdict": lambda keys, values, factory: defaultdict(
        _FACTORIES[_read_text(factory)], _read_dict(keys, values)
    ),
}
