"""The tape of one rank of a decoder, from formulas alone: no model is built and nothing is traced.

What a layer makes and keeps is in ``activations`` and ``execution``, what is alive meanwhile in
``live`` and ``decoder_live``, what it costs in ``shape_costs``; here they are put in program order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from shardwise.plan.model.decoder_live import DecoderLive
from shardwise.plan.model.eager_costs import eager_end, eager_loss
from shardwise.plan.model.execution import Execution, runs_again
from shardwise.plan.model.live import FormulaLive
from shardwise.plan.model.shape_costs import backward_costs, layer_costs, recomputed_costs
from shardwise.plan.model.shapes import DecoderShape, latent_products
from shardwise.plan.model.tape import (
    Cost,
    LiveBytes,
    ParamFacts,
    Phase,
    Tape,
    UnitFacts,
    Visit,
    Work,
    full_bytes,
)


def shape_tape(shape: DecoderShape, run: Execution, *, name: str = "decoder") -> Tape:
    """Return the tape of one rank: unit 0 is the root (embedding, last norm, head), then layers.

    **Cost** linear in the number of layers, no tensors.

    **Source** the lines of `activations.KEPT`, `LOSSES`, and the Notes above.
    """
    layers, first = run.layers_here(shape), run.first_here(shape)
    kinds = [shape.of_layer(first + i) for i in range(layers)]
    live = live_of(shape, run, kinds)
    made = {kind: _Layer.of(kind, live) for kind in set(kinds)}
    embedding, root, head = _end_units(shape, run, kinds)
    units = [root, *([embedding] if embedding else ())]
    passes: list[tuple[_Layer, range]] = []
    whole = range(1)  # units that run when the model does: the root, and experts of its own layer
    for number, kind in enumerate(kinds, first):
        own = [replace(u, name=f"layers.{number}{u.name}") for u in made[kind].units]
        if _only_layer(run, kinds):
            units += own[1:]
            whole = range(len(own))
            passes.append((made[kind], range(0)))
            continue
        passes.append((made[kind], range(len(units), len(units) + len(own))))
        units += own
    begin = range(1 if embedding else 0, 2 if embedding else 0)
    end = range(len(units), len(units) + 1) if head else range(0)
    units += [head] if head else []
    events: list[Work | Visit] = [Visit("before_forward", unit) for unit in whole]
    events += _called(begin, _enter(live))
    for layer, numbers in passes:
        events += _called(numbers, layer.forward, input_bytes=_saved_input(live))
    events += _called(end, _head_forward(live))
    events += [*(Visit("after_forward", unit) for unit in reversed(whole)), _loss(live)]
    events += [Visit("before_backward", unit) for unit in reversed(whole)]
    events.append(_loss_backward(live))  # the root's: the head is called with its gradient
    events += [*_passed(end, whole, _head_backward(live)), _norm_backward(live)]
    left = live.left_output
    for layer, numbers in reversed(passes):
        again = layer.recompute if runs_again(run) else None
        work, *others = layer.backward
        net = replace(work.net, activations=work.net.activations + left)
        summed_net = work.summed_net and replace(net, grads=0)
        work = replace(work, net=net, summed_net=summed_net)
        events += _passed(numbers, whole, work, *others, again=again)
        left = 0
    events += _passed(begin, whole, _leave(live))
    events += [Visit("after_backward", unit) for unit in reversed(whole)]  # at the pass's end
    # What is there beside a micro-batch is counted until its units are through with it.
    there = LiveBytes(activations=-live.beside - live.left_output)
    events.append(Work(0, "backward", (), LiveBytes(), there))
    return Tape(
        model=name,
        units=tuple(units),
        events=tuple(events),
        micro_batch=run.micro_batch,
        seq=run.seq,
        compute_dtype=run.dtype,
        activation_checkpointing=run.activation_checkpointing,
        input_bytes=2 * 8 * run.tokens if run.first or run.last else 0,
        buffer_bytes=live.buffer_bytes,
        first_bytes=live.first_bytes,
        end_bytes=live.end_bytes,
        in_flight=run.in_flight,
    )


class Least(NamedTuple):
    """A tape in short: its costs, and bytes.

    ``alive_bytes`` are there at once at the loss or in the last layer's backward, without
    gradients; ``input_bytes`` of them are inputs of checkpointed blocks.
    """

    costs: tuple[Cost, ...]
    alive_bytes: int
    input_bytes: int


def least_of(shape: DecoderShape, run: Execution) -> Least:
    """Return what a micro-batch of a rank costs and holds at least.

    **Cost** does not grow with the number of layers.
    """
    layers, first = run.layers_here(shape), run.first_here(shape)
    kinds = [shape.of_layer(first + i) for i in range(layers)]
    live = live_of(shape, run, kinds)
    counts = Counter(kinds)
    works = [_enter(live), _head_forward(live), _loss(live), _loss_backward(live)]
    works += [_head_backward(live), _norm_backward(live), _leave(live)]
    costs = [cost for work in works for cost in work.costs]
    kept = works[0].net.total
    again = 0
    for kind, num in counts.items():
        layer = _Layer.of(kind, live)
        runs = [layer.forward, *layer.backward, *([layer.recompute] * runs_again(run))]
        found = [cost for work in runs for cost in work.costs]
        costs += [_times(cost, num) for cost in found]
        kept += num * layer.forward.net.total
        if kind == kinds[-1] and runs_again(run):
            again = layer.recompute.peak.total
    there, most = kept, kept + again
    for work in works[1:4]:
        most = max(most, there + work.peak.total)
        there += work.net.total
    return Least(tuple(costs), most, layers * _saved_input(live))


def _times(cost: Cost, num: int) -> Cost:
    return replace(
        cost,
        flops=num * cost.flops,
        moved_bytes=num * cost.moved_bytes,
        num_ops=num * cost.num_ops,
    )


def live_of(shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> FormulaLive:
    """Return the bytes that are alive on a rank, by how the layers are written."""
    kind = DecoderLive if run.by_kernel else FormulaLive
    return kind(shape, run, layers)


@dataclass(frozen=True)
class _Layer:
    """One layer: its units, that of its spread experts second if it has any, and their passes."""

    units: tuple[UnitFacts, ...]
    forward: Work
    recompute: Work
    backward: tuple[Work, ...]  # of each unit

    @classmethod
    def of(cls, shape: DecoderShape, live: FormulaLive) -> "_Layer":
        """Make the layer of a shape whose layers are alike."""
        run = live.run
        units = _layer_units(shape, run)
        grads = [full_bytes(unit, run.dtype) for unit in units]
        forward, again = live.layer_forward(shape), live.recompute(shape)
        costs = [backward_costs(shape, run), ()]
        backward = [
            Work(1, "backward", cost, peak, net, summed, replace(net, grads=0) if summed else None)
            for cost, (peak, net, summed) in zip(
                costs[: len(units)], live.layer_backward(shape, grads), strict=True
            )
        ]
        return cls(
            units,
            Work(1, "forward", layer_costs(shape, run), *forward),
            Work(1, "recompute", recomputed_costs(shape, run), *again),
            tuple(backward),
        )


def _saved_input(live: FormulaLive) -> int:
    """Return the bytes that a checkpoint around a layer saves: the stream that comes in."""
    saves = live.run.activation_checkpointing in ("full", "per_op")
    return live.stream if saves else 0


def _called(
    units: range, work: Work, recomputes: bool = False, input_bytes: int = 0
) -> list[Work | Visit]:
    """Return a forward pass of one module, and of all units that it is; none: it is the root's."""
    return [
        *(Visit("before_forward", n, recomputes, input_bytes * (n == units[0])) for n in units),
        replace(work, unit=units[0] if units else 0),
        *(Visit("after_forward", unit, recomputes) for unit in reversed(units)),
    ]


def _passed(
    units: range, whole: range, *works: Work, again: Work | None = None
) -> list[Work | Visit]:
    """Return a backward pass of one module, each unit with its work, that of the first one last.

    Where the module is no unit, its works are those of ``whole``.
    """
    mine = units or whole
    return [
        *(Visit("before_backward", unit) for unit in reversed(units)),
        *(_called(units, again, recomputes=True) if again else ()),
        *reversed([replace(work, unit=unit) for unit, work in zip(mine, works, strict=False)]),
        *(Visit("after_backward", unit) for unit in units),
    ]


def _enter(live: FormulaLive) -> Work:
    """The embedding; other micro-batches in flight are counted from here on."""
    run = live.run
    # Tables of positions are tiny; transformers makes more of them, and a mask.
    kernels = {"decoder": 10, "transformers": 17}.get(run.implementation, 2)
    costs = (Cost("memory", run.dtype, 0, 3 * live.stream, kernels),) if run.first else ()
    return Work(0, "forward", costs, *live.enter())


def _head_forward(live: FormulaLive) -> Work:
    shape, run = live.shape, live.run
    if not run.last:
        return _nothing("forward")
    peak, net = live.head_forward()
    flops = shape.head_flops_per_token * run.tokens // run.tp
    moved = shape.vocab * shape.dim * live.size // run.tp + net.logits + net.activations
    product = Cost("matmul", run.dtype, flops, moved, 2)
    if not run.by_kernel:
        return Work(0, "forward", (product,), peak, net)
    costs = replace(product, num_ops=1), eager_end(shape, run)
    return Work(0, "forward", costs, peak, net)


def _loss(live: FormulaLive) -> Work:
    shape, run = live.shape, live.run
    if not run.last or run.loss == "fused":
        return _nothing("loss")
    peak, net = live.loss()
    have = run.tokens * shape.vocab // run.tp * live.size
    cost = Cost("memory", "float32", 0, 3 * max(peak.logits, have), 4)
    if run.as_in_torch and run.loss in ("eager", "held", "freed"):
        cost = eager_loss(shape, run)
    return Work(0, "loss", (cost,), peak, net)


def _loss_backward(live: FormulaLive) -> Work:
    run = live.run
    if not run.last:
        return _nothing("backward")
    peak, net = live.loss_backward()
    cost = Cost("memory", "float32", 0, 3 * max(peak.logits, 0), 4)
    if run.as_in_torch and run.loss in ("eager", "held", "freed"):
        cost = eager_loss(live.shape, run, backward=True)
    return Work(0, "backward", (cost,), peak, net, peak, net)


def _head_backward(live: FormulaLive) -> Work:
    shape, run = live.shape, live.run
    if not run.last:
        return _nothing("backward")
    head = shape.vocab * shape.dim * live.size // run.tp
    peak, net = live.head_backward(head)
    flops = 2 * shape.head_flops_per_token * run.tokens // run.tp
    cost = Cost("matmul", run.dtype, flops, 2 * head + 2 * live.stream, 2)
    return Work(0, "backward", (cost,), peak, net)


def _norm_backward(live: FormulaLive) -> Work:
    """The last norm, which is the root's."""
    if not live.run.last:
        return _nothing("backward")
    eager = live.run.by_kernel
    costs = (eager_end(live.shape, live.run, backward=True),) if eager else ()
    grads = LiveBytes(grads=live.shape.norm_params * live.size)
    return Work(0, "backward", costs, grads, grads)


def _leave(live: FormulaLive) -> Work:
    shape, run = live.shape, live.run
    if not run.first:
        return Work(0, "backward", (), *live.leave(0, 0))
    table = shape.vocab * shape.dim * live.size // run.tp
    cost = Cost("memory", run.dtype, 0, 2 * table + live.stream, 2)
    # A tied table has one gradient; the lookup's is added to the head's.
    grads = (0 if shape.tied and run.last else table) + shape.positions * shape.dim * live.size
    peak, net = live.leave(table, grads)
    return Work(0, "backward", (cost,), peak, net, peak, replace(net, grads=0))


def _nothing(phase: Phase) -> Work:
    return Work(0, phase, (), LiveBytes(), LiveBytes())


# -- units: rows and columns of matrices are cut as `train.degrees` does it
def _end_units(
    shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]
) -> tuple[UnitFacts | None, UnitFacts, UnitFacts | None]:
    """Return the units beside the layers: embedding, root and head; None for what the root has.

    With ``run.large_units`` a table that belongs to one end alone, and is as large as one of
    ``layers``, is a unit, as `layout.units` has it; and one layer alone is the root's, with all.
    """
    if alone := _only_layer(run, layers):
        return None, UnitFacts("", "Decoder", _root_of(shape, run, alone)), None
    shares = shape.tied and run.first and run.last
    smallest = min((kind.layer_params() for kind in layers), default=0)
    is_large = run.large_units and not shares and shape.vocab * shape.dim >= smallest > 0
    table = (shape.vocab // run.tp, shape.dim)
    embedding = head = None
    root: list[ParamFacts] = []
    if run.first and is_large:
        params = (_param("embedding", *table),)
        embedding = UnitFacts("embedding", "TokenEmbedding", params, backward_reads_params=False)
    elif run.first:
        root.append(_param("embedding", *table))
    if run.first and shape.positions:
        root.append(_param("positions", shape.positions, shape.dim))
    if run.last:
        root += _norm(shape, "norm")
    if run.last and is_large:
        head = UnitFacts("head", "Projection", (_param("head", *table),))
    elif run.last and not shares:
        root.append(_param("head", *table))
    return embedding, UnitFacts("", "Decoder", tuple(root)), head


def _only_layer(run: Execution, layers: Sequence[DecoderShape]) -> DecoderShape | None:
    """Return the layer that is the root's, as it has none like it beside it; None for others."""
    return layers[0] if run.large_units and len(layers) == 1 else None


def _root_of(shape: DecoderShape, run: Execution, layer: DecoderShape) -> tuple[ParamFacts, ...]:
    """Return what a root owns that has a layer, and the tables."""
    table = (shape.vocab // run.tp, shape.dim)
    found = [_param("embedding", *table)] if run.first else []
    if run.first and shape.positions:
        found.append(_param("positions", shape.positions, shape.dim))
    found += _layer_units(layer, run)[0].params
    if run.last:
        found += _norm(shape, "norm")
        found += [] if shape.tied and run.first else [_param("head", *table)]
    return tuple(found)


def _layer_units(shape: DecoderShape, run: Execution) -> tuple[UnitFacts, ...]:
    """Return the unit of a layer, without its name; spread experts are one of their own."""
    experts, tp = shape.experts, run.tp
    params = [*_norm(shape, "attention_norm"), *_attention(shape, tp)]
    params += _norm(shape, "feed_forward_norm")
    if experts is None:
        params += _feed_forward(shape, "feed_forward", shape.ffn, tp)
        return (UnitFacts("", "Layer", tuple(params)),)
    params.append(_param("router", experts.num, shape.dim))
    routed = _routed(shape, run)
    if run.ep == 1:
        params += routed
    if experts.shared:
        params += _feed_forward(shape, "shared", experts.shared * experts.ffn, tp)
    layer = UnitFacts("", "Layer", tuple(params))
    if run.ep == 1:
        return (layer,)
    over = Fraction(tp, run.ep)
    return layer, UnitFacts(".experts", "Experts", tuple(routed), experts_over=over)


def _param(name: str, *shape: int) -> ParamFacts:
    return ParamFacts(name, shape, "float32")


def _norm(shape: DecoderShape, name: str) -> list[ParamFacts]:
    biases = [_param(f"{name}.bias", shape.dim)] if shape.norm_bias else []
    return [_param(name, shape.dim), *biases]


def _latent_attention(shape: DecoderShape, tp: int) -> list[ParamFacts]:
    """Return the parameters of a latent attention; what makes a latent is whole on all ranks."""
    found = []
    for name, rows, columns in latent_products(shape):
        if name == "out":
            found.append(_param(name, rows, columns // tp))
        else:
            found.append(_param(name, rows if name.endswith("latent") else rows // tp, columns))
    return found


def _attention(shape: DecoderShape, tp: int) -> list[ParamFacts]:
    if shape.latent is not None:
        return _latent_attention(shape, tp)
    found = []
    widths = {"query": shape.q_dim, "key": shape.kv_dim, "value": shape.kv_dim}
    for name, width in widths.items():
        found.append(_param(name, width // tp, shape.dim))
        if shape.qkv_bias:
            found.append(_param(f"{name}.bias", width // tp))
    found.append(_param("out", shape.dim, shape.q_dim // tp))
    if shape.bias:
        found.append(_param("out.bias", shape.dim))
    if shape.qk_norm:
        found += [_param(f"{name}_norm", shape.head_dim) for name in ("query", "key")]
    return found


def _feed_forward(shape: DecoderShape, name: str, width: int, tp: int) -> list[ParamFacts]:
    found = []
    for part in ("gate", "up") if shape.gated else ("up",):
        found.append(_param(f"{name}.{part}", width // tp, shape.dim))
        if shape.bias:
            found.append(_param(f"{name}.{part}.bias", width // tp))
    found.append(_param(f"{name}.down", shape.dim, width // tp))
    if shape.bias:
        found.append(_param(f"{name}.down.bias", shape.dim))
    return found


def _routed(shape: DecoderShape, run: Execution) -> list[ParamFacts]:
    """Return the routed experts that a rank has, stacked."""
    assert shape.experts is not None
    here, width = shape.experts.num // run.ep, shape.experts.ffn
    return [
        _param(param.name, here, *param.shape)
        for param in _feed_forward(shape, "experts", width, 1)
    ]
