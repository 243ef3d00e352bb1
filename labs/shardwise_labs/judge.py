"""The check's view of one rank: the reader's module, the oracle, and the verdicts so far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from shardwise_labs.ranks import Verdict
from shardwise_labs.reader import member
from shardwise_labs.words import WrongAnswer


class Judge:
    """Collects verdicts, rows of the run's table and facts on one rank."""

    def __init__(self, rank: int, num_ranks: int, path: Path, solutions: Path) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.folder, self.solutions = path.parent, solutions
        self.theirs: ModuleType
        self.verdicts: list[Verdict] = []
        self.rows: list[tuple[str, str]] = []
        self.facts: dict[str, str] = {}
        self.target = ""
        self.keep: Callable[[], None] = lambda: None  # called at the ends of each target

    def call(self, name: str) -> object:
        """Return a function or class of the reader's file."""
        return member(self.theirs, name)

    @contextmanager
    def judging(self, target: str) -> Iterator[None]:
        """Name the target that is being checked; a WrongAnswer inside is its verdict."""
        self.target = target
        self.keep()
        try:
            yield
        except WrongAnswer as error:
            self.verdicts.append(Verdict(target, False, str(error)))
        self.target = ""
        self.keep()

    def judge(self, target: str, *problems: str | None, good: str = "") -> None:
        """Add the verdict of a target: the first problem, if there is one."""
        found = next((problem for problem in problems if problem), None)
        self.verdicts.append(Verdict(target, found is None, found or good))

    def has_met_all(self) -> bool:
        """Tell whether every rank has met its targets so far; all ranks call this."""
        missed = torch.tensor(float(sum(not verdict.met for verdict in self.verdicts)))
        if dist.is_initialized():
            dist.all_reduce(missed)
        return not missed

    def row(self, label: str, value: str) -> None:
        """Add a line of the run's table."""
        self.rows.append((label, value))
