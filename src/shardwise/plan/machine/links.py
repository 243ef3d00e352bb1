"""Seconds of operations by size, and of collectives and sends over a cluster's links.

Note [Curves of seconds]
A curve says how long ONE operation of a given size takes. Its low end is what an operation costs at
least (a launch, a call, a round trip), its slope the rate, so neither is fitted. Between two sizes
it is straight in logarithms, or straight if it begins at size 0; below the first size it is
constant, above the last it has the last rate.

Note [Ring and tree]
An all-gather or reduce-scatter of m bytes over n ranks in a ring takes n - 1 steps and sends
(n - 1) / n * m bytes per rank; an all-reduce is one after the other (Thakur, Rabenseifner and Gropp
2005, sections 4.1, 4.3 and 4.5). An all-reduce has a tree as well, with 2 (log2 g + log2 k) steps
for k nodes of g ranks and 2 m / 0.92 bytes; the faster of the two is taken, as NCCL does
(github:NVIDIA/nccl at 5067397c, src/graph/tuning.cc, from where the base latency, 0.92 and the two
protocols are; its trees are chains inside a node, microseconds slower).

Note [Rails]
A collective over k nodes with g of its ranks in each keeps g ranks' share of a node's NICs busy, so
m bytes cross a NIC as m / (g * NICs per rank). With one rank per node (a replicate axis beside a
shard axis that fills the node) a group has one rank's share, as its neighbours use theirs. The
slowest part of a ring sets its pace: the wire time is the larger of that inside and between nodes.

Note [Bandwidth rises with the message]
Where an all-reduce curve was published for a link, its time less the steps' latency, divided by the
ring's factor, is the time on the wire of a message, straight between the measured sizes and from 0;
so the curve is met exactly at its own ranks, and other kinds and numbers of ranks follow. Where
none was, a message goes either in the protocol of low latency at half the bandwidth, or in the one
of high latency at the full one, whichever is faster (NCCL's LL and Simple).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.plan.machine.hardware import Link, Node
from shardwise.plan.step.program import CollectiveKind

Unit = Literal["flops", "bytes"]
_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sizes = Annotated[tuple[_Size, ...], Field(min_length=1)]

_BASE_S = 6.6e-6
_TREE_SHARE = 0.92
_LOW_LATENCY_SHARE = 0.5


@dataclass(frozen=True)
class Curve:
    """Seconds of one operation by its size, measured or published.

    See Note [Curves of seconds].
    """

    unit: Unit
    sizes: Sizes
    seconds: Sizes

    def __post_init__(self) -> None:
        """Check the points."""
        if len(self.sizes) != len(self.seconds):
            raise ValueError(f"expected as many seconds as sizes, {len(self.sizes)}")
        if any(b <= a for a, b in pairwise(self.sizes)):
            raise ValueError("expected sizes that grow")
        if any(b < a for a, b in pairwise(self.seconds)):
            raise ValueError("expected seconds that do not fall")

    @staticmethod
    def through(unit: Unit, points: Sequence[tuple[float, float]]) -> Curve:
        """Make a curve of measured (size, seconds) that never falls.

        Noise only adds, so an operation takes at most as long as a larger one was measured to.
        """
        shortest = math.inf
        kept = []
        for size, seconds in sorted(points, reverse=True):
            shortest = min(shortest, seconds)
            kept.append((float(size), shortest))
        sizes, durations = zip(*reversed(kept), strict=True)
        return Curve(unit, sizes, durations)

    def at(self, size: float) -> float:
        """Return the seconds of one operation of this size."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        right = bisect_right(self.sizes, size)
        lo, hi = self.sizes[right - 1], self.sizes[right]
        first, second = self.seconds[right - 1], self.seconds[right]
        if self.sizes[0] == 0:
            return first + (size - lo) / (hi - lo) * (second - first)
        return first * (second / first) ** (math.log(size / lo) / math.log(hi / lo))

    @property
    def peak_rate(self) -> float:
        """Return the highest rate at a measured size, in units per second."""
        return max(size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True))


@dataclass(frozen=True)
class Group:
    """Ranks of one collective: so many in each of so many nodes (the smallest number, if mixed)."""

    num_ranks: int
    ranks_per_node: int
    num_nodes: int


@cache
def place(num_ranks: int, stride: int, ranks_per_node: int) -> Group:
    """Place ranks 0, stride, 2 * stride, ... on nodes that are filled one after the other."""
    if min(num_ranks, stride, ranks_per_node) < 1:
        raise ConfigError(
            f"group: num_ranks={num_ranks}, stride={stride}, ranks_per_node={ranks_per_node}; "
            "expected 1 or more of each"
        )
    counts = Counter(rank * stride // ranks_per_node for rank in range(num_ranks))
    return Group(num_ranks, min(counts.values()), len(counts))


def collective_seconds(
    kind: CollectiveKind, payload_bytes: float, group: Group, node: Node
) -> float:
    """Return the seconds of a collective of ``payload_bytes`` (the whole, see ``Collective``).

    **Source** see Notes [Ring and tree], [Rails] and [Bandwidth rises with the message].
    """
    n = group.num_ranks
    if n == 1:
        return 0.0
    if kind == "all_to_all":
        return all_to_all_seconds(payload_bytes * (n - 1) / n, group, node)
    rounds = 2 if kind == "all_reduce" else 1
    # Steps of a ring that stay inside a node, and that go between nodes.
    steps = rounds * (n - group.num_nodes), rounds * (group.num_nodes - 1)
    ring = _seconds(payload_bytes, rounds * (n - 1) / n, *steps, group, node)
    if kind != "all_reduce":
        return ring
    inner, outer = 2 * math.log2(n / group.num_nodes), 2 * math.log2(group.num_nodes)
    return min(ring, _seconds(payload_bytes, 2 / _TREE_SHARE, inner, outer, group, node))


def send_seconds(num_bytes: float, crosses_nodes: bool, node: Node) -> float:
    """Return the seconds of one message from a rank to another."""
    inner, outer = (0, 1) if crosses_nodes else (1, 0)
    return _seconds(num_bytes, 1.0, inner, outer, Group(2, 1, 2 if crosses_nodes else 1), node)


def all_to_all_seconds(sent_bytes: float, group: Group, node: Node) -> float:
    """Return the seconds in which each rank sends so much in all, as much to each of the others.

    Messages within the node and out of it travel at the same time.
    """
    n, here = group.num_ranks, group.ranks_per_node
    if n == 1:
        return 0.0
    each = sent_bytes / (n - 1)
    inside = send_seconds(each * (here - 1), False, node) if here > 1 else 0.0
    between = send_seconds(each * (n - here), True, node) if group.num_nodes > 1 else 0.0
    return max(inside, between)


def _seconds(
    payload: float, factor: float, inner: float, outer: float, group: Group, node: Node
) -> float:
    """Return base and steps' latency, and the time on the slowest wire."""
    used = [(node.intra, payload, inner)]
    if group.num_nodes > 1:
        share = payload / (group.ranks_per_node * node.nics_per_rank)
        used.append((node.inter, share, outer))
    start = _BASE_S + sum(steps * link.latency_s for link, _, steps in used)
    curved = max((wire(link).at(size) for link, size, _ in used if link.curve), default=0.0)
    plain = [(link, size, steps) for link, size, steps in used if not link.curve]
    slowest = factor * max(
        (size / link.achieved_bytes_per_s for link, size, _ in plain), default=0.0
    )
    extra = sum(steps * (link.bulk_latency_s - link.latency_s) for link, _, steps in plain)
    return start + max(factor * curved, min(slowest / _LOW_LATENCY_SHARE, extra + slowest))


@cache
def wire(link: Link) -> Curve:
    """Return the seconds on the wire of bytes over one link, by its curve.

    **Source** see Note [Bandwidth rises with the message].
    """
    per_node, nodes = link.curve_ranks
    n = per_node * nodes
    factor = 2 * (n - 1) / n
    inner = link.curve_inner_latency_s if nodes > 1 else link.latency_s
    start = _BASE_S + 2 * (n - nodes) * inner + 2 * (nodes - 1) * link.latency_s
    lanes = per_node if nodes > 1 else 1  # as many NICs as ranks carried a part each
    sizes, seconds = [0.0], [0.0]
    for size, rate in link.curve:
        sizes.append(size / lanes)
        seconds.append(max(seconds[-1], size / rate - start / factor))
    return Curve("bytes", tuple(sizes), tuple(seconds))
