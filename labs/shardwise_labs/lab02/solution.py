"""Lab 2: collectives from sends and receives. A ring of ranks adds and gathers slices.

Fill in PREDICT first, then the gaps from top to bottom. `shardwise lab run 2` runs this file on
three ranks, `shardwise lab check 2 lab02_collectives.py` compares sums and counts bytes.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# Step 1, before you run anything. An all-reduce of P bytes: every rank has P bytes, and all of
# them get the sum over ranks.
PREDICT = {
    # Each of 4 ranks sends its P bytes to each other rank, and all add up what arrives:
    # bytes that one rank sends, in P.
    "everything to everyone, in P on 4 ranks": 3,  # predicted
    # Each rank adds up one slice of P / 4 for all, and then sends the sum to all: the same.
    "slice by slice, in P on 4 ranks": 1.5,  # predicted
    # 7e9 gradients in fp32, slice by slice on 8 ranks, 25 GB/s (25e9 bytes) per rank: seconds.
    "seconds for 7B on 8 ranks": 1.96,  # predicted
}


def exchange(tensor: Tensor) -> Tensor:
    """Send `tensor` to the right neighbour; return the left one's, of equal shape."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    # GAP 1. If all ranks send and wait, no rank receives. `dist.isend` begins to send and returns a
    # handle; receive with `dist.recv`, then wait for the handle.
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, right)
    dist.recv(received, left)
    sending.wait()
    return received
    # END


def reduce_scatter(values: Tensor) -> Tensor:
    """Return the sum over ranks of slice `rank` of `values`: [P] on every rank -> [P / N]."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    slices = values.chunk(num_ranks)
    # GAP 2. A partial sum of each slice goes around the ring, and each rank adds its own numbers.
    # Begin by sending slice rank - 1 to the right. In step s (from 0) slice rank - 2 - s arrives:
    # add your own slice of that number, and pass it on. After N - 1 steps it is slice `rank`.
    total = slices[(rank - 1) % num_ranks]
    for step in range(num_ranks - 1):
        total = exchange(total) + slices[(rank - 2 - step) % num_ranks]
    return total
    # END


def all_gather(mine: Tensor) -> Tensor:
    """Return the slices of all ranks in rank order: [P / N] on every rank -> [P]."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    values = torch.zeros(num_ranks * mine.numel())
    slices = values.chunk(num_ranks)  # views: writing to them fills `values`
    # GAP 3. Put your slice in its place, then pass slices around the ring: in step s (from 0)
    # slice rank - 1 - s arrives. Each rank passes on what arrived last.
    slices[rank].copy_(mine)
    piece = mine
    for step in range(num_ranks - 1):
        piece = exchange(piece)
        slices[(rank - 1 - step) % num_ranks].copy_(piece)
    return values
    # END


def all_reduce(values: Tensor) -> Tensor:
    """Return the sum over ranks of `values`: [P] on every rank -> [P]."""
    # GAP 4. One line.
    return all_gather(reduce_scatter(values))
    # END


def seconds(num_bytes: float, num_ranks: int, bytes_per_second: float) -> float:
    """Return how long an all-reduce takes, if a rank sends so many bytes per second."""
    # GAP 5. Count the bytes that one rank sends.
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / bytes_per_second
    # END


def all_reduce_many(tensors: list[Tensor]) -> Tensor:
    """Return the sum over ranks of many tensors, flat, in one all-reduce."""
    return all_reduce(torch.cat([tensor.flatten() for tensor in tensors]))


# After the run. lab02_broken.py has one wrong line. Which finding names it: "SW001" not sharded,
# "SW010" reductions too small, "SW011" buckets too large, "SW020" a straggler?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# DDP reduces the gradients of 7B parameters in fp32 on 8 ranks, beside a backward pass of 2.5 s.
# The slowest link that hides it: 12.5, 25, 50 or 100 GB/s?
DECIDE = {
    "GB/s": None,
}

# True or False?
CLAIMS = {
    "An all-reduce of P bytes on 3 ranks sends P bytes per rank": None,
    "A ring adds in rank order, so it has the bits of one process": None,
    "On twice as many ranks each rank sends less than twice as many bytes": None,
}
