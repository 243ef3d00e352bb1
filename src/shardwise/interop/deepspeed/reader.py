"""Read another library's file of keys: each is mapped, ignored with a reason, left open or refused.

`Reader` is one file and the `Report` about its keys. `Entry` is one key with its value, which
handlers check and report on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.interop.foreign_keys import KEYS, JsonMapping, JsonObject, Key, unknown_key
from shardwise.keys import near_miss

Fate = Literal["mapped", "ignored", "auto", "default"]
Handler = Callable[["Entry"], object]

_MEANINGS: dict[Fate, str] = {
    "mapped": "taken over",
    "ignored": "not taken over",
    "auto": 'left to you ("auto")',
    "default": "not in the file",
}
_COMMENTS = ("_", "//", "#")  # how a comment begins at the top, where DeepSpeed allows any key


@dataclass(frozen=True)
class Line:
    """One key with its value; ``text`` is its counterpart, or why it has no effect."""

    key: str
    value: Any
    fate: Fate
    text: str


@dataclass(frozen=True)
class Report:
    """The fate of each key of one file, in the file's order. ``str()`` is for people."""

    source: str
    lines: tuple[Line, ...]

    def of(self, fate: Fate) -> dict[str, str]:
        """Return the keys of one fate, each with its text."""
        return {line.key: line.text for line in self.lines if line.fate == fate}

    @property
    def mapped(self) -> dict[str, str]:
        """Keys that have an effect, and their counterparts."""
        return self.of("mapped")

    @property
    def ignored(self) -> dict[str, str]:
        """Keys without effect, and why."""
        return self.of("ignored")

    @property
    def auto(self) -> dict[str, str]:
        """Keys that the file leaves to the caller, and what decides them."""
        return self.of("auto")

    def as_json(self) -> JsonObject:
        """Return the report as plain values."""
        return {"source": self.source, **{fate: self.of(fate) for fate in _MEANINGS}}

    def sections(self) -> list[tuple[str, list[tuple[str, str, str]]]]:
        """Return titles with rows of (key, value, text), for printing."""
        rows = {
            title: [(x.key, shown(x.value), x.text) for x in self.lines if x.fate == fate]
            for fate, title in _MEANINGS.items()
        }
        return [(title, found) for title, found in rows.items() if found]

    def __str__(self) -> str:
        out = [self.source]
        for title, rows in self.sections():
            out.append(f"  {title}:")
            out += [f"    {key} = {value}: {text}" for key, value, text in rows]
        return "\n".join(out)


def shown(value: object) -> str:
    """Write a value as the file would, in one short line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 48 else text[:45] + "..."


class Reader:
    """One file being read, for a run or (``plans``) for a plan, which leaves "auto" to its flags.

    ``auto`` has the caller's values for keys that the file leaves at "auto", by full name.
    """

    def __init__(self, source: str, auto: JsonMapping | None = None, plans: bool = False) -> None:
        self.source = source
        self.plans = plans
        self._filled = auto or {}
        self._used: set[str] = set()
        self._lines: list[Line] = []

    def report(self) -> Report:
        """Return the report. **Raises** ConfigError if ``auto`` has other keys."""
        unused = self._filled.keys() - self._used
        if unused:
            name = min(unused)
            raise self.refusal(name, 'it is given in auto=, but the file does not say "auto" there')
        return Report(self.source, tuple(self._lines))

    def add(self, fate: Fate, key: str, value: object, text: str) -> None:
        """Report on a key."""
        self._lines.append(Line(key, value, fate, text))

    def refusal(self, key: str, why: str) -> ConfigError:
        """Return the error for a key that is not supported, or whose value is wrong."""
        return ConfigError(f"{self.source}: {key}: {why}")

    def entry(self, key: str, value: object, section: str = "") -> Entry:
        """Return a key to check; its row is in a section of the table."""
        row = KEYS[section].get(key.rpartition(".")[2]) if section else None
        return Entry(self, key, value, row)

    def fill(self, name: str, value: Any) -> Any:
        """Return the caller's value for a key at "auto", if there is one."""
        if value != "auto" or name not in self._filled:
            return value
        self._used.add(name)
        return self._filled[name]


@dataclass(frozen=True)
class Entry:
    """One key of a file: its full name, its value, and its row of the table."""

    reader: Reader
    key: str
    value: Any
    row: Key | None = field(default=None, repr=False)

    def walk(self, section: str, handlers: Mapping[str, Handler]) -> None:
        """Read every key of this block, whose rows are in a section of the table.

        A key with a reason is ignored, others go to their handler or to the answers of their row.

        **Raises** ConfigError that names the key: unknown, or with a wrong value.
        """
        reader, prefix = self.reader, f"{self.key}." if self.key else ""
        block, rows = self.mapping(), KEYS[section]
        if prefix and not block and not reader.plans:
            self.ignored("an empty block")
        for name, value in block.items():
            entry = Entry(reader, prefix + name, reader.fill(prefix + name, value), rows.get(name))
            if entry.row is not None:
                entry._read(entry.row, handlers.get(name))
            elif not prefix and name.startswith(_COMMENTS):
                entry.ignored("a comment")
            else:
                raise unknown_key(reader.source, prefix, name, rows)

    def _read(self, row: Key, handler: Handler | None) -> None:
        plans, value = self.reader.plans, self.value
        reason = row.plan if plans else row.run
        if plans and not reason and value in (None, "auto"):
            self.auto(f"{value}: given by the flags or their defaults")
        elif value is None and not plans:
            self.ignored("null: as if it were not there")
        elif reason:
            if value != "auto" and not plans:
                self._check(row)
            self.ignored(reason)
        elif value == "auto":
            self.auto(row.auto.replace("{key}", self.key))
        elif handler is not None:
            handler(self)
        else:
            self.answer()

    def answer(self) -> None:
        """Check the value and report what the row answers to it. **Raises** ConfigError."""
        row = self.row
        assert row is not None, self.key
        value = self._check(row)
        name = json.dumps(value).strip('"')
        fate, text = row.answers.get(name) or row.answers["*"]
        if fate == "refused":
            raise self.refusal(text.format(value=repr(self.value)))
        self.reader.add("mapped" if fate == "mapped" else "ignored", self.key, self.value, text)

    def _check(self, row: Key) -> object:
        """Return the value if it is of the row's kind. **Raises** ConfigError."""
        match row.kind:
            case "flag":
                return self.flag()
            case "integer":
                return self.integer(row.least)
            case "number":
                return self.number(row.least if row.answers else -math.inf)
            case "word":
                return self.word(tuple(row.answers))
            case "block":
                return self.mapping()
        return self.value

    def mapped(self, text: str = "") -> None:
        """Report that the key has an effect; without a text, what its row says."""
        self.reader.add(
            "mapped", self.key, self.value, text or (self.row.becomes if self.row else "")
        )

    def ignored(self, reason: str) -> None:
        """Report that the key has no effect."""
        self.reader.add("ignored", self.key, self.value, reason)

    def auto(self, text: str) -> None:
        """Report that the key is left open."""
        self.reader.add("auto", self.key, self.value, text)

    def refusal(self, why: str) -> ConfigError:
        """Return the error for this key."""
        return self.reader.refusal(self.key, why)

    def mapping(self) -> JsonObject:
        """Return a block of keys. **Raises** ConfigError, as all below."""
        if not isinstance(self.value, Mapping):
            why = f"expected a block of keys, got {self.value!r}"
            raise self.reader.refusal(self.key or "the file", why)
        return {str(name): item for name, item in self.value.items()}

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.refusal(f"expected true or false, got {self.value!r}")
        return self.value

    def number(self, least: float = -math.inf) -> float:
        """Return a finite number."""
        if not self._is_finite() or self.value < least:
            bound = f" of {least:g} or more" if least > -math.inf else ""
            raise self.refusal(f"expected a number{bound}, got {self.value!r}")
        number: float = self.value
        return number

    def integer(self, least: int = 0, most: int | None = None) -> int:
        """Return a whole number; 5e8 is one."""
        value = self.value
        is_whole = self._is_finite() and value == int(value)
        if not is_whole or not least <= value <= (most or value):
            bound = f", {least} or more"
            if most is not None:
                bound = f" above {least - 1}, at most {most:,}"
            raise self.refusal(f"expected a whole number{bound}, got {value!r}")
        return int(value)

    def word(self, choices: Sequence[str] = ()) -> str:
        """Return a word, one of the choices if there are some."""
        if not isinstance(self.value, str):
            raise self.refusal(f"expected a word, got {self.value!r}")
        if choices and self.value not in choices:
            hint = near_miss(self.value, choices)
            why = f"expected one of {', '.join(choices)}, got {self.value!r}{hint}"
            raise self.refusal(why)
        return self.value

    def stage(self) -> int:
        """Return a stage of ZeRO."""
        is_text = isinstance(self.value, str) and self.value.isdecimal()
        number = int(self.value) if is_text else self.value
        if isinstance(number, bool) or number not in (0, 1, 2, 3):
            raise self.refusal(f"expected 0, 1, 2 or 3, got {self.value!r}")
        return int(number)

    def _is_finite(self) -> bool:
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return is_number and math.isfinite(self.value)
