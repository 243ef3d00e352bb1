"""Seconds of each operation of a program on a cluster, with the assumptions and their sources.

Note [How computation is priced]
A matmul takes FLOPs over the achievable rate or its bytes over the memory's, whichever is longer;
attention its FLOPs, all else its bytes. Costs count attention's backward as twice its forward, as a
model's FLOPs do; the fused kernel computes the scores once more, so it takes 2.5 times as long as
the forward's FLOPs, which is how its benchmarks count (arXiv 2307.08691, section 4.1). Each kernel
adds ``kernel_ramp_s``: it is what makes small matmuls inefficient, since
efficiency(f) = f / (f + ramp x rate) for f FLOPs. The host issues operations ahead of the device,
so a stretch of work takes the device's time or the host's, ``host_launch_s`` per kernel, whichever
is longer; where the two are one (a CPU) it takes both.

Note [How ranks are numbered]
From the inside: tensor, context, shard, replicate, pipeline. Neighbours share a node, so tensor
parallel groups lie inside one as long as they fit, and shard groups next. Context ranks shard too:
the shard group is all ranks of the context and the shard axis. Of experts, ``ep`` groups are
neighbours in those and the tensor ranks, and the ranks that have the same ones shard them
(`shardwise.Axes`). Llama 3 (arXiv
2407.21783, section 3.3.2) orders its degrees in the same way, but for the pipeline, which it has
inside the data parallel axis.

Note [Curves of seconds]
A curve has the seconds of ONE operation by its size. Its low end is the least time of an operation
(a launch, a call, a round trip), its slope the rate, so neither is fitted. Between two sizes
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster, Link, Node
from shardwise.plan.model.tape import DEGREE_KINDS, Cost
from shardwise.plan.sizes import read_table
from shardwise.plan.step.program import Collective, CollectiveKind, Compute, LinkTransfer, Op


@dataclass(frozen=True)
class Efficiency:
    """A share of a datasheet's figure, or seconds (names in ``_s``), with meaning and source."""

    value: float
    meaning: str
    source: str


@cache
def efficiencies_of(family: str, is_fitted: bool = True) -> Mapping[str, Efficiency]:
    """Return the table of efficiencies for a family of accelerators, listed or not.

    ``is_fitted``: with the entries that were fitted on whole steps of its published runs.
    """
    table = read_table("efficiencies")
    efficiencies = {name: Efficiency(**row) for name, row in table["all"].items()}
    for kind in ("families", "fitted")[: 1 + is_fitted]:
        for name, row in table[kind].get(family, {}).items():
            efficiencies[name] = replace(efficiencies[name], **row)
    return efficiencies


_SCORES_AGAIN = 2.5 / 2.0  # of the FLOPs that a cost of attention's backward has


def describe_figure(name: str, value: float, unit: str, meaning: str, source: str) -> str:
    """Describe one figure that prices are computed from, for the report."""
    return f"{name}: {f'{value:.4g} {unit}'.strip()}, {meaning} ({source})"


class Pricer(Protocol):
    """The interface of prices: seconds of operations."""

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operation."""

    @property
    def overlap(self) -> float:
        """Share of the shorter that is hidden when a collective and a computation both run."""

    def assumptions(self) -> tuple[str, ...]:
        """Return every figure that the prices are computed from."""


@dataclass(frozen=True)
class Prices:
    """Prices of one candidate's operations on a cluster.

    ``is_fitted`` False: by single measurements alone. See Notes [How computation is priced] and
    [How ranks are numbered]. The candidate's ranks are the cluster's, as `plan` checks.
    """

    cluster: Cluster
    candidate: Candidate
    is_fitted: bool = True
    overlap: ClassVar[float] = 1.0  # communication's use of the device is not modelled
    _known: dict[tuple[Compute | Collective | LinkTransfer, bool, bool], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def efficiencies(self) -> Mapping[str, Efficiency]:
        """The table of efficiencies for this accelerator."""
        return efficiencies_of(self.cluster.node.accelerator.family, self.is_fitted)

    @cached_property
    def groups(self) -> Mapping[str, RankGroup]:
        """The placement of each axis's ranks on nodes; see Note [How ranks are numbered]."""
        sizes = {
            "tensor": self.candidate.tp,
            "context": self.candidate.cp,
            "shard": self.candidate.num_shards,
            "replicate": self.candidate.num_replicas,
            "pipeline": self.candidate.pp,
        }
        groups: dict[str, RankGroup] = {}
        stride = 1
        per_node = self.cluster.node.num_accelerators
        for axis, size in sizes.items():
            within = sizes["context"] if axis == "shard" else 1
            groups[axis] = place(size * within, stride // within, per_node)
            stride *= size
        ep, region = self.candidate.ep, sizes["tensor"] * sizes["context"] * sizes["shard"]
        groups["ep"] = place(ep, 1, per_node)
        groups["efsdp"] = place(max(1, region // ep), ep, per_node)
        return groups

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operation on one rank, all other ranks at work as well."""
        key = op.work, op.stream == "cpu", op.phase == "backward"
        seconds = self._known.get(key)  # micro-batches and layers repeat
        if seconds is None:
            seconds = self._known[key] = self._seconds(*key)
        return seconds

    def _seconds(
        self, work: Compute | Collective | LinkTransfer, on_host: bool, is_backward: bool
    ) -> float:
        node, host = self.cluster.node, self.cluster.node.host
        if isinstance(work, Compute) and not on_host:
            return self.device_seconds(work, is_backward=is_backward)
        if isinstance(work, Compute):  # ranks share the bandwidth of the host's memory
            rate = host.dram_bytes_per_s * self.efficiencies["host_memory"].value
            return sum(c.moved_bytes for c in work.costs) / (rate / node.num_accelerators)
        if isinstance(work, Collective):
            group = self.groups[work.axis]
            if group.num_ranks == 1:
                return 0.0
            slowest = node.inter if group.num_nodes > 1 else node.intra
            more = max(0, work.num_messages - 1) * slowest.latency_s  # a step for each message
            return collective_seconds(work.kind, work.payload_bytes, group, node) + more
        if work.link in ("to_device", "to_host"):
            link = host.device_link
            rate = link.bandwidth_bytes_per_s * link.efficiency
            return link.latency_s + work.num_bytes / rate
        is_read = work.link == "disk_read"
        rate = host.nvme_read_bytes_per_s if is_read else host.nvme_write_bytes_per_s
        return work.num_bytes / (rate * self.efficiencies["disk"].value / node.num_accelerators)

    def device_seconds(self, work: Compute, *, is_backward: bool = False) -> float:
        """Return the seconds of operations on the device; see Note [How computation is priced]."""
        again = _SCORES_AGAIN if is_backward else 1.0
        device = sum(self._cost_seconds(cost, again) for cost in work.costs)
        launches = sum(c.num_ops for c in work.costs) * self.efficiencies["host_launch_s"].value
        if self.cluster.node.accelerator.asynchronous:
            return max(device, launches)
        return device + launches

    def assumptions(self) -> tuple[str, ...]:
        """Return every figure that the prices are computed from, with its source."""
        node = self.cluster.node
        chip, host = node.accelerator, node.host
        dtype = self.candidate.dtypes.compute
        figures = [
            ("peak", chip.flops_per_s(dtype), "FLOP/s", f"dense, {dtype}", chip.source),
            ("memory", chip.memory_bytes_per_s, "B/s", f"of {chip.name}", chip.source),
        ]
        for place_, link in (("within a node", node.intra), ("of one NIC", node.inter)):
            meaning = f"{link.name}, large messages, {place_}"
            figures.append(("link", link.achieved_bytes_per_s, "B/s", meaning, link.source))
        figures += [
            ("host memory", host.dram_bytes_per_s, "B/s", "of a node", host.source),
            ("disk read", host.nvme_read_bytes_per_s, "B/s", "of a node", host.source),
            ("disk write", host.nvme_write_bytes_per_s, "B/s", "of a node", host.source),
        ]
        figures += [
            (name, share.value, "s" if name.endswith("_s") else "", share.meaning, share.source)
            for name, share in self.efficiencies.items()
        ]
        if (ep := self.candidate.ep) > 1:
            meaning = "of the experts that tokens are sent to are other ranks': all get as many"
            figures.append(("balanced routing", 1 - 1 / ep, "", meaning, "counted in a run"))
        return tuple(describe_figure(*figure) for figure in figures)

    def _cost_seconds(self, cost: Cost, again: float) -> float:
        """Return the device's seconds of operations of one class; attention takes ``again``."""
        if cost.num_ops == 0:
            return 0.0
        if cost.kind in DEGREE_KINDS:
            return self._sent_seconds(cost)
        table, chip = self.efficiencies, self.cluster.node.accelerator
        memory_s = cost.moved_bytes / (chip.memory_bytes_per_s * table["memory"].value)
        ramps = cost.num_ops * table["kernel_ramp_s"].value
        if cost.kind == "memory" or cost.flops == 0:
            return memory_s + ramps
        if cost.kind == "attention":
            rate = chip.flops_per_s(cost.dtype) * table["attention"].value / again
        else:
            rate = self.matmul_flops_per_s(cost.dtype)
        return max(cost.flops / rate, memory_s) + ramps

    def _sent_seconds(self, cost: Cost) -> float:
        """Return the seconds of collectives of tensor, context or expert parallelism.

        Gathered keys and values take as long as those that go round a ring.
        """
        axis, node = DEGREE_KINDS[cost.kind][0], self.cluster.node
        group = self.groups["ep" if axis == "expert" else axis]
        n, num_bytes = group.num_ranks, cost.moved_bytes / cost.num_ops
        if n == 1:
            return 0.0
        if cost.kind == "tensor_parallel":
            payload = num_bytes * n / (2 * (n - 1))
            return cost.num_ops * collective_seconds("all_reduce", payload, group, node)
        if cost.kind in ("context_exchange", "expert_parallel"):
            return cost.num_ops * all_to_all_seconds(num_bytes, group, node)
        num = cost.num_ops * (n - 1)
        return num * send_seconds(cost.moved_bytes / num, group.num_nodes > 1, node)

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s of large matmuls of ordinary shapes, in a dtype."""
        chip, table = self.cluster.node.accelerator, self.efficiencies
        best = chip.matmul.get(dtype)
        if best is None:
            best = chip.flops_per_s(dtype) * table["matmul_best"].value
        return best * table["matmul_sustained"].value


# -- collectives and sends
Unit = Literal["flops", "bytes"]
_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sizes = Annotated[tuple[_Size, ...], Field(min_length=1)]

_BASE_S = 6.6e-6
_TREE_SHARE = 0.92
_LOW_LATENCY_SHARE = 0.5


@dataclass(frozen=True)
class SecondsCurve:
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
    def through(unit: Unit, points: Sequence[tuple[float, float]]) -> SecondsCurve:
        """Make a curve of measured (size, seconds) that never falls.

        Noise only adds, so an operation takes at most as long as a larger one was measured to.
        """
        shortest = math.inf
        kept = []
        for size, seconds in sorted(points, reverse=True):
            shortest = min(shortest, seconds)
            kept.append((float(size), shortest))
        sizes, durations = zip(*reversed(kept), strict=True)
        return SecondsCurve(unit, sizes, durations)

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
class RankGroup:
    """The ranks of one collective on nodes; ``ranks_per_node`` is the smallest number on a node."""

    num_ranks: int
    ranks_per_node: int
    num_nodes: int


@cache
def place(num_ranks: int, stride: int, ranks_per_node: int) -> RankGroup:
    """Place ranks 0, stride, 2 * stride, ... on nodes that are filled one after the other."""
    if min(num_ranks, stride, ranks_per_node) < 1:
        raise ConfigError(
            f"group: num_ranks={num_ranks}, stride={stride}, ranks_per_node={ranks_per_node}; "
            "expected 1 or more of each"
        )
    counts = Counter(rank * stride // ranks_per_node for rank in range(num_ranks))
    return RankGroup(num_ranks, min(counts.values()), len(counts))


def collective_seconds(
    kind: CollectiveKind, payload_bytes: float, group: RankGroup, node: Node
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
    return _seconds(num_bytes, 1.0, inner, outer, RankGroup(2, 1, 2 if crosses_nodes else 1), node)


def all_to_all_seconds(sent_bytes: float, group: RankGroup, node: Node) -> float:
    """Return the seconds of an all-to-all in which each rank sends ``sent_bytes`` in all.

    Messages within the node and between nodes are sent at the same time.
    """
    n, per_node = group.num_ranks, group.ranks_per_node
    if n == 1:
        return 0.0
    message = sent_bytes / (n - 1)
    inside = send_seconds(message * (per_node - 1), False, node) if per_node > 1 else 0.0
    between = send_seconds(message * (n - per_node), True, node) if group.num_nodes > 1 else 0.0
    return max(inside, between)


def _seconds(
    payload: float, factor: float, inner: float, outer: float, group: RankGroup, node: Node
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
def wire(link: Link) -> SecondsCurve:
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
    return SecondsCurve("bytes", tuple(sizes), tuple(seconds))
