"""One allocation of host memory for all lasting tensors of one model on one rank.

Note [One slab]
~~~~~~~~~~~~~~~
Pages are locked before the first collective, and in one piece. Locking takes about as long as
writing the pages, and allocators of page-locked memory round each piece up to a power of two. A
piece locked in the middle of a reduction makes all ranks wait: a rank that waited for its device
there, while the device waited for its peers, has caused deadlocks. Memory of unknown size before
the first step, such as the optimizer's state, is allocated in that step.
"""

import torch

from shardwise.device import DeviceTime
from shardwise.offload.regions import align


class Slab:
    """``num_bytes`` of zeros on the host, page-locked if an accelerator copies from them."""

    def __init__(self, num_bytes: int, time: DeviceTime) -> None:
        self._memory = time.locked_memory(num_bytes)
        self._taken = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next flat piece of zeros, which ``num_bytes`` must include.

        It has a separate storage over the same memory, so that its references can be counted.
        """
        begin, end = self._taken, self._taken + numel * dtype.itemsize
        self._taken = align(end)
        assert end <= self._memory.numel()
        apart = torch.empty(0, dtype=dtype)
        return apart.set_(self._memory.untyped_storage()[begin:end], 0, (numel,), (1,))
