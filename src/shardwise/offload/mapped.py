"""A unit's file as memory: what reads and writes it elsewhere goes through the system's cache.

Note [Two ways to one file]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step reads and writes whole files past the cache, through buffers, as fast as the disk is. All
others (checkpoints, ``state_dict()``, a user who looks) see tensors whose memory is the file,
mapped: the system brings the pages that are touched and takes them away again when memory is short.
Linux keeps the two alike: a direct read first writes back changed pages, a direct write drops those
that are cached (linux/mm/filemap.c, ``kiocb_write_and_wait`` and ``kiocb_invalidate_pages``).
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
    """Return memory that is the file's: uint8 [num_bytes], on the CPU.

    It stays valid when the file is closed, and keeps its space until nobody refers to it.

    **Raises** StorageError where the system refuses.
    """
    region = mmap.mmap(-1, max(file.mapped_bytes, 1))  # the addresses; the file's pages come over
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
    """Return which share of mapped memory the system has in its cache now, 0 to 1 (mincore(2))."""
    num_pages = -(-memory.nbytes // mmap.PAGESIZE)
    if not num_pages:
        return 1.0
    pages = torch.zeros(num_pages, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    if libc.mincore(memory.data_ptr(), memory.nbytes, pages.data_ptr()):
        return 1.0  # not known; a read ahead is not needed for anything to be right
    return float(pages.bitwise_and(1).sum() / num_pages)
