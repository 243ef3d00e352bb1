"""All checkpoints of a run: saved in the background, found again, kept or removed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch

from shardwise.checkpoint.all_ranks import explain, on_all_ranks
from shardwise.checkpoint.assemble import items_to_write
from shardwise.checkpoint.files import Files, Lock
from shardwise.checkpoint.folder import (
    NO_COPIES,
    CopiesThatCount,
    Leftovers,
    clean_up,
    copies_that_count,
    is_usable,
    name_holder,
    rotate,
    step_name,
    steps_in,
    take_lock,
)
from shardwise.checkpoint.memory import ROOT, MemoryTier
from shardwise.checkpoint.same_folder import check_one_folder
from shardwise.checkpoint.save_load import (
    NOTHING,
    Load,
    Loaded,
    checked_path,
    checked_step,
    collect_on_all_ranks,
    holds_checkpoint,
    new_run,
    tell_other_files,
    write_table,
)
from shardwise.checkpoint.state import Item, Table
from shardwise.checkpoint.write import Progress, Written
from shardwise.comm.control import exchange_any, naming
from shardwise.device import host_buffer, wait_for_copies
from shardwise.engine.status import Origin
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError, StateError
from shardwise.offload.disk import Disk
from shardwise.offload.file_slices import map_file
from shardwise.parallel.parts import Model, Optimizer, Parts

_RUNNING, _DONE, _FAILED = range(3)
_ALIGNMENT = 64  # of a tensor in the copy


@dataclass(eq=False)
class Saving:
    """A save in the background: how long it stopped training, and whether it is done.

    ``stall_s`` is the time of the copy, ``waited_s`` of the wait for the save before it,
    ``write_s`` of the background's work. The copy takes ``held_bytes`` of memory. ``in_memory``: it
    goes to the hosts' memory, and does not count as saved.
    """

    step: int
    held_bytes: int
    waited_s: float
    stall_s: float
    in_memory: bool = False
    write_s: float = 0.0
    _ended: futures.Future[Written] = field(default_factory=futures.Future)
    _raised: bool = False

    def start(self, work: Callable[[], Written]) -> None:
        """Start the work in a thread; the process does not exit before it ends."""

        def run() -> Written:
            started_s = time.perf_counter()
            try:
                return work()
            finally:
                self.write_s = time.perf_counter() - started_s

        pool = futures.ThreadPoolExecutor(1, "shardwise-save")
        self._ended = pool.submit(run)
        pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """Tell whether it has ended, in success or failure."""
        return self._ended.done()

    @property
    def error(self) -> BaseException | None:
        """The error that it has failed with, if it has."""
        return self._ended.exception() if self.done else None

    def wait(self) -> Written:
        """Return when the checkpoint is on disk. **Raises** the failure of the background."""
        self.join()
        self._raised = True
        return self._ended.result()

    def join(self) -> None:
        """Return when the thread has ended."""
        futures.wait([self._ended])

    def raise_once(self) -> None:
        """Raise the failure, unless `wait` has raised it already."""
        if not self._raised:
            self.wait()


class Checkpoints:
    """All checkpoints of one run: saved in the background, and rotated.

    Use it as a context: it holds the folder's lock, so a second run in that folder is refused. The
    ``keep_last`` newest steps and all multiples of ``keep_every`` are kept; None keeps all.
    ``model`` and ``optimizer`` may be lists, as in `save`.

    With ``memory_every``, `copy_to_memory` keeps the newest of these steps in the shared memory of
    the hosts, in ``memory_folder``, and on ``copies`` further hosts, if there are several. After a
    restart `load` takes it from there. Without an error the copies are removed at the end.

    Note [News from the background]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Ranks learn at slightly different moments how a save ended. A rank that raised at once would
    leave the others in a collective that it never joins. So while a save is in flight, every
    training forward pass exchanges a byte, and all ranks raise in the same pass. Pipeline stages do
    not exchange it: a stage would wait inside its pass for one that waits for this pass's output.
    Later copies in memory may fail, and the run goes on: the next call here finds out.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Model,
        optimizer: Optimizer | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        memory_every: int | None = None,
        copies: int = 1,
        memory_folder: str | Path = ROOT,
        files: Files | None = None,
    ) -> None:
        given = {"keep_last": keep_last, "keep_every": keep_every, "memory_every": memory_every}
        for name, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: expected 1 or more, or None")
        if copies < 0:
            raise ConfigError(f"copies={copies}: expected the number of further hosts, 0 or more")
        self.folder = checked_path(folder, "Checkpoints")  # the process may change its directory
        self._files = files or Files()
        self._model, self._optimizer = model, optimizer
        self._keep = (keep_last, keep_every)
        self._engine = Parts(model)
        self._tracer = self._engine.comm.tracer
        self._control = self._engine.first.open_control()  # for the thread
        disk = self._engine.disk
        self._staging = _Staging(disk if isinstance(disk, Disk) else None)
        self._saving: Saving | None = None
        self._lock: Lock | None = None
        self._open = True
        self._skipped: set[int] = set()  # on rank 0: damaged steps that may be replaced
        self._unread: int | None = None  # on rank 0: a step of an earlier run, above the origin
        self._origin: Origin | None = None  # that was looked at
        self._news: list[str] = []  # on rank 0: what `finish` warns of
        self.leftovers = Leftovers((), ())
        self.run = new_run(self._control)
        self._memory: MemoryTier | None = None
        self._memory_every = memory_every or 0
        self._has_copied = False  # to memory
        try:
            check_one_folder(self._files, self._control, self.folder, "Checkpoints()")
            counts = on_all_ranks(self._control, self._enter_folder)
            self._compare(memory_every or 0, copies)
            if memory_every is not None:
                root = Path(memory_folder)
                self._memory = MemoryTier(self.folder, self._control, root, copies, *counts)
                self._warn_of_news()
        except BaseException:
            self._leave_folder()
            raise
        check = self._warn_of_unread if self._engine.has_stages else self.check
        self._end_checks = self._engine.add_pass_check(check)

    def _enter_folder(self) -> tuple[CopiesThatCount, str]:
        counts, why_none = NO_COPIES, ""
        if self._control.rank == 0:
            if holds_checkpoint(self._files, self.folder):
                raise ConfigError(
                    f"{self.folder} is one checkpoint, not a folder of them. Load it with "
                    "shardwise.load(), and keep those of this run in another folder"
                )
            counts, why_none = copies_that_count(self._files, self.folder)
            self._lock = take_lock(self._files, self.folder, self.run, counts)
            self.leftovers = clean_up(self._files, self.folder)
            self._unread = next(iter(steps_in(self._files, self.folder)), None)
        self._continue_run(entered=True)
        return counts, why_none

    def _note_copies(self, *new: tuple[int, str]) -> None:
        """Record which copies count: the newest that is whole, and ``new``; the newest on disk."""
        if self._lock is not None:
            on_disk = next(iter(steps_in(self._files, self.folder)), -1)
            whole = () if self._memory is None else self._memory.whole[-1:]
            counts = CopiesThatCount(self.run, (*whole, *new), on_disk)
            name_holder(self._lock, self.run, counts)
            if self._memory is not None:
                self._memory.counts = counts

    def _warn_of_news(self) -> None:
        """Warn of what happened to the copies in memory."""
        if self._memory is not None:
            news, self._memory.news = self._memory.news, []
            for text in news:
                warnings.warn(text, stacklevel=3)

    def _compare(self, *settings: int) -> None:
        """Compare the settings of copies in memory. **Raises** ConfigError if the ranks differ."""
        rows = exchange_any(self._control, repr(settings).encode())
        if len(set(rows)) > 1:
            values = ", ".join(f"rank {n}: {row.decode()}" for n, row in enumerate(rows))
            raise ConfigError(f"memory_every, copies: expected the same on all ranks, got {values}")

    def _leave_folder(self, clears_memory: bool = False) -> None:
        self._open = False
        try:
            if self._memory is not None:
                self._memory.close(clears_memory)
                self._memory = None
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def reserve(self, *, extra: Mapping[str, object] = NOTHING) -> None:
        """Allocate the memory for background saves now, so the first save stalls no longer.

        Call it once the optimizer has its state, after the first step or a load, with the same
        ``extra`` as `save` if that holds tensors.
        """
        self._check_open()
        self.finish()

        def hold(table: Table) -> Table:
            self._staging.reserve(items_to_write(table, self._control))
            return table

        target = self.folder, "Checkpoints.reserve()"
        collect_on_all_ranks(self._model, self._optimizer, extra, target, hold)

    def save(
        self,
        step: int,
        *,
        extra: Mapping[str, object] = NOTHING,
        wait: bool = False,
        progress: Progress | None = None,
    ) -> Saving:
        """Copy the state, and write it while training continues; with ``wait``, return when done.

        One save is in flight at a time: a second one first waits for it (``waited_s``). A failure
        in the background is raised on every rank, by the next forward pass or call here (with
        pipeline stages: the next call), see Note [News from the background]. No checkpoint of that
        step is left then.

        **Cost** one copy of this rank's state into reserved memory (`reserve`).

        **Raises** CheckpointError of an earlier save; ConfigError when the folder holds a higher
        step, which the next load would take in the place of this one; StateError inside an
        accumulation window, after a load that failed, and once closed.
        """

        def staged(table: Table) -> Table:
            self._continue_run()
            self._refuse_older(step)
            return self._staged(table)

        target = self.folder / step_name(checked_step(step))

        def write(table: Table) -> Written:
            return self._write(table, step, target, progress)

        saving = self._start(step, extra, staged, write, f"the save of {target}")
        if wait:
            self.finish()
        return saving

    def copy_to_memory(self, step: int, *, extra: Mapping[str, object] = NOTHING) -> Saving | None:
        """Copy the state into the hosts' memory, in the background; return None if it is not due.

        Due are the multiples of ``memory_every``, unless another save is in flight. A copy is
        loaded after a restart of the processes, if it is newer than the checkpoints on disk; it
        does not count as saved. If the first copy of the process fails, that is raised as of a
        `save`; if a later one does, rank 0 warns, and the next one is tried.

        **Cost** as `save`; two such copies in the memory of the host, and of ``copies`` others.

        **Raises** as `save`; CheckpointError on all ranks if the memory is too small.
        """
        self._check_open()
        memory = self._memory
        if memory is None or checked_step(step) % self._memory_every:
            return None
        self._warn_of_unread()
        self._end_if_done()
        if self._saving is not None or step == memory.newest:
            return None

        def staged(table: Table) -> Table:
            self._continue_run()
            made = self._staged(table)
            if not self._has_copied:
                memory.check_room(self._staging.num_bytes)
            return made

        def write(table: Table) -> Written:
            with self._tracer.span("save", line="checkpoint"):
                return memory.write(table, step, self.run, self._note_copies)

        return self._start(step, extra, staged, write, f"the copy of step {step} to memory", True)

    def _start(
        self,
        step: int,
        extra: Mapping[str, object],
        staged: Callable[[Table], Table],
        write: Callable[[Table], Written],
        what: str,
        in_memory: bool = False,
    ) -> Saving:
        """Copy the state, and begin to write it in the background."""
        with self._tracer.span("save"):
            self._check_open()
            began_s = time.perf_counter()
            self.finish()
            waited_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            with self._tracer.span("save", ""), naming(what):
                call = "copy_to_memory()" if in_memory else "save()"
                target = self.folder / step_name(step), f"Checkpoints.{call}"
                table = collect_on_all_ranks(self._model, self._optimizer, extra, target, staged)
            stall_s = time.perf_counter() - began_s
            self._saving = Saving(step, self._staging.num_bytes, waited_s, stall_s, in_memory)
            self._saving.start(lambda: write(table))
            return self._saving

    def load(
        self,
        *,
        step: int | None = None,
        extra: Mapping[str, object] = NOTHING,
        strict: bool = True,
        cast: bool = False,
        restore_generators: bool = True,
        progress: Progress | None = None,
    ) -> Loaded | None:
        """Load the newest whole checkpoint, or that of ``step``; None if the folder is empty.

        Later saves belong to the run that saved it. A newer checkpoint that was skipped as damaged
        is replaced when its step is saved again. See `load`.

        **Raises** ConfigError when newer checkpoints than ``step`` are there: the next load of the
        newest would return to them.
        """
        self._check_open()
        self.finish()
        with self._tracer.span("load", ""), naming(f"the load of {self.folder}"):
            only = None if step is None else self.folder / step_name(checked_step(step))
            how = strict, cast, restore_generators, progress
            one = Load(self._files, self._model, self._optimizer, extra, *how)
            one.compare_paths(self.folder, step)
            if step is not None:
                on_all_ranks(self._control, lambda: self._refuse_newer(step))
            found = self._memory.find() if self._memory is not None and step is None else ()
            loaded = one.run(self.folder, only, *found)
            if loaded is not None and self._memory is not None:
                self._memory.keep_only(one.taken if loaded.from_memory else None)
                self._warn_of_news()
        self._unread = None

        def go_on() -> None:
            self._continue_run()
            self._note_copies()

        on_all_ranks(self._control, go_on)
        return loaded

    def check_when_asked(self) -> None:
        """Stop calling `check` in each pass; the training loop calls it."""
        self._end_checks()

    def check(self) -> None:
        """Raise a failure of the background, on every rank; the engine calls this in each pass.

        **Cost** one exchange of a byte while a save is in flight, nothing otherwise, and nothing
        for copies in memory after the first one.
        """
        self._warn_of_unread()
        if self._saving is not None and not (self._saving.in_memory and self._has_copied):
            self._end_if_done()

    def _end_if_done(self) -> None:
        """Finish the save in flight if it has ended on all ranks, or failed on one."""
        if self._saving is None:
            return
        mine = _FAILED if self._saving.error else _DONE if self._saving.done else _RUNNING
        states = {row[0] for row in self._engine.all_ranks.exchange(bytes([mine]))}
        if _FAILED in states or states == {_DONE}:
            self.finish()

    def finish(self) -> None:
        """Return when no save is in flight. **Raises** a failure of the background."""
        saving = self._saving
        if saving is None:
            return
        with self._tracer.span("save", ""):
            saving.join()  # interrupted, it is still in flight
        self._saving = None
        self._warn_of_news()
        news, self._news = self._news, []
        for text in news:
            warnings.warn(text, stacklevel=2)
        is_later_copy = saving.in_memory and self._has_copied
        if is_later_copy and isinstance(saving.error, CheckpointError):  # the same on all ranks
            if self._control.rank == 0:
                warnings.warn(
                    f"no copy of step {saving.step} in memory: {saving.error}", stacklevel=2
                )
            return
        saving.raise_once()
        if saving.in_memory:
            self._has_copied = True
            return
        path = self.folder / step_name(saving.step)
        self._origin = self._engine.origin = Origin(path, saving.step, self.run, is_saved=True)

    def close(self, *, clears_memory: bool = True) -> None:
        """Finish the save in flight, release the folder, remove the copies in memory."""
        try:
            self.finish()
        except BaseException:
            clears_memory = False
            raise
        finally:
            if self._saving is not None:
                self._saving.join()
            self.check_when_asked()
            self._leave_folder(clears_memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ShardwiseError) if any(error) else nullcontext():
            self.close(clears_memory=not any(error))  # the error that ended the run is raised

    def _check_open(self) -> None:
        if not self._open:
            raise StateError(f"{self.folder}: these Checkpoints are closed, and the lock is gone")

    def _write(self, table: Table, step: int, target: Path, progress: Progress | None) -> Written:
        """Write and commit; for the thread."""
        span = self._tracer.span("save", line="checkpoint")
        with span, naming(f"the save of {target}"):
            how = step in self._skipped, progress, self._tracer
            written = write_table(self._files, self._control, target, table, self.run, step, *how)
        self._skipped.discard(step)
        if self._control.rank == 0:
            other_files = [written.other_files] if written.other_files else []
            try:
                self._note_copies()
                of_run = self._files, self.folder, self.run
                other_files += rotate(*of_run, *self._keep, step, self._skipped)
            except (OSError, CheckpointError) as error:  # the new one is safe; `finish` warns
                self._news.append(f"old checkpoints stay: {explain(error)}")
            self._news += [tell_other_files(path) for path in other_files]
        return written

    def _staged(self, table: Table) -> Table:
        """Return the table, with copies of the tensors that this rank writes."""
        items = items_to_write(table, self._control)
        copies = dict(zip(map(id, items), self._staging.copy(items), strict=True))
        sharded, uncut, own = (
            tuple(Item(each.row, copies.get(id(each), each.data), each.lo) for each in listed)
            for listed in (table.sharded, table.uncut, table.own)
        )
        return replace(table, sharded=sharded, uncut=uncut, own=own, is_staged=True)

    def _refuse_newer(self, step: int) -> None:
        newer = [s for s in steps_in(self._files, self.folder) if s > step]
        if self._control.rank == 0 and newer:
            raise ConfigError(
                f"step={step}: {self.folder} holds newer checkpoints ({newer[0]}), which the next "
                "load would take. Move them elsewhere, or use shardwise.load() and another folder"
            )

    def _refuse_older(self, step: int) -> None:
        """Refuse a save that the next load would not find, because of a higher step."""
        if self._control.rank != 0:
            return
        for other in steps_in(self._files, self.folder):
            if other <= step:
                return
            if other not in self._skipped and is_usable(self._files, self.folder, other):
                raise ConfigError(
                    f"step {step}: {self.folder} holds step {other}, which the next load would "
                    "take. Call load(), choose another folder, or move the newer checkpoints "
                    "elsewhere"
                )

    def _warn_of_unread(self) -> None:
        if self._unread is not None:
            with suppress(OSError):  # `shardwise.load()` may have been called meanwhile
                self._continue_run()
        unread, self._unread = self._unread, None
        if unread is not None:
            begins = "without load()" if self._origin is None else f"from step {self._origin.step}"
            warnings.warn(
                f"{self.folder} holds checkpoints of an earlier run (newest: step {unread}) and "
                f"training begins {begins}. Saves up to step {unread} will be refused, as the next "
                "load takes the highest step. Call load(), take another folder, or move them "
                "elsewhere",
                stacklevel=2,
            )

    def _continue_run(self, *, entered: bool = False) -> None:
        """Continue the run of the checkpoint that the model was loaded from, if it is here.

        A checkpoint saved by `shardwise.save` counts only when the folder is ``entered``. Steps
        that the load skipped may be replaced: the run reaches them again.
        """
        origin = self._engine.origin
        if origin is None or origin == self._origin or (origin.is_saved and not entered):
            return
        if origin.step is None or origin.path != self.folder / step_name(origin.step):
            return
        self._origin, self.run = origin, origin.run
        if self._control.rank == 0:
            above = [s for s in steps_in(self._files, self.folder) if s > origin.step]
            self._skipped = set(above) if origin.has_skipped else set()
            self._unread = None if origin.has_skipped else next(iter(above), None)


class _Staging:
    """One buffer for the copies of one rank's state; it grows and never shrinks.

    It is touched beforehand, as page faults of fresh memory take as long as the copy. With a
    ``disk``, which holds the state because host memory is too small, the buffer is a file.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._shapes: list[tuple[int, torch.dtype]] = []
        self._views: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, or of the disk, that the buffer takes."""
        return self._buffer.nbytes

    def reserve(self, items: Sequence[Item]) -> None:
        """Allocate memory for copies of these tensors. **Cost** their bytes, touched."""
        shapes = [(item.data.numel(), item.data.dtype) for item in items]
        if shapes == self._shapes:
            return
        sizes = (-(-item.data.nbytes // _ALIGNMENT) * _ALIGNMENT for item in items)
        *begins, total = accumulate(sizes, initial=0)
        if total > self._buffer.nbytes:
            self._views, self._shapes = [], []
            # The old buffer is freed before the new one is allocated.
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
            devices = {item.data.device for item in items if item.data.device.type != "cpu"}
            if self._disk is not None:
                self._buffer = map_file(self._disk.file("(copies for a checkpoint)", total))
            else:
                self._buffer = host_buffer(total, next(iter(devices), torch.device("cpu")))
        self._views = [
            self._buffer[begin : begin + item.data.nbytes].view(item.data.dtype)
            for begin, item in zip(begins, items, strict=True)
        ]
        self._shapes = shapes

    @torch.no_grad()
    def copy(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Return copies of the items' tensors, valid until the next call."""
        self.reserve(items)
        if items:
            sources = [item.data for item in items]
            torch._foreach_copy_(self._views, sources, non_blocking=True)
            wait_for_copies({source.device for source in sources})
        return self._views
