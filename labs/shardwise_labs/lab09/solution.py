"""Lab 9: mixed precision. Masters in fp32, updates that round away, and loss scaling.

Fill in PREDICT first, then the gaps from top to bottom. `shardwise lab run 9` trains on two ranks,
`shardwise lab check 9 lab09_precision.py` compares it with one process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab03_zero1 import gather_slices, mean_slice, padded

# Step 1, before you run anything. bf16 has 8 significant bits, fp16 11 and a small range.
PREDICT = {
    "the bf16 number after 1.0": 1 + 2**-7,  # predicted
    # A bf16 weight of 1.0, and an update of +0.001 added to it 1,000 times. Where is it then?
    "1.0 in bf16 after 1000 times 0.001": 1.0,  # predicted
    # Parameters and gradients in bf16 on each rank; masters and Adam in fp32, divided by 2 ranks.
    "bytes per parameter on 2 ranks": 2 + 2 + 12 / 2,  # predicted
}


def half_ulp(weights: Tensor) -> Tensor:
    """Return half the distance from each weight to the next larger one in bf16; all are positive.

    An update below it rounds away.
    """
    # GAP 1. `torch.frexp(w)` gives m and e with w = m * 2**e and 0.5 <= m < 1. The 8 significant
    # bits of bf16 count steps of 2**(e - 8). `torch.ldexp(m, e)` is m * 2**e.
    _mantissa, exponent = torch.frexp(weights)
    return torch.ldexp(torch.ones_like(weights), exponent - 9)
    # END


class HalfFlat:
    """All parameters of a model in bf16, one after another: `values` [P], and `grads` [P]."""

    def __init__(self, parameters: list[nn.Parameter], values: Tensor):
        self.values, self.grads = values.bfloat16(), torch.zeros(len(values), dtype=torch.bfloat16)
        start = 0
        for p in parameters:
            span = slice(start, start + p.numel())
            p.data = self.values[span].view_as(p)
            p.grad = self.grads[span].view_as(p)
            start = span.stop


class MixedZero1:
    """Parameters and gradients in bf16; the slices that Adam updates in fp32, divided."""

    def __init__(self, model: nn.Module, lr: float):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        parameters = list(model.parameters())
        numel = padded(sum(p.numel() for p in parameters), num_ranks)
        values = torch.zeros(numel)
        values[: sum(p.numel() for p in parameters)] = torch.cat(
            [p.data.flatten() for p in parameters]
        )
        # GAP 2. `self.flat`, a HalfFlat. `self.master`: this rank's slice of `values` in fp32 as an
        # nn.Parameter with separate memory. `self.optimizer`: Adam on it, foreach=False.
        self.flat = HalfFlat(parameters, values)
        self.master = nn.Parameter(values.chunk(num_ranks)[rank].clone())
        self.optimizer = torch.optim.Adam([self.master], lr=lr, foreach=False)
        # END

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Update the masters with the mean gradient, and all ranks' bf16 values from them."""
        # GAP 3. As in lab 3, with two casts. Gradients are added over ranks in fp32 (`mean_slice`
        # takes fp32), and values are sent in bf16. At the end all gradients are zero or None.
        self.master.grad = mean_slice(self.flat.grads.float())
        self.optimizer.step()
        gather_slices(self.flat.values, self.master.data.bfloat16())
        self.flat.grads.zero_()
        self.master.grad = None
        # END


class Scaler:
    """The scale of an fp16 loss: as large as gradients without infinities allow."""

    def __init__(self, scale: float, growth_steps: int):
        self.scale, self.growth_steps = scale, growth_steps
        self.good_steps = 0  # in a row

    def unscale(self, grad: Tensor) -> Tensor | None:
        """Return `grad`, this rank's fp32 slice, without the scale; None if a step is skipped."""
        # GAP 4. Inf or NaN on ONE rank must skip the step on ALL ranks: each sees its slice only.
        bad = (~grad.isfinite().all()).float()
        dist.all_reduce(bad)
        return None if bad else grad / self.scale
        # END

    def update(self, is_skipped: bool) -> None:
        """Halve the scale after a skipped step; double it after `growth_steps` good ones."""
        # GAP 5. `good_steps` begins at 0 again after each of the two.
        self.good_steps = 0 if is_skipped else self.good_steps + 1
        if is_skipped:
            self.scale /= 2
        elif self.good_steps == self.growth_steps:
            self.scale, self.good_steps = self.scale * 2, 0
        # END


# After the run. lab09_broken.py has one line that makes masters useless. Which line, and which
# finding names it: "SW001" not sharded, "SW040" half precision is not stable, "SW041" numbers that
# are not finite, "SW042" updates that round away?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 7B parameters with Adam at zero1 on 8 ranks, 40 GB per rank for it, and updates near 1e-5 of a
# weight. "fp32" for all, "bf16" for all, or "masters" (bf16 with fp32 masters and moments)?
DECIDE = {
    "precision": None,
}

# True or False?
CLAIMS = {
    "bf16 needs no loss scaling, so it needs no fp32 masters": None,
    "The loss can go down while updates round away": None,
    "A rank whose gradient overflows may skip its step alone": None,
}
