"""Predict a published run's peak memory: states, full copies, activations, loss, overhead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from _published_flags import Flags, flags_of
from _published_overhead import Measured
from _published_rows import Row, Unmodelled, resolve_shape
from _published_systems import POLICIES, MemoryKind, StateBytes, System, system_of

from shardwise.plan.model.activations import Execution, LossKind, logit_bytes
from shardwise.plan.model.shaped import shape_tape
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import LiveBytes, Tape, Visit, Work

GIB = 2**30
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
    flags: Flags
    shape: DecoderShape
    run: Execution
    stage: int
    shards: int
    state: StateBytes

    @property
    def adapters(self) -> bool:
        """Tell whether adapters learn and the weights are frozen."""
        return self.flags.adapters != "none"

    @property
    def steps_in_backward(self) -> bool:
        """Tell whether a gradient is used as soon as it is there."""
        return self.flags.step_in_backward or self.system.step_in_backward


def setup_of(row: Row) -> Setup:
    """Read a row.

    **Raises** Unmodelled where a size is neither told nor known.
    """
    flags = flags_of(row)
    shape, system = resolve_shape(row), system_of(system_text(row, flags))
    stage = system.stage if flags.stage is None else flags.stage
    if row.ranks == 1 and flags.stage is None:
        stage = 0
    state = system.states(flags.policy, flags.dtype, stage)
    moments = {"8bit": 0.25, "4bit": 0.125, "sgd": 0.0, "one_moment": 0.5}.get(flags.optimizer)
    if moments is not None:
        state = replace(state, moments=8 * moments if moments < 0.5 else state.moments * moments)
    if system.paged_optimizer or (flags.paged and flags.optimizer == "8bit"):
        state = replace(state, moments=0)  # they are where there is room: counted as away
    return Setup(
        row=row,
        system=system,
        flags=flags,
        shape=shape,
        run=_execution(row, system, shape, flags),
        stage=stage,
        shards=shards_of(row, flags),
        state=state,
    )


def shards_of(row: Row, flags: Flags) -> int:
    """Return the number of ranks that share one copy of what is sharded."""
    ranks = row.data_parallel * row.count("cp", 1)
    return min(flags.shard_group or ranks, ranks)


def system_text(row: Row, flags: Flags) -> str:
    """Return what a system's pattern is searched in."""
    several = " multi" if row.count("n_gpus", 1) > 1 else ""
    adapters = f" {flags.adapters}" if flags.adapters != "none" else ""
    full = " full finetune" if flags.full_finetune else ""
    experts = " moe" if row.count("ep", 1) > 1 else ""
    return f"{row.cell('system')}{several}{adapters}{full}{experts}".lower()


def memory_kind(row: Row, system: System) -> MemoryKind:
    """Return what a memory column means, by its own words or else as the system prints it."""
    cell = f"{row.cell('mem_kind')} {row.cell('mem_unit')}".lower()
    if "reserved" in cell:
        return "reserved"
    if re.search(r"allocated|\bactive\b", cell):
        return "allocated"
    if re.search(r"nvidia-smi|gpu memory|device|free|used", cell):
        return "device"
    return system.memory


def _execution(row: Row, system: System, shape: DecoderShape, flags: Flags) -> Execution:
    pp, micro = row.count("pp", 1), row.count("micro_batch", 1)
    if pp > 1 and row.says("notes", "batch per dp group"):
        raise Unmodelled("micro-batch of the pipeline not told")
    batch = row.number("global_batch")
    in_step = int(batch // (micro * row.data_parallel)) if batch else 8 * pp
    titan = "titan" in row.cell("system").lower()
    if titan and pp > 1:  # its batch is a step's; it is cut into one micro-batch per stage
        micro, in_step = max(1, micro // pp), pp
    layers = shape.layers
    if system.embedding_is_a_layer and pp > 1:
        layers_here = max(1, math.ceil((layers + 2) / pp) - 1)
    else:
        layers_here = math.ceil(layers / pp)
    told = flags.checkpointing or system.checkpointing
    implementation = system.compiled if flags.compiled else system.implementation
    if system.by_transformers and not shape.gated:
        implementation = "eager_tanh_gelu"
    return Execution(
        micro_batch=micro,
        seq=_seq(row),
        activation_checkpointing=system.selective if told == "selective" else told,
        implementation=implementation,
        loss=_loss(row, system, flags),
        dtype=flags.dtype,
        matmul_dtype="float8" if flags.float8 else None,
        flash=system.flash and (shape.gated or not system.by_transformers),
        dropout=system.dropout or (system.by_transformers and not shape.gated),
        trained=flags.adapters == "none",
        float32_adapters=flags.adapters != "none" and system.float32_adapters,
        tp=row.count("tp", 1),
        sequence_parallel=system.sequence_parallel or flags.sequence_parallel,
        cp=row.count("cp", 1),
        ep=row.count("ep", 1) if shape.experts is not None else 1,
        pipeline=pp,
        chunks=_chunks(row, system),
        micro_batches=max(1, in_step),
        rank_layers=layers_here,
        keeps_outputs=system.keeps_outputs,
    )


def _chunks(row: Row, system: System) -> int:
    told = re.search(r"(?:vpp|virtual pipeline\D*) ?(\d+)", row.cell("notes").lower())
    if told:
        return int(told[1])
    return 2 if row.says("notes", "interleaved") else system.chunks


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


def _loss(row: Row, system: System, flags: Flags) -> LossKind:
    if row.count("tp", 1) > 1:
        return system.tp_loss
    if flags.loss is not None:
        return flags.loss
    on_ladder = flags.rung and flags.rung != "packed"  # its order says what loss there is
    return (system.compiled_loss if flags.compiled and not on_ladder else None) or system.loss


def memory_of(setup: Setup) -> Memory:
    """Return the largest of all moments, on the first and the last pipeline stage."""
    stages = sorted({0, setup.run.pipeline - 1})
    found = [m for position in stages for m in _moments(setup, position)]
    return max(found, key=lambda m: m.total)


def _moments(setup: Setup, position: int) -> Iterator[Memory]:
    """Yield what is there at each moment of a micro-batch, and at the step."""
    tape = shape_tape(setup.shape, replace(setup.run, pipeline_rank=position))
    rest, grads = _states(setup, tape)
    full = _full_copies(setup, tape)
    yield Memory(rest + max(grads, _step_gradients(setup, tape)), 0, 0, 0, 0)
    # Gradients that persist, and those that the allocator cannot give back to the loss.
    always = memory_kind(setup.row, setup.system) != "allocated" or setup.system.accumulates
    written = sum(e.net.grads for e in tape.events if isinstance(e, Work))
    beside, live = _bucket(setup) + _dequantized(setup), LiveBytes()
    for event in tape.events:
        if isinstance(event, Visit):
            continue
        peak, kept = event.peak, 1 - setup.flags.away.activations
        # What a rank has of the gradients written so far; one that is used at once is whole.
        share = 1.0 if always else (live.grads + event.peak.grads) / written if written else 0.0
        now = peak.grads if setup.steps_in_backward and not setup.adapters else grads * share
        yield Memory(
            states=rest + now,
            full_copies=full,
            activations=(live.activations + peak.activations) * kept,
            logits=live.logits + peak.logits,
            temporary=live.temporary + peak.temporary + beside,
        )
        live = _sum(live, event.net)


def _sum(live: LiveBytes, net: LiveBytes) -> LiveBytes:
    return LiveBytes(
        live.activations + net.activations,
        live.temporary + net.temporary,
        live.logits + net.logits,
        live.grads + net.grads,
    )


def _bucket(setup: Setup) -> float:
    """Return the flat float32 copy through which BF16_Optimizer reduces 5e8 elements or more.

    A bucket is closed by the tensor that fills it, so one that is larger than all is one alone.
    """
    if setup.state != POLICIES["bf16_optimizer"]:
        return 0.0
    return 4 * max(5e8, setup.shape.vocab * setup.shape.dim / setup.run.tp)


def _states(setup: Setup, tape: Tape) -> tuple[float, float]:
    """Return bytes of parameters and optimizer, and of gradients, that a rank has."""
    params, state, stage, away = tape.num_params, setup.state, setup.stage, setup.flags.away
    if setup.adapters:
        return _adapter_states(setup, params)
    shards = setup.shards
    param = state.param / (shards if stage >= 3 else 1) * (1 - away.params)
    grad = state.grad / (shards if stage >= 2 else 1) * (1 - away.grads)
    optimizer = state.optimizer / (shards if stage >= 1 else 1) * (1 - away.optimizer)
    if setup.steps_in_backward:
        return params * (param + optimizer), 0
    if setup.run.ep > 1:
        # Experts lie on other ranks than what all share, and are sharded over what is left.
        experts = (p for u in tape.units if u.experts_over is not None for p in u.params)
        spread = sum(math.prod(p.shape) for p in experts)
        others = max(1, shards * setup.run.tp // setup.run.ep)
        less = [state.param if stage >= 3 else 0, state.grad if stage >= 2 else 0]
        more = [each * spread * (1 / others - 1 / shards) for each in (*less, state.optimizer)]
        rest = more[0] * (1 - away.params) + more[2] * (1 - away.optimizer) * (stage >= 1)
        return params * (param + optimizer) + rest, params * grad + more[1] * (1 - away.grads)
    if setup.system.ddp_buckets and stage == 0 and "ddp" in setup.row.cell("sharding").lower():
        param += state.grad if shards > 1 else 0
    return params * (param + optimizer), params * grad


def _adapter_states(setup: Setup, params: int) -> tuple[float, float]:
    shape, system = setup.shape, setup.system
    linear = shape.layers * (shape.attention_params + shape.ffn_params())
    per_linear, rest = (_QUANTIZED, system.adapter_rest) if _quantized(setup) else (2, 2)
    base = linear * per_linear + (params - linear) * rest
    widths = 4 * shape.q_dim + 2 * (shape.dim + shape.kv_dim) + 3 * (shape.dim + shape.ffn)
    rank = setup.flags.adapter_rank or system.adapter_rank
    adapters = rank * widths * shape.layers * system.adapter_state
    if setup.stage < 3:
        return base + adapters, 0
    kept = base if system.keeps_full else 0
    return kept + (base + adapters) / setup.shards * (1 - setup.flags.away.params), 0


def _dequantized(setup: Setup) -> float:
    """Return the bytes of the largest quantized weight while a product reads it, in 16 bit."""
    return 2.0 * setup.shape.dim * setup.shape.ffn if _quantized(setup) else 0.0


def _quantized(setup: Setup) -> bool:
    return setup.flags.adapters == "qlora"


def _full_copies(setup: Setup, tape: Tape) -> float:
    """Return the bytes of parameters that are gathered at once under stage 3.

    One rank alone gathers nothing, but what rests on the host is brought in the same way.
    """
    alone = setup.shards == 1 and not setup.flags.away.params
    if setup.stage < 3 or alone or (setup.adapters and setup.system.keeps_full):
        return 0
    if setup.system.keeps_full:
        return setup.state.param * tape.num_params
    size = 4 if setup.run.dtype == "float32" else 2
    if setup.run.pipeline > 1:
        # A pipeline gathers its stage once a step, and reduces float32 gradients at its end.
        return (size + 4) * tape.num_params
    layer = setup.shape.layer_params() / setup.run.tp
    if _quantized(setup):
        layer *= _QUANTIZED / size
    tables = 1 if setup.shape.tied or not setup.system.whole_root else 2
    root = tables * setup.shape.vocab * setup.shape.dim / setup.run.tp
    return size * (root + setup.system.full_layers * layer)


def _step_gradients(setup: Setup, tape: Tape) -> float:
    """Return what the optimizer's step adds where gradients were counted nowhere else."""
    offloaded = setup.flags.away.optimizer == 1
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


def measure(row: Row) -> list[Measured]:
    """Return a row's tensors as predicted beside its memory column; nothing where it has none."""
    setup = setup_of(row)
    published = published_bytes(row, setup.system)
    if published is None:
        return []
    memory = memory_of(setup)
    tensors = memory.total
    if not math.isfinite(tensors) or published <= 0:
        raise Unmodelled("memory column not understood")
    kind = memory_kind(row, setup.system)
    groups = sum(row.count(name, 1) > 1 for name in ("tp", "pp", "cp")) + (row.data_parallel > 1)
    return [
        Measured(
            id=row.id,
            page=row.cell("source"),
            system=setup.system.name,
            kind=kind,
            tensors=tensors,
            logits=_uneven_logits(setup),
            groups=groups,
            published=published,
        )
    ]


def _uneven_logits(setup: Setup) -> float:
    """Return what transformers' loss makes of the logits, whose blocks are of unequal sizes."""
    if not setup.run.loss.startswith("transformers"):
        return 0.0
    return float(logit_bytes(setup.shape, setup.run, "forward"))
