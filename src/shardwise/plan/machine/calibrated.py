"""Prices from a calibration: how long each operation of a program takes on the machine measured.

Note [Which curve prices what]
Costs of a tape are sums over operations of one class, so a class takes its number of operations
times the curve at their mean size. Forward and backward have curves of their own, a dtype that was
not measured has float32's. What the engine does beside the model has a size as a whole: the
optimizer's step, clipping, copies into full parameters, sums of gradients. A collective takes its
curve's seconds, and ``message_s`` for each message beyond the one per peer that the curve contains.
Each pass of a unit other than the root, which is one operation of a program, adds the engine's own
time on the host, and each recomputation that of checkpointing.
"""

from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.calibration import Calibration, Curve
from shardwise.plan.machine.hardware import Accelerator, Cluster, Host, Link, Node
from shardwise.plan.machine.pricing import Assumption
from shardwise.plan.model.tape import CONTEXT_KINDS, Cost
from shardwise.plan.step.program import Collective, Compute, Op, OpPhase

_OWN_CURVES: dict[OpPhase, str] = {
    "optimizer": "optimizer.adamw",
    "clip": "clip",
    "unshard": "copy",
    "reduce": "sum",
}


@dataclass(frozen=True)
class CalibratedPrices:
    """Prices of one candidate's operations on the machine that was measured.

    **Raises** ConfigError where the candidate has another number of ranks than were measured
    together, or asks for something that was not.
    """

    calibration: Calibration
    candidate: Candidate

    def __post_init__(self) -> None:
        measured, asked = self.calibration.num_ranks, self.candidate.world_size
        if measured != asked:
            raise ConfigError(
                f"calibration {self.calibration.where}: it was measured with {measured} ranks at "
                f"once, the candidate has {asked}; measure again with "
                f"`shardwise bench --calibrate --ranks {asked}`"
            )

    @property
    def overlap(self) -> float:
        """Share of the shorter that is hidden when a collective and a computation both run."""
        return self.calibration.overlap

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operation on one rank, all other ranks at work as well."""
        work = op.work
        if isinstance(work, Compute):
            return self._host_seconds(op) + sum(self._cost_seconds(cost, op) for cost in work.costs)
        if isinstance(work, Collective):
            return self._collective_seconds(work)
        return self.calibration.curve(work.link).at(work.num_bytes)

    def assumptions(self) -> tuple[Assumption, ...]:
        """Return the figures that these prices stand on, for the report."""
        source = f"measured {self.calibration.measured_at}"
        figures = [Assumption("overlap", self.overlap, "", "share that is hidden", source)]
        for name, curve in self.calibration.curves.items():
            unit = "FLOP/s" if curve.unit == "flops" else "B/s"
            figures.append(Assumption(name, curve.peak_rate, unit, "best measured rate", source))
        return tuple(figures)

    def _host_seconds(self, op: Op) -> float:
        """Return what the host spends on a unit's pass beside its operations; see the Note."""
        found = self.calibration
        if op.unit < 1:
            return 0.0
        seconds = {
            "forward": found.unit_forward_s,
            "backward": found.unit_backward_s,
            "recompute": found.unit_forward_s + found.checkpoint_s,
        }
        return seconds.get(op.phase, 0.0)

    def _cost_seconds(self, cost: Cost, op: Op) -> float:
        if not cost.num_ops:
            return 0.0
        if cost.kind in ("tensor_parallel", *CONTEXT_KINDS, "expert_parallel"):
            raise ConfigError("a calibration prices data-parallel ranks only, no other degrees")
        if op.phase in _OWN_CURVES:
            curve = self.calibration.curve(self._own_curve(cost, op.phase))
        else:
            curve = self._class_curve(cost, op.phase)
        size = cost.moved_bytes if curve.unit == "bytes" else cost.flops
        return cost.num_ops * curve.at(size / cost.num_ops)

    def _own_curve(self, cost: Cost, phase: OpPhase) -> str:
        if phase == "unshard" and cost.dtype != "float32":
            return "cast.bfloat16"
        if phase == "reduce" and "sum" not in self.calibration.curves:
            return "copy"  # the device's transport sums by itself; what is left are copies
        return _OWN_CURVES[phase]

    def _class_curve(self, cost: Cost, phase: OpPhase) -> Curve:
        way = "backward" if phase == "backward" else "forward"
        dtype = "bfloat16" if cost.dtype == "float16" else cost.dtype
        measured = f"{cost.kind}.{way}.{dtype}"
        if measured not in self.calibration.curves:
            measured = f"{cost.kind}.{way}.float32"
        return self.calibration.curve(measured)

    def _collective_seconds(self, work: Collective) -> float:
        """Return the seconds of a collective; an all-reduce is the other two.

        An all-to-all sends what a reduce-scatter of as many bytes does.
        """
        shards, replicas = self.candidate.num_shards, self.candidate.num_replicas
        size = replicas if work.axis == "replicate" else shards
        if size == 1:
            return 0.0
        both = ("reduce_scatter", "all_gather")
        kinds = {"all_reduce": both, "all_to_all": both[:1]}.get(work.kind, (work.kind,))
        curves = [self.calibration.curve(f"{kind}.{size}") for kind in kinds]
        peers = size - 1 if self.candidate.transport == "point_to_point" else 1
        more = max(0, work.num_messages - peers * len(kinds)) * self.calibration.message_s
        return sum(curve.at(work.payload_bytes) for curve in curves) + more


def cluster_of(calibration: Calibration) -> Cluster:
    """Return the machine that was measured as a cluster of one node.

    Its figures are the best measured rates, for reports and utilisation; `CalibratedPrices` has
    the curves. On a CPU the ranks share the memory, less what their processes take.
    """
    facts, ranks = calibration.host, calibration.num_ranks
    source = f"measured {calibration.measured_at} with `shardwise bench --calibrate`"

    def rate(name: str) -> float:
        curve = calibration.curves.get(name)
        return curve.peak_rate if curve else 1.0

    def link(name: str) -> Link:
        curve = calibration.curves.get(name)
        latency = curve.seconds[0] if curve else 0.0
        return Link(name, rate(name), latency, latency, 1.0, source)

    memory = facts.device_memory_bytes
    if facts.device == "cpu":
        memory = max(1, facts.memory_bytes // ranks - calibration.process_bytes)
    dtypes = ("float32", "bfloat16")
    peaks = {d: rate(f"matmul.forward.{d}") for d in dtypes}
    accelerator = Accelerator(
        name=facts.processor if facts.device == "cpu" else facts.device,
        family=facts.device,
        memory_bytes=memory - calibration.context_bytes,
        nominal_memory_bytes=memory,
        peak=peaks,
        memory_bytes_per_s=rate("memory.forward.float32"),
        source=source,
        matmul=peaks,
        asynchronous=facts.device != "cpu",
    )
    host = Host(
        name=facts.processor,
        memory_bytes=facts.memory_bytes,
        dram_bytes_per_s=rate("memory.forward.float32") * ranks,
        cores=facts.num_cores,
        device_link=link("to_device"),
        nvme_read_bytes_per_s=rate("disk_read") * ranks,
        nvme_write_bytes_per_s=rate("disk_write") * ranks,
        source=source,
    )
    fabric = link(f"all_gather.{ranks}")
    return Cluster(Node(accelerator.name, accelerator, ranks, fabric, fabric, 1, host, source))
