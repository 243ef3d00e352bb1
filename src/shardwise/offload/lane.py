"""A few buffers on the device that state on the host passes: brought, worked on, taken back.

Note [Through the device and back]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Three streams take turns with the buffers: while one load is worked on, the next one comes and the
one before goes back, so a link carries both ways at once. The caller only enqueues: a buffer is
filled again once what was in it has left, and that is for the streams to wait for. They are the
lane's own, as the slices that a forward pass fetches must not queue behind a whole optimizer's
state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.device import DeviceTime, Event
from shardwise.homes import LOADS
from shardwise.offload.loads import room_of

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # what is on the device, and where it goes


@dataclass(frozen=True)
class Load:
    """Tensors on the host that are worked on together on the device.

    ``work`` gets them there, in the same order, and returns what is to be copied back, and where
    to. It runs on the lane's stream, and should not wait for the device. What goes back goes to
    memory that the caller keeps until it is there.
    """

    tensors: Sequence[torch.Tensor]
    work: Callable[[list[torch.Tensor]], Copies]


@dataclass
class _Buffer:
    memory: torch.Tensor
    left: Event | None = None  # when all that was in it has gone back
    kept: Sequence[torch.Tensor] = ()  # what goes back, until then


class Lane:
    """Buffers of one device, made when they are first needed, as large as the largest load.

    **Cost** 3 x the bytes of the largest load on the device. It is used by one thread at a time.
    """

    def __init__(self, device: torch.device, time: DeviceTime) -> None:
        self._device = device
        self._time = time
        self._fetching, self._working, self._evicting = (time.new_stream() for _ in range(3))
        self._buffers: list[_Buffer] = []
        self._num_loads = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def follow(self, event: Event) -> None:
        """Let what is worked on, and taken back, from now on follow an event."""
        self._working.wait(event)
        self._evicting.wait(event)

    def run(self, load: Load) -> Event:
        """Bring a load, work on it and take it back; return the moment at which it is there."""
        sizes = [room_of(tensor.nbytes) for tensor in load.tensors]
        buffer = self._next(sum(sizes))
        brought = self._bring(load.tensors, buffer.memory[: sum(sizes)].split(sizes), buffer.left)
        self._working.wait(self._fetching.record())
        buffer.kept = ()  # memory of this stream, which now follows what has used it
        with self._working.use():
            copies = load.work(brought)
        buffer.kept = [source for source, _ in copies]
        buffer.left = self._take_back(copies)
        return buffer.left

    def _bring(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        after: Event | None,
    ) -> list[torch.Tensor]:
        if after is not None:
            self._fetching.wait(after)
        brought = []
        with self._fetching.use():
            for tensor, part in zip(tensors, parts, strict=True):
                view = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                brought.append(view.copy_(tensor, non_blocking=True))
        return brought

    def _take_back(self, copies: Copies) -> Event:
        self._evicting.wait(self._working.record())
        with self._evicting.use():
            for source, place in copies:
                place.copy_(source, non_blocking=True)
        return self._evicting.record()

    def _next(self, num_bytes: int) -> _Buffer:
        """Return the buffer whose turn it is, with room for so many bytes."""
        turn = self._num_loads % LOADS
        if turn == len(self._buffers):
            self._buffers.append(_Buffer(self._memory(num_bytes)))
        buffer = self._buffers[turn]
        if buffer.memory.numel() < num_bytes:
            if buffer.left is not None:
                self._fetching.wait(buffer.left)  # the stream that it was made on
            buffer.memory = self._memory(num_bytes)
        self._num_loads += 1
        return buffer

    def _memory(self, num_bytes: int) -> torch.Tensor:
        with self._fetching.use():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
