"""Measurements of a machine: curves of seconds in a file, and prices made from them; no torch.

Note [Which curve prices what]
Costs of a tape are sums over operations of one class, so a class takes its number of operations
times the curve at their mean size. Forward and backward have separate curves, a dtype that was not
measured has float32's. The engine's work beside the model has a size as a whole: the
optimizer's step, clipping, copies into full parameters, sums of gradients. A collective takes its
curve's seconds, and ``message_s`` for each message beyond the one per peer that the curve contains.
Each pass of a unit other than the root, which is one operation of a program, adds the engine's own
time on the host, and each recomputation that of checkpointing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.keys import checked_value, read_json
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Accelerator, Cluster, Host, Link, Node
from shardwise.plan.machine.pricing import SecondsCurve, Unit, describe_figure
from shardwise.plan.model.tape import DEGREE_KINDS, Cost
from shardwise.plan.step.program import Collective, LinkTransfer, Op, OpPhase
from shardwise.spelling import did_you_mean

FORMAT = "shardwise-calibration"
VERSION = 2
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class MeasuredHost:
    """The measured machine, its device and the software."""

    processor: str
    num_cores: _Whole
    memory_bytes: _Whole
    device: str
    device_memory_bytes: _Whole
    torch: str
    shardwise: str


@dataclass(frozen=True)
class Calibration:
    """The measurements of one machine with ``num_ranks`` ranks at work at the same time.

    ``curves`` are by name: ``matmul.forward.float32``, ``all_gather.2`` and so on. ``overlap`` is
    the share of the shorter of a collective and a computation that is hidden when both run: 1 where
    a collective costs the computation nothing, 0 where the two take as long as one after the other,
    below 0 where they take longer together.
    ``message_s`` is what each further message of a collective adds, ``unit_forward_s`` and
    ``unit_backward_s`` what the engine's host code adds to a unit's pass, ``checkpoint_s`` what
    activation checkpointing adds to a block beside running it again. ``process_bytes`` is resident
    in a rank before it has a tensor; ``context_bytes`` is taken on the device by the driver and the
    communicators, outside of torch's allocator.
    """

    host: MeasuredHost
    measured_at: str
    backend: str
    num_ranks: _Count
    threads_per_rank: _Count
    overlap: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
    message_s: _Amount
    unit_forward_s: _Amount
    unit_backward_s: _Amount
    checkpoint_s: _Amount
    process_bytes: _Whole
    context_bytes: _Whole
    curves: dict[str, SecondsCurve]
    where: str = field(default="", compare=False)

    def curve(self, name: str) -> SecondsCurve:
        """Return the curve of this name. **Raises** ConfigError where it was not measured."""
        if name not in self.curves:
            hint = did_you_mean(name, self.curves) or "."
            raise ConfigError(
                f"calibration {self.where or self.measured_at}: {name!r} was not measured{hint} "
                "Measure again with `shardwise bench --calibrate`"
            )
        return self.curves[name]


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as JSON, with the unit of every number in its key."""
    path.write_text(json.dumps(to_json(calibration), indent=1) + "\n", encoding="utf-8")


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Return what the file holds."""
    values = asdict(calibration)
    curves, _ = values.pop("curves"), values.pop("where")
    written = {
        name: {f"size_{curve['unit']}": list(curve["sizes"]), "seconds": list(curve["seconds"])}
        for name, curve in curves.items()
    }
    return {"format": FORMAT, "version": VERSION, **values, "curves": written}


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    **Raises** ConfigError, naming the file and the key: it cannot be read, it is no calibration or
    one of a later version, or a value is missing or makes no sense.
    """
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: expected a calibration, as `shardwise bench --calibrate` writes it"
        )
    version = checked_value(_Count, values.get("version"), f"{path}: version")
    if version != VERSION:
        raise ConfigError(
            f"{path}: version: expected {VERSION}, got {version}, of another shardwise; measure "
            "again with this one"
        )
    curves = values.get("curves")
    if isinstance(curves, dict):
        values["curves"] = {n: _with_unit(c, f"{path}: curves.{n}") for n, c in curves.items()}
    calibration: Calibration = checked_value(Calibration, values, str(path))
    return replace(calibration, where=str(path))


def _with_unit(curve: Any, where: str) -> dict[str, Any]:
    """Return a curve by the names of its fields; in the file the unit is a part of a key."""
    values = dict(curve) if isinstance(curve, dict) else {}
    unit = next((u for u in get_args(Unit) if f"size_{u}" in values), None)
    if unit is None:
        raise ConfigError(f"{where}: expected size_bytes or size_flops, and seconds")
    return {"unit": unit, "sizes": values[f"size_{unit}"], "seconds": values.get("seconds")}


_PHASE_CURVES: dict[OpPhase, str] = {
    "optimizer": "optimizer.adamw",
    "clip": "clip",
    "unshard": "copy",
    "reduce": "sum",
}


@dataclass(frozen=True)
class CalibratedPrices:
    """Prices of one candidate's operations on the machine that was measured.

    As many ranks were measured together as the candidate has: those of `cluster_of`.

    **Raises** ConfigError where the candidate asks for something that was not measured.
    """

    calibration: Calibration
    candidate: Candidate

    @property
    def overlap(self) -> float:
        """Share of the shorter that is hidden when a collective and a computation both run."""
        return self.calibration.overlap

    def seconds(self, op: Op) -> float:
        """Return the seconds of an operation on one rank, all other ranks at work as well."""
        work, measured = op.work, self.calibration
        if isinstance(work, LinkTransfer):
            return measured.curve(work.link).at(work.num_bytes)
        if isinstance(work, Collective):
            return self._collective_seconds(work)
        engine_s = {
            "forward": measured.unit_forward_s,
            "backward": measured.unit_backward_s,
            "recompute": measured.unit_forward_s + measured.checkpoint_s,
        }
        seconds = engine_s.get(op.phase, 0.0) if op.unit > 0 else 0.0
        for cost in work.costs:
            if cost.num_ops:
                curve = measured.curve(self._curve_name(cost, op.phase))
                size = cost.moved_bytes if curve.unit == "bytes" else cost.flops
                seconds += cost.num_ops * curve.at(size / cost.num_ops)
        return seconds

    def assumptions(self) -> tuple[str, ...]:
        """Return the figures that the prices are computed from, for the report."""
        source = f"measured {self.calibration.measured_at}"
        figures = [describe_figure("overlap", self.overlap, "", "share that is hidden", source)]
        for name, curve in self.calibration.curves.items():
            unit = "FLOP/s" if curve.unit == "flops" else "B/s"
            meaning = "best measured rate"
            figures.append(describe_figure(name, curve.peak_rate, unit, meaning, source))
        return tuple(figures)

    def _curve_name(self, cost: Cost, phase: OpPhase) -> str:
        measured = self.calibration.curves
        if cost.kind in DEGREE_KINDS:
            raise ConfigError("a calibration prices data-parallel ranks only, no other degrees")
        if phase == "unshard" and cost.dtype != "float32":
            return "cast.bfloat16"
        if phase == "reduce" and "sum" not in measured:
            return "copy"  # the device's transport sums by itself; only copies remain
        if phase in _PHASE_CURVES:
            return _PHASE_CURVES[phase]
        direction = "backward" if phase == "backward" else "forward"
        dtype = "bfloat16" if cost.dtype == "float16" else cost.dtype
        name = f"{cost.kind}.{direction}.{dtype}"
        return name if name in measured else f"{cost.kind}.{direction}.float32"

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
    on_cpu = facts.device == "cpu"
    source = f"measured {calibration.measured_at} with `shardwise bench --calibrate`"

    def rate(name: str) -> float:
        curve = calibration.curves.get(name)
        return curve.peak_rate if curve else 1.0

    def link(name: str) -> Link:
        curve = calibration.curves.get(name)
        latency = curve.seconds[0] if curve else 0.0
        return Link(name, rate(name), latency, latency, 1.0, source)

    memory = facts.device_memory_bytes
    if on_cpu:
        memory = max(1, facts.memory_bytes // ranks - calibration.process_bytes)
    peaks = {dtype: rate(f"matmul.forward.{dtype}") for dtype in ("float32", "bfloat16")}
    bandwidth = rate("memory.forward.float32")
    accelerator = Accelerator(
        name=facts.processor if on_cpu else facts.device,
        family=facts.device,
        memory_bytes=memory - calibration.context_bytes,
        nominal_memory_bytes=memory,
        peak=peaks,
        memory_bytes_per_s=bandwidth,
        source=source,
        matmul=peaks,
        asynchronous=not on_cpu,
    )
    fabric = link(f"all_gather.{ranks}")
    host = Host(
        facts.processor,
        facts.memory_bytes,
        dram_bytes_per_s=bandwidth * ranks,
        device_link=link("to_device"),
        nvme_read_bytes_per_s=rate("disk_read") * ranks,
        nvme_write_bytes_per_s=rate("disk_write") * ranks,
        source=source,
    )
    node = Node(
        accelerator.name,
        accelerator,
        num_accelerators=ranks,
        intra=fabric,
        inter=fabric,
        num_nics=1,
        host=host,
        source=source,
    )
    return Cluster(node)
