"""One unit at run time: parameters that are gathered, reduced and freed together.

It is the only mutable object per unit and holds its two states. Its settings, its sum of gradients,
the transport of its gathers and the home of its slices are values.

Note [When full parameters stand in the modules]
Under `shard()` they do during each call of the module, so the model shows its sharded parameters at
any other time. The full copy is fresh until a slice is modified. FSDP2's contract concerns the
modules: they hold full parameters from the gather until the reshard, and DTensors otherwise
(``settings.stands_while_full``). There a unit is fresh while it is FULL, also between passes, and
no other code frees it then.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives import Comm, Transport
from shardwise.comm.pending import GatherItem, Pending
from shardwise.config import Precision
from shardwise.errors import StateError
from shardwise.stages import UnitSettings
from shardwise.tensor.background_step import BackgroundStep, finish_all
from shardwise.tensor.inner import version_of
from shardwise.unit.home import Home
from shardwise.unit.param import Scheduler, ShardedParam
from shardwise.unit.states import (
    GRAD_TRANSITIONS,
    PARAM_TRANSITIONS,
    GradState,
    ParamState,
    check_transition,
)
from shardwise.unit.storage import Nearby, Storage
from shardwise.unit.sums import RowsApart, Sum


class Unit:
    """A set of parameters that are gathered and freed together, with their states.

    ``modules`` are those whose forward passes need them, usually one. ``transport`` makes its
    gathers; None means that of ``comm``.
    """

    def __init__(
        self,
        name: str,
        index: int,
        modules: Sequence[nn.Module],
        comm: Comm,
        scheduler: Scheduler | None,
        settings: UnitSettings,
        precision: Precision,
        sums: Sum,
        transport: Transport | None = None,
        home: Home | None = None,
        nearby: Nearby | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.modules = tuple(modules)
        self.comm = comm
        self.scheduler = scheduler
        self.settings = settings
        self.precision = precision
        self.sums = sums
        self.transport = transport
        self.home = home
        self.nearby = nearby
        self.params: list[ShardedParam] = []
        self.storages: list[Storage] = []
        self.full_bytes = 0  # of the unit's full copy
        self.param_state = ParamState.SHARDED
        self.grad_state = GradState.EMPTY
        self.num_reducing = 0  # reductions in flight; a late gradient starts another
        self.has_local_sum = False  # see Note [Dtype of a sum]
        self.steps: list[BackgroundStep] = []  # that may run on another thread
        self.writes: list[BackgroundStep] = []  # of state changed by the steps, to its file
        self.is_pinned = False  # full until `unpin`, against the schedule
        self._bind_depth = 0
        self._is_shown = False  # bound once more while pinned
        self._written_while_shown: str | None = None
        self.pending: Pending | None = None  # the gather in flight
        self._bindings: list[tuple[dict[str, Any], str, ShardedParam]] = []
        self._versions: list[int] = []
        self._gathered_apart: list[Any] = []
        self._arriving: list[ShardedParam] = []  # of these, in the gather in flight
        self.summed_apart: list[RowsApart] = []  # the layouts of their gradients' sums
        self._put_together: list[ShardedParam] = []  # copied from gathered storages

    @property
    def module(self) -> nn.Module:
        """The module whose forward passes need the parameters; the first of several."""
        return self.modules[0]

    def add(self, param: ShardedParam) -> None:
        """Add a parameter, and put its sharded form into every module that uses it."""
        self.params.append(param)
        param.put(param.sharded)
        for use in param.uses:
            self._bindings.append((use.module._parameters, use.attribute, param))

    # -- parameters
    def lay_out(self, storages: Sequence[Storage]) -> None:
        """Take the storages of the parameters; called again when they have changed."""
        self.storages = list(storages)
        self.full_bytes = sum(s.full.element_size() * s.layout.full_numel for s in self.storages)
        self._gathered_apart = [param for param in self.params if not param.encoding.in_storage]
        stored = [param for param in self.params if param.encoding.in_storage]
        self._put_together = [param for param in stored if param.encoding.puts_together]

    @property
    def frees_in_backward(self) -> bool:
        """Tell whether a backward pass frees the full parameters."""
        if not self.settings.stage.frees_after_backward or self.settings.stays_full:
            return False
        apart = any(param.encoding.puts_together for param in self.params)
        return apart or any(s.frees for s in self.storages)

    def read_ahead(self) -> None:
        """Start reading slices from files, unless a step of them is running."""
        if self.param_state is ParamState.SHARDED and all(step.is_over for step in self.steps):
            for storage in self.storages:
                storage.read_ahead()

    def start_unshard(self) -> None:
        """Start gathering the full parameters unless they are fresh."""
        self.finish_steps()
        if self.param_state is ParamState.FULL and not self.is_fresh:
            self._give_up()
        if self.param_state is not ParamState.SHARDED:
            return
        for storage in self.storages:
            storage.finish_read()
        self._enter(ParamState.GATHERING)
        with self.comm.tracer.span("unshard", self.name), torch._C._DisableFuncTorch():
            axis, items, nearby = self.comm.axes.shard, list[GatherItem](), self.nearby
            if nearby is not None:
                items = nearby.take(self.storages, self._local_versions)
            if items and nearby is not None:
                axis = nearby.axis
            else:
                for storage in self.storages:
                    if self.settings.stands_while_full or not storage.is_fresh:
                        items += storage.prepare_gather()
            apart, anew = self._gathered_apart, self.settings.stands_while_full
            self._arriving = [p for p in apart if anew or not p.encoding.is_fresh(p)]
            for param in self._arriving:
                items += param.encoding.start(param)
            if not items:
                return
            if axis.size == 1:
                for item in items:
                    if not item.in_place:
                        item.full.view(-1)[: item.source.numel()].copy_(item.source.view(-1))
                return None
            collective = self.comm.collective_id("all_gather", self.name, self.index)
            with nullcontext() if self.home is None else self.home.after_fetch():
                self.pending = self.comm.start_all_gather(items, axis, collective, self.transport)

    def finish_steps(self) -> None:
        """Wait for background steps of the slices. **Raises** ShardError if one has failed."""
        finish_all(self.steps)

    @property
    def _local_versions(self) -> list[int]:
        """Numbers that change when a sharded parameter is modified."""
        return [param.sharded._local_tensor._version for param in self.params]

    def finish_unshard(self) -> None:
        """Make the unit FULL: start the gather if needed, and wait for it."""
        self.start_unshard()
        if self.param_state is not ParamState.GATHERING:
            return
        for storage in self.storages:
            storage.finish_fetch()
        if self.pending is not None:
            with self.comm.tracer.span("wait_unshard", self.name):
                self.pending.wait()
            self.pending = None
        for storage in self.storages:
            storage.finish_gather()
        self._enter(ParamState.FULL)
        if self.settings.stands_while_full:
            self._complete()
        else:
            for param in self._put_together:
                param.encoding.finish(param)
            for param in self._arriving:
                param.complete()

    def _complete(self) -> None:
        with torch._C._DisableFuncTorch():
            for param in self.params:
                param.complete()
                param.put(param.full)
        for storage in self.storages:
            apart = all(s.encoding.puts_together for s in self.params if s.rests_in(storage))
            if apart and self.nearby is None:
                storage.free()  # the parameters have separate memory

    def reshard(self) -> None:
        """Give up the full parameters unless pinned; free their memory if the stage does."""
        if not self.is_pinned:
            self._give_up()

    def _give_up(self) -> None:
        if self.param_state is ParamState.GATHERING:
            self.finish_unshard()
        if self.param_state is not ParamState.FULL:
            return
        if self.nearby is not None and not self._gathered_apart:
            self.nearby.leave(self.storages, self._local_versions)
        for storage in self.storages:
            storage.free()
        self._enter(ParamState.SHARDED)
        for param in self._put_together:
            if param.storage.frees:
                param.encoding.free()
        for param in self._gathered_apart:
            if param.encoding.frees:
                param.encoding.free()
        if self.settings.stands_while_full:
            for param in self.params:
                param.put(param.sharded)
                param.encoding.free()

    @property
    def is_fresh(self) -> bool:
        """Tell whether the full parameters need no gather."""
        if self.steps:  # all ranks have steps, done or not, so they agree
            return False
        if self.settings.stands_while_full:
            return self.param_state is ParamState.FULL
        apart = (param.encoding.is_fresh(param) for param in self._gathered_apart)
        return all(s.is_fresh for s in self.storages) and all(apart)

    @property
    def is_resident(self) -> bool:
        """Tell whether the full parameters are being gathered or hold present values."""
        return self.param_state is ParamState.GATHERING or self.is_fresh

    @property
    def is_trained(self) -> bool:
        """Tell whether any parameter of the unit has a gradient."""
        return self.is_deferred or any(param.is_trained for param in self.params)

    @property
    def is_deferred(self) -> bool:
        """Tell whether gradients await their sum over replicas."""
        return any(s.unreduced is not None for s in self.storages)

    def read_versions(self) -> tuple[int, ...]:
        """Return numbers that change when a slice is modified.

        Return () if the modules hold full parameters. These keep the values that a graph has saved,
        and the sharded ones may change between forward and backward, as in FSDP2.
        """
        if self.settings.stands_while_full:
            return ()
        for step in self.steps:  # a step's writes change the version, which all ranks must see
            step.wait()
        versions = tuple(s.version for s in self.storages)
        if not self._gathered_apart:
            return versions
        apart = (version_of(param.sharded._local_tensor) for param in self._gathered_apart)
        return (*versions, *apart)

    def bind(self) -> None:
        """Put the full parameters into the modules for one call."""
        self._bind_depth += 1
        if self._bind_depth > 1 or self.settings.stands_while_full:
            return
        for params, attribute, param in self._bindings:
            found: Any = params.get(attribute)
            if found is not param.sharded or found._owner is not param:
                self._bind_depth = 0
                raise StateError(
                    f"parameter '{param.name}' was replaced after shard(), by model.to(), .half(), "
                    "load_state_dict(assign=True) or an assignment; do that before shard()"
                )
            params[attribute] = param.full
        self._versions = [param.full._version for _, _, param in self._bindings]

    @property
    def shows_full(self) -> bool:
        """Tell whether the full parameters are in the modules now."""
        return self.is_unsharded if self.settings.stands_while_full else self._bind_depth > 0

    def unbind(self) -> str | None:
        """Put the ShardTensors back; return the name of a full parameter that was written."""
        if self._bind_depth == 0:
            return None
        self._bind_depth -= 1
        if self._bind_depth or self.settings.stands_while_full:
            return None
        written = None
        for (params, attribute, param), version in zip(self._bindings, self._versions, strict=True):
            params[attribute] = param.sharded
            if param.full._version != version:
                written = param.name
        return written

    def unbind_all(self) -> None:
        """Put the ShardTensors back after an interrupted forward pass."""
        if self._bind_depth > self._is_shown:
            self._bind_depth = 1 + self._is_shown
            self.unbind()

    # -- pinned until `unpin`
    def pin(self) -> None:
        """Start gathering, and stay full until `unpin`, also between passes."""
        self.start_unshard()
        self.is_pinned = True

    def show(self) -> None:
        """Put the full parameters of a pinned unit into the modules."""
        if self.is_pinned and not self._is_shown:
            self.finish_unshard()
            self.bind()
            self._is_shown = True

    def hide(self) -> None:
        """Put the sharded parameters back, with the full ones' ``requires_grad``."""
        if not self._is_shown:
            return
        self._is_shown = False
        self._written_while_shown = self.unbind() or self._written_while_shown
        for param in self.params:
            if param.full.requires_grad != param.sharded.requires_grad:
                param.sharded.requires_grad_(param.full.requires_grad)

    def unpin(self) -> str | None:
        """End `pin`, and give up the full parameters between passes.

        Return the name of a full parameter that was written while it was in the modules.
        """
        if not self.is_pinned:
            return None
        self.hide()
        self.is_pinned = False
        if not self._bind_depth:
            self.reshard()
        written, self._written_while_shown = self._written_while_shown, None
        return written

    # -- gradients
    def enter_grad_state(self, state: GradState) -> None:
        """Change to a gradient state, as the table allows; keep an equal one."""
        if state is not self.grad_state:
            self.grad_state = check_transition(GRAD_TRANSITIONS, self.name, self.grad_state, state)

    def forget_grads_if_none(self) -> None:
        """Return to EMPTY if no parameter has a gradient."""
        if not any(param.keeps_grad for param in reversed(self.params)):
            self.enter_grad_state(GradState.EMPTY)

    def keep_partials(self) -> None:
        """Add the micro-batch's gradients to this rank's sums of the window."""
        self.enter_grad_state(GradState.PARTIAL)
        for param in self.params:
            param.keep_partial()

    def drop_partials(self) -> None:
        """Drop unreduced gradients after an interrupted backward pass."""
        for param in self.params:
            param.forget_partial()
        for storage in self.storages:
            storage.unreduced = None
        if self.grad_state is GradState.PARTIAL:
            any_reduced = any(param.mean is not None for param in self.params)
            self.enter_grad_state(GradState.REDUCED if any_reduced else GradState.EMPTY)
        self.has_local_sum = False

    # -- names that tools read on torch's parameter groups, and extensions on the unit
    @property
    def shard_mesh(self) -> Any:
        """The mesh of the shard axis alone."""
        mesh = self.comm.axes.mesh
        return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]

    @property
    def is_unsharded(self) -> bool:
        """Tell whether the unit is FULL."""
        return self.param_state is ParamState.FULL

    def _enter(self, state: ParamState) -> None:
        self.param_state = check_transition(PARAM_TRANSITIONS, self.name, self.param_state, state)
