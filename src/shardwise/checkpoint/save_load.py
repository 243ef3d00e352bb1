"""`save()` and `load()` of one checkpoint, of a sharded or plain model.

Note [Damage while loading]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Tensors are read straight into the parameters, since a second copy of them may not fit into memory.
If a damaged chunk is found halfway, the parameters are of two checkpoints. Therefore, from the
first byte read to the last one checked, the engine refuses every forward pass
(`ModelStatus.unusable`). A complete load ends this, usually a load of the next older
checkpoint.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.all_ranks import (
    ask_first_rank,
    collector_paused,
    on_all_ranks,
    rows_of_all_ranks,
)
from shardwise.checkpoint.assemble import assemble, drop_copies, items_to_write
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import (
    Chosen,
    Refused,
    choose,
    has_changed,
    is_usable,
    step_name,
    steps_in,
)
from shardwise.checkpoint.generators import (
    check_generators,
    derive_generators,
    read_generators,
    set_generators,
)
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.replicas import SavedReplicas, local_steps_of
from shardwise.checkpoint.restore import (
    Place,
    Restore,
    list_differences,
    places_of_plain,
    places_of_sharded,
)
from shardwise.checkpoint.same_folder import (
    PATH_DIGEST_BYTES,
    check_same_checkpoint,
    path_digest,
    paths_of_load,
    refuse_other_folders,
)
from shardwise.checkpoint.state import Table, collect, module_states, persistent_buffers
from shardwise.checkpoint.verify import MAX_LOOKS, too_fast
from shardwise.checkpoint.write import NONCE_BYTES, Progress, Written, write_checkpoint
from shardwise.comm.control import Control, SoloControl, exchange_any, naming
from shardwise.engine.status import Origin
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint, StateError
from shardwise.parallel.parts import Model, Optimizer, Parts, StageOptimizers, modules_of
from shardwise.trace import Tracer

NOTHING: Mapping[str, object] = {}
_RUN_BYTES = 8
_LOOKED_AT = 1 << 20  # elements at once

Values = dict[str, dict[str, object]]  # of the user, the modules and the generators


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
    on disk then, and training can continue. ConfigError if the ranks' paths lead to different
    folders.
    """
    files, target = Files(), checked_path(path, "save")
    if step is not None:
        target = target / step_name(checked_step(step))
    parts = Parts(model)
    control = parts.all_ranks
    with naming(f"the save of {target}"), parts.comm.tracer.span("save"):
        table = collect_on_all_ranks(model, optimizer, extra, (target, "save()"))
        run = new_run(control)
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


@dataclass(frozen=True)
class Loaded:
    """A finished load: the folder, its step, the user's own state, bytes that this rank read.

    ``skipped`` has the reason for each newer checkpoint that could not be used. Without ``strict``,
    ``missing`` and ``unexpected`` are the names that only the model or the checkpoint has.
    ``from_memory``: it was a copy in the memory of hosts (`Checkpoints.copy_to_memory`).
    """

    path: Path
    step: int | None
    run: str
    extra: Mapping[str, Any]
    num_bytes: int
    num_ranks_saved: int
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    from_memory: bool = False


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
    not fit, or the ranks' paths lead to different ones; DamagedCheckpoint, naming file and tensor,
    when its bytes are not those that were saved (the model then refuses to run until a load
    succeeds).
    """
    files, folder = Files(), checked_path(path, "load")
    for each in modules_of(model):
        _check_model(each)
    one = Load(files, model, optimizer, extra, strict, cast, restore_generators, progress)
    only = None if step is None else folder / step_name(checked_step(step))
    with naming(f"the load of {only or folder}"):
        one.compare_paths(folder, step)
        if only is None and ask_first_rank(one.control, lambda: holds_checkpoint(files, folder)):
            only = folder
        loaded = one.run(folder, only)
    if loaded is None:
        raise CheckpointError(f"{folder}: there is no checkpoint in it")
    return loaded


def checked_path(path: object, call: str) -> Path:
    """Return the absolute path. **Raises** ConfigError for other values, as arguments swapped."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"path: expected a str or Path, got {type(path).__name__}; the path comes first: "
            f"shardwise.{call}(path, model, optimizer)"
        )
    return Path(os.path.abspath(os.fspath(path)))


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
    target: tuple[Path, str],
    then: Callable[[Table], Table] = lambda table: table,
) -> Table:
    """Return ``then`` of this rank's state; a failure on one rank is raised on all.

    ``target`` is the folder to save to, and the call; it must be the same folder on all ranks.
    """
    engine = Parts(model)
    device, control = engine.comm.device, engine.all_ranks
    tables: list[Table] = []

    def work() -> bytes:
        tables.append(then(drop_copies(collect(model, optimizer, extra, read_generators(device)))))
        return path_digest(target[0])

    digests = rows_of_all_ranks(control, work, PATH_DIGEST_BYTES)
    refuse_other_folders(Files(), control, digests, *target)
    return tables[0]


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


# -- a load


class Load:
    """One load: the model to fill, sharded or plain, and how.

    A plain model has no engine and is whole on every rank: each process reads all of it, without
    communication. **Raises** ConfigError if another library sharded it.
    """

    def __init__(
        self,
        files: Files,
        model: Model,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, object] = NOTHING,
        strict: bool = True,
        cast: bool = False,
        restore_generators: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self._files, self._model, self._optimizer, self._extra = files, model, optimizer, extra
        self._strict, self._cast, self._progress = strict, cast, progress
        self._restores_generators = restore_generators
        self._engine = engine = _engine_of(model)
        self.taken: Chosen | None = None  # what was loaded
        self._paths: Sequence[str] | None = None  # of all ranks, if they lead to several folders
        self._elsewhere = frozenset[str]()  # names of other pipeline stages
        self.control: Control = SoloControl()
        self._places: Sequence[Place]
        if engine is None:
            in_group = dist.is_available() and dist.is_initialized()
            self._rank = dist.get_rank() if in_group else 0
            self._num_ranks = dist.get_world_size() if in_group else 1
            self._places = places_of_plain(model)
            self._device = next((p.held.device for p in self._places), torch.device("cpu"))
            return
        engine.give_up_steps()
        engine.finish_pending_work("load()")
        self.control = engine.all_ranks
        self._rank, self._num_ranks = self.control.rank, self.control.num_ranks
        self._device = engine.comm.device
        params = [param for unit in engine.units for param in unit.params]
        self._places = [place for param in params for place in places_of_sharded(param)]
        if engine.has_stages:
            names = [name for place in self._places for name in place.names]
            names += [name for name, _ in persistent_buffers(model)]
            rows = exchange_any(self.control, json.dumps(names).encode())
            self._elsewhere = frozenset(name for row in rows for name in json.loads(row))

    def compare_paths(self, folder: Path, step: int | None) -> None:
        """Compare the ranks' folders and steps, before `run`.

        **Raises** ConfigError on all ranks if steps differ. If folders do, `run` checks that they
        hold the same checkpoint.
        """
        self._paths = paths_of_load(self._files, self.control, folder, step)

    @collector_paused()
    def run(
        self,
        folder: Path,
        only: Path | None = None,
        copies: Sequence[Chosen] = (),
        refused: Sequence[Refused] = (),
    ) -> Loaded | None:
        """Load the newest checkpoint of a folder that is whole; warn about damaged newer ones.

        With ``only``, that one. ``copies`` in memory, the newest first, are taken before
        checkpoints on disk of the same step or an older one. ``refused`` are other copies in
        memory; a warning names those above the loaded step. Returns None if there is none.

        **Raises** CheckpointError, the same on all ranks, if all are damaged, or if one does not
        fit the model (an older one would not either). Checkpoints that are removed or replaced
        while they are read: Note [Beside a running run] in `folder`.
        """
        control = self.control
        skipped: dict[int, str] = {}
        lost: list[Refused] = []  # copies in memory that turn out damaged
        copies = list(copies)
        for _ in range(MAX_LOOKS):
            chosen = choose(control, self._files, folder, skipped, only)
            if copies and (chosen is None or copies[0].step >= chosen.step):
                chosen = copies.pop(0)
            if self._paths is not None and chosen is not None and chosen.in_memory is None:
                check_same_checkpoint(control, self._files, chosen, self._paths)
            above = -1 if chosen is None else chosen.step
            reasons = tuple(skipped[step] for step in sorted(skipped, reverse=True) if step > above)
            if chosen is None:
                self._found_none(folder, [*lost, *refused], reasons)
                return None
            try:
                loaded = self._load(chosen, reasons)
            except CheckpointError as error:
                if chosen.in_memory is not None and isinstance(error, DamagedCheckpoint):
                    lost.append(Refused(chosen.step, str(error), True))
                    continue
                if chosen.in_memory is None and has_changed(control, self._files, chosen):
                    continue
                if only is not None or not isinstance(error, DamagedCheckpoint):
                    raise
                skipped[chosen.step] = str(error)
                continue
            if self._engine is not None:  # later saves are of its run, after a copy in memory too
                path = chosen.path if chosen.in_memory is None else folder / step_name(chosen.step)
                self._engine.origin = Origin(path, loaded.step, loaded.run, bool(reasons))
            self.taken = chosen
            if control.rank == 0:  # after all ranks have finished
                newer = [each for each in (*lost, *refused) if each.step > chosen.step]
                _warn_of_load(loaded, newer)
            return loaded
        raise too_fast(only or folder)

    def _found_none(self, folder: Path, refused: Sequence[Refused], reasons: Sequence[str]) -> None:
        """Return if there was never a checkpoint; tell of copies in memory that do not count.

        **Raises** CheckpointError if all are damaged.
        """
        damaged = describe_refused([each for each in refused if each.is_damaged])
        if damaged or reasons:
            raise CheckpointError(
                f"{folder}: no checkpoint can be used: {'; '.join((*damaged, *reasons))}. Remove "
                "what is damaged to begin anew"
            )
        for text in describe_refused(refused) if self.control.rank == 0 else ():
            warnings.warn(f"nothing is loaded: {text}", stacklevel=4)

    def _load(self, chosen: Chosen, skipped: tuple[str, ...]) -> Loaded:
        """Load one checkpoint. See Note [Damage while loading]."""
        path, manifest, control, engine = chosen.path, chosen.manifest, self.control, self._engine
        # A rank beyond those that saved takes the own state of one of them.
        files = chosen.in_memory or self._files
        checkpoint = Checkpoint(files, path, manifest, self._rank % manifest.num_ranks)
        begun: Restore | None = None

        def read(plan: Restore) -> None:
            for num_bytes in plan.read():
                if self._progress is not None:
                    self._progress(num_bytes)

        try:
            plan, values = on_all_ranks(control, lambda: self._plan(checkpoint))
            if engine is not None:  # a half-loaded plain model cannot be kept from running
                engine.finish_reductions()
                why = f"a load of {path} did not come to its end; load a whole checkpoint first"
                engine.begin_load(plan.names, why)
            begun = plan
            on_all_ranks(control, partial(read, plan))
        except BaseException as error:
            # Before the read nothing has changed, and nothing is dropped: another rank may have
            # failed.
            if begun is not None:
                begun.drop_states()
                if engine is None and isinstance(error, CheckpointError):
                    why = "A part is in the model: do not use that before a load has succeeded"
                    raise type(error)(f"{error}. {why}") from error
            raise
        finally:
            checkpoint.close()
        if engine is not None and (left := engine.end_load(plan.names)) is not None:
            raise CheckpointError(
                f"{path}: '{left}' is half loaded from another checkpoint, and not in this one; "
                "load one that has all of the model"
            )
        plan.apply()
        same_ranks = manifest.num_ranks == self._num_ranks
        try:
            on_all_ranks(control, lambda: self._apply_values(values, same_ranks))
        except CheckpointError as error:
            if engine is not None:
                engine.refuse(f"a load of {path} did not come to its end: {error}")
            raise
        return Loaded(
            path,
            manifest.step,
            manifest.run,
            values["extra"],
            checkpoint.num_bytes,
            manifest.num_ranks,
            skipped,
            tuple(plan.missing),
            tuple(plan.unexpected),
            chosen.in_memory is not None,
        )

    def _plan(self, checkpoint: Checkpoint) -> tuple[Restore, Values]:
        """Match a checkpoint with the model, the optimizer, the user's state and the generators."""
        where, model = checkpoint.where, self._model
        if self._engine is not None and self._engine.suspended:
            raise StateError("load() inside gathered(): leave that context first")
        values = checkpoint.values_of(checkpoint.rank)
        optimizer = None if self._optimizer is None else StageOptimizers(self._optimizer)
        saved = SavedReplicas.take(values["modules"], where)
        steps, prefix, places = local_steps_of(self._engine), "", self._places
        if saved is not None:
            saved.check(steps)
            prefix = saved.prefix_for(steps)
            places = [replace(p, names=tuple(prefix + n for n in p.names)) for p in places]
        how = self._strict, self._cast, self._elsewhere, prefix
        plan = Restore(checkpoint, model, places, optimizer, *how)
        if steps is not None:
            plan.add_outer(steps, self._places, saved)
        missing = [key for key in self._extra if key not in values["extra"]]
        if missing:
            raise CheckpointError(
                f"extra: the checkpoint has no {missing[0]!r}; it has {sorted(values['extra'])}"
            )
        modules = {name for name, _ in module_states(model)}
        if self._strict and modules != set(values["modules"]):
            name = min(modules ^ set(values["modules"]))
            raise CheckpointError(
                f"{where}: module '{name}' has an extra state "
                f"{'here, and none there' if name in modules else 'there, and none here'}"
            )
        if self._restores_generators and values["generators"]:
            check_generators(values["generators"], self._device)
        return plan, values

    def _apply_values(self, values: Values, same_ranks: bool) -> None:
        """Restore the user's state and the modules' own, in code of the user, which may raise."""
        for key, target in self._extra.items():
            load = getattr(target, "load_state_dict", None)
            if callable(load):
                with _named(f"extra[{key!r}].load_state_dict()", target):
                    load(values["extra"][key])
        for name, module in module_states(self._model):
            if name in values["modules"]:
                with _named(f"set_extra_state() of module '{name or '(root)'}'", module):
                    module.set_extra_state(values["modules"][name])
        generators = values["generators"]
        if not self._restores_generators or not generators:
            return
        if same_ranks:
            set_generators(generators, self._device)
        else:
            derive_generators(generators, self._rank, self._device)


def describe_refused(copies: Sequence[Refused]) -> list[str]:
    """Return why copies in memory were not loaded, those with one reason together."""
    steps: dict[tuple[str, bool], list[int]] = {}
    for copy in copies:
        steps.setdefault((copy.text, copy.is_damaged), []).append(copy.step)
    texts = []
    for (text, is_damaged), found in steps.items():
        verb = "is lost" if is_damaged else "does not count"
        which = f"the copy of step {found[0]} in memory {verb}"
        if len(found) > 1:
            verb = verb.replace("is", "are").replace("does", "do")
            which = f"the copies of steps {', '.join(map(str, sorted(found)))} in memory {verb}"
        texts.append(f"{which}: {text}")
    return texts


def _warn_of_load(loaded: Loaded, refused: Sequence[Refused]) -> None:
    name = loaded.path.name
    texts = [
        f"a newer checkpoint is damaged and was passed over: {reason}. {name} was loaded"
        for reason in loaded.skipped
    ]
    where = "from memory" if loaded.from_memory else "from disk"
    texts += [f"{text}. {name} was loaded {where}" for text in describe_refused(refused)]
    if loaded.missing or loaded.unexpected:
        differences = list_differences(loaded.missing, loaded.unexpected)
        texts.append(f"{name} was loaded in part: {differences}")
    for text in texts:
        warnings.warn(text, stacklevel=3)


def _engine_of(model: Model) -> Parts | None:
    params = (param for each in modules_of(model) for param in each.parameters())
    if any(isinstance(param, DTensor) for param in params):
        return Parts(model)
    try:
        return Parts(model)  # gathered, or without parameters
    except ConfigError:
        return None


@contextmanager
def _named(what: str, target: object) -> Iterator[None]:
    """Turn an error of the user's code into one that names it and the state of the load."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} ({type(target).__name__}) raised {type(error).__name__}: {error}. The state "
            "is loaded in part: a sharded model refuses to run until a load succeeds"
        ) from error
