"""One save behind training: the copy of a rank's state, and the thread that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent import futures

import torch

from shardwise.checkpoint.state import Item
from shardwise.checkpoint.write import Written
from shardwise.device import host_buffer, wait_for_copies
from shardwise.offload.disk import Disk
from shardwise.offload.file_slices import mapped

_ALIGNMENT = 64


class Staging:
    """One buffer for the copies of one rank's state; it grows and never shrinks.

    With a ``disk``, which holds the state because host memory is too small, the buffer is a file.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._shapes: list[tuple[int, torch.dtype]] = []
        self._views: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, or of the disk, that the buffer takes."""
        return self._buffer.nbytes

    def reserve(self, items: Sequence[Item]) -> None:
        """Allocate memory for copies of these tensors. **Cost** their bytes, touched."""
        shapes = [(item.data.numel(), item.data.dtype) for item in items]
        if shapes == self._shapes:
            return
        begins, total = [], 0
        for item in items:
            begins.append(total)
            total += -(-item.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        if total > self._buffer.nbytes:
            self._views, self._shapes = [], []
            # The old buffer is freed before the new one is allocated.
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
            devices = {item.data.device for item in items if item.data.device.type != "cpu"}
            if self._disk is not None:
                self._buffer = mapped(self._disk.file("(copies for a checkpoint)", total))
            else:
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


class Saving:
    """A save in the background: how long it stopped training, and whether it is done.

    ``stall_s`` is the time of the copy, ``waited_s`` of the wait for the save before it,
    ``write_s`` of the background's work. The copy takes ``held_bytes`` of memory. ``in_memory``: it
    goes to the hosts' memory, and does not count as saved.
    """

    def __init__(
        self,
        step: int,
        held_bytes: int,
        waited_s: float,
        stall_s: float,
        in_memory: bool = False,
    ) -> None:
        self.step = step
        self.in_memory = in_memory
        self.held_bytes = held_bytes
        self.waited_s = waited_s
        self.stall_s = stall_s
        self.write_s = 0.0
        self._raised = False
        self._ended: futures.Future[Written] = futures.Future()

    def start(self, work: Callable[[], Written]) -> None:
        """Start the work in a thread; the process does not exit before it ends."""

        def run() -> Written:
            started_s = time.perf_counter()
            try:
                return work()
            finally:
                self.write_s = time.perf_counter() - started_s

        pool = futures.ThreadPoolExecutor(1, "shardwise-save")
        self._ended = pool.submit(run)
        pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """Tell whether it has ended, in success or failure."""
        return self._ended.done()

    @property
    def failed(self) -> bool:
        """Tell whether it has failed."""
        return self.error is not None

    @property
    def error(self) -> BaseException | None:
        """The error that it has failed with."""
        return self._ended.exception() if self.done else None

    def wait(self) -> Written:
        """Return when the checkpoint is on disk. **Raises** the failure of the background."""
        self.join()
        self._raised = True
        return self._ended.result()

    def join(self) -> None:
        """Return when the thread has ended."""
        futures.wait([self._ended])

    def raise_once(self) -> None:
        """Raise the failure, unless `wait` has raised it already."""
        if not self._raised:
            self.wait()
