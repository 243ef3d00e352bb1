"""Lab 8: offload. Adam's moments lie in a file; each step reads, uses and writes them by blocks.

Your ZeRO-1 of lab 3 with less memory and more traffic. `shardwise lab run 8` and
`shardwise lab check 8 lab08_offload.py`. A file stands for any slow memory: the host's, or a disk.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from lab03_zero1 import Zero1, gather_slices, mean_slice

# Step 1, before you run anything. fp32 with Adam.
PREDICT = {
    # The 7B model at zero1 on 8 ranks, moments offloaded: GB that stay on a device.
    "7B zero1 with offload, GB": 56,  # predicted
    # Bytes read and written in a step for each element of a rank's slice.
    "bytes moved per element": 16,  # predicted
    # A device computes 4e14 operations/s, its link carries 25e9 bytes/s, 8 ranks. Tokens per rank
    # and step that take as long to compute as the moments take to move: see gap 5.
    "tokens that hide the copies": 5333,  # predicted
}


class Store:
    """The two moments of a slice in a file: first moments, then second moments."""

    def __init__(self, path: Path, numel: int):
        self.numel = numel
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(self.file, 8 * numel)

    def read(self, begin: int, end: int) -> list[Tensor]:
        """Return both moments of the elements from `begin` to before `end`."""
        places = (4 * begin, 4 * (self.numel + begin))
        found = [os.pread(self.file, 4 * (end - begin), place) for place in places]
        return [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in found]

    def write(self, begin: int, moments: list[Tensor]) -> None:
        """Write both moments of the elements from `begin` on."""
        places = (4 * begin, 4 * (self.numel + begin))
        for place, values in zip(places, moments, strict=True):
            os.pwrite(self.file, values.numpy().tobytes(), place)


def adam(values: Tensor, grad: Tensor, moments: list[Tensor], step: int, lr: float) -> None:
    """Make Adam's step number `step` (1 is the first); change `values` and `moments` in place."""
    p = nn.Parameter(values)
    p.grad = grad
    optimizer = torch.optim.Adam([p], lr=lr, foreach=False)
    first, second = moments
    count = torch.tensor(float(step - 1))
    optimizer.state[p] = {"step": count, "exp_avg": first, "exp_avg_sq": second}
    optimizer.step()


def blocks(numel: int, size: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each block of `size` elements; the last one may be shorter."""
    # GAP 1. `end` is not in the block any more.
    return [(begin, min(begin + size, numel)) for begin in range(0, numel, size)]
    # END


def step_by_blocks(
    values: Tensor, grad: Tensor, store: Store, step: int, lr: float, size: int
) -> None:
    """Make Adam's step of a slice, with the moments of one block in memory at a time."""
    # GAP 2. For each block: read its moments, `adam` on its part of values and grad, write.
    for begin, end in blocks(len(values), size):
        moments = store.read(begin, end)
        adam(values[begin:end], grad[begin:end], moments, step, lr)
        store.write(begin, moments)
    # END


def step_ahead(values: Tensor, grad: Tensor, store: Store, step: int, lr: float, size: int) -> None:
    """The same, with the next block's read beside this block's step: two blocks in memory."""
    # GAP 3. `pool.submit(function, *arguments)` begins a call on another thread and returns a
    # future; `future.result()` waits for the result. Begin the first read before the loop.
    with ThreadPoolExecutor(1) as pool:
        cuts = blocks(len(values), size)
        coming = pool.submit(store.read, *cuts[0])
        for number, (begin, end) in enumerate(cuts):
            moments = coming.result()
            if number + 1 < len(cuts):
                coming = pool.submit(store.read, *cuts[number + 1])
            adam(values[begin:end], grad[begin:end], moments, step, lr)
            store.write(begin, moments)
    # END


class Offloaded(Zero1):
    """ZeRO-1 whose moments are in a file."""

    def __init__(self, model: nn.Module, lr: float, path: Path, size: int = 4096):
        super().__init__(model, lr)
        self.lr, self.size, self.num_steps = lr, size, 0
        self.store = Store(path, self.shard.numel())

    def step(self) -> None:
        """Update the parameters of all ranks with the mean gradient."""
        # GAP 4. As in lab 3, with `step_ahead` in place of the optimizer. `self.shard.data` and a
        # gradient that nothing keeps; count `num_steps` first, Adam begins with step 1.
        self.num_steps += 1
        grad = mean_slice(self.flat.grads)
        step_ahead(self.shard.data, grad, self.store, self.num_steps, self.lr, self.size)
        gather_slices(self.flat.values, self.shard.data)
        self.flat.grads.zero_()
        # END


def tokens_to_hide(flops: float, bytes_per_second: float, num_ranks: int) -> float:
    """Return the tokens per rank and step that take as long as the moments take to move.

    A token costs 6 operations for each parameter. Each rank moves the moments of its slice.
    """
    # GAP 5. Seconds of P parameters and T tokens: 6 * P * T / flops. Seconds of the copies: the
    # bytes moved per element that you predicted, * P / N / bytes_per_second. P is on both sides.
    return 16 / num_ranks / bytes_per_second * flops / 6
    # END


# After the run. lab08_broken.py gives the same values and starves. Which line, and which finding
# names it: "SW012" exposed communication, "SW030" activations do not fit, "SW032" offload to host
# memory takes over, "SW033" the disk starves the step?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 7B in fp32 with Adam at zero1 on 8 ranks, devices of 80 GB, 10 GB of them for activations.
# "offload" the moments, or "keep" them?
DECIDE = {
    "moments": None,
}

# True or False?
CLAIMS = {
    "Offloading the moments halves what zero1 holds, on any number of ranks": None,
    "Reading ahead moves fewer bytes": None,
    "A larger batch hides more of the copies": None,
}
