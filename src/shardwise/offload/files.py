"""The files in which the state of one unit rests on one rank, and the seam to the system.

Note [Files without a name]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
State on disk is of one process: after a crash it is of no use to anybody, as parts of it are of one
step and parts of the next. So the files have no name from the start (O_TMPFILE), or lose it as soon
as they are open. The system frees their space when the process ends, however it ends: there is
nothing that a restart could trust, and nothing to clean.
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
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np

from shardwise.errors import ConfigError, StorageError
from shardwise.offload.regions import ALIGNMENT, align
from shardwise.offload.stripes import Piece, Stripes
from shardwise.offload.transfers import Transfers
from shardwise.quantities import format_bytes

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
_NO_LIMIT = 1 << 62
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TODO = dict.fromkeys(_NO_SPACE, "free some space") | {errno.EMFILE: "raise `ulimit -n`"}
_NO_ANONYMOUS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_IN_THE_WAY = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


class System:
    """What this room asks of the operating system; tests put one that fails in its place.

    **Raises** OSError from every call.
    """

    def open(self, folder: Path) -> int:
        """Open a new file, to be read and written; see Note [Files without a name]."""
        try:
            return os.open(folder, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_ANONYMOUS_FILES:
                raise
        fd, name = tempfile.mkstemp(prefix=".shardwise-", dir=folder)
        os.unlink(name)
        return fd

    def reserve(self, fd: int, num_bytes: int) -> None:
        """Give a file its size and all the space that it will need."""
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)

    def go_direct(self, fd: int) -> None:
        """Let reads and writes pass the system's cache by."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def read(self, fd: int, at: int, into: Sequence[Any]) -> int:
        """Read from a place of a file into arrays of uint8; return how many bytes."""
        return os.preadv(fd, into, at)

    def write(self, fd: int, at: int, data: Sequence[Any]) -> int:
        """Write arrays of uint8 to a place of a file; return how many bytes."""
        return os.pwritev(fd, data, at)

    def drop_cache(self, fd: int, at: int, num_bytes: int) -> None:
        """Return when these bytes are on the disk, and not in the system's cache."""
        os.fdatasync(fd)
        os.posix_fadvise(fd, at, num_bytes, os.POSIX_FADV_DONTNEED)

    def free_bytes(self, folder: Path) -> int:
        """Return how many bytes this user may still write there."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def close(self, fd: int) -> None:
        """Close a file; its space is free again."""
        os.close(fd)


@dataclass(frozen=True)
class Folder:
    """A folder that the user named, and whether files there are written past the cache."""

    path: Path
    is_direct: bool


def examine(path: Path, rank: int, system: System) -> Folder:
    """Return a folder, and find out by a write and a read what it can.

    **Raises** ConfigError if there is no such folder, or nothing may be written there.
    """
    try:
        fd = system.open(path)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise _failure(error, f"rank {rank}", f"opening a file in {path}") from error
        raise ConfigError(
            f"rank {rank}: {path} for offload: {error.strerror}; expected a folder that is there "
            "and may be written to"
        ) from error
    try:
        system.reserve(fd, ALIGNMENT)
        system.go_direct(fd)
        block = aligned(ALIGNMENT)
        block[:] = 0
        system.write(fd, 0, [block])
        system.read(fd, 0, [block])
        return Folder(path, True)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return Folder(path, False)
        raise _failure(error, f"rank {rank}", f"trying {path}") from error
    finally:
        system.close(fd)


class DiskFile:
    """Where ``num_bytes`` of one unit rest: a file without a name in each folder, read as one.

    Its space is reserved at once, and freed by `close` or with the last reference. Read and
    written by the threads of `Disk`; ``transfers`` keeps their order.

    **Raises** StorageError where the space is not there, or anything else goes wrong.
    """

    def __init__(
        self,
        unit: str,
        rank: int,
        num_bytes: int,
        folders: Sequence[Folder],
        stripes: Stripes,
        system: System,
    ) -> None:
        self.unit = unit
        self.num_bytes = num_bytes
        self.stripes = stripes
        self.transfers = Transfers()
        self.who = f"rank {rank}, unit '{unit or '(root)'}'"
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

    def _open(self, folder: Folder, num_bytes: int) -> None:
        with self._named(folder, f"reserving {format_bytes(num_bytes)}"):
            free_bytes = self._system.free_bytes(folder.path)
            why = "" if num_bytes <= free_bytes else os.strerror(errno.ENOSPC)
            if not why:  # to reserve more than there is would fill the disk for a moment
                self._fds.append(self._system.open(folder.path))
                try:
                    self._system.reserve(self._fds[-1], num_bytes)
                except OSError as error:
                    if error.errno not in _NO_SPACE:
                        raise
                    why = os.strerror(error.errno)
            if why:
                raise StorageError(
                    f"{self.who}: {format_bytes(num_bytes)} are needed in {folder.path}, and "
                    f"{format_bytes(free_bytes)} are free there ({why}); free some space, name "
                    "another folder, or offload less"
                )
            if folder.is_direct:
                self._system.go_direct(self._fds[-1])

    @property
    def mapped_bytes(self) -> int:
        """The bytes of the file in whole blocks."""
        return align(self.num_bytes)

    def extents(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield where the bytes lie: [begin, end) in the descriptor's file from a place on."""
        for piece in self.stripes.pieces(0, self.mapped_bytes, _NO_LIMIT):
            at = piece.at
            for begin, end in piece.ranges:
                yield begin, end, self._fds[piece.folder], at
                at += end - begin

    def close(self) -> None:
        """Wait for what is under way and give the space back. Closing twice is harmless."""
        self.transfers.join()  # the number of a closed file may be another file's next
        self._close()

    def read(self, piece: Piece, into: Sequence[Bytes]) -> None:
        """Fill memory with a piece; it takes a detour through memory of its own unless aligned.

        **Raises** StorageError.
        """
        with self._named(self._folders[piece.folder], f"reading {format_bytes(piece.num_bytes)}"):
            if _is_aligned(piece.at, into):
                return self._all(self._system.read, piece.folder, piece.at, into)
            before, detour = _blocks_around(piece)
            self._all(self._system.read, piece.folder, piece.at - before, [detour])
            for part in into:
                part[:] = detour[before : before + part.nbytes]
                before += part.nbytes

    def write(self, piece: Piece, data: Sequence[Bytes]) -> None:
        """Write a piece from memory; what its first and last block hold beside it is kept.

        **Raises** StorageError.
        """
        with self._named(self._folders[piece.folder], f"writing {format_bytes(piece.num_bytes)}"):
            if _is_aligned(piece.at, data):
                return self._all(self._system.write, piece.folder, piece.at, data)
            before, detour = _blocks_around(piece)
            begin = piece.at - before
            last = detour.nbytes - ALIGNMENT
            if before:
                self._all(self._system.read, piece.folder, begin, [detour[:ALIGNMENT]])
            if before + piece.num_bytes < detour.nbytes and (last or not before):
                self._all(self._system.read, piece.folder, begin + last, [detour[last:]])
            for part in data:
                detour[before : before + part.nbytes] = part
                before += part.nbytes
            self._all(self._system.write, piece.folder, begin, [detour])

    def _all(
        self,
        call: Callable[[int, int, Sequence[Any]], int],
        folder: int,
        at: int,
        parts: Sequence[Bytes],
    ) -> None:
        """Repeat a call until all is read or written, which it may do in parts."""
        begin, rest = at, list(parts)
        while rest:
            done = call(self._fds[folder], at, rest)
            done -= done % ALIGNMENT  # whole blocks, as the rest must begin at one again
            if not done:
                raise OSError(errno.EIO, "the file system did not go on")
            at += done
            while rest and done >= rest[0].nbytes:
                done -= rest.pop(0).nbytes
            if done:
                rest[0] = rest[0][done:]
        if not self._folders[folder].is_direct:
            self._system.drop_cache(self._fds[folder], begin, at - begin)

    @contextmanager
    def _named(self, folder: Folder, doing: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise _failure(error, self.who, f"{doing} in {folder.path}") from error


def aligned(num_bytes: int) -> Bytes:
    """Return uninitialised memory that begins at a multiple of `ALIGNMENT`."""
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes]


def _is_aligned(at: int, parts: Sequence[Bytes]) -> bool:
    whole = all(p.ctypes.data % ALIGNMENT == 0 and p.nbytes % ALIGNMENT == 0 for p in parts)
    return whole and at % ALIGNMENT == 0


def _blocks_around(piece: Piece) -> tuple[int, Bytes]:
    """Return memory for the blocks that hold a piece, and where in it the piece begins."""
    before = piece.at % ALIGNMENT
    return before, aligned(align(before + piece.num_bytes))


def _failure(error: Exception, who: str, doing: str) -> StorageError:
    number = getattr(error, "errno", None) or 0
    why = f"{os.strerror(number)} (errno {number})" if number else f"{error!r}"
    what = _TODO.get(number, "the system's log has more")
    return StorageError(
        f"{who}: {doing} failed: {why}; {what}. Start again from the last checkpoint, with another "
        "folder if this disk fails again"
    )


def _close_all(system: System, fds: list[int]) -> None:
    while fds:
        with suppress(OSError):  # nothing in it is wanted any more
            system.close(fds.pop())
