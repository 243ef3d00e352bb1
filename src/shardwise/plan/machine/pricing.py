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
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Protocol

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.links import (
    Group,
    all_to_all_seconds,
    collective_seconds,
    place,
    send_seconds,
)
from shardwise.plan.model.tape import DEGREE_KINDS, Cost
from shardwise.plan.sizes import PRECISIONS, row_of
from shardwise.plan.step.program import Collective, Compute, Op, Transfer
from shardwise.plan.tables import read_table


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
    found = {name: Efficiency(**row) for name, row in table["all"].items()}
    for kind in ("families", "fitted")[: 1 + is_fitted]:
        for name, row in table[kind].get(family, {}).items():
            found[name] = replace(found[name], **row)
    return found


_SCORES_AGAIN = 2.5 / 2.0  # of the FLOPs that a cost of attention's backward has


def describe_figure(name: str, value: float, unit: str, meaning: str, source: str) -> str:
    """Describe one figure that prices stand on, for the report."""
    return f"{name}: {f'{value:.4g} {unit}'.strip()}, {meaning} ({source})"


class Pricer(Protocol):
    """Whatever says how long an operation takes."""

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operation."""

    @property
    def overlap(self) -> float:
        """Share of the shorter that is hidden when a collective and a computation both run."""

    def assumptions(self) -> tuple[str, ...]:
        """Return every figure that the prices stand on."""


@dataclass(frozen=True)
class Slowed:
    """Prices of a cluster whose slowest device and slowest link take so many times as long.

    All ranks wait for that device and that link, see Note [One rank stands for all].
    """

    prices: Pricer
    device: float = 1.0
    link: float = 1.0

    @property
    def overlap(self) -> float:
        """Share of the shorter that is hidden when a collective and a computation both run."""
        return self.prices.overlap

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operation; copies and disks are as fast as usual."""
        factor = {Compute: self.device, Collective: self.link}.get(type(op.work), 1.0)
        return self.prices.seconds(op) * factor

    def assumptions(self) -> tuple[str, ...]:
        """Return every figure that the prices stand on."""
        return self.prices.assumptions()


@dataclass(frozen=True)
class Prices:
    """Prices of one candidate's operations on a cluster.

    ``is_fitted`` False: by single measurements alone. See Notes [How computation is priced] and
    [How ranks are numbered].

    **Raises** ConfigError where the candidate's ranks are not the cluster's.
    """

    cluster: Cluster
    candidate: Candidate
    is_fitted: bool = True
    _known: dict[tuple[Compute | Collective | Transfer, bool, bool], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.candidate.world_size != self.cluster.num_ranks:
            raise ConfigError(
                f"the candidate has {self.candidate.world_size} ranks, the cluster "
                f"{self.cluster.num_ranks}: {self.cluster.num_nodes} nodes of "
                f"{self.cluster.node.num_accelerators}"
            )

    @property
    def efficiencies(self) -> Mapping[str, Efficiency]:
        """The table of efficiencies for this accelerator."""
        return efficiencies_of(self.cluster.node.accelerator.family, self.is_fitted)

    @cached_property
    def groups(self) -> Mapping[str, Group]:
        """Where the ranks of each axis lie; see Note [How ranks are numbered]."""
        sizes = {
            "tensor": self.candidate.tp,
            "context": self.candidate.cp,
            "shard": self.candidate.num_shards,
            "replicate": self.candidate.num_replicas,
            "pipeline": self.candidate.pp,
        }
        found, stride, per_node = {}, 1, self.cluster.node.num_accelerators
        for axis, size in sizes.items():
            within = sizes["context"] if axis == "shard" else 1
            found[axis] = place(size * within, stride // within, per_node)
            stride *= size
        ep, region = self.candidate.ep, sizes["tensor"] * sizes["context"] * sizes["shard"]
        found["ep"] = place(ep, 1, per_node)
        found["efsdp"] = place(max(1, region // ep), ep, per_node)
        return found

    @property
    def overlap(self) -> float:
        """All of communication can be hidden: its use of the device is not modelled."""
        return 1.0

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operation on one rank, all other ranks at work as well."""
        key = op.work, op.stream == "cpu", op.phase == "backward"
        seconds = self._known.get(key)  # micro-batches and layers are alike
        if seconds is None:
            seconds = self._known[key] = self._seconds(*key)
        return seconds

    def _seconds(
        self, work: Compute | Collective | Transfer, on_host: bool, is_backward: bool
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
        """Return every figure that these prices stand on, with its source, for the report."""
        node = self.cluster.node
        chip, host = node.accelerator, node.host
        dtype = row_of(PRECISIONS, self.candidate.precision, "precision").compute
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
            (name, each.value, "s" if name.endswith("_s") else "", each.meaning, each.source)
            for name, each in self.efficiencies.items()
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
        """Return the seconds in which the ranks of a degree send each other so much.

        Keys and values that are gathered take as long as those that go round a ring.
        """
        axis, node = DEGREE_KINDS[cost.kind][0], self.cluster.node
        group = self.groups["ep" if axis == "expert" else axis]
        n, each = group.num_ranks, cost.moved_bytes / cost.num_ops
        if n == 1:
            return 0.0
        if cost.kind == "tensor_parallel":
            payload = each * n / (2 * (n - 1))
            return cost.num_ops * collective_seconds("all_reduce", payload, group, node)
        if cost.kind in ("context_exchange", "expert_parallel"):
            return cost.num_ops * all_to_all_seconds(each, group, node)
        num = cost.num_ops * (n - 1)
        return num * send_seconds(cost.moved_bytes / num, group.num_nodes > 1, node)

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s of large matmuls of ordinary shapes, in a dtype."""
        chip, table = self.cluster.node.accelerator, self.efficiencies
        best = chip.matmul.get(dtype)
        if best is None:
            best = chip.flops_per_s(dtype) * table["matmul_best"].value
        return best * table["matmul_sustained"].value
