"""The class that `shard()` gives the model and its units' modules; copies of a sharded model.

Note [The model's class]
The modules become instances of a subclass of their class, with the same name, as with
`fully_shard`: ``isinstance`` holds, and the user's class does not change. The subclass has
FSDPModule, ours and torch's, among its bases. ``type(model)(...)`` makes an instance of the user's
class. So do copies, and a sharded copy then gets the subclass again.

Note [Copies]
`copy.deepcopy` copies the modules. Before that, every parameter is copied, in a unit without hooks,
and put into ``memo``, so references to a parameter become references to its copy. After the modules
are copied, the units are attached to them. Gradients, hooks on parameters and an open accumulation
window are not copied, as in torch.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from inspect import getattr_static
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY

from shardwise.comm.collectives import Comm, make_comm
from shardwise.engine.hooks import forget_hooks, forget_load_check
from shardwise.engine.misuse import recorded_once
from shardwise.engine.model import attach_engine, compare_load, note_state
from shardwise.engine.runtime import Engine
from shardwise.engine.tree import ATTRIBUTE
from shardwise.errors import ConfigError, StateError
from shardwise.surface.methods import FSDPModule, make_subclass
from shardwise.surface.state import ModuleState
from shardwise.surface.wrappers import FSDP1_FUNCTIONS, refuse_wrappers
from shardwise.trace import FullParamLedger
from shardwise.unit.encodings import SubclassGather
from shardwise.unit.param import ShardedParam, ShardTensorForm
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Gather, Unit

Memo = dict[int, Any]

_HINTS = FSDP1_FUNCTIONS | {
    "module": "shard() wraps nothing, as DistributedDataParallel does; drop `.module` and use the "
    "model itself",
    "join_hook": "torch's Join is for wrappers of its own; for ranks with different numbers of "
    "batches use `for batch, weight in shardwise.parallel.join(model, loader):`",
    "backward": "call loss.backward()",
    "clip_grad_norm_": "call shardwise.parallel.clip_grad_norm_(model.parameters(), max_norm)",
    "get_global_grad_norm": "shardwise.parallel.clip_grad_norm_(...) returns the norm",
    "load_checkpoint": "call shardwise.load(path, model, optimizer)",
    "no_sync": "it belongs to the whole model: `with shardwise.accumulate(model, last=False):`",
    "save_16bit_model": "inside `with shardwise.gathered(model):` the state_dict() is whole",
    "save_checkpoint": "call shardwise.save(path, model, optimizer)",
    "step": "call optimizer.step(), then optimizer.zero_grad()",
}


def attach(model: nn.Module, engine: Engine, units: Sequence[Unit]) -> None:
    """Give the model and the modules with units their classes; store the units on the modules."""
    refuse_wrappers()
    states: dict[int, ShardState] = {}
    _set_class(model, ShardedModel)
    for unit in units:
        for module in unit.modules:
            state = states.setdefault(id(module), ShardState(engine, module))
            state.units.append(unit)
            note_state(module, state)
            vars(module)[STATE_KEY] = StatesOfModule(vars(module)[STATE_KEY])
            _set_class(module, ShardedModule)
    engine.all_states = list(states.values())


def _set_class(module: Any, base: Any) -> None:
    if not isinstance(module, base):
        cls: Any = type(module)
        module.__class__ = sharded_class(cls, base)


class StatesOfModule(dict[Any, Any]):
    """The states that torch's composable functions keep on a module, by function.

    Each of these functions first looks whether it has a state already.
    """

    def __contains__(self, function: object) -> bool:
        """Refuse `fully_shard` and `replicate` on a module that `shard` has sharded."""
        if isinstance(self.get(function), ShardState):
            raise StateError(
                "fully_shard() of a module that shard() has sharded: call one of the two. For "
                "other units write shard(model, units=[...])"
            )
        if getattr(function, "__name__", "") == "replicate":
            raise StateError(
                "replicate() of a module that shard() has sharded: shard(model, stage=0) "
                "replicates, and shard(mesh=Axes(...)) has replicas of shards"
            )
        return super().__contains__(function)


class ShardState(ModuleState):
    """The units that `shard` made for one module."""

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        super().__init__()
        self.engine = engine
        self.modules = (module,)
        self.max_in_flight = engine.config.reduces_in_flight
        self.frees = engine.config.stage.frees_after_backward

    def start_unshard(self) -> Sequence[Unit]:
        """Pin and return the units; inside `gathered`, where all are full, return no unit."""
        units = [] if self.suspended else self.units
        for unit in units:
            unit.pin()
        return units

    def reshard(self) -> None:
        """Unpin the units; free the full parameters unless a pass runs."""
        engine = self.lazy_init()
        engine.unpin("reshard()", self.units)
        if not engine.is_running():
            super().reshard()

    def free_after_forward(self, frees: bool) -> None:
        """Free full parameters after forward, or keep them for backward."""
        if frees and not self.frees:
            stage = self.lazy_init().config.stage.number
            raise ConfigError(
                f"set_reshard_after_forward(True) at stage {stage}: full "
                "parameters stay there; shard(model, stage=3) frees them"
            )
        super().free_after_forward(frees)


class ShardedModule(FSDPModule):
    """The methods of a module that `shard` made a unit for; see Note [The model's class]."""

    _orig_cls_mro_index = 4  # <Cls>, this class, ours, torch's, Cls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hide the generated subclass from the user's ``__init_subclass__``."""

    def __getattr__(self, name: str) -> Any:
        """Look up as the module's class does; add a hint to the AttributeError of known names."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            if name not in _HINTS:
                raise
            raise AttributeError(f"{error}: {_HINTS[name]}", name=name, obj=self) from None

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which calls this first."""
        raise recorded_once("torch.jit.script")

    def __copy__(self) -> Any:
        _hide(self)
        return _copy_by_class(self, copy.copy)

    def __deepcopy__(self, memo: Memo) -> Any:
        _hide(self)
        return _copy_by_class(self, lambda module: copy.deepcopy(module, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Raise the engine's error for pickling."""
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

    def __deepcopy__(self, memo: Memo) -> Any:
        """Copy the sharded model, on every rank; inside `gathered` the copy is a plain model."""
        engine: Engine = self.__dict__[ATTRIBUTE]
        if engine.suspended:
            memo[id(engine)] = "gathered"  # removed with its attribute, below
            return _make_plain(super().__deepcopy__(memo))
        new_engine, units = copy_engine(engine, memo)
        copied = super().__deepcopy__(memo)
        forget_engine(copied)
        place_units(units, memo)
        attach_engine(copied, new_engine, units)
        return copied


@contextmanager
def no_sync(self: Any) -> Iterator[None]:
    """Run a micro-batch that is not the last before the step: ``accumulate(model, last=False)``."""
    engine: Engine = self.__dict__[ATTRIBUTE]
    with engine.status.micro_batch(last=False):
        yield


@cache
def sharded_class(cls: Any, base: type = ShardedModel) -> Any:
    """Return the class of sharded models of ``cls``, or of its units' modules.

    Members of ``cls`` take precedence over FSDPModule's methods of the same name.
    """
    names = ("__module__", "__qualname__", "__doc__")
    members = {name: getattr(cls, name) for name in names}
    public = [name for name in vars(FSDPModule) if not name.startswith("_")]
    members |= {name: getattr_static(cls, name) for name in public if hasattr(cls, name)}
    if base is ShardedModel and not hasattr(cls, "no_sync"):
        members["no_sync"] = no_sync
    return make_subclass(cls, base, cls.__name__, members)


def _hide(module: ShardedModule) -> None:
    """Put the shards into the module, as if no unit were pinned."""
    for unit in module._get_fsdp_state().units:
        unit.slots.hide()


def _copy_by_class(module: Any, copy_module: Callable[[Any], Any]) -> Any:
    """Copy a module as an instance of the user's class, which may define ``__deepcopy__``."""
    cls = type(module)
    module.__class__ = cls.__mro__[cls._orig_cls_mro_index]
    try:
        return copy_module(module)
    finally:
        module.__class__ = cls


def _make_plain(model: Any) -> Any:
    """Remove everything that sharding has added from a copy with plain parameters."""
    forget_engine(model)
    for name, value in list(vars(model).items()):
        home = getattr(getattr(value, "func", value), "__module__", None) or ""
        if name == ATTRIBUTE or (callable(value) and home.startswith("shardwise.")):
            del vars(model)[name]
    for module in model.modules():
        for note in (STATE_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(note, None)
        forget_load_check(module, compare_load)
    return model


# -- copies
def copy_engine(engine: Engine, memo: Memo) -> tuple[Engine, list[Unit]]:
    """Copy the units with their slices; every rank calls it.

    **Cost** the slices' memory a second time; one small broadcast, one gloo group.
    """
    if engine.is_running():
        raise StateError(
            "copy.deepcopy of a sharded model inside a forward or backward pass: copy it between "
            "two passes"
        )
    engine.status.check_usable("copy.deepcopy: ")
    engine.finish_steps()
    comms = {id(comm): make_comm(comm.axes, comm.device) for comm in engine.comms}
    ledger = FullParamLedger()
    new_engine = Engine(engine.config, comms[id(engine.comm)], ledger, engine.rules)
    memo[id(engine)] = new_engine
    units = [
        _copy_unit(unit, comms[id(unit.comm)], new_engine, ledger, memo) for unit in engine.units
    ]
    return new_engine, units


def _copy_unit(unit: Unit, comm: Comm, engine: Engine, ledger: FullParamLedger, memo: Memo) -> Unit:
    new_unit = Unit(
        unit.name,
        unit.index,
        unit.modules,
        comm,
        engine,
        unit.settings,
        unit.precision,
        unit.grads.sum_settings,
        Gather(unit.gather.transport),
        home=None if unit.home is None else unit.home.for_copy(comm.time),
    )
    storages: dict[int, Storage] = {}
    for storage in unit.storages:
        storages[id(storage)] = _copy_storage(storage, new_unit, ledger)
    for param in unit.params:
        cut = param.cut.over(comm)
        form = ShardTensorForm(cut, param.sharded.requires_grad)
        copied = ShardedParam(new_unit, param.uses, form, param.shape, cut=cut, dim=param.dim)
        if isinstance(param.encoding, SubclassGather):
            form.make_sharded(copied, _copy_chunk(param))
            copied.detach_storage(param.encoding.for_copy())
            copied.index = param.index
        else:
            copied.attach_storage(storages[id(param.storage)], param.index)
        copied.copy_attributes(
            {k: v for k, v in vars(param.sharded).items() if not k.startswith("_")}
        )
        new_unit.params.append(copied)
        memo[id(param.sharded)] = copied.sharded
    copies = {id(param): new for param, new in zip(unit.params, new_unit.params, strict=True)}
    for rows in unit.grads.gradient_rows:
        of_copies = tuple(copies[id(param)] for param in rows.params)
        new_unit.grads.gradient_rows.append(replace(rows, params=of_copies))
    new_unit.set_storages(list(storages.values()))
    for storage in new_unit.storages:  # last, because the full parameters are views of it
        storage.free()
    return new_unit


@torch.no_grad()
def _copy_chunk(param: ShardedParam) -> torch.Tensor:
    """Copy this rank's part, with its padding, of a parameter outside the storages."""
    local = param.sharded._local_tensor
    copied: torch.Tensor = local.new_zeros(param.padded_size).narrow(0, 0, local.shape[0])
    return copied.copy_(local)


@torch.no_grad()
def _copy_storage(storage: Storage, unit: Unit, ledger: FullParamLedger) -> Storage:
    new_storage = Storage(
        storage.layout,
        storage.rank,
        unit.settings.stage,
        (storage.master.dtype, storage.full.dtype),
        storage.full.device,
        ledger,
        home=unit.home,
        coding=storage.coding,
    )
    new_storage.master.copy_(storage.master)
    return new_storage


def place_units(units: list[Unit], memo: Memo) -> None:
    """Attach copied units to the copied modules."""
    for unit in units:
        unit.modules = tuple(memo[id(module)] for module in unit.modules)
        params = unit.params
        unit.params = []
        for param in params:
            param.uses = tuple(replace(use, module=memo[id(use.module)]) for use in param.uses)
            unit.add(param)


def forget_engine(model: nn.Module) -> None:
    """Remove our hooks from a copied model."""
    for module in model.modules():
        forget_hooks(module)
