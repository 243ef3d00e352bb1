"""The engine of one sharded model: what happens before and after each unit's forward and backward.

Note [One backward pass]
The hooks on a unit's outputs call `before_backward`, those on its inputs `after_use`. The input's
hook fires when autograd reaches the node that made the input: by autograd's order (later nodes
first) every node of the unit has run by then. A unit without such an input is done when all its
gradients are there, or at the end. `end_backward` is queued once per backward pass and closes
whatever is still open. A `Use` lives in the graph through the hooks, so a graph that is dropped
without a backward pass leaves nothing behind.

Note [Gradients of some ranks only]
A parameter may get a gradient on one rank and none on another. Every rank reduces every unit that
ran, with zeros where it has nothing; one small all-reduce of flags per backward pass says which
parameters had a gradient anywhere. A parameter that had none keeps ``grad`` None, and so its value
and its optimizer state. The flags are read only by a rank that missed a gradient, so there is no
synchronisation with the device in the usual case.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import Variable

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import Pending, Site
from shardwise.config import ShardConfig
from shardwise.engine.nest import map_tensors, tensors_in
from shardwise.engine.order import Order
from shardwise.engine.prefetch import units_to_prefetch
from shardwise.errors import StateError
from shardwise.trace import FullBytes
from shardwise.unit.reduce import Reduction, add_to_grad
from shardwise.unit.states import GradState, ParamState
from shardwise.unit.unit import Slot, Unit, Use

_LOOKAHEAD_UNITS = 16


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Engine:
    """Runs the units of one model; `hooks` calls it, nobody else."""

    def __init__(self, config: ShardConfig, comm: Comm, ledger: FullBytes) -> None:
        self.config = config
        self.comm = comm
        self.ledger = ledger
        self.units: list[Unit] = []
        self.is_last_micro_batch = True
        self.suspended = False
        self._order = Order(())
        self._stack: list[tuple[Unit, Use | None, bool]] = []
        self._ahead: set[int] = set()
        self._backward_task: int | None = None
        self._bucket: list[Unit] = []
        self._in_flight: list[Reduction] = []
        self._reduced: list[tuple[Reduction, dict[Slot, torch.Tensor]]] = []
        self._flags: tuple[list[Slot], torch.Tensor, list[Pending]] | None = None
        self._prefetch_bytes = 0

    def settle(self, units: list[Unit]) -> None:
        """Take the units over, the root first, once all are built."""
        self.units = units
        self._order = Order([u.index for u in units])
        largest = max((u.full_bytes for u in units[1:]), default=0)
        asked = self.config.prefetch_bytes
        self._prefetch_bytes = largest if asked is None else asked

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: the copy would share process groups and hooks with the original."""
        raise StateError(
            "copy.deepcopy of a sharded model: copy it before shard(), or copy its values inside "
            "`with shardwise.gathered(model): copy.deepcopy(model.state_dict())`"
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
        if not in_backward and self._backward_task is not None:
            self._recover()
        records = torch.is_grad_enabled()
        recomputes = in_backward and unit.in_backward
        self._stack.append((unit, None, in_backward))
        unit.start_unshard()
        self._ahead.discard(unit.index)  # used now: the budget is for the next ones
        upcoming = None if in_backward else self._order.visit_forward(unit.index, records)
        self._prefetch(upcoming)
        unit.finish_unshard()
        unit.bind()
        args, kwargs = self._cast(unit, args, kwargs)
        if records and not recomputes:
            use = Use(unit.read_versions())
            unit.uses.add(use)
            self._stack[-1] = (unit, use, in_backward or upcoming == [])
            self._hook_inputs(unit, use, args, kwargs)
        return args, kwargs

    def _cast(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        dtype = self.config.precision.param
        if dtype is None or not self.config.precision.cast_inputs:
            return args, kwargs

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(args, cast), map_tensors(kwargs, cast)

    def _hook_inputs(self, unit: Unit, use: Use, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                handle = tensor.register_hook(lambda _: self.after_use(unit, use))
                # As a rule the tensor is the output of the unit before, and has that one's hook. Go
                # first, so that this unit is freed before that one is gathered. (Autograd runs
                # hooks in the order in which the dict was filled.)
                hooks: Any = tensor._backward_hooks
                for key in [k for k in hooks if k != handle.id]:
                    hooks[key] = hooks.pop(key)
                use.has_input_hook = True

    def after_forward(self, unit: Unit, output: Any) -> None:
        """Unbind the full parameters, watch the outputs for backward, free what may be freed.

        Also runs, with ``output`` None, after a forward pass that raised.
        """
        if not self._stack or self._stack[-1][0] is not unit:
            return
        _, use, keep = self._stack.pop()
        unit.unbind()
        if use is not None and not self._hook_outputs(unit, use, output):
            use.spent, use = True, None
        at_root = not self._stack
        waits_for_backward = use is not None and (keep or unit is self.units[0])
        if self.config.stage.frees_after_forward and not waits_for_backward:
            in_use = (
                unit.in_backward or unit.used_outside or any(u is unit for u, _, _ in self._stack)
            )
            if not in_use and not _in_backward():
                unit.reshard()
        if at_root and not _in_backward():
            self._drop_prefetched()

    def _hook_outputs(self, unit: Unit, use: Use, output: Any) -> bool:
        """Call `before_backward` when a gradient reaches the unit; tell whether one can."""
        found = False
        for tensor in tensors_in(output):
            if not tensor.requires_grad or tensor.grad_fn is None:
                continue
            found = True
            # A view that is changed in place later gets a new grad_fn, and a hook on it would be
            # lost; its base keeps the old one (pytorch#181832).
            for hooked in {id(tensor): tensor, id(tensor._base): tensor._base}.values():
                if hooked is not None and hooked.grad_fn is not None:
                    hooked.register_hook(lambda _: self.before_backward(unit, use))
        return found

    def _drop_prefetched(self) -> None:
        for index in self._ahead:
            if not self.units[index].used_outside:
                self.units[index].reshard()
        self._ahead.clear()

    def _prefetch(self, upcoming: Sequence[int] | None) -> None:
        if not self._prefetch_bytes or not upcoming:
            return
        chosen = units_to_prefetch(
            upcoming[:_LOOKAHEAD_UNITS],
            lambda i: self.units[i].full_bytes,
            self._ahead,
            self._is_resident,
            self._prefetch_bytes,
        )
        for index in chosen:
            self.units[index].start_unshard()
            self._ahead.add(index)

    def _is_resident(self, index: int) -> bool:
        unit = self.units[index]
        return unit.param_state is ParamState.GATHERING or unit.is_fresh

    # -- what slots ask (unit.Scheduler)
    def is_running(self) -> bool:
        """Tell whether a forward pass is under way."""
        return bool(self._stack)

    def use_outside(self, unit: Unit) -> None:
        """Unshard a unit whose parameter is used outside its module, until backward ends."""
        unit.finish_unshard()
        if torch.is_grad_enabled():
            unit.used_outside = True
        elif not unit.in_backward and unit is not self.units[0]:
            self._ahead.add(unit.index)

    def on_grad(self, unit: Unit) -> None:
        """Count a gradient; a unit that no input hook will close is done when it has all.

        The root is left to `end_backward`: other units may use its parameters.
        """
        self._ensure_callback()
        unit.num_grads += 1
        if unit.num_grads < len(unit.slots) or unit is self.units[0] or unit.used_outside:
            return
        if not any(u.has_input_hook and u.is_open for u in unit.uses):
            self._after_backward(unit)

    # -- backward
    def _ensure_callback(self) -> None:
        if self._backward_task is None:
            self.finish_reductions()
            self._backward_task = torch._C._current_graph_task_id()
            self._order.begin_backward()
            Variable._execution_engine.queue_callback(self.end_backward)

    def before_backward(self, unit: Unit, use: Use) -> None:
        """Unshard the unit for its backward, start gathering those that follow."""
        self._ensure_callback()
        if use.begun:
            return
        use.begun = unit.in_backward = True
        use.done = False
        if use.versions != unit.read_versions():
            raise StateError(
                f"unit '{unit.name or '(root)'}': its parameters were changed between forward and "
                "backward (an optimizer step or a load in between); run backward first"
            )
        unit.start_unshard()
        self._ahead.discard(unit.index)
        self._prefetch(self._order.visit_backward(unit.index))
        unit.finish_unshard()

    def after_use(self, unit: Unit, use: Use) -> None:
        """Close one use of the unit; the last one closes the unit."""
        if use.done or self._backward_task is None:
            return
        use.done = True
        if unit.open_uses == 0 and not unit.used_outside:
            self._after_backward(unit)

    def _after_backward(self, unit: Unit) -> None:
        """Reduce the unit's gradients or keep them for the window's end; free its parameters."""
        for use in unit.uses:
            use.done = True
        unit.num_grads = 0
        unit.in_backward = False
        self._collect(unit)
        if self.config.stage.frees_after_backward:
            unit.reshard()

    def _collect(self, unit: Unit) -> None:
        if not any(s.leaf.requires_grad for s in unit.slots):
            return
        if self.is_last_micro_batch or self.config.reduce_every == "micro_batch":
            if unit in self._bucket:
                return
            self._bucket.append(unit)
            if sum(u.full_bytes for u in self._bucket) >= self.config.bucket_bytes:
                self._flush()
        else:
            if unit.grad_state is not GradState.PARTIAL:
                unit.enter_grad_state(GradState.PARTIAL)
            unit.has_local_sum = True
            for slot in unit.slots:
                slot.keep_partial(self.config.precision.reduce or slot.leaf.dtype)

    def _flush(self) -> None:
        if not self._bucket:
            return
        reduction = Reduction(self._bucket, self.comm, self.config.precision.reduce)
        self._bucket = []
        reduction.start()
        self._in_flight.append(reduction)
        while len(self._in_flight) > self.config.reduces_in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.pop(0)
        self._reduced.append((reduction, reduction.finish()))

    def end_backward(self) -> None:
        """Close the backward pass: reduce what is left, free what is full."""
        reduces = self.is_last_micro_batch or self.config.reduce_every == "micro_batch"
        for unit in reversed(self.units):
            open_here = unit.in_backward or unit.num_grads
            left = reduces and unit.grad_state is GradState.PARTIAL
            if (open_here or left) and unit not in self._bucket:
                self._after_backward(unit)
        self._flush()
        self._start_flags()
        self._reset_pass()
        self._order.end_step()

    def _reset_pass(self) -> None:
        for unit in self.units:
            unit.used_outside = unit.in_backward = False
            unit.num_grads = 0
            for use in unit.uses:
                use.end_pass()
            unit.unbind_all()
            unit.reshard()
        self._ahead.clear()
        self._stack.clear()
        self._backward_task = None

    # -- gradients
    def _start_flags(self) -> None:
        reductions = [r for r, _ in self._reduced] + self._in_flight
        if not reductions or self.comm.axes.num_ranks == 1:
            return
        slots = [s for r in reductions for u in r.units for s in u.slots if s.leaf.requires_grad]
        used = set().union(*(r.used_here for r in reductions))
        device = slots[0].leaf.device
        flags = torch.tensor([s in used for s in slots], dtype=torch.uint8, device=device)
        self._flags = slots, flags, self.comm.start_any(flags, Site("flags", "(all)", 0))

    def finish_reductions(self) -> None:
        """Complete every reduction under way and set ``p.grad``. **State** REDUCING -> REDUCED."""
        while self._in_flight:
            self._finish_oldest()
        if not self._reduced:
            return
        reduced, self._reduced = self._reduced, []
        used = set().union(*(r.used_here for r, _ in reduced)) | self._used_elsewhere(reduced)
        for _, means in reduced:
            for slot, mean in means.items():
                if slot in used:
                    add_to_grad(slot, mean)
        for unit in {u for r, _ in reduced for u in r.units}:
            unit.enter_grad_state(GradState.REDUCED)
            unit.forget_grads_if_none()

    def _used_elsewhere(
        self, reduced: list[tuple[Reduction, dict[Slot, torch.Tensor]]]
    ) -> set[Slot]:
        flags, self._flags = self._flags, None
        if flags is None:
            return set()
        slots, values, pendings = flags
        for pending in pendings:
            pending.wait()
        if set().union(*(r.used_here for r, _ in reduced)).issuperset(slots):
            return set()
        return {slot for slot, flag in zip(slots, values.tolist(), strict=True) if flag}

    def _recover(self) -> None:
        """Clean up after a backward pass that raised: its unreduced gradients are dropped."""
        while self._in_flight:
            self._finish_oldest()
        for unit in {u for r, _ in self._reduced for u in r.units}:
            unit.enter_grad_state(GradState.REDUCED)
            unit.forget_grads_if_none()
        self._reduced, self._bucket, self._flags = [], [], None
        self._reset_pass()
        for unit in self.units:
            unit.drop_partials()
        self._order.end_step()
