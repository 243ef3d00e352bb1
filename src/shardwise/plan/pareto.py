"""The Pareto set of a search: the plans that no other plan beats in both speed and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.plan.candidate import Candidate
from shardwise.plan.planning import Plan
from shardwise.quantities import format_bytes


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost, with the reason in words."""

    candidate: Candidate
    reason: str
    was_played: bool


class ParetoSet:
    """The plans so far that no other plan beats in both speed and memory, and the beaten ones.

    If two are equal in both, the first one stays.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] = []
        self._beaten: list[_BeatenPlan] = []

    def add(self, new: Plan) -> None:
        """Add a plan to the set, or to the beaten plans."""
        beaten = [new]
        if self.find_better(new.tokens_per_s, new.memory.high_bytes) is None:
            beaten = [plan for plan in self._plans if _beats(new, plan)]
            self._plans = [plan for plan in self._plans if not _beats(new, plan)] + [new]
        self._beaten += [
            _BeatenPlan(plan.candidate, plan.tokens_per_s, plan.memory.high_bytes, plan.exposed_s)
            for plan in beaten
        ]

    def find_better(self, tokens_per_s: float, high_bytes: int) -> Plan | None:
        """Return a plan that is at least as fast as this and no larger, or None.

        If the arguments are bounds of a plan, the result beats that plan too.
        """
        for kept in self._plans:
            if kept.tokens_per_s >= tokens_per_s and kept.memory.high_bytes <= high_bytes:
                return kept
        return None

    @property
    def fastest(self) -> Plan | None:
        """The fastest plan so far."""
        return max(self._plans, key=lambda plan: plan.tokens_per_s, default=None)

    def result(self) -> tuple[list[Plan], list[Rejected]]:
        """Return the plans of the set, fastest first, and the beaten ones with the reason."""
        best = sorted(self._plans, key=lambda plan: -plan.tokens_per_s)
        rejected = [
            Rejected(beaten.candidate, beaten.describe_loss(best), was_played=True)
            for beaten in self._beaten
        ]
        return best, rejected


def _beats(new: Plan, old: Plan) -> bool:
    is_as_fast = new.tokens_per_s >= old.tokens_per_s
    return is_as_fast and new.memory.high_bytes <= old.memory.high_bytes


class _BeatenPlan(NamedTuple):
    """The figures of a plan that another plan beats, without its program, which takes megabytes."""

    candidate: Candidate
    tokens_per_s: float
    high_bytes: int
    exposed_s: float

    def describe_loss(self, best: Sequence[Plan]) -> str:
        """Name the fastest plan that needs no more memory, and the cause of the difference."""
        winner = next(plan for plan in best if plan.memory.high_bytes <= self.high_bytes)
        slower = 1 - self.tokens_per_s / winner.tokens_per_s
        larger = self.high_bytes - winner.memory.high_bytes
        if slower < 0.005:
            difference = f"needs {format_bytes(larger)} less" if larger else "needs as much memory"
            return f"as fast as {winner.candidate.label}, which {difference}"
        bigger = f" and {format_bytes(larger)} larger" if larger else ""
        waits = self.exposed_s - winner.exposed_s
        cause = f"waits {waits:.3g} s longer for collectives" if waits > 0 else "computes longer"
        return f"{slower:.0%} slower than {winner.candidate.label}{bigger}: {cause}"
