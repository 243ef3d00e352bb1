"""Operations of a decoder by class, with their bytes: forward, recomputed and backward.

Note [Attention that is not fused]
Without a fused kernel the scores are made by batched matrix products of the whole square, and pass
through memory; ``kept`` in ``data/layers.toml`` has their bytes, so they count as matmul and memory
here. A fused kernel has its own class: bound by FLOPs, of which a causal one does half.

Note [Bytes of elementwise operations]
Each byte that a layer keeps is written once and read once by some elementwise operation, and the
stream passes four times more through residual additions; what fusion saves, temporaries that are
not kept take. Step times of published runs (benchmarks/published.py) fit this and not half of it.

Note [A line of the table]
A line of ``eager`` in ``data/layers.toml`` counts what one pass of a layer moves per token and
element of a width in eager PyTorch, summed over its kernels. ``copies`` go from the computing dtype
to float32 or back, and count as 0 if both are one dtype; ``float32`` and ``compute`` are elements
read or written in these dtypes. ``kernels`` are without the copies. A line counts only if the
shape has the fact that it names. test_one_model.py compares the sums with traces of presets, in
seconds and in bytes.
"""

from dataclasses import replace
from typing import Literal

from shardwise.plan.model.activations import Execution, layer_bytes, repeated_heads, stream_bytes
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import CONTEXT_KINDS, Cost, CostKind
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.tables import read_table

# Kernels of one forward that are bound by memory: norms, biases, activation, residuals, rotary;
# eager PyTorch with dropout runs more than twice as many.
_FUSED_KERNELS, _EAGER_KERNELS = 10, 25
# Those of Megatron's router and dispatcher beside (scores, choice, sorting, counts, copies of rows
# there and back), and of a latent attention (norm of the latent, splits and joins of heads, rotary
# parts that are not fused). Products of experts are launched one by one, two for each.
_ROUTING_KERNELS, _LATENT_KERNELS = 60, 36


def layer_costs(shape: DecoderShape, run: Execution) -> tuple[Cost, ...]:
    """Return the costs of one layer's forward on one rank."""
    if run.as_in_torch and run.flash and shape.experts is None:
        return _torch_costs(shape, run)
    causal = run.causal and run.flash
    products, core = shape.layer_flops_per_token(run.seq, causal=causal)
    tokens, tp, size = run.tokens, run.tp, DTYPE_BYTES[run.dtype]
    # Routed experts are whole, and where they are spread, the tokens of one tp group are shared
    # out; routers score all tokens on all of its ranks.
    routed, part = shape.routed_flops_per_token, tp if run.ep > 1 else 1
    router = 2 * shape.router_params
    flops = (products - routed - router) * tokens // tp
    flops += router * tokens + routed * tokens // part
    weights = (shape.layer_params() - shape.routed_params - shape.router_params) * size // tp
    weights += shape.router_params * size
    weights += shape.routed_params * size // run.ep
    moved = weights + 2 * sum(layer_bytes(shape, run).values())
    heads = 4 * shape.q_dim * tokens * size // tp
    costs = [
        Cost("matmul", run.matmul_dtype or run.dtype, flops, moved, 7),
        Cost("attention", run.dtype, core * tokens // tp, heads, 1),
        _elementwise(shape, run),
    ]
    if not run.flash:
        costs[1] = replace(costs[1], kind="matmul", num_ops=2)
    return *costs, *_sent_costs(shape, run), *_exchange_costs(shape, run)


def _elementwise(shape: DecoderShape, run: Execution) -> Cost:
    """Return what the operations between products move; see the Note."""
    eager = run.dropout or run.implementation.startswith("eager") or run.by_kernel
    kernels = _EAGER_KERNELS if eager else _FUSED_KERNELS
    kernels += _LATENT_KERNELS * (shape.latent is not None)
    if shape.experts is not None:  # beside those of a plain layer
        kernels += _ROUTING_KERNELS + 2 * shape.experts.num // run.ep
    made, stream = sum(layer_bytes(shape, run).values()), stream_bytes(shape, run)
    return Cost("memory", run.dtype, 0, 2 * made + 4 * stream, kernels)


def _torch_costs(shape: DecoderShape, run: Execution) -> tuple[Cost, ...]:
    """Return the costs of one dense layer in PyTorch, kernel by kernel.

    torch.compile calls the same products and attention; it fuses the operations between them.
    """
    products, core = shape.layer_flops_per_token(run.seq, causal=run.causal)
    tokens, tp, size = run.tokens, run.tp, DTYPE_BYTES[run.dtype]
    heads = (2 * shape.q_dim + 2 * shape.kv_dim) * size + 4 * shape.heads
    num, dtype = 7 if shape.gated else 6, run.matmul_dtype or run.dtype
    between = eager_cost("layer", shape, run)
    if not run.by_kernel:
        between = _no_more(_elementwise(shape, run), between)
    matrices = (*shape.attention, *shape.feed_forward(shape.ffn))
    moved = sum((m.rows + m.columns) * tokens + m.numel // tp for m in matrices) * size
    return (
        Cost("matmul", dtype, products * tokens // tp, moved, num),
        Cost("attention", run.dtype, core * tokens // tp, heads * tokens // tp, 1),
        between,
        *_sent_costs(shape, run),
    )


def _no_more(fused: Cost, eager: Cost) -> Cost:
    """Return what compiled kernels move: no more, and by no more kernels, than eager ones."""
    moved = min(fused.moved_bytes, eager.moved_bytes)
    return replace(fused, moved_bytes=moved, num_ops=min(fused.num_ops, eager.num_ops))


def _sent_costs(shape: DecoderShape, run: Execution) -> tuple[Cost, ...]:
    found = (_tensor_cost(shape, run),) if run.tp > 1 else ()
    return (*found, _context_cost(shape, run)) if run.cp > 1 else found


def _context_cost(shape: DecoderShape, run: Execution, backward: bool = False) -> Cost:
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


def _tensor_cost(shape: DecoderShape, run: Execution, backward: bool = False) -> Cost:
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


def _exchange_costs(shape: DecoderShape, run: Execution) -> tuple[Cost, ...]:
    """Return what tokens cost on their way to experts of other ranks and back, and their counts.

    See Note [Where a token goes] in `parallel.experts`; all experts get equally many.
    """
    experts, others = shape.experts, run.ep - 1
    if experts is None or not others:
        return ()
    rows = -(-run.tokens // run.tp) * experts.top_k * others // run.ep
    sent = 2 * rows * shape.dim * DTYPE_BYTES[run.dtype]
    counts = experts.num // run.ep * others * DTYPE_BYTES["int64"]
    return (
        Cost("expert_parallel", run.dtype, 0, sent, 2),
        Cost("expert_parallel", "int64", 0, counts, 1),
    )


def recomputed_costs(shape: DecoderShape, run: Execution) -> tuple[Cost, ...]:
    """Return what of a layer's forward runs once more inside backward."""
    costs = layer_costs(shape, run)
    if run.activation_checkpointing == "selective":
        return () if run.flash else (costs[1], costs[2])
    whole = costs[0]
    if run.as_in_torch:
        costs = _stopped_early(shape, run, costs)
    if run.activation_checkpointing == "per_op":
        half = replace(whole, flops=whole.flops // 2, moved_bytes=whole.moved_bytes // 2)
        return (half, *costs[2:])
    return costs


def _stopped_early(
    shape: DecoderShape, run: Execution, costs: tuple[Cost, ...]
) -> tuple[Cost, ...]:
    """Leave out the operations after the last tensor that backward needs: torch stops there.

    Of a dense layer those are the last product and its addition to the stream. In a compiled graph
    they are dead code of the recomputation.
    """
    if shape.experts is not None or not run.flash:
        return costs
    matmul, core, memory, *sent = costs
    stream, size = stream_bytes(shape, run), DTYPE_BYTES[run.dtype]
    last = shape.dim * shape.ffn // run.tp
    moved = (shape.dim + shape.ffn // run.tp) * run.tokens + last
    matmul = replace(
        matmul,
        flops=matmul.flops - 2 * last * run.tokens,
        moved_bytes=matmul.moved_bytes - moved * size,
        num_ops=matmul.num_ops - 1,
    )
    memory = replace(
        memory, moved_bytes=memory.moved_bytes - 3 * stream, num_ops=memory.num_ops - 1
    )
    return matmul, core, memory, *sent


def backward_costs(shape: DecoderShape, run: Execution) -> tuple[Cost, ...]:
    """Return the costs of one layer's backward: twice the forward's, collectives as often.

    With frozen weights a linear map has the gradient of its input alone.
    """
    found = []
    for cost in layer_costs(shape, run):
        if cost.dtype == "int64":  # counts of tokens have no gradient
            continue
        if cost.kind == "tensor_parallel":
            found.append(_tensor_cost(shape, run, backward=True))
            continue
        if cost.kind in CONTEXT_KINDS:
            found.append(_context_cost(shape, run, backward=True))
            continue
        eager = eager_cost("layer", shape, run, backward=True)
        if cost.kind == "memory" and run.by_kernel and shape.experts is None:
            found.append(eager)
            continue
        if cost.kind == "attention" and run.as_in_torch:
            doubled = replace(cost, flops=2 * cost.flops, moved_bytes=2 * cost.moved_bytes)
            found.append(doubled)  # one kernel too
            continue
        once = cost.kind == "expert_parallel"
        once |= cost.kind == "matmul" and not run.trained
        times = 1 if once else 2
        doubled = replace(
            cost,
            flops=cost.flops * times,
            moved_bytes=cost.moved_bytes * times,
            num_ops=cost.num_ops * times,
        )
        if cost.kind == "memory" and run.as_in_torch and shape.experts is None:
            doubled = _no_more(doubled, eager)
        found.append(doubled)
    return tuple(found)


def eager_cost(
    part: Literal["layer", "end", "loss"],
    shape: DecoderShape,
    run: Execution,
    *,
    backward: bool = False,
) -> Cost:
    """Return the bytes that kernels between the products move; see Note [A line of the table].

    ``end`` is the last norm, ``loss`` the cross-entropy of whole logits.
    """
    size = DTYPE_BYTES[run.dtype]
    stream = run.tp if run.sequence_parallel else 1
    widths = {
        "dim": shape.dim * run.tokens / stream,
        "q": shape.q_dim * run.tokens / run.tp,
        "kv": shape.kv_dim * run.tokens / run.tp,
        "ffn": shape.ffn * run.tokens / run.tp,
        "vocab": shape.vocab * run.tokens,  # logits are whole on all ranks
    }
    own = run.implementation != "transformers"
    rotary = shape.norm == "rms" and not shape.positions
    facts = {
        "": True,
        shape.norm: own or shape.norm == "layer",
        "rms_cast": shape.norm == "rms" and not own,
        "gated": shape.gated,
        "plain": not shape.gated,
        "rotary": rotary and own,
        "rotary_halves": rotary and not own,
        "cast": rotary and own and size < 4,
        "qk_norm": shape.qk_norm and own,
        "qk_norm_cast": shape.qk_norm and not own,
        "qkv_bias": shape.qkv_bias,
        "bias": shape.bias,
    }
    moved, num_kernels = 0.0, 0
    for of, times, width, only, *passes in read_table("layers")["eager"]["lines"]:
        copies, float32, compute, kernels = passes[backward]
        if of == part and facts.get(only):
            copies = 0 if size == 4 else copies
            each = copies * (4 + size) + 4 * float32 + size * compute
            moved += times * each * widths[width]
            num_kernels += times * (kernels + copies)
    return Cost("memory", run.dtype, 0, round(moved), num_kernels)
