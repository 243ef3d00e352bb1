"""Predict a published run's peak memory: states, full copies, activations, loss, overhead."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

from _published_rows import Row, Unmodelled, resolve_shape
from _published_systems import (
    BF16_OPTIMIZER,
    MIXED,
    PURE_BF16,
    StateBytes,
    System,
    system_of,
)

from shardwise.plan.model.execution import Checkpointing, Execution, LossKind
from shardwise.plan.model.shape_tape import activation_peaks, shape_tape
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import Tape
from shardwise.plan.sizes import DtypeName

GIB = 2**30
# torchtune's README adds one thing after the other; a row has all up to its own.
_LADDER = ("packed", "compil", "chunked", "activation checkp", "in backward", "offload", "8-bit")
_QUANTIZED = 0.516  # QLoRA (arXiv:2305.14314): 4 bits and 0.127 bits of constants per parameter


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of the worst rank, by what they are."""

    states: float
    full_copies: float
    activations: float
    logits: float
    temporary: float
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Setup:
    """A row as numbers: what runs, how it is sharded, and what a parameter costs."""

    row: Row
    system: System
    shape: DecoderShape
    run: Execution
    stage: int
    shards: int
    state: StateBytes
    adapters: bool
    rungs: int  # of torchtune's ladder


def stage_of(row: Row) -> int:
    """Return the ZeRO stage that a sharding cell means; 0 where nothing is sharded."""
    cell = row.cell("sharding").lower()
    for stage, words in (
        (3, ("zero-3", "full_shard", "fsdp2", "hsdp", "zero3", "deepspeed zero (")),
        (2, ("zero-2", "shard_grad_op", "zero2")),
        (1, ("zero-1", "distributed optimizer", "sharded_ddp", "zero1")),
        (0, ("no_shard", "ddp", "zero-0", "none", "single")),
        (3, ("fsdp",)),
    ):
        if any(word in cell for word in words):
            return stage
    return 0


def shards_of(row: Row) -> int:
    """Return the number of ranks that share one copy of what is sharded."""
    group = re.search(r"(?:within|group) (\d+)", row.cell("sharding").lower())
    ranks = row.data_parallel * row.count("cp", 1)
    return min(int(group[1]), ranks) if group else ranks


def states_of(row: Row, system: System) -> StateBytes:
    """Return the bytes per parameter for the row's precision and optimizer."""
    precision = row.cell("precision").lower()
    told = f"{row.cell('system')} {row.cell('notes')}".lower()
    state = system.state
    if "bigscience" in told and "bf16" in precision:
        state = BF16_OPTIMIZER
    elif "internevo" in told and row.says("sharding", "fsdp"):
        state = MIXED
    elif precision.startswith("fp32"):
        state = StateBytes(4, 4, 8)
    elif precision.startswith("fp16") and system.state.param == 4:
        state = MIXED
    if "full bf16" in precision or "bf16-true" in precision:
        state = PURE_BF16
    if "bf16 master" in precision:
        state = StateBytes(2, 2, 6)
    if "8-bit" in told or "8bit" in told:
        state = replace(state, optimizer=2)
    elif "4-bit" in told or "4bit" in told:
        state = replace(state, optimizer=1)
    return state


def checkpointing_of(row: Row, system: System) -> Checkpointing:
    """Return which activations are recomputed, by the row or else by the system's default."""
    cell = row.cell("act_ckpt").lower()
    if not cell:
        return "full" if row.says("sharding", "act ckpt") else system.checkpointing
    if cell.startswith(("no", "false")):
        return "none"
    if "full" in cell or cell in ("yes", "true"):
        return "full"
    if "op" in cell.split() or "sac" in cell:
        return "per_op"
    return system.selective if cell == "selective" else "selective"


def _rungs(row: Row) -> int:
    notes = row.cell("notes").lower()
    if "ladder" not in notes:
        return 0
    latest = notes.split("+")[-1]
    return next((i + 1 for i, word in enumerate(_LADDER) if word in latest), 1)


def setup_of(row: Row) -> Setup:
    """Read a row.

    **Raises** Unmodelled where a size is neither told nor known.
    """
    shape, system = resolve_shape(row), system_of(system_text(row))
    stage, rungs = stage_of(row), _rungs(row)
    adapters = "lora" in system_text(row) or "lora" in row.cell("notes").lower()
    return Setup(
        row=row,
        system=system,
        shape=shape,
        run=_execution(row, system, shape, rungs, adapters),
        stage=stage,
        shards=shards_of(row),
        state=states_of(row, system),
        adapters=adapters,
        rungs=rungs,
    )


def system_text(row: Row) -> str:
    several = " multi" if row.count("n_gpus", 1) > 1 else ""
    return f"{row.cell('system')}{several}".lower()


def _execution(
    row: Row, system: System, shape: DecoderShape, rungs: int, adapters: bool
) -> Execution:
    pp, micro = row.count("pp", 1), row.count("micro_batch", 1)
    if pp > 1 and row.says("notes", "batch per dp group"):
        raise Unmodelled("micro-batch of the pipeline not told")
    batch = row.number("global_batch")
    in_step = int(batch // (micro * row.data_parallel)) if batch else 8 * pp
    titan = "titan" in row.cell("system").lower()
    if titan and pp > 1:  # its batch is a step's; it is cut into one micro-batch per stage
        micro, in_step = max(1, micro // pp), pp
    # torchtitan's page of mid-2024 ("older version") had a fused norm in place of the eager one.
    compiled = row.says("compile", "yes") or rungs >= 2 or row.says("source", "older version")
    layers = shape.layers
    if system.embedding_is_a_layer and pp > 1:
        layers_here = max(1, math.ceil((layers + 2) / pp) - 1)
    else:
        layers_here = math.ceil(layers / pp)
    checkpointing = checkpointing_of(row, system)
    if rungs:
        checkpointing = "full" if rungs >= 4 else "none"
    elif adapters and "torchtune" in system.name and "qlora" not in row.cell("notes").lower():
        checkpointing = "none"
    return Execution(
        micro_batch=micro,
        seq=_seq(row),
        activation_checkpointing=checkpointing,
        implementation=system.compiled if compiled else system.implementation,
        loss=_loss(row, system, compiled, rungs),
        dtype=_dtype(row),
        matmul_dtype="float8" if "fp8" in row.cell("precision").lower() else None,
        flash=system.flash,
        dropout=system.dropout,
        trained=not adapters,
        tp=row.count("tp", 1),
        sequence_parallel=system.sequence_parallel or row.says("act_ckpt", "sequence"),
        cp=row.count("cp", 1),
        pipeline=pp,
        chunks=_chunks(row, system),
        micro_batches=max(1, in_step),
        rank_layers=layers_here,
        keeps_outputs=system.keeps_outputs,
    )


def _chunks(row: Row, system: System) -> int:
    told = re.search(r"vpp (\d+)", row.cell("notes").lower())
    if told:
        return int(told[1])
    return 2 if row.says("notes", "interleaved") else system.chunks


def _dtype(row: Row) -> DtypeName:
    precision = row.cell("precision").lower()
    if precision.startswith("fp32"):
        return "float32"
    return "float16" if precision == "fp16" else "bfloat16"


def _seq(row: Row) -> int:
    """Return the sequence length; Alpaca's and the truncated wikitext's are known ranges."""
    if row.says("notes", "block_size printed as 12"):
        return 128  # the only usual size that begins with 12
    if row.number("seq_len") is None and row.says("notes", "alpaca"):
        if row.number("micro_batch") is None and not row.says("precision", "full bf16"):
            raise Unmodelled("no seq_len and no micro_batch given")
        return 512
    if row.number("seq_len") is None and "gpt-2" in row.cell("model").lower():
        return 128
    return row.count("seq_len")


def _loss(row: Row, system: System, compiled: bool, rungs: int) -> LossKind:
    if row.count("tp", 1) > 1:
        return system.tp_loss
    if rungs >= 3 or (system.name == "torchtune" and not rungs and compiled):
        return "compiled" if compiled else "chunked"
    return (system.compiled_loss if compiled else None) or system.loss


def predict_memory(row: Row) -> Memory:
    """Predict a row's peak memory.

    **Raises** Unmodelled with the reason.
    """
    return memory_of(setup_of(row))


def memory_of(setup: Setup) -> Memory:
    """Return the largest of all moments, on the first and the last pipeline stage."""
    stages = sorted({0, setup.run.pipeline - 1})
    found = [m for position in stages for m in _moments(setup, position)]
    return max(found, key=lambda m: m.total)


def _moments(setup: Setup, position: int) -> list[Memory]:
    """Return one ledger per phase of a micro-batch, and one for the step."""
    tape = shape_tape(setup.shape, replace(setup.run, pipeline_rank=position))
    rest, grads = _states(setup, tape)
    full = _full_copies(setup, tape)
    peaks = activation_peaks(tape)
    step = max(grads, _step_gradients(setup, tape))
    moments = [Memory(rest + step, 0, 0, 0, 0)]
    # Gradients that persist, and those that the allocator cannot give back to the loss.
    always = setup.system.memory != "allocated" or setup.system.accumulates
    for phase, peak in peaks.items():
        with_grads = always or phase == "recompute" or (phase == "backward" and not peak.logits)
        moments.append(
            Memory(
                states=rest + (grads if with_grads else 0),
                full_copies=full,
                activations=peak.activations if setup.rungs < 6 else 0,
                logits=peak.logits,
                temporary=peak.temporary + _bucket(setup),
            )
        )
    over = setup.system.overhead
    return [replace(m, overhead=m.total * over.fraction + over.constant) for m in moments]


def _bucket(setup: Setup) -> float:
    """Return the flat float32 copy through which BF16_Optimizer reduces 5e8 elements or more.

    A bucket is closed by the tensor that fills it, so one that is larger than all is one alone.
    """
    if setup.state is not BF16_OPTIMIZER:
        return 0.0
    return 4 * max(5e8, setup.shape.vocab * setup.shape.dim / setup.run.tp)


def _states(setup: Setup, tape: Tape) -> tuple[float, float]:
    """Return bytes of parameters and optimizer, and of gradients, that a rank has."""
    params, state, stage = tape.num_params, setup.state, setup.stage
    if setup.adapters:
        return _adapter_states(setup, params)
    shards = setup.shards
    offload = setup.row.cell("offload").lower()
    param = state.param / (shards if stage >= 3 else 1)
    grad = state.grad / (shards if stage >= 2 else 1)
    optimizer = state.optimizer / (shards if stage >= 1 else 1)
    share = re.search(r"(\d+)% of optimizer", offload)
    if share:
        optimizer *= 1 - int(share[1]) / 100
    elif "optimizer" in offload or offload.startswith(("cpu", "full", "all", "params")):
        optimizer = 0
    if "param" in offload or offload.startswith(("cpu", "full", "all")):
        param = 0
    if "grad" in offload or offload.startswith(("cpu", "full", "all", "params")):
        grad = 0
    if "full finetune" in setup.row.cell("notes").lower() and "torchtune" in setup.system.name:
        optimizer, grad = 0, 0  # single-device recipe: paged 8-bit AdamW, step in backward
    if setup.rungs >= 5:
        grad = 0
    if grad == 0 and "torchtune" in setup.system.name:
        # The step in backward takes a gradient at once; the largest is the embedding's.
        table = setup.shape.vocab * setup.shape.dim
        return params * (param + optimizer) + table * state.grad, 0
    buckets = setup.system.ddp_buckets and "ddp" in setup.row.cell("sharding").lower()
    if buckets and stage == 0 and shards > 1:
        param += state.grad
    return params * (param + optimizer), params * grad


def _adapter_states(setup: Setup, params: int) -> tuple[float, float]:
    shape, system = setup.shape, setup.system
    linear = shape.layers * (shape.attention_params + shape.ffn_params())
    per_linear = _QUANTIZED if _quantized(setup.row) else 2
    base = linear * per_linear + (params - linear) * 2
    widths = 4 * shape.q_dim + 2 * (shape.dim + shape.kv_dim) + 3 * (shape.dim + shape.ffn)
    adapters = system.adapter_rank * widths * shape.layers * system.adapter_state
    if setup.stage < 3 and "fsdp" not in setup.row.cell("sharding").lower():
        return base + adapters, 0
    if system.keeps_full:
        return base / setup.shards + base + adapters, 0
    return (base + adapters) / setup.shards, 0


def _quantized(row: Row) -> bool:
    return "qlora" in f"{row.cell('system')} {row.cell('notes')}".lower()


def _full_copies(setup: Setup, tape: Tape) -> float:
    """Return the bytes of parameters that are gathered at once under stage 3."""
    if setup.stage < 3 or setup.shards == 1 or (setup.adapters and setup.system.keeps_full):
        return 0
    if setup.system.keeps_full:
        return setup.state.param * tape.num_params
    size = 4 if setup.run.dtype == "float32" else 2
    if setup.run.pipeline > 1:
        # A pipeline gathers its stage once a step, and reduces float32 gradients at its end.
        return (size + 4) * tape.num_params
    layer = setup.shape.layer_params() / setup.run.tp
    if setup.adapters and _quantized(setup.row):
        layer *= _QUANTIZED / size
    root = setup.shape.vocab * setup.shape.dim / setup.run.tp
    return size * (root + setup.system.full_layers * layer)


def _step_gradients(setup: Setup, tape: Tape) -> float:
    """Return what the optimizer's step adds where gradients were counted nowhere else."""
    offloaded = setup.row.cell("offload").lower() not in ("", "no")
    foreach = setup.run.dtype == "float32" and setup.stage != 1 and not offloaded
    shards = setup.shards if setup.stage >= 2 else 1
    each = setup.state.grad + setup.system.step_temporary
    return each * tape.num_params / shards if foreach else 0


def published_bytes(row: Row, system: System) -> float | None:
    """Return the published peak in bytes per GPU, or None where the row has none."""
    value = row.number("mem_value")
    if value is None or row.says("mem_value", "oom"):
        return None
    unit = row.cell("mem_unit")
    binary = system.binary_unit or "fits GiB" in unit
    million, billion = (2**20, GIB) if binary else (1e6, 1e9)
    scale = {"GiB": GIB, "MiB": 2**20, "MB": million}.get(unit.split(" ")[0], billion)
    if "FREE" in unit:
        capacity = row.number("gpu_mem_gb")
        return None if capacity is None else (capacity - value) * scale
    if row.says("mem_kind", "total over"):
        return value * scale / row.ranks
    if row.says("mem_kind", "component"):
        return None
    capacity = row.number("gpu_mem_gb")
    if capacity is not None and value * scale > capacity * GIB:
        raise Unmodelled("prints more than the card has")
    return value * scale
