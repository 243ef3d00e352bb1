"""Published runs as the planner's own requests: a row's model, cluster and candidate, planned.

Keys that a row does not give are the system's defaults (`data/systems.toml`). Nothing is fitted: a
row is predicted by `plan()` with the planner's own margins and efficiencies, as for any user.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import _published_cells as cells
from _published_cells import Mechanisms, Row, Unmodelled

from shardwise.plan.candidate import ALL_DEGREES, Candidate, Checkpointing
from shardwise.plan.machine.hardware import Cluster, make_cluster
from shardwise.plan.machine.pricing import Prices
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planning import Plan, plan

GIB = 2**30
MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True)
class System:
    """One system's defaults, in the planner's words; see the head of ``data/systems.toml``."""

    name: str
    pattern: str
    precision: str
    memory: MemoryKind
    source: str
    precision_bfloat16: str = ""
    precision_stage3: str = ""
    layers: Literal["decoder", "transformers"] = "decoder"
    selective: Checkpointing = "selective"
    binary_unit: bool = False
    fused_attention: bool = True
    steps_otherwise: bool = False
    run: dict[str, Any] = field(default_factory=dict)

    def precision_of(self, found: Mechanisms, stage: int) -> str:
        """Return the planner's name for a row's copies of a parameter."""
        if found.policy == "bf16_master":
            raise Unmodelled("16-bit master weights beside the parameters")
        if found.policy in ("fp32", "pure"):
            return {"fp32": "fp32", "pure": "pure_bf16"}[found.policy]
        own = self.precision_stage3 if stage >= 3 and self.precision_stage3 else self.precision
        if found.dtype == "bfloat16" and self.precision_bfloat16:
            own = self.precision_bfloat16
        # "fp16" or "float32 states" add nothing to a system that has master weights already.
        if own in ("pure_bf16", "bf16") and found.policy:
            own = "zero_paper" if found.policy == "mixed" else "megatron_bf16"
        return own


def system_of(row: Row, found: Mechanisms) -> System:
    """Return the first system whose pattern is in a row's text; the last one's is in all."""
    several = " multi" if row.count("n_gpus", 1) > 1 else ""
    full = " full finetune" if found.full_finetune else ""
    experts = " moe" if row.count("ep", 1) > 1 else ""
    text = f"{row.cell('system')}{several}{full}{experts}".lower()
    table = cells.read_data("systems")["system"]
    return next(System(**each) for each in table if re.search(each["pattern"], text))


@dataclass(frozen=True)
class Run:
    """A row as the planner's request."""

    row: Row
    system: System
    model: ShapedModel
    cluster: Cluster
    candidate: Candidate
    float8: bool

    @property
    def gpu(self) -> str:
        """The accelerator's family, by which efficiencies differ."""
        return self.cluster.node.accelerator.family

    @cached_property
    def planned(self) -> Plan:
        """The plan as a user of `shardwise plan` gets it."""
        return self.plan()

    def plan(self, *, fitted: bool = True) -> Plan:
        """Plan the run; without ``fitted``, price it by single measurements alone.

        **Raises** ConfigError if the planner refuses it.
        """
        prices = Prices(self.cluster, self.candidate, is_fitted=fitted)
        return plan(self.model, self.cluster, self.candidate, prices=prices)


def read_run(row: Row) -> Run:
    """Read a row.

    **Raises** Unmodelled if a size is missing; ConfigError if the planner refuses the row.
    """
    found = cells.read_mechanisms(row)
    shape, system = cells.resolve_shape(row), system_of(row, found)
    if found.has_adapters:
        raise Unmodelled("adapters: the planner trains all parameters")
    if found.steps_otherwise or system.steps_otherwise:
        raise Unmodelled("steps in backward, or paged moments: the engine takes no such steps")
    candidate = _candidate(row, found, system)
    model = ShapedModel(row.cell("model"), shape, _seq(row), eager=system.layers)
    return Run(row, system, model, _cluster(row, candidate.world_size), candidate, found.float8)


def _candidate(row: Row, found: Mechanisms, system: System) -> Candidate:
    run = {"stage": 0, **system.run, **({} if row.ranks > 1 else {"stage": 0}), **found.candidate}
    if run.get("activation_checkpointing") == "selective":
        run["activation_checkpointing"] = system.selective
    moves_inputs = run["offload"].activations != "device"
    if moves_inputs and run.get("activation_checkpointing") != "full":
        raise Unmodelled("offloaded activations without full checkpointing")
    micro_batch, accumulation = _batch(row)
    shards = min(found.shard_group or row.data_parallel, row.data_parallel)
    return Candidate(
        num_shards=shards,
        num_replicas=max(1, row.data_parallel // shards),
        precision=system.precision_of(found, run["stage"]),
        micro_batch=micro_batch,
        accumulation=accumulation,
        **{name: row.count(name, 1) for name in ALL_DEGREES},
        **run,
    )


def _batch(row: Row) -> tuple[int, int]:
    """Return windows of a micro-batch, and micro-batches of a step."""
    pp, micro_batch = row.count("pp", 1), row.count("micro_batch", 1)
    if pp > 1 and row.says("notes", "batch per dp group"):
        raise Unmodelled("micro-batch of the pipeline not given")
    if pp > 1 and row.says("system", "titan"):  # its batch is a step's, one micro-batch a stage
        return max(1, micro_batch // pp), pp
    batch, notes = row.number("global_batch"), row.cell("notes")
    if number := re.search(r"micro_num (\d+)", notes):
        return micro_batch, int(number[1])
    if batch:
        return micro_batch, max(1, round(batch / (micro_batch * row.data_parallel)))
    if number := re.search(r"grad(?:ient)? accum\w* (\d+)", notes):
        return micro_batch, int(number[1])
    return micro_batch, 8 * pp if pp > 1 else 1


def _seq(row: Row) -> int:
    """Return the sequence length; Alpaca's longest is known."""
    if row.number("seq_len") is None and row.says("notes", "alpaca"):
        if row.number("micro_batch") is None and not row.says("precision", "full bf16"):
            raise Unmodelled("no seq_len and no micro_batch given")
        return 512
    return row.count("seq_len")


def _cluster(row: Row, num_ranks: int) -> Cluster:
    """Return the row's machines, with the network of its notes, or else as usual for them."""
    name = re.sub(r"\(.*?\)|-\d+W", "", row.cell("gpu")).strip()
    notes, system = row.cell("notes"), row.cell("system").lower()
    network, nics = None, None
    several = re.search(r"(\d+) ?x ?(\d+) ?Gb", notes)
    total = re.search(r"(\d+) ?Gbps node", notes)
    if several:
        network = {"100": "roce-100", "200": "roce-200"}.get(several[2], "roce-400")
        nics = int(several[1])
    elif total:
        network, nics = "roce-200", max(1, int(total[1]) // 200)
    elif "bigscience" in system or row.says("source", "bigscience"):
        network, nics = "infiniband-edr", 4  # Jean Zay: 4 Omni-Path of 100 Gb/s per node
    elif "vtrain" in system:
        network, nics = "infiniband-hdr", 4  # vTrain section 5: 4 HDR per node
    # Jean Zay's V100 nodes have 4 GPUs; an NVL72 rack is filled by 64 of them.
    usual = 4 if row.says("source", "gpt2.md") else 64 if name.startswith("GB") else 8
    per_node = math.gcd(num_ranks, usual) if num_ranks >= usual else None
    return make_cluster(name, num_ranks, per_node, network=network, num_nics=nics)


# -- published figures
def memory_kind(row: Row, system: System) -> MemoryKind:
    """Return what a memory column means, by its own words or else as the system prints it."""
    cell = f"{row.cell('mem_kind')} {row.cell('mem_unit')}".lower()
    kinds: dict[str, MemoryKind] = {
        "reserved": "reserved",
        r"allocated|\bactive\b": "allocated",
        "nvidia-smi|gpu memory|device|free|used": "device",
    }
    return next((kind for words, kind in kinds.items() if re.search(words, cell)), system.memory)


def planned_bytes(made: Plan, kind: MemoryKind) -> int:
    """Return what a memory column of this kind would show, as the plan expects it."""
    memory, outside = made.memory, ("context of the device", "communicators")
    reserved = memory.expected_bytes - sum(memory.margins.get(name, 0) for name in outside)
    allocated = memory.expected_bytes - sum(memory.margins.values())
    return {"allocated": allocated, "reserved": reserved, "device": memory.expected_bytes}[kind]


def published_bytes(row: Row, system: System) -> float | None:
    """Return the published peak in bytes per GPU, or None if it is not given."""
    value, kind = row.number("mem_value"), row.cell("mem_kind").lower()
    if value is None or row.says("mem_value", "oom") or "component" in kind:
        return None
    unit = row.cell("mem_unit")
    binary = system.binary_unit or "fits GiB" in unit
    million, billion = (2**20, GIB) if binary else (1e6, 1e9)
    scale = {"GiB": GIB, "MiB": 2**20, "MB": million}.get(unit.split(" ")[0], billion)
    capacity = row.number("gpu_mem_gb")
    if "FREE" in unit:
        return None if capacity is None else (capacity - value) * scale
    if "total over" in kind:
        return value * scale / row.ranks
    if capacity is not None and value * scale > capacity * GIB:
        raise Unmodelled("prints more than the card has")
    if value <= 0:
        raise Unmodelled("memory column not understood")
    return value * scale


def published_seconds(run: Run) -> float | None:
    """Return the published seconds per step, or None if it is not given.

    If a rate per GPU would be faster than the card's peak, it is taken for that of all ranks.

    **Raises** Unmodelled if even that is faster, or if a column is not understood.
    """
    row, made = run.row, run.planned
    rate, seconds = row.number("tok_s_gpu"), row.number("step_s")
    if not rate and not seconds:
        return None
    if run.float8:
        raise Unmodelled("float8 products (time)")
    if row.number("seq_len") is None:
        raise Unmodelled("no seq_len given (time)")
    if run.candidate.world_size != row.ranks:
        raise Unmodelled("degrees do not multiply to the number of GPUs")
    seconds = made.tokens_per_step / (rate * row.ranks) if rate else float(seconds or 0)
    peak = run.cluster.node.accelerator.flops_per_s(made.matmul_dtype) * row.ranks
    for copies in dict.fromkeys((1, row.ranks)):
        if made.flops_per_step / (seconds * copies) <= 0.85 * peak:
            return seconds * copies
    raise Unmodelled("faster than the card's peak")
