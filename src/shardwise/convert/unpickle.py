"""Read a pickle as data: a tree of plain values, in which objects are only described.

Note [A pickle is a program; this reads it as a list of values]
A pickle names classes and functions, and an unpickler imports and calls them. This one has no way
to do either: it is a small stack machine over the bytes, and what a pickle names becomes a `Name`,
a record of text. When the pickle calls a name, a table of ours says what stands for the result: a
function of ours that takes data and returns data, or, where the table says None, a `Made`, which
remembers the name, the arguments and the state. A name that is not in the table is refused. Every
opcode that torch's writers do not use is refused as well (persistent ids as text, extension
codes, instances of old classes, objects made with keywords).

Nothing of torch's private classes is made, so a reader does not depend on the version of torch
that wrote, and none of them runs. Dict keys are scalars, flat tuples of scalars, or `Made` objects
by identity: the hash of nested tuples can take for ever. Numbers and tuples can be chosen to have
one hash, so only a few of one hash may come. A memo index of four bytes allocates nothing. What is
called copies its arguments, which two bytes can name again: all that is handed over is counted,
and limited by the size of the pickle. So is the memory of what one byte can make, an empty list or
set: what it takes, more or less, is charged before it is made, against 16 MiB and 32 times the
bytes read so far; what torch writes is charged with 8 to 22 times its size. So
are opcodes, against a million and three for four bytes; torch writes two at most. A hostile pickle
costs no more than a checkpoint's of its size. What is left is that a small pickle can
describe a tree in which one branch stands in a million places: who walks the tree counts his steps,
and nobody prints it.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import CheckpointError, DamagedCheckpoint

Builder = Callable[..., Any]
MAX_PICKLE_BYTES = 256 << 20
_MAX_INT_BYTES = 255
_MAX_KEY_PARTS = 256
_MAX_COLLISIONS = 1000
_UNIQUE = (1 << 61) - 1  # Python's hash of numbers below this has no collisions
_FREE_BYTES, _FREE_TIMES = 1 << 20, 8  # what may be copied: bytes, and times the pickle's size
_FREE_MADE, _MADE_TIMES = 16 << 20, 32  # what may be made: bytes of memory, times what was read
_FREE_CODES, _CODES_SHARE = 1_000_000, 0.75  # opcodes, and their share of what was read
# Bytes of memory, about, of what an opcode makes, and of one more key or member.
_MADE_BYTES: Mapping[int, int] = {
    **dict.fromkeys(b"(NJKMha\x88\x89)", 8),
    **dict.fromkeys(b"Gj\x8a\x8b", 40),
    **dict.fromkeys(b"X\x8c\x8dCB\x8e", 60),
    **dict.fromkeys(b"]}t\x85\x86\x87", 64),
    **dict.fromkeys(b"cQ\x93", 160),
    **dict.fromkeys(b"R\x81", 96),
    **dict.fromkeys(b"\x8f\x91", 224),
}
_ENTRY_BYTES = 72
_BUILT_BYTES = 160  # of what a table's function returns, beside its arguments
_MARK = object()
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant that a pickle names, e.g. ``torch.float32``; never imported."""

    text: str


@dataclass(eq=False, slots=True, repr=False)
class Made:
    """An object as its pickle describes it: what was called, with which arguments and state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def field(self, key: str) -> Any:
        """Return an attribute, None where the pickle sets none."""
        return self.state.get(key) if isinstance(self.state, dict) else None

    def __repr__(self) -> str:
        return f"<{self.name}>"  # what it holds may hold itself, many times over


def read_pickle(
    data: bytes,
    where: str,
    allowed: Mapping[str, Builder | None],
    persistent: Callable[[Any], Any] | None = None,
    any_name: bool = False,
) -> Any:
    """Return what a pickle describes. See Note [A pickle is a program; ...].

    ``allowed`` has every name that may occur; ``persistent`` answers persistent ids. With
    ``any_name`` other names may occur as well: what they make is a `Made` too.

    **Raises** CheckpointError naming the class that is not allowed; DamagedCheckpoint when the
    bytes are no whole pickle.
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
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise DamagedCheckpoint(
            f"{where}: not a whole pickle as torch writes it, near byte {machine.at}: "
            f"{type(error).__name__} {error}"
        ) from None


class _Machine:
    """The stack, the memo and the place in the bytes."""

    def __init__(
        self,
        data: bytes,
        where: str,
        allowed: Mapping[str, Builder | None],
        persistent: Callable[[Any], Any] | None,
        any_name: bool,
    ) -> None:
        self.at = 0
        self._data = data
        self._where = where
        self._allowed = allowed
        self._persistent = persistent
        self._any_name = any_name
        self._stack: list[Any] = []
        self._memo: list[Any] = []  # torch's writers number it from 0 on
        self._sparse_memo: dict[int, Any] = {}
        self._left = _FREE_BYTES + _FREE_TIMES * len(data)
        self._made_bytes = self._num_codes = 0
        self._hashes: set[tuple[int, int]] = set()
        self._num_collisions = 0

    def run(self) -> Any:
        while True:
            code = self._data[self.at]
            self.at += 1
            if code == ord("."):
                (value,) = self._stack
                if value is _MARK:
                    raise ValueError("it ends inside a collection")
                return value
            if code not in _CODES:
                raise CheckpointError(
                    f"{self._where}: pickle opcode {bytes([code])!r} at byte {self.at - 1}, which "
                    "no checkpoint needs: the file is damaged or hostile"
                )
            self._num_codes += 1
            self.charge(_MADE_BYTES.get(code, 0))
            _CODES[code](self)

    def charge(self, num_bytes: int) -> None:
        """Count memory that is about to be taken. **Raises** CheckpointError beyond a limit."""
        self._made_bytes += num_bytes
        is_large = self._made_bytes > _FREE_MADE + _MADE_TIMES * self.at
        if is_large or self._num_codes > _FREE_CODES + _CODES_SHARE * self.at:
            raise CheckpointError(
                f"{self._where}: the first {self.at} bytes of a pickle describe {self._num_codes} "
                f"values that take more than {self._made_bytes} bytes, as no checkpoint's do: the "
                "file is damaged or hostile; large state belongs into tensors"
            )

    # -- bytes and stack
    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self.at:
            raise ValueError(f"{count} bytes expected, {len(self._data) - self.at} are left")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self._data.index(b"\n", self.at)
        text = self.take(end - self.at).decode()
        self.at += 1
        return text

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a value was expected, a mark came")
        return value

    def since_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark was expected")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def top(self, kind: type) -> Any:
        value = self._stack[-1]
        if self._any_name and isinstance(value, Made):
            return kind()  # what is put into an object that is not made is dropped
        if not isinstance(value, kind):
            raise ValueError(f"a {kind.__name__} was expected, a {type(value).__name__} came")
        return value

    # -- what needs more than a line
    def put(self, index: int) -> None:
        if self._stack[-1] is _MARK:
            raise ValueError("a mark cannot be remembered")
        if index < len(self._memo):
            self._memo[index] = self._stack[-1]
        elif index == len(self._memo) and not self._sparse_memo:
            self.charge(8)
            self._memo.append(self._stack[-1])
        else:
            self.charge(2 * _ENTRY_BYTES)
            self._sparse_memo[index] = self._stack[-1]

    def memoize(self) -> None:
        self.put(len(self._memo) + len(self._sparse_memo))

    def get(self, index: int) -> None:
        self.push(self._memo[index] if index < len(self._memo) else self._sparse_memo[index])

    def tuple_of(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def integer(self, num_bytes: int) -> None:
        if num_bytes > _MAX_INT_BYTES:
            raise ValueError(f"a number of {num_bytes} bytes")
        self.push(int.from_bytes(self.take(num_bytes), "little", signed=True))

    def text(self, form: str) -> None:
        self.push(self.take(self.number(form)).decode("utf-8", "surrogatepass"))

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(target, key)] = value

    def key(self, target: Any, key: Any) -> Any:
        """Return a key or member that ``target`` may take. See Note [A pickle is a program; ...]"""
        check_key(key)
        self.charge(_ENTRY_BYTES)
        if type(key) is tuple or (type(key) is int and abs(key) >= _UNIQUE):
            self.charge(2 * _ENTRY_BYTES)
            mark = (id(target), hash(key))
            self._num_collisions += mark in self._hashes
            self._hashes.add(mark)
            if self._num_collisions > _MAX_COLLISIONS:
                raise ValueError("keys that were chosen to have one hash")
        return key

    def frozen(self, members: list[Any]) -> None:
        self.charge(_ENTRY_BYTES * len(members))
        self.push(frozenset(check_keys(members)))

    def global_name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no text")
        text = f"{module}.{name}"
        if text not in self._allowed and not self._any_name:
            raise CheckpointError(
                f"{self._where}: it names {text!r}, which is not on the list of what checkpoints "
                "hold, so it was neither imported nor called. If it is part of your own state, "
                "save that state as numbers, text, lists and dicts"
            )
        self.push(Name(text))

    def stack_global(self) -> None:
        name = self.pop()
        self.global_name(self.pop(), name)

    def call(self) -> None:
        args = self.pop()
        called = self.pop()
        if self._any_name and isinstance(called, Made):
            called = Name(called.name)
        if not (isinstance(called, Name) and isinstance(args, tuple)):
            raise ValueError("a call of what is no name")
        builder = self._allowed.get(called.text)
        if builder is None:
            self.push(Made(called.text, args))
            return
        self.charge(_BUILT_BYTES)
        self._left -= sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        if self._left < 0:
            raise CheckpointError(
                f"{self._where}: a pickle of {len(self._data)} bytes copies its own values many "
                "times over, as no checkpoint does: the file is damaged or hostile"
            )
        self.push(builder(*args))

    def build(self) -> None:
        state = self.pop()
        target = self._stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):  # a state_dict's `_metadata`, which nobody needs here
            raise ValueError(f"a state for a {type(target).__name__}")

    def persistent_id(self) -> None:
        if self._persistent is None:
            raise ValueError("a persistent id")
        self.push(self._persistent(self.pop()))


def check_key(key: Any) -> Any:
    """Return a key of a dict or member of a set. **Raises** ValueError if it is no data."""
    members = key if type(key) is tuple else (key,)
    if len(members) > _MAX_KEY_PARTS:
        raise ValueError("a key of too many parts")
    if not all(isinstance(member, (*_SCALARS, Name, Made)) for member in members):
        raise ValueError("a key that is no scalar")
    return key


def check_keys(keys: list[Any]) -> list[Any]:
    """Return all keys of one dict or set. **Raises** ValueError if they cannot be."""
    if len(keys) - len({hash(check_key(key)) for key in keys}) > _MAX_COLLISIONS:
        raise ValueError("keys that were chosen to have one hash")
    return keys


_CODES: Mapping[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # protocol
    0x95: lambda m: m.take(8),  # frame
    ord("("): lambda m: m.push(_MARK),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    0x8A: lambda m: m.integer(m.number("<B")),
    0x8B: lambda m: m.integer(m.number("<I")),
    ord("G"): lambda m: m.push(m.number(">d")),
    0x8C: lambda m: m.text("<B"),
    ord("X"): lambda m: m.text("<I"),
    0x8D: lambda m: m.text("<Q"),
    ord("C"): lambda m: m.push(m.take(m.number("<B"))),
    ord("B"): lambda m: m.push(m.take(m.number("<I"))),
    0x8E: lambda m: m.push(m.take(m.number("<Q"))),
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: lambda m: m.memoize(),
    ord("h"): lambda m: m.get(m.number("<B")),
    ord("j"): lambda m: m.get(m.number("<I")),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: _append(m, [m.pop()]),
    ord("e"): lambda m: _append(m, m.since_mark()),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: _set_item(m),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    0x8F: lambda m: m.push(set()),
    0x90: lambda m: _add(m, m.since_mark()),
    0x91: lambda m: m.frozen(m.since_mark()),
    ord("c"): lambda m: m.global_name(m.line(), m.line()),
    0x93: lambda m: m.stack_global(),
    ord("R"): lambda m: m.call(),
    0x81: lambda m: m.call(),  # cls.__new__(cls, *args)
    ord("b"): lambda m: m.build(),
    ord("Q"): lambda m: m.persistent_id(),
}


def _append(machine: _Machine, values: list[Any]) -> None:
    machine.top(list).extend(values)


def _add(machine: _Machine, values: list[Any]) -> None:
    target = machine.top(set)
    target.update(machine.key(target, value) for value in values)


def _set_item(machine: _Machine) -> None:
    value = machine.pop()
    machine.set_items([machine.pop(), value])
