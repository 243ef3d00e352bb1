"""Slices in a file: mapped memory, and direct reads ahead of a gather.

Note [Slices are read ahead]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Slices that are mapped from their file are read page by page, and the reader waits. So the disk's
threads read the slices that the schedule needs next into a buffer, while earlier units
compute, and the gather copies them from there. If the system still has them in its cache, no read
starts, as a copy is faster. A buffer is used only if the slices have not changed since its read.
Otherwise, or if no buffer was free, the mapped memory is read.

Note [Two ways to one file]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step reads and writes whole files through buffers, bypassing the cache, at the disk's speed. All
other readers (checkpoints, ``state_dict()``, user code) see tensors mapped from the file: the
system loads the pages that are touched and evicts them when memory is short. Linux keeps the two
consistent: a direct read first writes back changed pages, and a direct write drops cached ones
(linux/mm/filemap.c, ``kiocb_write_and_wait`` and ``kiocb_invalidate_pages``).
"""

import ctypes
import mmap
import os

import torch

from shardwise.comm.listener import WAITS
from shardwise.errors import StorageError
from shardwise.offload.disk import BufferRead, Disk
from shardwise.offload.files import DiskFile

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10  # MAP_FIXED of Linux, which Python's mmap does not name
_FAILED = ctypes.c_void_p(-1).value


def map_file(file: DiskFile) -> torch.Tensor:
    """Map a file into memory: uint8 [num_bytes], on the CPU.

    The memory stays valid when the file is closed, and its last reference frees the space.

    **Raises** StorageError if the system refuses.
    """
    region = mmap.mmap(-1, max(file.mapped_bytes, 1))  # addresses; file pages replace its pages
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    libc.mmap.argtypes = ctypes.c_void_p, *numbers
    for begin, end, descriptor, at in file.extents():
        flags = mmap.MAP_SHARED | _FIXED
        address = libc.mmap(base + begin, end - begin, _PROTECTION, flags, descriptor, at)
        if address == _FAILED:
            why = os.strerror(ctypes.get_errno())
            raise StorageError(f"{file.description}: mapping its file into memory failed: {why}")
    return torch.frombuffer(region, dtype=torch.uint8)[: file.num_bytes]


def cached_share(memory: torch.Tensor) -> float:
    """Return the share of mapped memory that is in the system's cache, 0 to 1 (mincore(2))."""
    num_pages = -(-memory.nbytes // mmap.PAGESIZE)
    if not num_pages:
        return 1.0
    pages = torch.zeros(num_pages, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    if libc.mincore(memory.data_ptr(), memory.nbytes, pages.data_ptr()):
        return 1.0  # unknown; results do not depend on reading ahead
    return float(pages.bitwise_and(1).sum() / num_pages)


_CACHED = 0.9  # share of the pages; the remaining ones are quickly read page by page


class FileSlices:
    """The slices of one storage in a file of a unit; ``mapped`` is all of it, flat, zeros first."""

    def __init__(self, disk: Disk, unit: str, numel: int, dtype: torch.dtype) -> None:
        self._disk = disk
        self._file: DiskFile = disk.file(unit, numel * dtype.itemsize)
        self.mapped = map_file(self._file).view(dtype)
        disk.reserve(self.mapped.nbytes)
        self._reading: BufferRead | None = None  # in flight, or ended and not released
        self._version = -1  # of the slices in that buffer

    def start_read(self, version: int) -> None:
        """Start reading the slices of a version, if they are not cached and a buffer is free."""
        if self._version != version:
            self.release()
        is_wanted = self._reading is None and self._disk.pool.num_free > 0
        if is_wanted and cached_share(self.mapped) < _CACHED:
            with WAITS.reporting_failures():
                self._reading = self._disk.start_reading(self._file, self.mapped.nbytes)
            self._version = version

    def finish_read(self, version: int) -> None:
        """Wait for a read of this version. **Raises** StorageError if it has failed."""
        if self._reading is not None and self._version == version:
            try:
                with WAITS.reporting_failures():
                    self._reading.wait()
            except StorageError:
                self.release()
                raise

    def take_slices(self, version: int) -> torch.Tensor:
        """Return memory with the slices: the buffer read ahead, or the mapped file."""
        if self._reading is None or self._version != version:
            return self.mapped
        return self._reading.wait()[: self.mapped.nbytes].view(self.mapped.dtype)

    def release(self) -> None:
        """Give the buffer back, after the slices are copied or when they are not needed."""
        if self._reading is not None:
            self._reading.release()
            self._reading = None
