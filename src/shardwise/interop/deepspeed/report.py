"""What became of each key of a file: mapped to what, ignored why, or left to the caller."""

import json
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["mapped", "ignored", "auto", "default"]

_MEANINGS: dict[Fate, str] = {
    "mapped": "taken over",
    "ignored": "not taken over",
    "auto": 'left to you ("auto")',
    "default": "not in the file",
}


@dataclass(frozen=True)
class Line:
    """One key with its value: ``text`` says what it became, or why it became nothing."""

    key: str
    value: Any
    fate: Fate
    text: str


@dataclass(frozen=True)
class Report:
    """The lines of one file, in the order of the file. ``str()`` of it is for people."""

    source: str
    lines: tuple[Line, ...]

    def of(self, fate: Fate) -> dict[str, str]:
        """Return the keys of one fate, each with its text."""
        return {line.key: line.text for line in self.lines if line.fate == fate}

    @property
    def mapped(self) -> dict[str, str]:
        """Keys that have an effect, and what they became."""
        return self.of("mapped")

    @property
    def ignored(self) -> dict[str, str]:
        """Keys without effect, and why."""
        return self.of("ignored")

    @property
    def auto(self) -> dict[str, str]:
        """Keys that the file leaves to the caller, and what fills them."""
        return self.of("auto")

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        fates: tuple[Fate, ...] = tuple(_MEANINGS)
        return {"source": self.source, **{fate: self.of(fate) for fate in fates}}

    def sections(self) -> list[tuple[str, list[tuple[str, str, str]]]]:
        """Return titles with rows of (key, value, text), for whoever prints them."""
        found = []
        for fate, meaning in _MEANINGS.items():
            rows = [(x.key, shown(x.value), x.text) for x in self.lines if x.fate == fate]
            if rows:
                found.append((meaning, rows))
        return found

    def __str__(self) -> str:
        out = [self.source]
        for title, rows in self.sections():
            out.append(f"  {title}:")
            out += [f"    {key} = {value}: {text}" for key, value, text in rows]
        return "\n".join(out)


def shown(value: Any) -> str:
    """Write a value as the file would, in one short line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 48 else text[:45] + "..."
