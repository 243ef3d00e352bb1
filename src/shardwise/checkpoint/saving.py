"""A save that goes on in the background: its copies in host memory, its thread, how it ended.

Note [The stall of a background save]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A background save stops training for one copy of the rank's state and nothing else. The memory for
it is held from the start (`Checkpoints.reserve`) and touched there: fresh memory costs a page fault
per 4 KiB, which is as slow as the copy itself. On an accelerator it is page-locked.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from shardwise.checkpoint.state import Item
from shardwise.checkpoint.write import Written
from shardwise.device import host_buffer, wait_for_copies
from shardwise.offload.disk import Disk
from shardwise.offload.mapped import mapped

_ALIGNMENT = 64


class Staging:
    """One buffer for the copies of one rank's state; it grows and never shrinks.

    With a ``disk``, on which the state rests as it would not fit into host memory, it is a file.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._shapes: list[tuple[int, torch.dtype]] = []
        self._views: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, or of the disk, that are held."""
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
    """A save under way: how long it stopped training, and whether it is done.

    ``stall_s`` is the copy, ``waited_s`` the wait for the save before it, ``write_s`` how long the
    background took; ``held_bytes`` of memory hold the copy.
    """

    def __init__(self, step: int, held_bytes: int, waited_s: float, stall_s: float) -> None:
        self.step = step
        self.held_bytes = held_bytes
        self.waited_s = waited_s
        self.stall_s = stall_s
        self.write_s = 0.0
        self._written: Written | None = None
        self._failure: BaseException | None = None
        self._told = False
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Written]) -> None:
        """Begin the work in a thread; a process that ends waits for it."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="shardwise-save")
        self._thread.start()

    def _run(self, work: Callable[[], Written]) -> None:
        started_s = time.perf_counter()
        try:
            self._written = work()
        except BaseException as error:  # handed to whoever waits
            self._failure = error
        self.write_s = time.perf_counter() - started_s

    @property
    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Tell whether it has ended, and not well."""
        return self.done and self._failure is not None

    def wait(self) -> Written:
        """Return when the checkpoint is on disk. **Raises** what went wrong in the background."""
        self.join()
        self._told = True
        if self._failure is not None:
            raise self._failure
        assert self._written is not None
        return self._written

    def join(self) -> None:
        """Return when the thread has ended."""
        assert self._thread is not None
        self._thread.join()

    def raise_once(self) -> None:
        """Raise what went wrong, unless somebody was told already."""
        if not self._told:
            self.wait()
