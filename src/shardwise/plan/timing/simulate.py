"""How long a step takes and why: the operations of a program in time, on all ranks of a scenario.

An operation begins when its stream is free and its inputs have ended; a collective when the last
rank of its group is there. The program's order makes one pass over it enough. Ranks among equals
are one rank in plain floats (milliseconds); where ranks differ, ``many_ranks`` runs them as arrays.

Note [Steps after steps]
A rank begins its next step when all its streams have ended: nothing but collectives makes ranks
wait for each other, so a rank that noise made late may catch up. A step lasts from the moment at
which the last rank ended the step before to the moment at which the last rank ends this one.

Note [Overlap is not free]
gloo's threads copy on the cores that compute, and NCCL's kernels take multiprocessors. One number,
``overlap``, says how much of that is hidden: while an operation of the device or the host's cores
and a collective both run, each goes at the rate 1 / (2 - overlap) of its own. Started together and
equally long, two operations then take 2 - overlap times as long: 1 hides everything, 0 nothing,
and below 0 they take longer together than one after the other, as they empty each other's caches.
The longer times are computed once, for a rank among equals; where ranks differ, they are an
approximation.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from shardwise.errors import ConfigError
from shardwise.plan.step.program import Collective, Compute, Op, Program, Stream
from shardwise.plan.timing.breakdown import COMMUNICATING, RankRun, Span, category
from shardwise.plan.timing.many_ranks import Decisions, Floats, Grid, grid_of, run_step
from shardwise.plan.timing.scenario import Scenario

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


def _of_slowest(name: str) -> Any:
    """Return a property of `Simulated` that is the slowest rank's."""
    get = attrgetter(f"slowest.{name}")
    return property(get, doc=getattr(RankRun, name).__doc__)


@dataclass(frozen=True)
class Simulated:
    """A simulated step, the last one where there are several.

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

    # See `RankRun`.
    compute_s = _of_slowest("compute_s")
    communication_s = _of_slowest("communication_s")
    exposed_s = _of_slowest("exposed_s")
    overlap = _of_slowest("overlap")
    bubble_s = _of_slowest("bubble_s")
    busy_s = _of_slowest("busy_s")
    phase_s = _of_slowest("phase_s")
    unit_times = _of_slowest("unit_times")

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
    fold: bool = True,
) -> Simulated:
    """Play a program on the ranks of a scenario, or on one rank among equals.

    ``overlap``: 1 where computing and communicating do not slow each other down, see
    Note [Overlap is not free]. ``ranks`` to write down. ``fold`` False computes every rank by
    itself, with the same result.

    **Cost** operations times ranks that differ; twice that where the paths are written down.
    **Raises** ConfigError: an operation's time, the overlap or a rank is out of range.
    """
    scenario = scenario or Scenario()
    if not -1 <= overlap <= 1:
        raise ConfigError(f"overlap={overlap!r}: expected -1 to 1 (0: nothing is hidden, 1: all)")
    for rank in ranks or ():
        if not 0 <= rank < scenario.num_ranks:
            raise ConfigError(f"ranks: got {rank}, expected 0 to {scenario.num_ranks - 1}")
    base = _contended_seconds(program.ops, _priced(program, seconds), overlap)
    grid = grid_of(scenario, fold)
    if grid.compute.size == 1 and not scenario.jitter_sigma:
        return _simulate_one(program, base, scenario, grid, ranks)
    return _simulate_many(program, base, scenario, grid, ranks)


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


def _simulate_one(
    program: Program,
    base: Sequence[float],
    scenario: Scenario,
    grid: Grid,
    ranks: Sequence[int] | None,
) -> Simulated:
    compute, shard, replicate = (
        float(factor[0, 0]) for factor in (grid.compute, grid.shard_link, grid.replicate_link)
    )
    free: dict[Stream, float] = {}
    newest: dict[Stream, int] = {}
    spans: list[Span] = []
    previous: list[int] = []
    for index, op in enumerate(program.ops):
        took = base[index]
        if isinstance(op.work, Compute):
            took *= compute
        elif isinstance(op.work, Collective):
            took *= replicate if op.work.axis == "replicate" else shard
        ready, last = free.get(op.stream, 0.0), newest.get(op.stream, -1)
        for j in op.after:
            if spans[j].end_s > ready:
                ready, last = spans[j].end_s, j
        spans.append(Span(index, ready, ready, ready + took))
        previous.append(last)
        free[op.stream], newest[op.stream] = ready + took, index
    step_s = max(free.values(), default=0.0)
    last = next((span.op for span in spans if span.end_s == step_s > 0), -1)
    path = []
    while last != -1:
        path.append(CriticalOp(last, 0, spans[last].start_s, spans[last].end_s))
        last = previous[last]
    chosen = dict.fromkeys((0, *(ranks or ())))
    runs = tuple(RankRun(program, rank, 0.0, tuple(spans)) for rank in chosen)
    spread = TimeSpread(step_s, step_s, step_s, step_s, step_s)
    steps_s = (step_s,) * scenario.num_steps
    return Simulated(program, scenario, steps_s, spread, runs, tuple(path[::-1]))


def _simulate_many(
    program: Program,
    base: Sequence[float],
    scenario: Scenario,
    grid: Grid,
    ranks: Sequence[int] | None,
) -> Simulated:
    begin = np.zeros(grid.compute.shape)
    steps_s, decisions = [], Decisions()
    for step in range(scenario.num_steps):
        last = step == scenario.num_steps - 1
        noise = _noise_of(scenario, step)
        end = run_step(program.ops, base, grid, begin, noise, decisions if last else None)
        steps_s.append(float(end.max() - begin.max()))
        if not last:
            begin = end - end.min()
    row, column = np.unravel_index(int(end.argmax()), end.shape)
    path = decisions.path(program.ops, int(row), int(column))
    took = grid.unfold(end - begin)
    chosen = _chosen_ranks(grid.unfold(end), grid, ranks)
    spans: dict[int, list[Span]] = {rank: [] for rank in chosen}
    places = {rank: grid.place(rank) for rank in chosen}
    on_path = {index: (row, column) for index, row, column in path}
    critical: list[CriticalOp] = []

    def write(index: int, ready: Floats, start: Floats, end: Floats) -> None:
        start = np.broadcast_to(start, end.shape)
        for rank, at in places.items():
            spans[rank].append(Span(index, float(ready[at]), float(start[at]), float(end[at])))
        if index in on_path:
            at = on_path[index]
            critical.append(CriticalOp(index, grid.rank_at(*at), float(start[at]), float(end[at])))

    run_step(program.ops, base, grid, begin, _noise_of(scenario, step), write=write)
    runs = tuple(
        RankRun(program, rank, float(begin[places[rank]]), tuple(spans[rank])) for rank in chosen
    )
    return Simulated(program, scenario, tuple(steps_s), _spread(took), runs, tuple(critical))


def _chosen_ranks(ends: Floats, grid: Grid, asked: Sequence[int] | None) -> list[int]:
    """Return the slowest rank, then those asked for, or else the median and the fastest."""
    order = np.argsort(-ends, kind="stable")
    if asked is not None:
        return list(dict.fromkeys([int(order[0]), *asked]))
    places = [grid.place(int(order[number])) for number in (0, len(order) // 2, -1)]
    return list(dict.fromkeys(grid.rank_at(*place) for place in places))


def _noise_of(scenario: Scenario, step: int) -> Callable[[tuple[int, ...]], Floats] | None:
    """Return what draws a step's factors, 1 on average; the same factors at every call."""
    sigma = scenario.jitter_sigma
    if not sigma:
        return None
    rng = np.random.default_rng((scenario.seed, step))
    if scenario.jitter_kind == "gamma":
        return lambda shape: rng.gamma(1 / sigma**2, sigma**2, shape)
    return lambda shape: rng.lognormal(-(sigma**2) / 2, sigma, shape)


def _spread(seconds: Floats) -> TimeSpread:
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
