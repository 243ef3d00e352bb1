"""Comparison of ranks during training: their trained parameters and their optimizer steps.

Note [When ranks are compared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If ranks train different parameters, they send different bytes in the next reduction. If a rank
skips a step, or steps with another optimizer or learning rate, the slices silently belong to two
different models. So before the first reduction of a pass, a rank compares itself with the others
over the control group:

- if a parameter was frozen or thawed since the last comparison. If the other ranks have no change,
  they are in the reduction while this rank waits, until the limit of the watch, which names both;
- in passes 2, 4, 8 and so on: the number of steps so far, and the optimizers' classes and options
  in each optimizer's steps 1, 2, 4, 8 and so on.

All ranks of the model's mesh reach that reduction, including a rank that has skipped the step. In
all other passes nothing is sent. If ranks may skip layers, their first reductions are in different
layers, and other ranks may wait for them in a collective of a layer between: such models compare
before the backward pass. Each stage of a pipeline has its mesh and may have different optimizers.
A step that a loss scaler skips does not count, on any rank.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.comm.collectives import Comm
from shardwise.engine.agreement import find_difference
from shardwise.errors import StateError
from shardwise.tensor.plain_state import owner_of, owning_rank
from shardwise.unit.unit import Unit

_STEPS = "_shardwise_steps"
_SHOWN = 3


class RankChecks:
    """The checks of one model, over the ranks of its mesh.

    ``refuse`` marks the parameters unusable if the ranks' steps differ.
    """

    def __init__(self, comm: Comm, units: Sequence[Unit], refuse: Callable[[str], None]) -> None:
        own = comm.axes.mesh
        is_here = [unit.comm is comm or unit.comm.axes.mesh == own for unit in units]
        self.units = [unit for unit, here in zip(units, is_here, strict=True) if here]
        self._params = [param for unit in self.units for param in unit.params]
        self._trained = self._read_trained()
        self._comm = comm
        self._refuse = refuse
        self._num_passes = 0
        self._is_due = True
        self.num_steps = 0
        self.optimizers: list[list[str]] = []

    def _read_trained(self) -> list[bool]:
        return [param.is_trained for param in self._params]

    def begin_pass(self, compares: bool) -> None:
        """Schedule the comparison before the next reduction; if ``compares``, run it now."""
        self._is_due = True
        if compares:
            self.before_reduction()

    def before_reduction(self) -> None:
        """Compare this rank with the others, once per pass. See Note [When ranks are compared].

        **Raises** StateError on all ranks, naming the ranks and the first difference.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._num_passes += 1
        is_power = self._num_passes > 1 and not self._num_passes & (self._num_passes - 1)
        trained = self._read_trained()
        changed = [
            f"'{param.name}' {'is trained' if now else 'is frozen'}"
            for param, now, before in zip(self._params, trained, self._trained, strict=True)
            if now != before
        ]
        if not changed and not is_power:
            return
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        about = f"{', '.join(changed[:_SHOWN])}{more} here since the last pass" if changed else ""
        steps = [f"{self.num_steps} steps of optimizers so far"]
        facts = steps + [line for lines in self.optimizers for line in lines]
        control = self._comm.control
        if (found := find_difference(control, facts, about or "the steps so far")) is not None:
            why = f"the ranks have not stepped alike: {found}"
            self._refuse(f"{why}. load() a checkpoint")
            raise StateError(
                f"{why}. Since then each rank's slices are those of another model: start again, or "
                "from a checkpoint that was saved before. Every rank must call optimizer.step() as "
                "often as the others, with the same class of optimizer and the same options"
            )
        facts = [
            f"parameter '{param.name}' is {'trained' if now else 'frozen'}"
            for param, now in zip(self._params, trained, strict=True)
        ]
        if (found := find_difference(control, facts, about or "what is trained")) is not None:
            raise StateError(
                f"backward(): the ranks differ: {found}. Call requires_grad_() alike on every rank"
            )
        self._trained = trained


@dataclass
class _Steps:
    """The steps of one optimizer, and the place of its facts in each model's checks."""

    places: list[tuple[weakref.ref[RankChecks], int]]
    state: Any
    num: int = 0
    num_loads: int = 0

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; record class and options in steps 1, 2, 4, 8 ... and after a load."""
        self.num += 1
        is_loaded = self.state is not optimizer.state  # every load replaces it
        self.num_loads, self.state = self.num_loads + is_loaded, optimizer.state
        notes = is_loaded or not self.num & (self.num - 1)
        for ref, place in self.places:
            checks = ref()
            if checks is not None:
                checks.num_steps += 1
                if notes:
                    checks.optimizers[place] = list(self._facts(optimizer, place))

    def _facts(self, optimizer: torch.optim.Optimizer, place: int) -> Iterator[str]:
        kind = type(optimizer).__name__
        what = f"optimizer {place}, {kind}, in its step {self.num}"
        yield f"{what}, state loaded {self.num_loads} times"
        for number, group in enumerate(optimizer.param_groups):
            options = (f"{key}={_option(group[key])}" for key in optimizer.defaults if key in group)
            yield f"{what}, group {number}: {', '.join(options)}"


def _option(value: Any) -> str:
    """Return an option as text, floats with 6 digits because hosts may round differently."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_option, value))})"
    return str(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _note_step(optimizer: Any, *_: object) -> None:
    """Count a step of an optimizer in the checks of each model whose parameters it has."""
    # A wrapper of several optimizers is not counted; each inner optimizer is.
    if torch.compiler.is_compiling() or hasattr(optimizer, "optimizers"):
        return
    steps: _Steps | None = vars(optimizer).get(_STEPS)
    if steps is None:
        found: dict[int, RankChecks] = {}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            checks = getattr(getattr(owner_of(param), "unit", None), "engine", None)
            checks = getattr(checks, "rank_checks", None)
            if checks is not None:
                found[id(checks)] = checks
        places = []
        for checks in found.values():
            places.append((weakref.ref(checks), len(checks.optimizers)))
            checks.optimizers.append([])
        # A matrix that is whole on one rank has state on that rank only.
        is_loaded = any(optimizer.state.get(p) for p in params if owning_rank(p) is None)
        steps = _Steps(places, None if is_loaded else optimizer.state)
        vars(optimizer)[_STEPS] = steps
    steps.note(optimizer)


register_optimizer_step_pre_hook(_note_step)
