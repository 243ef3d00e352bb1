"""What `shard()` adds to the model and to the modules of its units: a class, with a few methods.

Note [The model's class]
They become instances of a subclass of their class, with the same name, as `fully_shard` does it
too: ``isinstance`` holds, and the user's class stays as it is. Among its bases are FSDPModule, ours
and torch's. ``type(model)(...)`` makes an instance of the user's class, and so do copies; what is
sharded gets its class again.

Note [Copies]
The modules are copied as ever, by `copy.deepcopy`. Before that every parameter gets its copy, in a
unit that watches nothing yet, and is put into ``memo``, so whatever refers to a parameter refers to
the copy afterwards. When the modules are there, the units take their places in them. Gradients,
hooks on parameters and an open accumulation window are not copied, as torch does not.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from inspect import getattr_static
from typing import Any

import torch
import xxhash
from torch import nn

from shardwise.comm.collectives import Comm, make_comm
from shardwise.engine.agreement import agree
from shardwise.engine.hooks import (
    forget_hooks,
    forget_load_check,
    register_hooks,
    register_load_check,
    register_wrappers,
)
from shardwise.engine.module_methods import FSDPModule
from shardwise.engine.module_state import (
    ModuleState,
    forget_notes,
    note_managed,
    note_state,
    noted_state,
)
from shardwise.engine.runtime import Engine
from shardwise.engine.seams import attach_steppers
from shardwise.errors import ConfigError, StateError
from shardwise.tensor.plain_state import owner_of
from shardwise.trace import FullParamLedger
from shardwise.unit.encodings import OwnGather
from shardwise.unit.param import AsShardTensor, ShardedParam
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Unit


def compare_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "", *_: Any
) -> None:
    """Compare what ranks are about to load into a sharded model, or into a part of one.

    It is torch's hook before ``load_state_dict``, of all modules; the outermost one compares.

    **Cost** a digest of whole tensors, at the speed of memory, and an exchange of 16 bytes. Sharded
    values are each rank's own, so only their names are compared.

    **Raises** ConfigError on all ranks, before anything is written, naming the first difference.
    """
    units = _units_of(module)
    engine = units[0].scheduler if units else None
    root = engine.units[0] if isinstance(engine, Engine) else units[0] if units else None
    if root is None or (prefix and module not in root.modules):
        return
    comm = root.comm
    is_gathered = isinstance(engine, Engine) and engine.suspended
    if comm.axes.num_ranks == 1 or is_gathered:
        return
    apart = {
        id(param.sharded)
        for unit in units
        for param in unit.params
        if unit.comm.axes.mesh != comm.axes.mesh
    }
    facts = []
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        told = "of this rank's own" if id(param) in apart else _describe_value(value)
        facts.append(f"'{prefix}{name}' {told}")
    what = "load_state_dict()"
    agree(comm.control, facts, what, "Load the same file on every rank; nothing was changed")


def _units_of(module: nn.Module) -> list[Unit]:
    """Return the units of a module and of those inside of it; else the one that it is a part of."""
    states = (noted_state(inner) for inner in module.modules())
    units = {id(unit): unit for state in states if state is not None for unit in state.units}
    if not units:
        owners = (owner_of(param) for param in module.parameters())
        units = {id(o.unit): o.unit for o in owners if isinstance(o, ShardedParam)}
    return list(units.values())


def _describe_value(value: Any) -> str:
    """Return a whole tensor's shape, dtype and digest; of others only the class."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta:
        return "missing" if value is None else type(value).__name__
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    digest = xxhash.xxh3_64_hexdigest(data.numpy())
    return f"{tuple(value.shape)} {value.dtype}, digest {digest}"


Memo = dict[int, Any]


def copy_engine(engine: Engine, memo: Memo) -> tuple[Engine, list[Unit]]:
    """Copy the units with their slices; every rank calls it.

    **Cost** the memory of the slices again; one small broadcast, one gloo group.
    """
    if engine.is_running():
        raise StateError(
            "copy.deepcopy of a sharded model inside a forward or backward pass: copy it between "
            "two passes"
        )
    engine.conditions.check_usable("copy.deepcopy: ")
    engine.finish_steps()
    comms = {id(comm): make_comm(comm.axes, comm.device) for comm in engine.comms}
    ledger = FullParamLedger()
    made = Engine(engine.config, comms[id(engine.comm)], ledger)
    memo[id(engine)] = made
    units = [_copy_unit(u, comms[id(u.comm)], made, ledger, memo) for u in engine.units]
    return made, units


def _copy_unit(unit: Unit, comm: Comm, engine: Engine, ledger: FullParamLedger, memo: Memo) -> Unit:
    made = Unit(
        unit.name,
        unit.index,
        unit.modules,
        comm,
        engine,
        unit.settings,
        unit.precision,
        unit.sums,
        home=None if unit.home is None else unit.home.over(comm.time),
    )
    storages: dict[int, Storage] = {}
    for storage in unit.storages:
        storages[id(storage)] = _copy_storage(storage, made, ledger)
    for param in unit.params:
        cut = param.cut.over(comm)
        trains = param.sharded.requires_grad
        form, dim = AsShardTensor(cut), param.dim
        copied = ShardedParam(made, param.uses, form, param.shape, trains, cut=cut, dim=dim)
        if isinstance(param.encoding, OwnGather):
            form.place_apart(copied, _copy_chunk(param))
            copied.lie_apart(param.encoding.again())
            copied.index = param.index
        else:
            copied.lie_in(storages[id(param.storage)], param.index)
        copied.keep_notes({k: v for k, v in vars(param.sharded).items() if not k.startswith("_")})
        made.params.append(copied)
        memo[id(param.sharded)] = copied.sharded
    known = {id(param): copied for param, copied in zip(unit.params, made.params, strict=True)}
    for rows in unit.summed_apart:
        of_copies = tuple(known[id(param)] for param in rows.params)
        made.summed_apart.append(replace(rows, params=of_copies))
    made.lay_out(list(storages.values()))
    for storage in made.storages:  # only now: the full parameters are views
        storage.free()
    return made


@torch.no_grad()
def _copy_chunk(param: ShardedParam) -> torch.Tensor:
    """Copy this rank's part of a parameter that lies in no storage, with its padding."""
    local = param.sharded._local_tensor
    copied: torch.Tensor = local.new_zeros(param.padded_size).narrow(0, 0, local.shape[0])
    return copied.copy_(local)


@torch.no_grad()
def _copy_storage(storage: Storage, unit: Unit, ledger: FullParamLedger) -> Storage:
    dtypes = storage.master.dtype, storage.full.dtype
    stage, home = unit.settings.stage, unit.home
    where = storage.full.device, ledger, home
    made = Storage(storage.layout, storage.rank, stage, dtypes, *where, storage.coding)
    made.master.copy_(storage.master)
    return made


def place_units(units: list[Unit], memo: Memo) -> None:
    """Let copied units take their places in the copied modules."""
    for unit in units:
        unit.modules = tuple(memo[id(module)] for module in unit.modules)
        params, unit.params = unit.params, []
        for param in params:
            param.uses = tuple(replace(use, module=memo[id(use.module)]) for use in param.uses)
            unit.add(param)


def forget_engine(model: nn.Module) -> None:
    """Take from a copied model what watches it."""
    for module in model.modules():
        forget_hooks(module)


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
