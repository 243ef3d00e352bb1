"""Free text of a table's cells, made plain, and phrases found in it; what no phrase explains.

Cells of published tables are written by people: "selective (recipe default)", "Selective AC",
"w/o act ckpt". Text is made plain first (case, dashes, arrows, signs), what stands in parentheses
is kept apart as a comment, and then phrases are taken out of it one by one. Words that are left
over and say nothing in themselves are dropped, all others are reported.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).parent / "data" / "phrases.toml"

_ARROWS = re.compile(r"\s*(?:->|=>|→|⇒)\s*")
_WITHOUT = re.compile(r"\bw/\s?o\b|\bwithout\b")
_WITH = re.compile(r"\bw/|\bwith\b")
_JOINS = re.compile(r"\s*(?:[,;|&]|\band\b|(?<![\d.])\+|\+(?!\d))\s*")
_DASHES = re.compile(r"(?<=\w)[-_](?=\w)")
_PARENTHESES = re.compile(r"\(([^()]*)\)|\[([^][]*\w[^][]*)\]")

NEGATION = r"(?:no|not|non|without|never|disable|disabled|skip)"
OFF = r"(?:\s*[:=]\s*(?:off|no|none|false|0|disabled)\b|\s+(?:off|disabled|false)\b)"


def plain(text: str) -> str:
    """Return a cell in one spelling: lower case, dashes as spaces, arrows as "to", joins as commas.

    ``FULL_SHARD`` and ``full-shard`` are one, and so are ``A + B``, ``A & B`` and ``A and B``.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = re.sub("[\u2010-\u2015\u2212]", "-", text)
    text = _ARROWS.sub(" to ", text)
    text = _WITHOUT.sub(" without ", text)
    text = _WITH.sub(" ", text)
    text = _DASHES.sub(" ", text)
    text = _JOINS.sub(" , ", text)
    return re.sub(r"\s+", " ", text).strip(" ,.")


def apart(text: str) -> tuple[str, str]:
    """Split a plain text into what stands outside of parentheses and what stands in them.

    Where nothing stands outside, the comment is the text.
    """
    inside = [a or b for a, b in _PARENTHESES.findall(text)]
    outside = _PARENTHESES.sub(" ", text).strip(" ,")
    comment = " , ".join(inside)
    return (outside, comment) if outside else (comment, "")


@dataclass(frozen=True)
class Said:
    """What a phrase said of a text: its meaning, whether denied, and the words that matched."""

    says: str
    holds: bool
    words: str


class Lexicon:
    """Phrases in the order in which they are taken out of a text; each word counts once."""

    def __init__(self, phrases: Iterable[tuple[str, str]], fillers: str = "") -> None:
        self._phrases = [(_with_negation(pattern), says) for pattern, says in phrases]
        self._fillers = frozenset(fillers.split())

    @classmethod
    def named(cls, name: str) -> Lexicon:
        """Return one of those in ``data/phrases.toml``."""
        whole, own = table(), table()[name]
        phrases = [(p.replace("{CHECKPOINTS}", whole["checkpoints"]), s) for p, s in own["phrases"]]
        return cls(phrases, f"{whole['fillers']} {own['fillers']}")

    def read(self, text: str) -> tuple[list[Said], tuple[str, ...]]:
        """Return what a plain text says, and the words that nothing explains."""
        found = []
        for pattern, says in self._phrases:
            while match := pattern.search(text):
                holds = not (match["no"] or match["off"])
                found.append(Said(says, holds, match[0]))
                text = f"{text[: match.start()]} , {text[match.end() :]}"
        return found, tuple(self._left(text))

    def _left(self, text: str) -> Iterator[str]:
        for word in re.findall(r"[a-z][a-z0-9.]*", text):
            if word not in self._fillers:
                yield word


@cache
def table() -> dict[str, Any]:
    """Read the phrases."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def _with_negation(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<no>\b{NEGATION}\s+)?\b(?:{pattern})\b(?P<off>{OFF})?")
