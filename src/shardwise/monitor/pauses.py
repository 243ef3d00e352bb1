"""Pauses of the training thread that are not its own: waits for a core, garbage collection."""

import gc
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

_FULL = 2  # the generation of collections that look at all objects


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
    """How long Python's full garbage collections took on the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._took_s = self._began_s = 0.0

    def start(self) -> None:
        """Begin to measure."""
        gc.callbacks.append(self._note)

    def close(self) -> None:
        """Measure no more."""
        with suppress(ValueError):
            gc.callbacks.remove(self._note)

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        took_s, self._took_s = self._took_s, 0.0
        return took_s

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] == _FULL and threading.get_ident() == self._thread:
            if phase == "start":
                self._began_s = time.perf_counter()
            elif self._began_s:
                self._took_s += time.perf_counter() - self._began_s
