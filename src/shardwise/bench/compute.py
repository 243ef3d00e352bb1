"""What a decoder computes, by class: matrix products, attention, and what is bound by memory.

Each is measured as it runs in training: under autograd, in a chain long enough that operands are
cold and results new memory, the forward and the backward half apart.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.bench.glue import Chain
from shardwise.bench.stopwatch import Stopwatch
from shardwise.plan.machine.calibration import Curve

_HEAD_DIM, _HEADS = 64, 4
_LINEARS = 4
_GLUE_NUMELS = [1 << i for i in (10, 12, 14, 16, 18, 20, 22, 24)]


def matmul_curves(watch: Stopwatch, dtype: torch.dtype) -> dict[str, Curve]:
    """Measure square products; a backward operation is one of the two that a layer needs."""
    name = f"matmul.{{}}.{_name(dtype)}"

    def measure(size: int) -> Sequence[float]:
        weights = [_random(watch, (size, size), dtype, True) for _ in range(_LINEARS)]
        start = _random(watch, (size, size), dtype, True)

        def forward() -> Tensor:
            stream = start
            for weight in weights:
                stream = F.linear(stream, weight)
            return stream

        return watch.parts(both_ways(watch, forward, [start, *weights]))

    curves = {}
    found = watch.sweep([16 << i for i in range(10)], measure)
    for part, (way, num_ops) in enumerate((("forward", _LINEARS), ("backward", 2 * _LINEARS))):
        points = [(2.0 * n**3, parts[part] / num_ops) for n, parts in found]
        curves[name.format(way)] = Curve.through("flops", points)
    return curves


def attention_curves(watch: Stopwatch, dtype: torch.dtype) -> dict[str, Curve]:
    """Measure causal attention, which does half the square, with four heads of 64 elements."""
    name = f"attention.{{}}.{_name(dtype)}"

    def measure(length: int) -> Sequence[float]:
        shape = (1, _HEADS, length, _HEAD_DIM)
        query, key, value = (_random(watch, shape, dtype, True) for _ in range(3))

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return watch.parts(both_ways(watch, forward, [query, key, value]))

    found = watch.sweep([32 << i for i in range(9)], measure)
    flops = [2.0 * _HEADS * _HEAD_DIM * length**2 for length, _ in found]
    curves = {}
    for part, (way, factor) in enumerate((("forward", 1.0), ("backward", 2.0))):
        points = [(f * factor, parts[part]) for f, (_, parts) in zip(flops, found, strict=True)]
        curves[name.format(way)] = Curve.through("flops", points)
    return curves


def memory_curves(watch: Stopwatch, dtype: torch.dtype) -> dict[str, Curve]:
    """Measure what a decoder's block does beside products: norm, rotation, gate, residual.

    Sizes are bytes read and written per operation, counted as a tape counts them. See
    Note [Between products].
    """
    name = f"memory.{{}}.{_name(dtype)}"
    points: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for numel in _GLUE_NUMELS[:2] if watch.pace.is_rough else _GLUE_NUMELS:
        chain = Chain(watch, numel, dtype)
        for way, (costs, seconds) in zip(points, chain.measure(), strict=True):
            glue = [c for c in costs if c.kind == "memory"]
            num_ops = sum(c.num_ops for c in glue)
            size = sum(c.moved_bytes for c in glue) / num_ops
            points[way].append((size, seconds / num_ops))
    return {name.format(way): Curve.through("bytes", found) for way, found in points.items()}


def both_ways(
    watch: Stopwatch, forward: Callable[[], Tensor], leaves: Sequence[Tensor]
) -> Callable[[], tuple[float, float]]:
    """Return work that times a forward and a backward pass."""
    grad = torch.ones_like(forward())

    def work() -> tuple[float, float]:
        begin = watch.now()
        output = forward()
        middle = watch.now()
        output.backward(grad)
        end = watch.now()
        for leaf in leaves:
            leaf.grad = None
        return middle - begin, end - middle

    return work


def _random(
    watch: Stopwatch, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> Tensor:
    values = torch.randn(shape, device=watch.device) / math.sqrt(shape[-1])
    return values.to(dtype).requires_grad_(requires_grad)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
