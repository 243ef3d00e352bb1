"""Pauses of the training thread that are not its own: waits for a core, garbage collection."""

import gc
import os
import threading
from contextlib import suppress

_ALL = 2  # the oldest generation


class CoreWait:
    """How long the thread that made it has waited for a core.

    **Source** Linux, Documentation/scheduler/sched-stats.rst: time on the run queue, in ns. Zero on
    other systems. **Cost** a few microseconds for each reading, as the file stays open.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._before_ns = self._read_ns()

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        before_ns, self._before_ns = self._before_ns, self._read_ns()
        return max(self._before_ns - before_ns, 0) / 1e9

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _read_ns(self) -> int:
        if self._file is not None:
            with suppress(OSError, ValueError, IndexError):
                return int(os.pread(self._file, 80, 0).split()[1])
        return 0


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
