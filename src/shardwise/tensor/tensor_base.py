"""What a sharded tensor holds: this rank's elements, how the tensor is cut, and whose it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch.distributed.tensor import DTensor

from shardwise.tensor.cut import Cut


class Owner(Protocol):
    """What a parameter's ShardTensor asks of the unit that owns it."""

    name: str
    sharded: Any
    full: Any

    def read_grad(self) -> torch.Tensor | None:
        """Return the reduced gradient, finishing reductions that are under way."""

    def write_grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it, reduced or not."""

    def use_full(self) -> torch.Tensor:
        """Return the full parameter, the one that autograd knows."""

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is under way."""

    def add_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call ``hook`` with the parameter once its gradient is reduced; return a handle."""

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""


class ShardTensorBase(DTensor):
    """The data of a `ShardTensor`; what it answers is defined there."""

    _local_tensor: torch.Tensor
    _cut: Cut
    _owner: Owner | None

    @classmethod
    def wrap(
        cls, local: torch.Tensor, cut: Cut, owner: Owner | None = None, requires_grad: bool = False
    ) -> Self:
        """Make a ShardTensor of ``local`` (shape ``cut.local_shape``), without a copy."""
        spec = cut.spec(local.dtype)
        made: Self = DTensor.__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[assignment]
        made._cut = cut
        made._owner = owner
        return made


def is_replicated(tensors: Sequence[ShardTensorBase]) -> bool:
    """Tell whether every rank has all of each of these tensors (stage 0)."""
    return all(t._cut.is_replicated for t in tensors)


def locals_of(value: Any) -> Any:
    """Put this rank's elements in the place of sharded tensors, in lists too."""
    if isinstance(value, ShardTensorBase):
        return value._local_tensor
    if isinstance(value, list | tuple):
        return type(value)(locals_of(v) for v in value)
    return value


def shards_in(args: Any, kwargs: Mapping[str, Any]) -> list[ShardTensorBase]:
    """Return the sharded tensors among a call's arguments, one list deep."""
    return [value for value in values_one_deep(args, kwargs) if isinstance(value, ShardTensorBase)]


def values_one_deep(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a call's arguments, and what lists among them hold."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
