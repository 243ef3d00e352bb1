"""The simulation of a program in time, on one rank.

An operation begins when its stream is free and its inputs have ended, so one pass over the program
in its order is enough.

Note [One rank is simulated]
Every rank of a group waits in each collective for the last one. So the rank whose device and links
are slowest decides when the step ends, and the step is the same if all ranks are as slow.

Note [Overlap is not free]
gloo's threads copy on the cores that compute, and NCCL's kernels take multiprocessors. One number,
``overlap``, is the share of that which is hidden: while an operation of the device or the host's
cores and a collective both run, each runs at 1 / (2 - overlap) of its normal rate. Started together
and equally long, two operations then take 2 - overlap times as long: 1 hides everything, 0 nothing,
and below 0 they take longer together than one after the other, as they empty each other's caches.

Note [Exposed time]
The step is cut at every begin and end of an operation. A moment at which the compute stream runs is
computing; whatever else runs then is hidden. Of the rest, a moment at which a collective runs is
exposed communication; of the others, one at which a copy, a host core or a disk works is exposed
offload. So the three and the idle rest add up to the step, and two collectives at once are not
counted twice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.plan.step.program import Collective, Op, Program, Stream

_WORKERS = ("compute", "cpu")
COMMUNICATING: tuple[Stream, ...] = ("shard", "replicate")
OFFLOADING: tuple[Stream, ...] = ("to_device", "to_host", "cpu", "disk")
_KINDS = {"compute": 0, **dict.fromkeys(COMMUNICATING, 1), **dict.fromkeys(OFFLOADING, 2)}


def simulate(
    program: Program, seconds: Callable[[Op], float], *, overlap: float = 1.0
) -> Simulated:
    """Simulate a program's operations on one rank; see Note [One rank is simulated].

    ``overlap``: 1 where computing and communicating do not slow each other down, see
    Note [Overlap is not free].

    **Raises** ConfigError: an operation's time or the overlap is out of range.
    """
    if not -1 <= overlap <= 1:
        raise ConfigError(f"overlap={overlap!r}: expected -1 to 1 (0: nothing is hidden, 1: all)")
    priced = [float(seconds(op)) for op in program.ops]
    for index, (op, length_s) in enumerate(zip(program.ops, priced, strict=True)):
        if not 0 <= length_s < math.inf:
            raise ConfigError(
                f"seconds of operation {index} ({op.phase}, {category(op)}): expected 0 or more, "
                f"got {length_s!r}; check the hardware's figures"
            )
    took = _contended_seconds(program.ops, priced, overlap)
    spans: list[OpInterval] = []
    free: dict[Stream, float] = {}
    for op, length_s in zip(program.ops, took, strict=True):
        start_s = free.get(op.stream, 0.0)
        for before in op.after:
            start_s = max(start_s, spans[before].end_s)
        free[op.stream] = start_s + length_s
        spans.append(OpInterval(start_s, start_s + length_s))
    return Simulated(program, tuple(spans))


def _contended_seconds(
    ops: Sequence[Op], seconds: Sequence[float], overlap: float
) -> tuple[float, ...]:
    """Return the seconds of each operation, with cores shared among those that run together.

    **Cost**: operations times streams.
    """
    if overlap == 1:
        return tuple(seconds)
    waiting: dict[Stream, deque[int]] = {}
    for index, op in enumerate(ops):
        waiting.setdefault(op.stream, deque()).append(index)
    left = list(seconds)
    begun, lasted = [math.nan] * len(ops), [0.0] * len(ops)
    ended: set[int] = set()
    running: dict[Stream, int] = {}
    now = 0.0
    while len(ended) < len(ops):
        for stream, queue in waiting.items():
            if stream not in running and queue and ended.issuperset(ops[queue[0]].after):
                running[stream] = queue.popleft()
                begun[running[stream]] = now
        both = any(s in running for s in _WORKERS) and any(s in running for s in COMMUNICATING)
        rate = 1 / (2 - overlap) if both else 1.0
        shared = _WORKERS + COMMUNICATING
        passed = min(left[i] / (rate if s in shared else 1) for s, i in running.items())
        now += passed
        for stream, index in list(running.items()):
            speed = rate if stream in shared else 1.0
            if left[index] / speed <= passed:
                lasted[index] = now - begun[index]
                ended.add(running.pop(stream))
            else:
                left[index] -= passed * speed
    return tuple(lasted)


# -- the time of a step
class OpInterval(NamedTuple):
    """The begin and the end of an operation of a program."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulated:
    """A simulated step of one rank, with a span for each operation of the program."""

    program: Program
    spans: tuple[OpInterval, ...]

    @cached_property
    def step_s(self) -> float:
        """End of the last operation."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in the program; a step may have more, see Note [Long windows]."""
        return 1 + max((op.micro_batch for op in self.program.ops), default=0)

    @cached_property
    def busy_s(self) -> Mapping[Stream, float]:
        """Seconds that each stream worked."""
        return {stream: sum(phases.values()) for stream, phases in self.stream_phase_s.items()}

    @property
    def compute_s(self) -> float:
        """Seconds that the compute stream worked."""
        return self.busy_s.get("compute", 0.0)

    @property
    def communication_s(self) -> float:
        """Seconds in which a collective ran; the union, not the sum."""
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
        """Seconds in which the compute stream does nothing, for any reason."""
        return self.idle_s + self.exposed_s + self.exposed_offload_s

    @cached_property
    def phase_s(self) -> Mapping[str, float]:
        """Busy seconds by phase; phases on different streams overlap."""
        phase_s: defaultdict[str, float] = defaultdict(float)
        for phases in self.stream_phase_s.values():
            for phase, seconds in phases.items():
                phase_s[phase] += seconds
        return phase_s

    @cached_property
    def stream_phase_s(self) -> Mapping[Stream, Mapping[str, float]]:
        """Busy seconds by stream, and by phase on it."""
        by_stream: dict[Stream, defaultdict[str, float]] = {}
        for op, span in zip(self.program.ops, self.spans, strict=True):
            phases = by_stream.setdefault(op.stream, defaultdict(float))
            phases[op.phase] += span.end_s - span.start_s
        return by_stream

    @property
    def unit_seconds(self) -> tuple[dict[str, float], ...]:
        """Seconds of each unit: computing, communicating, and the wait of compute before it."""
        names = "compute_s", "communication_s", "waited_s"
        units = tuple(dict.fromkeys(names, 0.0) for _ in self.program.unit_names)
        free = 0.0
        for op, span in zip(self.program.ops, self.spans, strict=True):
            unit, seconds = units[op.unit], span.end_s - span.start_s
            if op.stream == "compute":
                unit["compute_s"] += seconds
                unit["waited_s"] += span.start_s - free
                free = span.end_s
            elif isinstance(op.work, Collective):
                unit["communication_s"] += seconds
        return units

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Operations that decide the step, in order of time.

        Each begins when the one before ends. Had one been shorter, the step would have been.
        """
        ops, ends = self.program.ops, [span.end_s for span in self.spans]
        previous, newest = list[int](), dict[Stream, int]()
        for index, op in enumerate(ops):
            previous.append(newest.get(op.stream, -1))
            newest[op.stream] = index
        index = ends.index(self.step_s) if self.step_s > 0 else -1
        path = list[int]()
        while index != -1:
            path.append(index)
            last, inputs = 0.0, (previous[index], *ops[index].after)
            index = -1
            for previous_op in inputs:
                if previous_op != -1 and ends[previous_op] > last:
                    last, index = ends[previous_op], previous_op
        return tuple(reversed(path))

    @property
    def critical_s(self) -> Mapping[str, float]:
        """Seconds of the critical path by kind of work: what to make faster first."""
        seconds: Counter[str] = Counter()
        for index in self.critical_path:
            start_s, end_s = self.spans[index]
            seconds[category(self.program.ops[index])] += end_s - start_s  # type: ignore[assignment]
        return seconds

    @cached_property
    def _moments(self) -> Mapping[tuple[bool, bool, bool], float]:
        """Seconds by (computes, communicates, offloads); see Note [Exposed time]."""
        edges = []
        for op, span in zip(self.program.ops, self.spans, strict=True):
            kind = _KINDS[op.stream]
            edges += [(span.start_s, kind, 1), (span.end_s, kind, -1)]
        moments: defaultdict[tuple[bool, bool, bool], float] = defaultdict(float)
        running, before = [0, 0, 0], 0.0
        for at, kind, change in sorted(edges):
            moments[running[0] > 0, running[1] > 0, running[2] > 0] += at - before
            running[kind] += change
            before = at
        return moments


def category(op: Op) -> str:
    """Return what kind of work an operation is: its stream, or the kind of its collective."""
    return op.work.kind if isinstance(op.work, Collective) else op.stream
