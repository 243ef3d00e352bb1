"""Steps of an optimizer that begin in backward, each as soon as its unit's gradients are final.

Note [A step that nobody has asked for yet]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Such a step has the plain one's bits if ``optimizer.step()`` follows, and until then nobody reads or
changes what it works on. So its parameters, gradients and state refuse to be read until then
(`BackgroundStep`, ``is_early``): clipping, loss scalers, a second backward pass, an evaluation, a
save and the next forward pass of a step that was left out get an error, and not other numbers.
``optimizer.step()`` checks what is not read: the options of the groups, that each ``p.grad`` is the
one that was taken, and that one backward pass has ended well since. What does not hold leaves a
model that is refused until a load.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from shardwise.engine.apart import kept_options
from shardwise.engine.stored import Params
from shardwise.errors import ConfigError, StateError
from shardwise.unit.plain_state import owner_of
from shardwise.unit.stepping import BackgroundStep
from shardwise.unit.unit import Unit

Begin = Callable[[Any, Unit, Params], Sequence[BackgroundStep] | None]


class Early:
    """The steps of one optimizer that have begun in backward and are not confirmed.

    ``begin`` begins the step of a unit, or returns None where that has to wait for
    ``optimizer.step()``. **Raises** ConfigError for models that it cannot be right for.
    """

    def __init__(self, optimizer: Any, begin: Begin) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._begin = begin
        self._options: list[dict[str, Any]] = []
        self._steps: list[BackgroundStep] = []
        self._grads: list[tuple[Any, Any]] = []
        self._counts: dict[Any, tuple[int, int]] = {}  # passes, loads of each engine at the first
        self._units: set[Unit | None] = set()
        engines = {_engine_of(param) for _, param in _params_of(optimizer)}
        for engine in engines:
            engine.conditions.steppers.append(self.step)
            weakref.finalize(optimizer, _forget_stepper, engine.conditions.steppers, self.step)

    @property
    def units(self) -> Collection[Unit | None]:
        """The units that have begun; a load has put other values there."""
        if any(engine.conditions.num_loads != n for engine, (_, n) in self._counts.items()):
            self._forget()
        return self._units

    def step(self, units: Sequence[Unit]) -> None:
        """Begin the steps of units whose gradients are final."""
        optimizer = self._optimizer()
        for unit in units if optimizer is not None else ():
            owned = {id(param.sharded) for param in unit.params}
            params = [(n, p) for n, p in _params_of(optimizer) if id(p) in owned]
            params = [(number, param) for number, param in params if param.grad is not None]
            if unit in self.units or not params or unit.num_reducing:
                continue
            steps = self._begin(optimizer, unit, params)
            if steps is None:
                continue
            if not self.units:
                self._options = kept_options(optimizer)
            engine: Any = unit.scheduler
            counts = engine.num_reduced, engine.conditions.num_loads
            self._counts.setdefault(engine, counts)
            self._grads += [(param, param.grad) for _, param in params]
            self._steps += steps
            self._units.add(unit)

    def confirm(self, optimizer: Any) -> None:
        """Let the steps be those of ``optimizer.step()``. **Raises** StateError; see the Note."""
        if not self.units:
            return
        wrong = self._what_differs(optimizer)
        if wrong is not None:
            why = (
                f"overlap(in_backward=True): {wrong} between the step of the first unit, in "
                "backward, and optimizer.step(), so the steps are not those of a plain run. Call "
                "overlap() without in_backward; load() a checkpoint to go on"
            )
            for engine in self._counts:
                engine.conditions.refuse(why)
            raise StateError(why)
        for step in self._steps:
            step.confirm()
        self._forget()

    def _what_differs(self, optimizer: Any) -> str | None:
        if any(engine.num_reduced != n + 1 for engine, (n, _) in self._counts.items()):
            return "no backward pass has ended well, or several have,"
        if any(param.grad is not grad for param, grad in self._grads):
            return "a gradient was replaced or dropped"
        now = kept_options(optimizer)
        for number, (ours, theirs) in enumerate(zip(now, self._options, strict=False)):
            for key in ours.keys() | theirs.keys():
                if not _are_same(ours.get(key), theirs.get(key)):
                    return f"{key!r} of group {number} was changed"
        return None if len(now) == len(self._options) else "a group was added"

    def _forget(self) -> None:
        self._units.clear()
        self._counts.clear()
        self._steps, self._grads = [], []


def _params_of(optimizer: Any) -> list[tuple[int, Any]]:
    return [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]


def _engine_of(param: Any) -> Any:
    owner = owner_of(param)
    unit = None if owner is None else owner.unit
    why = None
    if unit is None or not owner.form.asks_unit:
        why = "has a parameter that is not of a model of shard()"
    elif unit.precision.param is torch.float16:
        why = "is of a model in fp16, whose loss is scaled: gradients are unscaled after backward"
    elif unit.comm.axes.stages is not None:
        why = "is of a stage of a pipeline, whose gradients are final at the end of a schedule"
    if why is not None:
        raise ConfigError(f"overlap(in_backward=True): the optimizer {why}; leave in_backward out")
    assert unit is not None
    return unit.scheduler


def _are_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_are_same, a, b))
    return bool(a is b or a == b)


def _forget_stepper(steppers: list[Any], step: Any) -> None:
    """Take the stepper of an optimizer away that is gone."""
    if step in steppers:
        steppers.remove(step)
