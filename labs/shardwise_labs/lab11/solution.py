"""Lab 11: compose. Tensor, data and pipeline parallelism on four ranks, and the gradient's scale.

Fill in PREDICT first, then the gaps from top to bottom. `shardwise lab run 11` trains a step with
three choices of degrees, `shardwise lab check 11 lab11_compose.py` compares it with one process.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# Step 1, before you run anything. Ranks are numbered stage by stage; ranks of one tensor-parallel
# group are neighbours.
PREDICT = {
    "stage of rank 5 with pp=2, dp=2, tp=2": 1,  # predicted
    "gradient's scale, if divided by 4 ranks where dp is 2": 0.5,  # predicted
    # Four stages, eight micro-batches: the share of time in which a stage waits.
    "idle share": 3 / 11,  # predicted
}


def coordinates(rank: int, pp: int, dp: int, tp: int) -> tuple[int, int, int]:
    """Return a rank's place on the axes: its stage, its replica, its part of each tensor."""
    # GAP 1. The last axis runs fastest: rank = (stage * dp + replica) * tp + part.
    rest, part = divmod(rank, tp)
    stage, replica = divmod(rest, dp)
    return stage, replica, part
    # END


class Copy(torch.autograd.Function):
    """Give the same input to all ranks of a tensor-parallel group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # GAP 2. Each rank knows the gradient through its part of the layer only. The input's
        # gradient is their sum. Do not change `grad` itself: autograd may still need it.
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
        # END


class Sum(torch.autograd.Function):
    """Add the partial outputs of all ranks of a tensor-parallel group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        # GAP 3. After the sum all ranks have the same output.
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total
        # END

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """A residual block, of which this rank has some rows of `up` and the same columns of `down`."""

    def __init__(self, up: Tensor, down: Tensor, bias: Tensor, group: ProcessGroup):
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.bias, self.group = nn.Parameter(bias), group

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(Copy.apply(x, self.group) @ self.up.T)
        return x + Sum.apply(hidden @ self.down.T, self.group) + self.bias


def average(parameters: list[nn.Parameter], group: ProcessGroup) -> None:
    """Turn each `p.grad` into the mean over the ranks with other batches; None stays None."""
    # GAP 4. `group` is this rank's data-parallel group: ranks with the same part of the same
    # stage. `dist.get_world_size(group)` is the number of ranks in it.
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
    # END


def run_stage(
    stage: nn.Module, before: int | None, after: int | None, micro: list[tuple[Tensor, Tensor]]
) -> None:
    """Run forward of all micro-batches, then backward of all, and leave gradients of their mean.

    `before` and `after` are the ranks of the neighbouring stages, None at the ends. Each
    micro-batch is (input, target); the first stage reads the input, the last one the target.
    """
    # GAP 5. Forward: the input, or an `x` as large that `dist.recv(x, before)` fills and that
    # requires a gradient; then `dist.send`, or the loss. Backward: the loss, or the gradient that
    # comes from `after`, in the same order; then send `x.grad` to `before`. The loss of a
    # micro-batch is `loss_of(output, target) / len(micro)`.
    ends: list[tuple[Tensor, Tensor]] = []
    for given, target in micro:
        x = given.clone()
        if before is not None:
            dist.recv(x, before)
            x.requires_grad_()
        y = stage(x)
        if after is not None:
            dist.send(y.detach(), after)
        else:
            y = loss_of(y, target) / len(micro)
        ends.append((x, y))
    for x, y in ends:
        if after is not None:
            grad = torch.empty_like(y)
            dist.recv(grad, after)
            y.backward(grad)
        else:
            y.backward()
        if before is not None and x.grad is not None:
            dist.send(x.grad, before)
    # END


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squares."""
    return ((output - target) ** 2).mean()


# After the run. lab11_broken.py gives the same gradients. On machines of two ranks each it would be
# slow: which line, and which finding names it: "SW003" units too small, "SW010" reductions too
# small, "SW014" a slow axis of the mesh, "SW024" uneven batches?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# A model of 70e9 parameters at 16 bytes, on 64 devices of 80 GB, 30 GB of them for activations of
# a micro-batch. What do you take: "zero3" alone, "zero3 and tensor", or "pipeline"?
DECIDE = {
    "take": None,
}

# True or False?
CLAIMS = {
    "Gradients are averaged over all ranks": None,
    "What tensor parallelism sends grows with the batch": None,
    "A rank of a pipeline sends as much as one of data parallelism": None,
}
