"""The table of DeepSpeed's and accelerate's keys, and the walk that reads a file by it.

``foreign_keys.toml`` has one row per key: its kind of value, the keys of `shardwise train` that it
decides, or the reason why it has no effect. `Reader` walks a file by the rows: the result is values
under keys of ours and a `Report` on each key. The same rows give the names in files that are
written.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from shardwise import strict_json
from shardwise.errors import ConfigError
from shardwise.keys import check_object, near_miss, read_file, read_json, read_keys
from shardwise.keys import shown as named

JsonMapping = Mapping[str, Any]  # a block of a JSON or YAML file, read
JsonObject = dict[str, Any]  # the same, written
Fate = Literal["mapped", "ignored", "auto", "default"]
Handler = Callable[["Entry"], object]

_MEANINGS: dict[Fate, str] = {
    "mapped": "taken over",
    "ignored": "not taken over",
    "auto": 'left to you ("auto")',
    "default": "not in the file",
}
_COMMENTS = ("_", "//", "#")  # how a comment begins at the top, where DeepSpeed allows any key
_UNSAID = "as if it were not there"

# -- the table


@dataclass(frozen=True)
class Key:
    """One row of the table. ``plan`` and ``run``: why the key has no effect there, "" if read."""

    kind: str = "any"
    plan: str = ""
    run: str = ""
    ours: tuple[str, ...] = ()
    becomes: str = ""
    auto: str = ""
    answers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    home: str = ""
    least: int = 0
    most: int | None = None


_TEXT = files("shardwise.interop").joinpath("foreign_keys.toml").read_text("utf-8")
_DATA: JsonObject = tomllib.loads(_TEXT)


def _resolved(value: object) -> Any:
    """Return a value with each name of a reason ("@name") replaced by the reason."""
    if isinstance(value, str):
        return _DATA["reasons"][value[1:]] if value.startswith("@") else value
    if isinstance(value, dict):
        return {key: _resolved(inner) for key, inner in value.items()}
    return [_resolved(inner) for inner in value] if isinstance(value, list) else value


def _rows(section: str) -> Mapping[str, Key]:
    found = {}
    for name, row in _resolved(_DATA[section]).items():
        ours, why = row.pop("ours", []), row.pop("why", "")
        names = (ours,) if isinstance(ours, str) else tuple(ours)
        has_second_name = row.pop("stage3", False)
        row = {"plan": why, "run": why, "ours": names, "becomes": ", ".join(names), **row}
        is_open = row["becomes"] if section.startswith("accelerate") else ""
        found[name] = Key(**{"auto": is_open or _UNSAID, **row})
        if has_second_name:
            found[f"stage3_{name}"] = found[name]
    return found


TORCH_SCHEDULERS: dict[str, tuple[str, ...]] = {
    name: (*options.split(), "last_epoch") for name, options in _DATA["torch_schedulers"].items()
}
RATES: dict[str, float] = _DATA["learning_rates"]
REFUSED_OPTIMIZERS: dict[str, str] = _DATA["refused_optimizers"]
REMOVED: dict[str, str] = _DATA["removed"]
NOT_WRITTEN: dict[str, dict[str, str]] = _DATA["not_written"]
_SECTIONS = {
    *("top", "zero_optimization", "fp16", "bf16", "activation_checkpointing", "data_types"),
    *("torch_autocast", "optimizer", "scheduler", "accelerate"),
}
KEYS: dict[str, Mapping[str, Key]] = {
    name: _rows(name) for name in _DATA if name.partition(".")[0] in _SECTIONS
}


def names_of(library: str) -> dict[str, tuple[str, ...]]:
    """Return the keys of ours for each full name of "deepspeed" or "accelerate" that has some."""
    found = {}
    for section, rows in KEYS.items():
        if section.startswith("accelerate") == (library == "accelerate"):
            block = section.removeprefix("top").removeprefix("accelerate").removeprefix(".")
            for name, row in rows.items():
                if row.ours:
                    found[f"{block}.{name}" if block else name] = row.ours
    return found


def value_at(content: JsonMapping, path: str) -> object:
    """Return the value of a full name, None if a block on the way is not there."""
    found: object = content
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


# -- files and the report


def load_json(path: Path) -> JsonObject:
    """Read a JSON file of keys. **Raises** ConfigError, also if a key is repeated."""
    return check_object(path, read_json(path))


def load_keys(path: Path) -> JsonObject:
    """Read a file of keys that is JSON or YAML, whatever its name. **Raises** ConfigError."""
    if path.suffix != ".json":
        try:
            strict_json.parse(read_file(path))
        except ValueError:
            found = read_keys(path)
            if not found:
                raise ConfigError(f"{path}: expected `key: value` lines, got nothing") from None
            return found
    return load_json(path)


@dataclass(frozen=True)
class Line:
    """One key with its value; ``text`` is its counterpart, or why it has no effect."""

    key: str
    value: object
    fate: Fate
    text: str


@dataclass(frozen=True)
class Report:
    """The fate of each key of one file. ``str()`` is for people."""

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


# -- the walk


class Reader:
    """One file being read, for a run or (``plans``) for a plan, which leaves "auto" to its flags.

    ``values`` are keys of ours that the file sets, ``defaults`` are the library's values of keys
    that it leaves out. ``handlers`` read keys for which the row is not enough, by their section and
    name. ``homes`` are the keys of an offload, by their rows' ``home``. ``auto`` has the caller's
    values for keys that the file leaves at "auto", by full name.
    """

    def __init__(self, source: str, auto: JsonMapping | None = None, plans: bool = False) -> None:
        self.source = source
        self.plans = plans
        self.values: JsonObject = {}
        self.defaults: JsonObject = {}
        self.handlers: Mapping[str, Handler] = {}
        self.homes: dict[str, Entry] = {}
        self.lines: list[Line] = []
        self._filled = auto or {}
        self._used: set[str] = set()

    def read(self, content: JsonMapping, root: str, handlers: Mapping[str, Handler]) -> None:
        """Read a file whose top keys are in the section ``root``.

        **Raises** ConfigError that names the key: unknown, or with a wrong value. Also if ``auto``
        has other keys.
        """
        self.handlers = handlers
        Entry(self, "", content, root).walk()
        for name in sorted(self._filled.keys() - self._used):
            raise self.refusal(name, 'it is given in auto=, but the file does not say "auto" there')

    def report(self) -> Report:
        """Return the report so far."""
        return Report(self.source, tuple(self.lines))

    def add(self, fate: Fate, key: str, value: object, text: str) -> None:
        """Report on a key."""
        self.lines.append(Line(key, value, fate, text))

    def refusal(self, key: str, why: str) -> ConfigError:
        """Return the error for a key that is not supported, or whose value is wrong."""
        return ConfigError(f"{self.source}: {key}: {why}")

    def fill(self, name: str, value: object) -> object:
        """Return the caller's value for a key at "auto", if there is one."""
        if value != "auto" or name not in self._filled:
            return value
        self._used.add(name)
        return self._filled[name]


@dataclass(frozen=True)
class Entry:
    """One key of a file: its full name, its value, its row, and the section of keys inside it."""

    reader: Reader
    key: str
    value: Any  # of JSON or YAML, until it is checked
    section: str = ""
    row: Key | None = field(default=None, repr=False)

    def walk(self) -> None:
        """Read every key of this block, in the order of the table's rows."""
        reader, prefix, rows = self.reader, f"{self.key}." if self.key else "", KEYS[self.section]
        block = self.mapping()
        if prefix and not block and not reader.plans:
            self.tell("ignored", "an empty block")
        root = "" if self.section == "top" else f"{self.section}."
        places = {name: place for place, name in enumerate(rows)}
        for name in sorted(block, key=lambda name: places.get(name, len(places))):
            inner = "bf16" if name == "bfloat16" else root + name  # its old name
            value = reader.fill(prefix + name, block[name])
            entry = Entry(reader, prefix + name, value, inner, rows.get(name))
            if entry.row is not None:
                entry.read()
            elif not prefix and name.startswith(_COMMENTS):
                entry.tell("ignored", "a comment")
            else:
                raise self._unknown(prefix, name, rows)

    def _unknown(self, prefix: str, name: str, known: Iterable[str]) -> ConfigError:
        """Return the error for a key that is not in the table: removed, or misspelt."""
        source, full = self.reader.source, prefix + name
        if full in REMOVED:
            return ConfigError(
                f"{source}: {full} is not here, and newer DeepSpeed drops it: {REMOVED[full]}"
            )
        return ConfigError(f"{source}: unknown key {named(full)}{near_miss(name, known)}")

    def read(self) -> None:
        """Read the key by its row. **Raises** ConfigError for a wrong value."""
        plans, value, row = self.reader.plans, self.value, self.row
        assert row is not None, self.key
        reason, handler = row.plan if plans else row.run, self.reader.handlers.get(self.section)
        if plans and not reason and value in (None, "auto"):
            self.tell("auto", f"{value}: given by the flags or their defaults")
        elif value is None and not plans:
            self.tell("ignored", "null: as if it were not there")
        elif reason:
            if value != "auto" and not plans:
                self._check(row)
            self.tell("ignored", reason)
        elif value == "auto":
            self.tell("auto", row.auto.replace("{key}", self.key))
        elif row.home:
            self._check(row)
            self.reader.homes[row.home] = self
        elif handler is not None:
            handler(self)
        elif self.section in KEYS:
            self.walk()
        elif row.answers and not row.values:
            self.answer()
        else:
            self.store()

    def answer(self) -> None:
        """Check the value and report what the row answers to it. **Raises** ConfigError."""
        row = self.row
        assert row is not None, self.key
        name = json.dumps(self._check(row)).strip('"')
        fate, text = row.answers.get(name) or row.answers["*"]
        if fate == "refused":
            raise self.refusal(text.format(value=repr(self.value)))
        self.reader.add("mapped" if fate == "mapped" else "ignored", self.key, self.value, text)

    def store(self) -> None:
        """Check the value and store it under the row's key of ours. **Raises** ConfigError."""
        row = self.row
        assert row is not None and row.ours, self.key
        ours, values = row.ours[0], self.reader.values
        found = self.choice() if row.values else self._check(row)
        if row.kind == "count" and values.get(ours, found) != found:
            raise self.refusal(
                f"got {self.value!r} here and {ours}={values[ours]} in another place; leave one of "
                "them out"
            )
        if found != "":  # the value of ours that needs no key
            values[ours] = found
        self.tell("mapped", row.becomes.format(value=found))

    def _check(self, row: Key) -> object:
        """Return the value if it is of the row's kind. **Raises** ConfigError."""
        match row.kind:
            case "flag":
                return self.flag()
            case "integer":
                return self.integer(row.least)
            case "count":
                return self.integer(1, row.most, allows_text=True)
            case "number":
                return self.number(row.least if row.answers or row.ours else -math.inf)
            case "word":
                return self.word(tuple(row.answers))
            case "stage":
                return self.stage()
            case "names":
                return tuple(name.strip() for name in str(self.value).split(","))
            case "block":
                return self.mapping()
            case "switch":
                return self.mapping().get("enabled", False)
        return self.value

    def tell(self, fate: Fate, text: str = "") -> None:
        """Report on the key; without a text, what its row says."""
        self.reader.add(fate, self.key, self.value, text or (self.row.becomes if self.row else ""))

    def refusal(self, why: str) -> ConfigError:
        """Return the error for this key."""
        return self.reader.refusal(self.key or "the file", why)

    def mapping(self) -> JsonObject:
        """Return a block of keys. **Raises** ConfigError, as all below."""
        if not isinstance(self.value, Mapping):
            raise self.refusal(f"expected a block of keys, got {self.value!r}")
        return {str(name): item for name, item in self.value.items()}

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.refusal(f"expected true or false, got {self.value!r}")
        return self.value

    def choice(self) -> object:
        """Return the row's value for a word, in upper or lower case. YAML reads `no` as false."""
        values = self.row.values if self.row else {}
        word = str(self.value).upper()
        if self.row and not self.reader.plans and word in self.row.answers:
            raise self.refusal(self.row.answers[word][1])
        if word not in values:
            hint = near_miss(word, values)
            raise self.refusal(f"expected one of {', '.join(values)}, got {self.value!r}{hint}")
        return values[word]

    def number(self, least: float = -math.inf) -> float:
        """Return a finite number."""
        if not _is_finite(self.value) or self.value < least:
            bound = f" of {least:g} or more" if least > -math.inf else ""
            raise self.refusal(f"expected a number{bound}, got {self.value!r}")
        number: float = self.value
        return number

    def integer(self, least: int = 0, most: int | None = None, allows_text: bool = False) -> int:
        """Return a whole number; 5e8 is one."""
        value = self.value
        if allows_text and isinstance(value, str) and value.isdecimal():
            value = int(value)
        is_whole = _is_finite(value) and value == int(value)
        if not is_whole or not least <= value <= (most or value):
            bound = f"{least} or more" if most is None else f"{least} to {most:,}"
            raise self.refusal(f"expected a whole number, {bound}, got {self.value!r}")
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


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
