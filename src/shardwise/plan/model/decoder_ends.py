"""Bytes alive at the ends of the built-in decoder: its last norm, head and loss."""

from shardwise.plan.model.execution import logit_bytes
from shardwise.plan.model.live import FormulaLive, Live
from shardwise.plan.model.tape import LiveBytes

_EAGER = ("eager", "held")  # losses that are made of all logits in float32


class DecoderEnds(FormulaLive):
    """What is alive on one rank at the head and the loss; see `FormulaLive`."""

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
