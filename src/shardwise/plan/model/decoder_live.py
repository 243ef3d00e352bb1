"""Bytes alive in each stretch of the built-in decoder's tape, as eager PyTorch allocates them.

Note [Where the stream is]
What a layer hands on is the input that the next one's first norm keeps. It is there from the
embedding on, so a layer's own lines are those that it keeps but for its input, and its output. In
float32 the last norm keeps it until its backward; in other dtypes norms keep a float32 copy, and
the stream itself goes when the loss is there. Its gradient takes its place.

Note [Moments of a layer's backward]
Autograd frees what a node kept as soon as the node has run, so the largest moment is not the one
with most temporaries. Those that may be it: the gradients of the product of gate and up; those of
gate and up, when the weights' gradients of the feed-forward are there; the gradients of query, key
and value; the last norm, when all gradients are there. With routed experts also those of the first
and last expert, and that at which all their weights' gradients are there, one by one, and are
stacked.
"""

from collections.abc import Iterator, Mapping, Sequence

from shardwise.plan.model.execution import (
    ffn_columns,
    kept_layer_bytes,
    layer_bytes,
    logit_bytes,
    runs_again,
    saved_by_op,
)
from shardwise.plan.model.live import FormulaLive, Live, Moments
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import LiveBytes

# With all gradients so far, and where each is added to a sum and freed as soon as it is written.
Moment = tuple[LiveBytes, LiveBytes]
_EAGER = ("eager", "held")  # losses that are made of all logits in float32


class DecoderLive(FormulaLive):
    """What is alive on one rank that runs the built-in decoder; see `FormulaLive`."""

    @property
    def _is_float32(self) -> bool:
        return self.run.dtype == "float32"

    @property
    def _norms_hold_input(self) -> bool:
        """Tell whether norms keep the stream itself, and no copy of it in float32."""
        return self._is_float32 or self.shape.norm == "layer"

    @property
    def _whole(self) -> int:
        """Bytes of the stream of all tokens that the ranks of a tensor group share."""
        return self.run.tokens * self.shape.dim * self.size

    @property
    def _gathered(self) -> int:
        """Bytes of what is gathered or not summed yet beside a rank's part of the stream."""
        return self._whole if self.run.tp > 1 else 0

    @property
    def _rotary(self) -> int:
        """Bytes of positions, and of cosines and sines."""
        tokens = self.run.seq // self.run.cp
        return tokens * (8 + (self.shape.head_dim * 4 if self.shape.norm == "rms" else 0))

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
    def buffer_bytes(self) -> int:
        """Bytes in which stages receive streams and their gradients, for each micro-batch."""
        run = self.run
        return run.micro_batches * self.stream * ((not run.first) + (not run.last))

    @property
    def end_bytes(self) -> int:
        """Bytes of the last micro-batch that its schedule has when it ends, and of what it sent."""
        run = self.run
        sent = run.micro_batches * self._crossing if run.all_forward_first else self.stream
        return sent + (self._logits if run.last else 0)

    @property
    def first_bytes(self) -> int:
        """Bytes that are there in the first micro-batch alone; no gradient was sent before it."""
        return super().first_bytes - (self._sent if self.run.all_forward_first else 0)

    @property
    def _crossing(self) -> int:
        """Bytes of the streams and gradients of streams that a stage sends of a micro-batch."""
        return self.stream * ((not self.run.first) + (not self.run.last))

    @property
    def left_output(self) -> int:
        """Bytes of the output that a stage has sent: its schedule has it till backward ends."""
        return 0 if self.run.last else self.stream

    @property
    def _sent(self) -> int:
        """Bytes that a stage has sent when a micro-batch is under way, and still has.

        1F1B keeps the gradient that it sent last, and to its end the output of the last
        micro-batch but one of those before its first backward. That is beside all that are in
        flight once its own backward is over, if then as many still come. GPipe keeps all that it
        sends until the schedule ends. So after the first one, the second backward pass has most,
        or the last, where a pass frees less than it sends.
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
        """Bytes of a micro-batch that are there from its begin to its end."""
        received = (
            not self.run.first and self._norms_hold_input
        )  # what the first norm keeps is a buffer
        return (0 if received else self.stream) + self._rotary + self._mask()

    def _kept_bytes(self) -> int:
        kept = sum(map(self._kept, self.layers)) + self._own()
        if not self.run.last:
            return kept
        stream = 0 if self._norms_hold_input else self.stream
        return kept + self._head_inputs() - stream + self._kept_logits + self._output

    @property
    def beside(self) -> int:
        """Bytes of the other micro-batches in flight, and of what is sent and still there."""
        run = self.run
        others = run.in_flight - run.first_in_flight - 1
        return round(others * self._kept_bytes()) + self._sent

    def enter(self) -> Live:
        """Return the stream, what it is made of, and other micro-batches in flight."""
        there = LiveBytes(activations=self.beside + self._own())
        temporary = self._gathered if self.run.first else 0
        return LiveBytes(there.activations, temporary), there

    def layer_forward(self, shape: DecoderShape) -> Live:
        """Return what a layer keeps; at its end updates and their sums are there beside it."""
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
        there = LiveBytes(peak.activations, peak.temporary + self._embedded)
        return there, LiveBytes(activations=kept)

    @property
    def _embedded(self) -> int:
        """Bytes that the embedding made, which who calls the layers has until they return.

        In float32 the first norm keeps them anyway.
        """
        is_held = self.run.first and len(self.layers) > 1 and not self._norms_hold_input
        return self.stream if is_held else 0

    def _at_experts(self, shape: DecoderShape) -> LiveBytes:
        """Return the moment at which rows come back: as sent, arrived, made, sorted, received."""
        made = layer_bytes(shape, self.run)
        to_come = made["output of experts"] + sum(made.get(name, 0) for name in _FEED_FORWARD)
        copies = 5 if self.run.ep > 1 else 2
        temporary = copies * made["routed rows"]
        temporary += 0 if self._norms_hold_input else 2 * self.stream
        # Beside what was gathered of the stream its parts are there, and those that are sent.
        parts = (self.run.tp > 1) + (self.run.tp > 1 and self.run.ep > 1)
        temporary += parts * self.stream
        return LiveBytes(self._layer(shape) - to_come, temporary)

    def recompute(self, shape: DecoderShape) -> Live:
        """Return what a layer makes once more; the gradient of its output is there, gathered."""
        made = LiveBytes(activations=self._layer(shape) - self._saved(shape))
        if shape.experts is not None:
            making = self._at_experts(shape)
            making = LiveBytes(making.activations, making.temporary + self._gathered)
            made = max(made, making, key=lambda moment: moment.total)
        return made, LiveBytes(activations=self._recomputed(shape))

    def _recomputed(self, shape: DecoderShape) -> int:
        """Bytes that a layer keeps beside its input, which is there."""
        stream = self.stream if self._norms_hold_input else 0
        return self._layer(shape) - stream - self._saved(shape)

    def layer_backward(self, shape: DecoderShape, grads: Sequence[int]) -> list[Moments]:
        """Return the largest of the moments of the Note, and what is freed."""
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
        """Bytes that torch's ring attention has in backward, on the first rank when others' come.

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

        In float32 the router keeps what they do, their input; else it has a copy in float32.
        """
        own = 0 if self._norms_hold_input else made["ffn input"]
        return own + sum(made.get(name, 0) for name in _FEED_FORWARD)

    def _experts(self, shape: DecoderShape) -> Iterator[Moment]:
        """Yield the weighing of what experts made, the first and last expert, and the stacks.

        The gradient that comes in lives till the last expert has read its part. What they hand on
        is joined next, and then each weight's gradients are stacked, which takes as much again.
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

    @property
    def _output(self) -> int:
        """Bytes of logits that the caller has until backward ends, as a pipeline's last stage."""
        is_held = self.run.pipeline > 1 or self.run.loss == "held"
        return self._logits if self.run.last and is_held else 0

    def head_forward(self) -> Live:
        """Return what the last norm and the head keep, and the logits, whole on each rank."""
        kept, logits = self._head_inputs(), self._logits
        parts = 0 if self.run.tp == 1 else logits + logits // self.run.tp
        return LiveBytes(kept, logits=logits + parts), LiveBytes(kept, logits=logits)

    @property
    def _logits(self) -> int:
        return 0 if self.run.loss == "fused" else self.run.tokens * self.shape.vocab * self.size

    @property
    def _kept_logits(self) -> int:
        """Bytes that are kept for the loss's backward: the log-softmax, or what others keep."""
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
        """Return what the gradients of the head and of its input take, and what is freed."""
        parts = self._logits // self.run.tp if self.run.tp > 1 else 0
        peak = LiveBytes(temporary=self._whole, logits=parts, grads=head)
        stream = 0 if self._norms_hold_input else self.stream
        freed = stream - self._head_inputs()
        return peak, LiveBytes(freed, logits=-self._logits, grads=head)

    def leave(self, table: int, grads: int) -> Live:
        """Return the gradient of the table beside the stream's, and what is freed.

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
