"""Lab 7: overlap. Gathers and reductions run while units compute; only the last wait is left.

Your ZeRO-3 of lab 5, with messages that begin early and end late. `shardwise lab run 7` also draws
`lab07_timeline.svg`; `shardwise lab check 7 lab07_overlap.py`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab05_zero3 import ShardedUnit, Zero3

# Step 1, before you run anything. Six units, each gathered once in forward and once in backward.
# Each gather begins the next one, in the direction of the pass, before its unit computes.
PREDICT = {
    "gathers of 12 that run beside compute": 10,  # predicted
    "full units at once": 2,  # predicted
    "bytes sent, over those without prefetch": 1,  # predicted
    # Gradients of two units form one bucket.
    "reductions of six units": 3,  # predicted
}


class EarlyUnit(ShardedUnit):
    """A unit whose gather can begin before it is needed."""

    def __init__(self, module: nn.Module, trainer: "Overlapped", index: int):
        self.trainer, self.index = trainer, index
        self.work: dist.Work | None = None  # the gather in flight
        super().__init__(module)

    def start_gather(self) -> None:
        """Begin to gather, unless the unit is full or its gather is in flight already."""
        # GAP 1. As `gather` of lab 5: memory, then the slices of all ranks. With `async_op=True`
        # `dist.all_gather(list of slices, shard)` returns at once; keep its result in `work`.
        if self.is_full or self.work is not None:
            return
        self.values.untyped_storage().resize_(self.values.numel() * 4)
        slices = list(self.values.chunk(dist.get_world_size()))
        self.work = dist.all_gather(slices, self.shard.data, async_op=True)
        # END

    def gather(self) -> None:
        """Make the unit full, and let the trainer begin the next gather."""
        # GAP 2. Begin (it may have begun), wait if there is work, remember that the unit is full.
        # Then `self.trainer.prefetch(self.index)`: this unit computes after that.
        self.start_gather()
        if self.work is not None:
            self.work.wait()
            self.work, self.is_full = None, True
        self.trainer.prefetch(self.index)
        # END

    def reduce(self) -> None:
        """Pack the gradients, free the full values, and leave the rest to the trainer."""
        full = torch.zeros(self.values.numel())
        for p, span in self.spans():
            if p.grad is not None:
                full[span] = p.grad.flatten()
            p.grad = None
        self.free()
        self.trainer.collect(self, full)


class Overlapped(Zero3):
    """ZeRO-3 that begins `ahead` gathers early, and reduces buckets of units beside backward."""

    def __init__(self, modules: list[nn.Module], lr: float, ahead: int = 1, per_bucket: int = 2):
        self.ahead, self.per_bucket = ahead, per_bucket
        self.direction = 1  # of the pass: 1 forward, -1 backward
        self.bucket: list[tuple[EarlyUnit, Tensor]] = []
        self.in_flight: list[tuple[dist.Work, Tensor, list[EarlyUnit]]] = []  # oldest first
        self.units: list[EarlyUnit] = []
        for index, module in enumerate(modules):
            self.units.append(EarlyUnit(module, self, index))
        shards = [unit.shard for unit in self.units]
        self.optimizer = torch.optim.Adam(shards, lr=lr, foreach=False)

    def prefetch(self, index: int) -> None:
        """Begin the gathers of the next `ahead` units after unit `index`."""
        # GAP 3. In forward the next unit is index + 1, in backward index - 1. There may be none.
        for distance in range(1, self.ahead + 1):
            following = index + self.direction * distance
            if 0 <= following < len(self.units):
                self.units[following].start_gather()
        # END

    def collect(self, unit: EarlyUnit, full: Tensor) -> None:
        self.bucket.append((unit, full))
        if len(self.bucket) == self.per_bucket:
            self.flush()

    def flush(self) -> None:
        """Begin the reduction of the bucket; no more than two are in flight."""
        if self.bucket:
            self.finish_reductions(allowed=1)
            work, mine = self.start_reduction([full for _unit, full in self.bucket])
            self.in_flight.append((work, mine, [unit for unit, _full in self.bucket]))
            self.bucket = []

    def start_reduction(self, fulls: list[Tensor]) -> tuple[dist.Work, Tensor]:
        """Begin ONE reduce-scatter of several units' gradients; return its work and its output.

        The output has this rank's slice of the first unit's sum, then that of the second, ...
        """
        # GAP 4. `dist.reduce_scatter(out, list of N tensors, async_op=True)`. The tensor for rank r
        # has slice r of each unit, one after another.
        num_ranks = dist.get_world_size()
        inputs = [torch.cat([full.chunk(num_ranks)[r] for full in fulls]) for r in range(num_ranks)]
        mine = torch.empty(sum(len(full) for full in fulls) // num_ranks)
        return dist.reduce_scatter(mine, inputs, async_op=True), mine
        # END

    def finish_reductions(self, allowed: int) -> None:
        """Wait for the oldest reductions until no more than `allowed` are in flight."""
        # GAP 5. Each output is the sum of its units' slices: divide it, and cut it into units
        # (`mine.split([...])`, as many elements as each unit's shard has). Set `shard.grad`, or
        # add to it.
        while len(self.in_flight) > allowed:
            work, mine, units = self.in_flight.pop(0)
            work.wait()
            mine /= dist.get_world_size()
            parts = mine.split([unit.shard.numel() for unit in units])
            for unit, part in zip(units, parts, strict=True):
                unit.shard.grad = part if unit.shard.grad is None else unit.shard.grad + part
        # END

    def backward(self, loss: Tensor) -> None:
        self.direction = -1
        super().backward(loss)
        self.flush()
        self.finish_reductions(allowed=0)
        self.direction = 1


# After the run. lab07_broken.py has one wrong line. Which finding names it: "SW003" units too
# small, "SW010" reductions too small, "SW011" buckets or prefetch too large, "SW012" exposed
# communication?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# A unit's gather takes 4 ms, its forward 6 ms, its backward 12 ms. How many gathers should begin
# ahead: 0, 1, 2 or 4? A full unit has 400 MB.
DECIDE = {
    "ahead": None,
}

# True or False?
CLAIMS = {
    "Prefetch sends no fewer bytes": None,
    "Overlap costs no memory": None,
    "With prefetch no gather is waited for": None,
}
