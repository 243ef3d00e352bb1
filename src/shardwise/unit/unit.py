"""One unit at run time: parameters that are gathered, reduced and freed together.

A unit's state is in three parts: `Gather` has the state of the full parameters, `Gradients` the
state of the gradients, and `Slots` the parameters that its modules hold.

Note [When modules hold full parameters]
Under `shard()` modules hold full parameters during their calls, and sharded ones at any other time.
The full copy is fresh until a slice is modified. Under FSDP2's contract, modules hold full
parameters from the gather until the reshard, also between calls, and DTensors at any other time
(``settings.full_between_calls``). Then a unit is fresh while it is FULL, and only a reshard frees
it.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.comm.collectives import Comm, Transport
from shardwise.comm.pending import GatherItem, Pending
from shardwise.config import Precision
from shardwise.stages import UnitSettings
from shardwise.unit.encodings import SeparateParams
from shardwise.unit.home import Home
from shardwise.unit.param import ParamEngine, ShardedParam
from shardwise.unit.slots import Slots
from shardwise.unit.states import (
    GRAD_TRANSITIONS,
    PARAM_TRANSITIONS,
    GradState,
    ParamState,
    check_transition,
)
from shardwise.unit.steps import RunningStep, finish_all
from shardwise.unit.storage import SecondaryShard, Storage
from shardwise.unit.sums import GradientRows, SumSettings


@dataclass
class Gather:
    """The gather of a unit: how it is made, and its state.

    - ``transport``: a user's own; None means the transport of the unit's collectives.
    - ``secondary``: the parts that backward gathers over fewer ranks, if there are any.
    - ``pending``: the collective in flight.
    - ``separate``: the parameters whose full form has memory besides the storages.
    """

    transport: Transport | None = None
    secondary: SecondaryShard | None = None
    state: ParamState = ParamState.SHARDED
    pending: Pending | None = None
    separate: SeparateParams = field(default_factory=SeparateParams)


@dataclass
class Gradients:
    """The gradients of a unit: how they are summed, and their state.

    - ``unit``: the unit's name, for errors.
    - ``num_reducing``: the reductions in flight. A gradient that comes late starts another one.
    - ``has_local_sum``: see Note [Dtype of a sum].
    - ``gradient_rows``: the layouts of gradients of parameters that are in no storage.
    """

    unit: str
    sum_settings: SumSettings
    params: list[ShardedParam]
    state: GradState = GradState.EMPTY
    num_reducing: int = 0
    has_local_sum: bool = False
    gradient_rows: list[GradientRows] = field(default_factory=list)

    def enter(self, state: GradState) -> None:
        """Change to a state, as the table of transitions allows; do nothing if it is the same."""
        if state is not self.state:
            self.state = check_transition(GRAD_TRANSITIONS, self.unit, self.state, state)

    def begin_reducing(self) -> None:
        """Begin a reduction. **State** becomes PARTIAL, then REDUCING."""
        self.enter(GradState.PARTIAL)
        self.enter(GradState.REDUCING)
        self.num_reducing += 1

    def end_reducing(self, *, is_deferred: bool) -> None:
        """End a reduction. **State** becomes REDUCED after the last, or PARTIAL if deferred."""
        self.num_reducing -= 1
        if not self.num_reducing and self.state is GradState.REDUCING:
            self.enter(GradState.PARTIAL if is_deferred else GradState.REDUCED)

    def enter_empty_if_none(self) -> None:
        """Return to EMPTY if no parameter has a gradient."""
        if not any(param.gradient.exists for param in reversed(self.params)):
            self.enter(GradState.EMPTY)

    def accumulate_partials(self) -> None:
        """Add the micro-batch's gradients to this rank's unreduced sums of the window."""
        self.enter(GradState.PARTIAL)
        for param in self.params:
            param.gradient.accumulate_partial()

    def drop_partials(self) -> None:
        """Drop unreduced gradients after an interrupted backward pass."""
        for param in self.params:
            param.gradient.clear_partial()
        if self.state is GradState.PARTIAL:
            any_reduced = any(param.gradient.mean is not None for param in self.params)
            self.enter(GradState.REDUCED if any_reduced else GradState.EMPTY)
        self.has_local_sum = False


class Unit:
    """A set of parameters that are gathered and freed together, with their states.

    - ``name``: of its module in the model; "" is the root. ``index``: its number in the model.
    - ``modules``: the modules whose forward passes need the parameters, usually one.
    - ``engine``: the engine of the model, None until there is one.
    - ``home``: the memory of the slices, if they are offloaded.
    - ``steps``: optimizer steps of its slices that may run on another thread.
    - ``writes``: background writes to files of the state that steps have changed.
    """

    def __init__(
        self,
        name: str,
        index: int,
        modules: Sequence[nn.Module],
        comm: Comm,
        engine: ParamEngine | None,
        settings: UnitSettings,
        precision: Precision,
        sum_settings: SumSettings,
        gather: Gather | None = None,
        home: Home | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.modules = tuple(modules)
        self.comm = comm
        self.engine = engine
        self.settings = settings
        self.precision = precision
        self.home = home
        self.params: list[ShardedParam] = []
        self.storages: list[Storage] = []
        self.gather = gather or Gather()
        self.grads = Gradients(name, sum_settings, self.params)
        self.slots = Slots(binds=not settings.full_between_calls)
        self.steps: list[RunningStep] = []
        self.writes: list[RunningStep] = []
        # With `full_between_calls`: the versions of the full parameters when modules got them, and
        # whether a write to one was reported.
        self._versions: list[int] = []
        self._has_warned = False

    @property
    def module(self) -> nn.Module:
        """The module whose forward passes need the parameters; the first of several."""
        return self.modules[0]

    def add(self, param: ShardedParam) -> None:
        """Add a parameter, and put its sharded form into every module that uses it."""
        self.params.append(param)
        self.slots.add(param)

    # -- parameters
    def set_storages(self, storages: Sequence[Storage]) -> None:
        """Set the storages of the parameters; called again when the parameters were replaced."""
        self.storages = list(storages)
        self.gather.separate = SeparateParams(self.params)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters in storages."""
        return sum(storage.memory.full_bytes for storage in self.storages)

    @property
    def frees_in_backward(self) -> bool:
        """Tell whether a backward pass frees the full parameters."""
        if not self.settings.stage.frees_after_backward or self.settings.stays_full:
            return False
        has_separate = any(param.encoding.has_separate_memory for param in self.params)
        return has_separate or any(storage.frees for storage in self.storages)

    def read_ahead(self) -> None:
        """Start reading slices from files, unless a step is updating them."""
        if self.gather.state is ParamState.SHARDED and all(step.is_over for step in self.steps):
            for storage in self.storages:
                storage.read_ahead()

    def start_unshard(self) -> None:
        """Start gathering the full parameters unless they are fresh."""
        if self.steps:
            self.finish_steps()
        if self.gather.state is ParamState.FULL and not self.is_fresh:
            self._reshard_now()
        if self.gather.state is not ParamState.SHARDED:
            return
        for storage in self.storages:
            storage.finish_read()
        self._enter(ParamState.GATHERING)
        with self.comm.tracer.span("unshard", self.name), torch._C._DisableFuncTorch():
            axis = self.comm.axes.shard
            items: list[GatherItem] = []
            secondary = self.gather.secondary
            if secondary is not None:
                items = secondary.gather_items(self.storages, self._local_versions)
            if items and secondary is not None:
                axis = secondary.axis
            else:
                for storage in self.storages:
                    if self.settings.full_between_calls or not storage.is_fresh:
                        items += storage.prepare_gather()
            items += self.gather.separate.start(also_fresh=self.settings.full_between_calls)
            if not items:
                return
            if axis.size == 1:
                for item in items:
                    if not item.in_place:
                        item.full.view(-1)[: item.source.numel()].copy_(item.source.view(-1))
                return
            collective = self.comm.collective_id("all_gather", self.name, self.index)
            with nullcontext() if self.home is None else self.home.after_fetch():
                self.gather.pending = self.comm.start_all_gather(
                    items, axis, collective, self.gather.transport
                )

    def finish_steps(self) -> None:
        """Wait for background steps of the slices. **Raises** ShardError if one has failed."""
        finish_all(self.steps)

    @property
    def _local_versions(self) -> list[int]:
        """Numbers that change when a sharded parameter is modified."""
        return [param.sharded._local_tensor._version for param in self.params]

    def finish_unshard(self) -> None:
        """Make the unit FULL: start the gather if needed, and wait for it."""
        if self.gather.state is not ParamState.GATHERING:
            self.start_unshard()
        if self.gather.state is not ParamState.GATHERING:
            return
        for storage in self.storages:
            storage.finish_fetch()
        if self.gather.pending is not None:
            with self.comm.tracer.span("wait_unshard", self.name):
                self.gather.pending.wait()
            self.gather.pending = None
        for storage in self.storages:
            storage.finish_gather()
        self._enter(ParamState.FULL)
        if self.settings.full_between_calls:
            self._put_full_in_modules()
        else:
            self.gather.separate.finish()

    def _put_full_in_modules(self) -> None:
        """Let the modules hold the full parameters until the reshard (FSDP2's contract)."""
        with torch._C._DisableFuncTorch():
            for param in self.params:
                param.finish_gather()
                param.put_in_modules(param.full)
            self._versions = [param.full._version for param in self.params]
            self.slots.access.take_written()
        if self.slots.watch is not None:
            self.slots.watch.begin(param.full for param in self.params)
        for storage in self.storages:
            stored = [param for param in self.params if param.is_stored_in(storage)]
            are_copied = all(param.encoding.has_separate_memory for param in stored)
            if are_copied and self.gather.secondary is None:
                storage.free()  # the full parameters do not read it any more

    def reshard(self) -> None:
        """Make the unit SHARDED unless it is pinned; free the full parameters if the stage does."""
        if not self.slots.is_pinned:
            self._reshard_now()

    def _reshard_now(self) -> None:
        if self.gather.state is ParamState.GATHERING:
            self.finish_unshard()
        if self.gather.state is not ParamState.FULL:
            return
        if self.settings.full_between_calls:
            self._warn_of_writes()
        if self.gather.secondary is not None and not self.gather.separate.has_items:
            self.gather.secondary.keep_parts(self.storages, self._local_versions)
        for storage in self.storages:
            storage.free()
        self._enter(ParamState.SHARDED)
        self.gather.separate.free()
        if self.settings.full_between_calls:
            for param in self.params:
                param.put_in_modules(param.sharded)
                param.encoding.free()
        for storage in self.storages:
            if storage.copy.is_held:
                self._warn_of_array(storage)

    def _warn_of_array(self, storage: Storage) -> None:
        """Warn that a NumPy array keeps a full copy allocated."""
        names = [param.name for param in self.params if param.is_stored_in(storage)]
        warnings.warn(
            f"unit '{self.name or '(root)'}': a NumPy array was made of the memory of a full "
            f"parameter ({', '.join(names)[:200]}), so its {storage.full.nbytes} bytes stay "
            "allocated from now on, and the array changes with the next gather. Take "
            ".detach().clone().numpy() in hooks",
            stacklevel=2,
        )

    def _warn_of_writes(self) -> None:
        """Warn once of full parameters that were written in the modules; FSDP2 does not warn.

        `check.writes` compares the values of all others.
        """
        written = self.slots.access.take_written()
        versions, self._versions = self._versions, []
        unwritten: list[tuple[str, nn.Parameter]] = []
        for param, version in zip(self.params, versions, strict=False):
            in_module = param.uses[0].module._parameters.get(param.uses[0].attribute)
            is_same = in_module is param.full and id(param.full) not in written
            if is_same and param.full._version == version:
                unwritten.append((param.name, param.full))
                continue
            if self._has_warned:
                continue
            self._has_warned = True
            warnings.warn(
                f"parameter '{param.name}' was written or replaced while the unit was unsharded. "
                "It is a copy there: the change is lost when the unit is resharded, as in torch's "
                "fully_shard. Change the sharded parameter between steps, or make it a buffer",
                stacklevel=2,
            )
        if self.slots.watch is not None:
            self.slots.watch.end(unwritten)

    @property
    def is_fresh(self) -> bool:
        """Tell whether the full parameters need no gather; all ranks give the same answer."""
        if self.steps:  # also if they are done: ranks finish steps at different times
            return False
        if self.settings.full_between_calls:
            return self.gather.state is ParamState.FULL
        are_stored_fresh = all(storage.is_fresh for storage in self.storages)
        return are_stored_fresh and self.gather.separate.is_fresh

    @property
    def is_resident(self) -> bool:
        """Tell whether the full parameters are being gathered or are fresh."""
        return self.gather.state is ParamState.GATHERING or self.is_fresh

    @property
    def is_trained(self) -> bool:
        """Tell whether any parameter of the unit gets gradients."""
        return self.is_deferred or any(param.is_trained for param in self.params)

    @property
    def is_deferred(self) -> bool:
        """Tell whether gradients await their sum over replicas."""
        return any(s.unreduced is not None for s in self.storages)

    def read_versions(self) -> tuple[int, ...]:
        """Return numbers that change when a slice is modified.

        Return () with `full_between_calls`: the full parameters keep the values that a graph has
        saved, so slices may change between forward and backward, as in FSDP2.
        """
        if self.settings.full_between_calls:
            return ()
        for step in self.steps:  # a step's writes change the version, which all ranks must see
            step.wait()
        versions = tuple(s.version for s in self.storages)
        return (
            (*versions, *self.gather.separate.versions)
            if self.gather.separate.has_items
            else versions
        )

    @property
    def shows_full(self) -> bool:
        """Tell whether the full parameters are in the modules now."""
        if self.settings.full_between_calls:
            return self.gather.state is ParamState.FULL
        return self.slots.are_full

    # -- pinning
    def pin(self) -> None:
        """Start gathering, and stay full until `unpin`, also between passes."""
        self.start_unshard()
        self.slots.is_pinned = True

    def show(self) -> None:
        """Put the full parameters of a pinned unit into the modules."""
        if self.slots.is_pinned:
            self.finish_unshard()
            self.slots.show()

    def unpin(self) -> list[str]:
        """End `pin`, and reshard unless a call of the module is running.

        Return errors about full parameters that were written while the modules held them.
        """
        if not self.slots.is_pinned:
            return []
        self.slots.hide()
        self.slots.is_pinned = False
        if not self.slots.are_full:
            self.reshard()
        return self.slots.take_written()

    # -- gradients
    def reduce_dtype_of(self, master: torch.dtype) -> torch.dtype | None:
        """Return the dtype of sums of gradients of slices of dtype ``master``.

        None means the dtype of the gradients.
        """
        dtype = self.precision.reduce_dtype
        if dtype is None and self.grads.sum_settings.in_param_dtype:
            return master
        return dtype

    # -- states
    def _enter(self, state: ParamState) -> None:
        before = self.gather.state
        self.gather.state = check_transition(PARAM_TRANSITIONS, self.name, before, state)
