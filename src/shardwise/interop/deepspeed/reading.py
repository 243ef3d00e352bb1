"""Blocks of a file, key by key: each mapped, ignored, left to the caller, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.report import Fate, Line, Report
from shardwise.interop.foreign_keys import Key, unknown_key
from shardwise.keys import near_miss

_COMMENTS = ("_", "//", "#")  # at the top, where DeepSpeed takes any key
_FILLED_IN = "given by the flags or their defaults"
T = TypeVar("T")
Handler = Callable[[str, Any], object]  # (full name of the key, its value)


class Reader:
    """One file being read: where errors point to, and what became of its keys so far.

    With ``plans`` it is read for a plan, else for a run; a plan leaves "auto" to its flags.
    """

    def __init__(
        self, source: str, auto: Mapping[str, Any] | None = None, plans: bool = False
    ) -> None:
        self.source = source
        self.plans = plans
        self._filled = auto or {}
        self._used: set[str] = set()
        self._lines: list[Line] = []

    def report(self) -> Report:
        """Return what became of the keys. **Raises** ConfigError where ``auto`` has others."""
        unused = self._filled.keys() - self._used
        if unused:
            name = min(unused)
            raise self.refusal(name, 'it is given in auto=, but the file does not say "auto" there')
        return Report(self.source, tuple(self._lines))

    def add(self, fate: Fate, key: str, value: Any, text: str) -> None:
        """Note what became of a key."""
        self._lines.append(Line(key, value, fate, text))

    def mapped(self, key: str, value: Any, text: str) -> None:
        """Note that a key has an effect."""
        self.add("mapped", key, value, text)

    def ignored(self, key: str, value: Any, reason: str) -> None:
        """Note that a key has none."""
        self.add("ignored", key, value, reason)

    def refusal(self, key: str, why: str) -> ConfigError:
        """Return the error for a key that cannot be honoured, or whose value is wrong."""
        return ConfigError(f"{self.source}: {key}: {why}")

    def walk(
        self,
        block: Any,
        prefix: str,
        table: Mapping[str, Key],
        handlers: Mapping[str, Handler],
        autos: Mapping[str, str] | None = None,
    ) -> None:
        """Take every key of a block.

        ``handlers`` take the keys of ``table`` that have no reason to be ignored; ``autos`` says
        what fills a key that the file leaves at "auto".
        """
        block = self.mapping(prefix.rstrip("."), block)
        if prefix and not block and not self.plans:
            self.ignored(prefix.rstrip("."), block, "an empty block")
        for key, value in block.items():
            name = prefix + key
            if key not in table and not prefix and key.startswith(_COMMENTS):
                self.ignored(name, value, "a comment")
                continue
            if key not in table:
                raise unknown_key(self.source, prefix, key, table)
            if value == "auto":
                value = self._fill(name, value)
            reason = table[key].plan if self.plans else table[key].run
            if self.plans and not reason and (value is None or value == "auto"):
                self.add("auto", name, value, f"{value}: {_FILLED_IN}")
            elif value is None and not self.plans:
                self.ignored(name, value, "null: as if it were not there")
            elif reason:
                if value != "auto" and not self.plans:
                    self.check_kind(name, value, table[key].kind)
                self.ignored(name, value, reason)
            elif value == "auto":
                self.add("auto", name, value, (autos or {}).get(key, "as if it were not there"))
            else:
                handlers[key](name, value)

    def read_named(
        self,
        title: str,
        block: Any,
        table: Mapping[str, Key],
        example: str,
        make: Callable[[Reader, str, dict[str, Any]], T],
    ) -> T | None:
        """Read a block of ``type`` and ``params``: what ``make`` returns, None without a type."""
        block = self.mapping(title, block)
        found: list[T] = []

        def take_type(key: str, value: Any) -> None:
            params = self.mapping(f"{title}.params", block.get("params") or {})
            found.append(make(self, self.word(key, value), self.fill(f"{title}.params.", params)))

        def take_params(key: str, value: Any) -> None:
            if "type" not in block:
                why = f"expected a name, such as {example}, for {key}"
                raise self.refusal(f"{title}.type", why)

        autos = {"type": f"build the {title} yourself"}
        self.walk(block, f"{title}.", table, {"type": take_type, "params": take_params}, autos)
        return found[0] if found else None

    def _fill(self, name: str, value: Any) -> Any:
        if name not in self._filled:
            return value
        self._used.add(name)
        return self._filled[name]

    def fill(self, prefix: str, block: Mapping[str, Any]) -> dict[str, Any]:
        """Return a block with what the caller gave for its "auto" values."""
        return {k: self._fill(prefix + k, v) if v == "auto" else v for k, v in block.items()}

    def check_kind(self, key: str, value: Any, kind: str) -> None:
        """Raise ConfigError where a value, though ignored, could not be the key's."""
        checks: dict[str, Callable[[str, Any], Any]] = {
            "flag": self.flag,
            "integer": self.integer,
            "number": self.number,
            "word": self.word,
            "block": self.mapping,
        }
        if kind in checks:
            checks[kind](key, value)

    def ignoring(self, check: Handler, reason: str) -> Handler:
        """Return what checks a key's value and ignores it."""

        def take(name: str, value: Any) -> None:
            check(name, value)
            self.ignored(name, value, reason)

        return take

    def mapping(self, key: str, value: Any) -> dict[str, Any]:
        """Return a block of keys."""
        if not isinstance(value, Mapping):
            raise self.refusal(key or "the file", f"expected a block of keys, got {value!r}")
        return {str(name): item for name, item in value.items()}

    def flag(self, key: str, value: Any) -> bool:
        """Return true or false."""
        if not isinstance(value, bool):
            raise self.refusal(key, f"expected true or false, got {value!r}")
        return value

    def number(self, key: str, value: Any, least: float = -math.inf) -> float:
        """Return a finite number."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < least:
            bound = f" of {least:g} or more" if least > -math.inf else ""
            raise self.refusal(key, f"expected a number{bound}, got {value!r}")
        return value

    def integer(self, key: str, value: Any, least: int = 0, most: int | None = None) -> int:
        """Return a whole number; 5e8 is one."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_integer = is_number and math.isfinite(value) and value == int(value)
        if not is_integer or not least <= value <= (most or value):
            bound = (
                f", {least} or more" if most is None else f" above {least - 1}, at most {most:,}"
            )
            raise self.refusal(key, f"expected a whole number{bound}, got {value!r}")
        return int(value)

    def word(self, key: str, value: Any, choices: Sequence[str] = ()) -> str:
        """Return a word, one of the choices if there are some."""
        if not isinstance(value, str):
            raise self.refusal(key, f"expected a word, got {value!r}")
        if choices and value not in choices:
            hint = near_miss(value, choices)
            raise self.refusal(key, f"expected one of {', '.join(choices)}, got {value!r}{hint}")
        return value
