"""Bytes and operations of a decoder's layers and loss on one rank, by ``data/layers.toml``.

Note [Bytes kept per token]
A line of ``kept`` in ``data/layers.toml`` is so many elements per token and element of a width.
``compute`` elements have the computing dtype, ``float32`` ones 4 bytes in any dtype; ``upcast``
ones are copies in float32, which do not exist if the computing dtype is float32. Tensor parallelism
divides ``tensor`` and ``sequence`` lines. It never divides ``whole`` lines, and ``routed`` ones
only if experts are spread, since the ranks of a tensor group then share their tokens. The lines
marked K are those of Korthikanti et al. 2022 (arXiv:2205.05198, section 4), without dropout and
with a fused attention kernel, which keeps no scores. A line counts if all that it names holds, see
`facts_of`.

Note [Eager layers keep more]
A compiled layer keeps the table's plain lines. Written in eager PyTorch it keeps copies too: the
norm's input in float32, the activation's output beside the product, norms that keep their input
and its scaled copy in float32, attention's output as the kernel wrote it and as the projection
reads it, whole inputs of projections under tensor parallelism (torch's parallel layers gather them
once), and the keys and values of all context ranks. tests/campaigns/composed.py compares the sums
with the allocator's trace. Llama, Mistral and Qwen of transformers differ in a few lines: their
norms scale in the computing dtype, and heads are not copied to lie side by side.
test_one_model.py compares these with traces.

Note [A rank of a pipeline]
Stage i of p holds its share of the layers, the first stages one more if these do not divide; the
first has the embedding, the last the head and the loss. Under 1F1B, when stage i begins its first
backward, p - i micro-batches are in flight (Narayanan et al. 2021, section 2.2.1).

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

Note [Bytes of elementwise operations]
In a compiled layer, and in one with experts, each byte that a layer keeps is written once and read
once by some elementwise operation, and the stream passes four times more through residual
additions; what fusion saves, temporaries that are not kept take. Step times of published runs
(benchmarks/published.py) fit this and not half of it.

Note [A line of the table]
A line of ``eager`` in ``data/layers.toml`` counts what one pass of a layer moves per token and
element of a width in eager PyTorch, summed over its kernels. ``copies`` go from the computing dtype
to float32 or back, and count as 0 if both are one dtype; ``float32`` and ``compute`` are elements
read or written in these dtypes. ``kernels`` are without the copies. A line counts only if all that
it names holds. test_one_model.py compares the sums with traces of presets, in seconds and in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from shardwise.plan.candidate import Checkpointing, ContextMethod, LossKind
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import Cost, CostKind
from shardwise.plan.sizes import DTYPE_BYTES, DtypeName, read_table

Implementation = Literal["decoder", "transformers", "compiled"]
_KIND_BYTES = {"float32": 4, "int64": 8}
# Per-op checkpointing keeps the attention's output and every second matrix product of a layer
# (query, value, gate), as torchtitan's policy does; in eager mode the product after the gate's,
# which nothing needs, stays too.
_PER_OP_LINES = {"attention output": 1.0, "log-sum-exp": 1.0, "query": 1.0, "key, value": 0.5}


@dataclass(frozen=True)
class Execution:
    """The execution of the decoder on one rank; fields of a `Candidate` have the same names.

    ``implementation``: layers of the built-in decoder or of transformers in eager PyTorch, or
    compiled ones. ``pp_rank`` is the rank's pipeline stage. ``all_forward_first``: micro-batches
    run as in GPipe. ``on_cpu``: attention over parts of a sequence needs masks there.
    """

    micro_batch: int
    seq: int
    activation_checkpointing: Checkpointing = "none"
    implementation: Implementation = "decoder"
    loss: LossKind = "eager"
    dtype: DtypeName = "bfloat16"
    tp: int = 1
    cp: int = 1
    cp_method: ContextMethod = "gather"
    ep: int = 1
    pp: int = 1
    pp_rank: int = 0
    accumulation: int = 1
    all_forward_first: bool = False
    on_cpu: bool = False

    @property
    def is_eager(self) -> bool:
        """True if kernels and bytes are counted one by one, as eager PyTorch runs them."""
        return self.implementation != "compiled"

    @property
    def runs_again(self) -> bool:
        """True if layers are computed again in backward, wholly or in part.

        Selective checkpointing leaves out the scores, of which a fused kernel keeps none.
        """
        return self.activation_checkpointing in ("per_op", "full")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.micro_batch * self.seq // self.cp

    @property
    def first(self) -> bool:
        """True if this stage has the embedding."""
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        """True if this stage has the head and the loss."""
        return self.pp_rank == self.pp - 1

    def layers_of(self, shape: DecoderShape) -> dict[int, DecoderShape]:
        """Return the layers of this stage by number, each as a shape with all layers like it."""
        per_stage, more = divmod(shape.layers, self.pp)
        first = self.pp_rank * per_stage + min(self.pp_rank, more)
        end = first + per_stage + (self.pp_rank < more)
        return {i: shape.of_layer(i) for i in range(first, end)}

    @property
    def in_flight(self) -> int:
        """Micro-batches in flight at this stage's first backward; see the Note."""
        most = self.accumulation if self.all_forward_first else self.pp - self.pp_rank
        return min(most, self.accumulation)

    @property
    def first_in_flight(self) -> int:
        """Return how many more micro-batches are in flight at the first backward than later."""
        is_short = self.accumulation <= self.pp - self.pp_rank or self.all_forward_first
        return int(is_short and self.accumulation > 1)


def facts_of(shape: DecoderShape, run: Execution) -> frozenset[str]:
    """Return the properties of a layer, by their names in ``data/layers.toml``.

    ``many_heads``: a rank has several heads, whose outputs are copied to lie side by side.
    """
    facts = {
        "gated": shape.gated,
        "plain": not shape.gated,
        shape.norm: True,
        "rotary": shape.norm == "rms" and not shape.positions,
        "qk_norm": shape.qk_norm,
        "qkv_bias": shape.qkv_bias,
        "bias": shape.bias,
        "experts": shape.experts is not None,
        "latent": shape.latent is not None,
        "spread": run.ep > 1,
        "many_heads": shape.heads > run.tp or run.cp > 1,
        "cast": run.dtype != "float32",
        run.implementation: True,
        "eager": run.is_eager,
    }
    return frozenset(name for name, holds in facts.items() if holds)


def widths_of(shape: DecoderShape, run: Execution) -> Mapping[str, int]:
    """Return elements per token of each width that a line may name, on all ranks."""
    experts, latent = shape.experts, shape.latent
    chosen = 0 if experts is None else experts.top_k
    return {
        "dim": shape.dim,
        "q": shape.q_dim,
        "kv": shape.kv_dim,
        "other_kv": _other_kv_width(shape, run),
        "ffn": shape.ffn if experts is None else experts.shared * experts.ffn,
        "heads": shape.heads,
        "token": 1,
        "vocab": shape.vocab,
        "experts": 0 if experts is None else experts.num,
        "choices": chosen,
        "routed": chosen * shape.dim,
        "routed_ffn": 0 if experts is None else chosen * experts.ffn,
        "latent": 0 if latent is None else latent.kv_rank + latent.q_rank,
    }


@cache
def _lines() -> tuple[tuple[str, str, float, str, str, frozenset[str]], ...]:
    rows = read_table("layers")["kept"]
    return tuple((*row[:5], frozenset(row[5].split())) for row in rows)


@lru_cache(maxsize=256)
def layer_bytes(shape: DecoderShape, run: Execution) -> Mapping[str, int]:
    """Return the bytes that one layer makes for its backward, by line, without checkpointing."""
    facts, widths, size = facts_of(shape, run), widths_of(shape, run), DTYPE_BYTES[run.dtype]
    sizes = {**_KIND_BYTES, "compute": size, "upcast": 0 if size == 4 else 4}
    divides = {"tensor": run.tp, "sequence": run.tp, "whole": 1}
    divides["routed"] = run.tp if run.ep > 1 else 1
    return {
        name: round(count * sizes[kind] * widths[width] * run.tokens / divides[split])
        for name, width, count, kind, split, only in _lines()
        if facts >= only
    }


def _other_kv_width(shape: DecoderShape, run: Execution) -> int:
    """Return the width of keys, or values, that attention reads beside those of a rank's tokens.

    Context ranks gather those of the others; by heads, or in a ring, they repeat local ones.
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
    local = max(1, shape.kv_heads // run.tp)
    return next(n for n in range(1, groups + 1) if not groups % n and not local * n % run.cp)


def kept_layer_bytes(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes that one layer keeps from its forward to its backward."""
    if not run.runs_again:
        return sum(layer_bytes(shape, run).values())
    stream = stream_bytes(shape, run)
    if run.activation_checkpointing == "full":
        return stream
    return stream + saved_bytes(shape, run) + (stream if run.is_eager else 0)


def saved_bytes(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes that checkpointing keeps of what a layer makes, without its input."""
    if run.activation_checkpointing != "per_op":
        return 0
    made = layer_bytes(shape, run)
    saved = sum(round(share * made.get(name, 0)) for name, share in _PER_OP_LINES.items())
    return saved + made["activation input"]


def stream_bytes(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes of one tensor of the residual stream."""
    return run.tokens * shape.dim * DTYPE_BYTES[run.dtype] // run.tp


def logit_bytes(shape: DecoderShape, run: Execution, when: str) -> int:
    """Return bytes of logits and loss: ``kept``, or at the peak of ``forward`` or ``backward``."""
    place = ("kept", "forward", "backward").index(when)
    elements, extra = read_table("layers")["losses"][run.loss][place]
    logits = run.tokens * shape.vocab // run.tp
    return round(logits * (elements * DTYPE_BYTES[run.dtype] + extra))


# -- operations
# Kernels of one forward that are bound by memory: norms, biases, activation, residuals, rotary.
_FUSED_KERNELS, _EAGER_KERNELS = 10, 25
# Those of Megatron's router and dispatcher beside (scores, choice, sorting, counts, copies of rows
# there and back), and of a latent attention (norm of the latent, splits and joins of heads, rotary
# parts that are not fused). Products of experts are launched one by one, two for each.
_ROUTING_KERNELS, _LATENT_KERNELS = 60, 36


def layer_costs(shape: DecoderShape, run: Execution, *, backward: bool = False) -> tuple[Cost, ...]:
    """Return the costs of one layer on one rank: products, attention, memory, then what it sends.

    A backward has twice the forward's work, and its collectives as often.
    """
    times, tokens, tp, size = 1 + backward, run.tokens, run.tp, DTYPE_BYTES[run.dtype]
    products, core = shape.layer_flops_per_token(run.seq, causal=True)
    if shape.experts is None:
        matrices = (*shape.attention, *shape.feed_forward(shape.ffn))
        flops, num = products * tokens // tp, 7 if shape.gated else 6
        moved = sum((m.rows + m.columns) * tokens + m.numel // tp for m in matrices) * size
        heads = ((2 * shape.q_dim + 2 * shape.kv_dim) * size + 4 * shape.heads) * tokens // tp
    else:
        # Routed experts are whole, and where they are spread, the tokens of one tp group are shared
        # out; routers score all tokens on all of its ranks.
        routed = 2 * shape.experts.top_k * shape.expert_params
        part = tp if run.ep > 1 else 1
        router, num = 2 * shape.router_params, 7
        flops = (products - routed - router) * tokens // tp
        flops += router * tokens + routed * tokens // part
        cut = shape.layer_params() - shape.routed_params - shape.router_params
        moved = cut * size // tp + shape.router_params * size + shape.routed_params * size // run.ep
        moved += 2 * sum(layer_bytes(shape, run).values())
        heads = 4 * shape.q_dim * tokens * size // tp
    costs = [
        Cost("matmul", run.dtype, times * flops, times * moved, times * num),
        # One kernel in backward too.
        Cost("attention", run.dtype, times * (core * tokens // tp), times * heads, 1),
        _between_products(shape, run, backward),
    ]
    if tp > 1:
        costs.append(_tensor_cost(shape, run, backward))
    if run.cp > 1:
        costs.append(_context_cost(shape, run, backward))
    if shape.experts is not None and run.ep > 1:
        # Tokens that are sent to experts of other ranks and back, and their counts, which have no
        # gradient; see Note [Where a token goes] in `parallel.experts`. All experts get as many.
        others = run.ep - 1
        rows = -(-tokens // tp) * shape.experts.top_k * others // run.ep
        costs.append(Cost("expert_parallel", run.dtype, 0, 2 * rows * shape.dim * size, 2))
        counts = shape.experts.num // run.ep * others * DTYPE_BYTES["int64"]
        costs += [] if backward else [Cost("expert_parallel", "int64", 0, counts, 1)]
    return tuple(costs)


def _between_products(shape: DecoderShape, run: Execution, backward: bool) -> Cost:
    """Return the cost of the operations between products; see the Notes.

    Compiled kernels of a dense layer move no more, and are no more, than eager ones.
    """
    is_dense = shape.experts is None
    if is_dense and run.is_eager:
        return eager_cost("layer", shape, run, backward=backward)
    made, stream = sum(layer_bytes(shape, run).values()), stream_bytes(shape, run)
    moved, kernels = 2 * made + 4 * stream, _EAGER_KERNELS if run.is_eager else _FUSED_KERNELS
    kernels += _LATENT_KERNELS * (shape.latent is not None)
    if shape.experts is not None:
        kernels += _ROUTING_KERNELS + 2 * shape.experts.num // run.ep
    for is_doubled in (False, True)[: 1 + backward]:
        moved, kernels = moved * (1 + is_doubled), kernels * (1 + is_doubled)
        if is_dense:
            eager = eager_cost("layer", shape, run, backward=is_doubled)
            moved, kernels = min(moved, eager.moved_bytes), min(kernels, eager.num_ops)
    return Cost("memory", run.dtype, 0, moved, kernels)


def _context_cost(shape: DecoderShape, run: Execution, backward: bool) -> Cost:
    """Return the cost of the collectives of a context group; see `parallel.attention`.

    With "gather", keys and values are gathered, and their gradients exchanged. With "heads", all
    vectors are exchanged for those of a rank's heads, and the results back. With "ring", keys and
    values go round a ring; in backward again, with their gradients in float32.
    """
    others, rows = run.cp - 1, run.tokens * DTYPE_BYTES[run.dtype]
    pairs = 2 * shape.kv_dim * repeated_heads(shape, run) // run.tp
    if run.cp_method == "heads":
        sent = (pairs + 2 * shape.q_dim // run.tp) * rows * others // run.cp
        return Cost("context_exchange", run.dtype, 0, sent, 2)
    if run.cp_method == "gather":
        kind: CostKind = "context_exchange" if backward else "context_gather"
        return Cost(kind, run.dtype, 0, pairs * rows * others, 1)
    grads = 4 * pairs * run.tokens * run.cp if backward else 0
    return Cost("context_ring", run.dtype, 0, pairs * rows * others + grads, 1 + backward)


def _tensor_cost(shape: DecoderShape, run: Execution, backward: bool) -> Cost:
    """Return the cost of the collectives of a tensor group.

    Attention and a dense feed-forward gather the tokens and scatter the sums, or sum them at once:
    two passes of the stream over the ranks each. A mixture gathers the tokens, whose outputs are
    whole on all ranks. Shared experts are summed; in backward the gradients of the inputs of gate
    and up are summed separately. If experts are spread, outputs are gathered.
    """
    experts = shape.experts
    passes, num = 4, 2
    if experts is not None:
        sums = (2 if backward and shape.gated else 1) * bool(experts.shared)
        passes = 3 + 2 * sums + (run.ep > 1)
        num = 2 + sums + (run.ep > 1)
    stream = shape.dim * run.tokens * DTYPE_BYTES[run.dtype]
    return Cost("tensor_parallel", run.dtype, 0, passes * stream * (run.tp - 1) // run.tp, num)


def recomputed_costs(shape: DecoderShape, run: Execution) -> tuple[Cost, ...]:
    """Return the costs of the part of a layer's forward that runs again inside backward.

    torch stops after the last tensor that backward needs, which leaves out the last product of a
    dense layer and its addition to the stream. In a compiled graph they are dead code.
    """
    matmul, core, memory, *sent = layer_costs(shape, run)
    half = replace(matmul, flops=matmul.flops // 2, moved_bytes=matmul.moved_bytes // 2)
    if shape.experts is None:
        last = shape.dim * shape.ffn // run.tp
        moved = (shape.dim + shape.ffn // run.tp) * run.tokens + last
        matmul = replace(
            matmul,
            flops=matmul.flops - 2 * last * run.tokens,
            moved_bytes=matmul.moved_bytes - moved * DTYPE_BYTES[run.dtype],
            num_ops=matmul.num_ops - 1,
        )
        moved = memory.moved_bytes - 3 * stream_bytes(shape, run)
        memory = replace(memory, moved_bytes=moved, num_ops=memory.num_ops - 1)
    if run.activation_checkpointing == "per_op":
        return half, memory, *sent
    return matmul, core, memory, *sent


def eager_cost(
    part: Literal["layer", "end", "loss"],
    shape: DecoderShape,
    run: Execution,
    *,
    backward: bool = False,
) -> Cost:
    """Return the bytes that kernels between the products move; see Note [A line of the table].

    ``end`` is the last norm, ``loss`` the cross-entropy of whole logits. Compiled layers are those
    of the built-in decoder.
    """
    size = DTYPE_BYTES[run.dtype]
    facts = facts_of(shape, run if run.is_eager else replace(run, implementation="decoder"))
    widths, moved, num_kernels = widths_of(shape, run), 0.0, 0
    for of, times, width, only, *passes in read_table("layers")["eager"]["lines"]:
        copies, float32, compute, kernels = passes[backward]
        if of == part and facts >= set(only.split()):
            copies = 0 if size == 4 else copies
            num_bytes = copies * (4 + size) + 4 * float32 + size * compute
            # Logits are whole on all ranks.
            moved += (
                times * num_bytes * widths[width] * run.tokens / (run.tp if width != "vocab" else 1)
            )
            num_kernels += times * (kernels + copies)
    return Cost("memory", run.dtype, 0, round(moved), num_kernels)
