"""Copies of a rank's state in host memory, so that training goes on while they are written.

Note [The stall of a background save]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A background save stops training for one copy of the rank's state and nothing else. The memory for
it is held from the start (`Checkpoints.reserve`) and touched there: fresh memory costs a page fault
per 4 KiB, which is as slow as the copy itself. On an accelerator it is page-locked.
"""

from collections.abc import Sequence

import torch

from shardwise.checkpoint.state import Item
from shardwise.device import host_buffer, wait_for_copies

_ALIGNMENT = 64


class Staging:
    """One buffer for the copies of one rank's state; it grows and never shrinks."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._shapes: list[tuple[int, torch.dtype]] = []
        self._views: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are held."""
        return self._buffer.nbytes

    def reserve(self, items: Sequence[Item]) -> None:
        """Hold memory for copies of these tensors. **Cost** their bytes, touched."""
        shapes = [(item.data.numel(), item.data.dtype) for item in items]
        if shapes == self._shapes:
            return
        begins, total = [], 0
        for item in items:
            begins.append(total)
            total += -(-item.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        if total > self._buffer.nbytes:
            self._views, self._shapes = [], []
            self._buffer = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # the old one goes before the new one
            devices = {item.data.device for item in items if item.data.device.type != "cpu"}
            self._buffer = host_buffer(total, next(iter(devices), torch.device("cpu")))
        self._views = [
            self._buffer[begin : begin + item.data.nbytes].view(item.data.dtype)
            for begin, item in zip(begins, items, strict=True)
        ]
        self._shapes = shapes

    @torch.no_grad()
    def copy(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Return copies of the items' tensors, valid until the next call."""
        self.reserve(items)
        if items:
            sources = [item.data for item in items]
            torch._foreach_copy_(self._views, sources, non_blocking=True)
            wait_for_copies({source.device for source in sources})
        return self._views
