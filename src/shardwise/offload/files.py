"""The files that hold one unit's state on one rank, and the system calls for them.

Note [Files without a name]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
State on disk belongs to one process. After a crash it is useless: parts are of one step and parts
of the next. So the files never have a name (O_TMPFILE), or lose it as soon as they are open. The
system frees their space when the process ends, even in a crash, and a restart has nothing to clean.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from weakref import finalize

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError, StorageError
from shardwise.offload.stripes import ALIGNMENT, FileRange, Stripes, align
from shardwise.offload.transfers import Transfers
from shardwise.quantities import format_bytes

Bytes: TypeAlias = npt.NDArray[np.uint8]
_NO_LIMIT = 1 << 62
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TODO = dict.fromkeys(_NO_SPACE, "free some space") | {errno.EMFILE: "raise `ulimit -n`"}
_NO_ANONYMOUS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_IN_THE_WAY = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


class System:
    """System calls on files; tests replace it by one that fails.

    **Raises** OSError from every call.
    """

    def open(self, folder: Path) -> int:
        """Open a new file for reading and writing; see Note [Files without a name]."""
        try:
            return os.open(folder, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_ANONYMOUS_FILES:
                raise
        fd, name = tempfile.mkstemp(prefix=".shardwise-", dir=folder)
        os.unlink(name)
        return fd

    def reserve(self, fd: int, num_bytes: int) -> None:
        """Set a file's size and reserve its space."""
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)

    def go_direct(self, fd: int) -> None:
        """Make reads and writes bypass the system's cache."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def read(self, fd: int, at: int, into: Sequence[Bytes]) -> int:
        """Read from offset ``at`` of a file into arrays of uint8; return the number of bytes."""
        return os.preadv(fd, [part.data for part in into], at)

    def write(self, fd: int, at: int, data: Sequence[Bytes]) -> int:
        """Write arrays of uint8 to offset ``at`` of a file; return the number of bytes."""
        return os.pwritev(fd, [part.data for part in data], at)

    def drop_cache(self, fd: int, at: int, num_bytes: int) -> None:
        """Wait until these bytes are on the disk, and drop them from the system's cache."""
        os.fdatasync(fd)
        os.posix_fadvise(fd, at, num_bytes, os.POSIX_FADV_DONTNEED)

    def free_bytes(self, folder: Path) -> int:
        """Return how many bytes this user can still write there."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def close(self, fd: int) -> None:
        """Close a file and free its space."""
        os.close(fd)


@dataclass(frozen=True)
class OffloadFolder:
    """A folder named by the user; ``is_direct`` if its files bypass the system's cache."""

    path: Path
    is_direct: bool


def examine(path: Path, rank: int, system: System) -> OffloadFolder:
    """Try direct I/O in a folder by a write and a read; return the folder.

    **Raises** ConfigError if the folder does not exist or is not writable.
    """
    try:
        fd = system.open(path)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise _failure(error, f"rank {rank}", f"opening a file in {path}") from error
        raise ConfigError(
            f"rank {rank}: {path} for offload: {error.strerror}; expected an existing, writable "
            "folder"
        ) from error
    try:
        system.reserve(fd, ALIGNMENT)
        system.go_direct(fd)
        block = aligned(ALIGNMENT)
        block[:] = 0
        system.write(fd, 0, [block])
        system.read(fd, 0, [block])
        return OffloadFolder(path, True)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return OffloadFolder(path, False)
        raise _failure(error, f"rank {rank}", f"trying {path}") from error
    finally:
        system.close(fd)


class DiskFile:
    """``num_bytes`` of one unit's state: an unnamed file in each folder, read as one.

    Its space is reserved at once, and freed by `close` or with the last reference. The threads of
    `Disk` read and write it; ``transfers`` keeps their order.

    **Raises** StorageError if the space is not there, or if the system fails otherwise.
    """

    def __init__(
        self,
        unit: str,
        rank: int,
        num_bytes: int,
        folders: Sequence[OffloadFolder],
        stripes: Stripes,
        system: System,
    ) -> None:
        self.unit = unit
        self.num_bytes = num_bytes
        self.stripes = stripes
        self.transfers = Transfers()
        self.description = f"rank {rank}, unit '{unit or '(root)'}'"
        self._folders = folders
        self._system = system
        self._fds: list[int] = []
        self._close = finalize(self, _close_all, system, self._fds)
        try:
            for folder, size in zip(folders, stripes.part_bytes(align(num_bytes)), strict=True):
                self._open(folder, size)
        except BaseException:
            self._close()
            raise

    def _open(self, folder: OffloadFolder, num_bytes: int) -> None:
        with self._naming(folder, f"reserving {format_bytes(num_bytes)}"):
            free_bytes = self._system.free_bytes(folder.path)
            why = "" if num_bytes <= free_bytes else os.strerror(errno.ENOSPC)
            if not why:  # reserving more than is free would fill the disk for a moment
                self._fds.append(self._system.open(folder.path))
                try:
                    self._system.reserve(self._fds[-1], num_bytes)
                except OSError as error:
                    if error.errno not in _NO_SPACE:
                        raise
                    why = os.strerror(error.errno)
            if why:
                raise StorageError(
                    f"{self.description}: {format_bytes(num_bytes)} are needed in {folder.path}, "
                    f"and {format_bytes(free_bytes)} are free there ({why}); free some space, name "
                    "another folder, or offload less"
                )
            if folder.is_direct:
                self._system.go_direct(self._fds[-1])

    @property
    def mapped_bytes(self) -> int:
        """The file's size in bytes, rounded up to whole blocks."""
        return align(self.num_bytes)

    def extents(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (begin, end, descriptor, offset) for each range of the bytes."""
        for piece in self.stripes.pieces(0, self.mapped_bytes, _NO_LIMIT):
            at = piece.at
            for begin, end in piece.ranges:
                yield begin, end, self._fds[piece.folder], at
                at += end - begin

    def close(self) -> None:
        """Wait for transfers in flight and free the space. Closing twice is harmless."""
        self.transfers.join()  # a closed file's descriptor may be reused for another file
        self._close()

    def read(self, piece: FileRange, into: Sequence[Bytes]) -> None:
        """Read a piece into memory, through a temporary buffer unless the memory is aligned.

        **Raises** StorageError.
        """
        with self._naming(self._folders[piece.folder], f"reading {format_bytes(piece.num_bytes)}"):
            if _is_aligned(piece.at, into):
                return self._repeat(self._system.read, piece.folder, piece.at, into)
            before, detour = _blocks_around(piece)
            self._repeat(self._system.read, piece.folder, piece.at - before, [detour])
            for part in into:
                part[:] = detour[before : before + part.nbytes]
                before += part.nbytes

    def write(self, piece: FileRange, data: Sequence[Bytes]) -> None:
        """Write a piece from memory; other bytes of its first and last block are kept.

        **Raises** StorageError.
        """
        with self._naming(self._folders[piece.folder], f"writing {format_bytes(piece.num_bytes)}"):
            if _is_aligned(piece.at, data):
                return self._repeat(self._system.write, piece.folder, piece.at, data)
            before, detour = _blocks_around(piece)
            begin = piece.at - before
            last = detour.nbytes - ALIGNMENT
            if before:
                self._repeat(self._system.read, piece.folder, begin, [detour[:ALIGNMENT]])
            if before + piece.num_bytes < detour.nbytes and (last or not before):
                self._repeat(self._system.read, piece.folder, begin + last, [detour[last:]])
            for part in data:
                detour[before : before + part.nbytes] = part
                before += part.nbytes
            self._repeat(self._system.write, piece.folder, begin, [detour])

    def _repeat(
        self,
        call: Callable[[int, int, Sequence[Bytes]], int],
        folder: int,
        at: int,
        parts: Sequence[Bytes],
    ) -> None:
        """Repeat a call until all bytes are read or written."""
        begin = at
        remaining = list(parts)
        while remaining:
            done = call(self._fds[folder], at, remaining)
            done -= done % ALIGNMENT  # whole blocks, because the next call must begin at a block
            if not done:
                raise OSError(errno.EIO, "the file system did not go on")
            at += done
            while remaining and done >= remaining[0].nbytes:
                done -= remaining.pop(0).nbytes
            if done:
                remaining[0] = remaining[0][done:]
        if not self._folders[folder].is_direct:
            self._system.drop_cache(self._fds[folder], begin, at - begin)

    @contextmanager
    def _naming(self, folder: OffloadFolder, doing: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise _failure(error, self.description, f"{doing} in {folder.path}") from error


def aligned(num_bytes: int) -> Bytes:
    """Return uninitialised memory that begins at a multiple of `ALIGNMENT`."""
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes]


def _is_aligned(at: int, parts: Sequence[Bytes]) -> bool:
    whole = all(p.ctypes.data % ALIGNMENT == 0 and p.nbytes % ALIGNMENT == 0 for p in parts)
    return whole and at % ALIGNMENT == 0


def _blocks_around(piece: FileRange) -> tuple[int, Bytes]:
    """Return the piece's offset in its first block, and memory for its blocks."""
    before = piece.at % ALIGNMENT
    return before, aligned(align(before + piece.num_bytes))


def _failure(error: Exception, subject: str, doing: str) -> StorageError:
    number = getattr(error, "errno", None) or 0
    why = f"{os.strerror(number)} (errno {number})" if number else f"{error!r}"
    what = _TODO.get(number, "the system's log has more")
    return StorageError(
        f"{subject}: {doing} failed: {why}; {what}. Start again from the last checkpoint, with "
        "another folder if this disk fails again"
    )


def _close_all(system: System, fds: list[int]) -> None:
    while fds:
        with suppress(OSError):  # the contents are not needed
            system.close(fds.pop())
