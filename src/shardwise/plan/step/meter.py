"""The running ledger of a played step: which bytes are alive, and the peak of every phase."""

from collections.abc import Mapping
from dataclasses import fields

from shardwise.plan.step.ledger import Ledger, Moment
from shardwise.plan.step.program import OpPhase

_LINES = tuple(f.name for f in fields(Ledger))


class Meter:
    """Adds bytes to lines of the ledger and takes them away; remembers the largest moments.

    ``phase``, ``unit`` and ``micro_batch`` say what goes on; who changes that sets them.
    """

    def __init__(self, resting: Ledger) -> None:
        self.lines: dict[str, int] = {name: getattr(resting, name) for name in _LINES}
        self.total = resting.total
        self.phase: OpPhase = "forward"
        self.unit = 0
        self.micro_batch = 0
        self._peaks: dict[OpPhase, tuple[int, int, int, dict[str, int]]] = {}
        self._highest: dict[OpPhase, int] = {}

    def add(self, line: str, num_bytes: int) -> None:
        """Add bytes to a line, or take them away."""
        self.lines[line] += num_bytes
        self.total += num_bytes
        if num_bytes > 0 and self.total > self._highest.get(self.phase, -1):
            self._note({})

    def touch(self, more: Mapping[str, int]) -> None:
        """Note a moment at which so many more bytes are alive, by line."""
        if self.total + sum(more.values()) > self._highest.get(self.phase, -1):
            self._note(more)

    def _note(self, more: Mapping[str, int]) -> None:
        lines = dict(self.lines)
        for line, num_bytes in more.items():
            lines[line] += num_bytes
        total = self.total + sum(more.values())
        self._highest[self.phase] = total
        self._peaks[self.phase] = (total, self.unit, self.micro_batch, lines)

    def ledger(self) -> Ledger:
        """Return what is alive now."""
        return Ledger(**self.lines)

    def peaks(self) -> tuple[Moment, ...]:
        """Return the largest moment of each phase, in the order of a step."""
        return tuple(
            Moment(phase, unit, micro_batch, Ledger(**lines))
            for phase, (_, unit, micro_batch, lines) in self._peaks.items()
        )
