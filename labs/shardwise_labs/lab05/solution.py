"""Lab 5: ZeRO-3. Full parameters exist only while their unit computes.

A unit of lab 4 that also gives up its parameters: gathered before forward, freed after it, gathered
again for backward, freed when its gradients are reduced. This is what FSDP does.
`shardwise lab run 5` and `shardwise lab check 5 lab05_zero3.py`.
"""

import torch
from torch import Tensor, nn

from lab03_zero1 import gather_slices
from lab04_zero2 import Unit

# Step 1, before you run anything. The 7B model on 8 ranks, fp32 and Adam.
PREDICT = {
    "7B zero3, GB per rank": 14,  # predicted
    # Bytes that one rank sends in a step (one micro-batch), divided by those of zero1.
    "zero3 sends, over zero1": 1.5,  # predicted
    # Times that a unit is gathered in one step, if its module runs twice in the forward pass
    # and backward needs it in one go.
    "gathers of a module that runs twice": 3,  # predicted
}


class ShardedUnit(Unit):
    """A unit whose full values exist only between `gather` and `free`."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.is_full = True
        # GAP 1. The shard is a view of the full values so far. Give it its own memory (set
        # `self.shard.data`; the nn.Parameter object stays), then free the full values: gap 3.
        self.shard.data = self.values[self.mine].clone()
        self.free()
        # END
        module.register_forward_pre_hook(lambda _module, _inputs: self.gather())
        module.register_forward_hook(lambda _module, _inputs, output: self.end_forward(output))

    def gather(self) -> None:
        """Bring the full values back, unless they are there."""
        # GAP 2. `untyped_storage().resize_(bytes)` gives memory to a tensor that lost it; all
        # views of it (the module's parameters, what autograd has saved) come back to life.
        if self.is_full:
            return
        self.values.untyped_storage().resize_(self.values.numel() * 4)
        gather_slices(self.values, self.shard.data)
        self.is_full = True
        # END

    def free(self) -> None:
        """Give up the memory of the full values, but not the tensor: views of it stay valid."""
        # GAP 3. Two lines.
        self.values.untyped_storage().resize_(0)
        self.is_full = False
        # END

    def end_forward(self, output: Tensor) -> None:
        # GAP 4. Free now, and gather when backward comes back to this module: that is when the
        # gradient of its output is known (`output.register_hook`, if it requires a gradient).
        self.free()
        if output.requires_grad:
            output.register_hook(lambda _grad: self.gather())
        # END

    def reduce(self) -> None:
        # GAP 5. After the reduction of lab 4 the full values are not read any more.
        super().reduce()
        self.free()
        # END


class Zero3:
    """Data parallelism with moments, gradients and parameters divided over the ranks."""

    def __init__(self, modules: list[nn.Module], lr: float):
        self.units = [ShardedUnit(module) for module in modules]
        shards = [unit.shard for unit in self.units]
        self.optimizer = torch.optim.Adam(shards, lr=lr, foreach=False)

    def backward(self, loss: Tensor) -> None:
        for unit in self.units:
            unit.num_missing = len(unit.parameters)
        loss.backward()
        for unit in self.units:
            if unit.num_missing > 0:
                unit.reduce()

    def step(self) -> None:
        """Update the shards. No gather: the next forward pass gathers each unit."""
        # GAP 6. Two lines, and no communication.
        self.optimizer.step()
        self.optimizer.zero_grad()
        # END

    def full_parameters(self) -> None:
        """Gather all units, to read the parameters after training."""
        for unit in self.units:
            unit.gather()


# After the run. lab05_broken.py has one wrong line. Which finding names it: "SW001" not sharded,
# "SW003" units too small, "SW004" one unit is much larger, "SW006" padding?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 7B in fp32 with Adam at zero3 on devices of 24 GB, 4 GB of them for activations. One unit has
# 0.2e9 parameters and is full at 12 bytes each. The fewest ranks of 2, 4, 8, 16?
DECIDE = {
    "fewest ranks": None,
}

# True or False?
CLAIMS = {
    "ZeRO-3 sends three times as many bytes as ZeRO-1": None,
    "Fewer and larger units raise the peak": None,
    "ZeRO-3 gathers each parameter once per step": None,
}
