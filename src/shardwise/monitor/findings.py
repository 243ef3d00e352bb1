"""`Finding`: what is wrong with a run, the numbers behind it and what to change; as JSON too.

One record for all who show it: a card in a terminal, a report, a line in a log, a check in CI.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["critical", "warning"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning")  # the worst first
DOC = "docs/findings.md"
Setting = str | int | float | None


@dataclass(frozen=True)
class Change:
    """One setting to change; ``before`` is None where it is not set, or not known."""

    key: str
    before: Setting
    after: Setting

    def __str__(self) -> str:
        """Say it in a line."""
        was = "" if self.before is None else f" (now {self.before})"
        return f"{self.key}: {self.after}{was}"


@dataclass(frozen=True)
class Gain:
    """What a change is expected to give: at least ``low``, at most ``high`` where that is known.

    ``unit`` is "s/step" or "bytes"; ``source`` says where the numbers come from.
    """

    low: float
    unit: Literal["s/step", "bytes"]
    source: str
    high: float | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run.

    ``code`` never changes its meaning (``shardwise explain CODE``). ``evidence`` are the numbers
    that the verdict rests on, by names that tell their units, thresholds among them. ``unit`` and
    ``rank`` are set where it is about one of them, ``step`` is the last one that was judged.
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
        """Where the finding is explained."""
        return f"{DOC}#{self.code.lower()}"

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        changes = [{"key": c.key, "from": c.before, "to": c.after} for c in self.changes]
        told = {**asdict(self), "evidence": dict(self.evidence), "changes": changes}
        return told | {"doc": self.doc}


@dataclass(frozen=True)
class Abstention:
    """A rule that cannot judge this run, and what it would need."""

    code: str
    missing: str


@dataclass(frozen=True)
class Diagnosis:
    """What all rules say of a run: findings, the worst first; who abstains."""

    findings: tuple[Finding, ...] = ()
    abstentions: tuple[Abstention, ...] = ()
    judged: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "not_enough_evidence": {each.code: each.missing for each in self.abstentions},
            "judged": list(self.judged),
        }


def finding_from_json(values: Mapping[str, Any]) -> Finding:
    """Return the finding that `Finding.to_json` has told. **Raises** KeyError, TypeError."""
    told = {key: value for key, value in values.items() if key != "doc"}
    told["changes"] = tuple(Change(c["key"], c["from"], c["to"]) for c in told["changes"])
    told["gain"] = None if told["gain"] is None else Gain(**told["gain"])
    return Finding(**told)


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings in the order in which they are shown."""
    return tuple(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.code)))
