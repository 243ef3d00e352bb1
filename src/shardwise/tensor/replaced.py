"""Errors for optimizers that still hold parameters that shard() has replaced.

Note [An optimizer built too early]
An optimizer knows its parameters by identity. An optimizer built before shard() holds tensors that
are no longer in a module. They never get a gradient, and an optimizer skips parameters without one,
so its steps would silently change nothing. An optimizer reads only ``grad`` of such a tensor. So
the tensor gets a class whose ``grad`` raises an error with the reason.
"""

import sys
import warnings
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwise.errors import StateError

_GRAD: Any = torch.Tensor.grad

TRAITS = "_shardwise_traits"  # on an optimizer that was probed, see `step.probe`


def running_optimizer() -> torch.optim.Optimizer | None:
    """Return the innermost optimizer whose method is running; for messages."""
    for frame in _frames():
        instance = frame.f_locals.get("self")
        if isinstance(instance, torch.optim.Optimizer):
            return instance
    return None


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of an optimizer, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Replaced:
    """A parameter that shard() has replaced; reports reads of its gradient."""

    _replaced_name = "?"
    _replaced_by = "shard()"

    @property
    def grad(self) -> torch.Tensor | None:
        """Raise StateError for an optimizer, warn any other caller: there is no gradient."""
        name, by = self._replaced_name, self._replaced_by
        optimizer = next((o for frame in _frames() for o in _optimizers_in(frame, self)), None)
        if optimizer is not None:
            passing = " or pass it: shard(model, optimizer=optimizer)" if by == "shard()" else ""
            raise StateError(
                f"{type(optimizer).__name__} was built before {by}: it holds '{name}' and other "
                "parameters as they were then, and its steps would change nothing. Build it after "
                f"{by}, from model.parameters(),{passing}"
            )
        warnings.warn(
            f"the gradient of '{name}' was read from the tensor that {by} has replaced, which "
            "never gets one; read it from model.parameters()",
            stacklevel=2,
        )
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    def __deepcopy__(self, memo: object) -> Any:
        """Copy the parameter in its original class."""
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.__class__ = type(self).__mro__[2]
        return copied


def _optimizers_in(frame: FrameType, param: Any) -> Iterator[torch.optim.Optimizer]:
    for value in tuple(frame.f_locals.values()):
        if isinstance(value, torch.optim.Optimizer) and any(
            member is param for group in value.param_groups for member in group["params"]
        ):
            yield value


@cache
def _replaced_class(of: type) -> type:
    return type(f"Replaced{of.__name__}", (Replaced, of), {"__module__": __name__})


def retire(param: nn.Parameter, name: str, by: str = "shard()") -> None:
    """Make a parameter report that ``by`` has replaced it in the model."""
    if not isinstance(param, Replaced):  # an earlier call may have failed
        param.__class__ = _replaced_class(type(param))
    vars(param).update(_replaced_name=name, _replaced_by=by)
