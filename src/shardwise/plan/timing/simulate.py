"""Simulate the operations of a program in time, on all ranks of a scenario.

An operation begins when its stream is free and its inputs have ended; a collective begins when the
last rank of its group is ready. The program's order makes one pass over it enough. If all ranks are
equal, one is simulated in plain floats (milliseconds). If ranks differ, they are simulated as
arrays.

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

Note [Folding]
If two replicas have the same factors of ranks and of shard links, they do the same at the same
time. So do two places of the shard axis that are equal in every replica. One row and one column
stand for all their equals. The maximum over equals is that over one of them, so the times are
bit-identical. With noise every rank is a class by itself.

Note [Memory of a pass]
At 16,384 ranks the times of all operations would be gigabytes. A pass keeps the streams' ends and
the ends of operations that a later one still waits for. The first pass also keeps, in one byte per
operation and rank, which predecessor was last, and which rank was last in each group: enough
to walk the critical path back. The second pass, with the same noise, records the requested spans.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.plan.step.program import Collective, Compute, Op, Program, Stream
from shardwise.plan.timing.breakdown import COMMUNICATING, RankRun, Span, category
from shardwise.plan.timing.scenario import Scenario

Floats = NDArray[np.float64]
_FROM_STREAM = -1


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


# -- many ranks as arrays [num_replicas, num_shards]; see Notes [Folding] and [Memory of a pass]
@dataclass(frozen=True)
class Grid:
    """The ranks that differ: factors of work and links; the ranks of each row and column.

    **Shapes** ``compute`` [rows, columns], ``shard_link`` [rows, 1], ``replicate_link``
    [1, columns], ``row_of`` [num_replicas], ``column_of`` [num_shards].
    """

    compute: Floats
    shard_link: Floats
    replicate_link: Floats
    row_of: NDArray[np.intp]
    column_of: NDArray[np.intp]

    def place(self, rank: int) -> tuple[int, int]:
        """Return row and column of a rank."""
        replica, shard = divmod(rank, len(self.column_of))
        return int(self.row_of[replica]), int(self.column_of[shard])

    def rank_at(self, row: int, column: int) -> int:
        """Return the first rank for which a place stands."""
        replica, shard = np.argmax(self.row_of == row), np.argmax(self.column_of == column)
        return int(replica) * len(self.column_of) + int(shard)

    def unfold(self, values: Floats) -> Floats:
        """Return one value for each rank, in the order of the ranks."""
        return values[self.row_of][:, self.column_of].ravel()


def grid_of(scenario: Scenario, fold: bool = True) -> Grid:
    """Return the ranks of a scenario, like ones folded into one, see Note [Folding]."""
    rows, columns = scenario.num_replicas, scenario.num_shards
    plain = not (scenario.stragglers or scenario.slow_links or scenario.jitter_sigma)
    if plain and fold:
        one = np.ones((1, 1))
        return Grid(one, one, one, np.zeros(rows, np.intp), np.zeros(columns, np.intp))
    compute: Floats = np.ones(scenario.num_ranks)
    rng = np.random.default_rng(scenario.seed)
    for straggler in scenario.stragglers:
        if straggler.rank is not None:
            picked = np.array([straggler.rank])
        else:
            count = math.ceil((straggler.fraction or 0.0) * scenario.num_ranks)
            picked = rng.permutation(scenario.num_ranks)[:count]
        compute[picked] = np.maximum(compute[picked], straggler.slowdown)
    compute = compute.reshape(rows, columns)
    shard_link, replicate_link = _link_factors(scenario)
    if scenario.jitter_sigma or not fold:
        row_of, column_of = np.arange(rows), np.arange(columns)
        return Grid(compute, shard_link[:, None], replicate_link[None], row_of, column_of)
    kept_rows, row_of = _classes(np.column_stack([shard_link, compute]))
    compute, shard_link = compute[kept_rows], shard_link[kept_rows]
    kept, column_of = _classes(np.column_stack([replicate_link, compute.T]))
    return Grid(
        compute[:, kept], shard_link[:, None], replicate_link[None, kept], row_of, column_of
    )


def _link_factors(scenario: Scenario) -> tuple[Floats, Floats]:
    """Return the factor of each shard group and of each replicate group: its slowest link's."""
    shard, replicate = np.ones(scenario.num_replicas), np.ones(scenario.num_shards)
    for link in scenario.slow_links:
        if link.rank is not None:
            row, column = divmod(link.rank, scenario.num_shards)
            hit = [(shard, row), (replicate, column)]
        else:
            hit = [(shard if link.axis == "shard" else replicate, link.group or 0)]
        for factors, group in hit:
            factors[group] = max(factors[group], link.factor)
    return shard, replicate


def _classes(rows: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return which rows stand for their likes, in order of appearance, and by whom each stands."""
    keys: dict[bytes, int] = {}
    class_of = np.array([keys.setdefault(row.tobytes(), len(keys)) for row in rows], np.intp)
    _, first = np.unique(class_of, return_index=True)
    return first, class_of


@dataclass
class Decisions:
    """Why each operation began when it did: its last predecessor, the last rank of its group."""

    last_input: list[NDArray[np.signedinteger] | None] = field(default_factory=list)
    last_member: list[NDArray[np.intp] | None] = field(default_factory=list)
    last_ended: NDArray[np.intp] = field(default_factory=lambda: np.zeros((0, 0), np.intp))

    def path(self, ops: Sequence[Op], row: int, column: int) -> list[tuple[int, int, int]]:
        """Return (operation, row, column) of the critical path that ends at a place, begin first.

        At each operation the walk continues at its last input, or at the last rank of its group.
        """
        previous = _stream_predecessors(ops)
        index, path = int(self.last_ended[row, column]), []
        while index != -1:
            members, op = self.last_member[index], ops[index]
            if members is not None and isinstance(op.work, Collective):
                if op.work.axis != "replicate":
                    column = int(members[row, 0])
                else:
                    row = int(members[0, column])
            path.append((index, row, column))
            inputs = self.last_input[index]
            choice = _FROM_STREAM if inputs is None else int(inputs[row, column])
            index = previous[index] if choice == _FROM_STREAM else op.after[choice]
        return path[::-1]


def _stream_predecessors(ops: Sequence[Op]) -> list[int]:
    last: dict[str, int] = {}
    previous = []
    for index, op in enumerate(ops):
        previous.append(last.get(op.stream, -1))
        last[op.stream] = index
    return previous


def run_step(
    ops: Sequence[Op],
    seconds: Sequence[float],
    grid: Grid,
    begin: Floats,
    noise: Callable[[tuple[int, ...]], Floats] | None,
    decisions: Decisions | None = None,
    write: Callable[[int, Floats, Floats, Floats], None] | None = None,
) -> Floats:
    """Run one step on all ranks; return when each ends.

    ``begin`` [rows, columns] is when each rank begins. ``noise`` draws factors of a shape.
    ``write`` gets an operation's index and when it was ready, began and ended.

    **Cost** operations times ranks; memory see Note [Memory of a pass].
    """
    last_use = {j: index for index, op in enumerate(ops) for j in op.after}
    free: dict[str, Floats] = {}
    ends: dict[int, Floats] = {}
    finished = begin
    if decisions is not None:
        decisions.last_ended = np.full(begin.shape, -1, np.intp)
    for index, op in enumerate(ops):
        inputs = [ends[j] for j in op.after]
        ready, last_input = _latest(free.get(op.stream, begin), inputs, decisions is not None)
        start, last_member = ready, None
        if isinstance(op.work, Collective):
            axis = 0 if op.work.axis == "replicate" else 1
            if ready.shape[axis] > 1:
                start = ready.max(axis=axis, keepdims=True)
                if decisions is not None:
                    last_member = ready.argmax(axis=axis, keepdims=True)
        end = np.broadcast_to(start + _duration(op, seconds[index], grid, noise), begin.shape)
        free[op.stream] = end
        for j in op.after:
            if last_use[j] == index:
                ends.pop(j, None)
        if index in last_use:
            ends[index] = end
        if decisions is not None:
            decisions.last_input.append(last_input)
            decisions.last_member.append(last_member)
            decisions.last_ended[end > finished] = index
        if decisions is not None or write is not None:
            finished = np.maximum(finished, end)
        if write is not None:
            write(index, ready, start, end)
    return reduce(np.maximum, free.values(), begin)


def _latest(
    ready: Floats, inputs: Sequence[Floats], decide: bool
) -> tuple[Floats, NDArray[np.signedinteger] | None]:
    """Return when the last input is there and, if asked, its number (the stream: -1)."""
    chosen: NDArray[np.signedinteger] | None = None
    if decide and inputs:
        small = np.int8 if len(inputs) < 128 else np.int32
        chosen = np.full(ready.shape, _FROM_STREAM, small)
    for number, end in enumerate(inputs):
        if chosen is not None:
            chosen[end > ready] = number
        ready = np.maximum(ready, end)
    return ready, chosen


def _duration(
    op: Op, seconds: float, grid: Grid, noise: Callable[[tuple[int, ...]], Floats] | None
) -> Floats:
    if isinstance(op.work, Collective):
        factor = grid.replicate_link if op.work.axis == "replicate" else grid.shard_link
    elif isinstance(op.work, Compute):
        factor = grid.compute
    else:
        factor = np.ones((1, 1)) if noise is None else np.ones(grid.compute.shape)
    return seconds * factor if noise is None else seconds * factor * noise(factor.shape)
