"""The answers to one lab: the right ones beside the gaps, and wrong lines for each gap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """A wrong line, its gap, the target that is missed, and words of the verdict."""

    gap: int
    target: str
    old: str
    new: str
    words: str


@dataclass(frozen=True)
class Answers:
    """What a reader writes into a lab's file beside the gaps, and wrong lines."""

    line: int  # of the defect in the broken program
    finding: str
    decision: tuple[str, int | str]
    claims: Mapping[str, bool]  # by the ends of their sentences
    wrong: Mapping[tuple[int, str], Sequence[tuple[str, str, str]]]  # by gap and target
    # Of the run's table, compared roughly: columns, and rows with these words in their names.
    rough_columns: tuple[int, ...] = ()
    rough_rows: tuple[str, ...] = ("peak",)

    def write_into(self, text):
        """Return a solution with the right answers beside the gaps."""
        right = {"line": self.line, "finding": self.finding, self.decision[0]: self.decision[1]}
        for name, value in (right | dict(self.claims)).items():
            assert text.count(f'{name}": None') == 1, name
            text = text.replace(f'{name}": None', f'{name}": {value!r}')
        return text

    def all_wrong(self):
        for (gap, target), rows in self.wrong.items():
            for old, new, words in rows:
                yield Wrong(gap, target, old, new, words)
