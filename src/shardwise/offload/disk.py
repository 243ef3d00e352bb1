"""`Disk`: state of one rank's units in files; background threads and a pool of buffers.

Each model and rank has its own. Each folder has a few threads, to keep several requests in flight
on its disk; Python releases its lock while a thread reads or writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from weakref import WeakSet

import torch

from shardwise.errors import ConfigError, StateError
from shardwise.offload.files import Bytes, DiskFile, System, aligned, examine
from shardwise.offload.pool import Buffer, MakeMemory, Pool
from shardwise.offload.stripes import ALIGNMENT, FileRange, Stripes, align
from shardwise.offload.transfers import FileTransfer, Job
from shardwise.trace import Tracer

RecordRequest = Callable[[int, Callable[[], None]], None]  # (bytes, request): run and record it

_LOG = logging.getLogger("shardwise")
_THREADS = 4  # of each folder
_REQUEST_BYTES = 8 << 20  # large, as a thread needs Python's lock after each request
_TRIAL_BYTES = 32 << 20


class Disk:
    """Files for the units of one rank in ``folders``, and a pool of buffers for their transfers.

    ``make_memory(num_bytes)`` returns host memory, uint8, page-locked if an accelerator copies from
    it. Several folders share each unit's bytes by their speeds, measured when the disk is made.

    **Cost** ``num_buffers`` x ``buffer_bytes`` of host memory. A tensor that is not aligned takes
    up to 32 MiB more per folder while it is in flight.

    **Raises** ConfigError for a folder that is missing or not writable. A failed transfer raises
    StorageError, with rank, unit and path, in its ``wait()``; before that has raised, in the next
    call of any method too.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        buffer_bytes: int,
        num_buffers: int,
        make_memory: MakeMemory,
        rank: int,
        system: System | None = None,
    ) -> None:
        if not folders:
            raise ConfigError("offload to disk: expected at least one folder, got none")
        self.tracer = Tracer()  # receives reads and writes; replaced by a model's tracer
        self._rank = rank
        self._system = system or System()
        self._folders = [examine(path, rank, self._system) for path in folders]
        for folder in self._folders:
            if not folder.is_direct:
                _LOG.info(
                    "rank %d: %s takes no direct I/O (O_DIRECT), so it goes through the system's "
                    "cache and is slower",
                    rank,
                    folder.path,
                )
        self._lock = threading.RLock()  # reentrant, because `then` may start a transfer
        self._is_closed = False
        self._files: WeakSet[DiskFile] = WeakSet()
        self._started: list[FileTransfer] = []  # in flight, or failed and not yet raised
        self._threads = [_threads(f"shardwise-disk-{number}") for number in range(len(folders))]
        self._stripes = Stripes(self._speeds() if len(folders) > 1 else [1])
        self.pool = Pool(partial(_aligned, make_memory), num_buffers, align(buffer_bytes))

    @property
    def where(self) -> str:
        """The folders, as text."""
        return ", ".join(str(folder.path) for folder in self._folders)

    @property
    def shares(self) -> list[tuple[Path, float]]:
        """Each folder and its share of the bytes."""
        counts = self._stripes.counts
        return [
            (folder.path, count / sum(counts))
            for folder, count in zip(self._folders, counts, strict=True)
        ]

    def file(self, unit: str, num_bytes: int) -> DiskFile:
        """Return a new file for a unit, with all its space reserved.

        **Raises** StorageError with the needed and free bytes, if the space is not there.
        """
        with self._lock:
            self._check()
            file = DiskFile(unit, self._rank, num_bytes, self._folders, self._stripes, self._system)
            self._files.add(file)
        return file

    def reserve(self, buffer_bytes: int) -> None:
        """Make the buffers at least ``buffer_bytes`` large, from the next `acquire` on."""
        self.pool.reserve(align(buffer_bytes))

    def acquire(self) -> Buffer:
        """Wait for a free buffer and return it: aligned memory for transfers.

        **State** a caller that holds all buffers and acquires another deadlocks.
        """
        buffer = self.pool.acquire()
        try:
            with self._lock:
                self._check()  # after the wait, as the write that held the buffer may have failed
        except BaseException:
            buffer.release()
            raise
        return buffer

    def start_reading(self, file: DiskFile, num_bytes: int) -> BufferRead:
        """Start reading a file's first bytes into a buffer that `acquire` returns."""
        buffer = self.acquire()
        try:
            return BufferRead(buffer, self.start_read(file, 0, buffer.memory[:num_bytes]))
        except BaseException:
            buffer.release()
            raise

    def start_read(
        self,
        file: DiskFile,
        begin: int,
        into: torch.Tensor,
        then: Callable[[], None] | None = None,
    ) -> FileTransfer:
        """Start reading a tensor from byte ``begin`` of a file; do not use it until then.

        ``into`` is contiguous host memory of any dtype. A buffer's memory is read directly if
        ``begin`` is a multiple of 4096, all else through a copy. The read waits for earlier writes
        of the same bytes. ``then``, usually ``buffer.release``, is called when the read ends, even
        in failure, in another thread; or by this call, if it raises.
        """
        return self._start(file, begin, into, False, then)

    def start_write(
        self,
        file: DiskFile,
        begin: int,
        data: torch.Tensor,
        then: Callable[[], None] | None = None,
    ) -> FileTransfer:
        """Start writing a tensor to byte ``begin`` of a file; do not change it until the end.

        As `start_read`, and it waits for earlier reads of the same bytes too. With ``then`` the
        caller need not wait: a failure is raised in the next call.
        """
        return self._start(file, begin, data, True, then)

    def close(self) -> None:
        """Wait for transfers in flight, end the threads, and free memory and space."""
        with self._lock:
            self._is_closed = True
            files = list(self._files)
        for file in files:
            file.close()
        for threads in self._threads:
            threads.shutdown()
        self.pool.close()

    def _start(
        self,
        file: DiskFile,
        begin: int,
        tensor: torch.Tensor,
        writes: bool,
        then: Callable[[], None] | None,
    ) -> FileTransfer:
        try:
            memory: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
            end = begin + memory.nbytes
            if not 0 <= begin <= end <= file.num_bytes:
                raise ValueError(f"bytes {begin} to {end} of a file of {file.num_bytes} bytes")
            transfer = FileTransfer(begin, end, writes, then)
            move = file.write if writes else file.read
            jobs = _jobs(
                file, begin, memory, move, self._threads, self._record_request(file.unit, writes)
            )
            with self._lock:
                self._check()
                self._started.append(transfer)
                file.transfers.start(transfer, jobs)
        except BaseException:
            if then is not None:
                then()
            raise
        return transfer

    def _record_request(self, unit: str, writes: bool) -> RecordRequest | None:
        """Return a function that runs and records a request; None without a recorder."""
        recorder = self.tracer.recorder
        if recorder is None:
            return None
        line = "disk_write" if writes else "disk_read"

        def run(num_bytes: int, request: Callable[[], None]) -> None:
            end = recorder.begin(line, unit, num_bytes, None)
            request()
            end()

        return run

    def _check(self) -> None:
        """Raise a failure that was not raised yet. **Raises** StateError after `close`."""
        if self._is_closed:
            raise StateError("the disk was closed; no state can be read or written any more")
        self._started = [
            transfer
            for transfer in self._started
            if not transfer.is_over or (transfer.failed and not transfer.is_reported)
        ]
        for transfer in self._started:
            if transfer.failed:
                transfer.wait()

    def _speeds(self) -> list[float]:
        """Return each folder's speed of overwriting and reading, in bytes per second."""
        memory = aligned(_TRIAL_BYTES)
        memory[:] = 0
        speeds = []
        for folder, threads in zip(self._folders, self._threads, strict=True):
            trial = DiskFile(
                "(trial)", self._rank, _TRIAL_BYTES, [folder], Stripes([1]), self._system
            )
            times_s = []
            for move in (trial.write, trial.write, trial.read):
                begin_s = time.perf_counter()
                transfer = FileTransfer(0, _TRIAL_BYTES, move == trial.write, None)
                trial.transfers.start(transfer, _jobs(trial, 0, memory, move, [threads]))
                transfer.wait()
                times_s.append(time.perf_counter() - begin_s)
            trial.close()
            speeds.append(2 * _TRIAL_BYTES / sum(times_s[1:]))  # the first write allocates
        return speeds


class BufferRead:
    """A buffer and the transfer that reads into it."""

    def __init__(self, buffer: Buffer, transfer: FileTransfer) -> None:
        self._buffer = buffer
        self._transfer = transfer

    def wait(self) -> torch.Tensor:
        """Wait for the end of the read; return the memory. **Raises** StorageError if it failed."""
        self._transfer.wait()
        return self._buffer.memory

    def release(self) -> None:
        """Release the buffer after the read has ended. A failure that is not raised yet is dropped.

        Releasing twice is harmless.
        """
        self._transfer.join()
        self._transfer.is_reported = True
        self._buffer.release()


def _aligned(make_memory: MakeMemory, num_bytes: int) -> torch.Tensor:
    memory = make_memory(num_bytes)
    if memory.data_ptr() % ALIGNMENT:  # page-locked memory begins at a page
        memory = make_memory(num_bytes + ALIGNMENT)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + num_bytes]


def _threads(name: str) -> Executor:
    """Return the threads of one folder, all started now: later a limit may be reached."""
    threads = ThreadPoolExecutor(_THREADS, name)
    all_started = threading.Barrier(_THREADS, timeout=60)
    for _ in range(_THREADS):
        threads.submit(all_started.wait)
    return threads


def _jobs(
    file: DiskFile,
    begin: int,
    memory: Bytes,
    move: Callable[[FileRange, Sequence[Bytes]], None],
    threads: Sequence[Executor],
    record: RecordRequest | None = None,
) -> list[Job]:
    """Return one job per request, on the threads of its folder."""
    jobs: list[Job] = []
    for piece in file.stripes.pieces(begin, begin + memory.nbytes, _REQUEST_BYTES):
        parts = [memory[lo - begin : hi - begin] for lo, hi in piece.ranges]
        job = partial(move, piece, parts)
        if record is not None:
            job = partial(record, sum(part.nbytes for part in parts), job)
        jobs.append((threads[piece.folder], job))
    return jobs
