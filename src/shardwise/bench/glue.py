"""A chain of decoder blocks, for what they do beside products: norms, rotation, gate, residual.

Note [Between products]
On a CPU an elementwise operation is fast on what the last one left in the caches, but a product
runs through them: measured without products in between, a decoder's norms would take half of what
they do. So the chain has products, and the clock is stopped while they run: in the forward half
around the call, in the backward half by hooks before and after the product's node. Tensors beyond
the caches need none; and where the host runs ahead of the device there are none either, since
stopping the clock would add a synchronisation.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.bench.stopwatch import Stopwatch
from shardwise.plan.model.tape import Cost
from shardwise.plan.model.tracking import Tracker

_BLOCKS = 64  # at most, and no more than keep so many bytes alive: as many as a model's step does
_ALIVE_BYTES = 128 << 20
_ROUGH_BLOCKS = 8
_SAVED_PER_BLOCK = 16
_WIDEST = 256
_PRODUCTS = 3
_CACHED_NUMEL = 1 << 22


class Chain:
    """Blocks over a stream of ``numel`` elements, [tokens, dim]."""

    def __init__(self, watch: Stopwatch, numel: int, dtype: torch.dtype) -> None:
        self._watch = watch
        self._has_products = watch.device.type == "cpu" and numel <= _CACHED_NUMEL
        self._dim = dim = min(_WIDEST, max(64, 1 << round(math.log2(numel) / 2)))
        tokens = max(1, numel // dim)

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, device=watch.device) / math.sqrt(dim)
            return values.to(dtype).requires_grad_()

        self._start = random(tokens, dim)
        alive = self._start.nbytes * _SAVED_PER_BLOCK
        most = _ROUGH_BLOCKS if watch.pace.is_rough else _BLOCKS
        num_blocks = min(most, max(2, _ALIVE_BYTES // alive))
        self._norms = [random(dim) for _ in range(num_blocks)]
        self._weights = [[random(dim, dim) for _ in range(_PRODUCTS)] for _ in range(num_blocks)]
        angles = torch.rand(tokens, dim // 2, device=watch.device)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self._stopped_s = self._stopped_at_s = 0.0

    def measure(self) -> tuple[tuple[Sequence[Cost], float], tuple[Sequence[Cost], float]]:
        """Return the costs of the forward and the backward half, each with its seconds."""
        with Tracker(lambda: None) as tracker:
            output = self._forward()
            ahead = tracker.take_costs()
            grad = torch.ones_like(output)
            tracker.take_costs()
            output.backward(grad)
            back = tracker.take_costs()
        del output, tracker
        forward_s, backward_s = self._watch.parts(lambda: self._both(grad))
        return (ahead, forward_s), (back, backward_s)

    def _both(self, grad: Tensor) -> tuple[float, float]:
        """Return the seconds of both halves, products left out."""
        now = self._watch.now
        self._stopped_s, begin = 0.0, now()
        output = self._forward()
        forward_s = now() - begin - self._stopped_s
        self._stopped_s, begin = 0.0, now()
        output.backward(grad)
        backward_s = now() - begin - self._stopped_s
        for leaf in (self._start, *self._norms, *(w for ws in self._weights for w in ws)):
            leaf.grad = None
        return forward_s, backward_s

    def _forward(self) -> Tensor:
        stream = self._start
        for norm, weights in zip(self._norms, self._weights, strict=True):
            normed = F.rms_norm(stream, (self._dim,), norm)
            first, second = self._product(normed, weights[0]).chunk(2, dim=-1)
            turned = torch.cat(
                [first * self._cos - second * self._sin, first * self._sin + second * self._cos],
                dim=-1,
            )
            gate, up = self._product(turned, weights[1]), self._product(normed, weights[2])
            stream = stream + F.silu(gate) * up
        return stream

    def _product(self, left: Tensor, weight: Tensor) -> Tensor:
        if not self._has_products:
            return left
        self._stop()
        result = F.linear(left, weight)
        self._go()
        node = result.grad_fn
        if node is not None:
            node.register_prehook(lambda grads: self._stop())
            node.register_hook(lambda inputs, outputs: self._go())
        return result

    def _stop(self) -> None:
        self._stopped_at_s = self._watch.now()

    def _go(self) -> None:
        self._stopped_s += self._watch.now() - self._stopped_at_s
