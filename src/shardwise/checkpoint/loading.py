"""Load a checkpoint into a sharded model: choose it, check it against the model, read, apply.

Note [Damage while loading]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Tensors are read straight into the parameters, since a second copy of them may not fit. If a chunk
turns out to be damaged half way, the parameters are of two checkpoints; from the first byte read to
the last one checked the engine therefore refuses every forward pass (`Conditions.unusable`). A good
load, as a rule that of the next older checkpoint, ends this.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.checkpoint.all_ranks import collector_paused, on_all_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import (
    MAX_LOOKS,
    Chosen,
    check_quickly,
    choose,
    has_changed,
    is_there,
    step_name,
    steps_in,
    vanishing,
)
from shardwise.checkpoint.generators import (
    check_generators,
    derive_generators,
    set_generators,
)
from shardwise.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from shardwise.checkpoint.places import Host, Place, host_of
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.restore import (
    Matched,
    Target,
    apply_optimizer,
    differences,
    match_model,
    match_optimizer,
    optimizer_targets,
    read_targets,
)
from shardwise.checkpoint.state import module_states
from shardwise.comm.control import Control
from shardwise.engine.conditions import Origin
from shardwise.engine.parts import Joined, Model, Optimizer
from shardwise.errors import CheckpointError, DamagedCheckpoint

_SHOWN = 5


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the folder, its step, the user's own state, bytes that this rank read.

    ``skipped`` says, for each newer checkpoint that could not be used, why; ``missing`` and
    ``unexpected`` are, without ``strict``, the names that only the model or the checkpoint has.
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
    """What is to be loaded, and where to."""

    files: Files
    control: Control
    model: Model
    optimizer: Optimizer | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True
    cast: bool = False
    restore_generators: bool = True
    progress: Callable[[int], None] | None = None


@collector_paused()
def load_newest(request: Request, folder: Path) -> Loaded | None:
    """Load the newest checkpoint of a folder that verifies, loudly if it is not the newest of all.

    Returns None if the folder holds no checkpoint. **Raises** CheckpointError, the same on all
    ranks, if all are damaged, or if one does not fit the model (an older one would not either).
    What is removed while it is read: Note [Beside a running run] in `folder`.
    """
    skipped: dict[int, str] = {}
    for _ in range(MAX_LOOKS):
        chosen = choose(request.control, request.files, folder, skipped)
        if chosen is None:
            if skipped:
                reasons = "; ".join(_reasons(skipped, -1))
                raise CheckpointError(f"{folder}: no checkpoint can be used: {reasons}")
            return None
        try:
            loaded = _load(request, chosen.path, chosen.manifest, _reasons(skipped, chosen.step))
        except CheckpointError as error:
            if has_changed(request.control, request.files, chosen):
                continue
            if not isinstance(error, DamagedCheckpoint):
                raise
            skipped[chosen.step] = str(error)
            continue
        _warn(request, loaded)
        return loaded
    raise CheckpointError(vanishing(folder))


def _reasons(skipped: Mapping[int, str], above: int) -> tuple[str, ...]:
    """Return why newer checkpoints than ``above`` were passed over, the newest first."""
    return tuple(skipped[step] for step in sorted(skipped, reverse=True) if step > above)


@collector_paused()
def load_one(request: Request, path: Path) -> Loaded:
    """Load the checkpoint of this folder, and no other; again if it is replaced meanwhile."""
    for _ in range(MAX_LOOKS):
        chosen = _look_at(request, path)
        try:
            loaded = _load(request, path, chosen.manifest, ())
        except CheckpointError as error:
            if not has_changed(request.control, request.files, chosen):
                raise
            if not is_there(request.control, request.files, path):
                raise CheckpointError(f"{path} was removed while it was read") from error
            continue
        _warn(request, loaded)
        return loaded
    raise CheckpointError(f"{path}: it is replaced faster than it can be read; load it again later")


def _look_at(request: Request, path: Path) -> Chosen:
    """Check one checkpoint quickly, and tell all ranks its manifest."""
    found: list[tuple[Manifest, bytes]] = []

    def check() -> None:
        if request.control.rank == 0:
            folder, step = path.parent, path.name
            steps = [step_name(s) for s in steps_in(request.files, folder)]
            if step.startswith("step-") and steps and step not in steps:
                there = ", ".join(steps[:_SHOWN])
                raise CheckpointError(f"{folder}: there is no {step}; the newest are {there}")
            found.append(check_quickly(request.files, path))

    on_all_ranks(request.control, check)
    said = request.control.broadcast(found[0][1] if found else b"")
    manifest = found[0][0] if found else parse_manifest(said, str(path / MANIFEST))
    return Chosen(path, manifest.step or 0, manifest, said)


def _warn(request: Request, loaded: Loaded) -> None:
    """Say what was passed over and what was left out, once all ranks are through."""
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
    control, host = request.control, host_of(request.model)
    optimizer = None if request.optimizer is None else Joined(request.optimizer)
    # A rank that did not save goes on with the own state of one that did.
    checkpoint = Checkpoint(request.files, path, manifest, host.rank % manifest.num_ranks)
    found: list[_Plan] = []
    values: dict[str, Any] = {}
    begun = False

    def match() -> None:
        host.check()
        values.update(checkpoint.values_of(checkpoint.rank))
        found.append(_plan(request, host, checkpoint, values))

    def read() -> None:
        for num_bytes in read_targets(checkpoint, found[0].targets):
            if request.progress is not None:
                request.progress(num_bytes)

    try:
        on_all_ranks(control, match)
        plan = found[0]
        host.begin(plan.names, path)
        begun = True
        on_all_ranks(control, read)
    except BaseException as error:
        # What was read into the memory of its state may be of two checkpoints. Before that nothing
        # has changed, and nothing goes: it may be another rank that the checkpoint does not fit.
        if begun and optimizer is not None and found:
            for place in found[0].states:
                optimizer.state.pop(place.held, None)
        if begun and isinstance(error, Exception):
            raise host.failed(error) from error
        raise
    finally:
        checkpoint.close()
    host.end(plan.names, path)
    if optimizer is not None:
        apply_optimizer(optimizer, plan.groups, plan.states)
    for place, _ in plan.matched.places:
        place.held.grad = None
    same_ranks = manifest.num_ranks == host.num_ranks
    try:
        on_all_ranks(control, lambda: _apply_values(request, host, values, same_ranks))
    except CheckpointError as error:
        host.stop(f"a load of {path} did not come to its end: {error}")
        raise
    host.note_origin(Origin(path, manifest.step, manifest.run, bool(skipped)))
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
    """What a load will change: decided, and allocated, before anything is."""

    matched: Matched
    targets: list[Target]
    names: set[str]
    groups: list[dict[str, Any]]
    states: dict[Place, dict[str, Any]]


def _plan(request: Request, host: Host, checkpoint: Checkpoint, values: Mapping[str, Any]) -> _Plan:
    """Match a checkpoint with the model, the optimizer and what else is to be restored."""
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
    request: Request, host: Host, values: Mapping[str, Any], same_ranks: bool
) -> None:
    """Give everybody's own state back, in code that is not ours and may raise."""
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
    """Say whose code raised, and that parameters and optimizer are loaded by then."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} ({type(target).__name__}) raised {type(error).__name__}: {error}. Parameters "
            "and optimizer are those of the checkpoint already; a sharded model refuses to run "
            "until a load succeeds"
        ) from error
