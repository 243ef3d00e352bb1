"""`save()` and `load()` of one checkpoint."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint.all_ranks import ask_first_rank, collector_paused, on_all_ranks
from shardwise.checkpoint.assemble import assemble, drop_copies, items_to_write
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import is_usable, step_name, steps_in
from shardwise.checkpoint.generators import read_generators
from shardwise.checkpoint.loading import Host, Loaded, Request, load_from
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.state import Table, collect
from shardwise.checkpoint.write import NONCE_BYTES, Progress, Written, write_checkpoint
from shardwise.comm.control import Control, naming
from shardwise.engine.conditions import Origin
from shardwise.engine.parts import Model, Optimizer, Parts, modules_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.trace import Tracer

NOTHING: Mapping[str, object] = {}
_RUN_BYTES = 8
_LOOKED_AT = 1 << 20  # elements at once


@collector_paused()
def save(
    path: str | Path,
    model: Model,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, object] = NOTHING,
    replace: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Save a checkpoint of a sharded model; it survives a power cut once the call has returned.

    Every rank calls it. The checkpoint is the folder ``path``, or with ``step`` the folder of that
    step in ``path``. ``extra`` takes schedulers, scalers, loaders (any object with a
    ``state_dict()``) and plain values, of each rank its own. An existing checkpoint is replaced
    only with ``replace``, atomically. To save in the background and keep the last few, use
    `Checkpoints`. A rank with several pipeline stages passes a list of them, and one optimizer
    over all or a list of one for each.

    **Cost** this rank's slices once to disk, synced; five exchanges of a few bytes.

    **Raises** CheckpointError on all ranks, with the rank, the file and the reason. Nothing is left
    on disk then, and training can continue.
    """
    files, target = Files(), Path(os.path.abspath(path))
    if step is not None:
        target = target / step_name(checked_step(step))
    parts = Parts(model)
    control = parts.everyone
    with naming(f"the save of {target}"), parts.comm.tracer.span("save"):
        table, run = collect_on_all_ranks(model, optimizer, extra), new_run(control)
        how = replace, progress, parts.comm.tracer
        written = write_table(files, control, target, table, run, step, *how)
    parts.origin = Origin(target, step, run, is_saved=True)
    if control.rank == 0:
        _warn(files, written, step)
    return written


def write_table(
    files: Files,
    control: Control,
    target: Path,
    table: Table,
    run: str,
    step: int | None,
    replace: bool,
    progress: Progress | None,
    tracer: Tracer,
) -> Written:
    """Write the state of all ranks as a checkpoint; tell a recorder whether it is finite.

    **Cost** as `write_checkpoint`; the recorder reads what this rank wrote once more.
    """
    manifest, part = assemble(control, table, run, step)
    nonce = os.urandom(NONCE_BYTES)
    written = write_checkpoint(files, control, target, nonce, manifest, part, replace, progress)
    if tracer.recorder is not None:
        items = items_to_write(table, control)
        numbers = (item.data for item in items if item.info.kind in ("param", "optimizer"))
        tracer.recorder.saved(str(target), all(map(_is_finite, numbers)))
    return written


def _is_finite(data: torch.Tensor) -> bool:
    if not data.is_floating_point() or data.itemsize == 1:
        return True
    return all(bool(part.isfinite().all()) for part in data.reshape(-1).split(_LOOKED_AT))


def _warn(files: Files, written: Written, step: int | None) -> None:
    """Warn of moved files, and of a higher step that the next load takes first."""
    if written.other_files is not None:
        warnings.warn(tell_other_files(written.other_files), stacklevel=3)
    folder = written.path.parent
    with suppress(OSError):
        above = [s for s in steps_in(files, folder) if step is not None and s > step]
        newest = next((s for s in above if is_usable(files, folder, s)), None)
        if newest is not None:
            warnings.warn(
                f"{folder} holds step {newest} too: load() takes that one, and step {step} only "
                f"with step={step}. Save another run in another folder",
                stacklevel=3,
            )


def tell_other_files(path: Path) -> str:
    """Return the warning on files of the user in a checkpoint that was removed or replaced."""
    return (
        f"{path}: these files were in a checkpoint that was removed or replaced, and are not part "
        "of it"
    )


def load(
    path: str | Path,
    model: Model,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, object] = NOTHING,
    strict: bool = True,
    cast: bool = False,
    restore_generators: bool = True,
    progress: Progress | None = None,
) -> Loaded:
    """Load a checkpoint into a model, saved with any ranks, stage and layout.

    Every rank of a sharded model calls it. A plain model is loaded whole by each process by itself,
    also without a process group. ``path`` is a checkpoint, or a folder of them: then the newest
    whole one is taken, with a warning for each damaged one, or only that of ``step``. Values in
    ``extra`` that have a ``load_state_dict()`` are restored in place; the result holds all of the
    user's state. With another number of ranks than saved, each rank's random generators are seeded
    from those of rank 0 and the rank's number. Gradients are dropped. ``model`` and ``optimizer``
    may be lists, as in `save`.

    **Cost** reads this rank's slices and at most two MiB beside each; no copy of the model.

    **Raises** CheckpointError on all ranks, before anything is changed, when the checkpoint does
    not fit; DamagedCheckpoint, naming file and tensor, when its bytes are not those that were saved
    (the model then refuses to run until a load succeeds).
    """
    files, folder = Files(), Path(os.path.abspath(path))
    for each in modules_of(model):
        _check_model(each)
    host = Host(model)
    request = Request(files, host, optimizer, extra, strict, cast, restore_generators, progress)
    only = None if step is None else folder / step_name(checked_step(step))
    with naming(f"the load of {only or folder}"):
        if only is None and ask_first_rank(host.control, lambda: holds_checkpoint(files, folder)):
            only = folder
        loaded = load_from(request, folder, only)
    if loaded is None:
        raise CheckpointError(f"{folder}: there is no checkpoint in it")
    return loaded


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "model: this is the DistributedDataParallel wrapper, whose parameters are all named "
            "'module....': give ddp.module"
        )


@collector_paused()
def collect_on_all_ranks(
    model: Model,
    optimizer: Optimizer | None,
    extra: Mapping[str, object],
    then: Callable[[Table], Table] = lambda table: table,
) -> Table:
    """Return ``then`` of this rank's state; a failure on one rank is raised on all."""
    engine = Parts(model)
    device = engine.comm.device

    def work() -> Table:
        return then(drop_copies(collect(model, optimizer, extra, read_generators(device))))

    return on_all_ranks(engine.everyone, work)


def holds_checkpoint(files: Files, folder: Path) -> bool:
    """Tell whether a folder is itself a checkpoint."""
    try:
        return any(entry.name == MANIFEST for entry in files.list(folder))
    except FileNotFoundError:
        return False


def new_run(control: Control) -> str:
    """Return a name for a run, the same on all ranks."""
    return control.broadcast(os.urandom(_RUN_BYTES)).hex()


def checked_step(step: object) -> int:
    """Return the step, if it can name a folder. **Raises** ConfigError otherwise."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**12:
        raise ConfigError(f"step={step!r}: expected a whole number from 0 to 10^12")
    return step
