"""State of a ``fully_shard`` call on its modules: its units and their engine.

Note [The engine comes with the first forward pass]
Calls come one by one, from the inside out. So the root is known only when a module runs outside all
others. All units below the root then get one engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state, _insert_module_state
from torch.distributed.utils import _apply_to_tensors, _to_kwargs

from shardwise import __version__
from shardwise.comm.control import exchange_any
from shardwise.config import ShardConfig
from shardwise.engine.agreement import agree
from shardwise.engine.backward import EngineRules
from shardwise.engine.hooks import register_hooks, register_state_dict_hooks, register_wrappers
from shardwise.engine.model import note_state
from shardwise.engine.runtime import Engine
from shardwise.engine.seams import attach_steppers
from shardwise.errors import ConfigError, StateError
from shardwise.homes import Offload
from shardwise.interop.fsdp2.units import Asked, adopt, check_device, tie_free
from shardwise.layout.placements import local_of
from shardwise.layout.units import ParamUse
from shardwise.names import list_names
from shardwise.surface.methods import FSDPModule, make_subclass
from shardwise.surface.state import HookedModule, ModuleState
from shardwise.surface.wrappers import refuse_wrappers
from shardwise.tensor.inner import plain_parts
from shardwise.trace import FullParamLedger
from shardwise.unit.materialize import is_unwritten, poison
from shardwise.unit.states import ParamState
from shardwise.unit.unit import Unit

_ACTIVATIONS = Offload(activations="cpu")


_RULES = EngineRules(
    units_are_independent=True,
    owns_all=False,  # `ignored_params`
    allows_jvp=True,
    where_full="on a copy of the model that is not sharded",
    where_stays="after model.set_reshard_after_backward(False), or on a copy that is not sharded",
)


def _make_engine(states: "Sequence[State]") -> Engine:
    """Return the engine of all units below one root, whose state is the first."""
    units = [unit for state in states for unit in state.units]
    stage = units[0].settings.stage
    config = ShardConfig(
        stage,
        "rows",
        units[0].precision,
        stage.reduce_every,
        bucket_bytes=0,
        reduces_in_flight=max(state.max_in_flight for state in states),
        offload=_ACTIVATIONS if any(s.asked.moves_activations for s in states) else None,
    )
    engine = Engine(config, units[0].comm, FullParamLedger(), _RULES)
    engine.all_states = states
    for index, unit in enumerate(units):
        unit.index, unit.engine = index, engine
        for param in unit.params:
            param.watch()
        for storage in unit.storages:
            storage.copy.count_in(engine.ledger)
    engine.take_units(units, order=())
    attach_steppers(units)
    for state in states:
        state.engine, state._ledger = engine, engine.ledger
    return engine


def _check_written(engine: Engine) -> None:
    """Check that all parameters and buffers were written since `to_empty`; all ranks call it.

    **Raises** ConfigError on all ranks, with their names.
    """
    model = engine.all_states[0].modules[0]
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [
        name
        for name, tensor in named
        if any(map(is_unwritten, plain_parts(local_of(tensor)).values()))
    ]
    own = left and (
        f"rank {dist.get_rank()}: nothing has written {list_names(left)} since to_empty(): "
        "load it, or let reset_parameters() or your own initialisation write all of it"
    )
    errors = exchange_any(engine.comm.control, own.encode() if own else b"")
    if any(errors):
        raise ConfigError(own or next(filter(None, errors)).decode())
    for state in engine.all_states:
        state.is_emptied = False


def _facts(engine: Engine) -> Iterator[str]:
    """Yield the facts that must agree on all ranks of the model's mesh."""
    yield f"shardwise {__version__}, torch {torch.__version__}"
    for unit in engine.rank_checks.units:
        frees = unit.settings.stage.frees_after_forward
        yield f"unit '{unit.name or '(root)'}': {unit.precision}, frees after forward: {frees}"
        for param in unit.params:
            kind = "trainable" if param.sharded.requires_grad else "frozen"
            yield f"parameter '{param.name}' {param.shape} {param.sharded.dtype}, {kind}"


class State(ModuleState):
    """The units of one call: one, or one per mesh of ``shard_placement_fn``."""

    def __init__(self) -> None:
        super().__init__()
        self._ledger = FullParamLedger()
        self._is_ready = False
        self.is_emptied = False  # True after `to_empty`, until the values are checked
        self._has_agreed = False  # at the root: its settings are those of the other ranks

    def attach(self, modules: tuple[nn.Module, ...], units: list[Unit], asked: Asked) -> None:
        """Store the units and register hooks on the modules."""
        refuse_wrappers()
        self.modules, self.units, self.asked = modules, units, asked
        self.adopt()
        for module in modules:
            _insert_module_state(module, self)
            note_state(module, self)
        for module in modules:
            register_hooks(self, HookedModule(module))
        owners = {use.module for unit in units for param in unit.params for use in param.uses}
        for owner in owners:
            register_state_dict_hooks(owner, self.reshard, self.adopt)

    def start_unshard(self) -> Sequence[Unit]:
        """Start gathering; return the units to wait for."""
        self.make_ready()
        return super().start_unshard()

    def free_after_forward(self, frees: bool) -> None:
        """Free full parameters after forward, also the root's, or keep them for backward."""
        super().free_after_forward(frees)
        self.asked = replace(self.asked, frees_unless_root=False)

    def adopt(self) -> None:
        """Adopt the modules' parameters; they are checked again before the next gather.

        Do nothing inside `gathered`, while the modules hold whole parameters.
        """
        if self.suspended:
            return
        self._is_ready = False
        for unit in self.units:
            adopt(unit, self.asked, self._ledger)

    def make_ready(self) -> None:
        """Adopt the modules' parameters and check them, if that was not done."""
        if self._is_ready:
            return
        for unit in self.units:
            if unit.gather.state is not ParamState.FULL:
                adopt(unit, self.asked, self._ledger)
            check_device(unit)
        self._is_ready = True

    # -- the root
    def lazy_init(self) -> Engine:
        """Return the engine with this call's modules as the root; make it on the first call."""
        if self.engine is not None:
            return self.engine
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        states = self._states_below()
        if self.asked.frees_unless_root:
            self.change_stage(frees_after_forward=False)
        tie_free(param for state in states for unit in state.units for param in unit.params)
        for state in states:
            state.make_ready()
        engine = _make_engine(states)
        register_wrappers(engine, engine.units, self, HookedModule(self.modules[0]))
        return engine

    def _states_below(self) -> list["State"]:
        """Return the states of the module tree, this one first; name units and parameters."""
        found: dict[int, State] = {}
        names: dict[int, str] = {}
        for name, module in self.modules[0].named_modules():
            names[id(module)] = name
            state = state_of(module)
            if state is None:
                continue
            if state is not self and state.engine is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires "
                    "running forward through the root module first"
                )
            found.setdefault(id(state), state)
        for state in found.values():
            known = [names[id(m)] for m in state.modules if id(m) in names]
            for unit in state.units:
                unit.name = ", ".join(known)
                for param in unit.params:
                    param.uses = tuple(_named(use, names) for use in param.uses)
        return list(found.values())

    def finish_pending_work(self, what: str) -> None:
        """Put the shards in the modules, and adopt parameters that have replaced them.

        **Raises** StateError inside a pass.
        """
        if self.engine is not None and self.engine.is_running():
            raise StateError(
                f"{what} inside a forward or backward pass: call it between two passes"
            )
        self.reshard()
        self.adopt()

    def check_pass(self) -> None:
        """Check what a pass through this root needs, before its first gather; all ranks call it.

        The first pass compares the settings of the ranks. **Raises** ConfigError on all ranks.
        """
        engine = self.lazy_init()
        states = engine.all_states
        for state in states:
            state.make_ready()
        if any(state.is_emptied for state in states):
            _check_written(engine)
        if not self._has_agreed:
            agree(engine.comm.control, list(_facts(engine)), "fully_shard()")
            self._has_agreed = True

    # -- a forward pass of one of the modules (hooks.Watcher)
    def before_forward(
        self, hooked: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Unshard the units; return the arguments on the compute device and in its dtype."""
        engine = self.lazy_init()
        if not engine.is_running():
            engine.all_states[0].check_pass()
            if self.device.type != "cpu" and (args or kwargs):
                moved, moved_kwargs = _to_kwargs(args, kwargs, self.device, False)
                args, kwargs = moved[0], moved_kwargs[0]
        if len(self.modules) > 1 and not self.awaited:
            self.awaited.update(self.modules)
        mp = self.asked.mp
        if mp.cast_forward_inputs and mp.param_dtype is not None:
            args, kwargs = _cast(args, mp.param_dtype), _cast(kwargs, mp.param_dtype)
        for unit in self.units:
            args, kwargs = engine.before_forward(unit, args, kwargs)
        return args, kwargs

    def after_forward(self, hooked: HookedModule, output: Any) -> Any:
        """Hook the output for backward, free parameters; return it in ``output_dtype``."""
        engine = self.engine
        if engine is None:
            return None
        self.awaited.discard(hooked.module)
        goes_on = bool(self.awaited)
        for unit in reversed(self.units):
            engine.after_forward(unit, output, goes_on=goes_on)
        if not engine.is_running():
            for state in engine.all_states:
                state.awaited.clear()
        dtype = self.asked.mp.output_dtype
        return output if dtype is None or output is None else _cast(output, dtype)


def state_of(module: nn.Module) -> State | None:
    """Return a module's state, or None."""
    found = _get_module_state(module)
    return found if isinstance(found, State) else None


def _named(use: ParamUse, modules: Mapping[int, str]) -> ParamUse:
    """Return a use with its name below the root."""
    path = modules.get(id(use.module), "")
    return replace(use, name=f"{path}.{use.attribute}" if path else use.attribute)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, value)  # dataclasses and outputs of transformers too


def _refuse_deepcopy(self: Any, memo: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


@cache
def sharded_class(cls: Any) -> Any:
    """Return ``FSDP<Cls>``, a subclass of FSDPModule and ``cls``; cached.

    Its ``to_empty`` poisons memory, so that the first forward pass finds unwritten tensors.
    """

    def to_empty(
        self: Any, *, device: torch.device | str | int | None, recurse: bool = True
    ) -> Any:
        cls.to_empty(self, device=device, recurse=recurse)
        for tensor in chain(self.parameters(recurse), self.buffers(recurse)):
            for part in plain_parts(local_of(tensor)).values():
                poison(part)
        self._get_fsdp_state().is_emptied = True
        return self

    members = {"__deepcopy__": _refuse_deepcopy, "to_empty": to_empty}
    return make_subclass(cls, FSDPModule, f"FSDP{cls.__name__}", members)
