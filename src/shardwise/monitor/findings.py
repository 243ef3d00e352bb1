"""Findings of the doctor, and the texts of each code, which `findings.toml` holds.

One record for everything that shows it: a card in a terminal, a report, a line in a log, JSON.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Annotated, Literal

from pydantic import Field

from shardwise.keys import checked_value
from shardwise.quantities import format_bytes

Severity = Literal["critical", "warning"]
DOC = "docs/findings.md"
Setting = str | int | float | None
_Text = Annotated[str, Field(min_length=1)]
_DEFAULT = "default"


@dataclass(frozen=True)
class Change:
    """One setting to change; ``before`` is None if it is not set or not known."""

    key: str
    before: Setting
    after: Setting

    def __str__(self) -> str:
        """Return it as one line."""
        was = "" if self.before is None else f" (now {self.before})"
        return f"{self.key}: {self.after}{was}"


@dataclass(frozen=True)
class Gain:
    """The expected gain of a change: at least ``low``, at most ``high`` if that is known.

    ``source`` tells how the numbers were obtained.
    """

    low: float
    unit: Literal["s/step", "bytes"]
    source: str
    high: float | None = None

    def __str__(self) -> str:
        """Return it as one line, with its source."""
        is_bytes, most = self.unit == "bytes", self.low if self.high is None else self.high
        low, high = (format_bytes(n) if is_bytes else f"{n:.3g}" for n in (self.low, most))
        size = f"{low} to {high}" if self.low > 0 else f"at most {high}"
        size = f"at least {low}" if self.high is None else size
        return f"{size}{'' if is_bytes else ' s of each step'} ({self.source})"


@dataclass(frozen=True)
class Finding:
    """One failure of a run.

    A ``code`` never changes its meaning (``shardwise explain CODE``). ``evidence`` holds the
    numbers behind the verdict, thresholds included, by names that contain their units. ``unit`` and
    ``rank`` are set if the finding is about one of them. ``step`` is the last step that was judged.
    """

    code: str
    severity: Severity
    title: str
    verdict: str
    evidence: Mapping[str, float]
    why: str
    changes: tuple[Change, ...] = ()
    gain: Gain | None = None
    unit: str | None = None
    rank: int | None = None
    step: int | None = None

    @property
    def doc(self) -> str:
        """The section of the documentation about this code."""
        return f"{DOC}#{self.code.lower()}"

    def explains(self, other: "Finding") -> bool:
        """Tell whether the other one needs no card of its own beside this one."""
        doc = finding_docs()[self.code]
        on_rank = other.code in doc.explains_on_its_rank and other.rank == self.rank
        return other.code in doc.explains or on_rank

    def to_json(self) -> dict[str, object]:
        """Return the finding as values of JSON."""
        changes = [{"key": c.key, "from": c.before, "to": c.after} for c in self.changes]
        values = {**asdict(self), "evidence": dict(self.evidence), "changes": changes}
        return values | {"doc": self.doc}


@dataclass(frozen=True)
class Abstention:
    """A rule that cannot judge this run, and the evidence that it misses."""

    code: str
    missing: str


@dataclass(frozen=True)
class Diagnosis:
    """The verdict of all rules about a run: findings, the worst first, and abstentions."""

    findings: tuple[Finding, ...] = ()
    abstentions: tuple[Abstention, ...] = ()
    judged: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the diagnosis as values of JSON."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "not_enough_evidence": {each.code: each.missing for each in self.abstentions},
            "judged": list(self.judged),
        }


@dataclass(frozen=True)
class FindingCase:
    """Templates of one case of a code, which a rule fills with its numbers.

    ``changes`` are lists of key, before and after, or of key and after. ``gain`` is the unit of the
    expected gain and the source of its numbers.
    """

    verdict: _Text
    why: _Text
    changes: Sequence[Annotated[Sequence[str | int | bool], Field(min_length=2, max_length=3)]] = ()
    gain: tuple[Literal["s/step", "bytes"], _Text] | None = None


@dataclass(frozen=True)
class FindingDoc:
    """One code, documented: its meaning, the condition of the rule, remedies in order.

    ``picture`` describes how the failure looks in a report. Findings of the codes in ``explains``
    are left out beside this one; those of ``explains_on_its_rank`` if they name the same rank.
    """

    code: str
    title: _Text
    severity: Severity
    means: _Text
    condition: _Text
    remedies: Annotated[Sequence[_Text], Field(min_length=1)]
    picture: _Text
    cases: Annotated[Mapping[str, FindingCase], Field(min_length=1)]
    explains: Sequence[str] = ()
    explains_on_its_rank: Sequence[str] = ()


def read_docs(text: str) -> Mapping[str, FindingDoc]:
    """Return the documentation of each code from TOML. **Raises** ConfigError for a wrong table."""
    tables = tomllib.loads(text).items()
    return {c: checked_value(FindingDoc, {"code": c, **t}, f"finding {c}") for c, t in tables}


@cache
def finding_docs() -> Mapping[str, FindingDoc]:
    """Return the documentation of all codes, in the order of the page."""
    return read_docs(files(__package__).joinpath("findings.toml").read_text(encoding="utf-8"))


class _Filler(Formatter):
    """Fills templates whose fields are names of evidence; the format ``bytes`` writes a size."""

    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec == "bytes":
            return format_bytes(float(str(value)))
        return str(super().format_field(value, format_spec))

    def fill_setting(self, template: Setting, values: Mapping[str, Setting]) -> Setting:
        """Fill a template; one that is a single field without a format gives the value itself."""
        if not isinstance(template, str):
            return template
        if template[:1] == "{" and template[1:-1] in values:
            return values[template[1:-1]]
        return self.vformat(template, (), values)


def make_finding(
    case: str,
    evidence: Mapping[str, float],
    *changes: Change,
    gain: float | tuple[float, float] | None = None,
    unit: str | None = None,
    rank: int | None = None,
    **words: Setting,
) -> Finding:
    """Return a finding with the texts of ``case``, which is a code or "CODE.case".

    The templates are filled with ``evidence`` and ``words``. ``gain`` is the lowest gain, or the
    lowest and the highest.
    """
    code, _, name = case.partition(".")
    doc, filler = finding_docs()[code], _Filler()
    texts, values = doc.cases[name or _DEFAULT], {**evidence, **words}
    filled = []
    for key, *settings in texts.changes:
        ends = (filler.fill_setting(setting, values) for setting in [None, *settings][-2:])
        filled.append(Change(filler.vformat(str(key), (), values), *ends))
    low, high = gain if isinstance(gain, tuple) else (gain, None)
    rounded = {n: v if isinstance(v, int) else float(f"{v:.4g}") for n, v in evidence.items()}
    return Finding(
        code,
        doc.severity,
        doc.title,
        filler.vformat(texts.verdict, (), values),
        rounded,
        filler.vformat(texts.why, (), values),
        (*changes, *filled),
        None if low is None or texts.gain is None else Gain(low, *texts.gain, high),
        unit,
        rank,
    )
