"""Pauses of the training thread that are not its own: waits for a core, garbage collection."""

import gc
import os
import threading
from contextlib import suppress

_ALL = 2  # the oldest generation


class CoreWait:
    """How long the thread that made it has waited for a core, and a thread that it waits for.

    That is the observer's own: where cores are short it may lose its core while it has Python's
    lock.

    **Source** Linux, Documentation/scheduler/sched-stats.rst: time on the run queue, in ns. Zero on
    other systems. **Cost** a few microseconds for each reading, as the files stay open.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        self.add(threading.get_native_id())

    def add(self, thread: int | None) -> None:
        """Count the waits of another thread too, by its `threading.Thread.native_id`."""
        with suppress(OSError):
            path = f"/proc/self/task/{thread}/schedstat"
            self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._before_ns = self._read_ns()

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        before_ns, self._before_ns = self._before_ns, self._read_ns()
        return max(self._before_ns - before_ns, 0) / 1e9

    def close(self) -> None:
        """Close the files."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _read_ns(self) -> int:
        found = 0
        for file in self._files:
            with suppress(OSError, ValueError, IndexError):
                found += int(os.pread(file, 80, 0).split()[1])
        return found


class Collections:
    """How often Python has collected garbage among all objects.

    **Cost** a microsecond. A callback of ``gc`` would be called for small collections too.
    """

    def __init__(self) -> None:
        self._before = self._count()

    def take(self) -> int:
        """Return the collections since the last call."""
        before, self._before = self._before, self._count()
        return self._before - before

    def _count(self) -> int:
        return int(gc.get_stats()[_ALL]["collections"])
