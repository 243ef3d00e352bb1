"""The engine of one sharded model: its actions before and after each unit's forward and backward.

`passes` detects these moments. `schedule` decides which units are gathered, freed and reduced.
"""

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Comm
from shardwise.comm.control import Control, control_over
from shardwise.comm.pending import CollectiveId
from shardwise.config import ShardConfig
from shardwise.engine.calls import Call
from shardwise.engine.conditions import Conditions
from shardwise.engine.misuse import (
    graph_of_freed,
    graph_of_means,
    refuse_strangers,
    refuse_transform,
    warn_of_dropped_window,
    written_in_forward,
    written_while_full,
)
from shardwise.engine.optional import OptionalUnits
from shardwise.engine.passes import Passes, in_backward
from shardwise.engine.rank_checks import RankChecks
from shardwise.engine.reductions import Reductions
from shardwise.engine.schedule import Schedule
from shardwise.engine.seams import activations_of
from shardwise.engine.tree import cast_floating
from shardwise.errors import CollectiveError, ConfigError, StateError
from shardwise.tensor.background_step import finish_all
from shardwise.trace import FullParamLedger
from shardwise.unit.grad_hooks import any_grad_hooks, run_grad_hooks
from shardwise.unit.param import sum_as_they_come
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit

_RANKS = CollectiveId("gather", "(ranks)", 0)
_GATHERED = "inside `with shardwise.gathered(model):`"
_LOG = logging.getLogger("torch.distributed.fsdp.fully_shard")  # shown by TORCH_LOGS=+fsdp


@dataclass(frozen=True)
class CallRules:
    """The rules in which `shard()`, whose are the defaults, and `fully_shard` differ.

    ``each_unit_alone``: a unit's collectives start when it runs, in no order that units share, and
    its settings name the micro-batch in which it reduces. ``owns_all``: each trainable parameter
    must be in a unit. ``allows_jvp``: `torch.func.jvp` may run if nothing is freed. ``where_full``
    and ``where_stays`` end the errors for calls that need full parameters.
    """

    each_unit_alone: bool = False
    owns_all: bool = True
    allows_jvp: bool = False
    where_full: str = _GATHERED
    where_stays: str = _GATHERED


class Engine:
    """Runs the units of one model. `hooks` calls it in forward, `passes` in backward."""

    def __init__(
        self,
        config: ShardConfig,
        comm: Comm,
        ledger: FullParamLedger,
        rules: CallRules = CallRules(),
    ) -> None:
        self.config = config
        self.rules = rules
        self.comm = comm
        self.ledger = ledger
        self.conditions = Conditions()
        self.all_states: Sequence[Any] = ()  # of the modules with units
        self.mates: Sequence[Engine] = (self,)  # of all stages of this rank
        self.num_begun = 0  # backward passes, or windows, that began without gradients
        self.num_reduced = 0  # backward passes, or windows, with all gradients reduced
        self.window_open = False  # a micro-batch before the last one went through backward
        self.activations = activations_of(config.offload, comm, self._full_memory)
        self._passes = Passes(self, self.activations)
        self._runs_grad_hooks = False
        self._num_calls = 0
        self.take_units([])

    def _full_memory(self) -> Iterable[torch.Tensor]:
        return (storage.full for unit in self.units for storage in unit.storages)

    def take_units(self, units: list[Unit], order: Sequence[int] | None = None) -> None:
        """Take over all units, the root first; ``order`` as in `Schedule.take_units`."""
        config = self.config
        self.units = units
        self.comms = list({id(c): c for c in (self.comm, *(u.comm for u in units))}.values())
        self._passes.take_units(units)
        self.rank_checks = RankChecks(self.comm, units, self.conditions.refuse)
        compare = self.rank_checks.before_reduction
        self.reductions = Reductions(units, config.bucket_bytes, config.reduces_in_flight, compare)
        shared = self.comm.axes.num_ranks > 1 and not self.rules.each_unit_alone
        self._schedule = Schedule(config.prefetch_bytes, self.reductions, has_peers=shared)
        self._schedule.take_units(units, order)
        self.order = self._schedule.order
        self._shares_order = self._schedule.reduces_in_turn
        self._optional = OptionalUnits(units, self._schedule, self._passes)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raise StateError: a copy would share process groups and hooks with the original."""
        raise StateError(
            "copy.deepcopy of what belongs to a sharded model: copy the model itself, the one that "
            "was given to shard()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise StateError: a pickled model would hold one rank's slices."""
        raise StateError(
            "pickling a sharded model: each rank holds only slices. Pickle model.state_dict() "
            "inside `with shardwise.gathered(model):`"
        )

    @property
    def passes(self) -> Passes:
        """The running calls."""
        return self._passes

    @property
    def suspended(self) -> bool:
        """Tell whether the engine ignores forward passes now."""
        return self.conditions.is_suspended

    @cached_property
    def everyone(self) -> Control:
        """The control group of all ranks that hold a part of the model."""
        return self.comm.control if self._all_ranks is None else self.open_control()

    def open_control(self) -> Control:
        """Open such a control group for another thread; all ranks call it together."""
        return control_over(self.comm.axes, self._all_ranks)

    @cached_property
    def _all_ranks(self) -> list[int] | None:
        """All ranks that hold a part of the model, or None if the mesh has them all.

        Ranks exchange the ranks that they know, along each axis, twice: another stage may have
        tensor parallelism even if this one does not. **Cost** two collectives per axis.
        """
        units = [unit for mate in self.mates for unit in mate.units]
        cuts = [p.cut for unit in units for p in unit.params if p.has_cut]
        axes = {id(axis.group): axis for cut in cuts for axis in cut.own_axes}
        if self.comm.axes.stages is not None:
            axes[id(self.comm.axes.stages.group)] = self.comm.axes.stages
        own = self.comm.axes.mesh.mesh.flatten()
        if not axes:
            return None
        known = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device=self.comm.device)
        known[own] = 1
        for axis in (*axes.values(), *axes.values()):
            known = self.comm.max(known, axis, _RANKS)
        found: list[int] = known.nonzero().flatten().tolist()
        return None if len(found) == own.numel() else found

    @property
    def is_last_micro_batch(self) -> bool:
        """Tell whether the optimizer's step follows the current micro-batch."""
        is_last = self.conditions.is_last_micro_batch
        return not self.rules.each_unit_alone if is_last is None else is_last

    @property
    def is_in_window(self) -> bool:
        """Tell whether a window is open, or gradients await their sum over replicas."""
        if self.conditions.is_last_micro_batch is False:
            return True
        if any(unit.is_deferred for unit in self.units):
            return True
        params = (param for unit in self.units for param in unit.params)
        is_partial = any(unit.grad_state is GradState.PARTIAL for unit in self.units)
        return self.window_open and (is_partial or any(p.grad is not None for p in params))

    def rest(self, what: str) -> None:
        """Finish background steps and writes, and unpin all units, for ``what``.

        The modules then hold only shards. **Raises** ShardError if a background step has failed or
        if `unpin` finds a written full parameter; ConfigError, with the parameter, if its shard is
        not a range of elements.
        """
        for state in self.all_states:
            state.rest(what)
        self.finish_steps()
        for unit in self.units:
            finish_all(unit.writes)
        self.unpin(what, self.units)
        for param in (param for unit in self.units for param in unit.params):
            if not param.has_cut:
                kind = "on the meta device still"
                if not param.encoding.in_storage:
                    kind = "of a class that defines its own gather, and not cut along dim 0 alone"
                raise ConfigError(
                    f"{what}: parameter '{param.name}' is {kind}; use "
                    "torch.distributed.checkpoint for such a model"
                )

    def unpin(self, what: str, units: Sequence[Unit]) -> None:
        """End `unshard()` for the units. **Raises** ShardError if a full parameter was written."""
        written = [name for unit in units if (name := unit.unpin())]
        if written:
            raise written_while_full(what, written[0])

    # -- forward
    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the unit, start gathering the next ones, bind the full parameters."""
        self.conditions.rounds.arrive(unit)
        self.forget_cut_pass()
        records = torch.is_grad_enabled()
        if not self._passes.stack and not in_backward():
            log_event("root_pre_forward")
            self._check_call(unit, records)
            self.comm.tracer.see_inputs(args, kwargs)
        log_event("pre_forward", unit)
        self._optional.visit_forward(unit)
        call = self._passes.enter(unit)
        call.backward_is_next = self.conditions.rounds.visit(self._schedule, call)
        unit.comm.tracer.mark_begin("recompute" if call.in_backward else "forward", unit.name)
        unit.slots.bind()
        args, kwargs = self._cast(unit, args, kwargs)
        if records and not call.recomputes:
            self._optional.record(call)
            self._passes.watch_inputs(call, (args, kwargs))
        return args, kwargs

    def _check_call(self, unit: Unit, records: bool) -> None:
        """Raise for a call that would be silently wrong, before the first gather."""
        frees = any(unit.settings.stage.frees_after_forward for unit in self.units)
        refuse_transform(self._allows_transform, frees and records, self.rules.where_full)
        for comm in self.comms:
            comm.refuse_failed("a forward pass")
        self.conditions.check_usable("")
        if not records:
            return
        self.conditions.check_before_pass()
        self._num_calls += 1
        if not self._num_calls & (self._num_calls - 1):
            # only in calls 1, 2, 4, 8 ...: it costs a millisecond
            shows_full = any(each.is_pinned or each.shows_full for each in self.units)
            if self.rules.owns_all and not shows_full:
                refuse_strangers(unit.name, unit.module)

    def _allows_transform(self, kind: object) -> bool:
        """Tell whether a forward pass may run inside this torch.func transform."""
        kinds = torch._C._functorch.TransformType
        if kind == kinds.Jvp and self.rules.allows_jvp:  # its backward does not run our hooks
            return not any(unit.settings.stage.frees_after_forward for unit in self.units)
        return bool(kind == kinds.Vmap)

    def _cast(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        dtype = unit.precision.param
        if dtype is None or not unit.precision.cast_inputs:
            return args, kwargs
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def after_forward(self, unit: Unit, output: Any, *, goes_on: bool = False) -> None:
        """Unbind the full parameters, register backward hooks on the outputs, free the unit.

        It also runs after a forward pass that raised, with ``output`` None. ``goes_on``: another
        module of the same unit is expected to run, so the unit stays full until the root ends.
        """
        stack = self._passes.stack
        if not stack or stack[-1].unit is not unit:
            return
        log_event("post_forward", unit)
        if output is not None:
            self._optional.visit_forward(None)
        call = self._passes.leave()
        unit.comm.tracer.mark_end("recompute" if in_backward() else "forward", unit.name)
        written = unit.slots.unbind()
        if output is not None and written:
            raise written_in_forward(written)
        if output is None and isinstance(sys.exc_info()[1], CollectiveError):
            return  # other gathers may never end: their senders may have stopped too
        others_follow = output is not None and self.conditions.rounds.others_follow
        if goes_on and unit.settings.stage.frees_after_forward:
            self._schedule.note_ahead(unit)
        self._schedule.after_forward(
            unit,
            in_backward=in_backward(),
            expects_backward=call.is_recorded and self._passes.watch_outputs(call, output),
            backward_is_next=call.backward_is_next,
            still_runs=goes_on or others_follow or any(c.unit is unit for c in stack),
            at_root=not stack and not others_follow,
        )

    # -- called by parameters (unit.Scheduler)
    def is_running(self) -> bool:
        """Tell whether a forward pass runs, or a backward pass, which may recompute one."""
        return bool(self._passes.stack) or (in_backward() and not self._runs_grad_hooks)

    def use_outside(self, unit: Unit) -> None:
        """Gather a unit whose parameter is used outside its module; keep it until backward ends.

        A checkpoint *inside* a unit's forward (as in transformers' layers) recomputes the forward
        in backward without hooks. The unit is full then, and is freed after its backward.
        """
        self._schedule.start_unshard(unit)
        unit.finish_unshard()
        if not self._passes.use_outside(unit):
            return
        if torch.is_grad_enabled():
            self._schedule.hold(unit)
        elif unit is not self.units[0]:
            self._schedule.note_ahead(unit)

    def watch_grad(self, unit: Unit, leaf: torch.Tensor) -> None:
        """Register a hook that runs when autograd has written a full parameter's gradient."""
        self._passes.watch_grad(unit, leaf)

    def note_grad(self, unit: Unit, full: torch.Tensor) -> None:
        """Count a gradient that did not arrive through the layers' parameter."""
        self._passes.note_grad(unit, full)

    def expect_reduction(self, unit: Unit) -> None:
        """Count a gradient of the unit on some rank, to reduce it at the end of the pass."""
        self._passes.expect_reduction(unit)

    # -- events of a backward pass (passes.Listener)
    def on_pass(self, order: list[int]) -> None:
        """Begin a backward pass, after completing the reductions of the pass before."""
        self.conditions.rounds.check_backward()
        self.finish_reductions()
        in_turn = self._schedule.will_reduce_in_turn(self.conditions.is_last_micro_batch)
        self.rank_checks.begin_pass(compares=in_turn)
        self.num_begun += all(unit.grad_state is GradState.EMPTY for unit in self.units)
        self._schedule.begin_backward(order)

    def on_grad(self, unit: Unit, leaf: torch.Tensor) -> None:
        """Raise StateError for a parameter's gradient with a graph."""
        if torch.is_grad_enabled():
            raise graph_of_means(self.rules.where_full)
        sum_as_they_come(leaf)

    def on_reached(self, call: Call) -> None:
        """Raise StateError if create_graph=True needs freed parameters; visit skipped units."""
        if self._passes.creates_graph and call.unit.frees_in_backward:
            raise graph_of_freed(call.unit.name, self.rules.where_stays)
        if call.parent is not None:
            self._optional.visit_backward(call.parent(), call)

    def on_backward(self, unit: Unit, is_first: bool) -> None:
        """Gather the unit for its backward; start gathering the next ones."""
        if is_first:
            log_event("pre_backward", unit)
        self._schedule.before_backward(unit)
        if is_first:
            unit.comm.tracer.mark_begin("backward", unit.name)

    def on_call_over(self, call: Call) -> None:
        """Visit the units that were skipped inside the call and not visited yet."""
        self._optional.after_backward(call)

    def on_unit_over(self, unit: Unit) -> None:
        """Reduce the unit's gradients, or keep them until the window's end; free its parameters."""
        log_event("post_backward", unit)
        unit.comm.tracer.mark_end("backward", unit.name)
        self._schedule.after_backward(unit, is_last=self.conditions.is_last_micro_batch)

    def on_pass_end(self) -> None:
        """End the backward pass: start the last reductions, free parameters, run grad hooks."""
        log_event("root_post_backward")
        is_last = self.conditions.is_last_micro_batch
        keeps = not is_last and any(unit.settings.keeps_grads for unit in self.units)
        self.window_open = is_last is False or keeps
        self._optional.end_backward(self.units)
        for unit in reversed(self.units):
            reduces = self._schedule.reduces(unit, is_last)
            unit.grads.has_local_sum |= self.window_open and not reduces
            waits = unit.is_deferred and (is_last is False or not unit.grads.sums.all_reduces)
            left = reduces and unit.grad_state is GradState.PARTIAL and not waits
            if (self._passes.is_open(unit) or left) and not self._schedule.is_waiting(unit):
                self._passes.close(unit)
        self._schedule.close_turns(is_last)
        self.reductions.close()
        if self._shares_order:
            self._shares_order = not self._schedule.share_seen(self.comm.control.broadcast)
        self._reset_pass()
        for unit in self.units:
            if not unit.settings.stays_full:
                unit.slots.hide()  # optimizers and clipping need the sharded parameters
        self.num_reduced += not self.window_open
        if self.is_last_micro_batch and any_grad_hooks(self.units):
            self.finish_reductions()
            self._runs_grad_hooks = True
            try:
                run_grad_hooks(self.units)
            finally:
                self._runs_grad_hooks = False

    def on_double(self) -> None:
        """Forget a pass with create_graph=True; the second pass needs its parameters."""
        self._reset_pass()

    def on_cut(self) -> None:
        """Clean up after a backward pass that raised; drop its unreduced gradients."""
        if self.window_open and any(u.grads.has_local_sum or u.is_deferred for u in self.units):
            warn_of_dropped_window()
        self.window_open = False
        self.reductions.drop()
        self._reset_pass()
        for unit in self.units:
            unit.drop_partials()

    def _reset_pass(self) -> None:
        running = {call.unit.index for call in self._passes.stack}  # a forward around this pass
        for unit in self.units:
            if unit.index not in running:
                unit.slots.unbind_all()
        self._passes.reset()
        self._schedule.end_pass(running)

    # -- gradients
    def reset(self) -> None:
        """Forget a pass that raised, with its gradients."""
        self._passes.forget_forward()
        self.on_cut()
        for state in self.all_states:
            state.awaited.clear()

    def finish_steps(self) -> None:
        """Wait until background steps of all units end. **Raises** ShardError if one failed."""
        for unit in self.units:
            unit.finish_steps()

    def finish_reductions(self, unit: Unit | None = None) -> None:
        """Complete the reductions in flight, up to one unit's or all, and set ``p.grad``."""
        self.reductions.finish(unit)

    def forget_cut_pass(self) -> None:
        """Clean up after a backward pass that raised, if the last one did."""
        if self._passes.is_under_way and not in_backward():
            self._passes.forget_forward()
            self.on_cut()


def log_event(event: str, unit: Unit | None = None) -> None:
    """Log ``FSDP::<event> (<unit>)`` at the moments, and in the log, of torch's ``fully_shard``."""
    if _LOG.isEnabledFor(logging.DEBUG):
        name = unit.name if unit is not None else ""
        _LOG.debug("FSDP::%s%s", event, f" ({name})" if name else "")
