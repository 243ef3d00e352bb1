"""Load a checkpoint into a sharded or plain model: choose it, match it, read, apply.

Note [Damage while loading]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Tensors are read straight into the parameters, since a second copy of them may not fit into memory.
If a damaged chunk is found halfway, the parameters are of two checkpoints. Therefore, from the
first byte read to the last one checked, the engine refuses every forward pass
(`Conditions.unusable`). A complete load ends this; usually it is that of the next older checkpoint.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.all_ranks import collector_paused, on_all_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import Chosen, choose, has_changed
from shardwise.checkpoint.generators import (
    check_generators,
    derive_generators,
    set_generators,
)
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.restore import Place, Restore, places_of_plain, places_of_sharded
from shardwise.checkpoint.state import module_states, persistent_buffers
from shardwise.checkpoint.verify import MAX_LOOKS, too_fast
from shardwise.comm.control import Control, SoloControl, exchange_any
from shardwise.engine.conditions import Origin
from shardwise.engine.parts import Joined, Model, Optimizer, Parts, modules_of
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint, StateError

Values = dict[str, dict[str, object]]  # of the user, the modules and the generators


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


class Host:
    """The model to load into, sharded or plain.

    A plain model has no engine and is whole on every rank: each process reads all of it, without
    communication.
    """

    def __init__(self, model: Model) -> None:
        """Prepare a model for a load. **Raises** ConfigError if another library sharded it."""
        self.model = model
        self.engine = engine = _engine_of(model)
        self.elsewhere = frozenset[str]()  # names of other pipeline stages
        self.control: Control
        self.places: Sequence[Place]
        self.device: torch.device
        if engine is None:
            self.control = SoloControl()
            in_group = dist.is_available() and dist.is_initialized()
            self.rank = dist.get_rank() if in_group else 0
            self.num_ranks = dist.get_world_size() if in_group else 1
            self.places = places_of_plain(model)
            self.device = next((p.held.device for p in self.places), torch.device("cpu"))
            return
        engine.give_up_steps()
        engine.rest("load()")
        self.control = engine.everyone
        self.rank, self.num_ranks = self.control.rank, self.control.num_ranks
        self.device = engine.comm.device
        params = [param for unit in engine.units for param in unit.params]
        self.places = [place for param in params for place in places_of_sharded(param)]
        if engine.has_stages:
            names = [name for place in self.places for name in place.names]
            names += [name for name, _ in persistent_buffers(model)]
            rows = exchange_any(self.control, json.dumps(names).encode())
            self.elsewhere = frozenset(name for row in rows for name in json.loads(row))


def _engine_of(model: Model) -> Parts | None:
    params = (param for each in modules_of(model) for param in each.parameters())
    if any(isinstance(param, DTensor) for param in params):
        return Parts(model)
    try:
        return Parts(model)  # gathered, or without parameters
    except ConfigError:
        return None


@dataclass(frozen=True)
class Request:
    """The arguments of a load."""

    files: Files
    host: Host
    optimizer: Optimizer | None
    extra: Mapping[str, object] = field(default_factory=dict)
    strict: bool = True
    cast: bool = False
    restore_generators: bool = True
    progress: Callable[[int], None] | None = None


@collector_paused()
def load_from(
    request: Request, folder: Path, only: Path | None = None, copies: Sequence[Chosen] = ()
) -> Loaded | None:
    """Load the newest checkpoint of a folder that is whole; warn about damaged newer ones.

    With ``only``, that one. ``copies`` in memory, the newest first, are taken before checkpoints on
    disk of the same step or an older one. Returns None if there is none.

    **Raises** CheckpointError, the same on all ranks, if all are damaged, or if one does not fit
    the model (an older one would not either). Checkpoints that are removed or replaced while they
    are read: Note [Beside a running run] in `folder`.
    """
    control, files = request.host.control, request.files
    skipped: dict[int, str] = {}
    lost: list[str] = []  # copies in memory that are damaged
    copies = list(copies)

    def reasons(above: int) -> tuple[str, ...]:
        return tuple(skipped[step] for step in sorted(skipped, reverse=True) if step > above)

    for _ in range(MAX_LOOKS):
        chosen = choose(control, files, folder, skipped, only)
        if copies and (chosen is None or copies[0].step >= chosen.step):
            chosen = copies.pop(0)
        if chosen is None:
            if skipped or lost:
                raise CheckpointError(
                    f"{folder}: no checkpoint can be used: {'; '.join((*lost, *reasons(-1)))}"
                )
            return None
        try:
            loaded, differences = _load(request, chosen, reasons(chosen.step))
        except CheckpointError as error:
            if chosen.in_memory is not None and isinstance(error, DamagedCheckpoint):
                lost.append(f"a copy in memory is lost, an older state is loaded: {error}")
                continue
            if chosen.in_memory is None and has_changed(control, files, chosen):
                continue
            if only is not None or not isinstance(error, DamagedCheckpoint):
                raise
            skipped[chosen.step] = str(error)
            continue
        if control.rank == 0:  # after all ranks have finished
            name = loaded.path.name
            texts = [
                f"a newer checkpoint is damaged and was passed over: {reason}. {name} was loaded"
                for reason in loaded.skipped
            ]
            texts += lost
            texts += [f"{name} was loaded in part: {differences}"] if differences else []
            for text in texts:
                warnings.warn(text, stacklevel=2)
        return loaded
    raise too_fast(only or folder)


def _load(request: Request, chosen: Chosen, skipped: tuple[str, ...]) -> tuple[Loaded, str]:
    """Load one checkpoint; return what was loaded, and how the names differ.

    See Note [Damage while loading].
    """
    host, path, manifest = request.host, chosen.path, chosen.manifest
    control, engine = host.control, host.engine
    # A rank beyond those that saved takes the own state of one of them.
    files = chosen.in_memory or request.files
    checkpoint = Checkpoint(files, path, manifest, host.rank % manifest.num_ranks)
    begun: Restore | None = None

    def read(plan: Restore) -> None:
        for num_bytes in plan.read():
            if request.progress is not None:
                request.progress(num_bytes)

    try:
        plan, values = on_all_ranks(control, lambda: _plan(request, checkpoint))
        if engine is not None:  # a half-loaded plain model cannot be kept from running
            engine.finish_reductions()
            why = f"a load of {path} did not come to its end; load a whole checkpoint first"
            engine.begin_load(plan.names, why)
        begun = plan
        on_all_ranks(control, partial(read, plan))
    except BaseException as error:
        # Before the read nothing has changed, and nothing is dropped: another rank may have failed.
        if begun is not None:
            begun.drop_states()
            if engine is None and isinstance(error, CheckpointError):
                raise type(error)(
                    f"{error}. What was read before it is in the model: do not use that before a "
                    "load has succeeded"
                ) from error
        raise
    finally:
        checkpoint.close()
    left = None if engine is None else engine.end_load(plan.names)
    if left is not None:
        raise CheckpointError(
            f"{path}: '{left}' is half loaded from another checkpoint, and not in this one; load "
            "one that has all of the model"
        )
    plan.apply()
    same_ranks = manifest.num_ranks == host.num_ranks
    try:
        on_all_ranks(control, lambda: _apply_values(request, values, same_ranks))
    except CheckpointError as error:
        if engine is not None:
            engine.refuse(f"a load of {path} did not come to its end: {error}")
        raise
    if engine is not None:
        engine.origin = Origin(path, manifest.step, manifest.run, bool(skipped))
    loaded = Loaded(
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
    return loaded, plan.differences()


def _plan(request: Request, checkpoint: Checkpoint) -> tuple[Restore, Values]:
    """Match a checkpoint with the model, the optimizer, the user's state and the generators."""
    host, where = request.host, checkpoint.where
    if host.engine is not None and host.engine.suspended:
        raise StateError("load() inside gathered(): leave that context first")
    values = checkpoint.values_of(checkpoint.rank)
    optimizer = None if request.optimizer is None else Joined(request.optimizer)
    how = {"strict": request.strict, "cast": request.cast}
    plan = Restore(checkpoint, host.model, host.places, optimizer, elsewhere=host.elsewhere, **how)
    missing = [key for key in request.extra if key not in values["extra"]]
    if missing:
        raise CheckpointError(
            f"extra: the checkpoint has no {missing[0]!r}; it has {sorted(values['extra'])}"
        )
    modules = {name for name, _ in module_states(host.model)}
    if request.strict and modules != set(values["modules"]):
        name = min(modules ^ set(values["modules"]))
        raise CheckpointError(
            f"{where}: module '{name}' has an extra state "
            f"{'here, and none there' if name in modules else 'there, and none here'}"
        )
    if request.restore_generators and values["generators"]:
        check_generators(values["generators"], host.device)
    return plan, values


def _apply_values(request: Request, values: Values, same_ranks: bool) -> None:
    """Restore the user's state and the modules' own, in code of the user, which may raise."""
    for key, target in request.extra.items():
        load = getattr(target, "load_state_dict", None)
        if callable(load):
            with _named(f"extra[{key!r}].load_state_dict()", target):
                load(values["extra"][key])
    for name, module in module_states(request.host.model):
        if name in values["modules"]:
            with _named(f"set_extra_state() of module '{name or '(root)'}'", module):
                module.set_extra_state(values["modules"][name])
    generators = values["generators"]
    if not request.restore_generators or not generators:
        return
    if same_ranks:
        set_generators(generators, request.host.device)
    else:
        derive_generators(generators, request.host.rank, request.host.device)


@contextmanager
def _named(what: str, target: object) -> Iterator[None]:
    """Turn an error of the user's code into one that names it and the state of the load."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} ({type(target).__name__}) raised {type(error).__name__}: {error}. Parameters "
            "and optimizer are those of the checkpoint already; a sharded model refuses to run "
            "until a load succeeds"
        ) from error
