"""JSON in bytes, read strictly and within limits of nesting, of numbers and of memory.

It imports no torch, so that a checkpoint can be looked at and verified without it.
"""

import json
import math
import reprlib
from collections import Counter
from typing import NoReturn

from shardwise.errors import CheckpointError

MAX_DEPTH = 64
# Lists and objects, which take a hundred bytes each however short they are written.
MAX_CONTAINERS, BYTES_PER_CONTAINER = 250_000, 16
_BLOCK_CHARS = 1 << 20
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_MAX_DIGITS = 4300  # Python's own default; the time to read an int is quadratic in it


def dumps(value: object) -> bytes:
    """Write what `encode` returned as compact UTF-8 JSON; keys keep their order."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8")


def loads(data: bytes, where: str) -> object:
    """Read a checkpoint's JSON as `parse` does. **Raises** CheckpointError where that refuses."""
    try:
        return parse(data)
    except ValueError as error:
        raise CheckpointError(
            f"{where}: expected JSON as Shardwise writes it: {error}. The file is damaged or was "
            "not written by Shardwise; load another checkpoint"
        ) from None


def parse(data: bytes, *, has_constants: bool = False) -> object:
    """Read JSON strictly: refuse text that two readers could understand differently.

    With ``has_constants`` NaN and infinities are numbers, as Python writes them.

    **Raises** ValueError for text other than JSON in UTF-8, duplicate keys, numbers that are not
    finite or have more than 4300 digits, nesting beyond 64 levels and halves of characters.
    """
    check_containers(data)
    text = data.decode("utf-8")
    value = json.loads(
        text,
        object_pairs_hook=_unique,
        parse_int=_parse_int,
        parse_float=float if has_constants else _parse_float,
        parse_constant=float if has_constants else _refuse_constant,
    )
    if "\\u" in text:  # an escape may be half of a character, which UTF-8 cannot write
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def check_containers(data: bytes) -> None:
    """Count lists and objects, and how deep they lie, before any is made.

    Right up to the first error of syntax. **Cost** a copy of the data and a few MiB. **Raises**
    ValueError for nesting beyond 64 levels, or more of them than 250 000 and one for every 16
    bytes.
    """
    limit = MAX_CONTAINERS + len(data) // BYTES_PER_CONTAINER
    if b"\\" in data:  # so that each quote opens or closes a string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    depth = count = 0
    in_string = False
    for begin in range(0, len(data), _BLOCK_CHARS):
        parts = data[begin : begin + _BLOCK_CHARS].split(b'"')
        brackets = b"".join(parts[in_string::2]).translate(None, _NO_BRACKETS)
        in_string ^= len(parts) % 2 == 0
        count += brackets.count(b"[") + brackets.count(b"{")
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if count > limit:
            raise ValueError(
                f"more than {limit} lists and objects; large state belongs into tensors "
                "(torch.from_numpy, torch.tensor)"
            )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {reprlib.repr(twice)} is given twice in one object")
    return made


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {reprlib.repr(digits)} is not finite")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
