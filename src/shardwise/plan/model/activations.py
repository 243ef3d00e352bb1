"""Bytes that a decoder layer and the loss make on one rank, and what a rank keeps of them.

Note [Bytes kept per token]
A line of ``kept`` in ``data/layers.toml`` is so many elements per token and element of a width.
``compute`` elements have the computing dtype, ``mask`` ones 1 byte, ``float32`` ones 4 bytes in any
dtype; ``upcast`` ones are copies in float32, which do not exist if the computing dtype is float32.
Tensor parallelism divides ``tensor`` lines, and ``sequence`` lines only together with sequence
parallelism. It never divides ``whole`` lines, and ``routed`` ones only if experts are spread, since
the ranks of a tensor group then share their tokens. With 2-byte compute, dropout and eager
attention a GPT layer comes to s b h (34 + 5 a s / h), of which 10 are ``sequence`` and
24 + 5 a s / h ``tensor``: every cell of the table of Korthikanti et al. 2022 (arXiv:2205.05198,
section 4).

Note [Eager layers keep more]
A fused or compiled layer keeps the table's plain lines. Written in eager PyTorch it keeps copies
too: the norm's input in float32, the activation's output apart from the product, keys and values
repeated for every query head. Each is a line with a name, so an implementation is a set of names.
Sums checked: Llama-3.1-8B eager 52 h + 2 h (transformers, measured 56 h), torchtune's 3B ladder
from eager to compiled 8.8 GiB (measured 9.0).

Note [The built-in decoder]
It is eager too, and has further lines: norms that keep their input and its scaled copy in float32,
attention's output as the kernel wrote it and as the projection reads it, whole inputs of
projections under tensor parallelism (torch's parallel layers gather them once), and the keys and
values of all context ranks. tests/campaigns/composed.py compares the sums with the allocator's
trace. Llama, Mistral and Qwen of transformers differ in a few lines: their norms scale in the
computing dtype, and heads are not copied to lie side by side. test_one_model.py compares these with
traces.

Note [A rank of a pipeline]
Stage i of p holds its share of the layers; the first has the embedding, the last the head and the
loss. Under 1F1B, when stage i begins its first backward, p - i micro-batches are in flight
(Narayanan et al. 2021, section 2.2.1); with v chunks per stage the first stage keeps
1 + (p - 1) / (p v) times the layers of all p (Korthikanti et al. 2022, section 4.2.3).

If a step has no more micro-batches than a stage may have in flight, all of them are in flight at
its first backward only, before any gradient exists; from the second on there is one less. GPipe
runs all forward passes of a step first, so this holds on every stage.

Note [Bytes per logit]
The loss is the largest moment of a small model with a large vocabulary, and its bytes depend on how
it is written. ``losses`` counts them per local logit: kept after the head, at the peak of the
loss's forward, and at that of its backward. Eager: the logits, a float32 copy of them, the output
of log-softmax, and in backward the gradients of both. Checked with torchtune's 3B ladder: eager to
chunked saves 8.3 GiB by these figures (published 8.1). With transformers' own loss a plain loop
needs 0.62 MB per token more for a 7B of 32,000 tokens (fsdp_qlora, allocated), by these figures
0.65; with its Trainer a token of Qwen-7B needs 2.9 MB (Qwen README), here 2.9.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Checkpointing as Checkpointing
from shardwise.plan.candidate import ContextMethod
from shardwise.plan.candidate import LossKind as LossKind
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.sizes import DTYPE_BYTES, DtypeName
from shardwise.plan.tables import read_table

# fmt: off
Implementation = Literal[
    "fused", "compiled", "eager", "eager_repeat_kv", "eager_double_norm", "eager_tanh_gelu",
    "decoder", "transformers",
]
# fmt: on
# The names of lines' `only` that an implementation has.
_IMPLEMENTATIONS: dict[Implementation, str] = {
    "fused": "megatron",
    "compiled": "megatron",
    "eager": "megatron eager",
    "eager_repeat_kv": "megatron eager repeat_kv",
    "eager_double_norm": "megatron eager repeat_kv double_norm",
    "eager_tanh_gelu": "megatron eager tanh_gelu",
    "decoder": "decoder own eager",
    "transformers": "decoder transformers eager",
}


@dataclass(frozen=True)
class Execution:
    """How one rank runs the decoder.

    ``chunks`` are the interleaved chunks of a stage, ``micro_batches`` those of one step. If
    ``all_forward_first``, they run as in GPipe. ``causal``: the attention kernel skips masked
    scores. ``trained`` False: the weights are frozen and adapters learn; ``float32_adapters`` read
    their inputs in float32. ``keeps_outputs``: a stage keeps its output until its backward.
    ``first_layer`` and ``rank_layers`` say which layers a stage has, if they are not shared out
    evenly. ``large_units``: an embedding or a head as large as a layer is a unit, and a single
    layer is not. ``on_cpu``: attention over parts of a sequence needs masks there.
    """

    micro_batch: int
    seq: int
    activation_checkpointing: Checkpointing = "none"
    implementation: Implementation = "fused"
    loss: LossKind = "eager"
    dtype: DtypeName = "bfloat16"
    matmul_dtype: DtypeName | None = None
    flash: bool = True
    causal: bool = True
    dropout: bool = False
    trained: bool = True
    float32_adapters: bool = False
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_method: ContextMethod = "gather"
    ep: int = 1
    pipeline: int = 1
    pipeline_rank: int = 0
    chunks: int = 1
    micro_batches: int = 1
    all_forward_first: bool = False
    rank_layers: int | None = None
    first_layer: int | None = None
    keeps_outputs: bool = False
    large_units: bool = False
    on_cpu: bool = False

    def __post_init__(self) -> None:
        """Refuse degrees and sizes that are not positive."""
        degrees = "tp", "cp", "ep", "pipeline"
        for name in ("micro_batch", "seq", *degrees, "chunks", "micro_batches"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"Execution.{name} must be at least 1, got {value}")
        if not 0 <= self.pipeline_rank < self.pipeline:
            raise ConfigError(
                f"Execution.pipeline_rank must be in 0 .. {self.pipeline - 1}, got "
                f"{self.pipeline_rank}"
            )

    @property
    def by_kernel(self) -> bool:
        """Tell whether kernels and bytes are counted one by one, as eager PyTorch runs them."""
        return self.implementation in ("decoder", "transformers")

    @property
    def as_in_torch(self) -> bool:
        """Tell whether products and attention are the calls of eager PyTorch or torch.compile."""
        return self.by_kernel or self.implementation == "compiled"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.micro_batch * self.seq // self.cp

    @property
    def first(self) -> bool:
        """Tell whether this stage has the embedding."""
        return self.pipeline_rank == 0

    @property
    def last(self) -> bool:
        """Tell whether this stage has the head and the loss."""
        return self.pipeline_rank == self.pipeline - 1

    def layers_here(self, shape: DecoderShape) -> int:
        """Return the number of layers of this stage (the largest share)."""
        return self.rank_layers or -(-shape.layers // self.pipeline)

    def first_here(self, shape: DecoderShape) -> int:
        """Return the number of the first layer of this stage."""
        layers = self.layers_here(shape)
        if self.first_layer is not None:
            return self.first_layer
        return max(0, shape.layers - layers) if self.last else self.pipeline_rank * layers

    @property
    def in_flight(self) -> float:
        """Micro-batches' worth of this stage's activations at its first backward; see the Note."""
        behind = self.pipeline - self.pipeline_rank
        if self.all_forward_first:
            return self.micro_batches
        if self.chunks > 1:
            warmup = 2 * (behind - 1) + (self.chunks - 1) * self.pipeline + 1
            return min(warmup, self.micro_batches * self.chunks) / self.chunks
        return min(behind, self.micro_batches)

    @property
    def first_in_flight(self) -> int:
        """Return how many more micro-batches are in flight at the first backward than later."""
        is_short = self.chunks == 1 and self.micro_batches <= self.pipeline - self.pipeline_rank
        return int((is_short or self.all_forward_first) and self.micro_batches > 1)


# Per-op checkpointing keeps the attention's output and every second matrix product of a layer
# (query, value, gate), as torchtitan's policy does; in eager mode the product after the gate's,
# which nothing needs, stays too.
_PER_OP_LINES = {"attention output": 1.0, "log-sum-exp": 1.0, "query": 1.0, "key, value": 0.5}


def ffn_columns(shape: DecoderShape, run: Execution) -> int:
    """Return the columns of the feed-forward's inner product that a rank has, for one token.

    Routed experts are whole over tp. Where ep spreads them, ranks of one tp group share the tokens
    instead; where it does not, all compute the same rows.
    """
    experts = shape.experts
    if experts is None:
        return shape.ffn // run.tp
    routed = experts.top_k * experts.ffn // (run.tp if run.ep > 1 else 1)
    return experts.shared * experts.ffn // run.tp + routed


@dataclass(frozen=True)
class _Line:
    """``count`` elements of ``kind`` per token and element of ``width``; see the Note.

    ``only`` names what must hold for the line to exist (all of them); see `_facts`.
    """

    name: str
    width: str
    count: float
    kind: str
    split: str
    group: str
    only: frozenset[str]


@cache
def _lines() -> tuple[_Line, ...]:
    return tuple(
        _Line(name, width, count, kind, split, group, frozenset(only.split()))
        for name, width, count, kind, split, group, only, _ in read_table("layers")["kept"]
    )


@lru_cache(maxsize=256)
def layer_bytes(shape: DecoderShape, run: Execution) -> Mapping[str, int]:
    """Return the bytes that one layer makes for its backward, by line, without checkpointing."""
    facts, experts, latent = _facts(shape, run), shape.experts, shape.latent
    chosen = 0 if experts is None else experts.top_k
    widths = {
        "dim": shape.dim,
        "q": shape.q_dim,
        "kv": shape.kv_dim,
        "other_kv": _other_kv_width(shape, run),
        "repeated_kv": shape.q_dim - shape.kv_dim,
        "ffn": shape.ffn if experts is None else experts.shared * experts.ffn,
        "heads": shape.heads,
        "scores": shape.heads * run.seq,
        "token": 1,
        "experts": 0 if experts is None else experts.num,
        "choices": chosen,
        "routed": chosen * shape.dim,
        "routed_ffn": 0 if experts is None else chosen * experts.ffn,
        "latent": 0 if latent is None else latent.kv_rank + latent.q_rank,
    }
    compute, upcast = DTYPE_BYTES[run.dtype], 0 if run.dtype == "float32" else 4
    sizes = {"compute": compute, "mask": 1, "float32": 4, "upcast": upcast, "int64": 8}
    divides = {"tensor": run.tp, "sequence": run.tp if run.sequence_parallel else 1, "whole": 1}
    divides["routed"] = run.tp if run.ep > 1 else 1
    return {
        x.name: round(x.count * sizes[x.kind] * widths[x.width] * run.tokens / divides[x.split])
        for x in _lines()
        if facts >= x.only
    }


def _facts(shape: DecoderShape, run: Execution) -> frozenset[str]:
    """Return the names that the lines' ``only`` ask for.

    ``many_heads``: a rank has several heads, whose outputs are copied to lie side by side.
    """
    facts = {
        "flash": run.flash,
        "scores": not run.flash,
        "dropout": run.dropout,
        "trained": run.trained,
        "gated": shape.gated,
        "rms": shape.norm == "rms",
        "layer": shape.norm == "layer",
        "rotary": shape.norm == "rms" and not shape.positions,
        "qk_norm": shape.qk_norm,
        "experts": shape.experts is not None,
        "latent": shape.latent is not None,
        "spread": run.ep > 1,
        "many_heads": shape.heads > run.tp or run.cp > 1,
        "float32_adapters": run.float32_adapters,
    }
    held = {name for name, holds in facts.items() if holds}
    return frozenset(held | set(_IMPLEMENTATIONS[run.implementation].split()))


def _other_kv_width(shape: DecoderShape, run: Execution) -> int:
    """Return the width of keys, or values, that attention reads beside those of a rank's tokens.

    Context ranks gather those of the others; by heads, or in a ring, they repeat their own.
    """
    if run.cp == 1:
        return 0
    others = run.cp if run.cp_method == "gather" else repeated_heads(shape, run)
    return shape.kv_dim * (others - 1)


def repeated_heads(shape: DecoderShape, run: Execution) -> int:
    """Return how often context ranks repeat each head of keys and values that they exchange.

    By heads, so that all ranks get as many; in a ring, one for each head of the queries.
    """
    if run.cp_method == "gather":
        return 1
    groups = max(1, shape.heads // shape.kv_heads)
    if run.cp_method == "ring":
        return groups
    here = max(1, shape.kv_heads // run.tp)
    return next(n for n in range(1, groups + 1) if not groups % n and not here * n % run.cp)


def kept_layer_bytes(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes that one layer keeps from its forward to its backward."""
    made = layer_bytes(shape, run)
    if run.activation_checkpointing == "none":
        return sum(made.values())
    if run.activation_checkpointing == "selective":
        core = {line.name for line in _lines() if line.group == "core"} if not run.flash else ()
        return sum(num for name, num in made.items() if name not in core)
    stream = stream_bytes(shape, run)
    if run.activation_checkpointing == "full":
        return stream
    dead = stream if run.by_kernel or run.implementation.startswith("eager") else 0
    return stream + saved_by_op(made) + dead


def saved_by_op(made: Mapping[str, int]) -> int:
    """Return the bytes that per-op checkpointing keeps of what a layer makes, but for its input."""
    saved = sum(round(share * made.get(name, 0)) for name, share in _PER_OP_LINES.items())
    return saved + made["activation input"]


def runs_again(run: Execution) -> bool:
    """Tell whether layers are computed again, in part or all, in backward.

    Selective checkpointing leaves out the scores, of which a fused kernel keeps none.
    """
    level = run.activation_checkpointing
    return level in ("per_op", "full") or (level == "selective" and not run.flash)


def stream_bytes(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes of one tensor of the residual stream."""
    degree = run.tp if run.sequence_parallel else 1
    return run.tokens * shape.dim * DTYPE_BYTES[run.dtype] // degree


def logit_bytes(shape: DecoderShape, run: Execution, when: str) -> int:
    """Return bytes of logits and loss: ``kept``, or at the peak of ``forward`` or ``backward``."""
    place = ("kept", "forward", "backward").index(when)
    elements, extra = read_table("layers")["losses"][run.loss][place]
    logits = run.tokens * shape.vocab // run.tp
    return round(logits * (elements * DTYPE_BYTES[run.dtype] + extra))


def gathered_bytes(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes of the whole sequence beside a rank's part, with sequence parallelism."""
    is_cut = run.sequence_parallel and run.tp > 1
    return run.tokens * shape.dim * DTYPE_BYTES[run.dtype] if is_cut else 0
