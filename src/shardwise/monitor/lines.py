"""Files of JSON lines, one line for each step or so: appended at once, and valid after any kill.

The types of their values have bounds, which readers check, since a file may come from elsewhere.
"""

import json
import math
import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, WrapValidator

from shardwise.checkpoint.files import replacing
from shardwise.errors import ConfigError
from shardwise.strict_json import check_containers

MAX_RANKS = 1 << 24
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
# Larger values are no measurement, and sums of them would be infinite.
Amount = Annotated[float, Field(ge=0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Figure = Annotated[
    Number,
    WrapValidator(lambda value, check: None if value is None else check(value)),  # not finite
]
JsonLine = Mapping[str, Any]  # a line as JSON has it
MAX_NAME = 1000
Name = Annotated[str, Field(max_length=MAX_NAME)]
# Of a timeline: line of work, phase, unit, begin and length in milliseconds, bytes.
SpanRow = tuple[Name, Name, Name, Number, Amount, Count]
# Values that a loop logs may be larger, but sums and squares of them are finite.
MAX_LOGGED = 1e100
Extreme = Annotated[float, Field(ge=-MAX_LOGGED, le=MAX_LOGGED)]
Logged = Annotated[
    float | None,
    AfterValidator(lambda value: value if value is None or abs(value) <= MAX_LOGGED else None),
]
_MAX_LINE = 1 << 24  # characters
_KIND = re.compile(r'{"kind": "(\w+)"')


class JsonLines:
    """Append JSON lines to a file; each has its ``step`` and is flushed.

    With a path of None lines are dropped. A number that is not finite is written as null, and half
    a surrogate pair as "?". Of an existing file, lines up to ``last_step`` stay.
    """

    def __init__(self, path: Path | None, last_step: int = 0) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut(path, last_step)
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def write(self, **values: object) -> None:
        """Append one line."""
        if (file := self._file) is not None:
            text = json.dumps(_finite(values), default=vars)  # of dataclasses
            file.write(text + "\n")  # at once, as several threads write
            file.flush()

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # a path may have bytes that are not UTF-8
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return value


def _cut(path: Path, last_step: int) -> None:
    """Drop the lines of later steps and a line cut short by a kill; replace the file atomically."""
    if not path.exists():
        return
    with (
        replacing(path) as made,
        path.open(encoding="utf-8", errors="replace") as old,
        made.open("w") as file,
    ):
        for text in old:
            line = _parse_line(text)
            if line is not None and 0 < int(line["step"]) <= last_step:
                file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _parse_line(text: str) -> JsonLine | None:
    """Return the values of a line; None if it is cut short or has no step."""
    try:
        check_containers(text.encode())
        line: JsonLine = json.loads(text)
        return line if text.endswith("\n") and int(line["step"]) else None
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def read_lines(path: Path, tail_bytes: int | None = None) -> Iterator[JsonLine]:
    """Yield the lines of a file that may still be written, without one that is cut short.

    With ``tail_bytes`` only the lines in so many last bytes.
    """
    yield from filter(None, map(_parse_line, _texts(path, tail_bytes)))


def read_samples(
    path: Path, tail_bytes: int, num_samples: int, sample_bytes: int
) -> tuple[list[JsonLine], int]:
    """Return lines of a file that may be very long, and how many of them are samples.

    Of a file of more than both together these are the lines in so many parts of it, at equal
    distances from its begin on, and after them all in its last bytes.
    """
    size, found = path.stat().st_size if path.is_file() else 0, list[JsonLine]()
    if size > tail_bytes + num_samples * sample_bytes:
        with path.open("rb") as file:
            for number in range(num_samples):
                begin = (size - tail_bytes) * number // num_samples
                file.seek(begin)
                lines = file.read(sample_bytes).splitlines(keepends=True)[bool(begin) :]
                texts = (line.decode(errors="replace") for line in lines)
                found += filter(None, map(_parse_line, texts))
    num_sampled = len(found)
    bounded = tail_bytes if num_sampled else None
    return [*found, *read_lines(path, bounded)], num_sampled


def _texts(path: Path, tail_bytes: int | None = None) -> Iterator[str]:
    """Yield the lines of a file; too long ones in parts, which are not JSON."""
    if not path.exists():
        return
    if not path.is_file():  # a read of a pipe would block
        raise ConfigError(f"{path}: expected a file")
    with path.open("rb") as file:
        if tail_bytes is not None and (begin := path.stat().st_size - tail_bytes) > 0:
            file.seek(begin)
            file.readline()  # the rest of a line
        while text := file.readline(_MAX_LINE):
            yield text.decode(errors="replace")


def read_newest(
    path: Path, count: int, kinds: Collection[str] = (), tail_bytes: int | None = None
) -> list[JsonLine]:
    """Return the last ``count`` lines of each kind, in order; of kinds beside ``kinds`` all lines.

    Without ``kinds`` no kind has more. **Cost** reads the file, or so many last bytes of it, but
    parses only the lines that it returns.
    """
    newest: dict[str, deque[tuple[int, str]]] = {}
    for number, text in enumerate(_texts(path, tail_bytes)):
        match = _KIND.match(text)
        kind = match[1] if match else ""
        if text.endswith("\n"):
            most = None if kinds and kind not in kinds else count
            newest.setdefault(kind, deque(maxlen=most)).append((number, text))
    kept = sorted(each for lines in newest.values() for each in lines)
    return [line for _, text in kept if (line := _parse_line(text))]
