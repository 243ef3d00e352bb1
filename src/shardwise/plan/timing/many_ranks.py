"""One step on many ranks at once: arrays [num_replicas, num_shards] run through the program.

Note [Folding]
Two replicas whose ranks have the same factors, place by place, and whose shard groups' links do,
do the same at the same time; so do two places of the shard axis that are equal in every replica.
One row and one column stand for all their likes, and since the maximum over equals is the maximum
over one of them, the times are the same to the bit. Noise makes every rank its own class.

Note [What is kept]
At 16,384 ranks the times of all operations would be gigabytes. A pass keeps the streams' ends and
those operations' ends that a later one still waits for. The first pass also keeps, in one byte per
operation and rank, which of its predecessors was last, and who was last in each group: enough to
walk the critical path back. The second pass, with the same noise, writes down the spans asked for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from shardwise.plan.step.program import Collective, Compute, Op
from shardwise.plan.timing.scenario import Scenario

Floats = NDArray[np.float64]
_FROM_STREAM = -1


@dataclass(frozen=True)
class Grid:
    """The ranks that differ: factors of their work and links; whom each row and column stands for.

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

        At each operation the walk goes on where its last input, or the last of its group, is.
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

    **Cost** operations times ranks; memory see Note [What is kept].
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
