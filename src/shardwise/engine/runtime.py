"""The engine of one sharded model: what happens before and after each unit's forward and backward.

Note [One backward pass]
The hooks on a unit's outputs call `before_backward`, those on its inputs `after_use`. The input's
hook fires when autograd reaches the node that made the input: by autograd's order (later nodes
first) every node of the unit has run by then. A unit without such an input is closed when another
one's backward begins, or at the end. `end_backward` is queued once per backward pass and closes
whatever is still open. A `Use` lives in the graph through the hooks, so a graph that is dropped
without a backward pass leaves nothing behind.

Note [Double backward]
A pass with create_graph=True only makes the graph of a second one (for a gradient penalty): no
parameter gets a gradient, so nothing is reduced, and no full parameter may be freed. The second
pass mixes nodes of forward with those that the first made, and on some devices these are numbered
apart, so no hook tells when a unit is through: all units are closed at its end.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import Variable

from shardwise.comm.collectives import Comm
from shardwise.config import ShardConfig
from shardwise.engine.misuse import (
    changed_since_forward,
    graph_of_freed,
    graph_of_means,
    refuse_strangers,
    refuse_transform,
    warn_of_dropped_window,
)
from shardwise.engine.nest import map_tensors, tensors_in
from shardwise.engine.optional import Call, OptionalUnits
from shardwise.engine.reductions import Collected, Reductions
from shardwise.engine.schedule import Schedule
from shardwise.errors import CollectiveError, ShardError, StateError
from shardwise.trace import FullBytes, mark
from shardwise.unit.grad_hooks import any_grad_hooks, run_grad_hooks
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit
from shardwise.unit.use import Use


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Engine:
    """Runs the units of one model; `hooks` calls it, nobody else."""

    where_full = where_stays = "inside `with shardwise.gathered(model):`"
    each_unit_alone = False  # its collectives come when it runs, whatever the other ranks run

    def __init__(
        self,
        config: ShardConfig,
        comm: Comm,
        ledger: FullBytes,
        reductions: Collected | None = None,
    ) -> None:
        self.config = config
        self.comm = comm
        self.ledger = ledger
        self.units: list[Unit] = []
        self.is_last_micro_batch = True
        self.suspended = False
        self.window_open = False  # a micro-batch that is not the last one went through backward
        self.half_loaded: set[str] = set()
        self.broken: str | None = None  # why the parameters are not to be used
        self.before_pass: list[Callable[[], None]] = []  # news from the background, may raise
        self._stack: list[Call] = []
        self._unhooked: list[tuple[Unit, Use, int]] = []
        self._backward_task: int | None = None
        self._creates_graph = False  # the backward pass under way has create_graph=True
        self._second_is_due = False  # the one before had
        self._runs_grad_hooks = False
        self._reductions: Collected = reductions or Reductions(config, comm)
        shared = comm.axes.num_ranks > 1 and not self.each_unit_alone
        budget = config.prefetch_bytes
        self._schedule = Schedule[Unit](budget, self._reductions, has_peers=shared)
        self._shares_order = False
        self._optional = OptionalUnits((), self._schedule, self)
        self._num_calls = 0

    def settle(self, units: list[Unit], order: Sequence[int] | None = None) -> None:
        """Take the units over, the root first, once all are built; ``order`` as in `Schedule`."""
        self.units = units
        self._schedule.settle(units, order)
        self._shares_order = self._schedule.reduces_in_turn
        self._optional = OptionalUnits(units, self._schedule, self)

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

    # -- forward
    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unshard the unit, start gathering the next ones, bind the full parameters."""
        in_backward = _in_backward()
        self.forget_cut_pass()
        records = torch.is_grad_enabled()
        if not self._stack and not in_backward:
            self._check_call(unit, records)
            if records and not unit.uses:
                self._schedule.forget()  # no graph of before is alive
        recomputes = in_backward and unit.in_backward
        self._optional.visit_forward(self._stack, unit)
        call = Call(unit, None, in_backward)
        self._stack.append(call)
        backward_is_next = self._schedule.before_forward(
            unit, in_backward=in_backward, records=records
        )
        mark("recompute" if in_backward else "forward", unit.name)
        unit.bind()
        args, kwargs = self._cast(unit, args, kwargs)
        if records and not recomputes:
            call.use = self._optional.record(unit, self._stack)
            call.backward_is_next = backward_is_next
            self._hook_inputs(unit, call.use, args, kwargs)
        return args, kwargs

    def _check_call(self, unit: Unit, records: bool) -> None:
        """Refuse what would be wrong without a word, before anything is gathered."""
        frees = any(unit.settings.stage.frees_after_forward for unit in self.units)
        refuse_transform(self.allows_transform, frees and records, self.where_full)
        self.comm.refuse_failed("a forward pass")
        if self.broken is not None:
            raise StateError(f"the model's parameters are not to be used: {self.broken}")
        if not records:
            return
        for check in self.before_pass:
            check()
        self._num_calls += 1
        if not self._num_calls & (self._num_calls - 1):
            # in the 1st, 2nd, 4th, 8th ... call only: it costs a millisecond
            self.check_parameters(unit)

    def allows_transform(self, kind: Any) -> bool:
        """Tell whether a forward pass may run inside this transform of torch.func."""
        return bool(kind == torch._C._functorch.TransformType.Vmap)

    def check_parameters(self, unit: Unit) -> None:
        """Refuse trainable parameters below a unit that no unit owns."""
        refuse_strangers(unit.name, unit.module)

    def _cast(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        dtype = unit.precision.param
        if dtype is None or not unit.precision.cast_inputs:
            return args, kwargs

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(args, cast), map_tensors(kwargs, cast)

    def _hook_inputs(self, unit: Unit, use: Use, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.after_use(unit, use))
                use.has_input_hook = True

    def after_forward(self, unit: Unit, output: Any, *, goes_on: bool = False) -> None:
        """Unbind the full parameters, watch the outputs for backward, free what may be freed.

        Also runs, with ``output`` None, after a forward pass that raised. ``goes_on``: another
        module of the same unit is expected to run, so nothing is freed before the root is through.
        """
        if not self._stack or self._stack[-1].unit is not unit:
            return
        call = self._stack[-1]
        if output is not None:
            self._optional.visit_forward(self._stack, None)
        self._stack.pop()
        use = call.use
        mark("recompute_end" if _in_backward() else "forward_end", unit.name)
        written = unit.unbind()
        if output is not None and written:
            raise ShardError(
                f"parameter '{written}' was written inside the forward pass (max_norm=, or in "
                "place under no_grad); it is a copy there and the change would be lost. Change it "
                "between steps, on model.parameters()"
            )
        if output is None and isinstance(sys.exc_info()[1], CollectiveError):
            return  # other gathers may never end: whoever sends them may have stopped as this rank
        if use is not None and not self._hook_outputs(unit, use, output):
            use.spent, use = True, None
        if goes_on and unit.settings.stage.frees_after_forward:
            self._schedule.note_ahead(unit)
        self._schedule.after_forward(
            unit,
            in_backward=_in_backward(),
            expects_backward=use is not None,
            backward_is_next=call.backward_is_next,
            still_runs=goes_on or any(c.unit is unit for c in self._stack),
            at_root=not self._stack,
        )

    def _hook_outputs(self, unit: Unit, use: Use, output: Any) -> bool:
        """Call `before_backward` when a gradient reaches the unit; tell whether one can."""
        found = False
        for tensor in tensors_in(output):
            if not tensor.requires_grad or tensor.grad_fn is None:
                continue
            found = True
            # On the node, not on the tensor: a node's hooks run after those of its tensors, so the
            # unit that follows is freed (`after_use`) before this one is gathered. A view that is
            # changed in place later gets a new node; its base keeps the old one (pytorch#181832).
            for made in (tensor, tensor._base):
                if made is not None and made.grad_fn is not None:
                    node = made.grad_fn._sequence_nr()
                    made.grad_fn.register_prehook(
                        lambda _, node=node: self.before_backward(unit, use, node)
                    )
        return found

    # -- what slots ask (unit.Scheduler)
    def is_running(self) -> bool:
        """Tell whether a forward pass is under way, or a backward pass, which may recompute one."""
        return bool(self._stack) or (_in_backward() and not self._runs_grad_hooks)

    def use_outside(self, unit: Unit) -> None:
        """Unshard a unit whose parameter is used outside its module, until backward ends.

        A checkpoint *inside* a unit's forward (transformers wraps each layer so) runs it again in
        backward, where no hook sees it; the unit is full then, and freed when its backward is over.
        But one without an input hook may be closed before the gradient of this use is there.
        """
        self._schedule.start_unshard(unit)
        unit.finish_unshard()
        waits = any(unhooked is unit for unhooked, _, _ in self._unhooked)
        if unit.in_backward and _in_backward() and not waits:
            return
        if torch.is_grad_enabled():
            if not unit.used_outside:
                unit.outside_versions = unit.read_versions()
            unit.used_outside = True
        elif unit is not self.units[0]:
            self._schedule.note_ahead(unit)

    def on_grad(self, unit: Unit) -> None:
        """Note that one full parameter of the unit has its gradient."""
        if torch.is_grad_enabled():
            raise graph_of_means(self.where_full)
        self._ensure_callback()
        unit.num_grads += 1
        if unit.used_outside and unit.outside_versions != unit.read_versions():
            raise changed_since_forward(unit.name)

    # -- backward
    def _ensure_callback(self) -> None:
        if self._backward_task is None:
            self.finish_reductions()
            self._backward_task = torch._C._current_graph_task_id()
            self._schedule.begin_backward()
            Variable._execution_engine.queue_callback(self.end_backward)

    def before_backward(self, unit: Unit, use: Use, node: int) -> None:
        """Unshard the unit for its backward, which begins at ``node``; gather those that follow."""
        self._ensure_callback()
        if use.begun:
            return
        if torch.is_grad_enabled():
            self._begin_double(unit)
        if use.parent is not None:
            self._optional.visit_backward(use.parent(), use)
        is_first = not unit.in_backward
        use.begun = unit.in_backward = True
        use.done = False
        if use.versions != unit.read_versions():
            raise changed_since_forward(unit.name)
        self.close_unhooked(unit, use, node)
        if not use.has_input_hook and unit is not self.units[0]:
            self._unhooked.append((unit, use, node))
        self._schedule.before_backward(unit)
        if is_first:
            mark("backward", unit.name)

    def _begin_double(self, unit: Unit) -> None:
        """Take note of create_graph=True. See Note [Double backward]."""
        self._creates_graph = True
        if unit.frees_in_backward:
            raise graph_of_freed(unit.name, self.where_stays)

    def close_unhooked(self, begun: Unit, its_use: Use, node: int) -> None:
        """Close the units without an input hook whose backward must be over by now.

        Backward takes nodes in the reverse order of forward, so a unit is over when one that is not
        inside it begins. Never close one because its gradients are all there: which are there may
        differ from rank to rank, and the order of reductions must not. Two units begin at one node
        where the later one hands the earlier one's output on as it came: neither is over then.
        """
        waiting, self._unhooked = self._unhooked, []
        for unit, use, at in waiting:
            if at == node or unit in its_use.enclosing or unit.contains(begun):
                self._unhooked.append((unit, use, at))
            else:
                self.after_use(unit, use)

    def after_use(self, unit: Unit, use: Use) -> None:
        """Close one use of the unit; the last one closes the unit."""
        if use.done or self._backward_task is None:
            return
        if self._creates_graph or self._second_is_due:
            return  # see Note [Double backward]
        use.done = True
        self._optional.visit_backward(use)
        if unit.open_uses == 0 and not unit.used_outside:
            self._after_backward(unit)

    def _after_backward(self, unit: Unit) -> None:
        """Reduce the unit's gradients or keep them for the window's end; free its parameters."""
        for use in unit.uses:
            use.done = True
        unit.num_grads = 0
        unit.in_backward = False
        mark("backward_end", unit.name)
        self._schedule.after_backward(unit, is_last=self.is_last_micro_batch)

    def end_backward(self) -> None:
        """Close the backward pass: reduce what is left, free what is full; call hooks on grads."""
        if self._creates_graph:
            self._reset_pass()
            return
        self.window_open = not self.is_last_micro_batch
        self._optional.end_backward(self.units)
        for unit in reversed(self.units):
            reduces = self._schedule.reduces(unit, self.is_last_micro_batch)
            open_here = unit.in_backward or unit.num_grads
            left = reduces and unit.grad_state is GradState.PARTIAL
            if (open_here or left) and not self._schedule.is_waiting(unit):
                self._after_backward(unit)
        self._schedule.close_turns(self.is_last_micro_batch)
        self._reductions.close()
        if self._shares_order:
            self._shares_order = not self._schedule.share_seen(self.comm.control.broadcast)
        self._reset_pass()
        if self.is_last_micro_batch and any_grad_hooks(self.units):
            self.finish_reductions()
            self._runs_grad_hooks = True
            try:
                run_grad_hooks(self.units)
            finally:
                self._runs_grad_hooks = False

    def _reset_pass(self) -> None:
        for unit in self.units:
            unit.used_outside = unit.in_backward = False
            unit.num_grads = 0
            for use in unit.uses:
                use.end_pass()
            unit.unbind_all()
        self._schedule.end_pass()
        self._stack.clear()
        self._unhooked.clear()
        self._backward_task = None
        self._second_is_due, self._creates_graph = self._creates_graph, False

    # -- gradients
    @property
    def grad_bytes_under_way(self) -> int:
        """Bytes of the means that are not in ``p.grad`` yet."""
        return self._reductions.nbytes

    def finish_reductions(self) -> None:
        """Complete every reduction under way and set ``p.grad``."""
        self._reductions.finish()

    def forget_cut_pass(self) -> None:
        """Clean up after a backward pass that raised, if the last one did."""
        if self._backward_task is not None and not _in_backward():
            self._recover()

    def _recover(self) -> None:
        """Clean up after a backward pass that raised: its unreduced gradients are dropped."""
        if self.window_open and any(unit.has_local_sum for unit in self.units):
            warn_of_dropped_window()
        self._reductions.drop()
        self._reset_pass()
        for unit in self.units:
            unit.drop_partials()
