"""Reads and writes in flight, and their order within one file.

Two transfers of one file that touch the same blocks, one of them a write, run in the order in which
they were started; all others run at once. After a failed write, all later transfers of its file
fail, because its contents may be of an older step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from shardwise.errors import StorageError
from shardwise.offload.stripes import align

Job = tuple[Executor, Callable[[], None]]


class FileTransfer:
    """A transfer of bytes [begin, end) of a file from or to memory; do not touch that memory.

    ``then`` is called when the transfer ends, even in failure, in the thread that ends it.
    ``is_reported``: `wait` has returned or raised, so a failure is known.
    """

    def __init__(self, begin: int, end: int, writes: bool, then: Callable[[], None] | None) -> None:
        self.is_reported = False
        self._begin = begin
        self._end = align(end)  # so that transfers with a common block overlap
        self._writes = writes
        self._then = then
        self._over = threading.Event()
        self._error: BaseException | None = None
        # The lock of the file's `Transfers` guards the attributes below.
        self._jobs: Sequence[Job] = ()
        self._jobs_left = 0
        self._waits_for = 0
        self._followers: list[FileTransfer] = []

    @property
    def is_over(self) -> bool:
        """Return True if the transfer has ended, even in failure."""
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        """Return True if the transfer has ended in failure."""
        return self.is_over and self._error is not None

    def join(self) -> None:
        """Wait for the end, even in failure."""
        self._over.wait()

    def wait(self) -> None:
        """Wait for the end. **Raises** StorageError if it failed, in every call."""
        self._over.wait()
        self.is_reported = True
        if self._error is not None:
            raise StorageError(str(self._error) or repr(self._error)) from self._error

    def conflicts_with(self, other: FileTransfer) -> bool:
        """Return True if the two must run in order."""
        overlap = self._begin < other._end and other._begin < self._end
        return overlap and (self._writes or other._writes)


class Transfers:
    """The transfers of one file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: list[FileTransfer] = []
        self._failed_write: BaseException | None = None

    def start(self, transfer: FileTransfer, jobs: Sequence[Job]) -> None:
        """Run a transfer's jobs on their executors, after earlier transfers in conflict."""
        with self._lock:
            before = [other for other in self._in_flight if other.conflicts_with(transfer)]
            for other in before:
                other._followers.append(transfer)
            self._in_flight.append(transfer)
            transfer._jobs = jobs
            transfer._jobs_left = len(jobs)
            transfer._waits_for = len(before)
        if not before:
            self._submit(transfer)

    @property
    def failed(self) -> bool:
        """Return True if a write has failed, which makes the file unusable."""
        return self._failed_write is not None

    def join(self) -> None:
        """Wait until no transfer is in flight."""
        while True:
            with self._lock:
                in_flight = list(self._in_flight)
            if not in_flight:
                return
            in_flight[0].join()

    def _submit(self, transfer: FileTransfer) -> None:
        jobs = transfer._jobs
        transfer._jobs = ()
        if not jobs:
            self._end(transfer)
        for executor, job in jobs:
            try:
                executor.submit(partial(self._run, transfer, job))
            except RuntimeError as error:  # the interpreter ends
                self._job_ended(transfer, error)

    def _run(self, transfer: FileTransfer, job: Callable[[], None]) -> None:
        error = self._failed_write or transfer._error
        try:
            if error is None:
                job()
        except BaseException as raised:  # kept for `wait`
            error = raised
        self._job_ended(transfer, error)

    def _job_ended(self, transfer: FileTransfer, error: BaseException | None) -> None:
        with self._lock:
            transfer._error = transfer._error or error
            if transfer._writes:
                self._failed_write = self._failed_write or error
            transfer._jobs_left -= 1
            if transfer._jobs_left:
                return
        self._end(transfer)

    def _end(self, transfer: FileTransfer) -> None:
        try:
            if transfer._then is not None:
                transfer._then()
        except BaseException as error:
            transfer._error = transfer._error or error
        with self._lock:
            transfer._over.set()
            self._in_flight.remove(transfer)
            followers = transfer._followers
            transfer._followers = []  # so that a caller who keeps this one keeps no other
            for other in followers:
                other._waits_for -= 1
            ready = [other for other in followers if not other._waits_for]
        for other in ready:
            self._submit(other)
