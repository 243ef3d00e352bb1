"""``overlap()``: an optimizer's step runs in a background thread, unit by unit.

Note [A step behind the next forward pass]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``optimizer.step()`` reads its inputs when it is called: gradients (unscaled or clipped), learning
rates, and the loss scaler's decision to skip the step. A thread does the arithmetic, in one job per
unit, in the order in which the next forward pass needs the units. That pass waits for a unit's job
before it gathers the unit. The result is bit-identical to a plain step, with clipping and loss
scaling too, and no step has to be undone.

A job steps plain tensors: this rank's elements of parameters, gradients and state, in an optimizer
of the same class that shares the state and has a copy of the groups' options. This is correct for
elementwise optimizers, and saves the overhead of operations on sharded tensors.

Note [Optimizers of offloaded units]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If slices live on the host, ``overlap()`` is called automatically. From the first model with such
units on, a global torch hook runs before every optimizer's step. An optimizer with parameters of
such units gets an overlap before its first step, which already takes this step: the optimizer's
code receives a copy without parameters, and a hook after it, before the user's, takes the step. The
hooks are never removed: garbage collection inside the loop that calls them could free a model, and
would then remove a hook during that loop.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.comm.listener import WAITS
from shardwise.device import run_near
from shardwise.engine.agreement import any_rank, make_room
from shardwise.engine.runtime import Engine
from shardwise.engine.schedule import in_forward_order
from shardwise.errors import ConfigError
from shardwise.offload.staging import StagingBuffers
from shardwise.step.background import BackgroundStep
from shardwise.step.local_step import (
    ELEMENTWISE,
    OVERLAP,
    O,
    Params,
    is_elementwise,
    optimizer_like,
    part_of_step,
    step_plainly,
    step_without_hooks,
)
from shardwise.step.state_files import StateFiles, state_tensors_of
from shardwise.step.unit_step import OnDevice, UnitStep, lock_pages
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.replaced import params_of
from shardwise.unit.home import Home
from shardwise.unit.partial import PartialGrad
from shardwise.unit.states import ParamState
from shardwise.unit.steps import finish_all
from shardwise.unit.unit import Unit

_LOG = logging.getLogger("shardwise")


def overlap(optimizer: O, *, threads: int | None = None, in_backward: bool = False) -> O:
    """Run an optimizer's steps in the background; return the optimizer.

    ``step()`` returns at once. The result is bit-identical. The next forward pass waits for each
    unit before it uses it. Clipping, saving, evaluating, and reading a parameter, a gradient or
    state sharded like its parameter wait for the units they need. ``threads`` is the step's thread
    count; None is the caller's. See Note [A step behind the next forward pass].

    A step blocks if it creates a parameter's state (the parameter's first step), inside an
    accumulation window, and while `unshard()` holds full parameters. On an accelerator it is plain
    too, and does not block. A closure is called at once.

    **State** a step writes into tensors that ``p.to_local()`` returned before: call it again
    afterwards. Plain tensors of the state (step counts, codes of 8-bit moments) change while the
    thread runs; ``optimizer.state_dict()`` waits.

    **Raises** ConfigError for an optimizer not known to be elementwise, and for ``in_backward``,
    which was removed. A failure in the background raises ShardError in the next call that waits,
    with unit and rank.
    """
    if in_backward:
        raise ConfigError(
            "overlap(in_backward=True): steps in the backward pass are gone, as they were no "
            "faster; use overlap(optimizer), whose steps run behind the next forward pass and "
            "leave the same bits"
        )
    if not is_elementwise(optimizer):
        raise ConfigError(
            f"overlap(): {type(optimizer).__name__} is not known to work element by element, so "
            "its units cannot be stepped one by one. Of torch.optim these are: "
            f"{', '.join(ELEMENTWISE)}; and shardwise.optim.AdamW"
        )
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: expected 1 or more, or None")
    if _overlap_of(optimizer) is None:
        vars(optimizer)[OVERLAP] = Overlap(optimizer, threads)
    return optimizer


def _overlap_of(optimizer: Optimizer) -> Overlap | None:
    attached: Overlap | None = vars(optimizer).get(OVERLAP)
    return attached


@cache
def overlap_offloaded() -> None:
    """Overlap optimizers of units whose slices live on the host, from their first step on.

    See Note [Optimizers of offloaded units].
    """
    torch_optimizer.register_optimizer_step_pre_hook(_attach)


def _attach(
    optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Overlap an optimizer of offloaded units; return arguments for a step that does nothing."""
    if torch.compiler.is_compiling():  # the step itself handles this case
        return None
    made = _overlap_of(optimizer)
    if made is not None:
        made.is_begun = False  # a hook of the user's may have raised before the first step
        return None
    homes = homes_of(optimizer)
    if not homes or hasattr(optimizer, "optimizers"):  # of which each is asked by itself
        return None
    if not is_elementwise(optimizer):
        _warn_of_memory(optimizer, any(home.files.optimizer is not None for home in homes))
        return None
    made = Overlap(optimizer, None)
    vars(optimizer)[OVERLAP] = made
    hooks = optimizer._optimizer_step_post_hooks
    own = optimizer.register_step_post_hook(_step_first).id
    hooks.move_to_end(own, last=False)  # type: ignore[attr-defined]
    made.is_begun = True
    return (optimizer_like(optimizer, [], defaultdict(dict)), *args[1:]), kwargs


def _warn_of_memory(optimizer: Optimizer, has_files: bool) -> None:
    """Warn, at the first step, that the state will not be in files."""
    if has_files and not optimizer.state:
        _LOG.warning(
            "%s is not known to work element by element, so it steps as usual, and its "
            "state is in host memory and not in files",
            type(optimizer).__name__,
        )


def _step_first(optimizer: Optimizer, *_: object) -> None:
    """Take the step that `_attach` has withheld."""
    made = _overlap_of(optimizer)
    if made is not None and made.is_begun:
        made.is_begun = False
        made.step_now(optimizer)


def staging_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of device buffers through which state on the host is stepped."""
    parts = () if optimizer is None else getattr(optimizer, "optimizers", (optimizer,))
    staging = [made.staging for made in map(_overlap_of, parts) if made is not None]
    return sum(buffers.num_bytes for buffers in staging if buffers is not None)


ByUnit = Mapping[Unit | None, Params]


@dataclass(frozen=True)
class _Step:
    """Replacement of ``optimizer.step``; as in a method, ``__func__`` takes the optimizer first.

    Its reference to the optimizer is weak: a cycle would keep all state until garbage collection.
    """

    of: weakref.ref[Optimizer]
    __func__: Callable[..., object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Step."""
        return self.__func__(self.of(), *args, **kwargs)

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the function, as a method does."""
        return getattr(self.__func__, name)


@dataclass(frozen=True)
class _StepPlan:
    """Inputs of one step; the same on all ranks, except for a rank's own elements.

    ``way``: unit by unit at once, in the background, or plainly. ``stores``: some rank must store
    state of units in new files.
    """

    by_unit: ByUnit
    stores: bool
    way: Literal["now", "behind", "plainly"]
    with_disk: Sequence[Engine]

    @property
    def with_grad(self) -> list[torch.Tensor]:
        """The parameters that have a gradient."""
        return [param for params in self.by_unit.values() for _, param in params]


class Overlap:
    """The steps of one optimizer."""

    def __init__(self, optimizer: Optimizer, threads: int | None) -> None:
        self.is_begun = False  # True after a step's pre-hooks, until the step is taken
        self._units: list[Unit] = []  # units of the last step
        self._stepped: dict[torch.Tensor, bool] = {}  # stepped plainly: True if that left state
        self._stored = StateFiles()
        self._num_loads = 0  # the models' loads at the last exchange between ranks
        self._some_rank_stores = False  # the result of that exchange, until the step is taken
        self.staging: StagingBuffers | None = None  # made when the first unit needs it
        self._thread = ThreadPoolExecutor(1, "shardwise-step")
        self._writer = ThreadPoolExecutor(1, "shardwise-store")  # waits for writes
        num_threads = torch.get_num_threads()
        near = [self._thread.submit(run_near, h.device).result() for h in homes_of(optimizer)[:1]]
        step_threads = threads or min([num_threads, *filter(None, near)])
        self._thread.submit(torch.set_num_threads, step_threads).result()
        torch.set_num_threads(num_threads)  # the call above also set the default of later threads
        self._plain_step: Callable[[], object] | None = vars(optimizer).get("step")  # a scheduler's

        def step(optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
            return self.step(optimizer, closure)

        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a scheduler looks for it
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = _Step(weakref.ref(optimizer), step)  # type: ignore[assignment]
        optimizer.register_state_dict_pre_hook(lambda _: self.finish())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish())

    def finish(self) -> None:
        """Wait for all units' steps. **Raises** ShardError if one has failed."""
        for unit in self._units:
            unit.finish_steps()
            finish_all(unit.writes)
        self._units = []

    def step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
        """Step at once, or submit the units' steps to the thread."""
        self.finish()
        plan = None if closure is not None else self._plan(optimizer)
        if plan is not None and plan.way == "plainly":
            returned = (self._plain_step or partial(type(optimizer).step, optimizer))()
            self._note_stepped(optimizer, plan.with_grad)
            return returned
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers read it
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for pre in chain(torch_optimizer._global_optimizer_pre_hooks.values(), before.values()):
            pre(optimizer, (optimizer,), {})
        loss = None
        if closure is not None:  # these optimizers call it once, before anything else
            with torch.enable_grad():
                loss = closure()
        if plan is None or any(hook is not step_plainly for hook in before.values()):
            plan = self._plan(optimizer)  # hooks may have changed gradients
        self._take(optimizer, plan)
        for post in chain(after.values(), torch_optimizer._global_optimizer_post_hooks.values()):
            post(optimizer, (optimizer,), {})
        return loss

    def step_now(self, optimizer: Optimizer) -> None:
        """Step and wait, without calling hooks."""
        plan = self._plan(optimizer)
        self._take(optimizer, replace(plan, way="now") if plan.way == "behind" else plan)

    def _take(self, optimizer: Optimizer, plan: _StepPlan) -> None:
        if plan.way == "behind":
            return self._start(optimizer, dict(plan.by_unit))
        if plan.way == "now":
            self._step_by_unit(optimizer, plan)
        else:
            step_without_hooks(optimizer)
        self._note_stepped(optimizer, plan.with_grad)

    def _plan(self, optimizer: Optimizer) -> _StepPlan:
        """Inspect gradients and state, and choose how to step."""
        by_unit = _by_unit(optimizer)
        with_disk = _engines_of(filter(_has_disk, by_unit))
        plan = _StepPlan(by_unit, self._stores(optimizer, by_unit), "plainly", with_disk)
        with_grad = plan.with_grad
        none_here = with_grad and all(param.device.type != "cpu" for param in with_grad)
        waits = not none_here and all(self._may_wait(optimizer, param) for param in with_grad)
        if waits and not plan.stores:
            return replace(plan, way="behind")
        in_window = any(isinstance(param.grad, PartialGrad) for param in with_grad)
        by_part = plan.stores or any(map(_steps_on_device, by_unit))
        if not in_window and by_part:
            return replace(plan, way="now")
        return plan

    def _step_by_unit(self, optimizer: Optimizer, plan: _StepPlan) -> None:
        """Step units one after another; a failure leaves the models unusable.

        See Note [State in files] and Note [Steps on the device].
        """
        if plan.stores:
            work = partial(self._stored.reserve, optimizer, plan.by_unit)
            make_room(plan.with_disk[0].comm.control, work)
        unit = None
        try:
            for unit, params in plan.by_unit.items():
                self._step_of(optimizer, unit, params, from_file=False)()
                if unit is not None:
                    self._stored.store(optimizer, unit)
            self._some_rank_stores = False
        except BaseException as failure:
            why = f"the optimizer's step failed part of the way: {failure}"
            for engine in _engines_of(plan.by_unit):
                engine.status.refuse(f"{why} Then load() a checkpoint")
            if unit is not None:
                name = unit.name or "(root)"
                rank = dist.get_rank() if dist.is_initialized() else 0
                WAITS.listener.report_failure(f"rank {rank}, unit '{name}': {why}")
            raise

    def _stores(self, optimizer: Optimizer, by_unit: ByUnit) -> bool:
        """Return True if any rank's step must store the state of units in new files.

        All ranks agree without communication, except after a load: a file fails on one rank only.
        """
        needs = [u for u, p in by_unit.items() if u and self._stored.needs_storing(optimizer, u, p)]
        engines = _engines_of(filter(_has_disk, by_unit))
        num_loads = sum(engine.status.num_loads for engine in engines)
        if engines and num_loads != self._num_loads:
            self._num_loads = num_loads
            self._some_rank_stores = any_rank(engines[0].comm.control, bool(needs))
        return bool(needs) or self._some_rank_stores

    def _note_stepped(self, optimizer: Optimizer, with_grad: Sequence[torch.Tensor]) -> None:
        self._stepped |= {param: bool(optimizer.state.get(param)) for param in with_grad}

    def _may_wait(self, optimizer: Optimizer, param: torch.Tensor) -> bool:
        """Return True if a parameter may be stepped later; the same on all ranks.

        It may not if its step creates the state, since the caller may iterate over the state, nor
        while the modules hold full parameters, since reading those does not wait.
        """
        if isinstance(param.grad, PartialGrad):
            return False
        owner = owner_of(param)
        if owner is not None:
            unit = owner.unit
            is_full = unit.settings.full_between_calls and unit.gather.state is ParamState.FULL
            if unit.slots.is_pinned or is_full:
                return False
        had_state = self._stepped.get(param)
        return had_state is not None and (bool(optimizer.state.get(param)) or not had_state)

    def _start(self, optimizer: Optimizer, by_unit: dict[Unit | None, Params]) -> None:
        """Submit the units' steps to the threads, in the order of the next forward pass."""
        alone = by_unit.pop(None, None)
        mine = [unit for unit in by_unit if unit is not None]
        self._units += mine
        units = in_forward_order(mine)
        # All checks come before the first step.
        now = [] if alone is None else [part_of_step(optimizer, alone)[0]]
        steps = [self._step_of(optimizer, unit, by_unit[unit], from_file=True) for unit in units]
        used = [id(tensor) for step in steps for tensor in (*step.computed, *step.put)]
        if len(set(used)) < len(used):  # one gradient for two parameters
            now += [part_of_step(optimizer, by_unit[unit])[0] for unit in units]
            units, steps = [], []
        for unit, (step, following) in zip(units, pairwise([*steps, None]), strict=True):
            assert step is not None
            made = partial(BackgroundStep, unit.name, tracer=unit.comm.tracer)
            unit.steps.append(made(partial(step.compute, following), step.computed))
            self._thread.submit(unit.steps[-1].run)
            if step.puts_back:
                writes = unit.steps if step.file is None else unit.writes
                writes.append(made(step.put_back, step.put, phase="store"))
                self._writer.submit(writes[-1].run)
        for work in now:
            work()

    def _step_of(
        self, optimizer: Optimizer, unit: Unit | None, params: Params, *, from_file: bool
    ) -> UnitStep:
        """Return the step of some parameters; ``from_file``: of state that rests in a file."""
        home = None if unit is None else unit.home
        if unit is None or home is None:
            return UnitStep(*part_of_step(optimizer, params))
        if home.steps_on_device:
            lock_pages(optimizer, unit, home)
        plain, tensors = part_of_step(optimizer, params)
        device, file, held = None, None, None
        if from_file and home.files.optimizer is not None:
            held = state_tensors_of(optimizer, unit)
            # If a group's moments have another form now, the next step stores them again.
            file = self._stored.file_of(unit, held)
        if home.steps_on_device:
            self.staging = self.staging or StagingBuffers(home.device, home.time)
            device = OnDevice(unit, home, self.staging)
        return UnitStep(plain, tensors, file, held, device)


def _by_unit(optimizer: Optimizer) -> dict[Unit | None, Params]:
    """Return the parameters that have a gradient, with the numbers of their groups, by unit.

    The key None is for parameters that are stepped at once: those of no unit, since their use does
    not wait, and those on an accelerator, where a step does not block.
    """
    found: dict[Unit | None, list[tuple[int, torch.Tensor]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.grad is not None:
                owner = owner_of(param) if param.device.type == "cpu" else None
                found.setdefault(None if owner is None else owner.unit, []).append((number, param))
    return {**found}


def _steps_on_device(unit: Unit | None) -> bool:
    return unit is not None and unit.home is not None and unit.home.steps_on_device


def _has_disk(unit: Unit | None) -> bool:
    return unit is not None and unit.home is not None and unit.home.files.optimizer is not None


def _engines_of(units: Iterable[Unit | None]) -> list[Engine]:
    """Return the engines of the units' models."""
    engines = {id(unit.engine): unit.engine for unit in units if unit is not None}
    return [engine for engine in engines.values() if isinstance(engine, Engine)]


def homes_of(optimizer: Optimizer) -> list[Home]:
    """Return the homes of the units of an optimizer's parameters."""
    owners = map(owner_of, params_of(optimizer))
    return [owner.unit.home for owner in owners if owner is not None and owner.unit.home]
