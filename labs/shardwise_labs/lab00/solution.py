"""Lab 0: when not to shard. Data parallelism, and what sharding would cost it.

Fill in PREDICT first, then the gaps from top to bottom. `shardwise lab run 0` runs this file on two
ranks, `shardwise lab check 0 lab00_replicas.py` compares it with one process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Step 1, before you run anything. fp32 with Adam: 4 bytes of a parameter, 4 of its gradient, 8 of
# two moments.
PREDICT = {
    "GB of a model of 1e9 parameters on each rank": 16,  # predicted
    # Two passes over the gradients; P is their bytes.
    "bytes sent in a step, in P, on 2 ranks": 1,  # predicted
    "the same on 8 ranks": 1.75,  # predicted
    # The model here has 28 parameter tensors.
    "messages with one for each tensor": 28,  # predicted
}


def most_parameters(device_bytes: int, activation_bytes: int) -> int:
    """Return how many parameters a device can train without sharding, in fp32 with Adam."""
    # GAP 1. More ranks do not help: each holds all of the model, and its own activations.
    return (device_bytes - activation_bytes) // 16
    # END


def average_each(parameters: list[nn.Parameter]) -> None:
    """Turn each `p.grad` into the mean over ranks, with one message for each; None stays None."""
    # GAP 2. `dist.all_reduce(tensor)` replaces a tensor by the sum over ranks, on all ranks.
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    # END


def average_flat(parameters: list[nn.Parameter]) -> None:
    """Do the same in ONE message for all gradients."""
    # GAP 3. Join the gradients (`torch.cat` of flat ones), reduce, and copy each part back.
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
    # END


class Replicas:
    """Data parallelism: all ranks hold the whole model, and make the same step."""

    def __init__(self, model: nn.Module, lr: float):
        self.parameters = list(model.parameters())
        # GAP 4. Ranks may have drawn different values. `dist.broadcast(p.data, src=0)` gives all
        # ranks rank 0's. `self.optimizer`: torch.optim.Adam on all parameters, foreach=False.
        for p in self.parameters:
            dist.broadcast(p.data, src=0)
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr, foreach=False)
        # END

    def backward(self, loss: Tensor) -> None:
        """Add this rank's gradients of a micro-batch; nothing is sent."""
        loss.backward()

    def step(self) -> None:
        average_flat(self.parameters)
        self.optimizer.step()
        self.optimizer.zero_grad()


def passes(stage: str, micro_batches: int) -> int:
    """Return the passes in a step: reductions of all gradients, gathers of all parameters.

    `stage` is "replicated", "zero1", "zero2" or "zero3"; backward runs `micro_batches` times.
    """
    # GAP 5. replicated: two, for the all-reduce. zero1: one reduction and one gather per step.
    # zero2: one reduction in EACH micro-batch, one gather per step. zero3: each micro-batch
    # gathers for forward, gathers for backward, and reduces.
    return {
        "replicated": 2,
        "zero1": 2,
        "zero2": micro_batches + 1,
        "zero3": 3 * micro_batches,
    }[stage]
    # END


# After the run. lab00_broken.py trains as well as yours, and costs more. Which line, and which
# finding names it: "SW001" not sharded, "SW005" another stage fits better, "SW010" reductions too
# small, "SW020" a straggler?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 1.5e9 parameters in fp32 with Adam on 8 devices of 40 GB; activations take 8 GB. "replicated",
# "zero1" or "zero3"?
DECIDE = {
    "stage": None,
}

# True or False?
CLAIMS = {
    "Sharding makes a model that fits train faster": None,
    "With data parallelism on two ranks each holds half of the model": None,
    "ZeRO-1 sends hardly more bytes than data parallelism": None,
}
