"""Reused buffers of host memory, for transfers with files and for activations."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from shardwise.device import Event
from shardwise.errors import StateError

MakeMemory = Callable[[int], torch.Tensor]  # of a number of bytes: uint8


class Buffer:
    """Memory of a `Pool` in use: ``memory``, uint8, until `release`.

    The next write waits for ``last_use`` of the device, if there is one.
    """

    def __init__(self, pool: Pool, memory: torch.Tensor, last_use: Event | None) -> None:
        self.memory = memory
        self.last_use = last_use
        self._pool: Pool | None = pool

    def release(self) -> None:
        """Return the memory to the pool. Releasing twice is harmless."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool._put(self)


class Pool:
    """Buffers of the memory that ``make_memory`` returns.

    With ``num_buffers``, so many are made at once, of ``buffer_bytes`` each, and `acquire` waits
    for a free one. Otherwise `acquire` makes a buffer if none fits, in place of a smaller free one.

    ``num_bytes`` and ``num_made`` count all buffers, in use or free.
    """

    def __init__(
        self, make_memory: MakeMemory, num_buffers: int | None = None, buffer_bytes: int = 0
    ) -> None:
        self.num_bytes = 0
        self.num_made = 0
        self._make_memory = make_memory
        self._num_buffers = num_buffers
        self._free: list[Buffer] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self.buffer_bytes = -1
        self.reserve(buffer_bytes)

    def reserve(self, buffer_bytes: int) -> None:
        """Replace a fixed number of buffers if they are smaller; used ones are freed on release.

        They are made one by one: page-locked memory comes in powers of two, so that one block may
        cost double.
        """
        if buffer_bytes > self.buffer_bytes:
            buffers = [self._make(buffer_bytes) for _ in range(self._num_buffers or 0)]
            with self._changed:
                self.buffer_bytes = buffer_bytes
                self._free = buffers
                self.num_bytes = sum(map(_size_of, buffers))

    @property
    def num_free(self) -> int:
        """Number of free buffers."""
        return len(self._free)

    def acquire(self, num_bytes: int = 0) -> Buffer:
        """Return the smallest free buffer that is large enough, or a new one.

        **Raises** StateError when closed.
        """
        with self._changed:
            if self._num_buffers is not None:
                self._changed.wait_for(lambda: self._free or self._is_closed)
            if self._is_closed:
                raise StateError("the disk was closed, so it has no buffers any more")
            fits = [buffer for buffer in self._free if _size_of(buffer) >= num_bytes]
            if fits:
                smallest = min(fits, key=_size_of)
                self._free.remove(smallest)
                return smallest
            replaced = max(self._free, key=_size_of, default=None)
            if replaced is not None:
                self._free.remove(replaced)
                self.num_bytes -= _size_of(replaced)
        self.num_bytes += num_bytes
        return self._make(num_bytes)

    def close(self) -> None:
        """Free the memory; a pending `acquire` raises."""
        with self._changed:
            self._is_closed = True
            self._free.clear()
            self._changed.notify_all()

    def _make(self, num_bytes: int) -> Buffer:
        self.num_made += 1
        return Buffer(self, self._make_memory(num_bytes), None)

    def _put(self, buffer: Buffer) -> None:
        """Free a buffer; its memory gets a new `Buffer`, as the caller may keep the old one."""
        with self._changed:
            if self._num_buffers is None or _size_of(buffer) >= self.buffer_bytes:
                self._free.append(Buffer(self, buffer.memory, buffer.last_use))
                self._changed.notify()


def _size_of(buffer: Buffer) -> int:
    return buffer.memory.numel()
