"""Lab 3: ZeRO-1. Every rank keeps Adam's moments for its own share of the parameters only.

Fill in PREDICT first, then the gaps from top to bottom. `shardwise lab run 3` runs this file on
three ranks, `shardwise lab check 3 lab03_zero1.py` compares it with one process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Step 1, before you run anything. A model of 7e9 parameters in fp32 with Adam on 8 ranks:
# GB (1e9 bytes) of parameters, gradients and Adam's moments on one rank.
PREDICT = {
    "7B replicated, GB per rank": 112,  # predicted
    "7B zero1, GB per rank": 63,  # predicted
    # One step of P bytes of parameters on 3 ranks: bytes that one rank sends, divided by P.
    "zero1 sends, in P on 3 ranks": 4 / 3,  # predicted
    # 10 parameters on 4 ranks: elements that each rank owns.
    "elements per rank": 3,  # predicted
}


def padded(numel: int, num_ranks: int) -> int:
    """Return the smallest multiple of `num_ranks` that is not below `numel`."""
    # GAP 1. All ranks own slices of the same size, so the flat parameters get zeros at the end.
    return -(-numel // num_ranks) * num_ranks
    # END


def mean_slice(grads: Tensor) -> Tensor:
    """Return this rank's slice of the mean over ranks: [P] on every rank -> [P / N].

    Rank r owns the elements from r * P / N on.
    """
    # GAP 2. Send no more than (N - 1) / N of the bytes: every rank sends the others their slices,
    # and gets its own from them. `dist.reduce_scatter` takes a list of N slices.
    num_ranks = dist.get_world_size()
    mine = torch.empty(grads.numel() // num_ranks)
    dist.reduce_scatter(mine, list(grads.chunk(num_ranks)))
    mine /= num_ranks
    return mine
    # END


def gather_slices(values: Tensor, shard: Tensor) -> None:
    """Fill `values` [P] with the slices [P / N] of all ranks, in place."""
    # GAP 3. One call; the pieces of `values.chunk(...)` are views.
    dist.all_gather(list(values.chunk(dist.get_world_size())), shard)
    # END


class Flat:
    """All parameters of a model one after another: `values` [P], and `grads` [P].

    The parameters and their gradients become views of the two.
    """

    def __init__(self, parameters: list[nn.Parameter], numel: int):
        self.values, self.grads = torch.zeros(numel), torch.zeros(numel)
        start = 0
        for p in parameters:
            span = slice(start, start + p.numel())
            self.values[span] = p.data.flatten()
            p.data = self.values[span].view_as(p)
            p.grad = self.grads[span].view_as(p)
            start = span.stop


class Zero1:
    """Data parallelism with Adam's moments divided over the ranks."""

    def __init__(self, model: nn.Module, lr: float):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        parameters = list(model.parameters())
        numel = padded(sum(p.numel() for p in parameters), num_ranks)
        self.flat = Flat(parameters, numel)
        # GAP 4. `self.shard`: this rank's slice of the flat values as an nn.Parameter, a view that
        # needs no memory. `self.optimizer`: torch.optim.Adam on the shard alone, foreach=False.
        size = numel // num_ranks
        self.shard = nn.Parameter(self.flat.values[rank * size : (rank + 1) * size])
        self.optimizer = torch.optim.Adam([self.shard], lr=lr, foreach=False)
        # END

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Update the parameters of all ranks with the mean gradient."""
        # GAP 5. The mean gradient of the shard, the optimizer's step, the gather of all shards.
        # At the end the gradients are zero again, and `self.shard.grad` is None.
        self.shard.grad = mean_slice(self.flat.grads)
        self.optimizer.step()
        gather_slices(self.flat.values, self.shard.data)
        self.flat.grads.zero_()
        self.shard.grad = None
        # END


# After the run. lab03_broken.py takes your ZeRO-1 and holds too much: which line is wrong, and
# which finding names it: "SW001" not sharded, "SW006" padding, "SW011" buckets too large, "SW042"
# updates that round away? (`shardwise explain SW001` and so on.)
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 7B in fp32 with Adam at zero1, 60 GB per rank for all of it: the fewest ranks of 2, 4, 8, 16, 32.
DECIDE = {
    "fewest ranks": None,
}

# True or False?
CLAIMS = {
    "ZeRO-1 sends twice as much as DDP, since it reduces and gathers": None,
    "With Adam, a sum of gradients in place of the mean hardly shows in the parameters": None,
    "With ZeRO-1 a rank computes the gradients of its own slice only": None,
}
