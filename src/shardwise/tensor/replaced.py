"""Parameters that shard() has replaced tell an optimizer that still holds them.

Note [An optimizer built too early]
An optimizer knows its parameters by identity. One that was built before shard() holds tensors that
are in no module any more: they never get a gradient, and an optimizer passes over what has none, so
its steps change nothing, without a word. All that optimizers ask of such a tensor is its ``grad``.
So the tensor's class is replaced by one that answers this question with the reason.
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


def running_optimizer() -> torch.optim.Optimizer | None:
    """Return the optimizer whose method is being run, the innermost; for messages."""
    for frame in _frames():
        found = frame.f_locals.get("self")
        if isinstance(found, torch.optim.Optimizer):
            return found
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Replaced:
    """Tells who asks for the gradient of a parameter that shard() has replaced."""

    _replaced_name = "?"
    _replaced_by = "shard()"

    @property
    def grad(self) -> torch.Tensor | None:
        """Refuse to answer an optimizer; warn anybody else. There is no gradient."""
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
            f"the gradient of '{name}' is asked of the tensor that {by} has replaced, and which "
            "never gets one; ask model.parameters()",
            stacklevel=2,
        )
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as what it was: a copy is nobody's replaced parameter."""
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.__class__ = type(self).__mro__[2]
        return copied


def _optimizers_in(frame: FrameType, param: Any) -> Iterator[torch.optim.Optimizer]:
    for value in tuple(frame.f_locals.values()):
        if isinstance(value, torch.optim.Optimizer) and any(
            held is param for group in value.param_groups for held in group["params"]
        ):
            yield value


@cache
def _replaced_class(of: type) -> type:
    return type(f"Replaced{of.__name__}", (Replaced, of), {"__module__": __name__})


def retire(param: nn.Parameter, name: str, by: str = "shard()") -> None:
    """Let a parameter that is in no module any more tell so to optimizers; ``by`` replaced it."""
    if not isinstance(param, Replaced):  # by an earlier call, which failed
        param.__class__ = _replaced_class(type(param))
    vars(param).update(_replaced_name=name, _replaced_by=by)
