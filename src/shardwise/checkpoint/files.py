"""Files on disk: `Files` has every call that checkpoint code makes to a file system.

Tests replace it with a disk that fails, or that forgets unsynced bytes.

Note [Durable names and bytes]
~~~~~~~~~~~~~~~~~~~~~~
A written file survives a power cut only after `Writer.sync`, and its name only after `sync_folder`
of its folder. The same holds for renamed, removed and new names. Only `make_folders` syncs by
itself. After a failed sync nothing is known and the file has to be written anew: the kernel may
have dropped the pages, and a second sync would succeed without them.
"""

import ctypes
import errno
import fcntl
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal, Self
from weakref import WeakSet

from shardwise.errors import CheckpointError, DamagedCheckpoint

_CALL_BYTES = 64 << 20  # at most this much in one system call, so a kill takes effect soon
_CALL_BUFFERS = 1024  # IOV_MAX of Linux and macOS
_NO_REPLACE, _EXCHANGE = 1, 2  # flags of Linux's renameat2
_AT_CWD = -100
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE of Linux
# Errors for bytes that the disk has lost, and for files that this user may not read.
_LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)
_UNREADABLE = (*_LOST, errno.EACCES, errno.EPERM)
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Entry:
    """One name in a folder. A link is ``other``, whatever it leads to; ``size`` is of files."""

    name: str
    kind: Literal["file", "folder", "other"]
    size: int


class _Descriptor:
    """An open file that is closed once."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _named(self._path):
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Writer(_Descriptor):
    """A new file, written from its start to its end."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        self._size = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append all bytes of all buffers, in order."""
        rest = deque(view.cast("B") for view in buffers if view.nbytes)
        while rest:
            batch, free = [], _CALL_BYTES
            for view in islice(rest, _CALL_BUFFERS):
                batch.append(view[:free])
                free -= len(batch[-1])
                if not free:
                    break
            with _named(self._path):
                written = os.writev(self._fd, batch)  # Python repeats it after a signal
            # Otherwise the disk idles until the sync, and the sync waits for all of it. An error
            # of this call shows in the sync.
            if (call := _sync_file_range()) is not None:
                call(self._fd, self._size, written, _BEGIN_WRITING)
            self._size += written
            while written:  # it may have written less than was asked for
                view = rest.popleft()
                if written < len(view):
                    rest.appendleft(view[written:])
                written = max(0, written - len(view))

    def sync(self) -> None:
        """Return when the bytes would survive a power cut."""
        with _named(self._path):
            os.fsync(self._fd)


class Reader(_Descriptor):
    """An open file; ``size`` is its size when it was opened."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        super().__init__(path, fd)
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from ``offset``. **Raises** DamagedCheckpoint if the file is shorter."""
        rest = buffer.cast("B") if buffer.nbytes else buffer
        end = offset + rest.nbytes
        while rest.nbytes:
            with _named(self._path):
                count = os.preadv(self._fd, [rest[:_CALL_BYTES]], end - len(rest))
            if not count:
                raise DamagedCheckpoint(
                    f"{self._path}: expected at least {end} bytes, the file has "
                    f"{os.fstat(self._fd).st_size}: it was cut short; load another checkpoint"
                )
            rest = rest[count:]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return so many bytes from ``offset``. **Raises** as `read_into`."""
        data = bytearray(num_bytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)


class Lock(_Descriptor):
    """A lock file that this process holds; the kernel drops the lock if the process dies."""

    def write(self, text: str) -> None:
        """Replace the file's text, which usually names the holder."""
        data = text.encode()
        with _named(self._path):
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))

    def release(self) -> None:
        """Release the lock; the file stays. Releasing twice is harmless."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close()


# A forked worker that outlives this process would keep its locks.
_held: WeakSet[Lock] = WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(Lock.close, _held)))


class Files:
    """The operating system's file calls. See Note [Durable names and bytes].

    **Raises** OSError with errno and filename from every call.
    """

    def make_folder(self, path: Path) -> None:
        """Make one folder that does not exist."""
        os.mkdir(path)

    def make_folders(self, path: Path) -> None:
        """Make a folder and the missing ones above it, durably."""
        made = [p for p in path.parents if not p.exists()]
        os.makedirs(path, exist_ok=True)
        for folder in (path, *made):  # `path` too: its maker may have died before the sync
            with suppress(PermissionError):  # a folder with write permission only
                self.sync_folder(folder.parent)

    def create(self, path: Path) -> Writer:
        """Make a file that does not exist."""
        return Writer(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o644))

    def rewrite(self, path: Path, num_bytes: int) -> Writer:
        """Make a file of ``num_bytes``, in the memory of one that exists if it is a plain file.

        In a file system in memory this takes a third of the time of a new file: the kernel neither
        finds nor frees pages.
        """
        with suppress(OSError, DamagedCheckpoint):
            fd = _open_regular(path, os.O_WRONLY)
            if os.fstat(fd).st_nlink == 1:  # other names may be another program's
                os.ftruncate(fd, min(os.fstat(fd).st_size, num_bytes))
                return Writer(path, fd)
            os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(path)
        return self.create(path)

    def open(self, path: Path) -> Reader:
        """Open a regular file. **Raises** DamagedCheckpoint if it is anything else."""
        fd = _open_regular(path, os.O_RDONLY)
        return Reader(path, fd, os.fstat(fd).st_size)

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's names would survive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _named(path):
                os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this file system has no such call
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename at once. **Raises** FileExistsError if the target exists."""
        try:
            _rename_with(source, target, _NO_REPLACE)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            # Not atomic, but a folder never replaces one that is not empty.
            if os.path.lexists(target):
                raise _os_error(errno.EEXIST, source, target) from None
            os.rename(source, target)

    def exchange(self, a: Path, b: Path) -> None:
        """Swap two names at once. **Raises** OSError (ENOSYS, EINVAL) where that is unknown."""
        _rename_with(a, b, _EXCHANGE)

    def list(self, path: Path) -> list[Entry]:
        """Return a folder's entries, sorted by name."""
        entries: list[Entry] = []
        with os.scandir(path) as found:
            for item in found:
                with suppress(FileNotFoundError):  # removed since
                    status = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        entries.append(Entry(item.name, "file", status.st_size))
                    elif stat.S_ISDIR(status.st_mode):
                        entries.append(Entry(item.name, "folder", 0))
                    else:
                        entries.append(Entry(item.name, "other", 0))
        return sorted(entries, key=lambda entry: entry.name)

    def remove_file(self, path: Path) -> None:
        """Remove a file, or a link but not its target."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes this user can still write there."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def locate(self, path: Path) -> tuple[int, int, str]:
        """Return where a path leads: device and inode of its last folder that exists, the rest."""
        real = Path(os.path.realpath(path))
        for folder in (real, *real.parents):
            with suppress(OSError):
                status = os.stat(folder)
                return status.st_dev, status.st_ino, str(real.relative_to(folder))
        return 0, 0, str(real)

    def lock(self, path: Path, shared: bool = False) -> Lock | None:
        """Lock a file, made if missing; return None if another process holds it.

        ``shared`` locks do not exclude each other; they test for the exclusive kind.

        **Raises** CheckpointError if the file has other names (hard links): the holder's text would
        replace the content under those names.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            fd = _open_regular(path, os.O_RDWR | os.O_CREAT)
            lock = Lock(path, fd)
            try:
                with _named(path):
                    fcntl.flock(fd, kind | fcntl.LOCK_NB)
                if _is_file_of(path, fd):  # else its holder has removed it: there may be another
                    if (num_names := os.fstat(fd).st_nlink) > 1:
                        raise CheckpointError(
                            f"{path}: the same file has {num_names} names (hard links), and the "
                            "lock's text would be written over it; remove this name"
                        )
                    _held.add(lock)
                    return lock
            except BlockingIOError:
                return None
            finally:
                if lock not in _held:
                    lock.close()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error about stored bytes into damage, so that an older checkpoint is read.

    The file is missing, the disk has lost its bytes, or this user may not read them. Other errors
    (an unreachable server) are raised as they are.

    **Raises** DamagedCheckpoint naming the file.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{path}: it is missing") from None
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        raise DamagedCheckpoint(f"{path}: {error.strerror} (errno {error.errno})") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces that at ``path`` if the block succeeds."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_file(files: Files, path: Path, limit: int) -> bytes:
    """Return a whole file. **Raises** DamagedCheckpoint if it is longer than ``limit`` bytes."""
    with files.open(path) as reader:
        if reader.size > limit:
            raise DamagedCheckpoint(
                f"{path} has {reader.size} bytes, at most {limit} were expected: it is damaged or "
                "not a file of this kind"
            )
        return reader.read(0, reader.size)


def read_text(files: Files, path: Path, limit: int) -> str:
    """Return a whole file of text. **Raises** as `read_file`, and if it is no UTF-8."""
    try:
        return read_file(files, path, limit).decode()
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(f"{path} should be UTF-8 text but is not: {error}") from error


def _is_file_of(path: Path, fd: int) -> bool:
    """Tell whether an open file still has its name."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _open_regular(path: Path, flags: int) -> int:
    """Open a regular file; a link would lead elsewhere, a pipe or a device could block."""
    try:
        fd = os.open(path, flags | _NO_LINKS | os.O_NONBLOCK, 0o644)
    except OSError:
        with suppress(OSError):
            _check_regular(path, os.lstat(path).st_mode)
        raise
    try:
        _check_regular(path, os.fstat(fd).st_mode)
    except CheckpointError:
        os.close(fd)
        raise
    return fd


def _check_regular(path: Path, mode: int) -> None:
    kinds = {
        stat.S_IFLNK: "symbolic link",
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
    }
    if not stat.S_ISREG(mode):
        raise DamagedCheckpoint(
            f"{path} should be a regular file but is a {kinds.get(stat.S_IFMT(mode), 'device')}; "
            "remove it, or load another checkpoint"
        )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to errors of calls on descriptors."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


# Two system calls of Linux that Python does not have.


def _rename_with(a: Path, b: Path, flags: int) -> None:
    """Rename with renameat2. **Raises** OSError; ENOSYS where the call does not exist."""
    call = _renameat2()
    if call is None:
        raise _os_error(errno.ENOSYS, a, b)
    if call(_AT_CWD, os.fsencode(a), _AT_CWD, os.fsencode(b), flags):
        raise _os_error(ctypes.get_errno(), a, b)


def _os_error(number: int, a: Path, b: Path) -> OSError:
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
