"""Lab 4: ZeRO-2. Gradients are reduced unit by unit, as soon as backward has written them.

Full gradients of one unit at a time: a rank keeps its slice of the mean. The file imports what you
have built in lab 3. `shardwise lab run 4` and `shardwise lab check 4 lab04_zero2.py`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab03_zero1 import gather_slices, mean_slice, padded

# Step 1, before you run anything. The 7B model of lab 3 on 8 ranks, fp32 and Adam.
PREDICT = {
    "7B zero2, GB per rank": 38.5,  # predicted
    # Bytes that one rank sends in a step with ONE micro-batch, divided by those of zero1.
    "zero2 sends, over zero1": 1,  # predicted
    # The same with FOUR micro-batches per step, each with its own backward.
    "with four micro-batches, over zero1": 2.5,  # predicted
}


class Unit:
    """The parameters of one module, one after another in `values` [P]; this rank owns `shard`."""

    def __init__(self, module: nn.Module):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.parameters = list(module.parameters())
        numel = padded(sum(p.numel() for p in self.parameters), num_ranks)
        self.values = torch.zeros(numel)
        for p, span in self.spans():
            self.values[span] = p.data.flatten()
            p.data = self.values[span].view_as(p)
        size = numel // num_ranks
        self.mine = slice(rank * size, (rank + 1) * size)
        self.shard = nn.Parameter(self.values[self.mine])
        self.num_missing = 0  # gradients that backward has not written yet
        # GAP 1. Let each parameter call `self.count_gradient` when autograd has written its
        # gradient: `register_post_accumulate_grad_hook` gives the parameter as an argument.
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda _p: self.count_gradient())
        # END

    def spans(self) -> list[tuple[nn.Parameter, slice]]:
        """Return each parameter with its place in `values`."""
        found, start = [], 0
        for p in self.parameters:
            found.append((p, slice(start, start + p.numel())))
            start += p.numel()
        return found

    def count_gradient(self) -> None:
        # GAP 2. Count down `num_missing`; the last gradient of the unit reduces it.
        self.num_missing -= 1
        if self.num_missing == 0:
            self.reduce()
        # END

    def reduce(self) -> None:
        """Turn the full gradients [P] into this rank's slice of the mean, in `shard.grad`."""
        # GAP 3. Copy the gradients into one flat tensor (a parameter without one counts as zero)
        # and give up each `p.grad` at once. Then the mean of the slice; if the shard has a
        # gradient already, from an earlier micro-batch, add to it.
        full = torch.zeros(self.values.numel())
        for p, span in self.spans():
            if p.grad is not None:
                full[span] = p.grad.flatten()
            p.grad = None
        mean = mean_slice(full)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        # END


class Zero2:
    """Data parallelism with moments and gradients divided over the ranks."""

    def __init__(self, modules: list[nn.Module], lr: float):
        self.units = [Unit(module) for module in modules]
        shards = [unit.shard for unit in self.units]
        self.optimizer = torch.optim.Adam(shards, lr=lr, foreach=False)

    def backward(self, loss: Tensor) -> None:
        for unit in self.units:
            unit.num_missing = len(unit.parameters)
        loss.backward()
        # GAP 4. A parameter that the loss does not depend on gets no gradient, so its unit still
        # waits. All ranks must make the same calls in the same order.
        for unit in self.units:
            if unit.num_missing > 0:
                unit.reduce()
        # END

    def step(self) -> None:
        """Update the shards, and bring the full values of all units up to date."""
        # GAP 5. As in lab 3, for each unit; the reduction is done already.
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            gather_slices(unit.values, unit.shard.data)
        # END


# After the run. lab04_broken.py has one wrong line. Which finding names it: "SW001" not sharded,
# "SW010" reductions too small, "SW011" buckets too large, "SW042" updates that round away?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 7B in fp32 with Adam on 8 ranks, 70 GB per rank for it, four micro-batches per step. Which stage?
DECIDE = {
    "stage": None,  # "zero1" or "zero2"
}

# True or False?
CLAIMS = {
    "ZeRO-2 never holds the full gradients of a unit": None,
    "With one micro-batch per step, ZeRO-2 sends what ZeRO-1 sends": None,
    "A run whose optimizer reads 1/N of each gradient is ZeRO-2": None,
}
