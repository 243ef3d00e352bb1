"""The tape of one rank of a decoder, from formulas alone: no model is built and nothing is traced.

What a layer makes and keeps is in ``activations`` and ``execution``, what it costs in
``shape_costs``; here they are put in program order. The activations of the other micro-batches that
a pipeline has in flight are there from the tape's first work to its last.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.plan.model.activations import ffn_width
from shardwise.plan.model.execution import (
    Execution,
    cut_shape,
    gathered_bytes,
    kept_layer_bytes,
    layer_bytes,
    logit_bytes,
    stream_bytes,
)
from shardwise.plan.model.shape_costs import backward_costs, layer_costs, recomputed_costs
from shardwise.plan.model.shape_units import layer_units, root_unit
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import (
    Cost,
    LiveBytes,
    Phase,
    Tape,
    UnitFacts,
    Visit,
    Work,
    full_bytes,
)
from shardwise.plan.sizes import DTYPE_BYTES


def shape_tape(shape: DecoderShape, run: Execution, *, name: str = "decoder") -> Tape:
    """Return the tape of one rank: unit 0 is the root (embedding, last norm, head), then layers.

    **Cost** linear in the number of layers, no tensors.

    **Source** the lines of `activations.KEPT`, `LOSSES`, and the Notes above.
    """
    layers = run.layers_here(shape)
    first = max(0, shape.layers - layers) if run.last else run.pipeline_rank * layers
    kinds = [shape.of_layer(first + i) for i in range(layers)]
    made = {kind: _Layer.of(kind, run) for kind in set(kinds)}
    units = [root_unit(shape, run)]
    passes: list[tuple[_Layer, range]] = []
    for number, kind in enumerate(kinds, first):
        own = [replace(u, name=f"layers.{number}{u.name}") for u in made[kind].units]
        passes.append((made[kind], range(len(units), len(units) + len(own))))
        units += own
    events: list[Work | Visit] = [Visit("before_forward", 0), _enter(shape, run, kinds)]
    for layer, numbers in passes:
        events += _called(numbers, layer.forward)
    events += [_head_forward(shape, run), Visit("after_forward", 0), _loss(shape, run)]
    events += [Visit("before_backward", 0), _head_backward(shape, run)]
    for layer, numbers in reversed(passes):
        events += [Visit("before_backward", unit) for unit in reversed(numbers)]
        if run.activation_checkpointing != "none":
            events += _called(numbers, layer.recompute, recomputes=True)
        works = list(zip(layer.backward, numbers, strict=True))
        events += [replace(work, unit=unit) for work, unit in reversed(works)]
        events += [Visit("after_backward", unit) for unit in numbers]
    events += [_leave(shape, run, kinds), Visit("after_backward", 0)]
    return Tape(
        model=name,
        units=tuple(units),
        events=tuple(events),
        micro_batch=run.micro_batch,
        seq=run.seq,
        compute_dtype=run.dtype,
        activation_checkpointing=run.activation_checkpointing,
        input_bytes=2 * 8 * run.tokens if run.first or run.last else 0,
    )


@dataclass(frozen=True)
class _Layer:
    """One layer: its units, that of its spread experts second if it has any, and their passes."""

    units: tuple[UnitFacts, ...]
    forward: Work
    recompute: Work
    backward: tuple[Work, ...]  # of each unit

    @classmethod
    def of(cls, shape: DecoderShape, run: Execution) -> "_Layer":
        """Make the layer of a shape whose layers are alike."""
        units = layer_units(shape, run)
        # The second has its gradients alone: what they take is in the work of the layer.
        grads = (LiveBytes(grads=full_bytes(unit, run.dtype)) for unit in units[1:])
        backward = (
            _layer_backward(shape, run, units[0]),
            *(Work(1, "backward", (), each, each) for each in grads),
        )
        return cls(units, _layer_forward(shape, run), _recompute(shape, run), backward)


def _called(units: range, work: Work, recomputes: bool = False) -> list[Work | Visit]:
    """Return a forward pass of one module, and of all units that it is."""
    return [
        *(Visit("before_forward", unit, recomputes) for unit in units),
        replace(work, unit=units[0]),
        *(Visit("after_forward", unit, recomputes) for unit in reversed(units)),
    ]


def activation_peaks(tape: Tape) -> dict[Phase, LiveBytes]:
    """Return the largest activations, logits and temporaries of each phase; grads are left out."""
    peaks: dict[Phase, LiveBytes] = {}
    live = LiveBytes()
    for event in tape.events:
        if isinstance(event, Visit):
            continue
        moment = _plus(live, event.peak)
        if moment.total > peaks.get(event.phase, LiveBytes()).total:
            peaks[event.phase] = moment
        live = _plus(live, event.net)
    return peaks


def _plus(a: LiveBytes, b: LiveBytes) -> LiveBytes:
    return LiveBytes(a.activations + b.activations, a.temporary + b.temporary, a.logits + b.logits)


def _enter(shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> Work:
    """The embedding; other micro-batches in flight are counted from here on."""
    others, mask = _others(shape, run, layers), _mask(shape, run)
    stream = stream_bytes(shape, run)
    net = LiveBytes(activations=others + mask)
    costs = (Cost("memory", run.dtype, 0, 3 * stream, 2),) if run.first else ()
    peak = LiveBytes(activations=others + mask, temporary=stream * (2 if run.first else 0))
    return Work(0, "forward", costs, peak, net)


def _others(shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> int:
    """Bytes of the other micro-batches in flight, and of the outputs that all of them keep."""
    of_layers = sum(num * kept_layer_bytes(kind, run) for kind, num in Counter(layers).items())
    of_layers += _mask(shape, run)
    sent = stream_bytes(shape, run) if run.keeps_outputs and not run.last else 0
    return round((run.in_flight - 1) * of_layers + run.in_flight * sent)


def _mask(shape: DecoderShape, run: Execution) -> int:
    """Bytes of the dropout mask after the embedding."""
    return run.tokens * shape.dim if run.dropout and run.first else 0


def _layer_forward(shape: DecoderShape, run: Execution) -> Work:
    kept, made = kept_layer_bytes(shape, run), sum(layer_bytes(shape, run).values())
    # A layer under checkpointing frees what it made as it goes: at most about the widest part.
    width = ffn_width(cut_shape(shape, run))
    widest = width * (3 if shape.gated else 2) * run.tokens * DTYPE_BYTES[run.dtype]
    passing = 0 if run.activation_checkpointing == "none" else min(made, widest // run.tp)
    peak = LiveBytes(activations=kept, temporary=passing + gathered_bytes(shape, run))
    return Work(1, "forward", layer_costs(shape, run), peak, LiveBytes(activations=kept))


def _head_forward(shape: DecoderShape, run: Execution) -> Work:
    if not run.last:
        return Work(0, "forward", (), LiveBytes(), LiveBytes())
    size = DTYPE_BYTES[run.dtype]
    inputs = _head_inputs(shape, run)
    logits = run.tokens * shape.vocab // run.tp * size if run.loss != "fused" else 0
    flops = shape.head_flops_per_token * run.tokens // run.tp
    moved = shape.vocab * shape.dim * size // run.tp + logits + inputs
    live = LiveBytes(activations=inputs, logits=logits)
    return Work(0, "forward", (Cost("matmul", run.dtype, flops, moved, 2),), live, live)


def _head_inputs(shape: DecoderShape, run: Execution) -> int:
    """Bytes that the last norm and the head keep; DTensor keeps the head's input gathered."""
    head = gathered_bytes(shape, run) if run.loss == "loss_parallel" else 0
    return stream_bytes(shape, run) + max(head, stream_bytes(shape, run))


def _loss(shape: DecoderShape, run: Execution) -> Work:
    if not run.last or run.loss == "fused":
        return Work(0, "loss", (), LiveBytes(), LiveBytes())
    have = run.tokens * shape.vocab // run.tp * DTYPE_BYTES[run.dtype]
    peak = logit_bytes(shape, run, "forward") - have
    kept = logit_bytes(shape, run, "kept") - have
    cost = Cost("memory", "float32", 0, 3 * max(peak, have), 4)
    return Work(0, "loss", (cost,), LiveBytes(logits=max(peak, 0)), LiveBytes(logits=kept))


def _head_backward(shape: DecoderShape, run: Execution) -> Work:
    if not run.last:
        return Work(0, "backward", (), LiveBytes(), LiveBytes())
    size, stream = DTYPE_BYTES[run.dtype], stream_bytes(shape, run)
    kept = logit_bytes(shape, run, "kept") if run.loss != "fused" else 0
    peak = logit_bytes(shape, run, "backward") - kept
    head = shape.vocab * shape.dim * size // run.tp
    flops = 2 * shape.head_flops_per_token * run.tokens // run.tp
    costs = (
        Cost("matmul", run.dtype, flops, 2 * head + 2 * stream, 2),
        Cost("memory", "float32", 0, 3 * max(peak, 0), 4),
    )
    grads = head + shape.norm_params * size
    net = LiveBytes(activations=-_head_inputs(shape, run), logits=-kept, grads=grads)
    return Work(0, "backward", costs, LiveBytes(temporary=stream, logits=peak), net)


def _recompute(shape: DecoderShape, run: Execution) -> Work:
    made, kept = sum(layer_bytes(shape, run).values()), kept_layer_bytes(shape, run)
    live = LiveBytes(activations=max(made - kept, 0), temporary=stream_bytes(shape, run))
    costs = recomputed_costs(shape, run)
    return Work(1, "recompute", costs, live, LiveBytes(activations=live.activations))


def _layer_backward(shape: DecoderShape, run: Execution, facts: UnitFacts) -> Work:
    """The feed-forward's gradients are the widest moment: d product, then d gate and d up."""
    made, kept = sum(layer_bytes(shape, run).values()), kept_layer_bytes(shape, run)
    alive = kept if run.activation_checkpointing == "none" else max(made, kept)
    size = DTYPE_BYTES[run.dtype]
    width = ffn_width(cut_shape(shape, run))
    wide = width * (2 if shape.gated else 1) * run.tokens * size // run.tp
    temporary = wide + 2 * stream_bytes(shape, run) + 2 * gathered_bytes(shape, run)
    grads = full_bytes(facts, run.dtype)
    peak = LiveBytes(temporary=temporary, grads=grads)
    net = LiveBytes(activations=-alive, grads=grads)
    return Work(1, "backward", backward_costs(shape, run), peak, net)


def _leave(shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> Work:
    others, mask = _others(shape, run, layers), _mask(shape, run)
    if not run.first:
        return Work(0, "backward", (), LiveBytes(), LiveBytes(activations=-others))
    size = DTYPE_BYTES[run.dtype]
    table = shape.vocab * shape.dim * size // run.tp
    cost = Cost("memory", run.dtype, 0, 2 * table + stream_bytes(shape, run), 2)
    # A tied table has one gradient; the lookup's is added to the head's.
    grads = (0 if shape.tied and run.last else table) + shape.positions * shape.dim * size
    peak = LiveBytes(temporary=stream_bytes(shape, run), grads=table)
    net = LiveBytes(activations=-others - mask, grads=grads)
    return Work(0, "backward", (cost,), peak, net)
