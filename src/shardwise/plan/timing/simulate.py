"""Simulate the operations of a program in time, on all ranks of a scenario.

An operation begins when its stream is free and its inputs have ended; a collective begins when the
last rank of its group is ready. The program's order makes one pass over it enough. Times are arrays
of the ranks; if none differs and there is no noise, one stands for all, and they are floats.

Note [Steps after steps]
A rank begins its next step when all its streams have ended. Only collectives make ranks wait for
each other, so a rank that noise made late may catch up. A step lasts from the moment at which the
last rank ended the step before to the moment at which the last rank ends this one.

Note [Overlap is not free]
gloo's threads copy on the cores that compute, and NCCL's kernels take multiprocessors. One number,
``overlap``, is the share of that which is hidden: while an operation of the device or the host's
cores and a collective both run, each runs at 1 / (2 - overlap) of its normal rate. Started together
and equally long, two operations then take 2 - overlap times as long: 1 hides everything, 0 nothing,
and below 0 they take longer together than one after the other, as they empty each other's caches.
The longer times are computed once, for a rank among equals; if ranks differ, they are an
approximation.

Note [Times of a pass]
A pass keeps the end of each operation, and the begin of each collective: 8 bytes per operation and
rank, and per group for a collective. The spans of a rank and the critical path are
computed from these afterwards, for the few ranks that they need.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.plan.step.program import Collective, Compute, Op, Program, Stream
from shardwise.plan.timing.breakdown import COMMUNICATING, RankRun, Span, category
from shardwise.plan.timing.scenario import Scenario

Floats = NDArray[np.float64]
Times = float | Floats  # of the one rank that stands for all, or [replicas, shards]
Noise = Callable[[tuple[int, ...]], Floats]
_WORKERS = ("compute", "cpu")


class CriticalOp(NamedTuple):
    """An operation that decides the step: had it been shorter, the step would have been."""

    op: int
    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TimeSpread:
    """How a time is spread over ranks or steps."""

    mean_s: float
    minimum_s: float
    median_s: float
    p95_s: float
    maximum_s: float


@dataclass(frozen=True)
class Simulated:
    """A simulated step, the last one of several.

    ``ranks`` are written down in full: the slowest first, then those asked for, or else the median
    and the fastest where they differ. ``rank_s`` is the spread over all ranks of the time from a
    rank's own begin to its end. ``critical_path`` is in order of time and may go from rank to rank.
    """

    program: Program
    scenario: Scenario
    steps_s: tuple[float, ...]
    rank_s: TimeSpread
    ranks: tuple[RankRun, ...]
    critical_path: tuple[CriticalOp, ...]

    @property
    def step_s(self) -> float:
        """Seconds per step, of the slowest rank, on average over the steps."""
        return fmean(self.steps_s)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in the program; a step may have more, see Note [Long windows]."""
        return 1 + max((op.micro_batch for op in self.program.ops), default=0)

    @property
    def step_spread(self) -> TimeSpread:
        """Spread of the step time over the steps."""
        return _spread(np.array(self.steps_s))

    @property
    def slowest(self) -> RankRun:
        """The rank that ended last."""
        return self.ranks[0]

    @property
    def critical_s(self) -> Mapping[str, float]:
        """Seconds of the critical path by kind of work: what to make faster first."""
        seconds: Counter[str] = Counter()
        for step in self.critical_path:
            seconds[category(self.program.ops[step.op])] += step.end_s - step.start_s  # type: ignore[assignment]
        return seconds


def simulate(
    program: Program,
    seconds: Callable[[Op], float],
    scenario: Scenario | None = None,
    *,
    overlap: float = 1.0,
    ranks: Sequence[int] | None = None,
) -> Simulated:
    """Play a program on the ranks of a scenario, or on one rank among equals.

    ``overlap``: 1 where computing and communicating do not slow each other down, see
    Note [Overlap is not free]. ``ranks`` to write down.

    **Cost** operations times ranks, in time and memory, but for one rank among equals; see
    Note [Times of a pass].
    **Raises** ConfigError: an operation's time, the overlap or a rank is out of range.
    """
    scenario = scenario or Scenario()
    if not -1 <= overlap <= 1:
        raise ConfigError(f"overlap={overlap!r}: expected -1 to 1 (0: nothing is hidden, 1: all)")
    for rank in ranks or ():
        if not 0 <= rank < scenario.num_ranks:
            raise ConfigError(f"ranks: got {rank}, expected 0 to {scenario.num_ranks - 1}")
    base = _contended_seconds(program.ops, _priced(program, seconds), overlap)
    grid = grid_of(scenario)
    end: Times = 0.0 if isinstance(grid.compute, float) else np.zeros(grid.compute.shape)
    steps_s: list[float] = []
    for step in range(scenario.num_steps):
        begin = end - float(np.min(end))
        made = run_step(program.ops, base, grid, begin, _noise_of(scenario, step))
        end = made.end
        steps_s.append(float(np.max(end) - np.max(begin)))
    runs = [
        RankRun(program, rank, _at(begin, place), tuple(made.spans(place)))
        for rank in _chosen_ranks(np.ravel(end), ranks)
        for place in [grid.place(rank)]
    ]
    steps = made.critical_path(grid.place(runs[0].rank))
    path = [
        CriticalOp(index, grid.rank_at(place), start_s, _at(made.ends[index], place))
        for index, place, start_s in steps
    ]
    spread = _spread(np.ravel(end - begin))
    return Simulated(program, scenario, tuple(steps_s), spread, tuple(runs), tuple(path))


def _priced(program: Program, seconds: Callable[[Op], float]) -> list[float]:
    priced = []
    for index, op in enumerate(program.ops):
        took = seconds(op)
        if not (took >= 0 and math.isfinite(took)):
            raise ConfigError(
                f"seconds of operation {index} ({op.phase}, {category(op)}): expected 0 or more, "
                f"got {took!r}; check the hardware's figures"
            )
        priced.append(float(took))
    return priced


def _chosen_ranks(ends: Floats, asked: Sequence[int] | None) -> list[int]:
    """Return the slowest rank, then those asked for, or else the median and the fastest.

    Of ranks that end together, it is the first one.
    """
    order = np.argsort(-ends, kind="stable")
    if asked is not None:
        return list(dict.fromkeys([int(order[0]), *asked]))
    found = [ends[order[number]] for number in (0, len(order) // 2, -1)]
    return list(dict.fromkeys(int(np.argmax(ends == end_s)) for end_s in found))


def _noise_of(scenario: Scenario, step: int) -> Noise | None:
    """Return the function that draws a step's factors, 1 on average; the same at every call."""
    sigma = scenario.jitter_sigma
    if not sigma:
        return None
    rng = np.random.default_rng((scenario.seed, step))
    return lambda shape: rng.lognormal(-(sigma**2) / 2, sigma, shape)


def _spread(seconds: Floats) -> TimeSpread:
    if len(seconds) == 1:
        return TimeSpread(*seconds.tolist() * 5)
    minimum, median, p95, maximum = np.quantile(seconds, (0, 0.5, 0.95, 1))
    return TimeSpread(
        float(seconds.mean()), float(minimum), float(median), float(p95), float(maximum)
    )


def _contended_seconds(
    ops: Sequence[Op], seconds: Sequence[float], overlap: float
) -> tuple[float, ...]:
    """Return how long each operation takes when it shares cores with what runs beside it.

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


# -- ranks that differ
@dataclass(frozen=True)
class Grid:
    """Factors of the work and links of ranks.

    **Shapes** ``compute`` [num_replicas, num_shards], ``shard_link`` [num_replicas, 1],
    ``replicate_link`` [1, num_shards], or floats if one rank stands for all.
    """

    num_shards: int
    compute: Times = 1.0
    shard_link: Times = 1.0
    replicate_link: Times = 1.0

    def place(self, rank: int) -> tuple[int, int]:
        """Return row and column of a rank."""
        return divmod(rank, self.num_shards)

    def rank_at(self, place: tuple[int, int]) -> int:
        """Return the rank at a row and a column."""
        return place[0] * self.num_shards + place[1]

    def factor(self, op: Op) -> Times:
        """Return the factor of an operation's seconds on each rank, or in each group."""
        if isinstance(op.work, Collective):
            return self.replicate_link if op.work.axis == "replicate" else self.shard_link
        if isinstance(op.work, Compute):
            return self.compute
        return 1.0 if isinstance(self.compute, float) else np.ones(self.compute.shape)


def grid_of(scenario: Scenario) -> Grid:
    """Return the ranks of a scenario; one stands for all if none differs and there is no noise."""
    rows, columns = scenario.num_replicas, scenario.num_shards
    if not (scenario.stragglers or scenario.slow_links or scenario.jitter_sigma):
        return Grid(columns)
    flat: Floats = np.ones(scenario.num_ranks)
    rng = np.random.default_rng(scenario.seed)
    for straggler in scenario.stragglers:
        if straggler.rank is not None:
            picked = np.array([straggler.rank])
        else:
            count = math.ceil((straggler.fraction or 0.0) * scenario.num_ranks)
            picked = rng.permutation(scenario.num_ranks)[:count]
        flat[picked] = np.maximum(flat[picked], straggler.slowdown)
    compute = flat.reshape(rows, columns)
    shard, replicate = np.ones(rows), np.ones(columns)
    for link in scenario.slow_links:  # a group is as slow as its slowest link
        if link.rank is not None:
            row, column = divmod(link.rank, columns)
            hit = [(shard, row), (replicate, column)]
        else:
            hit = [(shard if link.axis == "shard" else replicate, link.group or 0)]
        for factors, group in hit:
            factors[group] = max(factors[group], link.factor)
    return Grid(columns, compute, shard[:, None], replicate[None])


# -- one pass
@dataclass
class SteppedRanks:
    """A pass over a program on all ranks; see Note [Times of a pass].

    ``begin`` and ``end`` are those of the ranks, ``ends`` of the operations, ``met`` the begins of
    collectives, ``previous`` the operation before each on its stream, -1 for none.
    """

    ops: Sequence[Op]
    begin: Times
    end: Times
    ends: list[Times] = field(default_factory=list)
    met: dict[int, Times] = field(default_factory=dict)
    previous: list[int] = field(default_factory=list)

    def ready(self, index: int) -> Times:
        """Return when a rank's stream is free and the inputs of the operation are there."""
        before = self.previous[index]
        ready = self.begin if before == -1 else self.ends[before]
        later = _later(self.begin)
        for j in self.ops[index].after:
            ready = later(ready, self.ends[j])
        return ready

    def spans(self, place: tuple[int, int]) -> Iterable[Span]:
        """Yield the operations of one rank."""
        begin, met, ends = _at(self.begin, place), self.met, self._ends_at(place)
        for index, (op, before, end) in enumerate(zip(self.ops, self.previous, ends, strict=True)):
            ready = begin if before == -1 else ends[before]
            for j in op.after:
                if ends[j] > ready:
                    ready = ends[j]
            yield Span(index, ready, _at(met[index], place) if index in met else ready, end)

    def _ends_at(self, place: tuple[int, int]) -> Sequence[float]:
        return [_at(end, place) for end in self.ends]

    def critical_path(self, place: tuple[int, int]) -> list[tuple[int, tuple[int, int], float]]:
        """Return (operation, place, begin) along the critical path to a rank's end, begin first.

        At each operation the walk continues at its last input, or at that of the last rank of its
        group.
        """
        ends, path = self._ends_at(place), list[tuple[int, tuple[int, int], float]]()
        last = max(ends, default=0.0)
        index = ends.index(last) if last > _at(self.begin, place) else -1
        while index != -1:
            op, before = self.ops[index], self.previous[index]
            if index in self.met:
                place = _last_of_group(self.ready(index), op.stream, place)
            now, index = index, before
            last = _at(self.begin if before == -1 else self.ends[before], place)
            for j in op.after:
                if _at(self.ends[j], place) > last:
                    last, index = _at(self.ends[j], place), j
            path.append((now, place, last))
        return path[::-1]


def run_step(
    ops: Sequence[Op], seconds: Sequence[float], grid: Grid, begin: Times, noise: Noise | None
) -> SteppedRanks:
    """Run one step on all ranks, which begin at ``begin``; ``noise`` draws factors of a shape."""
    made = SteppedRanks(ops, begin, begin)
    ends, later = made.ends, _later(begin)
    newest: dict[Stream, int] = {}
    for index, op in enumerate(ops):
        before = newest.get(op.stream, -1)
        start = begin if before == -1 else ends[before]
        for j in op.after:
            start = later(start, ends[j])
        if isinstance(op.work, Collective) and not isinstance(start, float):
            axis = 0 if op.work.axis == "replicate" else 1
            start = made.met[index] = start.max(axis=axis, keepdims=True)
        factor = grid.factor(op)
        took = seconds[index] * factor
        if noise is not None:
            took = took * noise(np.shape(factor))
        ends.append(start + took)
        made.previous.append(before)
        newest[op.stream] = index
    for index in newest.values():
        made.end = later(made.end, ends[index])
    return made


def _later(times: Times) -> Callable[[Times, Times], Times]:
    """Return the maximum of two times of this kind."""
    return max if isinstance(times, float) else np.maximum


def _at(times: Times, place: tuple[int, int]) -> float:
    """Return the time at a place; an axis of one stands for all of it."""
    if isinstance(times, float):
        return times
    rows, columns = times.shape
    return times.item(place[0] * (rows > 1), place[1] * (columns > 1))


def _last_of_group(ready: Times, stream: Stream, place: tuple[int, int]) -> tuple[int, int]:
    """Return the place of the rank that a collective waited for, in the group of a place."""
    row, column = place
    if isinstance(ready, float):
        return place
    if stream == "replicate":
        return int(ready[:, column * (ready.shape[1] > 1)].argmax()), column
    return row, int(ready[row * (ready.shape[0] > 1)].argmax())
