"""Bytes alive in each stretch of a decoder's tape.

Each method describes one stretch of work: the bytes alive beyond those at its begin, at its largest
moment and at its end. Activations of the other micro-batches that a pipeline has in flight count
from the tape's first work until its units have finished this one.

`FusedLive` has the formulas of published systems with fused or compiled layers, `EagerLive` those
of eager PyTorch, allocation by allocation.

Note [Where the stream is]
The output of a layer is the input that the next one's first norm keeps. It exists from the
embedding on, so a layer's own lines are those that it keeps except its input, and its output. In
float32 the last norm keeps it until its backward; in other dtypes norms keep a float32 copy, and
the stream itself is freed once the loss exists. Its gradient takes its place.

Note [Moments of a layer's backward]
Autograd frees what a node kept as soon as the node has run, so the largest moment is not the one
with most temporaries. The candidates are the gradients of the product of gate and up; those of
gate and up, when the weights' gradients of the feed-forward exist; the gradients of query, key
and value; the last norm, when all gradients exist. With routed experts also those of the first
and last expert, and the moment when all their weights' gradients exist, one by one, and are
stacked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from shardwise.plan.model.activations import (
    Execution,
    ffn_columns,
    gathered_bytes,
    kept_layer_bytes,
    layer_bytes,
    logit_bytes,
    runs_again,
    saved_by_op,
    stream_bytes,
)
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import LiveBytes
from shardwise.plan.sizes import DTYPE_BYTES

Live = tuple[LiveBytes, LiveBytes]  # at the largest moment, and at the end
# The same, and the largest moment if each gradient is added to a sum at once; None: not known.
Moments = tuple[LiveBytes, LiveBytes, LiveBytes | None]
# With all gradients so far, and with each one added to a sum and freed as soon as it is written.
Moment = tuple[LiveBytes, LiveBytes]
_EAGER = ("eager", "held")  # losses that are made of all logits in float32
_NOTHING = LiveBytes(), LiveBytes()


def live_of(shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> "FusedLive":
    """Return the bytes that are alive on a rank that has these layers."""
    return (EagerLive if run.by_kernel else FusedLive)(shape, run, layers)


class FusedLive:
    """Bytes alive on one rank; ``layers`` are the shapes of its layers, one for each.

    A layer's methods take a shape with all layers like it. ``grads`` are bytes of full
    gradients that a stretch writes, for each unit of a layer.
    """

    def __init__(self, shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> None:
        self.shape, self.run, self.layers = shape, run, layers
        self.size = DTYPE_BYTES[run.dtype]
        self.stream = stream_bytes(shape, run)
        logits = run.tokens * shape.vocab // run.tp * self.size
        self._logits = logits if run.loss != "fused" else 0
        self.buffer_bytes = 0  # alive for the whole run, beside parameters
        self.end_bytes = 0  # alive when a pipeline's schedule reduces its stage
        self.left_output = 0  # of a stage's output, alive when the last layer's backward ends

    def enter(self) -> Live:
        """Return the bytes of the embedding, and of the other micro-batches in flight."""
        there = LiveBytes(activations=self.beside + self._mask())
        temporary = self.stream * (2 if self.run.first else 0)
        return LiveBytes(there.activations, temporary), there

    @property
    def beside(self) -> int:
        """Bytes of the other micro-batches in flight, and of the output that this one keeps."""
        run = self.run
        in_flight = run.in_flight - run.first_in_flight - 1
        sent = self.stream if run.keeps_outputs and not run.last else 0
        return round(in_flight * self._kept_bytes() + sent)

    def _kept_bytes(self) -> int:
        """Bytes that one micro-batch keeps from its forward to its backward, logits included."""
        run, layers = self.run, Counter(self.layers).items()
        kept = sum(num * kept_layer_bytes(kind, run) for kind, num in layers) + self._mask()
        if run.last:
            logits = logit_bytes(self.shape, run, "kept") if run.loss != "fused" else 0
            return kept + self._head_inputs() + logits
        return kept + (self.stream if run.keeps_outputs else 0)

    @property
    def first_bytes(self) -> int:
        """Bytes that are alive in the first micro-batch of a step only."""
        return self.run.first_in_flight * self._kept_bytes()

    def _mask(self) -> int:
        """Bytes of the dropout mask after the embedding."""
        return self.run.tokens * self.shape.dim if self.run.dropout and self.run.first else 0

    def layer_forward(self, shape: DecoderShape) -> Live:
        """Return the bytes that a layer keeps, and temporaries if it keeps less than it makes."""
        run = self.run
        kept, made = kept_layer_bytes(shape, run), sum(layer_bytes(shape, run).values())
        # A layer under checkpointing frees tensors as it runs: at most the widest part is alive.
        columns = ffn_columns(shape, run) * (3 if shape.gated else 2)
        widest = columns * run.tokens * self.size
        passing = min(made, widest) if runs_again(run) else 0
        temporary = passing + gathered_bytes(shape, run)
        return LiveBytes(kept, temporary), LiveBytes(activations=kept)

    def recompute(self, shape: DecoderShape) -> Live:
        """Return the bytes that a layer makes again in its backward."""
        more = LiveBytes(activations=self._recomputed(shape))
        return LiveBytes(more.activations, self.stream), more

    def _recomputed(self, shape: DecoderShape) -> int:
        made = sum(layer_bytes(shape, self.run).values())
        return max(made - kept_layer_bytes(shape, self.run), 0)

    def layer_backward(self, shape: DecoderShape, grads: Sequence[int]) -> list[Moments]:
        """Return the widest moment, d product and then d gate and d up, and the bytes freed.

        There is one for each unit of the layer. The second unit, of spread experts, runs first and
        has only its gradients.
        """
        run = self.run
        wide = ffn_columns(shape, run) * (2 if shape.gated else 1) * run.tokens * self.size
        temporary = wide + 2 * self.stream + 2 * gathered_bytes(shape, run)
        peak = LiveBytes(temporary=temporary, grads=grads[0])
        alive = kept_layer_bytes(shape, run) + runs_again(run) * self._recomputed(shape)
        net = LiveBytes(activations=-alive, grads=grads[0])
        written = [LiveBytes(grads=each) for each in grads[1:]]
        return [(peak, net, None), *((each, each, None) for each in written)]

    def head_forward(self) -> Live:
        """Return the bytes that the last norm and the head keep, and the logits."""
        live = LiveBytes(self._head_inputs(), logits=self._logits)
        return live, live

    def _head_inputs(self) -> int:
        """Bytes that the last norm and the head keep; DTensor keeps the head's input gathered."""
        head = gathered_bytes(self.shape, self.run) if self.run.loss == "loss_parallel" else 0
        return self.stream + max(head, self.stream)

    def loss(self) -> Live:
        """Return the bytes that the loss adds to the logits."""
        if self.run.loss == "fused":
            return _NOTHING
        have = self.run.tokens * self.shape.vocab // self.run.tp * self.size
        peak = logit_bytes(self.shape, self.run, "forward") - have
        kept = logit_bytes(self.shape, self.run, "kept") - have
        return LiveBytes(logits=max(peak, 0)), LiveBytes(logits=kept)

    def loss_backward(self) -> Live:
        """Return the bytes of the loss's backward, which leaves the gradient of the logits."""
        if self.run.loss == "fused":
            return _NOTHING
        kept = logit_bytes(self.shape, self.run, "kept")
        peak = logit_bytes(self.shape, self.run, "backward") - kept
        there = self._logits - kept
        return LiveBytes(temporary=self.stream, logits=max(peak, there)), LiveBytes(logits=there)

    def head_backward(self, head: int) -> Live:
        """Return the bytes that the head's backward takes, with its gradient, and frees."""
        net = LiveBytes(activations=-self._head_inputs(), logits=-self._logits, grads=head)
        return LiveBytes(temporary=self.stream, grads=head), net

    def leave(self, table: int, grads: int) -> Live:
        """Return the bytes that the embedding's backward takes and frees.

        ``table`` are the bytes of the gradient that the lookup writes.
        """
        if not self.run.first:
            return _NOTHING
        peak = LiveBytes(temporary=self.stream, grads=table)
        return peak, LiveBytes(activations=-self._mask(), grads=grads)


class EagerLive(FusedLive):
    """Bytes alive on one rank that runs the built-in decoder, or layers of transformers."""

    def __init__(self, shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> None:
        super().__init__(shape, run, layers)
        self._is_float32 = run.dtype == "float32"
        # True if norms keep the stream itself, and not a copy of it in float32.
        self._norms_hold_input = self._is_float32 or shape.norm == "layer"
        # The stream of all tokens that the ranks of a tensor group share, and as much if it is
        # gathered, or not summed yet, beside a rank's part.
        self._whole = run.tokens * shape.dim * self.size
        self._gathered = self._whole if run.tp > 1 else 0
        self._logits = 0 if run.loss == "fused" else run.tokens * shape.vocab * self.size
        # The caller has logits until backward ends, as a pipeline's last stage or with such a loss.
        is_held = run.last and (run.pipeline > 1 or run.loss == "held")
        self._output = self._logits if is_held else 0
        # Streams and their gradients that cross to other stages, for each micro-batch: buffers
        # receive them, and sent ones stay until the schedule ends (GPipe) or the next send.
        self._crossing = self.stream * ((not run.first) + (not run.last))
        self.buffer_bytes = run.micro_batches * self._crossing
        sent = run.micro_batches * self._crossing if run.all_forward_first else self.stream
        self.end_bytes = sent + (self._logits if run.last else 0)
        self.left_output = 0 if run.last else self.stream

    @property
    def _masks(self) -> int:
        """Bytes of the masks of a layer's attention on the last context rank, which has the most.

        Head and tail of a sequence meet there: one span, that sees all before its end.
        """
        run = self.run
        if run.cp == 1 or not run.on_cpu or run.cp_method != "gather":
            return 0
        part = run.seq // (2 * run.cp)
        return 2 * part * part * (run.cp + 1) * self.size

    def _layer(self, shape: DecoderShape) -> int:
        return sum(layer_bytes(shape, self.run).values()) + self._masks

    def _kept(self, shape: DecoderShape) -> int:
        again = runs_again(self.run)
        return kept_layer_bytes(shape, self.run) if again else self._layer(shape)

    def _saved(self, shape: DecoderShape) -> int:
        """Bytes of what a layer makes that are not computed again, but for its input."""
        by_op = self.run.activation_checkpointing == "per_op"
        return saved_by_op(layer_bytes(shape, self.run)) if by_op else 0

    @property
    def first_bytes(self) -> int:
        """Bytes that are alive in the first micro-batch only; no gradient was sent before it."""
        return super().first_bytes - (self._sent if self.run.all_forward_first else 0)

    @property
    def _sent(self) -> int:
        """Bytes that a stage has sent and still holds while a micro-batch runs.

        1F1B keeps the gradient that it sent last, and until its end the output of the last
        micro-batch but one of those before its first backward. That output is beside all outputs
        in flight once its own backward has ended, if as many micro-batches follow. GPipe keeps all
        that it sends until the schedule ends, so the second backward pass has the most, or the last
        one if a pass frees less than it sends.
        """
        run = self.run
        if run.pipeline == 1:
            return 0
        if not run.all_forward_first:
            behind = run.pipeline - run.pipeline_rank
            stays = behind > 1 and run.micro_batches >= 2 * behind - 1
            return self.stream * ((not run.first) + stays)
        grows = max(0, self._crossing - self._kept_bytes())
        return self._crossing + (run.micro_batches - 2) * grows if run.micro_batches > 1 else 0

    def _own(self) -> int:
        """Bytes of a micro-batch that are alive from its begin to its end."""
        # Positions, and cosines and sines. A received stream that the first norm keeps is a buffer.
        rotary = 8 + (self.shape.head_dim * 4 if self.shape.norm == "rms" else 0)
        is_buffer = not self.run.first and self._norms_hold_input
        own = (0 if is_buffer else self.stream) + self._mask()
        return own + self.run.seq // self.run.cp * rotary

    def _kept_bytes(self) -> int:
        kept = sum(map(self._kept, self.layers)) + self._own()
        if not self.run.last:
            return kept
        stream = 0 if self._norms_hold_input else self.stream
        return kept + self._head_inputs() - stream + self._kept_logits + self._output

    @property
    def beside(self) -> int:
        """Bytes of the other micro-batches in flight, and of streams sent and still held."""
        run = self.run
        others = run.in_flight - run.first_in_flight - 1
        return round(others * self._kept_bytes()) + self._sent

    def enter(self) -> Live:
        """Return the stream with its positions, and other micro-batches in flight."""
        there = LiveBytes(activations=self.beside + self._own())
        temporary = self._gathered if self.run.first else 0
        return LiveBytes(there.activations, temporary), there

    def layer_forward(self, shape: DecoderShape) -> Live:
        """Return the bytes that a layer keeps, at its end beside updates and their sums."""
        kept = self._kept(shape)
        # In other dtypes than float32 a layer's lines have neither its stream nor a part's norm.
        streams = 2 if self._norms_hold_input else 3 + (self.run.tp > 1)
        passing = self.stream * streams + 2 * self._gathered
        if runs_again(self.run):
            wide = ffn_columns(shape, self.run) * self.run.tokens * self.size
            passing += 3 * wide + self.stream
        peak = LiveBytes(kept, passing)
        if shape.experts is not None:
            making = self._at_experts(shape)
            if runs_again(self.run):  # of what the layer makes, only its copies of tokens are there
                making = LiveBytes(kept, making.temporary)
            peak = max(peak, making, key=lambda moment: moment.total)
        # The caller of the layers has the embedding's output until they return. In float32 the
        # first norm keeps it anyway.
        is_held = self.run.first and len(self.layers) > 1 and not self._norms_hold_input
        there = LiveBytes(peak.activations, peak.temporary + (self.stream if is_held else 0))
        return there, LiveBytes(activations=kept)

    def _at_experts(self, shape: DecoderShape) -> LiveBytes:
        """Return the moment at which rows come back: as sent, arrived, made, sorted, received."""
        made = layer_bytes(shape, self.run)
        to_come = made["output of experts"] + sum(made.get(name, 0) for name in _FEED_FORWARD)
        copies = 5 if self.run.ep > 1 else 2
        temporary = copies * made["routed rows"]
        temporary += 0 if self._norms_hold_input else 2 * self.stream
        # Beside the gathered stream there are its parts, and those that are sent.
        parts = (self.run.tp > 1) + (self.run.tp > 1 and self.run.ep > 1)
        temporary += parts * self.stream
        return LiveBytes(self._layer(shape) - to_come, temporary)

    def recompute(self, shape: DecoderShape) -> Live:
        """Return the bytes that a layer makes again, beside the gathered gradient of its output."""
        made = LiveBytes(activations=self._layer(shape) - self._saved(shape))
        if shape.experts is not None:
            making = self._at_experts(shape)
            making = LiveBytes(making.activations, making.temporary + self._gathered)
            made = max(made, making, key=lambda moment: moment.total)
        return made, LiveBytes(activations=self._recomputed(shape))

    def _recomputed(self, shape: DecoderShape) -> int:
        """Bytes that a layer keeps beside its input, which exists already."""
        stream = self.stream if self._norms_hold_input else 0
        return self._layer(shape) - stream - self._saved(shape)

    def layer_backward(self, shape: DecoderShape, grads: Sequence[int]) -> list[Moments]:
        """Return the largest of the moments of the Note, and the bytes freed."""
        alive = self._kept(shape) + runs_again(self.run) * self._recomputed(shape)
        begin = [*self._feed_forward(shape)]
        begin += self._experts(shape) if shape.experts is not None else ()
        if len(grads) == 1:
            end = self._attention(shape, grads[0], 0)
            return [_largest([*begin, *end], LiveBytes(-alive, grads=grads[0]))]
        made = layer_bytes(shape, self.run)
        gone = self._of_shared(made) + made["output of experts"]
        gone += sum(made[name] for name in _EXPERTS)
        end = self._attention(shape, grads[0], gone)
        return [
            _largest([*end], LiveBytes(gone - alive, grads=grads[0])),
            _largest(begin, LiveBytes(-gone, grads=grads[1])),
        ]

    def _feed_forward(self, shape: DecoderShape) -> Iterator[Moment]:
        """Yield the moments of a dense or shared feed-forward."""
        run, made = self.run, layer_bytes(shape, self.run)
        width = shape.ffn if shape.experts is None else shape.experts.shared * shape.experts.ffn
        wide = width * run.tokens * self.size // run.tp
        matrix = shape.dim * width * self.size // run.tp
        if not width:
            return
        yield _moment(0, wide + self._gathered, matrix, matrix)
        num = 3 if shape.gated else 2
        yield _moment(-made["last input"], num * wide, matrix, 0)
        freed = sum(made.get(name, 0) for name in _FEED_FORWARD)
        yield _moment(-freed, wide + 2 * self._whole, num * matrix, matrix)

    def _attention(self, shape: DecoderShape, grads: int, gone: int) -> Iterator[Moment]:
        """Yield the moments of query, key and value, and of the first norm.

        ``gone`` are bytes of the layer that another unit's backward has freed.
        """
        run, made = self.run, layer_bytes(shape, self.run)
        heads = run.tokens * self.size // run.tp
        all_made = self._layer(shape) - gone
        projections = shape.dim * (shape.q_dim + 2 * shape.kv_dim) * self.size // run.tp
        matrix = shape.dim * shape.q_dim * self.size // run.tp
        # Out of the kernel come gradients of the keys and values of all context ranks.
        left = sum(made.get(name, 0) for name in _BEFORE_ATTENTION)
        # Of the first norm; in float32 its input is what the layer before has made.
        there = made["attention input"]
        in_float32 = made.get("norms in float32", 0) + made.get("normed", 0)
        there += in_float32 // (4 if self._is_float32 else 2)
        if run.cp > 1 and run.cp_method == "ring":
            there += sum(made[name] for name in _ATTENDED)
            yield _moment(there - all_made, self._ring(shape), grads - projections, 0)
        if run.cp > 1 and run.cp_method == "gather":
            swapped = shape.q_dim * heads + self._swapped(shape)
            yield _moment(there - all_made, swapped, grads - projections, matrix)
        flows = (shape.q_dim + 2 * shape.kv_dim * run.cp) * heads
        flows += self._whole + self.stream
        yield _moment(left - all_made, flows, grads - projections, matrix)
        left = (in_float32 + made.get("norm inputs", 0)) // 2 + made["attention input"]
        flows = (shape.q_dim + 2 * shape.kv_dim) * heads + self._whole
        yield _moment(left - all_made, flows, grads, matrix)
        norms = 3 * in_float32 // 4 or self.stream
        yield _moment(left - all_made, norms + self._whole, grads, 0)

    def _swapped(self, shape: DecoderShape) -> int:
        """Bytes that gradients of gathered keys and values have on their way back to their ranks.

        Of all ranks' keys, as the kernel made them and as they arrive; their sum in float32, for
        which a CPU copies all of them in it; and the gradient of the stream beside attention.
        """
        own = 2 * shape.kv_dim * self.run.tokens // self.run.tp
        copied = own * self.run.cp * 4 if self.run.on_cpu and not self._is_float32 else 0
        return 2 * self.run.cp * own * self.size + copied + 4 * own + self.stream

    def _ring(self, shape: DecoderShape) -> int:
        """Bytes of torch's ring attention in backward, when gradients arrive on the first rank.

        Keys and values have as many heads as queries. There are those gathered and those sent;
        sums of gradients in float32, a pair of them sent and one received; what the kernel made of
        the rank's own keys, and makes of the next ones for half of the queries; the gradient of
        the output as it came, contiguous, and its half.
        """
        own = self.run.tokens * shape.q_dim // self.run.tp
        halves = 2 * (2 * self.run.cp + 2 + 3 + 2 + 2) + 1 + 1
        return halves * own // 2 * self.size + 7 * own * 4 + self.stream

    def _of_shared(self, made: Mapping[str, int]) -> int:
        """Bytes that the backward of shared experts frees.

        In float32 the router keeps their input as well; else it has a copy in float32.
        """
        own = 0 if self._norms_hold_input else made["ffn input"]
        return own + sum(made.get(name, 0) for name in _FEED_FORWARD)

    def _experts(self, shape: DecoderShape) -> Iterator[Moment]:
        """Yield the weighing of what experts made, the first and last expert, and the stacks.

        The incoming gradient lives until the last expert has read its part. Then their gradients
        are joined, and each weight's gradients are stacked, which takes as much again.
        """
        assert shape.experts is not None
        run, made = self.run, layer_bytes(shape, self.run)
        matrix = shape.dim * shape.experts.ffn * self.size
        num, rows = shape.experts.num // run.ep, made["routed rows"]
        shared = self._of_shared(made)
        of_shared = 3 * shape.experts.shared * matrix // run.tp
        flow = self._whole if shape.experts.shared else 0
        yield _moment(-shared, self._gathered + flow + 2 * rows, of_shared, 0)
        one = made["gate of experts"] // num
        freed = shared + made["output of experts"]
        product = made["last input of experts"] // num
        passing = flow + (rows if num > 1 else 0) + 3 * one
        yield _moment(-freed - product, passing + matrix, of_shared, 0)
        freed += sum(made[name] for name in _EXPERTS)
        # Of the last expert all is there that it keeps, and all copies of tokens.
        left = made["routed rows"] + (freed - shared - made["output of experts"] - rows) // num
        passing = flow + rows + rows * (num - 1) // num + one
        yield _moment(left - freed, passing + (3 * num - 2) * matrix, of_shared, 0)
        yield _moment(-freed, flow + 2 * rows + 3 * num * matrix, of_shared, 0)
        temporary = flow + rows + 3 * num * matrix
        yield _moment(-freed, temporary, of_shared + num * matrix, num * matrix)

    def head_forward(self) -> Live:
        """Return the bytes that the last norm and the head keep, and whole logits on each rank."""
        kept, logits = self._head_inputs(), self._logits
        parts = 0 if self.run.tp == 1 else logits + logits // self.run.tp
        return LiveBytes(kept, logits=logits + parts), LiveBytes(kept, logits=logits)

    @property
    def _kept_logits(self) -> int:
        """Bytes kept for the loss's backward, such as the log-softmax."""
        if self.run.loss in _EAGER:
            return self.run.tokens * self.shape.vocab * 4
        return 0 if self.run.loss == "fused" else logit_bytes(self.shape, self.run, "kept")

    def _head_inputs(self) -> int:
        """Bytes that the last norm and the head keep, but for the stream."""
        divides = self.run.tp if self.run.sequence_parallel else 1
        normed = self.run.tokens * (self.shape.dim + 1) * 4 // divides
        upcast = 0 if self._norms_hold_input else self.run.tokens * self.shape.dim * 4 // divides
        return normed + upcast + self._whole

    def loss(self) -> Live:
        """Return the log-softmax and, in other dtypes than float32, the logits in float32."""
        peak = self._kept_logits * (1 if self._is_float32 else 2)
        if self.run.loss not in _EAGER:
            peak = super().loss()[0].logits
        stream = 0 if self._norms_hold_input else -self.stream
        kept = LiveBytes(stream, logits=self._kept_logits + self._output - self._logits)
        return LiveBytes(logits=peak), kept

    def loss_backward(self) -> Live:
        """Return the loss's largest moment; the gradient of the logits takes its place."""
        if self.run.loss not in _EAGER:
            return super().loss_backward()
        peak = LiveBytes(logits=2 * self._kept_logits)
        return peak, LiveBytes(logits=self._logits - self._kept_logits)

    def head_backward(self, head: int) -> Live:
        """Return the bytes of the gradients of the head and of its input, and the bytes freed."""
        parts = self._logits // self.run.tp if self.run.tp > 1 else 0
        peak = LiveBytes(temporary=self._whole, logits=parts, grads=head)
        stream = 0 if self._norms_hold_input else self.stream
        freed = stream - self._head_inputs()
        return peak, LiveBytes(freed, logits=-self._logits, grads=head)

    def leave(self, table: int, grads: int) -> Live:
        """Return the gradient of the table beside the stream's, and the bytes freed.

        Under tensor parallelism torch writes it for all rows; a rank's are copied out of it when
        they are reduced.
        """
        others = table * (self.run.tp - 1)
        freed = LiveBytes(-self._own(), logits=-self._output, grads=grads + others)
        if not self.run.first:
            return LiveBytes(), freed
        return LiveBytes(temporary=self._gathered, grads=table + others), freed


def _largest(moments: Sequence[Moment], net: LiveBytes) -> Moments:
    written = max((written for written, _ in moments), key=lambda moment: moment.total)
    summed = max((summed for _, summed in moments), key=lambda moment: moment.total)
    return written, net, summed


def _moment(activations: int, temporary: int, grads: int, last: int) -> Moment:
    """Return a moment; ``last`` are bytes of the gradient that no sum has taken yet."""
    return (
        LiveBytes(activations, temporary, grads=grads),
        LiveBytes(activations, temporary, grads=last),
    )


_FEED_FORWARD = ("activation input", "up", "activation output", "last input")
_EXPERTS = (
    *("gate of experts", "up of experts", "activations of experts", "last input of experts"),
    "routed rows",
)
_ATTENDED = ("query", "key, value", "other key, value", "attention output", "log-sum-exp")
_BEFORE_ATTENTION = (
    *("norms in float32", "norm inputs", "attention input", "query norm", "key norm"),
    *("query", "key, value"),
)
