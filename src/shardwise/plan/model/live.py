"""Bytes alive in each stretch of a decoder's tape, by the formulas of published systems.

Each method says for one stretch of work what is alive beyond what was there at its begin: at its
largest moment, and at its end. Activations of the other micro-batches that a pipeline has in flight
are there from the tape's first work till its units are through with this one.
"""

from collections import Counter
from collections.abc import Sequence

from shardwise.plan.model.execution import (
    Execution,
    ffn_columns,
    gathered_bytes,
    kept_layer_bytes,
    layer_bytes,
    logit_bytes,
    runs_again,
    stream_bytes,
)
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import LiveBytes
from shardwise.plan.sizes import DTYPE_BYTES

Live = tuple[LiveBytes, LiveBytes]  # at the largest moment, and at the end
# The same, and the largest moment where each gradient is added to a sum at once, if it is known.
Moments = tuple[LiveBytes, LiveBytes, LiveBytes | None]


class FormulaLive:
    """What is alive on one rank; ``layers`` are the shapes of those that it has.

    A layer's methods take a shape whose layers are all like it. ``grads`` are bytes of full
    gradients that a stretch writes, for each unit of a layer.
    """

    def __init__(self, shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]) -> None:
        self.shape, self.run, self.layers = shape, run, layers
        self.size = DTYPE_BYTES[run.dtype]
        self.stream = stream_bytes(shape, run)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that are there for the whole run, beside parameters."""
        return 0

    @property
    def end_bytes(self) -> int:
        """Bytes that are there when a pipeline's schedule has its stage reduced."""
        return 0

    def enter(self) -> Live:
        """Return what the embedding makes, other micro-batches in flight included."""
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

    @property
    def left_output(self) -> int:
        """Bytes of a stage's output, if it is there when the last layer's backward is over."""
        return 0

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
        """Bytes that are there in the first micro-batch of a step alone."""
        return self.run.first_in_flight * self._kept_bytes()

    def _mask(self) -> int:
        """Bytes of the dropout mask after the embedding."""
        return self.run.tokens * self.shape.dim if self.run.dropout and self.run.first else 0

    def layer_forward(self, shape: DecoderShape) -> Live:
        """Return what a layer keeps, and what passes where it keeps less than it makes."""
        run = self.run
        kept, made = kept_layer_bytes(shape, run), sum(layer_bytes(shape, run).values())
        # A layer under checkpointing frees what it made as it goes: at most about the widest part.
        columns = ffn_columns(shape, run) * (3 if shape.gated else 2)
        widest = columns * run.tokens * self.size
        passing = min(made, widest) if runs_again(run) else 0
        temporary = passing + gathered_bytes(shape, run)
        return LiveBytes(kept, temporary), LiveBytes(activations=kept)

    def recompute(self, shape: DecoderShape) -> Live:
        """Return what of a layer is made once more."""
        more = LiveBytes(activations=self._recomputed(shape))
        return LiveBytes(more.activations, self.stream), more

    def _recomputed(self, shape: DecoderShape) -> int:
        made = sum(layer_bytes(shape, self.run).values())
        return max(made - kept_layer_bytes(shape, self.run), 0)

    def layer_backward(self, shape: DecoderShape, grads: Sequence[int]) -> list[Moments]:
        """Return the widest moment, d product and then d gate and d up, and what is freed.

        For each unit of the layer; the second, experts that are spread, comes first, and has its
        gradients alone.
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
        """Return what the last norm and the head keep, and the logits."""
        logits = self.run.tokens * self.shape.vocab // self.run.tp * self.size
        live = LiveBytes(self._head_inputs(), logits=logits if self.run.loss != "fused" else 0)
        return live, live

    def _head_inputs(self) -> int:
        """Bytes that the last norm and the head keep; DTensor keeps the head's input gathered."""
        head = gathered_bytes(self.shape, self.run) if self.run.loss == "loss_parallel" else 0
        return self.stream + max(head, self.stream)

    def loss(self) -> Live:
        """Return what the loss makes of the logits."""
        if self.run.loss == "fused":
            return LiveBytes(), LiveBytes()
        have = self.run.tokens * self.shape.vocab // self.run.tp * self.size
        peak = logit_bytes(self.shape, self.run, "forward") - have
        kept = logit_bytes(self.shape, self.run, "kept") - have
        return LiveBytes(logits=max(peak, 0)), LiveBytes(logits=kept)

    def loss_backward(self) -> Live:
        """Return what the loss's backward takes and leaves: the gradient of the logits."""
        if self.run.loss == "fused":
            return LiveBytes(), LiveBytes()
        kept = logit_bytes(self.shape, self.run, "kept")
        peak = logit_bytes(self.shape, self.run, "backward") - kept
        there = self._logits - kept
        return LiveBytes(temporary=self.stream, logits=max(peak, there)), LiveBytes(logits=there)

    def head_backward(self, head: int) -> Live:
        """Return what the head's backward takes and frees, its gradient among it."""
        there = self._logits if self.run.loss != "fused" else 0
        net = LiveBytes(activations=-self._head_inputs(), logits=-there, grads=head)
        return LiveBytes(temporary=self.stream, grads=head), net

    @property
    def _logits(self) -> int:
        """Bytes of a rank's logits in the computing dtype."""
        return self.run.tokens * self.shape.vocab // self.run.tp * self.size

    def leave(self, table: int, grads: int) -> Live:
        """Return what the embedding's backward takes and frees.

        ``table`` are the bytes of the gradient that the lookup writes.
        """
        if not self.run.first:
            return LiveBytes(), LiveBytes()
        peak = LiveBytes(temporary=self.stream, grads=table)
        return peak, LiveBytes(activations=-self._mask(), grads=grads)
