"""The engine of one sharded model: its parts, and its actions before and after a unit's forward.

`hooks` calls these actions. `schedule` decides which units are gathered, freed and reduced.
`backward` has the actions of backward passes.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Comm
from shardwise.comm.control import Control, control_over
from shardwise.comm.pending import CollectiveId
from shardwise.config import ShardConfig
from shardwise.engine.backward import SHARD_RULES, Backward, EngineRules, log_event
from shardwise.engine.misuse import (
    refuse_foreign_params,
    refuse_transform,
    written_in_forward,
    written_while_full,
)
from shardwise.engine.passes import Passes, in_backward
from shardwise.engine.rank_checks import RankChecks, is_power_of_two
from shardwise.engine.reductions import Reductions
from shardwise.engine.schedule import Schedule
from shardwise.engine.seams import activations_of
from shardwise.engine.status import ModelStatus
from shardwise.engine.tree import cast_floating
from shardwise.errors import CollectiveError, ConfigError, StateError
from shardwise.tensor.aliases import Shared
from shardwise.trace import FullParamLedger
from shardwise.unit.param import ShardedParam
from shardwise.unit.states import GradState
from shardwise.unit.steps import finish_all
from shardwise.unit.unit import Unit

_RANKS = CollectiveId("gather", "(ranks)", 0)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # of a module: args, kwargs


class Engine:
    """Runs the units of one model, and holds the objects that they share.

    Create it, then build the units with it, then call `take_units`: units hold their engine.
    ``all_states``: the sharding state of each module that has units (`surface.state`), root first.
    ``stage_engines``: the engines of this rank's pipeline stages, this one among them.
    """

    def __init__(
        self,
        config: ShardConfig,
        comm: Comm,
        ledger: FullParamLedger,
        rules: EngineRules = SHARD_RULES,
    ) -> None:
        self.config = config
        self.rules = rules
        self.comm = comm
        self.ledger = ledger
        self.status = ModelStatus()
        self.all_states: Sequence[Any] = ()
        self.stage_engines: Sequence[Engine] = (self,)
        self.activations = activations_of(
            config.offload,
            comm,
            lambda: (storage.full for unit in self.units for storage in unit.storages),
        )
        self.backward = Backward(comm, rules, self.status, self.activations)
        self._num_calls = 0  # recorded calls of the model
        self._control_of_all: Control | None = None  # until `all_ranks` is read
        self._known_ranks: list[int] | None = None  # until the ranks have exchanged them
        self.units: list[Unit] = []  # the root first

    def take_units(self, units: list[Unit], order: Sequence[int] | None = None) -> None:
        """Set all units, the root first; ``order`` as in `Schedule.take_units`."""
        config = self.config
        self.units = units
        self.comms = list({id(c): c for c in (self.comm, *(u.comm for u in units))}.values())
        self.passes.take_units(units)
        self.rank_checks = RankChecks(self.comm, units, self.status.refuse)
        compare = self.rank_checks.before_reduction
        self.reductions = Reductions(units, config.bucket_bytes, config.reduces_in_flight, compare)
        shared = self.comm.axes.num_ranks > 1 and not self.rules.units_are_independent
        self.schedule = Schedule(config.prefetch_bytes, self.reductions, has_peers=shared)
        self.schedule.take_units(units, order)
        self.backward.take_units(units, self.schedule, self.reductions, self.rank_checks)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise StateError: a copy would share process groups and hooks with the original."""
        raise StateError(
            "copy.deepcopy of what belongs to a sharded model: copy the model itself, the one that "
            "was given to shard()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise StateError: a pickled model would hold one rank's slices."""
        raise StateError(
            "pickling a sharded model: each rank holds only slices. Pickle model.state_dict() "
            "inside `with shardwise.gathered(model):`"
        )

    @property
    def passes(self) -> Passes:
        """The open calls of the units, forward and backward."""
        return self.backward.passes

    @property
    def suspended(self) -> bool:
        """Tell whether the engine ignores forward passes now."""
        return self.status.is_suspended

    @property
    def all_ranks(self) -> Control:
        """The control group of all ranks that hold a part of the model.

        All ranks make the first call together, as it has collectives: see `Comm.control`.
        """
        if self._control_of_all is None:
            is_one_mesh = self._ranks_beyond_mesh() is None
            self._control_of_all = self.comm.control if is_one_mesh else self.open_control()
        return self._control_of_all

    def open_control(self) -> Control:
        """Open a control group of the same ranks for another thread; all ranks call it together."""
        return control_over(self.comm.axes, self._ranks_beyond_mesh())

    def _ranks_beyond_mesh(self) -> list[int] | None:
        """Return all ranks that hold a part of the model, or None if the mesh has them all.

        Ranks exchange the ranks that they know, along each axis, twice: another stage may have
        tensor parallelism even if this one does not.

        **Cost** two collectives per axis, in the first call.
        """
        if self._known_ranks is None:
            self._known_ranks = self._exchange_ranks()
        return self._known_ranks or None

    def _exchange_ranks(self) -> list[int]:
        """Return the ranks of `_ranks_beyond_mesh`; an empty list if the mesh has them all."""
        units = [unit for engine in self.stage_engines for unit in engine.units]
        cuts = [p.cut for unit in units for p in unit.params if p.has_cut]
        axes = {id(axis.group): axis for cut in cuts for axis in cut.outer_axes}
        if self.comm.axes.stages is not None:
            axes[id(self.comm.axes.stages.group)] = self.comm.axes.stages
        mesh_ranks = self.comm.axes.mesh.mesh.flatten()
        if not axes:
            return []
        known = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device=self.comm.device)
        known[mesh_ranks] = 1
        for axis in (*axes.values(), *axes.values()):
            known = self.comm.max(known, axis, _RANKS)
        ranks: list[int] = known.nonzero().flatten().tolist()
        return [] if len(ranks) == mesh_ranks.numel() else ranks

    @property
    def is_last_micro_batch(self) -> bool:
        """Tell whether the optimizer's step follows the current micro-batch."""
        return self.backward.is_last_micro_batch

    @property
    def is_in_window(self) -> bool:
        """Tell whether an accumulation window is open."""
        if self.status.is_last_micro_batch is False:
            return True
        if not self.backward.window_open:
            return False
        unread = (GradState.PARTIAL, GradState.REDUCING)
        if any(unit.grads.state in unread for unit in self.units):
            return True
        return any(param.grad is not None for unit in self.units for param in unit.params)

    def finish_pending_work(self, what: str) -> None:
        """Finish background steps and writes, and unpin all units, before the call ``what``.

        The modules then hold only shards. **Raises** ShardError if a background step has failed or
        if `unpin` finds a written full parameter; ConfigError, with the parameter, if its shard is
        not a range of elements.
        """
        for state in self.all_states:
            state.finish_pending_work(what)
        self.finish_steps()
        for unit in self.units:
            finish_all(unit.writes)
        self.unpin(what, self.units)
        for param in (param for unit in self.units for param in unit.params):
            if not param.has_cut:
                kind = "still on the meta device"
                if not param.encoding.is_in_storage:
                    kind = "of a class that defines its own gather, and not cut along dim 0 alone"
                raise ConfigError(
                    f"{what}: parameter '{param.name}' is {kind}; use "
                    "torch.distributed.checkpoint for such a model"
                )

    def unpin(self, what: str, units: Sequence[Unit]) -> None:
        """End `unshard()` for the units. **Raises** ShardError if a full parameter was written."""
        written = [text for unit in units for text in unit.unpin()]
        if written:
            raise written_while_full(what, written[0])

    # -- forward
    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Gather the unit, start gathering the next ones, bind the full parameters."""
        self.status.micro_batches.wait_for_others(unit)
        self.backward.drop_failed_pass()
        records = torch.is_grad_enabled()
        if not self.passes.stack and not in_backward():
            log_event("root_pre_forward")
            self._check_call(unit, records)
            self.comm.tracer.see_inputs(args, kwargs)
        log_event("pre_forward", unit)
        self.backward.optional.visit_forward(unit)
        call = self.passes.enter(unit)
        self.backward.optional.begin_recompute(call)
        call.backward_is_next = self.status.micro_batches.gather(self.schedule, call)
        unit.comm.tracer.mark_begin("recompute" if call.in_backward else "forward", unit.name)
        unit.slots.bind()
        dtype = unit.precision.param if unit.precision.cast_inputs else None
        if dtype is not None:
            args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
        if records and not call.recomputes:
            self.passes.record(call)
            self.backward.optional.note_parent(call)
            self.passes.watch_inputs(call, (args, kwargs))
        elif not call.recomputes:
            self.backward.optional.note_unrecorded(call)
        return args, kwargs

    def _check_call(self, unit: Unit, records: bool) -> None:
        """Raise for a call that would be silently wrong, before the first gather."""
        frees = any(unit.settings.stage.frees_after_forward for unit in self.units)
        refuse_transform(self._allows_transform, frees and records, self.rules.where_full)
        self.status.check_usable("")
        for comm in self.comms:
            comm.refuse_failed("a forward pass")
        self.status.check_assigned()
        if not records:
            return
        self.status.check_before_pass()
        self.rank_checks.begin_forward()
        self._num_calls += 1
        if is_power_of_two(self._num_calls):  # a walk over all parameters costs a millisecond
            shows_full = any(held.slots.is_pinned or held.shows_full for held in self.units)
            if self.rules.owns_all and not shows_full:
                refuse_foreign_params(unit.name, unit.module)

    def _allows_transform(self, kind: object) -> bool:
        """Tell whether a forward pass may run inside this torch.func transform."""
        kinds = torch._C._functorch.TransformType
        if kind == kinds.Jvp and self.rules.allows_jvp:
            # Its backward does not run our hooks, so nothing may be freed.
            return not any(unit.settings.stage.frees_after_forward for unit in self.units)
        return bool(kind == kinds.Vmap)

    def after_forward(self, unit: Unit, output: object, *, goes_on: bool = False) -> None:
        """Unbind the full parameters, register backward hooks on the outputs, free the unit.

        It also runs after a forward pass that raised, with ``output`` None. ``goes_on``: another
        module of the same unit is expected to run, so the unit stays full until the root ends.
        Nothing happens for a call that `before_forward` has not begun.
        """
        stack = self.passes.stack
        if not stack or stack[-1].unit is not unit:
            return
        log_event("post_forward", unit)
        if output is not None:
            self.backward.optional.visit_forward(None)
        call = self.passes.leave()
        unit.comm.tracer.mark_end("recompute" if call.in_backward else "forward", unit.name)
        written = unit.slots.unbind()
        if output is not None and written:
            if any(param.holds_codes for param in unit.params):
                self.status.refuse(written[0])  # the codes' statistics have changed too
            raise written_in_forward(written[0])
        if output is None and self._others_may_have_stopped():
            return  # other gathers may never end
        others_follow = output is not None and self.status.micro_batches.others_follow
        if goes_on and unit.settings.stage.frees_after_forward:
            self.schedule.mark_prefetched(unit)
        with (
            nullcontext()
            if unit.gather.secondary is None
            else unit.gather.secondary.keeping_parts()
        ):
            self.schedule.after_forward(
                unit,
                in_backward=call.in_backward,
                expects_backward=call.is_recorded and self.passes.watch_outputs(call, output),
                backward_is_next=call.backward_is_next,
                still_runs=goes_on or others_follow or any(c.unit is unit for c in stack),
                at_root=not stack and not others_follow,
            )

    def _others_may_have_stopped(self) -> bool:
        """Tell whether the exception in flight is one that other ranks raise too."""
        failed = isinstance(sys.exc_info()[1], CollectiveError)
        return failed or self.status.unusable is not None

    # -- called by parameters (unit.ParamEngine)
    def is_running(self) -> bool:
        """Tell whether a forward pass runs, or a backward pass, which may recompute one."""
        return bool(self.passes.stack) or (in_backward() and not self.backward.runs_grad_hooks)

    def use_outside(self, unit: Unit) -> None:
        """Gather a unit whose parameter is used outside its module; keep it until backward ends.

        A checkpoint *inside* a unit's forward (as in transformers' layers) recomputes the forward
        in backward without hooks. The unit is full then, and is freed after its backward.
        """
        self.schedule.start_unshard(unit)
        unit.finish_unshard()
        if not self.passes.use_outside(unit):
            return
        if torch.is_grad_enabled():
            self.schedule.keep_full(unit)
        elif unit is not self.units[0]:
            self.schedule.mark_prefetched(unit)

    def watch_use(self, unit: Unit, leaf: torch.Tensor) -> torch.Tensor:
        """Return the leaf for one use outside its module, watched while its graph lives."""
        return self.passes.watch_use(unit, leaf)

    def note_assigned(self, param: ShardedParam, shared: Shared | None) -> None:
        """Note an assignment to ``p.data``, until the next forward pass."""
        self.status.note_assigned(param, shared)

    def watch_grad(self, unit: Unit, leaf: torch.Tensor) -> None:
        """Register a hook that runs when autograd has written a full parameter's gradient."""
        self.passes.watch_grad(unit, leaf)

    def finish_reductions(self, unit: Unit | None = None) -> None:
        """Complete the reductions in flight, up to one unit's or all, and set ``p.grad``."""
        self.reductions.finish(unit)

    # -- between passes
    def finish_steps(self) -> None:
        """Wait until background steps of all units end. **Raises** ShardError if one failed."""
        for unit in self.units:
            unit.finish_steps()

    def reset(self) -> None:
        """Forget a pass that raised, with its gradients."""
        self.backward.drop_pass()
        for state in self.all_states:
            state.awaited.clear()
