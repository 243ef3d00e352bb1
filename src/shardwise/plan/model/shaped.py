"""Tapes of decoders from the formulas of their shapes: nothing is built and nothing is traced.

`activations` has the bytes that a layer makes and keeps, `live` those alive meanwhile, `costs` its
operations. This file puts them in program order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.activations import Execution, Implementation, runs_again, stream_bytes
from shardwise.plan.model.costs import backward_costs, eager_cost, layer_costs, recomputed_costs
from shardwise.plan.model.live import FusedLive, live_of
from shardwise.plan.model.shapes import DecoderShape, Matrix
from shardwise.plan.model.tape import (
    Cost,
    LiveBytes,
    Phase,
    Tape,
    TapeParam,
    TapeUnit,
    Visit,
    Work,
    full_bytes,
)
from shardwise.plan.sizes import PRECISIONS, row_of


class Least(NamedTuple):
    """Lower bounds of a tape: its costs, and bytes.

    ``alive_bytes`` are alive at once at the loss or in the last layer's backward, without
    gradients; ``input_bytes`` of them are inputs of checkpointed blocks.
    """

    costs: tuple[Cost, ...]
    alive_bytes: int
    input_bytes: int


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
        self._eager, self._notes = eager, notes
        self._tapes: dict[Execution, Tape] = {}
        self._least: dict[Execution, Least] = {}

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
        how = "by the formulas of the model's shape, with flash attention; nothing is traced"
        even = "routers are taken to send as many tokens to each expert as to any other"
        return (*self._notes, how, *([even] if self._shape.experts is not None else []))

    def check_degrees(self, candidate: Candidate) -> None:
        """Refuse degrees that the shape cannot have. **Raises** ConfigError, naming one."""
        _check_degrees(self._shape, self.seq, candidate)

    def tape(self, candidate: Candidate, stage: int = 0) -> Tape:
        """Return one rank's micro-batch; with a pipeline, on one of its stages."""
        return self._tape(self._execution(candidate, stage))

    def least(self, candidate: Candidate) -> Least:
        """Return lower bounds of the costs and bytes of a micro-batch on the first stage."""
        run = self._execution(candidate)
        if run not in self._least:
            self._least[run] = least_of(self._padded(run), run)
        return self._least[run]

    def stages(self, candidate: Candidate) -> dict[int, Tape]:
        """Return one micro-batch on a rank of each pipeline stage that differs from all others.

        Of middle stages with layers of the same kinds, it is the first one, which has the most
        micro-batches in flight.
        """
        found: dict[object, tuple[int, Execution]] = {}
        for stage in range(candidate.pp):
            run = self._execution(candidate, stage)
            first, num = run.first_here(self._shape), run.layers_here(self._shape)
            kinds = Counter(self._shape.of_layer(first + i) for i in range(num))
            alike = (run.first, run.last, frozenset(kinds.items()))
            found.setdefault(alike, (stage, run))
        return {stage: self._tape(run) for stage, run in found.values()}

    def boundary_bytes(self, candidate: Candidate) -> int:
        """Return the bytes of a micro-batch that a rank sends to the next stage."""
        return stream_bytes(self._shape, self._execution(candidate))

    def _execution(self, candidate: Candidate, stage: int = 0) -> Execution:
        self.check_degrees(candidate)
        each, more = divmod(self._shape.layers, candidate.pp)
        is_compiled = candidate.kernels == "compiled"
        return Execution(
            candidate.micro_batch,
            self.seq,
            activation_checkpointing=candidate.activation_checkpointing,  # type: ignore[arg-type]
            tp=candidate.tp,
            sequence_parallel=candidate.tp > 1,
            pipeline=candidate.pp,
            pipeline_rank=stage,
            rank_layers=each + (stage < more),
            first_layer=stage * each + min(stage, more),
            micro_batches=candidate.accumulation,
            all_forward_first=candidate.pp_schedule == "gpipe",
            cp=candidate.cp,
            cp_method=candidate.cp_method,
            ep=candidate.ep,
            dtype=row_of(PRECISIONS, candidate.precision, "precision").compute,
            implementation=self._eager if candidate.kernels == "eager" else "compiled",
            # Compiled layers have the bytes of theirs by the table of losses.
            loss="freed" if is_compiled and candidate.loss == "eager" else candidate.loss,
            keeps_outputs=True,
            large_units=True,
            on_cpu=candidate.transport == "point_to_point",
        )

    def _tape(self, run: Execution) -> Tape:
        if run not in self._tapes:
            self._tapes[run] = shape_tape(self._padded(run), run, name=self.name)
        return self._tapes[run]

    def _padded(self, run: Execution) -> DecoderShape:
        """Pad the vocabulary to a multiple of the ranks that share it, as Megatron-LM does."""
        return replace(self._shape, vocab=-(-self._shape.vocab // run.tp) * run.tp)


def _check_degrees(shape: DecoderShape, seq: int, candidate: Candidate) -> None:
    """Refuse degrees that leave a rank with a part of a head, of a token or of a layer."""
    tensor, context = candidate.tp, candidate.cp
    experts = shape.experts
    widths = [(shape.heads, "heads")]
    if experts is None or experts.dense_layers:
        widths.append((shape.ffn, "columns of the feed-forward"))
    if experts is not None and experts.shared:
        widths.append((experts.shared * experts.ffn, "columns of the shared experts"))
    for size, what in widths:
        if size % tensor:
            raise ConfigError(f"tp={tensor}: expected a divisor of the model's {size} {what}")
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        raise ConfigError(
            f"tp={tensor}: expected a divisor or a multiple of the model's "
            f"{shape.kv_heads} key-value heads"
        )
    if candidate.pp > shape.layers:
        raise ConfigError(
            f"pp={candidate.pp}: expected at most one stage for each "
            f"of the model's {shape.layers} layers"
        )
    if seq % context:
        raise ConfigError(f"cp={context}: expected a divisor of the windows' {seq} tokens")
    heads = shape.heads // tensor
    if candidate.cp_method == "heads" and heads % context:
        raise ConfigError(
            f"cp={context}: by heads, expected a divisor of the {heads} heads that a rank has; "
            "take cp_method gather"
        )
    if candidate.cp_method == "ring" and context > 1 and seq % (2 * context):
        raise ConfigError(
            f"cp={context}: by ring, expected 2 x cp to divide the windows' {seq} tokens; take "
            "cp_method gather"
        )
    num = 0 if experts is None or experts.dense_layers >= shape.layers else experts.num
    if candidate.ep > 1 and (not num or num % candidate.ep):
        have = f"{num} experts" if num else "experts, and it has none"
        raise ConfigError(f"ep={candidate.ep}: expected a divisor of the model's {have}")
    region = candidate.num_shards * context * tensor
    if region % candidate.ep:
        raise ConfigError(
            f"ep={candidate.ep}: expected a divisor of dp_shard x cp x tp = {candidate.num_shards} "
            f"x {context} x {tensor} = {region}"
        )


# -- one rank's tape
def shape_tape(shape: DecoderShape, run: Execution, *, name: str = "decoder") -> Tape:
    """Return the tape of one rank: unit 0 is the root (embedding, last norm, head), then layers.

    **Cost** linear in the number of layers, no tensors.

    **Source** ``data/layers.toml``, and the Notes of `activations`, `live` and `costs`.
    """
    layers, first = run.layers_here(shape), run.first_here(shape)
    kinds = [shape.of_layer(first + i) for i in range(layers)]
    live = live_of(shape, run, kinds)
    made = {kind: _Layer.of(kind, live) for kind in set(kinds)}
    embedding, root, head = _end_units(shape, run, kinds)
    units = [root, *([embedding] if embedding else ())]
    passes: list[tuple[_Layer, range]] = []
    whole = range(1)  # the units that run with the model: the root, and experts of a layer in it
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
    # Bytes beside a micro-batch count until its last unit has ended.
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


def least_of(shape: DecoderShape, run: Execution) -> Least:
    """Return the lower bounds of a micro-batch of a rank.

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
        costs += [
            replace(
                cost,
                flops=num * cost.flops,
                moved_bytes=num * cost.moved_bytes,
                num_ops=num * cost.num_ops,
            )
            for work in runs
            for cost in work.costs
        ]
        kept += num * layer.forward.net.total
        if kind == kinds[-1] and runs_again(run):
            again = layer.recompute.peak.total
    there, most = kept, kept + again
    for work in works[1:4]:
        most = max(most, there + work.peak.total)
        there += work.net.total
    return Least(tuple(costs), most, layers * _saved_input(live))


@dataclass(frozen=True)
class _Layer:
    """One layer: its units, that of its spread experts second if it has any, and their passes."""

    units: tuple[TapeUnit, ...]
    forward: Work
    recompute: Work
    backward: tuple[Work, ...]  # of each unit

    @classmethod
    def of(cls, shape: DecoderShape, live: FusedLive) -> "_Layer":
        """Make the layer of a shape with one kind of layers."""
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


def _saved_input(live: FusedLive) -> int:
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


def _enter(live: FusedLive) -> Work:
    """The embedding; other micro-batches in flight are counted from here on."""
    run = live.run
    # Tables of positions are tiny; transformers makes more of them, and a mask.
    kernels = {"decoder": 10, "transformers": 17}.get(run.implementation, 2)
    costs = (Cost("memory", run.dtype, 0, 3 * live.stream, kernels),) if run.first else ()
    return Work(0, "forward", costs, *live.enter())


def _head_forward(live: FusedLive) -> Work:
    shape, run = live.shape, live.run
    if not run.last:
        return _nothing("forward")
    peak, net = live.head_forward()
    flops = shape.head_flops_per_token * run.tokens // run.tp
    moved = shape.vocab * shape.dim * live.size // run.tp + net.logits + net.activations
    product = Cost("matmul", run.dtype, flops, moved, 2)
    if not run.by_kernel:
        return Work(0, "forward", (product,), peak, net)
    costs = replace(product, num_ops=1), eager_cost("end", shape, run)
    return Work(0, "forward", costs, peak, net)


def _loss(live: FusedLive) -> Work:
    shape, run = live.shape, live.run
    if not run.last or run.loss == "fused":
        return _nothing("loss")
    peak, net = live.loss()
    have = run.tokens * shape.vocab // run.tp * live.size
    cost = Cost("memory", "float32", 0, 3 * max(peak.logits, have), 4)
    if run.as_in_torch and run.loss in ("eager", "held", "freed"):
        cost = eager_cost("loss", shape, run)
    return Work(0, "loss", (cost,), peak, net)


def _loss_backward(live: FusedLive) -> Work:
    run = live.run
    if not run.last:
        return _nothing("backward")
    peak, net = live.loss_backward()
    cost = Cost("memory", "float32", 0, 3 * max(peak.logits, 0), 4)
    if run.as_in_torch and run.loss in ("eager", "held", "freed"):
        cost = eager_cost("loss", live.shape, run, backward=True)
    return Work(0, "backward", (cost,), peak, net, peak, net)


def _head_backward(live: FusedLive) -> Work:
    shape, run = live.shape, live.run
    if not run.last:
        return _nothing("backward")
    head = shape.vocab * shape.dim * live.size // run.tp
    peak, net = live.head_backward(head)
    flops = 2 * shape.head_flops_per_token * run.tokens // run.tp
    cost = Cost("matmul", run.dtype, flops, 2 * head + 2 * live.stream, 2)
    return Work(0, "backward", (cost,), peak, net)


def _norm_backward(live: FusedLive) -> Work:
    """The last norm, which is the root's."""
    if not live.run.last:
        return _nothing("backward")
    eager = live.run.by_kernel
    costs = (eager_cost("end", live.shape, live.run, backward=True),) if eager else ()
    grads = LiveBytes(grads=live.shape.norm_params * live.size)
    return Work(0, "backward", costs, grads, grads)


def _leave(live: FusedLive) -> Work:
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
) -> tuple[TapeUnit | None, TapeUnit, TapeUnit | None]:
    """Return the units beside the layers: embedding, root and head; None if the root has it.

    With ``run.large_units`` a table that belongs to one end alone, and is as large as one of
    ``layers``, is a unit, as in `layout.units`; and a single layer belongs to the root with all
    that is there.
    """
    alone = _only_layer(run, layers)
    shares = shape.tied and run.first and run.last
    smallest = min((kind.layer_params() for kind in layers), default=0)
    is_large = run.large_units and not shares and shape.vocab * shape.dim >= smallest > 0
    is_large = is_large and alone is None
    table = (shape.vocab // run.tp, shape.dim)
    embedding = head = None
    root: list[TapeParam] = []
    if run.first and is_large:
        params = (_param("embedding", *table),)
        embedding = TapeUnit("embedding", "TokenEmbedding", params, backward_reads_params=False)
    elif run.first:
        root.append(_param("embedding", *table))
    if run.first and shape.positions:
        root.append(_param("positions", shape.positions, shape.dim))
    if alone is not None:
        root += _layer_units(alone, run)[0].params
    if run.last:
        root += _norm(shape, "norm")
    if run.last and is_large:
        head = TapeUnit("head", "Projection", (_param("head", *table),))
    elif run.last and not shares:
        root.append(_param("head", *table))
    return embedding, TapeUnit("", "Decoder", tuple(root)), head


def _only_layer(run: Execution, layers: Sequence[DecoderShape]) -> DecoderShape | None:
    """Return the single layer, which belongs to the root; None if there are several."""
    return layers[0] if run.large_units and len(layers) == 1 else None


def _layer_units(shape: DecoderShape, run: Execution) -> tuple[TapeUnit, ...]:
    """Return the unit of a layer, without its name, and that of its experts if they are spread."""
    experts, tp = shape.experts, run.tp
    params = [*_norm(shape, "attention_norm"), *_weights(shape.attention, "", tp)]
    if shape.qk_norm and shape.latent is None:
        params += [_param(f"{name}_norm", shape.head_dim) for name in ("query", "key")]
    params += _norm(shape, "feed_forward_norm")
    if experts is None:
        params += _weights(shape.feed_forward(shape.ffn), "feed_forward.", tp)
        return (TapeUnit("", "Layer", tuple(params)),)
    params.append(_param("router", experts.num, shape.dim))
    one = _weights(shape.feed_forward(experts.ffn), "experts.", 1)
    routed = [_param(param.name, experts.num // run.ep, *param.shape) for param in one]
    if run.ep == 1:
        params += routed
    if experts.shared:
        params += _weights(shape.feed_forward(experts.shared * experts.ffn), "shared.", tp)
    layer = TapeUnit("", "Layer", tuple(params))
    if run.ep == 1:
        return (layer,)
    over = Fraction(tp, run.ep)
    return layer, TapeUnit(".experts", "Experts", tuple(routed), experts_over=over)


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
