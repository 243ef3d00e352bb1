"""The labs: their files, numbers, claims and hints. Imports no torch."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent
NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
# Trainers of each stage, as files of the reader would have them; lab 1 measures with them.
TRAINERS = {"lab03_zero1.py": "lab03", "lab04_zero2.py": "lab04", "lab05_zero3.py": "lab05"}
_GAP, _END = re.compile(r"^( *)# GAP (\d+)"), re.compile(r"^ *# END$")
_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Number:
    """A number that the reader predicts: its value, or None if only the run can tell it."""

    value: float | None
    why: str  # said when the number is wrong
    within: float = 0.01  # relative


@dataclass(frozen=True)
class Claim:
    """Is a sentence true, and why; ``{names}`` in the reason are figures of the run."""

    is_true: bool
    why: str


@dataclass(frozen=True)
class Defect:
    """The seeded defect of a lab's broken program."""

    line: str  # the text of the line
    finding: str
    why: str


@dataclass(frozen=True)
class Decision:
    """One choice with its number; the tests hold it against the planner."""

    answer: str | int
    why: str
    ask: str  # said to another answer


@dataclass(frozen=True)
class Lab:
    """All that is fixed about a lab."""

    number: int
    name: str  # of its file: labNN_name.py
    title: str
    targets: Mapping[str, int]  # in the order of the check: the gap to look at, 0 for none
    num_ranks: tuple[int, ...]  # the check runs once with each
    predict: Mapping[str, Number]
    claims: Mapping[str, Claim]
    defect: Defect
    decision: Decision
    hints: Mapping[int, tuple[str, str, str]]  # by gap, each deeper than the one before
    needs: tuple[str, ...] = ()  # files of earlier labs that it imports
    uses_engine: bool = False  # the reader's file imports shardwise
    starts_ranks: bool = False  # the check is one process, which starts ranks itself
    hang_s: float = 20.0  # after which the ranks are stopped

    @property
    def file(self) -> str:
        """Return the name of the reader's file."""
        return f"lab{self.number:02d}_{self.name}.py"

    @property
    def broken_file(self) -> str:
        """Return the name of the program with a seeded defect."""
        return f"lab{self.number:02d}_broken.py"

    @property
    def folder(self) -> Path:
        """Return the folder of the lab's page, solution and check."""
        return FOLDER / f"lab{self.number:02d}"

    @property
    def page(self) -> str:
        """Return the page as Markdown."""
        return (self.folder / "page.md").read_text(encoding="utf-8")

    @property
    def broken(self) -> str:
        """Return the program with a seeded defect."""
        return (self.folder / "broken.py").read_text(encoding="utf-8")

    def gapped(self) -> str:
        """Return the file that the reader starts with: the solution without the gaps' lines."""
        return "".join(_without_gaps(self._marked().splitlines(keepends=True)))

    def solution(self) -> str:
        """Return the solution without the marks at the ends of gaps."""
        return without_marks(self._marked())

    def _marked(self) -> str:
        return (self.folder / "solution.py").read_text(encoding="utf-8")


def without_marks(text: str) -> str:
    """Return a solution without the marks at the ends of gaps."""
    return "".join(line for line in text.splitlines(keepends=True) if not _END.match(line))


def _without_gaps(lines: list[str]) -> list[str]:
    kept: list[str] = []
    gap, is_cut = "", False
    for line in lines:
        if match := _GAP.match(line):
            gap, indent = match[2], match[1]
        if gap and not is_cut and not line.lstrip().startswith("#"):
            kept.append(f'{indent}raise NotImplementedError("gap {gap}")\n')
            is_cut = True
        if _END.match(line):
            gap, is_cut = "", False
        elif not is_cut:
            kept.append(line)
    return [re.sub(r"^(    \"[^\"]+\": ).*  # predicted$", r"\1None,", line) for line in kept]


@cache
def labs() -> dict[int, Lab]:
    """Return the labs by number."""
    found = (import_module(f"shardwise_labs.lab{n:02d}").LAB for n in NUMBERS)
    return {lab.number: lab for lab in found}


def built_by(file: str) -> str:
    """Return in words how a reader gets the file of an earlier lab."""
    number = int(file[3:5])
    return f"lab {number} builds it (`shardwise lab show {number} --yes` prints ours)"


def steps_of(page: str) -> dict[str, str]:
    """Return the sections of a page by their titles, in order."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return {
        title.strip(): text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def intro_of(page: str) -> str:
    """Return a page's text between its title and its first section."""
    _title, _, text = page.partition("\n")
    return text.split("\n## ")[0].strip()


def answers_in(path: Path) -> dict[str, dict[str, object]]:
    """Return PREDICT, CLAIMS, BREAK and DECIDE of a reader's file, without running it.

    Numbers may be written as arithmetic, such as ``7 * 16``. **Raises** SyntaxError.
    """
    found: dict[str, dict[str, object]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            name = ast.unparse(node.targets[0])
            if name in ("PREDICT", "CLAIMS", "BREAK", "DECIDE"):
                items = zip(node.value.keys, node.value.values, strict=True)
                found[name] = {str(_value(key)): _value(value) for key, value in items}
    return found


def _value(node: ast.expr | None) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        return -value if isinstance(value, int | float) else None
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            try:
                return _OPERATORS[type(node.op)](left, right)
            except ArithmeticError:
                return None
    return None


def line_of(text: str, wanted: str) -> int:
    """Return the number of the line of a program that says ``wanted``."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if wanted in line]
    (number,) = lines
    return number
