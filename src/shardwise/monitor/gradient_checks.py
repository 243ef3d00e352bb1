"""Checks before a step: gradients that are not finite, updates that round away.

Updates round away in parameters of 16 bits that are stepped without fp32 masters.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwise.monitor.metrics import BAD_GRADIENTS, LOST_OF_WORST_SHARE, LOST_SHARE
from shardwise.monitor.record import LostUpdates as LostUpdatesLine
from shardwise.monitor.record import NonFinite
from shardwise.step.background import is_under_way
from shardwise.tensor.elements import elements_of
from shardwise.tensor.plain_state import owner_of, stepped_in_16_bits
from shardwise.unit.unit import Unit

# Gradients are checked every so many steps, twice; then for this share of the time, or every
# `_CHECKED_S` if that is more often.
_CHECKED_EVERY, _CHECKED_SHARE, _CHECKED_S = 10, 0.001, 2.0
# Each of the first steps is looked at; then looks take this share of the time, or come every
# `_SELDOM_S` if that is more often. A look ends in the next step, which takes time too.
_FIRST_LOOKS, _SHARE, _SELDOM_S = 8, 0.0005, 30.0
_PARAMETERS, _ELEMENTS = 16, 4096  # of one look: parameters in turn, some elements of each
_LEAST_WANTED = 32  # updates of a parameter that is judged singly
_MAX_NAMED = 8


@dataclass
class _Sample:
    name: str
    param: DTensor
    before: torch.Tensor
    wanted: torch.Tensor  # elements with a gradient


class LostUpdates:
    """Counts elements that have a gradient and the same value before and after a step.

    The sample of a step is compared as the next step begins, when a step in the background is over.

    **Cost** nothing without parameters in 16 bits. A look waits for each device once.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        made = {each: stepped_in_16_bits(each) for each in optimizers}
        self._params = {each: params for each, params in made.items() if params}
        self._samples: dict[torch.optim.Optimizer, list[_Sample]] = {}
        self._counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))  # lost, wanted
        self._figures: dict[str, float] = {}
        self._num_looks = self._next = 0
        self._again_s = -math.inf

    @property
    def has_params(self) -> bool:
        """Tell whether there are parameters to look at."""
        return bool(self._params)

    def clear(self) -> None:
        """Keep no optimizer and no parameter alive."""
        self._params, self._samples = {}, {}

    @torch.no_grad()
    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the last sample, and take one if a look is due; before the optimizer's step."""
        if optimizer not in self._params:
            return
        began_s = time.monotonic()
        held = self._samples.pop(optimizer, [])
        self._compare(held)
        is_due = self._num_looks < _FIRST_LOOKS or began_s >= self._again_s
        found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler: no step is taken
        if is_due and (found_inf is None or not found_inf):
            self._samples[optimizer] = self._sample(optimizer)
        if held or optimizer in self._samples:
            wait_s = min((time.monotonic() - began_s) / _SHARE, _SELDOM_S)
            self._again_s = max(self._again_s, began_s + wait_s)

    def take(self, step: int) -> tuple[Mapping[str, float], Sequence[LostUpdatesLine]]:
        """Return the figures of a comparison since the last call, and a line of the worst."""
        figures, self._figures = self._figures, {}
        if not figures or self._num_looks & (self._num_looks - 1):  # after 1, 2, 4, 8, ... looks
            return figures, ()
        shares = self._shares()
        worst = sorted(shares, key=lambda name: -shares[name])[:_MAX_NAMED]
        return figures, [LostUpdatesLine(step, {name: shares[name] for name in worst})]

    def _shares(self) -> Mapping[str, float]:
        counts = self._counts.items()
        return {name: lost / wanted for name, (lost, wanted) in counts if wanted >= _LEAST_WANTED}

    def _sample(self, optimizer: torch.optim.Optimizer) -> list[_Sample]:
        rates = {id(p): g.get("lr", 1.0) for g in optimizer.param_groups for p in g["params"]}
        params, found = self._params[optimizer], []
        for number in range(self._next, self._next + min(len(params), _PARAMETERS)):
            param, name = params[number % len(params)]
            grad = param.grad
            if grad is None or is_under_way(param) or not rates.get(id(param)):
                continue
            before = _some_of(elements_of(param))
            wanted = _some_of(elements_of(grad) if isinstance(grad, DTensor) else grad)
            if before.numel() and before.shape == wanted.shape:
                found.append(_Sample(name, param, before.clone(), wanted != 0))
        self._next += _PARAMETERS
        return found

    def _compare(self, samples: Sequence[_Sample]) -> None:
        counts: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        names: dict[torch.device, list[str]] = defaultdict(list)
        for each in samples:
            now = _some_of(elements_of(each.param))
            if now.shape == each.before.shape and now.device == each.before.device:
                is_lost = (now == each.before) & each.wanted
                counts[now.device].append(torch.stack([is_lost.sum(), each.wanted.sum()]))
                names[now.device].append(each.name)
        all_lost = all_wanted = 0
        for device, on_device in counts.items():
            rows = torch.stack(on_device).tolist()
            for name, (lost, wanted) in zip(names[device], rows, strict=True):
                all_lost, all_wanted = all_lost + lost, all_wanted + wanted
                before = self._counts[name]
                self._counts[name] = before[0] + lost, before[1] + wanted
        if all_wanted:
            self._num_looks += 1
            worst = 100 * max(self._shares().values(), default=0.0)
            self._figures = {LOST_SHARE: 100 * all_lost / all_wanted, LOST_OF_WORST_SHARE: worst}


def _some_of(local: torch.Tensor) -> torch.Tensor:
    flat = local.reshape(-1)
    return flat[:: max(math.ceil(flat.numel() / _ELEMENTS), 1)]


class GradientChecks:
    """Checks gradients in some steps: which of an optimizer's have inf or nan on this rank."""

    def __init__(self) -> None:
        self.is_due, self._again_s = False, -math.inf
        self._num_steps = self._finite_step = 0  # so far; the last one that was checked and finite
        self._found: list[str] | None = None  # in this step; None if it was not checked

    def look(
        self, units: Sequence[Unit], optimizer: torch.optim.Optimizer, is_asked_for: bool
    ) -> None:
        """Check an optimizer's gradients before its step, if that is due or asked for."""
        if self.is_due or is_asked_for:
            began_s = time.monotonic()
            self._found = [*(self._found or ()), *bad_gradients(units, optimizer)]
            took_s = time.monotonic() - began_s
            self._again_s = began_s + min(took_s / _CHECKED_SHARE, _CHECKED_S)

    def take(self, step: int) -> tuple[Mapping[str, float], Sequence[NonFinite]]:
        """End a step; return its figure if it was checked, and a line of bad parameters."""
        self._num_steps += 1
        is_due = self._num_steps < 2 * _CHECKED_EVERY or time.monotonic() >= self._again_s
        self.is_due = is_due and self._num_steps % _CHECKED_EVERY == 1
        found, self._found = self._found, None
        if found is None:
            return {}, ()
        if not found:
            self._finite_step = step
            return {BAD_GRADIENTS: 0.0}, ()
        line = NonFinite(step, found[:_MAX_NAMED], self._finite_step)
        return {BAD_GRADIENTS: float(len(found))}, [line]


@torch.no_grad()
def bad_gradients(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the parameters of an optimizer whose gradient has inf or nan on this rank.

    **Cost** reads this rank's gradients once, and waits for each device once.
    """
    of_param = {id(p): p.name for u in units for p in u.params}
    found: dict[torch.device, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            local = elements_of(grad) if isinstance(grad, DTensor) else grad
            if local is not None and local.numel():
                name = of_param.get(id(owner_of(param)), "(no unit)")
                found[local.device].append((name, local))
    bad = []
    for gradients in found.values():
        norms = torch._foreach_norm([local for _, local in gradients])
        are_finite = torch.stack([norm.float() for norm in norms]).isfinite().tolist()
        for (name, local), is_finite in zip(gradients, are_finite, strict=True):
            # A sum of squares may overflow: check each element.
            bad += [name] * (not is_finite and not bool(local.isfinite().all()))
    return bad
