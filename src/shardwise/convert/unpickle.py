"""Read a pickle as data: a tree of plain values in which objects are only described.

Note [A pickle is a program; this reads it as a list of values]
A pickle names classes and functions, and an unpickler imports and calls them. This reader cannot
import or call. `pickletools.genops` decodes the opcodes, and a small stack machine builds values
from them. A name in the pickle becomes a `Name`, a record of text. If the pickle calls a name, a
table gives the result: a function of this package from data to data, or, if the
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

A small pickle can still describe a tree in which one branch is in a million places, so a walk
over the tree counts its steps. `pickle.Unpickler` was measured instead of this machine: it has no
place to check keys before they are hashed (docs/negative-results.md).
"""

import logging
import pickletools
import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import CheckpointError, DamagedCheckpoint

T = TypeVar("T")
Builder = Callable[..., object]
_LOG = logging.getLogger("shardwise")
MAX_PICKLE_BYTES = 256 << 20
_LONG_BYTES, _LONGEST_S = 16 << 20, 0.2  # size that is logged; core seconds for a MiB of tuples
_MAX_KEY_PARTS = 256
_MAX_COLLISIONS = 1000
_UNIQUE = (1 << 61) - 1  # Python's hash of integers below this has no collisions
_FREE_MADE, _MADE_TIMES = 16 << 20, 32  # may be made: bytes of memory, and times the bytes read
_FREE_CODES, _CODES_SHARE = 1_000_000, 0.75  # opcodes, and their share of the bytes read
_ENTRY_BYTES = 72  # of a key or member
_STACK_BYTES = 64  # of a mark inside of all others
_BUILT_BYTES = 160  # of the result of a table's function, beside its arguments


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


def expect(kind: type[T], value: object) -> T:
    """Return a value that must be of one type. **Raises** ValueError if it is of another."""
    if type(value) is not kind:
        raise ValueError(f"a {kind.__name__} was expected, {reprlib.repr(value)} came")
    return value


def expect_made(value: object, name: str) -> Made:
    """Return what a call of ``name`` has made. **Raises** ValueError for anything else."""
    made = expect(Made, value)
    if made.name != name:
        raise ValueError(f"{name} was expected, {made} came")
    return made


def read_pickle(
    data: bytes,
    where: str,
    allowed: Mapping[str, Builder | None],
    persistent: Callable[[object], object] | None = None,
    any_name: bool = False,
) -> Any:
    """Return the value that a pickle describes. See Note [A pickle is a program; ...].

    ``allowed`` has every name that may occur; ``persistent`` answers persistent ids. With
    ``any_name`` other names may occur too, and their objects become `Made`.

    **Cost** time and memory in proportion to the pickle: Note [Limits of a hostile pickle]. A log
    line tells of a pickle of more than 16 MiB before it is read.

    **Raises** CheckpointError naming a class that is not allowed, or when a limit is reached;
    DamagedCheckpoint when the bytes are not a whole pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{where}: a pickle of {len(data)} bytes; at most {MAX_PICKLE_BYTES} are read"
        )
    if len(data) > _LONG_BYTES:
        num_mib = len(data) >> 20
        _LOG.warning(
            "%s: a pickle of %d MiB is read value by value, up to %d s on a free core",
            *(where, num_mib, round(num_mib * _LONGEST_S)),
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
    """The stack and the memo of one pickle; its methods are opcodes, see `_CODES`.

    ``outer`` are the stacks below each mark.
    """

    def __init__(
        self,
        data: bytes,
        where: str,
        allowed: Mapping[str, Builder | None],
        persistent: Callable[[object], object] | None,
        any_name: bool,
    ) -> None:
        self.at = 0  # of the opcode that runs
        self.stack: list[object] = []
        self._outer: list[list[object]] = []
        self._memo: list[object] = []
        self._data, self._where, self._allowed = data, where, allowed
        self._persistent, self._any_name = persistent, any_name
        self._made_bytes = self._num_codes = self._num_collisions = self._num_stacks = 0
        self._hashes: set[tuple[int, int]] = set()

    def run(self) -> object:
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
        (value,) = self.stack
        if self._outer:
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

    def push(self, value: object) -> None:
        self.stack.append(value)

    def mark(self, _: None) -> None:
        self._outer.append(self.stack)
        self.stack = []
        if len(self._outer) > self._num_stacks:  # a mark after another was taken reuses its memory
            self._num_stacks += 1
            self._charge(_STACK_BYTES)

    def since_mark(self) -> list[object]:
        values, self.stack = self.stack, self._outer.pop()
        return values

    def last(self, count: int) -> list[object]:
        values = self.stack[len(self.stack) - count :]
        if len(values) != count:
            raise ValueError(f"{count} values were expected, {len(values)} came")
        del self.stack[-count:]
        return values

    def put(self, index: int | None) -> None:
        index = len(self._memo) if index is None else index
        if index > len(self._memo):
            raise ValueError(f"memo index {index}: one was skipped")
        if index == len(self._memo):
            self._charge(8)
            self._memo.append(None)
        self._memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        else:
            self._drop_members(target, "list")

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            self._drop_members(target, "dict")
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(key)
            self._charge(_ENTRY_BYTES)
            if type(key) is tuple or (type(key) is int and abs(key) >= _UNIQUE):
                self._charge(2 * _ENTRY_BYTES)
                mark = (id(target), hash(key))
                self._num_collisions += mark in self._hashes
                self._hashes.add(mark)
                if self._num_collisions > _MAX_COLLISIONS:
                    raise ValueError("keys that were chosen to have one hash")
            target[key] = value

    def _drop_members(self, target: object, kind: str) -> None:
        if not (self._any_name and isinstance(target, Made)):
            raise ValueError(f"a {kind} was expected, a {type(target).__name__} came")

    def name(self, text: str) -> None:
        if text not in self._allowed and not self._any_name:
            raise CheckpointError(
                f"{self._where}: it names {text!r}, which is not on the list of what checkpoints "
                "hold, so it was neither imported nor called. If it is part of your own state, "
                "save that state as numbers, text, lists and dicts"
            )
        self.stack.append(Name(text))

    def name_from_stack(self, _: None) -> None:
        module, name = self.last(2)
        self.name(f"{expect(str, module)}.{expect(str, name)}")

    def call(self, _: None) -> None:
        called, args = self.last(2)
        if self._any_name and isinstance(called, Made):
            called = Name(called.name)
        name, arguments = expect(Name, called).text, expect(tuple, args)
        builder = self._allowed.get(name)
        if builder is None:
            self.stack.append(Made(name, arguments))
            return
        self._charge(_BUILT_BYTES + sum(map(_bytes_of_copy, arguments)))
        self.stack.append(builder(*arguments))

    def set_state(self, _: None) -> None:
        target, state = self.last(2)
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):  # the `_metadata` of a state_dict is dropped
            raise ValueError(f"a state for a {type(target).__name__}")
        self.stack.append(target)

    def persistent_id(self, _: None) -> None:
        if self._persistent is None:
            raise ValueError("a persistent id")
        (key,) = self.last(1)
        self.stack.append(self._persistent(key))


_Action = Callable[[_Machine, Any], None]
# Each opcode with about the bytes of memory that it takes; keys and members are charged separately.
_CODES: Mapping[str, tuple[int, _Action]] = {
    **dict.fromkeys(("PROTO", "FRAME"), (0, lambda machine, _: None)),
    "MARK": (8, _Machine.mark),
    "NONE": (8, lambda machine, _: machine.push(None)),
    "NEWTRUE": (8, lambda machine, _: machine.push(True)),
    "NEWFALSE": (8, lambda machine, _: machine.push(False)),
    "EMPTY_TUPLE": (8, lambda machine, _: machine.push(())),
    "EMPTY_LIST": (64, lambda machine, _: machine.push([])),
    "EMPTY_DICT": (64, lambda machine, _: machine.push({})),
    **dict.fromkeys(("BININT", "BININT1", "BININT2"), (8, _Machine.push)),
    **dict.fromkeys(("LONG1", "BINFLOAT"), (40, _Machine.push)),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), (60, _Machine.push)),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES"), (60, _Machine.push)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), (0, _Machine.put)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), (8, _Machine.get)),
    "TUPLE1": (64, lambda machine, _: machine.push(tuple(machine.last(1)))),
    "TUPLE2": (64, lambda machine, _: machine.push(tuple(machine.last(2)))),
    "TUPLE3": (64, lambda machine, _: machine.push(tuple(machine.last(3)))),
    "TUPLE": (64, lambda machine, _: machine.push(tuple(machine.since_mark()))),
    "APPEND": (8, lambda machine, _: machine.extend(machine.last(1))),
    "APPENDS": (0, lambda machine, _: machine.extend(machine.since_mark())),
    "SETITEM": (0, lambda machine, _: machine.set_items(machine.last(2))),
    "SETITEMS": (0, lambda machine, _: machine.set_items(machine.since_mark())),
    "GLOBAL": (160, lambda machine, text: machine.name(text.replace(" ", ".", 1))),
    "STACK_GLOBAL": (160, _Machine.name_from_stack),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), (96, _Machine.call)),
    "BUILD": (0, _Machine.set_state),
    "BINPERSID": (160, _Machine.persistent_id),
}


def _bytes_of_copy(argument: object) -> int:
    if isinstance(argument, str | bytes | bytearray):
        return len(argument)
    if isinstance(argument, list | tuple | dict | set | frozenset):
        return _ENTRY_BYTES * len(argument)
    return 0


def _check_key(key: object) -> None:
    """Refuse a key of a dict or member of a set that is not data."""
    members = key if isinstance(key, tuple) else (key,)
    if len(members) > _MAX_KEY_PARTS:
        raise ValueError("a key of too many parts")
    scalars = (str, int, float, bool, bytes, type(None), Name, Made)
    if not all(isinstance(member, scalars) for member in members):
        raise ValueError("a key that is no scalar")


def _checked(keys: Iterable[object] = ()) -> Sequence[object]:
    """Return all keys of one dict or set. **Raises** ValueError if they cannot be."""
    listed = list(keys)
    for key in listed:
        _check_key(key)
    if len(listed) - len({hash(key) for key in listed}) > _MAX_COLLISIONS:
        raise ValueError("keys that were chosen to have one hash")
    return listed


# -- values of plain Python and NumPy, as protocols 2 and 3 write them


def _encode(text: str, codec: str) -> bytes:
    if codec != "latin1":
        raise ValueError("bytes in a codec that pickle does not use")
    return text.encode("latin-1")


def _ordered(pairs: Iterable[tuple[object, object]] = ()) -> OrderedDict[object, object]:
    items = [(key, value) for key, value in pairs]
    _checked(key for key, _ in items)
    return OrderedDict(items)


def _counter(counts: object = None) -> Counter[object]:
    if not isinstance(counts, dict | None):
        raise ValueError("a Counter of something that is no dict")
    return Counter(counts)


_NUMBERS = {"b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8"}
ARRAYS = tuple(f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core"))


def _numpy_scalar(dtype: object, data: object) -> object:
    (form, *_) = expect_made(dtype, "numpy.dtype").args
    if form not in _NUMBERS:
        raise ValueError("a NumPy scalar that is no number")
    (value,) = np.frombuffer(expect(bytes, data), f"<{form}").tolist()
    return value


def numpy_array(made: Made) -> NDArray[np.generic]:
    """Return the array of numbers that a call of `ARRAYS` and its state describe.

    **Raises** ValueError when it is of other values, or its bytes are not those of its shape.
    """
    _, shape, of, by_columns, data = made.state
    dtype = expect_made(of, "numpy.dtype")
    form, byte_order = dtype.args[0], dtype.state[1]
    is_plain = made.args[:1] == (Name("numpy.ndarray"),) and form in {*_NUMBERS, "c8", "c16"}
    if not is_plain or byte_order not in ("<", ">", "|"):
        raise ValueError("an array of values that are no plain numbers")
    flat = np.frombuffer(expect(bytes, data), np.dtype(f"{byte_order}{form}"))
    array = flat.reshape(shape, order="F" if by_columns else "C")
    return array.astype(array.dtype.newbyteorder("<"))


_BUILTINS: Mapping[str, Builder] = {
    "set": lambda members=(): set(_checked(members)),
    "frozenset": lambda members=(): frozenset(_checked(members)),
    "bytes": lambda: b"",
    "complex": lambda real, imag: complex(float(real), float(imag)),
}

PLAIN: Mapping[str, Builder | None] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "_codecs.encode": _encode,
    **{
        f"{home}.{k}": make for home in ("builtins", "__builtin__") for k, make in _BUILTINS.items()
    },
    "numpy.dtype": None,
    "numpy.ndarray": None,
    **dict.fromkeys(ARRAYS),
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray.scalar": _numpy_scalar,
}
