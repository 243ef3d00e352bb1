"""The time of one rank's step: busy, waiting, hidden, exposed; by phase and by unit.

Note [Exposed time]
The step is cut at every begin and end of an operation. A moment at which the compute stream runs is
computing; whatever else runs then is hidden. Of the rest, a moment at which a collective runs, or
has been issued and waits for another rank, is exposed communication; of the others, one at which
a copy, a host core or a disk works is exposed offload. So the three and the idle rest add up to
the step, and two collectives at once are not counted twice.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.step.program import Collective, Op, Program, Stream

COMMUNICATING: tuple[Stream, ...] = ("shard", "replicate")
OFFLOADING: tuple[Stream, ...] = ("to_device", "to_host", "cpu", "disk")
_KINDS = {"compute": 0, **dict.fromkeys(COMMUNICATING, 1), **dict.fromkeys(OFFLOADING, 2)}


class Span(NamedTuple):
    """One operation on one rank: ready, begun (a collective may wait for other ranks), ended."""

    op: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class UnitTimes:
    """One unit's seconds: computing, communicating, and how long compute stood still before it."""

    name: str
    compute_s: float
    communication_s: float
    waited_s: float


@dataclass(frozen=True)
class RankRun:
    """One rank's step; ``spans`` are in program order, ``begin_s`` is when the rank began it."""

    program: Program
    rank: int
    begin_s: float
    spans: tuple[Span, ...]

    @cached_property
    def end_s(self) -> float:
        """End of the last operation."""
        return max((span.end_s for span in self.spans), default=self.begin_s)

    @property
    def step_s(self) -> float:
        """Seconds from this rank's begin to its end."""
        return self.end_s - self.begin_s

    @cached_property
    def busy_s(self) -> Mapping[Stream, float]:
        """Seconds that each stream worked; waiting for other ranks is not work."""
        return {stream: sum(phases.values()) for stream, phases in self.stream_phase_s.items()}

    @property
    def compute_s(self) -> float:
        """Seconds that the compute stream worked."""
        return self.busy_s.get("compute", 0.0)

    @cached_property
    def skew_s(self) -> float:
        """Seconds that issued collectives waited for other ranks, summed."""
        return sum(span.start_s - span.ready_s for span in self.spans)

    @property
    def communication_s(self) -> float:
        """Seconds in which a collective ran or waited for other ranks; the union, not the sum."""
        hidden = self._moments[True, True, False] + self._moments[True, True, True]
        return self.exposed_s + hidden

    @property
    def exposed_s(self) -> float:
        """Exposed communication, see Note [Exposed time]."""
        return self._moments[False, True, False] + self._moments[False, True, True]

    @property
    def exposed_offload_s(self) -> float:
        """Exposed work of copies, host cores and disks, see Note [Exposed time]."""
        return self._moments[False, False, True]

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing worked, see Note [Exposed time]."""
        return self._moments[False, False, False]

    @property
    def overlap(self) -> float:
        """Share of communication that computing hides, 0 to 1; 1 without communication."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s > 0 else 1.0

    @property
    def bubble_s(self) -> float:
        """Seconds in which the compute stream stood still, whatever the reason."""
        return self.idle_s + self.exposed_s + self.exposed_offload_s

    @cached_property
    def phase_s(self) -> Mapping[str, float]:
        """Busy seconds by phase; phases on different streams overlap."""
        found: defaultdict[str, float] = defaultdict(float)
        for phases in self.stream_phase_s.values():
            for phase, seconds in phases.items():
                found[phase] += seconds
        return found

    @cached_property
    def stream_phase_s(self) -> Mapping[Stream, Mapping[str, float]]:
        """Busy seconds by stream, and by phase on it."""
        found: dict[Stream, defaultdict[str, float]] = {}
        for span in self.spans:
            op = self.program.ops[span.op]
            phases = found.setdefault(op.stream, defaultdict(float))
            phases[op.phase] += span.end_s - span.start_s
        return found

    @cached_property
    def unit_times(self) -> tuple[UnitTimes, ...]:
        """One row for each unit, in the program's order of units."""
        count = len(self.program.unit_names)
        compute, communication, waited = ([0.0] * count for _ in range(3))
        free = self.begin_s
        for span in self.spans:
            op = self.program.ops[span.op]
            unit = op.unit if 0 <= op.unit < count else None
            seconds = span.end_s - span.start_s
            if op.stream == "compute":
                if unit is not None:
                    compute[unit] += seconds
                    waited[unit] += span.start_s - free
                free = span.end_s
            elif unit is not None and isinstance(op.work, Collective):
                communication[unit] += seconds
        rows = zip(self.program.unit_names, compute, communication, waited, strict=True)
        return tuple(UnitTimes(*row) for row in rows)

    @cached_property
    def _moments(self) -> Mapping[tuple[bool, bool, bool], float]:
        """Seconds by whether it computes, communicates, offloads; see Note [Exposed time]."""
        edges = []
        for span in self.spans:
            kind = _KINDS[self.program.ops[span.op].stream]
            edges += [(span.ready_s, kind, 1), (span.end_s, kind, -1)]
        found: defaultdict[tuple[bool, bool, bool], float] = defaultdict(float)
        running, before = [0, 0, 0], self.begin_s
        for at, kind, change in sorted(edges):
            found[running[0] > 0, running[1] > 0, running[2] > 0] += at - before
            running[kind] += change
            before = at
        return found


def unit_name(program: Program, op: Op) -> str:
    """Return the name of an operation's unit as the engine labels it; the root's is empty."""
    return program.unit_names[op.unit] if 0 <= op.unit < len(program.unit_names) else ""


def category(op: Op) -> str:
    """Return what kind of work an operation is: its stream, or the kind of its collective."""
    return op.work.kind if isinstance(op.work, Collective) else op.stream
