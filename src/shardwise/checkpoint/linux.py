"""Two system calls of Linux that Python has no name for."""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

NO_REPLACE, EXCHANGE = 1, 2  # flags of renameat2
_AT_CWD = -100
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


def rename_with(a: Path, b: Path, flags: int) -> None:
    """Rename as renameat2 does. **Raises** OSError; ENOSYS where that is unknown."""
    call = _renameat2()
    if call is None:
        raise os_error(errno.ENOSYS, a, b)
    if call(_AT_CWD, os.fsencode(a), _AT_CWD, os.fsencode(b), flags):
        raise os_error(ctypes.get_errno(), a, b)


def begin_writing(fd: int, begin: int, num_bytes: int) -> None:
    """Tell the kernel to send these bytes of a file to the disk now, not only at the sync.

    It promises nothing, and what goes wrong is told by the sync: so does a kernel without it.
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, begin, num_bytes, _BEGIN_WRITING)


def os_error(number: int, a: Path, b: Path) -> OSError:
    """Return the error that Python itself would raise for two names."""
    return OSError(number, os.strerror(number), str(a), None, str(b))


@cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        text, number = ctypes.c_char_p, ctypes.c_int
        function.argtypes = (number, text, number, text, ctypes.c_uint)
    return function


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
