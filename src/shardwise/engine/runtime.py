"""The engine of one sharded model: what happens before and after each unit's forward and backward.

When that is, `passes` finds out; what is gathered, freed and reduced then, `schedule` decides.
"""

import sys
from collections.abc import Iterable, Sequence
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
from shardwise.errors import CollectiveError, StateError
from shardwise.tensor.background_step import finish_all
from shardwise.trace import FullParamLedger
from shardwise.unit.grad_hooks import any_grad_hooks, run_grad_hooks
from shardwise.unit.param import sum_as_they_come
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit

_RANKS = CollectiveId("gather", "(ranks)", 0)


class Engine:
    """Runs the units of one model; `hooks` calls it, nobody else."""

    where_full = where_stays = "inside `with shardwise.gathered(model):`"
    each_unit_alone = False  # its collectives come when it runs, whatever the other ranks run

    def __init__(self, config: ShardConfig, comm: Comm, ledger: FullParamLedger) -> None:
        self.config = config
        self.comm = comm
        self.ledger = ledger
        self.conditions = Conditions()
        self.all_states: Sequence[Any] = ()  # of the modules that the units were made for
        self.mates: Sequence[Engine] = (self,)  # of the stages that this rank has
        self.num_begun = 0  # backward passes, or windows, that found no gradients
        self.num_reduced = 0  # backward passes, or windows, whose gradients were all reduced
        self.window_open = False  # a micro-batch that is not the last one went through backward
        self.activations = activations_of(config.offload, comm, self._full_memory)
        self._passes = Passes(self, self.activations)
        self._runs_grad_hooks = False
        self._num_calls = 0
        self.take_units([])

    def _full_memory(self) -> Iterable[torch.Tensor]:
        return (storage.full for unit in self.units for storage in unit.storages)

    def take_units(self, units: list[Unit], order: Sequence[int] | None = None) -> None:
        """Take the units over, the root first, once all are built; ``order`` as in `Schedule`."""
        config = self.config
        self.units = units
        self.comms = list({id(c): c for c in (self.comm, *(u.comm for u in units))}.values())
        self._passes.take_units(units)
        self.rank_checks = RankChecks(self.comm, units, self.conditions.refuse)
        compare = self.rank_checks.before_reduction
        self.reductions = Reductions(units, config.bucket_bytes, config.reduces_in_flight, compare)
        shared = self.comm.axes.num_ranks > 1 and not self.each_unit_alone
        self._schedule = Schedule(config.prefetch_bytes, self.reductions, has_peers=shared)
        self._schedule.take_units(units, order)
        self.order = self._schedule.order
        self._shares_order = self._schedule.reduces_in_turn
        self._optional = OptionalUnits(units, self._schedule, self._passes)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: the copy would share process groups and hooks with the original."""
        raise StateError(
            "copy.deepcopy of what belongs to a sharded model: copy the model itself, the one that "
            "was given to shard()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickled model would hold one rank's slices."""
        raise StateError(
            "pickling a sharded model: each rank holds only slices. Pickle model.state_dict() "
            "inside `with shardwise.gathered(model):`"
        )

    @property
    def passes(self) -> Passes:
        """The calls that are under way."""
        return self._passes

    @property
    def suspended(self) -> bool:
        """Tell whether forward passes go unnoticed now."""
        return self.conditions.is_suspended

    @cached_property
    def everyone(self) -> Control:
        """The exchanges between all ranks that hold a part of the model."""
        return self.comm.control if self._all_ranks is None else self.open_control()

    def open_control(self) -> Control:
        """Open a group for the same exchanges, for another thread; all ranks call it together."""
        return control_over(self.comm.axes, self._all_ranks)

    @cached_property
    def _all_ranks(self) -> list[int] | None:
        """All ranks that hold a part of the model, where they are more than the mesh has.

        A rank knows those along its own axes, and hears of theirs; twice, as another stage may have
        tensor parallelism where this one has none. **Cost** a collective for each.
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
        """Tell whether the step comes after the micro-batch under way."""
        is_last = self.conditions.is_last_micro_batch
        return not self.each_unit_alone if is_last is None else is_last

    @property
    def is_in_window(self) -> bool:
        """Tell whether an accumulation window has begun whose last micro-batch is not through."""
        has_grads = any(unit.grad_state is not GradState.EMPTY for unit in self.units)
        return not self.is_last_micro_batch or (self.window_open and has_grads)

    def rest(self, what: str) -> None:
        """Let shards alone stand in the modules, for ``what``, and nothing be under way on them.

        Here they do, but for pinned units. **Raises** ShardError, as `unpin` does, and where a step
        in the background has failed.
        """
        self.finish_steps()
        for unit in self.units:
            finish_all(unit.writes)
        self.unpin(what, self.units)

    def unpin(self, what: str, units: Sequence[Unit]) -> None:
        """End what `unshard()` has begun. **Raises** ShardError for a full parameter written."""
        written = [name for unit in units if (name := unit.unpin())]
        if written:
            raise written_while_full(what, written[0])

    # -- forward
    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unshard the unit, start gathering the next ones, bind the full parameters."""
        self.conditions.rounds.arrive(unit)
        self.forget_cut_pass()
        records = torch.is_grad_enabled()
        if not self._passes.stack and not in_backward():
            self._check_call(unit, records)
            self.comm.tracer.see_inputs(args, kwargs)
        self._optional.visit_forward(unit)
        call = self._passes.enter(unit)
        call.backward_is_next = self.conditions.rounds.visit(self._schedule, call)
        unit.comm.tracer.mark_begin("recompute" if call.in_backward else "forward", unit.name)
        unit.bind()
        args, kwargs = self._cast(unit, args, kwargs)
        if records and not call.recomputes:
            self._optional.record(call)
            self._passes.watch_inputs(call, (args, kwargs))
        return args, kwargs

    def _check_call(self, unit: Unit, records: bool) -> None:
        """Refuse what would be wrong without a word, before anything is gathered."""
        frees = any(unit.settings.stage.frees_after_forward for unit in self.units)
        refuse_transform(self.allows_transform, frees and records, self.where_full)
        for comm in self.comms:
            comm.refuse_failed("a forward pass")
        self.conditions.check_usable("")
        if not records:
            return
        self.conditions.check_before_pass()
        self._num_calls += 1
        if not self._num_calls & (self._num_calls - 1):
            # in the 1st, 2nd, 4th, 8th ... call only: it costs a millisecond
            self.check_parameters(unit)

    def allows_transform(self, kind: Any) -> bool:
        """Tell whether a forward pass may run inside this transform of torch.func."""
        return bool(kind == torch._C._functorch.TransformType.Vmap)

    def check_parameters(self, unit: Unit) -> None:
        """Refuse trainable parameters below a unit that no unit owns."""
        if not any(each.is_pinned or each.shows_full for each in self.units):
            refuse_strangers(unit.name, unit.module)

    def _cast(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        dtype = unit.precision.param
        if dtype is None or not unit.precision.cast_inputs:
            return args, kwargs
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def after_forward(self, unit: Unit, output: Any, *, goes_on: bool = False) -> None:
        """Unbind the full parameters, watch the outputs for backward, free what may be freed.

        Also runs, with ``output`` None, after a forward pass that raised. ``goes_on``: another
        module of the same unit is expected to run, so nothing is freed before the root is through.
        """
        stack = self._passes.stack
        if not stack or stack[-1].unit is not unit:
            return
        if output is not None:
            self._optional.visit_forward(None)
        call = self._passes.leave()
        unit.comm.tracer.mark_end("recompute" if in_backward() else "forward", unit.name)
        written = unit.unbind()
        if output is not None and written:
            raise written_in_forward(written)
        if output is None and isinstance(sys.exc_info()[1], CollectiveError):
            return  # other gathers may never end: whoever sends them may have stopped as this rank
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

    # -- what parameters ask (unit.Scheduler)
    def is_running(self) -> bool:
        """Tell whether a forward pass is under way, or a backward pass, which may recompute one."""
        return bool(self._passes.stack) or (in_backward() and not self._runs_grad_hooks)

    def use_outside(self, unit: Unit) -> None:
        """Unshard a unit whose parameter is used outside its module, until backward ends.

        A checkpoint *inside* a unit's forward (transformers wraps each layer so) runs it again in
        backward, where no hook sees it; the unit is full then, and freed when its backward is over.
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
        """Hear when autograd has written the gradient of one of the unit's full parameters."""
        self._passes.watch_grad(unit, leaf)

    def note_grad(self, unit: Unit, full: torch.Tensor) -> None:
        """Take note of a gradient that came on another way than the layers' own parameter."""
        self._passes.note_grad(unit, full)

    def expect_reduction(self, unit: Unit) -> None:
        """Take note that some rank has a gradient that the end of a pass will reduce."""
        self._passes.expect_reduction(unit)

    # -- what happens in a backward pass (passes.Listener)
    def on_pass(self, order: list[int]) -> None:
        """Begin: nothing of the pass before is under way."""
        self.conditions.rounds.check_backward()
        self.finish_reductions()
        in_turn = self._schedule.will_reduce_in_turn(self.conditions.is_last_micro_batch)
        self.rank_checks.begin_pass(compares=in_turn)
        self.num_begun += all(unit.grad_state is GradState.EMPTY for unit in self.units)
        self._schedule.begin_backward(order)

    def on_grad(self, unit: Unit, leaf: torch.Tensor) -> None:
        """Refuse gradients of parameters that have a graph."""
        if torch.is_grad_enabled():
            raise graph_of_means(self.where_full)
        sum_as_they_come(leaf)

    def on_reached(self, call: Call) -> None:
        """Refuse a second pass over freed parameters; visit what was skipped after the call."""
        if self._passes.creates_graph and call.unit.frees_in_backward:
            raise graph_of_freed(call.unit.name, self.where_stays)
        if call.parent is not None:
            self._optional.visit_backward(call.parent(), call)

    def on_backward(self, unit: Unit, is_first: bool) -> None:
        """Unshard the unit for its backward; gather those that follow."""
        self._schedule.before_backward(unit)
        if is_first:
            unit.comm.tracer.mark_begin("backward", unit.name)

    def on_call_over(self, call: Call) -> None:
        """Visit what was skipped inside the call and not visited yet."""
        self._optional.after_backward(call)

    def on_unit_over(self, unit: Unit) -> None:
        """Reduce the unit's gradients or keep them for the window's end; free its parameters."""
        unit.comm.tracer.mark_end("backward", unit.name)
        self._schedule.after_backward(unit, is_last=self.conditions.is_last_micro_batch)

    def on_pass_end(self) -> None:
        """Close the backward pass: reduce what is left, free what is full; call hooks on grads."""
        is_last = self.conditions.is_last_micro_batch
        keeps = not is_last and any(unit.settings.keeps_grads for unit in self.units)
        self.window_open = is_last is False or keeps
        self._optional.end_backward(self.units)
        for unit in reversed(self.units):
            reduces = self._schedule.reduces(unit, is_last)
            unit.has_local_sum |= self.window_open and not reduces
            waits = unit.is_deferred and is_last is False
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
                unit.hide()  # what steps, clips and zeroes gradients needs the sharded ones
        self.num_reduced += not self.window_open
        if self.is_last_micro_batch and any_grad_hooks(self.units):
            self.finish_reductions()
            self._runs_grad_hooks = True
            try:
                run_grad_hooks(self.units)
            finally:
                self._runs_grad_hooks = False

    def on_double(self) -> None:
        """Free nothing and reduce nothing: the graph that was made is of a second pass."""
        self._reset_pass()

    def on_cut(self) -> None:
        """Clean up after a backward pass that raised: its unreduced gradients are dropped."""
        if self.window_open and any(u.has_local_sum or u.is_deferred for u in self.units):
            warn_of_dropped_window()
        self.window_open = False
        self.reductions.drop()
        self._reset_pass()
        for unit in self.units:
            unit.drop_partials()

    def _reset_pass(self) -> None:
        running = {call.unit.index for call in self._passes.stack}  # around a pass inside a forward
        for unit in self.units:
            if unit.index not in running:
                unit.unbind_all()
        self._passes.reset()
        self._schedule.end_pass(running)

    # -- gradients
    def reset(self) -> None:
        """Forget a pass that was cut short, with its gradients."""
        self._passes.forget_forward()
        self.on_cut()

    def finish_steps(self) -> None:
        """Wait until the slices of all units are stepped. **Raises** ShardError as `Unit`'s do."""
        for unit in self.units:
            unit.finish_steps()

    def finish_reductions(self, unit: Unit | None = None) -> None:
        """Complete the reductions under way and set ``p.grad``: those up to one unit's, or all."""
        self.reductions.finish(unit)

    def forget_cut_pass(self) -> None:
        """Clean up after a backward pass that raised, if the last one did."""
        if self._passes.is_under_way and not in_backward():
            self._passes.forget_forward()
            self.on_cut()
