"""Tapes of decoders from the formulas of their shapes: nothing is built and nothing is traced.

`layers` has the bytes that a layer makes and keeps, and its operations, `live` the bytes alive
meanwhile. This file puts them in program order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.plan.candidate import ALL_DEGREES, Candidate
from shardwise.plan.model.layers import (
    Execution,
    Implementation,
    eager_cost,
    layer_costs,
    recomputed_costs,
    stream_bytes,
)
from shardwise.plan.model.live import DecoderLive
from shardwise.plan.model.shapes import DecoderShape, Matrix
from shardwise.plan.model.tape import (
    Cost,
    LiveBytes,
    Phase,
    Tape,
    TapeParam,
    TapeUnit,
    UnitWork,
    Visit,
)

# Fields of an `Execution` that are the candidate's.
_SAME = ("micro_batch", "activation_checkpointing", "accumulation", "cp_method", *ALL_DEGREES)


class ShapedModel:
    """The tapes of a decoder of a shape, for windows of ``seq`` tokens, on one of its ranks.

    If layers do not divide into the pipeline's stages, the first stages have one more. ``eager`` is
    how layers run in eager PyTorch; a candidate with compiled kernels runs them compiled. ``notes``
    are remarks for the user on the source.

    **Raises** ConfigError for a window that is too long, and with a tape for a degree that the
    shape cannot have.
    """

    def __init__(
        self,
        name: str,
        shape: DecoderShape,
        seq: int,
        *,
        eager: Implementation = "decoder",
        notes: tuple[str, ...] = (),
    ) -> None:
        if seq < 1 or (shape.positions and seq > shape.positions):
            most = f" to {shape.positions}" if shape.positions else ""
            raise ConfigError(f"seq={seq}: {name} takes windows of 1{most} tokens")
        self.name = name
        self.seq = seq
        self._shape = shape
        self._eager = eager
        self._notes = notes
        self._tapes: dict[Execution, Tape] = {}

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return self._shape.num_params

    @property
    def num_experts(self) -> int:
        """Number of routed experts of a layer; 0: it is dense."""
        return self._shape.experts.num if self._shape.experts is not None else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on how the tapes are made."""
        notes = [
            *self._notes,
            "by the formulas of the model's shape, with flash attention; nothing is traced",
        ]
        if self._shape.experts is not None:
            notes.append("routers are taken to send as many tokens to each expert as to any other")
        return tuple(notes)

    def check_degrees(self, candidate: Candidate) -> None:
        """Refuse degrees that leave a rank with a part of a head, of a token or of a layer.

        **Raises** ConfigError, naming one.
        """
        for name in ("micro_batch", "accumulation", *ALL_DEGREES):
            if getattr(candidate, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(candidate, name)}")
        shape, seq, tp, cp, ep = self._shape, self.seq, candidate.tp, candidate.cp, candidate.ep
        experts, method = shape.experts, candidate.cp_method

        def refuse(is_wrong: bool, name: str, why: str) -> None:
            if is_wrong:
                raise ConfigError(f"{name}={getattr(candidate, name)}: {why}")

        widths = [(shape.heads, "heads")]
        if experts is None or experts.dense_layers:
            widths.append((shape.ffn, "columns of the feed-forward"))
        if experts is not None and experts.shared:
            widths.append((experts.shared * experts.ffn, "columns of the shared experts"))
        for size, what in widths:
            refuse(size % tp > 0, "tp", f"expected a divisor of the model's {size} {what}")
        why = f"expected a divisor or a multiple of the model's {shape.kv_heads} key-value heads"
        refuse(shape.kv_heads % tp > 0 and tp % shape.kv_heads > 0, "tp", why)
        why = f"expected at most one stage for each of the model's {shape.layers} layers"
        refuse(candidate.pp > shape.layers, "pp", why)
        refuse(seq % cp > 0, "cp", f"expected a divisor of the windows' {seq} tokens")
        heads, other = shape.heads // tp, "take cp_method gather"
        why = f"by heads, expected a divisor of the {heads} heads that a rank has; {other}"
        refuse(method == "heads" and heads % cp > 0, "cp", why)
        why = f"by ring, expected 2 x cp to divide the windows' {seq} tokens; {other}"
        refuse(method == "ring" and cp > 1 and seq % (2 * cp) > 0, "cp", why)
        num = 0 if experts is None or experts.dense_layers >= shape.layers else experts.num
        have = f"{num} experts" if num else "experts, and it has none"
        is_wrong = ep > 1 and (not num or num % ep > 0)
        refuse(is_wrong, "ep", f"expected a divisor of the model's {have}")
        region = candidate.num_shards * cp * tp
        product = f"{candidate.num_shards} x {cp} x {tp} = {region}"
        refuse(region % ep > 0, "ep", f"expected a divisor of dp_shard x cp x tp = {product}")

    def tape(self, candidate: Candidate, stage: int = 0) -> Tape:
        """Return one rank's micro-batch; with a pipeline, on one of its stages."""
        run = self._execution(candidate, stage)
        if run not in self._tapes:
            # The vocabulary is padded to a multiple of the ranks that share it, as in Megatron-LM.
            padded = replace(self._shape, vocab=-(-self._shape.vocab // run.tp) * run.tp)
            self._tapes[run] = _tape(padded, run)
        return self._tapes[run]

    def lower_bounds(self, candidate: Candidate) -> tuple[tuple[Cost, ...], int, int]:
        """Return lower bounds of a micro-batch on the first stage: (costs, bytes, input bytes).

        The bytes are alive at once, without gradients. Of these, the input bytes are those of
        checkpointed blocks.
        """
        tape = self.tape(candidate)
        works = [event for event in tape.events if isinstance(event, UnitWork)]
        alive = most = 0
        for work in works:
            most = max(most, alive + work.peak.total - work.peak.grad_full)
            alive += work.net.total - work.net.grad_full
        inputs = sum(e.input_bytes for e in tape.events if isinstance(e, Visit))
        counts = Counter(cost for work in works for cost in work.costs)
        costs = (
            Cost(c.kind, c.dtype, num * c.flops, num * c.moved_bytes, num * c.num_ops)
            for c, num in counts.items()
        )
        return tuple(costs), most, inputs

    def stages(self, candidate: Candidate) -> dict[int, Tape]:
        """Return one micro-batch on a rank of each pipeline stage that differs from all others.

        Of middle stages with layers of the same kinds, it is the first one, which has the most
        micro-batches in flight.
        """
        first_of_kind: dict[object, int] = {}
        for stage in range(candidate.pp):
            run = self._execution(candidate, stage)
            kinds = Counter(run.layers_of(self._shape).values())
            first_of_kind.setdefault((run.first, run.last, frozenset(kinds.items())), stage)
        return {stage: self.tape(candidate, stage) for stage in first_of_kind.values()}

    def boundary_bytes(self, candidate: Candidate) -> int:
        """Return the bytes of a micro-batch that a rank sends to the next stage."""
        return stream_bytes(self._shape, self._execution(candidate))

    def _execution(self, candidate: Candidate, stage: int = 0) -> Execution:
        self.check_degrees(candidate)
        is_compiled = candidate.kernels == "compiled"
        return Execution(
            seq=self.seq,
            pp_rank=stage,
            all_forward_first=candidate.pp_schedule == "gpipe",
            dtype=candidate.dtypes.compute,
            implementation="compiled" if is_compiled else self._eager,
            # Compiled layers free the logits early, as the row "freed" of the table of losses.
            loss="freed" if is_compiled and candidate.loss == "eager" else candidate.loss,
            on_cpu=candidate.transport == "point_to_point",
            **{name: getattr(candidate, name) for name in _SAME},
        )


# -- one rank's tape
def _tape(shape: DecoderShape, run: Execution) -> Tape:
    """Return the tape of one rank: unit 0 is the root (embedding, last norm, head), then layers.

    **Cost** linear in the number of layers, no tensors.

    **Source** ``data/layers.toml``, and the Notes of `layers` and `live`.
    """
    live, kinds = DecoderLive(shape, run), run.layers_of(shape)
    made = {kind: _layer(kind, live) for kind in set(kinds.values())}
    embedding, root, head = _end_units(shape, run, live.layers)
    units = [root, *([embedding] if embedding else ())]
    passes: list[tuple[_Layer, range]] = []
    whole = range(1)  # the units that run with the model: the root, and experts of a layer in it
    for number, kind in kinds.items():
        layer_units = [replace(u, name=f"layers.{number}{u.name}") for u in made[kind].units]
        if len(kinds) == 1:
            units += layer_units[1:]
            whole = range(len(layer_units))
            passes.append((made[kind], range(0)))
            continue
        passes.append((made[kind], range(len(units), len(units) + len(layer_units))))
        units += layer_units
    begin = range(1 if embedding else 0, 2 if embedding else 0)
    end = range(len(units), len(units) + 1) if head else range(0)
    units += [head] if head else []
    # A checkpoint around a layer saves the stream that comes in.
    input_bytes = live.stream if run.runs_again else 0
    enter, forward, loss, loss_backward, head_backward, norm_backward, leave = _ends(live)
    events: list[UnitWork | Visit] = [Visit("before_forward", unit) for unit in whole]
    events += _called(begin, enter)
    for layer, numbers in passes:
        events += _called(numbers, layer.forward, input_bytes=input_bytes)
    events += _called(end, forward)
    events += [*(Visit("after_forward", unit) for unit in reversed(whole)), loss]
    events += [Visit("before_backward", unit) for unit in reversed(whole)]
    events.append(loss_backward)  # the root's: the head is called with its gradient
    events += [*_passed(end, whole, head_backward), norm_backward]
    left = live.left_output
    for layer, numbers in reversed(passes):
        work, *others = layer.backward
        net = replace(work.net, activations=work.net.activations + left)
        work = replace(work, net=net, summed_net=work.summed_net and replace(net, grad_full=0))
        again = layer.recompute if run.runs_again else None
        events += _passed(numbers, whole, work, *others, again=again)
        left = 0
    events += _passed(begin, whole, leave)
    events += [Visit("after_backward", unit) for unit in reversed(whole)]  # at the pass's end
    # Bytes beside a micro-batch count until its last unit has ended.
    events.append(_work("backward", net=LiveBytes(-live.beside - live.left_output)))
    return Tape(
        units=tuple(units),
        events=tuple(events),
        compute_dtype=run.dtype,
        input_bytes=2 * 8 * run.tokens if run.first or run.last else 0,
        buffer_bytes=live.buffer_bytes,
        first_bytes=live.first_bytes,
        end_bytes=live.end_bytes,
        in_flight=run.in_flight,
    )


def _called(
    units: range, work: UnitWork, recomputes: bool = False, input_bytes: int = 0
) -> list[UnitWork | Visit]:
    """Return a forward pass of one module, with visits of its units; without units: of the root."""
    return [
        *(Visit("before_forward", n, recomputes, input_bytes * (n == units[0])) for n in units),
        replace(work, unit=units[0] if units else 0),
        *(Visit("after_forward", unit, recomputes) for unit in reversed(units)),
    ]


def _passed(
    units: range, whole: range, *works: UnitWork, again: UnitWork | None = None
) -> list[UnitWork | Visit]:
    """Return a backward pass of one module, with the work of each unit, the first unit's last.

    If the module is no unit, its works belong to the units of ``whole``.
    """
    working = units or whole
    return [
        *(Visit("before_backward", unit) for unit in reversed(units)),
        *(_called(units, again, recomputes=True) if again else ()),
        *reversed([replace(work, unit=unit) for unit, work in zip(working, works, strict=False)]),
        *(Visit("after_backward", unit) for unit in units),
    ]


_NONE = LiveBytes()


def _work(
    phase: Phase,
    peak: LiveBytes = _NONE,
    net: LiveBytes = _NONE,
    *costs: Cost,
    sums: bool = False,
) -> UnitWork:
    """Return a work of the root; ``sums``: its peak is the same if gradients are summed at once."""
    if sums:
        return UnitWork(0, phase, costs, peak, net, peak, replace(net, grad_full=0))
    return UnitWork(0, phase, costs, peak, net)


class _Layer(NamedTuple):
    """One layer: its units, that of its spread experts second if it has any, and their passes."""

    units: tuple[TapeUnit, ...]
    forward: UnitWork
    recompute: UnitWork
    backward: list[UnitWork]  # of each unit


def _layer(shape: DecoderShape, live: DecoderLive) -> _Layer:
    """Make the layer of a shape with one kind of layers."""
    run, units = live.run, _layer_units(shape, live.run)
    moments = live.layer_backward(shape, [unit.numel * live.size for unit in units])
    costs = [layer_costs(shape, run, backward=True), ()]
    return _Layer(
        units,
        _work("forward", *live.layer_forward(shape), *layer_costs(shape, run)),
        _work("recompute", *live.recompute(shape), *recomputed_costs(shape, run)),
        [
            UnitWork(1, "backward", cost, peak, net, summed, replace(net, grad_full=0))
            for cost, (peak, net, summed) in zip(costs, moments, strict=False)
        ],
    )


def _ends(live: DecoderLive) -> tuple[UnitWork, ...]:
    """Return the seven works of a rank beside its layers, in program order.

    Works of an end of the model that the stage does not have are empty.
    """
    shape, run, size = live.shape, live.run, live.size
    # Tables of positions are tiny; transformers makes more of them, and a mask.
    kernels = {"decoder": 10, "transformers": 17}.get(run.implementation, 2)
    lookup = [Cost("memory", run.dtype, 0, 3 * live.stream, kernels)] if run.first else []
    enter = _work("forward", *live.enter(), *lookup)
    leave = _work("backward", *live.leave(0, 0))
    if run.first:
        table = shape.vocab * shape.dim * size // run.tp
        cost = Cost("memory", run.dtype, 0, 2 * table + live.stream, 2)
        # A tied table has one gradient; the lookup's is added to the head's.
        grads = (0 if shape.tied and run.last else table) + shape.positions * shape.dim * size
        leave = _work("backward", *live.leave(table, grads), cost, sums=True)
    if not run.last:
        nothing = _work("backward")
        forward, loss = _work("forward"), _work("loss")
        return enter, forward, loss, nothing, nothing, nothing, leave
    head = shape.vocab * shape.dim * size // run.tp
    peak, net = live.head_forward()
    flops, moved = shape.head_flops_per_token * run.tokens // run.tp, net.logits + net.activations
    norm, norm_backward = (
        [eager_cost("end", shape, run, backward=b)] if run.is_eager else [] for b in (False, True)
    )
    product = Cost("matmul", run.dtype, flops, head + moved, 1 if run.is_eager else 2)
    flops = 2 * shape.head_flops_per_token * run.tokens // run.tp
    products = Cost("matmul", run.dtype, flops, 2 * head + 2 * live.stream, 2)
    of_norm = LiveBytes(grad_full=shape.norm_params * size)
    of_loss, again = live.loss(), live.loss_backward()
    if run.loss in ("eager", "held", "freed"):
        costs = [eager_cost("loss", shape, run, backward=b) for b in (False, True)]
    else:
        have = run.tokens * shape.vocab // run.tp * size
        moves = max(of_loss[0].logits, have), max(again[0].logits, 0)
        costs = [Cost("memory", "float32", 0, 3 * num_bytes, 4) for num_bytes in moves]
    return (
        enter,
        _work("forward", peak, net, product, *norm),
        _work("loss", *of_loss, *costs[: run.loss != "fused"]),
        _work("backward", *again, costs[1], sums=True),
        _work("backward", *live.head_backward(head), products),
        _work("backward", of_norm, of_norm, *norm_backward),
        leave,
    )


# -- units: rows and columns of matrices are cut as `train.degrees` does it
def _end_units(
    shape: DecoderShape, run: Execution, layers: list[DecoderShape]
) -> tuple[TapeUnit | None, TapeUnit, TapeUnit | None]:
    """Return the units beside the layers: embedding, root and head; None if the root has it.

    A table that belongs to one end only, and is as large as one of ``layers``, is a unit, as in
    `layout.units`. A single layer belongs to the root, with all other parameters.
    """
    alone = layers[0] if len(layers) == 1 else None
    shares = shape.tied and run.first and run.last
    smallest = min(kind.layer_params() for kind in set(layers))
    is_large = alone is None and not shares and shape.vocab * shape.dim >= smallest
    table = (shape.vocab // run.tp, shape.dim)
    embedding = head = None
    root: list[TapeParam] = []
    if run.first and is_large:
        params = (_param("embedding", *table),)
        embedding = TapeUnit("embedding", params, backward_reads_params=False)
    elif run.first:
        root.append(_param("embedding", *table))
    if run.first and shape.positions:
        root.append(_param("positions", shape.positions, shape.dim))
    if alone is not None:
        root += _layer_units(alone, run)[0].params
    if run.last:
        root += _norm(shape, "norm")
    if run.last and is_large:
        head = TapeUnit("head", (_param("head", *table),))
    elif run.last and not shares:
        root.append(_param("head", *table))
    return embedding, TapeUnit("", tuple(root)), head


def _layer_units(shape: DecoderShape, run: Execution) -> tuple[TapeUnit, ...]:
    """Return the unit of a layer, without its name, and that of its experts if they are spread."""
    experts, tp = shape.experts, run.tp
    params = [*_norm(shape, "attention_norm"), *_weights(shape.attention, "", tp)]
    if shape.qk_norm and shape.latent is None:
        params += [_param(f"{name}_norm", shape.head_dim) for name in ("query", "key")]
    params += _norm(shape, "feed_forward_norm")
    if experts is None:
        params += _weights(shape.feed_forward(shape.ffn), "feed_forward.", tp)
        return (TapeUnit("", tuple(params)),)
    params.append(_param("router", experts.num, shape.dim))
    one = _weights(shape.feed_forward(experts.ffn), "experts.", 1)
    routed = [_param(param.name, experts.num // run.ep, *param.shape) for param in one]
    if run.ep == 1:
        params += routed
    if experts.shared:
        params += _weights(shape.feed_forward(experts.shared * experts.ffn), "shared.", tp)
    layer = TapeUnit("", tuple(params))
    if run.ep == 1:
        return (layer,)
    over = Fraction(tp, run.ep)
    return layer, TapeUnit(".experts", tuple(routed), experts_over=over)


def _param(name: str, *shape: int) -> TapeParam:
    return TapeParam(name, shape, "float32")


def _norm(shape: DecoderShape, name: str) -> list[TapeParam]:
    biases = [_param(f"{name}.bias", shape.dim)] if shape.norm_bias else []
    return [_param(name, shape.dim), *biases]


def _weights(matrices: Iterable[Matrix], prefix: str, tp: int) -> Iterator[TapeParam]:
    """Yield the parameters that a rank of a tensor group has of matrices and their biases."""
    for matrix in matrices:
        rows = matrix.rows // tp if matrix.cut == 0 else matrix.rows
        columns = matrix.columns // tp if matrix.cut == 1 else matrix.columns
        yield _param(f"{prefix}{matrix.name}", rows, columns)
        if matrix.bias:
            yield _param(f"{prefix}{matrix.name}.bias", rows)
