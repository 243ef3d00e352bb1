"""Read a pickle as data: a tree of plain values in which objects are only described.

Note [A pickle is a program; this reads it as a list of values]
A pickle names classes and functions, and an unpickler imports and calls them. This reader cannot
import or call. `pickletools.genops` decodes the opcodes, and a small stack machine builds values
from them. A name in the pickle becomes a `Name`, a record of text. If the pickle calls a name, a
table says what stands for the result: a function of this package from data to data, or, if the
table says None, a `Made` with the name, the arguments and the state. A name that is not in the
table is refused, and so is each opcode that torch's writers do not use. No class of torch is made,
so reading does not depend on the version of torch that wrote the file.

Note [Limits of a hostile pickle]
Reading takes time and memory in proportion to the file:

- Memory is charged before it is taken, against 16 MiB and 32 times the bytes read so far. Files of
  torch are charged with 8 to 22 times their size. Opcodes may be a million and three for four
  bytes; torch writes two for four bytes at most.
- A call copies its arguments, and two bytes can name the same argument again, so the copies are
  charged as well.
- Dict keys are scalars, flat tuples of scalars, or `Made` objects by identity, because hashing a
  nested tuple can take exponential time. At most 1,000 keys may share a hash.
- A memo index follows its predecessor, so a large index allocates nothing.

A small pickle can still describe a tree in which one branch stands in a million places, so a walk
over the tree counts its steps. `pickle.Unpickler` was measured instead of this machine: it has no
place to check keys before they are hashed (docs/negative-results.md).
"""

import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from shardwise.errors import CheckpointError, DamagedCheckpoint

Builder = Callable[..., Any]
MAX_PICKLE_BYTES = 256 << 20
_MAX_INT_BITS = 255 * 8
_MAX_KEY_PARTS = 256
_MAX_COLLISIONS = 1000
_MAX_PATH = 4096
_UNIQUE = (1 << 61) - 1  # Python's hash of integers below this has no collisions
_FREE_MADE, _MADE_TIMES = 16 << 20, 32  # may be made: bytes of memory, and times the bytes read
_FREE_CODES, _CODES_SHARE = 1_000_000, 0.75  # opcodes, and their share of the bytes read
_ENTRY_BYTES = 72  # of a key or member
_BUILT_BYTES = 160  # of the result of a table's function, beside its arguments
_MARK = object()
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant that a pickle names, e.g. ``torch.float32``; never imported."""

    text: str


@dataclass(eq=False, slots=True, repr=False)
class Made:
    """An object as its pickle describes it: the name that is called, its arguments, its state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def field(self, key: str) -> Any:
        """Return an attribute, or None if the pickle does not set it."""
        return self.state.get(key) if isinstance(self.state, dict) else None

    def __repr__(self) -> str:
        return f"<{self.name}>"  # the state may hold this object again


def read_pickle(
    data: bytes,
    where: str,
    allowed: Mapping[str, Builder | None],
    persistent: Callable[[Any], Any] | None = None,
    any_name: bool = False,
) -> Any:
    """Return the value that a pickle describes. See Note [A pickle is a program; ...].

    ``allowed`` has every name that may occur; ``persistent`` answers persistent ids. With
    ``any_name`` other names may occur too, and their objects become `Made`.

    **Cost** time and memory in proportion to the pickle: Note [Limits of a hostile pickle].

    **Raises** CheckpointError naming a class that is not allowed, or when a limit is reached;
    DamagedCheckpoint when the bytes are not a whole pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{where}: a pickle of {len(data)} bytes; at most {MAX_PICKLE_BYTES} are read"
        )
    machine = _Machine(data, where, allowed, persistent, any_name)
    try:
        return machine.run()
    except CheckpointError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedCheckpoint(
            f"{where}: not a whole pickle as torch writes it, near byte {machine.at}: "
            f"{type(error).__name__} {error}"
        ) from None


class _Machine:
    """The stack and the memo of one pickle. Each method without a return value is an opcode."""

    def __init__(
        self,
        data: bytes,
        where: str,
        allowed: Mapping[str, Builder | None],
        persistent: Callable[[Any], Any] | None,
        any_name: bool,
    ) -> None:
        self.at = 0  # of the opcode that runs
        self._data = data
        self._where = where
        self._allowed = allowed
        self._persistent = persistent
        self._any_name = any_name
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._made_bytes = self._num_codes = 0
        self._hashes: set[tuple[int, int]] = set()
        self._num_collisions = 0

    def run(self) -> Any:
        for code, argument, at in pickletools.genops(self._data):
            self.at = at or 0
            if code.name == "STOP":
                break
            if code.name not in _CODES:
                raise CheckpointError(
                    f"{self._where}: pickle opcode {code.code!r} at byte {at}, which no checkpoint "
                    "needs: the file is damaged or hostile"
                )
            made_bytes, action = _CODES[code.name]
            self._num_codes += 1
            self._charge(made_bytes)
            action(self, argument)
        (value,) = self._stack
        if value is _MARK:
            raise ValueError("it ends inside a collection")
        return value

    def _charge(self, num_bytes: int) -> None:
        """Count memory that is about to be taken. **Raises** CheckpointError beyond a limit."""
        self._made_bytes += num_bytes
        is_large = self._made_bytes > _FREE_MADE + _MADE_TIMES * self.at
        if is_large or self._num_codes > _FREE_CODES + _CODES_SHARE * self.at:
            raise CheckpointError(
                f"{self._where}: the first {self.at} bytes of a pickle describe {self._num_codes} "
                f"values that take more than {self._made_bytes} bytes, as no checkpoint's do: the "
                "file is damaged or hostile; large state belongs into tensors"
            )

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_int(self, value: int) -> None:
        if value.bit_length() > _MAX_INT_BITS:
            raise ValueError(f"a number of {value.bit_length()} bits")
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a value was expected, a mark came")
        return value

    def _pop_to_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark was expected")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def _top(self, kind: type) -> Any:
        """Return the container that is filled, which is the last value."""
        value = self._stack[-1]
        if self._any_name and isinstance(value, Made):
            return kind()  # the members of an object that is not made are dropped
        if not isinstance(value, kind):
            raise ValueError(f"a {kind.__name__} was expected, a {type(value).__name__} came")
        return value

    def put(self, index: int | None) -> None:
        index = len(self._memo) if index is None else index
        if self._stack[-1] is _MARK or index > len(self._memo):
            raise ValueError(f"memo index {index}: a mark, or an index that was skipped")
        if index == len(self._memo):
            self._charge(8)
            self._memo.append(None)
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def make_tuple(self, length: int) -> None:
        values = [self._pop() for _ in range(length)]
        self._stack.append(tuple(reversed(values)))

    def make_long_tuple(self, _: None) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def make_frozenset(self, _: None) -> None:
        members = self._pop_to_mark()
        self._charge(_ENTRY_BYTES * len(members))
        self._stack.append(frozenset(check_keys(members)))

    def append(self, _: None) -> None:
        value = self._pop()
        self._top(list).append(value)

    def extend(self, _: None) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def set_item(self, _: None) -> None:
        value, key = self._pop(), self._pop()
        target = self._top(dict)
        target[self._key(target, key)] = value

    def set_items(self, _: None) -> None:
        items = self._pop_to_mark()
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self._key(target, key)] = value

    def add_members(self, _: None) -> None:
        members = self._pop_to_mark()
        target = self._top(set)
        target.update(self._key(target, member) for member in members)

    def _key(self, target: Any, key: Any) -> Any:
        """Return a key or member of ``target``. See Note [Limits of a hostile pickle]."""
        _check_key(key)
        self._charge(_ENTRY_BYTES)
        if type(key) is tuple or (type(key) is int and abs(key) >= _UNIQUE):
            self._charge(2 * _ENTRY_BYTES)
            mark = (id(target), hash(key))
            self._num_collisions += mark in self._hashes
            self._hashes.add(mark)
            if self._num_collisions > _MAX_COLLISIONS:
                raise ValueError("keys that were chosen to have one hash")
        return key

    def name(self, module_and_name: str) -> None:
        self._push_name(module_and_name.replace(" ", ".", 1))

    def name_from_stack(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no text")
        self._push_name(f"{module}.{name}")

    def _push_name(self, text: str) -> None:
        if text not in self._allowed and not self._any_name:
            raise CheckpointError(
                f"{self._where}: it names {text!r}, which is not on the list of what checkpoints "
                "hold, so it was neither imported nor called. If it is part of your own state, "
                "save that state as numbers, text, lists and dicts"
            )
        self._stack.append(Name(text))

    def call(self, _: None) -> None:
        args, called = self._pop(), self._pop()
        if self._any_name and isinstance(called, Made):
            called = Name(called.name)
        if not (isinstance(called, Name) and isinstance(args, tuple)):
            raise ValueError("a call of something that is no name")
        builder = self._allowed.get(called.text)
        if builder is None:
            self._stack.append(Made(called.text, args))
            return
        self._charge(_BUILT_BYTES + sum(_bytes_of_copy(arg) for arg in args))
        self._stack.append(builder(*args))

    def set_state(self, _: None) -> None:
        state, target = self._pop(), self._stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):  # the `_metadata` of a state_dict is dropped
            raise ValueError(f"a state for a {type(target).__name__}")

    def persistent_id(self, _: None) -> None:
        if self._persistent is None:
            raise ValueError("a persistent id")
        self._stack.append(self._persistent(self._pop()))


_Action = Callable[[_Machine, Any], None]
# Each opcode with about the bytes of memory that it takes; keys and members are charged apart.
_CODES: Mapping[str, tuple[int, _Action]] = {
    **dict.fromkeys(("PROTO", "FRAME"), (0, lambda machine, argument: None)),
    "MARK": (8, lambda machine, _: machine.push(_MARK)),
    "NONE": (8, lambda machine, _: machine.push(None)),
    "NEWTRUE": (8, lambda machine, _: machine.push(True)),
    "NEWFALSE": (8, lambda machine, _: machine.push(False)),
    "EMPTY_TUPLE": (8, lambda machine, _: machine.push(())),
    "EMPTY_LIST": (64, lambda machine, _: machine.push([])),
    "EMPTY_DICT": (64, lambda machine, _: machine.push({})),
    "EMPTY_SET": (224, lambda machine, _: machine.push(set())),
    **dict.fromkeys(("BININT", "BININT1", "BININT2"), (8, _Machine.push)),
    **dict.fromkeys(("LONG1", "LONG4"), (40, _Machine.push_int)),
    "BINFLOAT": (40, _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), (60, _Machine.push)),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), (60, _Machine.push)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), (0, _Machine.put)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), (8, _Machine.get)),
    "TUPLE1": (64, lambda machine, _: machine.make_tuple(1)),
    "TUPLE2": (64, lambda machine, _: machine.make_tuple(2)),
    "TUPLE3": (64, lambda machine, _: machine.make_tuple(3)),
    "TUPLE": (64, _Machine.make_long_tuple),
    "FROZENSET": (224, _Machine.make_frozenset),
    "APPEND": (8, _Machine.append),
    "APPENDS": (0, _Machine.extend),
    "SETITEM": (0, _Machine.set_item),
    "SETITEMS": (0, _Machine.set_items),
    "ADDITEMS": (0, _Machine.add_members),
    "GLOBAL": (160, _Machine.name),
    "STACK_GLOBAL": (160, _Machine.name_from_stack),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), (96, _Machine.call)),
    "BUILD": (0, _Machine.set_state),
    "BINPERSID": (160, _Machine.persistent_id),
}


def _bytes_of_copy(argument: Any) -> int:
    if isinstance(argument, str | bytes | bytearray):
        return len(argument)
    sized = isinstance(argument, list | tuple | dict | set | frozenset)
    return _ENTRY_BYTES * len(argument) if sized else 0


def _check_key(key: Any) -> None:
    """Refuse a key of a dict or member of a set that is not data."""
    members = key if type(key) is tuple else (key,)
    if len(members) > _MAX_KEY_PARTS:
        raise ValueError("a key of too many parts")
    if not all(isinstance(member, (*_SCALARS, Name, Made)) for member in members):
        raise ValueError("a key that is no scalar")


def check_keys(keys: list[Any]) -> list[Any]:
    """Return all keys of one dict or set. **Raises** ValueError if they cannot be."""
    for key in keys:
        _check_key(key)
    if len(keys) - len({hash(key) for key in keys}) > _MAX_COLLISIONS:
        raise ValueError("keys that were chosen to have one hash")
    return keys


# -- values of plain Python and NumPy, as protocols 2 to 5 write them
def _encode(text: str, codec: str) -> bytes:
    if codec != "latin1":
        raise ValueError("bytes in a codec that pickle does not use")
    return text.encode("latin-1")


def _bytearray(data: Any = b"") -> bytearray:
    if not isinstance(data, bytes):  # a number would make that many zeros
        raise ValueError("a bytearray of something that is no bytes")
    return bytearray(data)


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    items = [(key, value) for key, value in pairs]
    check_keys([key for key, _ in items])
    return OrderedDict(items)


def _counter(counts: Any = None) -> Counter[Any]:
    if not isinstance(counts, dict | None):
        raise ValueError("a Counter of something that is no dict")
    return Counter(counts)


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts) or sum(map(len, parts)) > _MAX_PATH:
        raise ValueError(f"a path of more than {_MAX_PATH} characters")
    return str(PurePosixPath(*parts))


_NUMBERS = {"b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8"}
ARRAYS = tuple(f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core"))


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    if not (isinstance(dtype, Made) and dtype.name == "numpy.dtype" and isinstance(data, bytes)):
        raise ValueError("a NumPy scalar without its dtype")
    (form, *_) = dtype.args
    if form not in _NUMBERS:
        raise ValueError("a NumPy scalar that is no number")
    (value,) = np.frombuffer(data, f"<{form}").tolist()
    return value


def numpy_array(made: Made) -> np.ndarray[Any, Any]:
    """Return the array of numbers that a call of `ARRAYS` and its state describe.

    **Raises** ValueError when it is of other values, or its bytes are not those of its shape.
    """
    _, shape, dtype, by_columns, data = made.state
    if not (isinstance(dtype, Made) and dtype.name == "numpy.dtype" and isinstance(data, bytes)):
        raise ValueError("an array without dtype and bytes")
    form, byte_order = dtype.args[0], dtype.state[1]
    is_plain = made.args[:1] == (Name("numpy.ndarray"),) and form in {*_NUMBERS, "c8", "c16"}
    if not is_plain or byte_order not in ("<", ">", "|"):
        raise ValueError("an array of values that are no plain numbers")
    flat = np.frombuffer(data, np.dtype(f"{byte_order}{form}"))
    array = flat.reshape(shape, order="F" if by_columns else "C")
    return array.astype(array.dtype.newbyteorder("<"))


_BUILTINS: Mapping[str, Builder] = {
    "set": lambda members=(): set(check_keys(list(members))),
    "frozenset": lambda members=(): frozenset(check_keys(list(members))),
    "bytearray": _bytearray,
    "bytes": lambda: b"",
    "complex": lambda real, imag: complex(float(real), float(imag)),
}

PLAIN: Mapping[str, Builder | None] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "_codecs.encode": _encode,
    **{f"builtins.{name}": make for name, make in _BUILTINS.items()},
    **{f"__builtin__.{name}": make for name, make in _BUILTINS.items()},
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
