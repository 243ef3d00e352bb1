"""Operations of a decoder by class, with their bytes: forward, recomputed and backward.

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

from dataclasses import replace
from typing import Literal

from shardwise.plan.model.activations import (
    Execution,
    facts_of,
    layer_bytes,
    repeated_heads,
    stream_bytes,
    widths_of,
)
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import Cost, CostKind
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.tables import read_table

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
        routed, part = shape.routed_flops_per_token, tp if run.ep > 1 else 1
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
        # What tokens cost on their way to experts of other ranks and back, and their counts, which
        # have no gradient; see Note [Where a token goes] in `parallel.experts`. All experts get
        # equally many.
        others = run.ep - 1
        rows = -(-tokens // tp) * shape.experts.top_k * others // run.ep
        costs.append(Cost("expert_parallel", run.dtype, 0, 2 * rows * shape.dim * size, 2))
        counts = shape.experts.num // run.ep * others * DTYPE_BYTES["int64"]
        costs += [] if backward else [Cost("expert_parallel", "int64", 0, counts, 1)]
    return tuple(costs)


def _between_products(shape: DecoderShape, run: Execution, backward: bool) -> Cost:
    """Return what the operations between products move; see the Notes.

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
    """Return what the ranks of a context group send each other; see `parallel.attention`.

    Keys and values are gathered, and their gradients swapped; or all vectors are swapped for those
    of a rank's heads, and the results back; or keys and values go round a ring, in backward again
    and with their gradients in float32.
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
    """Return what the ranks of a tensor group send each other.

    Attention and a dense feed-forward gather the tokens and scatter the sums, or sum them at once:
    two passes of the stream over the ranks each. A mixture gathers the tokens, whose outputs are
    whole on all ranks; shared experts are summed, in backward the gradients of gate's input and of
    up's each by itself; where experts are spread, outputs are gathered.
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
    """Return what of a layer's forward runs once more inside backward.

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
            each = copies * (4 + size) + 4 * float32 + size * compute
            # Logits are whole on all ranks.
            moved += times * each * widths[width] * run.tokens / (run.tp if width != "vocab" else 1)
            num_kernels += times * (kernels + copies)
    return Cost("memory", run.dtype, 0, round(moved), num_kernels)
