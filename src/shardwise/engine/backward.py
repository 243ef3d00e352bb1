"""The engine's actions in a backward pass: the receiver of the events of `passes`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.collectives import Comm
from shardwise.engine.calls import Call
from shardwise.engine.misuse import graph_of_freed, graph_of_means, warn_of_dropped_window
from shardwise.engine.optional import OptionalUnits
from shardwise.engine.passes import Passes, in_backward
from shardwise.engine.rank_checks import RankChecks
from shardwise.engine.reductions import Reductions
from shardwise.engine.schedule import Schedule
from shardwise.engine.seams import Activations
from shardwise.engine.status import ModelStatus
from shardwise.unit.gradient import any_grad_hooks, run_grad_hooks
from shardwise.unit.param import accumulate_partial_grad
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit

_GATHERED = "inside `with shardwise.gathered(model):`"
_LOG = logging.getLogger("torch.distributed.fsdp.fully_shard")  # shown by TORCH_LOGS=+fsdp


@dataclass(frozen=True)
class EngineRules:
    """The rules in which `shard()` and `fully_shard` differ; the defaults are those of `shard()`.

    ``units_are_independent``: a unit's collectives start when it runs, without an order that ranks
    share, and its settings name the micro-batch in which it reduces. ``owns_all``: each trainable
    parameter must be in a unit. ``allows_jvp``: `torch.func.jvp` may run if nothing is freed.
    ``where_full`` and ``where_stays`` say in errors where a call finds full parameters.
    """

    units_are_independent: bool = False
    owns_all: bool = True
    allows_jvp: bool = False
    where_full: str = _GATHERED
    where_stays: str = _GATHERED


SHARD_RULES = EngineRules()


class Backward:
    """Receives the events of backward passes (`passes.Listener`).

    A *window* is one backward pass, or the micro-batches of an accumulation window. ``num_begun``
    counts windows that began without gradients, ``num_reduced`` those with all gradients reduced.
    ``window_open``: a micro-batch before the last one has gone through backward.
    ``runs_grad_hooks``: the user's hooks run now. The attributes without a value are set by
    `take_units`.
    """

    rank_checks: RankChecks
    reductions: Reductions
    schedule: Schedule[Unit]
    optional: OptionalUnits

    def __init__(
        self,
        comm: Comm,
        rules: EngineRules,
        status: ModelStatus,
        activations: Activations | None,
    ) -> None:
        self.num_begun = 0
        self.num_reduced = 0
        self.window_open = False
        self.runs_grad_hooks = False
        self.units: Sequence[Unit] = ()
        self.passes = Passes(self, activations)
        self._comm = comm
        self._rules = rules
        self._status = status
        self._shares_order = False  # True until the ranks have exchanged rank 0's order

    def take_units(
        self,
        units: Sequence[Unit],
        schedule: Schedule[Unit],
        reductions: Reductions,
        rank_checks: RankChecks,
    ) -> None:
        """Set all units, and the objects that decide and make their reductions."""
        self.units = units
        self.schedule = schedule
        self.reductions = reductions
        self.rank_checks = rank_checks
        self.optional = OptionalUnits(units, schedule, self.passes)
        self._shares_order = schedule.reduces_in_order

    @property
    def is_last_micro_batch(self) -> bool:
        """Tell whether the optimizer's step follows the current micro-batch."""
        is_last = self._status.is_last_micro_batch
        return not self._rules.units_are_independent if is_last is None else is_last

    # -- events
    def on_pass_begin(self, order: list[int]) -> None:
        """Begin a backward pass, after completing the reductions of the pass before."""
        self._status.micro_batches.check_backward()
        self.reductions.finish()
        in_order = self.schedule.will_reduce_in_order(self._status.is_last_micro_batch)
        self.rank_checks.begin_pass(compares=in_order)
        self.num_begun += all(unit.grads.state is GradState.EMPTY for unit in self.units)
        self.schedule.begin_backward(order)

    def on_grad(self, unit: Unit, leaf: torch.Tensor) -> None:
        """Raise StateError for a parameter's gradient with a graph."""
        if torch.is_grad_enabled():
            raise graph_of_means(self._rules.where_full)
        accumulate_partial_grad(leaf)

    def on_call_reached(self, call: Call) -> None:
        """Raise StateError if create_graph=True needs freed parameters; visit skipped units."""
        if self.passes.creates_graph and call.unit.frees_in_backward:
            raise graph_of_freed(call.unit.name, self._rules.where_stays)
        if call.parent is not None:
            self.optional.visit_backward(call.parent(), call)

    def on_backward(self, unit: Unit, is_first: bool) -> None:
        """Gather the unit for its backward; start gathering the next ones."""
        if is_first:
            log_event("pre_backward", unit)
        self.schedule.before_backward(unit)
        if is_first:
            unit.comm.tracer.mark_begin("backward", unit.name)

    def on_call_end(self, call: Call) -> None:
        """Visit the units that were skipped inside the call and not visited yet."""
        self.optional.after_backward(call)

    def on_unit_end(self, unit: Unit) -> None:
        """Reduce the unit's gradients, or keep them until the window's end; free its parameters."""
        log_event("post_backward", unit)
        unit.comm.tracer.mark_end("backward", unit.name)
        self.schedule.after_backward(unit, is_last=self._status.is_last_micro_batch)

    def on_pass_end(self) -> None:
        """End the backward pass: start the last reductions, free parameters, run grad hooks."""
        log_event("root_post_backward")
        is_last = self._status.is_last_micro_batch
        keeps_grads = not is_last and any(unit.settings.keeps_grads for unit in self.units)
        self.window_open = is_last is False or keeps_grads
        self.optional.end_backward(self.units)
        for unit in reversed(self.units):
            reduces = self.schedule.reduces(unit, is_last)
            unit.grads.has_local_sum |= self.window_open and not reduces
            # A deferred unit has done the first half of its reduction; the second half may wait.
            is_deferred = unit.is_deferred and (
                is_last is False or not unit.grads.sum_settings.all_reduces
            )
            is_partial = unit.grads.state is GradState.PARTIAL and not is_deferred
            must_close = self.passes.is_open(unit) or (reduces and is_partial)
            if must_close and not self.schedule.is_waiting(unit):
                self.passes.close(unit)
        self.schedule.reduce_unvisited(is_last)
        self.reductions.close()
        self.rank_checks.end_pass()
        if self._shares_order:
            self._shares_order = not self.schedule.share_seen(self._comm.control.broadcast)
        self._reset_pass()
        for unit in self.units:
            if not unit.settings.stays_full:
                unit.slots.hide()  # optimizers and clipping need the sharded parameters
        self.num_reduced += not self.window_open
        if self.is_last_micro_batch and any_grad_hooks(self.units):
            self.reductions.finish()
            self.runs_grad_hooks = True
            try:
                run_grad_hooks(self.units)
            finally:
                self.runs_grad_hooks = False

    def on_double_backward(self) -> None:
        """Forget a pass with create_graph=True; the second pass needs its parameters."""
        self._reset_pass()

    def on_pass_raised(self) -> None:
        """Clean up after a backward pass that raised; drop its unreduced gradients."""
        if self.window_open and any(u.grads.has_local_sum or u.is_deferred for u in self.units):
            warn_of_dropped_window()
        self.window_open = False
        self.reductions.drop()
        self._reset_pass()
        for unit in self.units:
            unit.grads.drop_partials()

    def _reset_pass(self) -> None:
        running = {call.unit.index for call in self.passes.stack}  # a forward around this pass
        for unit in self.units:
            if unit.index not in running:
                unit.slots.unbind_all()
        self.passes.reset()
        self.schedule.end_pass(running)

    # -- passes that raised
    def drop_failed_pass(self) -> None:
        """Clean up after a backward pass that raised, if the last one did.

        **Raises** StateError, and waits for no reduction, if the parameters are not to be used:
        other ranks may have left.
        """
        if self.passes.is_under_way and not in_backward():
            self._status.check_usable("")
            self.drop_pass()

    def drop_pass(self) -> None:
        """Drop a pass that raised, with its unreduced gradients."""
        self.passes.forget_forward()
        self.on_pass_raised()


def log_event(event: str, unit: Unit | None = None) -> None:
    """Log ``FSDP::<event> (<unit>)`` at the moments, and in the log, of torch's ``fully_shard``."""
    if _LOG.isEnabledFor(logging.DEBUG):
        name = unit.name if unit is not None else ""
        _LOG.debug("FSDP::%s%s", event, f" ({name})" if name else "")
