"""A unit's file as mapped memory, read and written through the system's cache.

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

from shardwise.errors import StorageError
from shardwise.offload.files import DiskFile

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10  # MAP_FIXED of Linux, which Python's mmap does not name
_FAILED = ctypes.c_void_p(-1).value


def mapped(file: DiskFile) -> torch.Tensor:
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
        how = _PROTECTION, mmap.MAP_SHARED | _FIXED, descriptor, at
        if libc.mmap(base + begin, end - begin, *how) == _FAILED:
            why = os.strerror(ctypes.get_errno())
            raise StorageError(f"{file.who}: mapping its file into memory failed: {why}")
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
