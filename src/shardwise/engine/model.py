"""What `shard()` adds to the model and to the modules of its units: a class, with a few methods.

Note [The model's class]
They become instances of a subclass of their class, with the same name, as `fully_shard` does it
too: ``isinstance`` holds, and the user's class stays as it is. Among its bases are FSDPModule, ours
and torch's. ``type(model)(...)`` makes an instance of the user's class, and so do copies; what is
sharded gets its class again.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import getattr_static
from typing import Any

from torch import nn

from shardwise.engine.copying import Memo, copy_engine, forget_engine, place_units
from shardwise.engine.hooks import forget_load_check, register_hooks, register_load_check
from shardwise.engine.load_check import compare_load
from shardwise.engine.module_methods import FSDPModule
from shardwise.engine.module_state import ModuleState, forget_notes, note_managed, note_state
from shardwise.engine.runtime import Engine
from shardwise.engine.steppers import attach_steppers
from shardwise.engine.wrappers import register_wrappers
from shardwise.errors import ConfigError
from shardwise.unit.unit import Unit

ATTRIBUTE = "_shardwise_engine"
_HINTS = {
    "module": "shard() wraps nothing, as DistributedDataParallel does; drop `.module` and use the "
    "model itself",
    "join_hook": "torch's Join is for wrappers of its own; for ranks with different numbers of "
    "batches use `for batch, weight in shardwise.parallel.join(model, loader):`",
}


class ShardState(ModuleState):
    """The units that `shard` made for one module."""

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        super().__init__()
        self.engine = engine
        self.modules = (module,)
        self.max_in_flight = engine.config.reduces_in_flight

    @property
    def device(self) -> Any:
        """The device to compute on."""
        return self.engine.comm.device

    @property
    def frees(self) -> bool:
        """Tell whether the stage frees full parameters."""
        stage = self.engine.config.stage
        return bool(stage.frees_after_backward)

    def start_unshard(self) -> Sequence[Unit]:
        """Pin the units; return what to wait for. Inside `gathered` all is full already."""
        units = [] if self.suspended else self.units
        for unit in units:
            unit.pin()
        return units

    def reshard(self) -> None:
        """Free the full parameters, but not those of a pass that is under way."""
        self.engine.unpin("reshard()", self.units)
        if not self.engine.is_running():
            super().reshard()

    def free_after_forward(self, frees: bool) -> None:
        """Free full parameters after forward, or keep them for backward."""
        if frees and not self.frees:
            raise ConfigError(
                f"set_reshard_after_forward(True) at stage {self.engine.config.stage.number}: full "
                "parameters stay there; shard(model, stage=3) frees them"
            )
        super().free_after_forward(frees)


class ShardedModule(FSDPModule):
    """The methods of a module that `shard` made a unit for; see Note [The model's class]."""

    _orig_cls_mro_index = 4  # <Cls>, this class, ours, torch's, Cls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not tell the user's class of a subclass that nobody wrote."""

    def __copy__(self) -> Any:
        """Copy as the module's own class does."""
        _hide(self)
        return _copy_by_class(self, copy.copy)

    def __deepcopy__(self, memo: Memo) -> Any:
        """Copy as the module's own class does."""
        _hide(self)
        return _copy_by_class(self, lambda module: copy.deepcopy(module, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as the engine does."""
        return self._get_fsdp_state().engine.__reduce_ex__(protocol)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _hide(self)
        super()._save_to_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _hide(self)
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]


class ShardedModel(ShardedModule):
    """The methods of a model that was given to `shard`; see Note [The model's class]."""

    _orig_cls_mro_index = 5
    __copy__ = None  # type: ignore[assignment]  # refused, as pickling is

    def __getattr__(self, name: str) -> Any:
        """Look further as the model's class does; say what to do where nothing is found."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            if name not in _HINTS:
                raise
            raise AttributeError(f"{error}: {_HINTS[name]}", name=name, obj=self) from None

    def __deepcopy__(self, memo: Memo) -> Any:
        """Copy the sharded model; every rank does. Inside `gathered` the copy is a plain model."""
        engine: Engine = self.__dict__[ATTRIBUTE]
        if engine.suspended:
            memo[id(engine)] = "gathered"  # goes with its name, below
            return _made_plain(super().__deepcopy__(memo))
        made, units = copy_engine(engine, memo)
        copied = super().__deepcopy__(memo)
        forget_engine(copied)
        place_units(units, memo)
        attach_engine(copied, made, units)
        return copied


@contextmanager
def no_sync(self: Any) -> Iterator[None]:
    """Run a micro-batch that is not the last before the step: ``accumulate(model, last=False)``."""
    engine: Engine = self.__dict__[ATTRIBUTE]
    with engine.conditions.micro_batch(last=False):
        yield


@cache
def sharded_class(cls: Any, base: type = ShardedModel) -> Any:
    """Return the class of sharded models of ``cls``, or of its units' modules.

    What the class has of its own stays, even under the name of one of FSDPModule's methods.
    """
    names = ("__module__", "__qualname__", "__doc__")
    members = {name: getattr(cls, name) for name in names}
    public = [name for name in vars(FSDPModule) if not name.startswith("_")]
    members |= {name: getattr_static(cls, name) for name in public if hasattr(cls, name)}
    if base is ShardedModel and not hasattr(cls, "no_sync"):
        members["no_sync"] = no_sync
    return type(cls)(cls.__name__, (base, cls), members)


def attach_engine(model: nn.Module, engine: Engine, units: list[Unit]) -> None:
    """Let the engine watch the model whose units these are, and note on the model whose it is."""
    engine.take_units(units)
    attach_steppers(units)
    _mark((model, *register_wrappers(engine, units)), engine)
    _note_states(engine, units)
    register_load_check(model, compare_load)
    for state in engine.all_states:
        # Several units of a module lie on a mesh each; the state calls the engine for all of them.
        register_hooks(engine if len(state.units) == 1 else state, state.units[0])


def _note_states(engine: Engine, units: Sequence[Unit]) -> None:
    """Make an FSDPModule of every module that has units, and leave these on it."""
    states: dict[int, ShardState] = {}
    for unit in units:
        for module in unit.modules:
            state = states.setdefault(id(module), ShardState(engine, module))
            state.units.append(unit)
            note_state(module, state)
            cls: Any = type(module)
            if not isinstance(module, ShardedModule):
                module.__class__ = sharded_class(cls, ShardedModule)
    engine.all_states = list(states.values())


def _mark(ways_in: Sequence[nn.Module], engine: Engine) -> None:
    """Note on the model whose it is, and on it and what it merely wraps how to generate."""
    model = ways_in[0]
    vars(model)[ATTRIBUTE] = engine
    if not isinstance(model, ShardedModel):
        cls: Any = type(model)
        model.__class__ = sharded_class(cls)
    for module in ways_in:
        if callable(getattr(module, "generate", None)):
            note_managed(module)  # ranks then generate until all are through


def _hide(module: ShardedModule) -> None:
    """Let the shards stand in the modules, as they do where nothing is pinned."""
    for unit in module._get_fsdp_state().units:
        unit.hide()


def _copy_by_class(module: Any, copies: Callable[[Any], Any]) -> Any:
    """Copy a module as one of its own class, which may have its own way."""
    cls = type(module)
    module.__class__ = cls.__mro__[cls._orig_cls_mro_index]
    try:
        return copies(module)
    finally:
        module.__class__ = cls


def _made_plain(model: Any) -> Any:
    """Take from a copy, whose parameters are plain, all that sharding has added."""
    forget_engine(model)
    for name, value in list(vars(model).items()):
        home = getattr(getattr(value, "func", value), "__module__", None) or ""
        if name == ATTRIBUTE or (callable(value) and home.startswith("shardwise.")):
            del vars(model)[name]
    for module in model.modules():
        forget_notes(module)
        forget_load_check(module, compare_load)
    return model
