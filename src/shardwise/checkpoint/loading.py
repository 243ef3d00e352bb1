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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.all_ranks import collector_paused, on_all_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import (
    MAX_LOOKS,
    choose,
    has_changed,
    too_fast,
)
from shardwise.checkpoint.generators import (
    check_generators,
    derive_generators,
    set_generators,
)
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.restore import (
    Matched,
    Place,
    Target,
    apply_optimizer,
    differences,
    match_model,
    match_optimizer,
    optimizer_targets,
    places_of_plain,
    places_of_sharded,
    read_targets,
)
from shardwise.checkpoint.state import module_states, persistent_buffers
from shardwise.comm.control import Control, SoloControl, exchange_any
from shardwise.engine.conditions import Origin
from shardwise.engine.parts import Joined, Model, Optimizer, Parts, modules_of
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint, StateError


@dataclass(frozen=True)
class Loaded:
    """A finished load: the folder, its step, the user's own state, bytes that this rank read.

    ``skipped`` has the reason for each newer checkpoint that could not be used. Without ``strict``,
    ``missing`` and ``unexpected`` are the names that only the model or the checkpoint has.
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


@dataclass(frozen=True)
class Request:
    """The arguments of a load."""

    files: Files
    control: Control
    model: Model
    optimizer: Optimizer | None
    extra: Mapping[str, object] = field(default_factory=dict)
    strict: bool = True
    cast: bool = False
    restore_generators: bool = True
    progress: Callable[[int], None] | None = None


class Host:
    """The model to load into, sharded or plain.

    A plain model has no engine and is whole on every rank: each process reads all of it, without
    communication.
    """

    def __init__(self, model: Model) -> None:
        """Prepare a model for a load. **Raises** ConfigError if another library sharded it."""
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


@collector_paused()
def load_from(request: Request, folder: Path, only: Path | None = None) -> Loaded | None:
    """Load the newest checkpoint of a folder that is whole; warn about damaged newer ones.

    With ``only``, that one. Returns None if the folder holds no checkpoint. **Raises**
    CheckpointError, the same on all ranks, if all are damaged, or if one does not fit the model (an
    older one would not either). Checkpoints that are removed or replaced while they are read: Note
    [Beside a running run] in `folder`.
    """
    skipped: dict[int, str] = {}

    def reasons(above: int) -> tuple[str, ...]:
        return tuple(skipped[step] for step in sorted(skipped, reverse=True) if step > above)

    for _ in range(MAX_LOOKS):
        chosen = choose(request.control, request.files, folder, skipped, only)
        if chosen is None:
            if skipped:
                raise CheckpointError(
                    f"{folder}: no checkpoint can be used: {'; '.join(reasons(-1))}"
                )
            return None
        try:
            loaded = _load(request, chosen.path, chosen.manifest, reasons(chosen.step))
        except CheckpointError as error:
            if has_changed(request.control, request.files, chosen):
                continue
            if only is not None or not isinstance(error, DamagedCheckpoint):
                raise
            skipped[chosen.step] = str(error)
            continue
        _warn(request, loaded)
        return loaded
    raise too_fast(only or folder)


def _warn(request: Request, loaded: Loaded) -> None:
    """Warn of skipped checkpoints and of names left out, after all ranks have finished."""
    if request.control.rank == 0:
        for reason in loaded.skipped:
            warnings.warn(
                f"a newer checkpoint is damaged and was passed over: {reason}. {loaded.path.name} "
                "was loaded",
                stacklevel=3,
            )
        if loaded.missing or loaded.unexpected:
            names = differences(loaded.missing, loaded.unexpected)
            warnings.warn(f"{loaded.path.name} was loaded in part: {names}", stacklevel=3)


def _load(request: Request, path: Path, manifest: Manifest, skipped: tuple[str, ...]) -> Loaded:
    """Load one checkpoint whose manifest all ranks have. See Note [Damage while loading]."""
    control, host = request.control, Host(request.model)
    engine = host.engine  # None: a half-loaded plain model cannot be kept from running
    optimizer = None if request.optimizer is None else Joined(request.optimizer)
    # A rank beyond those that saved takes the own state of one of them.
    checkpoint = Checkpoint(request.files, path, manifest, host.rank % manifest.num_ranks)
    found: list[_Plan] = []
    values: dict[str, dict[str, object]] = {}
    begun = False

    def match() -> None:
        if engine is not None and engine.suspended:
            raise StateError("load() inside gathered(): leave that context first")
        values.update(checkpoint.values_of(checkpoint.rank))
        found.append(_plan(request, host, checkpoint, values))

    def read() -> None:
        for num_bytes in read_targets(checkpoint, found[0].targets):
            if request.progress is not None:
                request.progress(num_bytes)

    try:
        on_all_ranks(control, match)
        plan = found[0]
        if engine is not None:
            engine.finish_reductions()
            why = f"a load of {path} did not come to its end; load a whole checkpoint first"
            engine.begin_load(plan.names, why)
        begun = True
        on_all_ranks(control, read)
    except BaseException as error:
        # State that was read into reused memory may be of two checkpoints, and is dropped. Before
        # the read nothing has changed, and nothing is dropped: another rank may have failed.
        if begun and optimizer is not None and found:
            for place in found[0].states:
                optimizer.state.pop(place.held, None)
        if begun and engine is None and isinstance(error, CheckpointError):
            raise type(error)(
                f"{error}. What was read before it is in the model: do not use that before a load "
                "has succeeded"
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
    if optimizer is not None:
        apply_optimizer(optimizer, plan.groups, plan.states)
    for place, _ in plan.matched.places:
        place.held.grad = None
    same_ranks = manifest.num_ranks == host.num_ranks
    try:
        on_all_ranks(control, lambda: _apply_values(request, host, values, same_ranks))
    except CheckpointError as error:
        if engine is not None:
            engine.refuse(f"a load of {path} did not come to its end: {error}")
        raise
    if engine is not None:
        engine.origin = Origin(path, manifest.step, manifest.run, bool(skipped))
    return Loaded(
        path,
        manifest.step,
        manifest.run,
        values["extra"],
        checkpoint.num_bytes,
        manifest.num_ranks,
        skipped,
        plan.matched.missing_names,
        plan.matched.unexpected,
    )


@dataclass(frozen=True)
class _Plan:
    """The changes of a load, decided and allocated before any is made."""

    matched: Matched
    targets: list[Target]
    names: set[str]
    groups: list[dict[str, object]]
    states: dict[Place, dict[str, object]]


def _plan(
    request: Request, host: Host, checkpoint: Checkpoint, values: Mapping[str, dict[str, object]]
) -> _Plan:
    """Match a checkpoint with the model, the optimizer, the user's state and the generators."""
    model = request.model
    optimizer = None if request.optimizer is None else Joined(request.optimizer)
    how = {"strict": request.strict, "cast": request.cast}
    matched = match_model(checkpoint, model, host.places, **how, elsewhere=host.elsewhere)
    missing = [key for key in request.extra if key not in values["extra"]]
    if missing:
        raise CheckpointError(
            f"extra: the checkpoint has no {missing[0]!r}; it has {sorted(values['extra'])}"
        )
    modules = {name for name, _ in module_states(model)}
    if request.strict and modules != set(values["modules"]):
        name = min(modules ^ set(values["modules"]))
        raise CheckpointError(
            f"{checkpoint.where}: module '{name}' has an extra state "
            f"{'here, and none there' if name in modules else 'there, and none here'}"
        )
    if request.restore_generators and values["generators"]:
        check_generators(values["generators"], host.device)
    names = {target.info.key for target in matched.targets}
    if optimizer is None:
        return _Plan(matched, list(matched.targets), names, [], {})
    groups = match_optimizer(checkpoint, optimizer, matched)
    states, more = optimizer_targets(checkpoint, optimizer, matched, groups)
    return _Plan(matched, [*matched.targets, *more], names, groups, states)


def _apply_values(
    request: Request, host: Host, values: Mapping[str, dict[str, object]], same_ranks: bool
) -> None:
    """Restore the user's state and the modules' own, in code of the user, which may raise."""
    for key, target in request.extra.items():
        load = getattr(target, "load_state_dict", None)
        if callable(load):
            with _named(f"extra[{key!r}].load_state_dict()", target):
                load(values["extra"][key])
    for name, module in module_states(request.model):
        if name in values["modules"]:
            with _named(f"set_extra_state() of module '{name or '(root)'}'", module):
                module.set_extra_state(values["modules"][name])
    generators = values["generators"]
    if not request.restore_generators or not generators:
        return
    if same_ranks:
        set_generators(generators, host.device)
    else:
        derive_generators(generators, host.rank, host.device)


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
