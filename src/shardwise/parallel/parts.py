"""One rank's pipeline stages as one model, and their optimizers as one optimizer.

Interleaved and V-shaped schedules give a rank several stages. Each stage is a separate model with a
separate engine. Functions for whole models (checkpoints, replicas, windows) take one model or a
list of stages; this file gives both the same interface.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives import Comm
from shardwise.comm.control import Control
from shardwise.engine.adoption import state_to_save
from shardwise.engine.api import engine_of
from shardwise.engine.runtime import Engine
from shardwise.engine.status import Origin
from shardwise.errors import ConfigError, ShardError
from shardwise.unit.home import StateFolder
from shardwise.unit.steps import finish_all
from shardwise.unit.unit import Unit

Model = nn.Module | Sequence[nn.Module]
Optimizer = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def modules_of(model: Model) -> tuple[nn.Module, ...]:
    """Return the stages of a model as a tuple. **Raises** ConfigError for an empty list."""
    stages = tuple(model) if isinstance(model, list | tuple) else (model,)
    if not stages:
        raise ConfigError(
            "model: expected a module, or a list of a rank's stages, got an empty one"
        )
    return stages


def named_modules_of(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of all stages, with their names in the whole model."""
    for stage in modules_of(model):
        yield from stage.named_modules()


class Parts:
    """The engines of one rank's stages (usually one engine). Calls go to every engine."""

    def __init__(self, model: Model) -> None:
        self.engines: list[Engine] = [engine_of(stage) for stage in modules_of(model)]
        axes = self.comm.axes
        for engine in self.engines[1:]:
            if engine.comm.axes.mesh != axes.mesh or engine.config.stage != self.first.config.stage:
                raise ConfigError(
                    "model: the stages of a rank must be sharded over one mesh at one stage of "
                    f"ZeRO; got {self.first.config.stage.number} on {axes.mesh} and "
                    f"{engine.config.stage.number} on {engine.comm.axes.mesh}"
                )
        for engine in self.engines:
            engine.stage_engines = self.engines

    @property
    def first(self) -> Engine:
        """The engine of the first stage that the rank has."""
        return self.engines[0]

    @property
    def units(self) -> list[Unit]:
        """The units of all stages."""
        return [unit for engine in self.engines for unit in engine.units]

    @property
    def comm(self) -> Comm:
        """The collectives over the data-parallel ranks."""
        return self.first.comm

    @property
    def comms(self) -> list[Comm]:
        """The collectives of every mesh of every stage."""
        return list({id(c): c for engine in self.engines for c in engine.comms}.values())

    @property
    def dense_comms(self) -> list[Comm]:
        """The collectives over the data-parallel ranks, one for each stage."""
        return [engine.comm for engine in self.engines]

    @property
    def has_stages(self) -> bool:
        """Tell whether other ranks have other stages."""
        return self.comm.axes.stages is not None

    @property
    def all_ranks(self) -> Control:
        """The control group of all ranks that hold a part of the model."""
        return self.first.all_ranks

    @property
    def suspended(self) -> bool:
        """Tell whether any stage is gathered."""
        return any(engine.suspended for engine in self.engines)

    @property
    def replicas_differ(self) -> bool:
        """Tell whether replicas step separately, so that their parameters differ."""
        return self.local_steps is not None

    @property
    def local_steps(self) -> Any:
        """The `LocalSteps` of the model, or None."""
        return self.first.status.local_steps

    @property
    def is_in_window(self) -> bool:
        """Tell whether any stage is inside an accumulation window."""
        return any(engine.is_in_window for engine in self.engines)

    def finish_pending_work(self, what: str) -> None:
        """Finish background work and unpin all units, for ``what``."""
        for engine in self.engines:
            engine.finish_pending_work(what)

    @property
    def disk(self) -> StateFolder | None:
        """The folder of state that is offloaded to files, or None."""
        homes = [unit.home for engine in self.engines for unit in engine.units if unit.home]
        disks = (disk for home in homes for disk in (home.files.optimizer, home.files.params))
        return next((disk for disk in disks if disk is not None), None)

    def give_up_steps(self) -> None:
        """Wait for background steps; after a failed step the model is unusable until a load.

        A load calls it first, because the load replaces the state of a failed step.
        """
        for engine in self.engines:
            for unit in engine.units:
                try:
                    unit.finish_steps()
                    finish_all(unit.writes)
                except ShardError as failure:
                    for step in (*unit.steps, *unit.writes):
                        step.give_up()
                    unit.steps = []
                    unit.writes = []
                    engine.status.refuse(str(failure))

    def check_usable(self, what: str) -> None:
        """Raise StateError for ``what`` if the parameters must not be used."""
        for engine in self.engines:
            engine.status.check_usable(what)

    def finish_reductions(self) -> None:
        """Complete the reductions in flight."""
        for engine in self.engines:
            engine.finish_reductions()

    def begin_load(self, names: Collection[str], why: str) -> None:
        """Begin to write parameters and state of these names."""
        for engine in self.engines:
            engine.status.begin_load(names, why)

    def end_load(self, names: Collection[str]) -> str | None:
        """End a successful load; return a name that an earlier load has left half loaded."""
        half_loaded = [engine.status.end_load(names) for engine in self.engines]
        return next(filter(None, half_loaded), None)

    @property
    def origin(self) -> Origin | None:
        """The checkpoint that the model was last loaded from or saved as."""
        return self.first.status.origin

    @origin.setter
    def origin(self, origin: Origin) -> None:
        for engine in self.engines:
            engine.status.origin = origin

    def refuse(self, why: str) -> None:
        """Mark the parameters unusable until a load of all of them succeeds."""
        for engine in self.engines:
            engine.status.refuse(why)

    def add_pass_check(self, check: Callable[[], None]) -> Callable[[], None]:
        """Call ``check`` before each recorded pass of the first stage; return its removal."""
        return self.first.status.add_pass_check(check)


class StageOptimizers:
    """The optimizers of a rank's stages, of one class, with the interface of one optimizer.

    Group n has the parameters of every optimizer's group n.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        given = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
        self.optimizers: list[Any] = list(given)
        first = self.optimizers[0] if self.optimizers else None
        for stage_optimizer in self.optimizers:
            if not hasattr(stage_optimizer, "param_groups"):
                raise ConfigError(
                    "optimizer: expected a torch.optim.Optimizer, a list of one for each stage, or "
                    f"None, got {type(stage_optimizer).__name__}"
                )
        if first is None:
            raise ConfigError("optimizer: got an empty list; pass None where there is none")
        self.name = type(first).__name__
        for other in self.optimizers[1:]:
            kinds = [f"{type(o).__name__}, {len(o.param_groups)} groups" for o in (first, other)]
            if kinds[0] != kinds[1]:
                raise ConfigError(
                    f"optimizer: those of a rank's stages must be of one kind; got {kinds[0]}, and "
                    f"{kinds[1]}"
                )
        self.state = _StageStates(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with the first optimizer's settings."""
        groups = []
        for stage_groups in zip(*(o.param_groups for o in self.optimizers), strict=True):
            params = [param for group in stage_groups for param in group["params"]]
            groups.append({**stage_groups[0], "params": params})
        return groups

    def saved_state(self, param: Any) -> Mapping[str, Any]:
        """Return a parameter's state as a checkpoint saves it."""
        states = (state_to_save(o, param) for o in self.optimizers if param in o.state)
        return next(states, {})

    def check_settings(self) -> None:
        """Raise ConfigError if settings differ: a checkpoint stores one per group."""
        for number, (first, *others) in enumerate(
            zip(*(o.param_groups for o in self.optimizers), strict=True)
        ):
            for other in others:
                for key in first.keys() | other.keys():
                    value = first.get(key)
                    other_value = other.get(key)
                    if key != "params" and value is not other_value and value != other_value:
                        raise ConfigError(
                            f"optimizer: '{key}' of group {number} is {value!r} in the first "
                            f"stage's and {other_value!r} in another's: a checkpoint has one"
                        )


class _StageStates:
    """The state of several optimizers, by parameter."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers

    def get(self, param: Any, default: Any) -> Any:
        """Return the state of a parameter."""
        states = (o.state[param] for o in self._optimizers if param in o.state)
        return next(states, default)

    def pop(self, param: Any, default: Any) -> Any:
        """Remove the state of a parameter."""
        for optimizer in self._optimizers:
            default = optimizer.state.pop(param, default)
        return default
