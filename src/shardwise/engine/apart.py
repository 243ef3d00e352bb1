"""A part of an optimizer's step: some parameters, as plain tensors, in an optimizer like theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.layout.placements import local_of
from shardwise.unit.plain_state import owner_of
from shardwise.unit.stepping import elements_of


class Apart:
    """Some parameters of an optimizer, to be stepped as plain tensors by one like it."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[tuple[int, Any]]) -> None:
        self.sharded: list[DTensor] = []
        self._given: list[tuple[Any, Any, dict[str, Any]]] = []
        self._state = optimizer.state
        groups = [
            {key: _kept(value) for key, value in group.items() if key != "params"} | {"params": []}
            for group in optimizer.param_groups
        ]
        state: defaultdict[Any, Any] = defaultdict(dict)
        for number, param in params:
            stand_in = self._local(param).detach()
            stand_in.grad = self._local(param.grad)
            groups[number]["params"].append(stand_in)
            values = {key: self._local(v) for key, v in optimizer.state.get(param, {}).items()}
            state[stand_in] = dict(values)
            self._given.append((param, stand_in, values))
        self._optimizer = optimizer_like(optimizer, groups, state)

    def _local(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            self.sharded.append(value)
        return local_of(value) if isinstance(value, torch.Tensor) else value

    def step_with(
        self, state: Mapping[tuple[int, str], torch.Tensor]
    ) -> dict[tuple[int, str], torch.Tensor]:
        """Step with this memory in the place of some of the state, by id and name.

        Return what the optimizer has put in its place, which is not handed on.
        """
        for param, stand_in, values in self._given:
            for key in values:
                if (id(param), key) in state:
                    values[key] = self._optimizer.state[stand_in][key] = state[id(param), key]
        found = {}
        for param, key, value in self._step():
            if (id(param), key) in state:
                found[id(param), key] = value
            else:
                self._hand_on(param, key, value)
        return found

    def step(self) -> None:
        """Step; hand on what the optimizer has replaced in the state."""
        for param, key, value in self._step():
            self._hand_on(param, key, value)

    def _step(self) -> Iterator[tuple[Any, str, Any]]:
        """Step; yield what the optimizer has replaced in the state, by parameter and name."""
        kind: Any = type(self._optimizer)
        kind.step.__wrapped__(self._optimizer)  # hooks were called by the caller of step()
        # torch's fused kernels do not say that they write, and full copies would count as fresh.
        torch.autograd.graph.increment_version([each for _, each, _ in self._given])
        for param, stand_in, values in self._given:
            for key, value in self._optimizer.state[stand_in].items():
                if value is not values.get(key):
                    yield param, key, value

    def _hand_on(self, param: Any, key: str, value: Any) -> None:
        alike = isinstance(value, torch.Tensor) and value.shape == elements_of(param).shape
        owner = owner_of(param) if alike and value.ndim else None
        self._state[param][key] = value if owner is None else owner.form.like(value)


def optimizer_like(optimizer: Any, groups: list[dict[str, Any]], state: Any) -> Any:
    """Return an optimizer of the same class that has other groups and another state."""
    made = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    vars(made).update(param_groups=groups, state=state)
    return made


def _kept(value: Any) -> Any:
    """Return an option as it is now: a learning rate that is a tensor is changed in place."""
    if isinstance(value, list | tuple):
        return type(value)(map(_kept, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
