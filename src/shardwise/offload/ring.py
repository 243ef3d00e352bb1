"""A fixed number of host buffers for all transfers from and to the disk.

A caller waits until a buffer is free, so memory and transfers in flight are bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from shardwise.errors import StateError
from shardwise.offload.regions import ALIGNMENT, align


class Buffer:
    """A buffer in use: ``memory``, uint8 [buffer_bytes], aligned for O_DIRECT."""

    def __init__(self, ring: Ring, memory: torch.Tensor) -> None:
        self.memory = memory
        self._ring: Ring | None = ring

    def release(self) -> None:
        """Return the memory to the ring. Releasing twice is harmless."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.put(self.memory)


class Ring:
    """``num_buffers`` of ``buffer_bytes``, made once by ``make_memory(num_bytes)``."""

    def __init__(
        self, num_buffers: int, buffer_bytes: int, make_memory: Callable[[int], torch.Tensor]
    ) -> None:
        # One by one: page-locked memory comes in powers of two, so one block may cost double.
        self._free = [_aligned(align(buffer_bytes), make_memory) for _ in range(num_buffers)]
        self.num_buffers = num_buffers
        self.buffer_bytes = align(buffer_bytes)
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def num_free(self) -> int:
        """Number of free buffers."""
        return len(self._free)

    def take(self) -> Buffer:
        """Wait for a free buffer and return it. **Raises** StateError when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_closed)
            if self._is_closed:
                raise StateError("the disk was closed, so it has no buffers any more")
            return Buffer(self, self._free.pop())

    def put(self, memory: torch.Tensor) -> None:
        """Take back the memory of a `Buffer`."""
        with self._changed:
            self._free.append(memory)
            self._changed.notify()

    def close(self) -> None:
        """Free the memory; a pending `take` raises."""
        with self._changed:
            self._is_closed = True
            self._free.clear()
            self._changed.notify_all()


def _aligned(num_bytes: int, make_memory: Callable[[int], torch.Tensor]) -> torch.Tensor:
    memory = make_memory(num_bytes)
    if memory.data_ptr() % ALIGNMENT:  # page-locked memory begins at a page
        memory = make_memory(num_bytes + ALIGNMENT)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + num_bytes]
