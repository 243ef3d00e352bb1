"""The public calls: save and load one checkpoint, and keep all those of a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from shardwise.checkpoint.assemble import assemble, written_items
from shardwise.checkpoint.files import Files, Lock, RealFiles
from shardwise.checkpoint.folder import (
    Leftovers,
    clean_up,
    rotate,
    step_name,
    steps_in,
    take_lock,
)
from shardwise.checkpoint.generators import read_generators
from shardwise.checkpoint.loading import Loaded, Request, load_newest, load_one
from shardwise.checkpoint.sealed import MANIFEST
from shardwise.checkpoint.staging import Staging
from shardwise.checkpoint.state import Table, collect
from shardwise.checkpoint.together import together
from shardwise.checkpoint.write import Progress, Written, write_checkpoint
from shardwise.comm.control import control_over
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError

_RUN_BYTES = 8
_NONCE_BYTES = 4
_NOTHING: Mapping[str, Any] = {}


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] = _NOTHING,
    replace: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Save a checkpoint of a sharded model; it is on disk, for good, when the call returns.

    Every rank calls it. The checkpoint is the folder ``path``, or with ``step`` the folder of that
    step in ``path``. ``extra`` takes schedulers, scalers, loaders (whatever has a ``state_dict()``)
    and plain values; each rank's are its own. A checkpoint that exists is only replaced with
    ``replace``, at once. For saving in the background and for keeping the last few see
    `Checkpoints`.

    **Cost** this rank's slices once to disk, synced; five exchanges of a few bytes.

    **Raises** CheckpointError on all ranks, with the rank, the file and the reason; nothing is left
    of the attempt then, and training may go on.
    """
    files, target = RealFiles(), Path(path)
    if step is not None:
        target = target / step_name(_checked_step(step))
    engine = engine_of(model)
    control = engine.comm.control
    table = _collect(model, optimizer, extra)
    manifest, part = assemble(control, table, _new_run(control), step)
    nonce = os.urandom(_NONCE_BYTES)
    return write_checkpoint(files, control, target, nonce, manifest, part, replace, progress)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] = _NOTHING,
    strict: bool = True,
    cast: bool = False,
    restore_generators: bool = True,
    progress: Progress | None = None,
) -> Loaded:
    """Load a checkpoint into a sharded model, whatever ranks, stage and layout it was saved with.

    Every rank calls it. ``path`` is a checkpoint, or a folder of them: then the newest that
    verifies is taken, with a warning for each damaged one, or that of ``step`` and no other. What
    ``extra`` names is restored in place where it has a ``load_state_dict()``; all of the user's
    state is in the answer. With another number of ranks than saved, each rank's random generators
    are seeded from those of rank 0 and its own number. Gradients are dropped.

    **Cost** reads this rank's slices and at most two MiB beside each; no copy of the model.

    **Raises** CheckpointError on all ranks, before anything is changed, when the checkpoint does
    not fit; DamagedCheckpoint, naming file and tensor, when its bytes are not those that were saved
    (the model then refuses to run until a load succeeds).
    """
    files, folder = RealFiles(), Path(path)
    control = engine_of(model).comm.control
    request = Request(
        files,
        control,
        model,
        optimizer,
        extra,
        strict=strict,
        cast=cast,
        restore_generators=restore_generators,
        progress=progress,
    )
    if step is not None:
        return load_one(request, folder / step_name(_checked_step(step)))
    is_one = together(control, lambda: bytes([_holds_manifest(files, folder)]), 1)[0] != b"\0"
    loaded = load_one(request, folder) if is_one else load_newest(request, folder)
    if loaded is None:
        raise CheckpointError(f"{folder}: there is no checkpoint in it")
    return loaded


class Saving:
    """A save under way: how long it stopped training, and whether it is done."""

    def __init__(self, step: int, staged_bytes: int, waited_s: float, stall_s: float) -> None:
        self.step = step
        self.staged_bytes = staged_bytes
        self.waited_s = waited_s
        self.stall_s = stall_s
        self.write_s = 0.0
        self.told = False  # whether somebody knows how it ended
        self._written: Written | None = None
        self._failure: BaseException | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> Written:
        """Return when the checkpoint is on disk. **Raises** what went wrong in the background."""
        self._done.wait()
        self.told = True
        if self._failure is not None:
            raise self._failure
        assert self._written is not None
        return self._written

    def run(self, work: Any) -> None:
        """Do the work and keep what came of it; for the thread."""
        started_s = time.perf_counter()
        try:
            self._written = work()
        except BaseException as error:
            self._failure = error
        self.write_s = time.perf_counter() - started_s
        self._done.set()


class Checkpoints:
    """All checkpoints of one run: saved in the background, counted, cleaned up.

    Use it as a context: it holds the folder's lock, so that a second run there is refused. Saves of
    `keep_last` newest steps and of all multiples of ``keep_every`` are kept; None keeps all.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        files: Files | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: expected 1 or more, or None")
        self.folder = Path(folder)
        self._files = files or RealFiles()
        self._model, self._optimizer = model, optimizer
        self._keep = (keep_last, keep_every)
        self._engine = engine_of(model)
        self._control = control_over(self._engine.comm.axes)  # for the thread, and for nobody else
        self._staging = Staging()
        self._saving: Saving | None = None
        self._thread: threading.Thread | None = None
        self._lock: Lock | None = None
        self._damaged: set[int] = set()  # on rank 0: steps that a load passed over
        self.leftovers = Leftovers((), ())
        self.run = _new_run(self._control)
        together(self._control, self._open)
        self._engine.before_pass.append(self.check)

    def _open(self) -> None:
        if self._control.rank == 0:
            self._lock = take_lock(self._files, self.folder, self.run)
            self.leftovers = clean_up(self._files, self.folder)

    def reserve(self, *, extra: Mapping[str, Any] = _NOTHING) -> None:
        """Hold the memory for background saves now, so that the first is as short as the others.

        Call it once the optimizer has its state, after the first step or a load, with the same
        ``extra`` as `save` if that holds tensors.
        """
        table = _collect(self._model, self._optimizer, extra)
        self._staging.reserve(self._to_stage(table))

    def save(
        self,
        step: int,
        *,
        extra: Mapping[str, Any] = _NOTHING,
        wait: bool = False,
        progress: Progress | None = None,
    ) -> Saving:
        """Copy the state and write it behind the training that follows; ``wait`` until it is done.

        One save is in flight: a second one waits for it first (``waited_s``). A failure in the
        background is raised by the next forward pass or call here, on every rank; no checkpoint of
        that step is left then.

        **Cost** one copy of this rank's state into memory that is held (`reserve`).

        **Raises** CheckpointError of an earlier save; StateError inside an accumulation window.
        """
        started_s = time.perf_counter()
        self.finish()
        waited_s = time.perf_counter() - started_s
        target = self.folder / step_name(_checked_step(step))
        started_s = time.perf_counter()
        table = self._staged(_collect(self._model, self._optimizer, extra))
        stall_s = time.perf_counter() - started_s
        saving = Saving(step, self._staging.num_bytes, waited_s, stall_s)

        def write() -> Written:
            manifest, part = assemble(self._control, table, self.run, step)
            nonce = os.urandom(_NONCE_BYTES)
            written = write_checkpoint(
                self._files,
                self._control,
                target,
                nonce,
                manifest,
                part,
                replace=step in self._damaged,
                progress=progress,
            )
            together(self._control, lambda: self._rotate(step))
            return written

        self._saving = saving
        self._thread = threading.Thread(target=saving.run, args=(write,), name="shardwise-save")
        self._thread.start()
        if wait:
            self.finish()
        return saving

    def load(
        self,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] = _NOTHING,
        strict: bool = True,
        cast: bool = False,
        progress: Progress | None = None,
    ) -> Loaded | None:
        """Load the newest checkpoint that verifies, or that of ``step``; None if there is none.

        What is saved from then on belongs to the run that saved it. A newer one that was passed
        over is replaced when its step is saved again. See `load`.
        """
        self.finish()
        request = Request(
            self._files,
            self._control,
            self._model,
            self._optimizer,
            extra,
            strict=strict,
            cast=cast,
            progress=progress,
        )
        if step is not None:
            loaded: Loaded | None = load_one(request, self.folder / step_name(_checked_step(step)))
        else:
            loaded = load_newest(request, self.folder)
        if loaded is not None:
            self.run = loaded.run
            together(self._control, lambda: self._note_damaged(loaded))
        return loaded

    def check(self) -> None:
        """Raise what went wrong in the background, once; return at once otherwise."""
        if self._saving is not None and self._saving.done:
            self.finish()

    def finish(self) -> None:
        """Return when no save is in flight. **Raises** what went wrong in the background."""
        saving, self._saving = self._saving, None
        if saving is not None and not saving.told:
            saving.wait()

    def close(self) -> None:
        """Finish the save in flight and let go of the folder."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.join()
            if self.check in self._engine.before_pass:
                self._engine.before_pass.remove(self.check)
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _to_stage(self, table: Table) -> list[Any]:
        return [*written_items(table, self._control.rank), *table.whole, *table.own]

    def _staged(self, table: Table) -> Table:
        """Return the table with copies in the place of the tensors that this rank writes."""
        items = self._to_stage(table)
        copies = dict(zip(map(id, items), self._staging.copy(items), strict=True))

        def of(listed: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                replace(item, data=copies[id(item)]) if id(item) in copies else item
                for item in listed
            )

        return replace(table, sharded=of(table.sharded), whole=of(table.whole), own=of(table.own))

    def _note_damaged(self, loaded: Loaded) -> None:
        """Note which steps were passed over: the run comes upon them, and may replace them."""
        if self._control.rank == 0:
            steps = steps_in(self._files, self.folder) if loaded.skipped else []
            self._damaged = {step for step in steps if step_name(step) > loaded.path.name}

    def _rotate(self, saved: int) -> None:
        if self._control.rank == 0:
            rotate(self._files, self.folder, self.run, *self._keep, saved)


def _collect(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any]
) -> Table:
    """List the state of this rank; where that fails on one rank, it fails on all."""
    engine = engine_of(model)
    device = engine.comm.device
    tables: list[Table] = []

    def work() -> None:
        tables.append(collect(model, optimizer, extra, read_generators(device)))

    together(engine.comm.control, work)
    return tables[0]


def _holds_manifest(files: Files, folder: Path) -> bool:
    try:
        return any(entry.name == MANIFEST for entry in files.list(folder))
    except FileNotFoundError:
        return False


def _new_run(control: Any) -> str:
    return control.broadcast(os.urandom(_RUN_BYTES)).hex()


def _checked_step(step: Any) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**12:
        raise ConfigError(f"step={step!r}: expected a whole number from 0 to 10^12")
    return step
