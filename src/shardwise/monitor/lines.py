"""Files of JSON lines, one for each step or so: appended at once, and whole after any kill."""

import json
import math
import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shardwise.errors import ConfigError
from shardwise.strict_json import check_containers

MAX_LINE = 1 << 24  # characters
_KIND = re.compile(r'{"kind": "(\w+)"')


class JsonLines:
    """Append JSON lines to a file; each has its ``step`` and is flushed.

    A file of path None takes lines and keeps none. What is not a finite number is written as null,
    since JSON has no word for it; half a character as "?". Of a file that is there, lines up to
    ``last_step`` stay.
    """

    def __init__(self, path: Path | None, last_step: int = 0) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut(path, last_step)
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def write(self, **values: Any) -> None:
        """Append one line."""
        if self._file is not None:
            self._file.write(json.dumps(_finite(values)) + "\n")  # several threads write
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # a path may have bytes that are no UTF-8
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return value


def _cut(path: Path, last_step: int) -> None:
    """Drop the lines of later steps, and one that a kill cut short; the file changes at once."""
    if not path.exists():
        return
    cut_path = path.with_name(f"{path.name}.cut")
    with path.open(encoding="utf-8", errors="replace") as old, cut_path.open("w") as file:
        file.writelines(line for line in old if 0 < _step_of(line) <= last_step)
        file.flush()
        os.fsync(file.fileno())
    cut_path.replace(path)


def parse_line(text: str) -> Mapping[str, Any] | None:
    """Return the values of a line; None where it is not whole, or of no step."""
    try:
        check_containers(text.encode())
        line: Mapping[str, Any] = json.loads(text)
        return line if text.endswith("\n") and int(line["step"]) else None
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _step_of(text: str) -> int:
    line = parse_line(text)
    return 0 if line is None else int(line["step"])


def read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a file that may still be written; one that is not whole is left out."""
    yield from filter(None, map(parse_line, _texts(path)))


def _texts(path: Path) -> Iterator[str]:
    """Yield the lines of a file; one longer than `MAX_LINE` in parts, which are no JSON."""
    if not path.exists():
        return
    if not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path}: expected a file")
    with path.open(encoding="utf-8", errors="replace") as file:
        while text := file.readline(MAX_LINE):
            yield text


def read_newest(path: Path, kinds: Collection[str], count: int) -> list[Mapping[str, Any]]:
    """Return the last ``count`` lines of each of some kinds, and all lines of others, in order.

    **Cost** reads the whole file, but makes values only of what it returns.
    """
    newest: dict[str, deque[tuple[int, str]]] = {kind: deque(maxlen=count) for kind in kinds}
    found: list[tuple[int, str]] = []
    for number, text in enumerate(_texts(path)):
        match = _KIND.match(text)
        if text.endswith("\n"):
            newest.get(match[1] if match else "", found).append((number, text))
    kept = sorted([*found, *(each for lines in newest.values() for each in lines)])
    return [line for _, text in kept if (line := parse_line(text))]
