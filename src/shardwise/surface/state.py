"""The state on a sharded module: its units, and the engine that runs them.

`methods` changes the units' settings through it. Names with an underscore are FSDP2's, with
the same meaning: torch's pipelining, ``register_fsdp_forward_method``, ``share_comm_ctx`` and other
tools read them. Names that need the engine return None until the engine exists.

Note [Pipeline schedules divide gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After its backward passes a pipeline schedule divides every ``p.grad`` by its number of
micro-batches. With several schedules before one step, the second one divides the gradients of the
first again (pytorch#196641). So inside ``accumulate(..., last=False)`` gradients stay on the rank,
undivided, at any stage. The last schedule divides them all once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _State

from shardwise.engine.runtime import Engine, Inputs
from shardwise.errors import StateError
from shardwise.layout.placements import local_of
from shardwise.unit.param import ShardedParam
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit


def end_schedule(engine: Engine) -> None:
    """Reduce the gradients of a schedule's micro-batches, or keep them inside a window.

    **Raises** StateError if ``p.grad`` already has gradients of an earlier schedule.
    """
    params = [param for unit in engine.units for param in unit.params]
    is_last = engine.status.is_last_micro_batch is not False
    if is_last and any(param.gradient.has_partial for param in params):
        engine.finish_reductions()
        before = next((p.name for p in params if _has_grad(p)), None)
        if before is not None:
            raise StateError(
                f"schedule.step(): '{before}' has a gradient of an earlier step of a schedule, "
                "which this one would divide by its number of micro-batches again. Call "
                "optimizer.zero_grad() before it, or accumulate over schedules: "
                "`with shardwise.accumulate(stages, last=False): schedule.step(...)` for all but "
                "the last before the optimizer's step"
            )
    end_passes(engine)


def end_passes(engine: Engine) -> None:
    """Reduce the gradients that backward passes have kept; keep them if the window continues."""
    if engine.status.is_last_micro_batch is False:
        _keep(engine)
    else:
        _reduce(engine, last=True)


def _reduce(engine: Engine, *, last: bool) -> None:
    """Reduce all gradients on this rank; free full parameters."""
    for unit in engine.units:
        if unit.grads.state is GradState.EMPTY and any(s.gradient.has_partial for s in unit.params):
            unit.grads.enter(GradState.PARTIAL)
        if not unit.settings.stays_full:
            unit.unpin()
    with engine.status.micro_batch(last=last):
        # As in any pass, units take part that have gradients only on other ranks.
        engine.backward.on_pass_begin([])
        engine.backward.on_pass_end()


def _has_grad(param: ShardedParam) -> bool:
    """Tell whether ``p.grad`` is set and not all zeros (``zero_grad(set_to_none=False)``)."""
    return param.grad is not None and bool(local_of(param.grad).count_nonzero())


def _keep(engine: Engine) -> None:
    """Keep the sums on this rank; free full parameters."""
    for unit in engine.units:
        unit.settings = replace(unit.settings, keeps_grads=True)
    _reduce(engine, last=False)
    for unit in engine.units:
        unit.settings = replace(unit.settings, keeps_grads=False)
        if unit.grads.state is GradState.PARTIAL:
            unit.grads.accumulate_partials()
            for param in unit.params:
                param.gradient.ignores_scale = True


class HookedModule:
    """One module with units, the object that its hooks pass to `ModuleState`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class ModuleState(_State):
    """The units of some modules: one unit, or one per mesh of their parameters."""

    _comm_ctx: object = None  # share_comm_ctx sets it; there are no streams to share
    _fsdp_param_groups: tuple[object, ...] = ()  # torch's pipelining ends their passes one by one
    _fsdp_param_group: object = None

    def __init__(self) -> None:
        super().__init__()
        self.modules: tuple[nn.Module, ...] = ()
        self.units: list[Unit] = []
        self.engine: Engine | None = None  # until `lazy_init`
        self.frees = True  # False: the stage keeps full parameters
        self.max_in_flight = 1
        self.awaited: set[nn.Module] = set()  # modules of a pass that have not run forward yet

    def __deepcopy__(self, memo: object) -> "ModuleState":
        """Return self; a copied sharded model gets new states afterwards."""
        return self

    @property
    def device(self) -> torch.device:
        """The device to compute on."""
        return self.units[0].comm.device

    @property
    def suspended(self) -> bool:
        """Tell whether the engine ignores forward passes now."""
        return self.engine is not None and self.engine.suspended

    def lazy_init(self) -> Engine:
        """Return the engine; a subclass may make it at the first call."""
        assert self.engine is not None
        return self.engine

    def adopt(self) -> None:
        """Read the parameters that the modules hold now; `shard()` has nothing to do."""

    def finish_pending_work(self, what: str) -> None:
        """Prepare the modules for ``what``, which reads the shards; `shard()` has nothing to do."""

    # -- full parameters
    def start_unshard(self) -> Sequence[Unit]:
        """Start gathering; return the units to wait for."""
        for unit in self.units:
            unit.start_unshard()
        return self.units

    def reshard(self) -> None:
        """Put the sharded parameters into the modules."""
        for unit in self.units:
            unit.reshard()

    # -- settings
    def change(self, **changes: Any) -> None:
        """Replace fields of the units' settings."""
        for unit in self.units:
            unit.settings = replace(unit.settings, **changes)

    def change_stage(self, **changes: Any) -> None:
        """Replace fields of the stage in the units' settings."""
        for unit in self.units:
            stage = replace(unit.settings.stage, **changes)
            unit.settings = replace(unit.settings, stage=stage)

    def change_sums(self, **changes: Any) -> None:
        """Replace fields of the units' `sums`."""
        for unit in self.units:
            unit.grads.sum_settings = replace(unit.grads.sum_settings, **changes)

    def free_after_forward(self, frees: bool) -> None:
        """Free full parameters after forward, or keep them for backward."""
        self.change_stage(frees_after_forward=frees)
        for unit in self.units:
            unit.gather.secondary = None

    def allow_in_flight(self, num: int) -> None:
        """Limit the reductions in flight; the largest limit of any module counts."""
        self.max_in_flight = num
        if self.engine is not None:
            most = max(state.max_in_flight for state in self.engine.all_states)
            self.engine.reductions.allow_in_flight(most)

    # -- a forward pass (hooks.Watcher)
    def before_forward(
        self, _: HookedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Inputs:
        """Enter the units in order."""
        engine = self.lazy_init()
        for unit in self.units:
            args, kwargs = engine.before_forward(unit, args, kwargs)
        return args, kwargs

    def after_forward(self, _: HookedModule, output: object) -> object:
        """Leave the units in reverse order."""
        engine = self.lazy_init()
        for unit in reversed(self.units):
            engine.after_forward(unit, output)
        return None

    # -- names that torch reads
    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Inputs:
        inputs = args, kwargs
        return inputs if self.suspended else self.before_forward(HookedModule(module), *inputs)

    def _post_forward(self, module: nn.Module, args: object, output: object) -> object:
        result = None if self.suspended else self.after_forward(HookedModule(module), output)
        return output if result is None else result

    def _lazy_init(self) -> None:
        self.lazy_init()

    @property
    def _is_root(self) -> bool | None:
        return None if self.engine is None else self.engine.all_states[0] is self

    @property
    def _state_ctx(self) -> Engine:
        return self.lazy_init()

    def _root_post_backward_final_callback(self) -> None:
        end_schedule(self.lazy_init())
