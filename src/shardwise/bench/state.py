"""What a step does to sharded state: the optimizer, clipping, copies and casts, sums of gradients.

Sizes are the bytes that a whole step reads and writes, as the player of a tape counts them.
"""

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.bench.stopwatch import Stopwatch
from shardwise.comm.shares import BLOCK_NUMEL
from shardwise.engine.api import shard
from shardwise.plan.machine.calibration import Curve

_NUM_TENSORS = 64  # about as many as a decoder of seven layers has
_ADAMW_TENSORS = 7  # reads parameter, gradient and two moments; writes all but the gradient
_CLIP_TENSORS = 3  # reads each gradient for its norm; reads and writes it to scale it
_NUMELS = [1 << i for i in range(8, 25, 2)]
_STATE_NUMELS = [1 << i for i in range(8, 21, 2)]
_COPIES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]


class _Flat(nn.Module):
    """A few vectors, which one unit owns."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(numel) for _ in range(_NUM_TENSORS))


def optimizer_curves(watch: Stopwatch) -> dict[str, Curve]:
    """Measure a fused AdamW and the clipping of the gradients' norm, over float32 shards."""

    def measure(numel: int) -> Sequence[float]:
        model = shard(_Flat(numel * watch.num_ranks).to(watch.device), stage=1)
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

    found = watch.sweep(_STATE_NUMELS, measure)
    curves = {}
    kinds = (("optimizer.adamw", _ADAMW_TENSORS), ("clip", _CLIP_TENSORS))
    for part, (name, num_passes) in enumerate(kinds):
        points = [(4.0 * num_passes * _NUM_TENSORS * n, parts[part]) for n, parts in found]
        curves[name] = Curve.through("bytes", points)
    return curves


def copy_curves(watch: Stopwatch) -> dict[str, Curve]:
    """Measure copies and casts into memory that is there, by bytes read and written."""
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
        curves[name] = Curve.through("bytes", points)
    return curves


def sum_curve(watch: Stopwatch) -> Curve:
    """Measure the mean of two gradients, block by block as the engine's own transport takes it."""

    def measure(numel: int) -> Sequence[float]:
        blocks = [torch.zeros(numel, device=watch.device).split(BLOCK_NUMEL) for _ in range(3)]

        def mean() -> None:
            for left, right, out in zip(*blocks, strict=True):
                torch.add(left, right, out=out)
                out.div_(2)

        return [watch.seconds(mean)]

    found = watch.sweep(_NUMELS, measure)
    return Curve.through("bytes", [(12.0 * n, s) for n, (s,) in found])
