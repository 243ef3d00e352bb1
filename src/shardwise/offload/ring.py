"""A fixed number of buffers in host memory, which all bytes from and to the disk pass.

Who needs one waits until one is free: so memory is bounded, and so is what is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from shardwise.errors import StateError
from shardwise.offload.regions import ALIGNMENT, align


class Buffer:
    """One buffer that was taken: ``memory``, uint8 [buffer_bytes], aligned for O_DIRECT."""

    def __init__(self, ring: Ring, memory: torch.Tensor) -> None:
        self.memory = memory
        self._ring: Ring | None = ring

    def release(self) -> None:
        """Let others take the memory. Releasing twice is harmless."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.put(self.memory)


class Ring:
    """``num_buffers`` of ``buffer_bytes``, made once by ``make_memory(num_bytes)``."""

    def __init__(
        self, num_buffers: int, buffer_bytes: int, make_memory: Callable[[int], torch.Tensor]
    ) -> None:
        # One by one: page-locked memory comes in powers of two, so a sum of them may cost twice.
        self._free = [_aligned(align(buffer_bytes), make_memory) for _ in range(num_buffers)]
        self.num_buffers = num_buffers
        self.buffer_bytes = align(buffer_bytes)
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def num_free(self) -> int:
        """How many buffers nobody has."""
        return len(self._free)

    def take(self) -> Buffer:
        """Return a buffer as soon as one is free. **Raises** StateError when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_closed)
            if self._is_closed:
                raise StateError("the disk was closed, so it has no buffers any more")
            return Buffer(self, self._free.pop())

    def put(self, memory: torch.Tensor) -> None:
        """Take back what a `Buffer` had."""
        with self._changed:
            self._free.append(memory)
            self._changed.notify()

    def close(self) -> None:
        """Give the memory back; who waits for a buffer is told so."""
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
