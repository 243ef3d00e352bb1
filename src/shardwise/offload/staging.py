"""Device buffers through which state on the host is stepped: fetch, step, evict.

Note [Through the device and back]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Three streams work on different buffers: while one load is stepped, the next one is fetched and the
previous one is evicted, so the link carries both directions at once. The caller only enqueues. A
buffer is refilled when its contents are evicted; the streams wait for that. These streams are not
those of the gathers, so that a forward pass's slices do not queue behind an optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.device import DeviceTime, Event
from shardwise.homes import LOADS
from shardwise.offload.loads import padded_bytes

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (device tensor, destination)


@dataclass(frozen=True)
class DeviceLoad:
    """Tensors on the host that are stepped together on the device.

    ``work`` receives their device copies, in the same order, and returns the copies back. It runs
    on the stream of the buffers, and should not wait for the device. The caller keeps the
    destination memory alive until the copies are done.
    """

    tensors: Sequence[torch.Tensor]
    work: Callable[[list[torch.Tensor]], Copies]


@dataclass
class _Buffer:
    memory: torch.Tensor
    evicted: Event | None = None  # all contents are evicted
    sources: Sequence[torch.Tensor] = ()  # of the evictions, until then


class StagingBuffers:
    """Buffers of one device, made on first use, as large as the largest load.

    **Cost** 3 x the bytes of the largest load on the device. It is used by one thread at a time.
    """

    def __init__(self, device: torch.device, time: DeviceTime) -> None:
        self._device = device
        self._time = time
        self._fetching = time.new_stream()
        self._working = time.new_stream()
        self._evicting = time.new_stream()
        self._buffers: list[_Buffer] = []
        self._num_loads = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def follow(self, event: Event) -> None:
        """Make later work and evictions wait for an event."""
        self._working.wait(event)
        self._evicting.wait(event)

    def run(self, load: DeviceLoad) -> Event:
        """Enqueue a load's fetch, work and evictions; return the event of its arrival."""
        sizes = [padded_bytes(tensor.nbytes) for tensor in load.tensors]
        buffer = self._next(sum(sizes))
        parts = buffer.memory[: sum(sizes)].split(sizes)
        fetched = self._fetch(load.tensors, parts, buffer.evicted)
        self._working.wait(self._fetching.record())
        buffer.sources = ()  # memory of this stream, which now follows its last use
        with self._working.use():
            copies = load.work(fetched)
        buffer.sources = [source for source, _ in copies]
        buffer.evicted = self._evict(copies)
        return buffer.evicted

    def _fetch(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        after: Event | None,
    ) -> list[torch.Tensor]:
        if after is not None:
            self._fetching.wait(after)
        fetched = []
        with self._fetching.use():
            for tensor, part in zip(tensors, parts, strict=True):
                view = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                fetched.append(view.copy_(tensor, non_blocking=True))
        return fetched

    def _evict(self, copies: Copies) -> Event:
        self._evicting.wait(self._working.record())
        with self._evicting.use():
            for source, place in copies:
                place.copy_(source, non_blocking=True)
        return self._evicting.record()

    def _next(self, num_bytes: int) -> _Buffer:
        """Return the next of the `LOADS` buffers, with room for ``num_bytes``."""
        number = self._num_loads % LOADS
        if number == len(self._buffers):
            self._buffers.append(_Buffer(self._memory(num_bytes)))
        buffer = self._buffers[number]
        if buffer.memory.numel() < num_bytes:
            if buffer.evicted is not None:
                self._fetching.wait(buffer.evicted)  # the stream that allocated it
            buffer.memory = self._memory(num_bytes)
        self._num_loads += 1
        return buffer

    def _memory(self, num_bytes: int) -> torch.Tensor:
        with self._fetching.use():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
