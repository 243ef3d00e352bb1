"""Host memory for all that lasts of one model on one rank, made at once, and cut into tensors.

Note [One slab]
~~~~~~~~~~~~~~~
Pages are locked before the first collective, and in one piece: locking them takes about as long as
writing them, allocators of page-locked memory round each piece up to a power of two, and a piece
that is locked in the middle of a reduction makes all ranks wait (one that waits for the device
there, while the device waits for its peers, has stopped jobs for good). What is not known before
the first step, as the optimizer's state, is made there.
"""

import torch

from shardwise.device import DeviceTime
from shardwise.offload.regions import align


class Slab:
    """``num_bytes`` of host memory, page-locked where an accelerator copies from it, and zeros."""

    def __init__(self, num_bytes: int, time: DeviceTime) -> None:
        self._memory = time.locked_memory(num_bytes)
        self._taken = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next piece: zeros, flat. It must have been counted in ``num_bytes``.

        It has a storage of its own over the same memory, so that its references can be counted.
        """
        begin, end = self._taken, self._taken + numel * dtype.itemsize
        self._taken = align(end)
        assert end <= self._memory.numel()
        apart = torch.empty(0, dtype=dtype)
        return apart.set_(self._memory.untyped_storage()[begin:end], 0, (numel,), (1,))
