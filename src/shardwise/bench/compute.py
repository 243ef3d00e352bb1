"""What a decoder computes, by class: matrix products, attention, and what is bound by memory.

Each is measured as it runs in training: under autograd, in a chain long enough that operands are
cold and results new memory, the forward and the backward half apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.bench.together import Stopwatch
from shardwise.plan.machine.calibration import Curve
from shardwise.plan.model.tracking import Tracker

_HEAD_DIM, _HEADS = 64, 4
_LINEARS = 4
_GLUE_NUMELS = [1 << i for i in (10, 12, 14, 16, 18, 20, 22, 24)]
_BLOCKS = 64  # at most, and no more than keep so many bytes alive: as many as a model's step does
_GLUE_BYTES = 128 << 20
_SAVED_PER_BLOCK = 8


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

        return watch.parts(_both_ways(watch, forward, [start, *weights]))

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

        return watch.parts(_both_ways(watch, forward, [query, key, value]))

    found = watch.sweep([32 << i for i in range(9)], measure)
    flops = [2.0 * _HEADS * _HEAD_DIM * length**2 for length, _ in found]
    curves = {}
    for part, (way, factor) in enumerate((("forward", 1.0), ("backward", 2.5))):
        points = [(f * factor, parts[part]) for f, (_, parts) in zip(flops, found, strict=True)]
        curves[name.format(way)] = Curve.through("flops", points)
    return curves


def memory_curves(watch: Stopwatch, dtype: torch.dtype) -> dict[str, Curve]:
    """Measure what a decoder's block does beside products: norm, rotation, gate, residual.

    Sizes are bytes read and written per operation, counted as a tape counts them.
    """
    name = f"memory.{{}}.{_name(dtype)}"
    points: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}

    def measure(numel: int) -> Sequence[float]:
        forward, leaves = _glue(watch, numel, dtype)
        with Tracker(lambda: None) as tracker:
            output = forward()
            ahead = tracker.take_costs()
            output.backward(torch.ones_like(output))
            back = tracker.take_costs()
        del output, tracker
        parts = watch.parts(_both_ways(watch, forward, leaves))
        for way, costs, seconds in zip(points, (ahead, back), parts, strict=True):
            num_ops = sum(c.num_ops for c in costs)
            size = sum(c.moved_bytes for c in costs) / num_ops
            points[way].append((size, seconds / num_ops))
        return parts

    for numel in _GLUE_NUMELS if watch.pace.num_windows > 1 else _GLUE_NUMELS[:3]:
        measure(numel)
    return {name.format(way): Curve.through("bytes", found) for way, found in points.items()}


def _glue(
    watch: Stopwatch, numel: int, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return a chain of blocks without their products over [tokens, dim], and its leaves."""
    dim = min(1024, max(64, 1 << round(math.log2(numel) / 2)))
    tokens = max(1, numel // dim)
    start = _random(watch, (tokens, dim), dtype, True)
    gate = _random(watch, (tokens, dim), dtype, True)
    num_blocks = min(_BLOCKS, max(2, _GLUE_BYTES // (start.nbytes * _SAVED_PER_BLOCK)))
    weights = [_random(watch, (dim,), dtype, True) for _ in range(num_blocks)]
    angles = torch.rand(tokens, dim // 2, device=watch.device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward() -> Tensor:
        stream = start
        for weight in weights:
            normed = F.rms_norm(stream, (dim,), weight)
            first, second = normed.chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
            stream = stream + F.silu(turned) * gate
        return stream

    return forward, [start, gate, *weights]


def _both_ways(
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
