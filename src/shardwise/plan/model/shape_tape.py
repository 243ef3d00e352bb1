"""The tape of one rank of a decoder, from formulas alone: no model is built and nothing is traced.

What a layer makes and keeps is in ``activations`` and ``execution``, what it costs in
``shape_costs``; here they are put in program order. The activations of the other micro-batches that
a pipeline has in flight are there from the tape's first work to its last.
"""

from dataclasses import replace

from shardwise.plan.model.activations import ffn_width
from shardwise.plan.model.execution import (
    Execution,
    gathered_bytes,
    kept_layer_bytes,
    layer_bytes,
    logit_bytes,
    stream_bytes,
)
from shardwise.plan.model.shape_costs import backward_costs, layer_costs, recomputed_costs
from shardwise.plan.model.shapes import DecoderShape
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
from shardwise.plan.sizes import DTYPE_BYTES


def shape_tape(shape: DecoderShape, run: Execution, *, name: str = "decoder") -> Tape:
    """Return the tape of one rank: unit 0 is the root (embedding, last norm, head), then layers.

    **Cost** linear in the number of layers, no tensors.

    **Source** the lines of `activations.KEPT`, `LOSSES`, and the Notes above.
    """
    layers = run.layers_here(shape)
    layer = _layer(shape, run)
    first = max(0, shape.layers - layers) if run.last else run.pipeline_rank * layers
    names = (f"layers.{first + i}" for i in range(layers))
    units = (_root(shape, run), *(replace(layer, name=name) for name in names))
    forward, recompute = _layer_forward(shape, run), _recompute(shape, run)
    backward = _layer_backward(shape, run, layer)
    events: list[Work | Visit] = [Visit("before_forward", 0), _enter(shape, run, layers)]
    for unit in range(1, layers + 1):
        events += [
            Visit("before_forward", unit),
            replace(forward, unit=unit),
            Visit("after_forward", unit),
        ]
    events += [_head_forward(shape, run), Visit("after_forward", 0), _loss(shape, run)]
    events += [Visit("before_backward", 0), _head_backward(shape, run)]
    for unit in range(layers, 0, -1):
        events.append(Visit("before_backward", unit))
        if run.activation_checkpointing != "none":
            events += [
                Visit("before_forward", unit, recomputes=True),
                replace(recompute, unit=unit),
                Visit("after_forward", unit, recomputes=True),
            ]
        events += [replace(backward, unit=unit), Visit("after_backward", unit)]
    events += [_leave(shape, run, layers), Visit("after_backward", 0)]
    return Tape(
        model=name,
        units=units,
        events=tuple(events),
        micro_batch=run.micro_batch,
        seq=run.seq,
        compute_dtype=run.dtype,
        activation_checkpointing=run.activation_checkpointing,
        input_bytes=2 * 8 * run.tokens if run.first or run.last else 0,
    )


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


def _root(shape: DecoderShape, run: Execution) -> UnitFacts:
    params: list[ParamFacts] = []
    if run.first or (run.last and shape.tied):
        params.append(ParamFacts("embedding", (shape.vocab // run.tp, shape.dim), "float32"))
    if run.first and shape.positions:
        params.append(ParamFacts("positions", (shape.positions, shape.dim), "float32"))
    if run.last:
        params.append(ParamFacts("norm", (shape.norm_params,), "float32"))
        if not shape.tied:
            params.append(ParamFacts("head", (shape.vocab // run.tp, shape.dim), "float32"))
    return UnitFacts("", "Decoder", tuple(params))


def _layer(shape: DecoderShape, run: Execution) -> UnitFacts:
    norms = 2 * shape.norm_params
    attention = shape.attention_params // run.tp
    ffn = shape.ffn_params() // run.tp
    params = (
        ParamFacts("norms", (norms,), "float32"),
        ParamFacts("attention", (attention // shape.dim, shape.dim), "float32"),
        ParamFacts("ffn", (ffn // shape.dim, shape.dim), "float32"),
    )
    return UnitFacts("layer", "Layer", params)


def _enter(shape: DecoderShape, run: Execution, layers: int) -> Work:
    """The embedding; other micro-batches in flight are counted from here on."""
    others, mask = _others(shape, run, layers), _mask(shape, run)
    stream = stream_bytes(shape, run)
    net = LiveBytes(activations=others + mask)
    costs = (Cost("memory", run.dtype, 0, 3 * stream, 2),) if run.first else ()
    peak = LiveBytes(activations=others + mask, temporary=stream * (2 if run.first else 0))
    return Work(0, "forward", costs, peak, net)


def _others(shape: DecoderShape, run: Execution, layers: int) -> int:
    """Bytes of the other micro-batches in flight, and of the outputs that all of them keep."""
    of_layers = layers * kept_layer_bytes(shape, run) + _mask(shape, run)
    sent = stream_bytes(shape, run) if run.keeps_outputs and not run.last else 0
    return round((run.in_flight - 1) * of_layers + run.in_flight * sent)


def _mask(shape: DecoderShape, run: Execution) -> int:
    """Bytes of the dropout mask after the embedding."""
    return run.tokens * shape.dim if run.dropout and run.first else 0


def _layer_forward(shape: DecoderShape, run: Execution) -> Work:
    kept, made = kept_layer_bytes(shape, run), sum(layer_bytes(shape, run).values())
    # A layer under checkpointing frees what it made as it goes: at most about the widest part.
    widest = ffn_width(shape) * (3 if shape.gated else 2) * run.tokens * DTYPE_BYTES[run.dtype]
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
    wide = ffn_width(shape) * (2 if shape.gated else 1) * run.tokens * size // run.tp
    temporary = wide + 2 * stream_bytes(shape, run) + 2 * gathered_bytes(shape, run)
    grads = full_bytes(facts, run.dtype)
    peak = LiveBytes(temporary=temporary, grads=grads)
    net = LiveBytes(activations=-alive, grads=grads)
    return Work(1, "backward", backward_costs(shape, run), peak, net)


def _leave(shape: DecoderShape, run: Execution, layers: int) -> Work:
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
