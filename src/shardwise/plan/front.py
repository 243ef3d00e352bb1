"""The plans that none beats in both speed and memory, and why the others lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.plan.candidate import Candidate
from shardwise.plan.planning import Plan
from shardwise.quantities import format_bytes


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost, with the reason in words."""

    candidate: Candidate
    reason: str
    was_played: bool


@dataclass(frozen=True)
class _Beaten:
    """What is kept of a plan that another one beats; its program would take megabytes."""

    candidate: Candidate
    tokens_per_s: float
    high_bytes: int
    exposed_s: float

    def why(self, best: Sequence[Plan]) -> str:
        """Name the fastest plan that needs no more, and where the time goes."""
        by = next(p for p in best if p.memory.high_bytes <= self.high_bytes)
        slower = 1 - self.tokens_per_s / by.tokens_per_s
        larger = self.high_bytes - by.memory.high_bytes
        memory = format_bytes(larger)
        if slower < 0.005:
            less = f"needs {memory} less" if larger else "is alike"
            return f"as fast as {by.label}, which {less}"
        bigger = f" and {memory} larger" if larger else ""
        waits = self.exposed_s - by.exposed_s
        cause = f"waits {waits:.3g} s longer for collectives" if waits > 0 else "computes longer"
        return f"{slower:.0%} slower than {by.label}{bigger}: {cause}"


class Front:
    """The plans so far that none beats in both speed and memory, and what is left of the others.

    Of two that are alike in both, the first one stays.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] = []
        self._beaten: list[_Beaten] = []

    def add(self, made: Plan) -> None:
        """Take a plan in, unless one that is there beats it."""
        if any(_beats(other, made) for other in self._plans):
            self._beaten.append(_rest_of(made))
            return
        self._beaten += [_rest_of(other) for other in self._plans if _beats(made, other)]
        self._plans = [other for other in self._plans if not _beats(made, other)] + [made]

    def beats(self, tokens_per_s: float, high_bytes: int) -> Plan | None:
        """Return a plan that is at least as fast as this, and no larger; None where there is none.

        With bounds of a plan: it beats that one too.
        """
        for made in self._plans:
            if made.tokens_per_s >= tokens_per_s and made.memory.high_bytes <= high_bytes:
                return made
        return None

    @property
    def fastest(self) -> Plan | None:
        """The fastest plan so far."""
        return max(self._plans, key=lambda made: made.tokens_per_s, default=None)

    def result(self) -> tuple[list[Plan], list[Rejected]]:
        """Return the plans of the front, fastest first, and why the others lost."""
        best = sorted(self._plans, key=lambda made: -made.tokens_per_s)
        return best, [Rejected(b.candidate, b.why(best), was_played=True) for b in self._beaten]


def _beats(one: Plan, other: Plan) -> bool:
    return (
        one.tokens_per_s >= other.tokens_per_s and one.memory.high_bytes <= other.memory.high_bytes
    )


def _rest_of(made: Plan) -> _Beaten:
    return _Beaten(made.candidate, made.tokens_per_s, made.memory.high_bytes, made.exposed_s)
