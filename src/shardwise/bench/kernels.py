"""The measurement of a rank's work: products, attention, optimizer, sums, the engine's host code.

Note [Between products]
On a CPU an elementwise operation is fast if its input is in the caches, but a product replaces
their contents: measured without products in between, a decoder's norms would take half of their
real time. So the chain has products, and the clock is stopped while they run: in the forward half
around the call, in the backward half by hooks before and after the product's node. Tensors larger
than the caches need no products. On devices that run asynchronously there are none either, since
stopping the clock would add a synchronisation.

Note [Conditions of measurement]
Products and attention run as in training: under autograd, in a chain long enough that operands are
cold and results new memory, the forward and backward halves timed separately. Sizes of elementwise
operations, of the optimizer and of copies are the bytes that a whole step reads and writes, as the
player of a tape counts them. The engine's host code is measured on the same model plain, sharded,
and with each block under activation checkpointing. Its blocks are small, so that little else takes
time. But their products are large enough to remove the host's code from the caches, as in training;
the code then takes three times as long.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise.bench.stopwatch import Stopwatch
from shardwise.comm.shares import BLOCK_NUMEL
from shardwise.config import Schedule
from shardwise.engine.api import shard
from shardwise.plan.machine.pricing import SecondsCurve
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
        self._cos = angles.cos().to(dtype)
        self._sin = angles.sin().to(dtype)
        self._stopped_s = 0.0
        self._stopped_at_s = 0.0

    def measure(self) -> tuple[tuple[Sequence[Cost], float], tuple[Sequence[Cost], float]]:
        """Return the costs of the forward and the backward half, each with its seconds."""
        with Tracker(lambda: None) as tracker:
            output = self._forward()
            forward_costs = tracker.take_costs()
            grad = torch.ones_like(output)
            tracker.take_costs()
            output.backward(grad)
            backward_costs = tracker.take_costs()
        del output, tracker
        forward_s, backward_s = self._watch.parts(lambda: self._both(grad))
        return (forward_costs, forward_s), (backward_costs, backward_s)

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


_HEAD_DIM, _HEADS = 64, 4
_LINEARS = 4
_GLUE_NUMELS = [1 << i for i in (10, 12, 14, 16, 18, 20, 22, 24)]


def matmul_curves(watch: Stopwatch, dtype: torch.dtype) -> dict[str, SecondsCurve]:
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
    measured = watch.sweep([16 << i for i in range(10)], measure)
    for part, (direction, num_ops) in enumerate(
        (("forward", _LINEARS), ("backward", 2 * _LINEARS))
    ):
        points = [(2.0 * n**3, parts[part] / num_ops) for n, parts in measured]
        curves[name.format(direction)] = SecondsCurve.through("flops", points)
    return curves


def attention_curves(watch: Stopwatch, dtype: torch.dtype) -> dict[str, SecondsCurve]:
    """Measure causal attention, which does half the square, with four heads of 64 elements."""
    name = f"attention.{{}}.{_name(dtype)}"

    def measure(length: int) -> Sequence[float]:
        shape = (1, _HEADS, length, _HEAD_DIM)
        query, key, value = (_random(watch, shape, dtype, True) for _ in range(3))

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return watch.parts(both_ways(watch, forward, [query, key, value]))

    measured = watch.sweep([32 << i for i in range(9)], measure)
    flops = [2.0 * _HEADS * _HEAD_DIM * length**2 for length, _ in measured]
    curves = {}
    for part, (direction, factor) in enumerate((("forward", 1.0), ("backward", 2.0))):
        points = [(f * factor, parts[part]) for f, (_, parts) in zip(flops, measured, strict=True)]
        curves[name.format(direction)] = SecondsCurve.through("flops", points)
    return curves


def memory_curves(watch: Stopwatch, dtype: torch.dtype) -> dict[str, SecondsCurve]:
    """Measure a decoder block's operations between products: norm, rotation, gate, residual.

    Sizes are bytes read and written per operation, counted as a tape counts them. See
    Note [Between products].
    """
    name = f"memory.{{}}.{_name(dtype)}"
    points: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for numel in _GLUE_NUMELS[:2] if watch.pace.is_rough else _GLUE_NUMELS:
        chain = Chain(watch, numel, dtype)
        for direction, (costs, seconds) in zip(points, chain.measure(), strict=True):
            glue = [c for c in costs if c.kind == "memory"]
            num_ops = sum(c.num_ops for c in glue)
            size = sum(c.moved_bytes for c in glue) / num_ops
            points[direction].append((size, seconds / num_ops))
    return {
        name.format(direction): SecondsCurve.through("bytes", measured)
        for direction, measured in points.items()
    }


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


_NUM_TENSORS = 64  # about as many as a decoder of seven layers has
_ADAMW_TENSORS = 7  # reads parameter, gradient and two moments; writes all but the gradient
_CLIP_TENSORS = 3  # reads each gradient for its norm; reads and writes it to scale it
_NUMELS = [1 << i for i in range(8, 25, 2)]
_STATE_NUMELS = [1 << i for i in range(8, 21, 2)]
_COPIES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]


class _Vectors(nn.Module):
    """A few vectors, which one unit owns."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(numel) for _ in range(_NUM_TENSORS))


def optimizer_curves(watch: Stopwatch) -> dict[str, SecondsCurve]:
    """Measure a fused AdamW and the clipping of the gradients' norm, over float32 shards."""

    def measure(numel: int) -> Sequence[float]:
        model = shard(_Vectors(numel * watch.num_ranks).to(watch.device), stage=1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)

        def work() -> tuple[float, float]:
            begin = watch.now()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            middle = watch.now()
            optimizer.step()
            return watch.now() - middle, middle - begin

        return watch.parts(work, in_step=True)

    measured = watch.sweep(_STATE_NUMELS, measure)
    curves = {}
    kinds = (("optimizer.adamw", _ADAMW_TENSORS), ("clip", _CLIP_TENSORS))
    for part, (name, num_passes) in enumerate(kinds):
        points = [(4.0 * num_passes * _NUM_TENSORS * n, parts[part]) for n, parts in measured]
        curves[name] = SecondsCurve.through("bytes", points)
    return curves


def copy_curves(watch: Stopwatch) -> dict[str, SecondsCurve]:
    """Measure copies and casts into existing memory, by bytes read and written."""
    curves = {}
    for source_dtype, dtype in _COPIES:

        def measure(
            numel: int, source_dtype: torch.dtype = source_dtype, dtype: torch.dtype = dtype
        ) -> Sequence[float]:
            source = torch.zeros(numel, dtype=source_dtype, device=watch.device)
            target = torch.zeros(numel, dtype=dtype, device=watch.device)
            return [watch.seconds(lambda: target.copy_(source))]

        item_bytes = source_dtype.itemsize + dtype.itemsize
        points = [(float(item_bytes * n), s) for n, (s,) in watch.sweep(_NUMELS, measure)]
        name = "copy" if source_dtype == dtype else f"cast.{dtype}".replace("torch.", "")
        curves[name] = SecondsCurve.through("bytes", points)
    return curves


def sum_curve(watch: Stopwatch) -> SecondsCurve:
    """Measure the mean of two gradients, block by block as the engine's own transport takes it."""

    def measure(numel: int) -> Sequence[float]:
        blocks = [torch.zeros(numel, device=watch.device).split(BLOCK_NUMEL) for _ in range(3)]

        def mean() -> None:
            for left, right, out in zip(*blocks, strict=True):
                torch.add(left, right, out=out)
                out.div_(2)

        return [watch.seconds(mean)]

    measured = watch.sweep(_NUMELS, measure)
    return SecondsCurve.through("bytes", [(12.0 * n, s) for n, (s,) in measured])


_NUM_BLOCKS = 16
_LAYERS_PER_BLOCK = 8  # parameters of a unit, as a decoder's block has
_WIDTH = 128
_TOKENS = 128


class _SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS_PER_BLOCK))
            )
            for _ in range(_NUM_BLOCKS)
        )
        self.checkpointed = False

    def forward(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointed:
                stream = checkpoint(block, stream, use_reentrant=False)
            else:
                stream = block(stream)
        return stream


def host_seconds(watch: Stopwatch) -> tuple[float, float, float]:
    """Return the additional seconds of a sharded forward, a sharded backward, and a checkpoint.

    Each rank shards over one rank, itself: sending is measured with the collectives.
    """
    plain, checkpointed, sharded = (_SmallModel().to(watch.device) for _ in range(3))
    checkpointed.checkpointed = True
    mesh = init_device_mesh(
        watch.device.type, (watch.num_ranks, 1), mesh_dim_names=("replicate", "shard")
    )
    shard(sharded, stage=3, mesh=mesh["shard"], schedule=Schedule(bucket_bytes=1))
    start = torch.ones(_TOKENS, _WIDTH, device=watch.device, requires_grad=True)

    def measure(model: nn.Module) -> list[float]:
        leaves = [*model.parameters()]
        return watch.parts(both_ways(watch, lambda: model(start).sum(), leaves))

    (forward, backward), both, of_engine = map(measure, (plain, checkpointed, sharded))
    again = sum(both) - forward - backward - forward  # beyond running the forward once more
    beyond = of_engine[0] - forward, of_engine[1] - backward, again
    first, second, third = (max(0.0, seconds) / _NUM_BLOCKS for seconds in beyond)
    return first, second, third
