"""The forms of answers to labs, right and wrong."""

from dataclasses import dataclass, field


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

    right: dict[str, str]
    wrong: list[Wrong] = field(default_factory=list)
    # Of the run's table, compared roughly: columns, and rows with these words in their names.
    rough_columns: tuple[int, ...] = ()
    rough_rows: tuple[str, ...] = ("peak",)
