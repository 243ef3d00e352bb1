"""How one rank runs a decoder, and the bytes that each layer and the loss make under it.

Note [A rank of a pipeline]
Stage i of p holds its share of the layers; the first has the embedding, the last the head and the
loss. Under 1F1B, when stage i begins its first backward, p - i micro-batches are in flight
(Narayanan et al. 2021, section 2.2.1); with v chunks per stage the first stage keeps
1 + (p - 1) / (p v) times the layers of all p (Korthikanti et al. 2022, section 4.2.3).

Where a step has no more micro-batches than a stage may have in flight, all of them are at its first
backward alone, before any gradient is there; from the second on there is one less. So it is under
GPipe on every stage, which runs all forward passes of a step before the first backward.

Note [Bytes per logit]
The loss is the largest moment of a small model with a large vocabulary, and what it costs depends
on how it is written. `LOSSES` counts, per local logit, what is kept after the head, at the peak of
the loss's forward, and at that of its backward. Eager: the logits, a float32 copy of them, the
output of log-softmax, and in backward the gradients of both. Checked with torchtune's 3B ladder:
eager to chunked saves 8.3 GiB by these figures (published 8.1). With transformers' own loss a
loop of one's own needs 0.62 MB per token more for a 7B of 32,000 tokens (fsdp_qlora, allocated),
by these figures 0.65; with its Trainer a token of Qwen-7B needs 2.9 MB (Qwen README), here 2.9.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Checkpointing as Checkpointing
from shardwise.plan.candidate import ContextMethod
from shardwise.plan.candidate import LossKind as LossKind
from shardwise.plan.model.activations import Implementation, kept_lines, layer_facts, line_bytes
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.sizes import DTYPE_BYTES, DtypeName


@dataclass(frozen=True)
class LossBytes:
    """Bytes per local logit: ``x`` elements of compute dtype plus so many bytes; see the Note."""

    kept: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]


LOSSES: dict[LossKind, LossBytes] = {
    "eager": LossBytes((1, 4), (1, 8), (1, 12)),
    "held": LossBytes((1, 4), (1, 8), (1, 12)),
    "freed": LossBytes((0, 4), (1, 8), (0, 12)),  # eager, and the logits go when the loss is there
    "transformers": LossBytes((0, 4), (0, 12), (0, 12)),
    # Trainer's: one float32 copy more, as outputs are converted and held while backward runs.
    "transformers_autocast": LossBytes((0, 8), (0, 16), (0, 16)),
    "chunked": LossBytes((1, 0), (1, 1), (2, 1.5)),
    "compiled": LossBytes((1, 0), (1, 0), (2, 0)),
    "vocab_parallel": LossBytes((0, 4), (1, 8), (1, 4)),  # Megatron-LM: in place after one copy
    "loss_parallel": LossBytes((1, 4), (1, 12), (1, 16)),  # DTensor: exp and product beside both
    "fused": LossBytes((0, 0), (0, 0), (0, 0)),
}


@dataclass(frozen=True)
class Execution:
    """How one rank runs the decoder.

    ``chunks`` are the interleaved chunks of a stage; ``micro_batches`` those of one step;
    ``all_forward_first``: they are run as GPipe does. ``cp_method``: how context ranks attend.
    ``causal`` says whether the attention kernel skips what the mask hides. ``trained`` False: the
    weights are frozen, adapters learn; ``float32_adapters``: those read their inputs in float32.
    ``keeps_outputs``: a stage keeps what it sent to the next
    one until its backward. ``first_layer`` and ``rank_layers`` say which layers a stage has, where
    they are not shared out evenly. ``large_units``: an embedding or a head as large as a layer is a
    unit, and one layer alone is none. ``on_cpu``: attention over parts of a sequence needs masks
    there.
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
        """Whether kernels and bytes are counted one by one, as eager PyTorch runs them."""
        return self.implementation in ("decoder", "transformers")

    @property
    def as_in_torch(self) -> bool:
        """Whether products and attention are the calls of eager PyTorch; compiled layers too."""
        return self.by_kernel or self.implementation == "compiled"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.micro_batch * self.seq // self.cp

    @property
    def first(self) -> bool:
        """Whether the embedding is here."""
        return self.pipeline_rank == 0

    @property
    def last(self) -> bool:
        """Whether the head and the loss are here."""
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
        """How many more micro-batches are in flight at the first backward than at any later one."""
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


@lru_cache(maxsize=256)
def layer_bytes(shape: DecoderShape, run: Execution) -> Mapping[str, int]:
    """Return the bytes that one layer makes for its backward, by line, without checkpointing."""
    return {
        line.name: line_bytes(
            line,
            shape,
            tokens=run.tokens,
            seq=run.seq,
            dtype=run.dtype,
            tp=run.tp,
            ep=run.ep,
            sequence_parallel=run.sequence_parallel,
            other_kv=other_kv_width(shape, run),
        )
        for line in kept_lines(_facts(shape, run))
    }


def other_kv_width(shape: DecoderShape, run: Execution) -> int:
    """Return the width of keys, or values, that attention reads beside those of a rank's tokens.

    Context ranks gather those of the others; by heads, or in a ring, they repeat their own.
    """
    if run.cp == 1:
        return 0
    if run.cp_method == "gather":
        return shape.kv_dim * (run.cp - 1)
    return shape.kv_dim * (repeated_heads(shape, run) - 1)


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


def _facts(shape: DecoderShape, run: Execution) -> frozenset[str]:
    return layer_facts(
        shape,
        run.implementation,
        flash=run.flash,
        dropout=run.dropout,
        trained=run.trained,
        spread=run.ep > 1,
        many_heads=shape.heads > run.tp or run.cp > 1,
        float32_adapters=run.float32_adapters,
    )


def kept_layer_bytes(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes that one layer keeps from its forward to its backward."""
    made = layer_bytes(shape, run)
    if run.activation_checkpointing == "none":
        return sum(made.values())
    if run.activation_checkpointing == "selective":
        lines = kept_lines(_facts(shape, run))
        return sum(made[x.name] for x in lines if x.group != "core" or run.flash)
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
    what = run.activation_checkpointing
    return what in ("per_op", "full") or (what == "selective" and not run.flash)


def stream_bytes(shape: DecoderShape, run: Execution) -> int:
    """Bytes of one tensor of the residual stream."""
    degree = run.tp if run.sequence_parallel else 1
    return run.tokens * shape.dim * DTYPE_BYTES[run.dtype] // degree


def logit_bytes(shape: DecoderShape, run: Execution, when: str) -> int:
    """Return bytes of logits and loss: ``kept``, or at the peak of ``forward`` or ``backward``."""
    elements, extra = getattr(LOSSES[run.loss], when)
    logits = run.tokens * shape.vocab // run.tp
    return round(logits * (elements * DTYPE_BYTES[run.dtype] + extra))


def gathered_bytes(shape: DecoderShape, run: Execution) -> int:
    """Bytes of the whole sequence beside a rank's part, under sequence parallelism."""
    if not run.sequence_parallel or run.tp == 1:
        return 0
    return run.tokens * shape.dim * DTYPE_BYTES[run.dtype]
