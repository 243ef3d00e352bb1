"""One unit at run time: the only mutable object per unit, with its two states.

A `Slot` is one parameter of the unit: its ShardTensor, its full parameter (the autograd leaf), and
its gradient on the way from one to the other.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import GatherItem, Pending
from shardwise.config import Precision
from shardwise.errors import StateError
from shardwise.layout.units import ParamUse
from shardwise.stages import UnitSettings
from shardwise.trace import span
from shardwise.unit.cut import Cut
from shardwise.unit.grad_hooks import GradHooks
from shardwise.unit.partial import PartialGrad
from shardwise.unit.states import (
    GRAD_TRANSITIONS,
    PARAM_TRANSITIONS,
    GradState,
    ParamState,
    check_transition,
)
from shardwise.unit.storage import Storage
from shardwise.unit.tensor import ShardTensor


class Scheduler(Protocol):
    """What a slot asks of the engine: things that concern more than its own unit."""

    def finish_reductions(self) -> None:
        """Complete every reduction under way."""

    def use_outside(self, unit: "Unit") -> None:
        """Unshard a unit whose parameter is used outside its module, until backward ends."""

    def is_running(self) -> bool:
        """Tell whether a forward pass is under way."""

    def watch_grad(self, unit: "Unit", leaf: torch.Tensor) -> None:
        """Hear when autograd has written the gradient of a full parameter."""


class Slot:
    """One parameter of a unit, in its sharded and its full form."""

    def __init__(
        self,
        unit: "Unit",
        uses: tuple[ParamUse, ...],
        storage: Storage,
        index: int,
        cut: Cut,
        original: nn.Parameter,
        requires_grad: bool,
    ) -> None:
        self.name = uses[0].name
        self.unit = unit
        self.uses = uses
        self.storage = storage
        self.index = index
        self.cut = cut
        local = storage.local(index, cut.local_shape)
        shard = ShardTensor.wrap(local, cut, self)
        self.param: Any = nn.Parameter(shard, requires_grad=requires_grad)
        self.param.__dict__.update(
            {k: v for k, v in vars(original).items() if k not in ("_cut", "_owner", "_is_param")}
        )
        self.leaf = storage.leaf(index, requires_grad)
        self.partial: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.grad_hooks = GradHooks()
        self._watched = False
        self._watch()

    def _watch(self) -> None:
        """Let the engine hear when autograd has written this parameter's gradient."""
        if self.leaf.requires_grad and not self._watched:
            self.unit.scheduler.watch_grad(self.unit, self.leaf)
            self._watched = True

    # -- what ShardTensor asks (tensor.Owner)
    def read_grad(self) -> torch.Tensor | None:
        """Return the reduced gradient, finishing reductions under way; see `PartialGrad`."""
        state = self.unit.grad_state
        if state is GradState.REDUCING:
            self.unit.scheduler.finish_reductions()
        elif state is GradState.PARTIAL and self.has_partial:
            return PartialGrad.of(self)
        return self.grad

    def write_grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it. A full tensor is cut."""
        state = self.unit.grad_state
        if state is GradState.EMPTY and value is None:
            return
        if state is GradState.REDUCING:
            self.unit.scheduler.finish_reductions()
        elif state is GradState.PARTIAL:
            self.leaf.grad = self.partial = None
        if value is None:
            self.grad = None
            self.unit.forget_grads_if_none()
            return
        if not isinstance(value, ShardTensor):
            value = ShardTensor.wrap(self.cut.slice_of(value).clone(), self.cut)
        if not value._cut.matches(self.cut) or value.dtype != self.param.dtype:
            raise StateError(
                f"gradient of '{self.name}': expected {self.cut.shape} {self.param.dtype}, got "
                f"{tuple(value.shape)} {value.dtype}"
            )
        self.grad = value
        self.unit.enter_grad_state(GradState.REDUCED)

    def whole(self) -> torch.Tensor:
        """Return the full parameter for a use outside its module."""
        self.unit.scheduler.use_outside(self.unit)
        return self.leaf

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is under way."""
        return self.unit.scheduler.is_running()

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""
        self.leaf.requires_grad_(requires_grad)
        self._watch()

    def add_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter after a pass that gave it a reduced gradient."""
        return self.grad_hooks.add(hook, self.leaf)

    # -- what checkpoints and contexts ask
    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which unreduced gradients are summed."""
        return self.unit.precision.reduce or self.param.dtype

    def like(self, local: torch.Tensor) -> ShardTensor:
        """Return a tensor that is cut as the parameter is, of which ``local`` is this rank's."""
        return ShardTensor.wrap(local, self.cut)

    def is_alike(self, value: Any) -> bool:
        """Tell whether a tensor is cut as the parameter is."""
        return isinstance(value, ShardTensor) and value._cut.matches(self.cut)

    # -- gradients on their way
    def drop_partial(self) -> None:
        """Forget the unreduced gradient."""
        self.leaf.grad = self.partial = None
        self.unit.forget_grads_if_none()

    @property
    def has_partial(self) -> bool:
        """Tell whether this rank has a gradient of this parameter that is not reduced."""
        return self.partial is not None or self.leaf.grad is not None

    def keep_partial(self, dtype: torch.dtype) -> None:
        """Add the micro-batch's gradient to the unreduced sum, which has ``dtype``."""
        grad = self.leaf.grad
        if grad is None or grad.dtype == dtype:
            return
        self.leaf.grad = None
        if self.partial is None:
            self.partial = grad.to(dtype)
        else:
            self.partial.add_(grad)

    def take_partial(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the unreduced gradient, flat and contiguous, and forget it."""
        grad, self.leaf.grad = self.leaf.grad, None
        partial, self.partial = self.partial, None
        if partial is not None:
            grad = partial if grad is None else partial.add_(grad)
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        return grad.contiguous().view(-1)


class Unit:
    """A set of parameters that are gathered and freed together, and what state they are in."""

    def __init__(
        self,
        name: str,
        index: int,
        module: nn.Module,
        comm: Comm,
        scheduler: Scheduler,
        settings: UnitSettings,
        precision: Precision,
    ) -> None:
        self.name = name
        self.index = index
        self.module = module
        self.comm = comm
        self.scheduler = scheduler
        self.settings = settings
        self.precision = precision
        self.slots: list[Slot] = []
        self.storages: list[Storage] = []
        self.param_state = ParamState.SHARDED
        self.grad_state = GradState.EMPTY
        self.has_local_sum = False
        self._bind_depth = 0
        self._pending: Pending | None = None
        self._bindings: list[tuple[dict[str, Any], str, Slot]] = []
        self._versions: list[int] = []

    def contains(self, other: "Unit") -> bool:
        """Tell whether the other unit's module lies inside this one's."""
        return not self.name or other.name.startswith(f"{self.name}.")

    def add(self, slot: Slot) -> None:
        """Register a parameter, in every module that uses it."""
        self.slots.append(slot)
        for use in slot.uses:
            use.module._parameters[use.attribute] = slot.param
            self._bindings.append((use.module._parameters, use.attribute, slot))

    # -- parameters
    @cached_property
    def full_bytes(self) -> int:
        """Bytes of the unit's full copy; asked for once the unit is built."""
        return sum(s.full.element_size() * s.layout.full_numel for s in self.storages)

    @property
    def backward_reads_params(self) -> bool:
        """Tell whether backward needs the full parameters; an embedding's needs the ids alone."""
        return type(self.module).forward is not nn.Embedding.forward

    @property
    def frees_in_backward(self) -> bool:
        """Tell whether a backward pass leaves no memory under the full parameters."""
        return self.settings.stage.frees_after_backward and any(s.frees for s in self.storages)

    def start_unshard(self) -> None:
        """Start gathering the full parameters, if they are not fresh already."""
        if self.param_state is ParamState.FULL and not self.is_fresh:
            self.reshard()
        if self.param_state is not ParamState.SHARDED:
            return
        self._enter(ParamState.GATHERING)
        with span("unshard", self.name):
            items: list[GatherItem] = []
            for storage in self.storages:
                if not storage.is_fresh:
                    items += storage.prepare_gather()
            if items and self.comm.axes.shard.size > 1:
                site = self.comm.site("all_gather", self.name, self.index)
                with self._after_fetch():
                    self._pending = self.comm.start_all_gather(items, self.comm.axes.shard, site)

    def _after_fetch(self) -> AbstractContextManager[None]:
        """Enqueue inside what follows the fetches of slices that live at a home."""
        at_home = next((s for s in self.storages if s.home is not None), None)
        return nullcontext() if at_home is None else at_home.after_fetch()

    def finish_unshard(self) -> None:
        """Wait until the full parameters may be read."""
        self.start_unshard()
        if self.param_state is ParamState.GATHERING:
            for storage in self.storages:
                storage.finish_fetch()
            if self._pending is not None:
                with span("wait_unshard", self.name):
                    self._pending.wait()
                self._pending = None
            self._enter(ParamState.FULL)

    def reshard(self) -> None:
        """Give the full parameters up; their memory goes where the stage frees it."""
        if self.param_state is ParamState.GATHERING:
            self.finish_unshard()
        if self.param_state is ParamState.FULL:
            for storage in self.storages:
                storage.free()
            self._enter(ParamState.SHARDED)

    @property
    def is_fresh(self) -> bool:
        """Tell whether nothing would have to be gathered."""
        return all(s.is_fresh for s in self.storages)

    @property
    def is_resident(self) -> bool:
        """Tell whether the full parameters are being gathered, or hold present values already."""
        return self.param_state is ParamState.GATHERING or self.is_fresh

    @property
    def is_trained(self) -> bool:
        """Tell whether any parameter of the unit has a gradient."""
        return any(s.leaf.requires_grad for s in self.slots)

    def read_versions(self) -> tuple[int, ...]:
        """Return numbers that change whenever a slice is modified."""
        return tuple(s.version for s in self.storages)

    def bind(self) -> None:
        """Put the full parameters into the modules."""
        self._bind_depth += 1
        if self._bind_depth > 1:
            return
        for params, attribute, slot in self._bindings:
            found: Any = params.get(attribute)
            if found is not slot.param or found._owner is not slot:
                self._bind_depth = 0
                raise StateError(
                    f"parameter '{slot.name}' was replaced after shard(), by model.to(), .half(), "
                    "load_state_dict(assign=True) or an assignment; do that before shard()"
                )
            params[attribute] = slot.leaf
        self._versions = [slot.leaf._version for _, _, slot in self._bindings]

    def unbind(self) -> str | None:
        """Put the ShardTensors back; return the name of a parameter that was written meanwhile."""
        if self._bind_depth == 0:
            return None
        self._bind_depth -= 1
        if self._bind_depth:
            return None
        written = None
        for (params, attribute, slot), version in zip(self._bindings, self._versions, strict=True):
            params[attribute] = slot.param
            if slot.leaf._version != version:
                written = slot.name
        return written

    def unbind_all(self) -> None:
        """Put the ShardTensors back after a forward pass that was cut short."""
        self._bind_depth = min(self._bind_depth, 1)
        self.unbind()

    # -- gradients
    def enter_grad_state(self, state: GradState) -> None:
        """Move along the gradient table; what is there already need not move."""
        if state is not self.grad_state:
            self.grad_state = check_transition(GRAD_TRANSITIONS, self.name, self.grad_state, state)

    def forget_grads_if_none(self) -> None:
        """Return to EMPTY when no parameter has a gradient any more."""
        if not any(s.grad is not None or s.has_partial for s in reversed(self.slots)):
            self.enter_grad_state(GradState.EMPTY)
            self.has_local_sum = False

    def drop_partials(self) -> None:
        """Forget unreduced gradients, after a backward pass that was cut short."""
        for slot in self.slots:
            slot.leaf.grad = slot.partial = None
        if self.grad_state is GradState.PARTIAL:
            any_reduced = any(s.grad is not None for s in self.slots)
            self.enter_grad_state(GradState.REDUCED if any_reduced else GradState.EMPTY)
        self.has_local_sum = False

    def _enter(self, state: ParamState) -> None:
        self.param_state = check_transition(PARAM_TRANSITIONS, self.name, self.param_state, state)
