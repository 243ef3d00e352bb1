"""Bytes alive in each stretch of a decoder's tape.

Each method describes one stretch of work: the bytes alive beyond those at its begin, at its largest
moment and at its end. Activations of the other micro-batches that a pipeline has in flight count
from the tape's first work until its units have finished this one. The bytes are those of layers in
eager PyTorch, allocation by allocation; compiled layers have another table of kept bytes.

Note [The residual stream]
The output of a layer is the input that the next one's first norm keeps. It exists from the
embedding on, so a layer adds the bytes that it keeps except its input, and its output. In float32
the last norm keeps the stream until its backward. In other dtypes norms keep a float32 copy, and
the stream is freed once the loss exists. Its gradient replaces it.

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
from functools import cached_property

from shardwise.plan.model.layers import (
    Execution,
    kept_layer_bytes,
    layer_bytes,
    logit_bytes,
    saved_bytes,
    stream_bytes,
    widths_of,
)
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import LiveBytes
from shardwise.plan.sizes import DTYPE_BYTES

Live = tuple[LiveBytes, LiveBytes]  # at the largest moment, and at the end
# The same, and the largest moment if each gradient is added to a sum at once.
BackwardLive = tuple[LiveBytes, LiveBytes, LiveBytes]
# With all gradients so far, and with each one added to a sum and freed as soon as it is written.
BackwardMoment = tuple[LiveBytes, LiveBytes]
_EAGER = ("eager", "held")  # losses that are made of all logits in float32


class DecoderLive:
    """Bytes alive on one rank, whose ``layers`` are given by their shapes.

    A layer's methods take a shape with all layers like it. ``grads`` are bytes of full
    gradients that a stretch writes, for each unit of a layer.
    """

    def __init__(self, shape: DecoderShape, run: Execution) -> None:
        self.shape = shape
        self.run = run
        self.layers = list(run.layers_of(shape).values())
        self.size = DTYPE_BYTES[run.dtype]
        self.stream = stream_bytes(shape, run)
        # The stream of all tokens that the ranks of a tensor group share, and as much if it is
        # gathered, or not summed yet, beside a rank's part.
        self._whole = run.tokens * shape.dim * self.size
        self._gathered = self._whole if run.tp > 1 else 0
        self._local_logits = run.tokens * shape.vocab // run.tp * self.size
        self._is_float32 = run.dtype == "float32"
        # True if norms keep the stream itself, and not a copy of it in float32.
        self._norms_hold_input = self._is_float32 or shape.norm == "layer" or not run.is_eager
        # The built-in decoder has whole logits on each rank of a tensor group.
        is_parallel = run.loss in ("loss_parallel", "vocab_parallel") or not run.is_eager
        self._is_whole = run.tp > 1 and not is_parallel
        self._logits = self._local_logits * (run.tp if self._is_whole else 1)
        self._logits = 0 if run.loss == "fused" else self._logits
        # The caller has logits until backward ends, as a pipeline's last stage or with such a loss.
        is_held = run.last and (run.pp > 1 or run.loss == "held")
        self._output = self._logits if is_held else 0
        # Streams and their gradients that cross to other stages, for each micro-batch: buffers
        # receive them, and sent ones stay until the schedule ends (GPipe) or the next send.
        self._crossing = self.stream * ((not run.first) + (not run.last))
        self.buffer_bytes = run.accumulation * self._crossing
        sent = run.accumulation * self._crossing if run.all_forward_first else self.stream
        self.end_bytes = sent + (self._logits if run.last else 0)
        self.left_output = 0 if run.last else self.stream
        # Positions, and cosines and sines. A received stream that the first norm keeps is a buffer.
        rotary = 8 + (shape.head_dim * 4 if shape.norm == "rms" else 0)
        is_buffer = not run.first and self._norms_hold_input
        # Bytes of a micro-batch that are alive from its begin to its end.
        self._always_alive = (0 if is_buffer else self.stream) + run.seq // run.cp * rotary
        # Bytes kept for the loss's backward, such as the log-softmax.
        self._kept_logits = run.tokens * shape.vocab * 4
        if run.loss not in _EAGER:
            self._kept_logits = 0 if run.loss == "fused" else logit_bytes(shape, run, "kept")
        # Masks of a layer's attention on the last context rank, which has the most. Head and tail
        # of a sequence meet there: one span, that sees all before its end.
        has_masks = run.cp > 1 and run.on_cpu and run.cp_method == "gather"
        part = run.seq // (2 * run.cp)
        self._masks = 2 * part * part * (run.cp + 1) * self.size if has_masks else 0

    def _wide(self, shape: DecoderShape) -> int:
        """Bytes of the feed-forward's inner product on a rank; experts are whole over tp.

        Where ep spreads them, ranks of one tp group share the tokens instead; where it does not,
        all compute the same rows.
        """
        widths, run = widths_of(shape, self.run), self.run
        routed = widths["routed_ffn"] // (run.tp if run.ep > 1 else 1)
        return (widths["ffn"] // run.tp + routed) * run.tokens * self.size

    def _layer(self, shape: DecoderShape) -> int:
        return sum(layer_bytes(shape, self.run).values()) + self._masks

    def _kept(self, shape: DecoderShape) -> int:
        again = self.run.runs_again
        return kept_layer_bytes(shape, self.run) if again else self._layer(shape)

    @property
    def first_bytes(self) -> int:
        """Bytes that are alive in the first micro-batch only; no gradient was sent before it."""
        sent = self._sent if self.run.all_forward_first else 0
        return self.run.first_in_flight * self._kept_bytes - sent

    @cached_property
    def _sent(self) -> int:
        """Bytes that a stage has sent and still holds while a micro-batch runs.

        1F1B keeps the gradient that it sent last, and until its end the output of the last
        micro-batch but one of those before its first backward. That output is beside all outputs
        in flight once its own backward has ended, if as many micro-batches follow. GPipe keeps all
        that it sends until the schedule ends, so the second backward pass has the most, or the last
        one if a pass frees less than it sends.
        """
        run = self.run
        if run.pp == 1:
            return 0
        if not run.all_forward_first:
            behind = run.pp - run.pp_rank
            stays = behind > 1 and run.accumulation >= 2 * behind - 1
            return self.stream * ((not run.first) + stays)
        grows = max(0, self._crossing - self._kept_bytes)
        return self._crossing + (run.accumulation - 2) * grows if run.accumulation > 1 else 0

    @cached_property
    def _kept_bytes(self) -> int:
        kinds = Counter(self.layers).items()
        kept = sum(num * self._kept(kind) for kind, num in kinds) + self._always_alive
        if not self.run.last:
            return kept
        stream = 0 if self._norms_hold_input else self.stream
        return kept + self._head_inputs() - stream + self._kept_logits + self._output

    @cached_property
    def beside(self) -> int:
        """Bytes of the other micro-batches in flight, and of streams sent and still held."""
        others = self.run.in_flight - self.run.first_in_flight - 1
        return others * self._kept_bytes + self._sent

    def enter(self) -> Live:
        """Return the stream with its positions, and other micro-batches in flight."""
        alive = self.beside + self._always_alive
        return LiveBytes(alive, self._gathered if self.run.first else 0), LiveBytes(alive)

    def layer_forward(self, shape: DecoderShape) -> Live:
        """Return the bytes that a layer keeps, at its end beside updates and their sums."""
        kept, again = self._kept(shape), self.run.runs_again
        # In other dtypes than float32 a layer's lines have neither its stream nor a part's norm.
        streams = 2 if self._norms_hold_input else 3 + (self.run.tp > 1)
        passing = self.stream * (streams + again) + 2 * self._gathered
        passing += 3 * self._wide(shape) * again
        peak = LiveBytes(kept, passing)
        if shape.experts is not None:
            making = self._at_experts(shape)
            if again:  # of the bytes that the layer makes, only its copies of tokens are alive
                making = LiveBytes(kept, making.temporary)
            peak = max(peak, making, key=lambda moment: moment.total)
        # The caller of the layers has the embedding's output until they return. In float32 the
        # first norm keeps it anyway.
        is_held = self.run.first and len(self.layers) > 1 and not self._norms_hold_input
        held = self.stream if is_held else 0
        return LiveBytes(peak.activations, peak.temporary + held), LiveBytes(kept)

    def _at_experts(self, shape: DecoderShape) -> LiveBytes:
        """Return the moment at which rows return from experts.

        They are alive as sent, received by the experts, computed, sorted, and received back.
        """
        made, run = layer_bytes(shape, self.run), self.run
        to_come = made["output of experts"] + _sum(made, _FEED_FORWARD)
        temporary = (5 if run.ep > 1 else 2) * made["routed rows"]
        temporary += 0 if self._norms_hold_input else 2 * self.stream
        # Beside the gathered stream there are its parts, and those that are sent.
        temporary += ((run.tp > 1) + (run.tp > 1 and run.ep > 1)) * self.stream
        return LiveBytes(self._layer(shape) - to_come, temporary)

    def recompute(self, shape: DecoderShape) -> Live:
        """Return the bytes that a layer makes again, beside the gathered gradient of its output."""
        made = LiveBytes(self._layer(shape) - saved_bytes(shape, self.run))
        if shape.experts is not None:
            making = self._at_experts(shape)
            making = LiveBytes(making.activations, making.temporary + self._gathered)
            made = max(made, making, key=lambda moment: moment.total)
        return made, LiveBytes(self._recomputed(shape))

    def _recomputed(self, shape: DecoderShape) -> int:
        """Bytes that a layer keeps beside its input, which exists already."""
        stream = self.stream if self._norms_hold_input else 0
        return self._layer(shape) - stream - saved_bytes(shape, self.run)

    def layer_backward(self, shape: DecoderShape, grads: Sequence[int]) -> list[BackwardLive]:
        """Return the largest of the moments of the Note, and the bytes freed."""
        alive = self._kept(shape) + self.run.runs_again * self._recomputed(shape)
        begin = [*self._feed_forward(shape)]
        begin += self._experts(shape) if shape.experts is not None else ()
        if len(grads) == 1:
            end = self._attention(shape, grads[0], 0)
            return [_largest([*begin, *end], LiveBytes(-alive, grad_full=grads[0]))]
        made = layer_bytes(shape, self.run)
        gone = self._of_shared(made) + made["output of experts"] + _sum(made, _EXPERTS)
        end = self._attention(shape, grads[0], gone)
        return [
            _largest([*end], LiveBytes(gone - alive, grad_full=grads[0])),
            _largest(begin, LiveBytes(-gone, grad_full=grads[1])),
        ]

    def _feed_forward(self, shape: DecoderShape) -> Iterator[BackwardMoment]:
        """Yield the moments of a dense or shared feed-forward."""
        made, width = layer_bytes(shape, self.run), widths_of(shape, self.run)["ffn"]
        if not width:
            return
        wide = width * self.run.tokens * self.size // self.run.tp
        matrix = shape.dim * width * self.size // self.run.tp
        yield _moment(0, wide + self._gathered, matrix, matrix)
        num = 3 if shape.gated else 2
        yield _moment(-made["last input"], num * wide, matrix, 0)
        freed = _sum(made, _FEED_FORWARD)
        yield _moment(-freed, wide + 2 * self._whole, num * matrix, matrix)

    def _attention(self, shape: DecoderShape, grads: int, gone: int) -> Iterator[BackwardMoment]:
        """Yield the moments of query, key and value, and of the first norm.

        ``gone`` are bytes of the layer that another unit's backward has freed.
        """
        run, made = self.run, layer_bytes(shape, self.run)
        heads = run.tokens * self.size // run.tp
        all_made = self._layer(shape) - gone
        projections = shape.dim * (shape.q_dim + 2 * shape.kv_dim) * self.size // run.tp
        matrix = shape.dim * shape.q_dim * self.size // run.tp
        # Bytes of the first norm; in float32 its input is the output of the previous layer.
        alive = made["attention input"]
        in_float32 = _sum(made, ("norms in float32", "normed"))
        alive += in_float32 // (4 if self._is_float32 else 2)
        if run.cp > 1 and run.cp_method == "ring":
            alive += _sum(made, _ATTENDED)
            yield _moment(alive - all_made, self._ring(shape), grads - projections, 0)
        if run.cp > 1 and run.cp_method == "gather":
            swapped = shape.q_dim * heads + self._swapped(shape)
            yield _moment(alive - all_made, swapped, grads - projections, matrix)
        # Out of the kernel come gradients of the keys and values of all context ranks.
        left = _sum(made, _BEFORE_ATTENTION)
        flows = (shape.q_dim + 2 * shape.kv_dim * run.cp) * heads + self._whole + self.stream
        yield _moment(left - all_made, flows, grads - projections, matrix)
        left = (in_float32 + made.get("norm inputs", 0)) // 2 + made["attention input"]
        flows = (shape.q_dim + 2 * shape.kv_dim) * heads + self._whole
        yield _moment(left - all_made, flows, grads, matrix)
        norms = 3 * in_float32 // 4 or self.stream
        yield _moment(left - all_made, norms + self._whole, grads, 0)

    def _swapped(self, shape: DecoderShape) -> int:
        """Bytes alive while gradients of gathered keys and values are sent back to their ranks.

        These are the gradients for all ranks' keys, as the kernel made them and as received; their
        sum in float32, for which a CPU casts a copy of all; and the gradient of the stream.
        """
        local = 2 * shape.kv_dim * self.run.tokens // self.run.tp
        copied = local * self.run.cp * 4 if self.run.on_cpu and not self._is_float32 else 0
        return 2 * self.run.cp * local * self.size + copied + 4 * local + self.stream

    def _ring(self, shape: DecoderShape) -> int:
        """Bytes of torch's ring attention in backward, when gradients arrive on the first rank.

        Keys and values have as many heads as queries. Alive are gathered and sent ones; sums of
        gradients in float32, a pair of them sent and one received; the kernel's results for the
        rank's keys, and for the next ones and half of the queries; and the gradient of the output
        as received, contiguous, and its half.
        """
        local = self.run.tokens * shape.q_dim // self.run.tp
        halves = 2 * (2 * self.run.cp + 2 + 3 + 2 + 2) + 1 + 1
        return halves * local // 2 * self.size + 7 * local * 4 + self.stream

    def _of_shared(self, made: Mapping[str, int]) -> int:
        """Bytes that the backward of shared experts frees.

        In float32 the router keeps their input as well; else it has a copy in float32.
        """
        return (0 if self._norms_hold_input else made["ffn input"]) + _sum(made, _FEED_FORWARD)

    def _experts(self, shape: DecoderShape) -> Iterator[BackwardMoment]:
        """Yield the moments of the scaled outputs, the first and last expert, and the stacking.

        The incoming gradient is alive until the last expert has read its part. Then the experts'
        gradients are joined, and each weight's gradients are stacked, which takes as much again.
        """
        assert shape.experts is not None
        run, made = self.run, layer_bytes(shape, self.run)
        matrix = shape.dim * shape.experts.ffn * self.size
        num, rows = shape.experts.num // run.ep, made["routed rows"]
        shared, of_shared = self._of_shared(made), 3 * shape.experts.shared * matrix // run.tp
        flow = self._whole if shape.experts.shared else 0
        yield _moment(-shared, self._gathered + flow + 2 * rows, of_shared, 0)
        one = made["gate of experts"] // num
        freed = shared + made["output of experts"]
        product = made["last input of experts"] // num
        passing = flow + (rows if num > 1 else 0) + 3 * one
        yield _moment(-freed - product, passing + matrix, of_shared, 0)
        # The last expert's kept bytes and all copies of tokens are alive.
        kept = _sum(made, _EXPERTS)
        left, freed = rows + (kept - rows) // num, freed + kept
        passing = flow + rows + rows * (num - 1) // num + one
        yield _moment(left - freed, passing + (3 * num - 2) * matrix, of_shared, 0)
        yield _moment(-freed, flow + 2 * rows + 3 * num * matrix, of_shared, 0)
        temporary = flow + rows + 3 * num * matrix
        yield _moment(-freed, temporary, of_shared + num * matrix, num * matrix)

    def head_forward(self) -> Live:
        """Return the bytes that the last norm and the head keep, and whole logits on each rank."""
        kept, logits = self._head_inputs(), self._logits
        parts = logits + logits // self.run.tp if self._is_whole else 0
        return LiveBytes(kept, logits=logits + parts), LiveBytes(kept, logits=logits)

    def _head_inputs(self) -> int:
        """Bytes that the last norm and the head keep, but for the stream."""
        if not self.run.is_eager:
            return self._whole
        normed = self.run.tokens * (self.shape.dim + 1) * 4 // self.run.tp
        upcast = self.run.tokens * self.shape.dim * 4 // self.run.tp
        return normed + (0 if self._norms_hold_input else upcast) + self._whole

    def loss(self) -> Live:
        """Return the bytes that the loss allocates beside the logits, and those that it keeps.

        In eager PyTorch these are the log-softmax and, in other dtypes than float32, the logits in
        float32.
        """
        peak = self._kept_logits * (1 if self._is_float32 else 2)
        if self.run.loss not in _EAGER:
            made = logit_bytes(self.shape, self.run, "forward") - self._local_logits
            peak = 0 if self.run.loss == "fused" else max(made, 0)
        stream = 0 if self._norms_hold_input else -self.stream
        kept = LiveBytes(stream, logits=self._kept_logits + self._output - self._logits)
        return LiveBytes(logits=peak), kept

    def loss_backward(self) -> Live:
        """Return the loss's largest moment; the gradient of the logits takes their place."""
        if self.run.loss == "fused":
            return LiveBytes(), LiveBytes()
        if self.run.loss in _EAGER:
            peak = LiveBytes(logits=2 * self._kept_logits)
            return peak, LiveBytes(logits=self._logits - self._kept_logits)
        kept = logit_bytes(self.shape, self.run, "kept")
        more = logit_bytes(self.shape, self.run, "backward") - kept
        net = self._logits - kept
        return LiveBytes(temporary=self.stream, logits=max(more, net)), LiveBytes(logits=net)

    def head_backward(self, head: int) -> Live:
        """Return the bytes of the gradients of the head and of its input, and the bytes freed."""
        parts = self._logits // self.run.tp if self._is_whole else 0
        stream = 0 if self._norms_hold_input else self.stream
        net = LiveBytes(stream - self._head_inputs(), logits=-self._logits, grad_full=head)
        return LiveBytes(temporary=self._whole, logits=parts, grad_full=head), net

    def leave(self, table: int, grads: int) -> Live:
        """Return the gradient of the table beside the stream's, and the bytes freed.

        Under tensor parallelism torch writes it for all rows; a rank's are copied out of it when
        they are reduced.
        """
        others = table * (self.run.tp - 1)
        freed = LiveBytes(-self._always_alive, logits=-self._output, grad_full=grads + others)
        if not self.run.first:
            return LiveBytes(), freed
        return LiveBytes(temporary=self._gathered, grad_full=table + others), freed


def _sum(made: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(made.get(name, 0) for name in names)


def _largest(moments: Sequence[BackwardMoment], net: LiveBytes) -> BackwardLive:
    written = max((written for written, _ in moments), key=lambda moment: moment.total)
    summed = max((summed for _, summed in moments), key=lambda moment: moment.total)
    return written, net, summed


def _moment(activations: int, temporary: int, grads: int, last: int) -> BackwardMoment:
    """Return a moment; ``last`` are bytes of the gradient that is not added to a sum yet."""
    return (
        LiveBytes(activations, temporary, grad_full=grads),
        LiveBytes(activations, temporary, grad_full=last),
    )


_FEED_FORWARD = ("activation input", "up", "activation output", "last input")
_EXPERTS = (
    "gate of experts",
    "up of experts",
    "activations of experts",
    "last input of experts",
    "routed rows",
)
_ATTENDED = ("query", "key, value", "other key, value", "attention output", "log-sum-exp")
_BEFORE_ATTENTION = (
    "norms in float32",
    "norm inputs",
    "attention input",
    "query norm",
    "key norm",
    "query",
    "key, value",
)
