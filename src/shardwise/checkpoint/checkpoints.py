"""All checkpoints of a run: saved in the background, found again, kept or removed."""

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from shardwise.checkpoint.all_ranks import explain, on_all_ranks
from shardwise.checkpoint.assemble import assemble, written_items
from shardwise.checkpoint.files import Files, Lock
from shardwise.checkpoint.folder import is_usable, rotate, step_name, steps_in, take_lock
from shardwise.checkpoint.leftovers import Leftovers, clean_up
from shardwise.checkpoint.loading import Loaded, Request, load_newest, load_one
from shardwise.checkpoint.save_load import (
    NOTHING,
    checked_step,
    collect_on_all_ranks,
    holds_checkpoint,
    new_run,
    tell_other_files,
    tell_saved,
)
from shardwise.checkpoint.saving import Saving, Staging
from shardwise.checkpoint.state import Item, Table
from shardwise.checkpoint.write import NONCE_BYTES, Progress, Written, write_checkpoint
from shardwise.comm.control import naming
from shardwise.engine.conditions import Origin
from shardwise.engine.parts import Model, Optimizer, Parts
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError, StateError
from shardwise.offload.disk import Disk

_RUNNING, _DONE, _FAILED = range(3)


class Checkpoints:
    """All checkpoints of one run: saved in the background, counted, cleaned up.

    Use it as a context: it holds the folder's lock, so that a second run there is refused. The
    ``keep_last`` newest steps and all multiples of ``keep_every`` are kept; None keeps all.
    ``model`` and ``optimizer`` may be lists, as in `save`.

    Note [News from the background]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Ranks learn at slightly different moments how a save ended. One that raised at once would leave
    the others in a collective that it never joins. So while a save is in flight, every forward pass
    that trains exchanges a byte, and all ranks raise in the same pass. Not so stages of a pipeline:
    one would wait inside its pass for another that waits for what this pass is to send.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Model,
        optimizer: Optimizer | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        files: Files | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: expected 1 or more, or None")
        self.folder = Path(os.path.abspath(folder))  # the process may change its directory
        self._files = files or Files()
        self._model, self._optimizer = model, optimizer
        self._keep = (keep_last, keep_every)
        self._engine = Parts(model)
        self._tracer = self._engine.comm.tracer
        self._control = self._engine.first.open_control()  # for the thread
        disk = self._engine.disk
        self._staging = Staging(disk if isinstance(disk, Disk) else None)
        self._saving: Saving | None = None
        self._lock: Lock | None = None
        self._open = True
        self._passed_over: set[int] = set()  # on rank 0: damaged steps that may be replaced
        self._unread: int | None = None  # on rank 0: a step of an earlier run, above the origin
        self._origin: Origin | None = None  # that was looked at
        self._news: list[str] = []  # on rank 0: what `finish` warns of
        self.leftovers = Leftovers((), ())
        self.run = new_run(self._control)
        try:
            on_all_ranks(self._control, self._enter_folder)
        except BaseException:
            self._leave_folder()
            raise
        self._end_checks = self._engine.before_each_pass(self._check_in_pass)

    def _enter_folder(self) -> None:
        if self._control.rank == 0:
            if holds_checkpoint(self._files, self.folder):
                raise ConfigError(
                    f"{self.folder} is one checkpoint, not a folder of them. Load it with "
                    "shardwise.load(), and keep those of this run in another folder"
                )
            self._lock = take_lock(self._files, self.folder, self.run)
            self.leftovers = clean_up(self._files, self.folder)
            self._unread = next(iter(steps_in(self._files, self.folder)), None)
        self._go_on(entered=True)

    def _leave_folder(self) -> None:
        self._open = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def reserve(self, *, extra: Mapping[str, Any] = NOTHING) -> None:
        """Hold the memory for background saves now, so that the first is as short as the others.

        Call it once the optimizer has its state, after the first step or a load, with the same
        ``extra`` as `save` if that holds tensors.
        """
        self._check_open()
        self.finish()

        def hold(table: Table) -> Table:
            self._staging.reserve(self._to_stage(table))
            return table

        collect_on_all_ranks(self._model, self._optimizer, extra, hold)

    def save(
        self,
        step: int,
        *,
        extra: Mapping[str, Any] = NOTHING,
        wait: bool = False,
        progress: Progress | None = None,
    ) -> Saving:
        """Copy the state and write it behind the training that follows; ``wait`` until it is done.

        One save is in flight: a second one waits for it first (``waited_s``). A failure in the
        background is raised by the next forward pass or call here (of a pipeline: the next call),
        on every rank at once, see Note [News from the background]; no checkpoint of that step is
        left then.

        **Cost** one copy of this rank's state into memory that is held (`reserve`).

        **Raises** CheckpointError of an earlier save; ConfigError when the folder holds a higher
        step, which the next load would take in the place of this one; StateError inside an
        accumulation window, after a load that failed, and once closed.
        """
        with self._engine.comm.tracer.span("save"):
            return self._save(step, extra, wait, progress)

    def _save(
        self, step: int, extra: Mapping[str, Any], wait: bool, progress: Progress | None
    ) -> Saving:
        self._check_open()
        target = self.folder / step_name(checked_step(step))
        started_s = time.perf_counter()
        self.finish()
        waited_s = time.perf_counter() - started_s
        started_s = time.perf_counter()

        def staged(table: Table) -> Table:
            self._go_on()
            self._refuse_older(step)
            return self._staged(table)

        with self._tracer.span("save", ""), naming(f"the save of {target}"):
            table = collect_on_all_ranks(self._model, self._optimizer, extra, staged)
        stall_s = time.perf_counter() - started_s
        saving = Saving(step, self._staging.num_bytes, waited_s, stall_s)
        saving.start(lambda: self._write(table, step, target, progress))
        self._saving = saving
        if wait:
            self.finish()
        return saving

    def load(
        self,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] = NOTHING,
        strict: bool = True,
        cast: bool = False,
        restore_generators: bool = True,
        progress: Progress | None = None,
    ) -> Loaded | None:
        """Load the newest checkpoint that verifies, or that of ``step``; None if there is none.

        What is saved from then on belongs to the run that saved it. A newer one that was passed
        over as damaged is replaced when its step is saved again. See `load`.

        **Raises** ConfigError when newer checkpoints than ``step`` are there: the next load of the
        newest would come back to them.
        """
        self._check_open()
        self.finish()
        request = Request(
            self._files,
            self._engine.everyone,
            self._model,
            self._optimizer,
            extra,
            strict=strict,
            cast=cast,
            restore_generators=restore_generators,
            progress=progress,
        )
        with self._tracer.span("load", ""), naming(f"the load of {self.folder}"):
            if step is not None:
                on_all_ranks(self._control, lambda: self._refuse_newer(checked_step(step)))
                loaded: Loaded | None = load_one(request, self.folder / step_name(step))
            else:
                loaded = load_newest(request, self.folder)
        self._unread = None
        on_all_ranks(self._control, self._go_on)
        return loaded

    def check_when_asked(self) -> None:
        """Let the engine call `check` no more: whoever trains does."""
        self._end_checks()

    def _check_in_pass(self) -> None:
        if not self._engine.has_stages:
            self.check()
        else:
            self._warn_of_unread()

    def check(self) -> None:
        """Raise what went wrong in the background, on every rank; the engine calls it in each pass.

        **Cost** one exchange of a byte while a save is in flight, nothing otherwise.
        """
        self._warn_of_unread()
        if self._saving is None:
            return
        mine = _FAILED if self._saving.failed else _DONE if self._saving.done else _RUNNING
        said = {row[0] for row in self._engine.everyone.exchange(bytes([mine]))}
        if _FAILED in said or said == {_DONE}:
            self.finish()

    def finish(self) -> None:
        """Return when no save is in flight. **Raises** what went wrong in the background."""
        saving = self._saving
        if saving is None:
            return
        with self._tracer.span("save", ""):
            saving.join()  # interrupted, it is still in flight
        self._saving = None
        news, self._news = self._news, []
        for text in news:
            warnings.warn(text, stacklevel=2)
        saving.raise_once()
        path = self.folder / step_name(saving.step)
        self._origin = self._engine.origin = Origin(path, saving.step, self.run, is_saved=True)

    def close(self) -> None:
        """Finish the save in flight and let go of the folder."""
        try:
            self.finish()
        finally:
            if self._saving is not None:
                self._saving.join()
            self.check_when_asked()
            self._leave_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ShardwiseError) if any(error) else nullcontext():
            self.close()  # what ended the run is what counts

    def _check_open(self) -> None:
        if not self._open:
            raise StateError(f"{self.folder}: these Checkpoints are closed, and the lock is gone")

    def _write(self, table: Table, step: int, target: Path, progress: Progress | None) -> Written:
        """Write and commit; for the thread."""
        span = self._tracer.span("save", line="checkpoint")
        with span, naming(f"the save of {target}"):
            manifest, part = assemble(self._control, table, self.run, step)
            written = write_checkpoint(
                self._files,
                self._control,
                target,
                os.urandom(NONCE_BYTES),
                manifest,
                part,
                replace=step in self._passed_over,
                progress=progress,
            )
        tell_saved(self._tracer, self._to_stage(table), target)
        self._passed_over.discard(step)
        if self._control.rank == 0:
            other_files = [written.other_files] if written.other_files else []
            try:
                rotated = rotate(
                    self._files, self.folder, self.run, *self._keep, step, self._passed_over
                )
                other_files += rotated.other_files
            except (OSError, CheckpointError) as error:  # the new one is safe; told by `finish`
                self._news.append(f"old checkpoints stay: {explain(error)}")
            self._news += [tell_other_files(path) for path in other_files]
        return written

    def _to_stage(self, table: Table) -> list[Item]:
        written = written_items(table, self._control.members, self._control.rank)
        return [*written, *table.uncut, *table.own]

    def _staged(self, table: Table) -> Table:
        """Return the table with copies in the place of the tensors that this rank writes."""
        items = self._to_stage(table)
        copies = dict(zip(map(id, items), self._staging.copy(items), strict=True))

        def of(listed: tuple[Item, ...]) -> tuple[Item, ...]:
            return tuple(
                replace(item, data=copies[id(item)]) if id(item) in copies else item
                for item in listed
            )

        sharded, uncut, own = of(table.sharded), of(table.uncut), of(table.own)
        return replace(table, sharded=sharded, uncut=uncut, own=own, is_staged=True)

    def _refuse_newer(self, step: int) -> None:
        newer = [s for s in steps_in(self._files, self.folder) if s > step]
        if self._control.rank == 0 and newer:
            raise ConfigError(
                f"step={step}: {self.folder} holds newer checkpoints ({newer[0]}), and the next "
                "load of the newest would come back to them. Move them away first, or use "
                "shardwise.load() and save into another folder"
            )

    def _refuse_older(self, step: int) -> None:
        """Refuse a save that the next load would not find, as a higher step is there."""
        if self._control.rank != 0:
            return
        for other in steps_in(self._files, self.folder):
            if other <= step:
                return
            if other not in self._passed_over and is_usable(self._files, self.folder, other):
                raise ConfigError(
                    f"step {step}: {self.folder} holds step {other}, which the next load would "
                    "take, and not this one. Call load() to go on from there, choose another "
                    "folder, or move the newer checkpoints away first"
                )

    def _warn_of_unread(self) -> None:
        if self._unread is not None:
            with suppress(OSError):  # `shardwise.load()` may have been called since
                self._go_on()
        unread, self._unread = self._unread, None
        if unread is not None:
            begins = "without load()" if self._origin is None else f"from step {self._origin.step}"
            warnings.warn(
                f"{self.folder} holds checkpoints of an earlier run (newest: step {unread}) and "
                f"training begins {begins}. The next load takes the highest step, so saves "
                f"up to step {unread} will be refused. Call load() to go on from there, choose "
                "another folder, or move them away first",
                stacklevel=2,
            )

    def _go_on(self, *, entered: bool = False) -> None:
        """Take up the run of the checkpoint that the model comes from, if that lies here.

        One that was saved by hand counts only as the folder is ``entered``. Steps that the load
        passed over may be replaced: the run comes upon them.
        """
        origin = self._engine.origin
        if origin is None or origin == self._origin or (origin.is_saved and not entered):
            return
        if origin.step is None or origin.path != self.folder / step_name(origin.step):
            return
        self._origin, self.run = origin, origin.run
        if self._control.rank == 0:
            above = [s for s in steps_in(self._files, self.folder) if s > origin.step]
            self._passed_over = set(above) if origin.has_skipped else set()
            self._unread = None if origin.has_skipped else next(iter(above), None)
