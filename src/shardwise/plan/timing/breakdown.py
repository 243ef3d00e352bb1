"""Where the time of one rank's step went: busy, waiting, hidden, exposed; by phase and by unit.

Note [What is exposed]
The step is cut at every begin and end of an operation. A moment at which the compute stream runs is
computing; whatever else runs then is hidden. Of the rest, a moment at which a collective runs, or
has been issued and waits for another rank, is exposed communication; of what is left, one at which
a copy, a host core or a disk works is exposed offload. So the three and the idle rest add up to
the step, and two collectives at once are not counted twice.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.step.program import Collective, Op, Program, Stream

Interval = tuple[float, float]


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
        busy: dict[Stream, float] = {}
        for span in self.spans:
            stream = self.program.ops[span.op].stream
            busy[stream] = busy.get(stream, 0.0) + span.end_s - span.start_s
        return busy

    @property
    def compute_s(self) -> float:
        """Seconds that the compute stream worked."""
        return self.busy_s.get("compute", 0.0)

    @cached_property
    def skew_s(self) -> float:
        """Seconds that issued collectives waited for other ranks, summed."""
        return sum(span.start_s - span.ready_s for span in self.spans)

    @cached_property
    def communication_s(self) -> float:
        """Seconds in which a collective ran or waited for other ranks; the union, not the sum."""
        return _length(self._communicating)

    @cached_property
    def exposed_s(self) -> float:
        """Exposed communication, see Note [What is exposed]."""
        return _length(_without(self._communicating, self._computing))

    @cached_property
    def exposed_offload_s(self) -> float:
        """Exposed work of copies, host cores and disks, see Note [What is exposed]."""
        return _length(_without(_without(self._offloading, self._computing), self._communicating))

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing worked, see Note [What is exposed]."""
        busy = _length(self._computing) + self.exposed_s + self.exposed_offload_s
        return max(0.0, self.step_s - busy)

    @property
    def overlap(self) -> float:
        """Share of communication that computing hides, 0 to 1; 1 where there is none."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s > 0 else 1.0

    @property
    def bubble_s(self) -> float:
        """Seconds in which the compute stream stood still, whatever the reason."""
        return self.step_s - _length(self._computing)

    @cached_property
    def phase_s(self) -> Mapping[str, float]:
        """Busy seconds by phase; phases on different streams overlap."""
        phases: Counter[str] = Counter()
        for span in self.spans:
            phases[self.program.ops[span.op].phase] += span.end_s - span.start_s  # type: ignore[assignment]
        return phases

    @cached_property
    def stream_phase_s(self) -> Mapping[Stream, Mapping[str, float]]:
        """Busy seconds by stream, and by phase on it."""
        found: dict[Stream, dict[str, float]] = {}
        for span in self.spans:
            op = self.program.ops[span.op]
            phases = found.setdefault(op.stream, {})
            phases[op.phase] = phases.get(op.phase, 0.0) + span.end_s - span.start_s
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
    def _computing(self) -> list[Interval]:
        return self._union(lambda op: op.stream == "compute")

    @cached_property
    def _communicating(self) -> list[Interval]:
        return self._union(lambda op: op.stream in ("shard", "replicate"))

    @cached_property
    def _offloading(self) -> list[Interval]:
        return self._union(lambda op: op.stream in ("to_device", "to_host", "cpu", "disk"))

    def _union(self, wanted: Callable[[Op], bool]) -> list[Interval]:
        ops = self.program.ops
        return _merged([(s.ready_s, s.end_s) for s in self.spans if wanted(ops[s.op])])


def unit_name(program: Program, op: Op) -> str:
    """Return the name of an operation's unit as the engine labels it; the root's is empty."""
    return program.unit_names[op.unit] if 0 <= op.unit < len(program.unit_names) else ""


def category(op: Op) -> str:
    """Return what kind of work an operation is: its stream, or the kind of its collective."""
    return op.work.kind if isinstance(op.work, Collective) else op.stream


def _merged(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Cut the ``others`` out of the intervals; both are merged and sorted."""
    left: list[Interval] = []
    first = 0
    for begin, end in intervals:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            left.append((begin, end))
    return left
