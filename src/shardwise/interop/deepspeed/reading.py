"""Blocks of a file, key by key: each mapped, ignored, left to the caller, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.report import Fate, Line, Report
from shardwise.keys import nearest
from shardwise.plan.foreign_keys import Key, unknown_key

_COMMENTS = ("_", "//", "#")  # at the top, where DeepSpeed takes any key
Handler = Callable[[str, Any], None]  # (full name of the key, its value)


class Reader:
    """One file being read: where errors point to, and what became of its keys so far."""

    def __init__(self, source: str, auto: Mapping[str, Any]) -> None:
        self.source = source
        self._filled = auto
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
        autos: Mapping[str, str],
    ) -> None:
        """Take every key of a block.

        ``handlers`` take the keys of ``table`` that have no reason to be ignored; ``autos`` says
        what fills a key that the file leaves at "auto".
        """
        block = self.mapping(prefix.rstrip("."), block)
        if prefix and not block:
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
            if value is None:
                self.ignored(name, value, "null: as if it were not there")
            elif table[key].run:
                if value != "auto":
                    self.check_kind(name, value, table[key].kind)
                self.ignored(name, value, table[key].run)
            elif value == "auto":
                text = autos.get(key, "as if it were not there")
                self.add("auto", name, value, text)
            else:
                handlers[key](name, value)

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
            "whole": self.whole,
            "number": self.number,
            "word": self.word,
            "block": self.mapping,
        }
        if kind in checks:
            checks[kind](key, value)

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

    def whole(self, key: str, value: Any, least: int = 0) -> int:
        """Return a whole number; 5e8 is one."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value != int(value) or value < least:
            raise self.refusal(key, f"expected a whole number, {least} or more, got {value!r}")
        return int(value)

    def word(self, key: str, value: Any, choices: Sequence[str] = ()) -> str:
        """Return a word, one of the choices if there are some."""
        if not isinstance(value, str):
            raise self.refusal(key, f"expected a word, got {value!r}")
        if choices and value not in choices:
            near = nearest(value, list(choices))
            hint = f"; did you mean {near!r}?" if near else ""
            raise self.refusal(key, f"expected one of {', '.join(choices)}, got {value!r}{hint}")
        return value
