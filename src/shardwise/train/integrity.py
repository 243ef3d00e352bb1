"""Checks that bits are right, as often as a share of the time allows.

Note [A share of the time for checks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Two checks take turns: copies of state are compared between ranks, and a step is computed twice.
Rank 0 measures what each costs, and asks for the next one when all checks together stay within the
share of the time since the first step. What it asks for travels with the losses that the ranks sum
at the end of a step, so all make the check in the step after.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Check = Literal["none", "replicas", "replay"]
CHECKS: tuple[Check, ...] = ("none", "replicas", "replay")


class IntegrityBudget:
    """Which check is next: see Note [A share of the time for checks].

    ``share`` is of the time, 0 for no checks. ``agreed`` is the check of the coming step.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.agreed: Check = "none"
        self._share, self._clock = share, clock
        self._began_s = clock()
        self._spent_s = 0.0
        self._cost_s = {"replicas": 0.0, "replay": 0.0}  # of the last one
        self._next: Check = "replicas"
        self._step_s = 0.0

    def ask(self) -> int:
        """Return the index in `CHECKS` of the check that fits now, for rank 0 to send."""
        if not self._share or not self._step_s:
            return 0
        allowed_s = self._share * (self._clock() - self._began_s) - self._spent_s
        cost_s = self._cost_s[self._next] or self._step_s
        return CHECKS.index(self._next) if cost_s <= allowed_s else 0

    def agree(self, index: int) -> None:
        """Set the check of the coming step; ``index`` is what rank 0 sent."""
        self.agreed = CHECKS[index]

    def note_step(self, seconds: float, is_replayed: bool) -> None:
        """Note what the step took; a second pass counts as the cost of a replay."""
        if is_replayed:
            self._spend("replay", max(0.0, seconds - self._step_s))
        else:
            self._step_s = seconds

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Measure a comparison of copies."""
        begun_s = self._clock()
        yield
        self._spend("replicas", self._clock() - begun_s)

    def _spend(self, check: Literal["replicas", "replay"], seconds: float) -> None:
        self._spent_s += seconds
        self._cost_s[check] = seconds
        self._next = "replay" if check == "replicas" else "replicas"
