"""Data of a sharded tensor: this rank's elements, the cut, and the owner."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch.distributed.tensor import DTensor

from shardwise.tensor.cut import Cut


class Owner(Protocol):
    """The interface of the unit that owns a parameter, for the parameter's ShardTensor."""

    name: str
    sharded: Any
    full: Any

    def read_grad(self) -> torch.Tensor | None:
        """Finish reductions in flight and return the reduced gradient."""

    def write_grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it, reduced or not."""

    def use_full(self) -> torch.Tensor:
        """Return the full parameter, autograd's leaf."""

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is running."""

    def add_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call ``hook`` with the parameter once its gradient is reduced; return a handle."""

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""


class ShardTensorBase(DTensor):
    """The data of a `ShardTensor`, which adds the operations."""

    _local_tensor: torch.Tensor
    _cut: Cut
    _owner: Owner | None

    @classmethod
    def wrap(
        cls, local: torch.Tensor, cut: Cut, owner: Owner | None = None, requires_grad: bool = False
    ) -> Self:
        """Wrap ``local`` (shape ``cut.local_shape``) in a ShardTensor without a copy."""
        spec = cut.spec(local.dtype)
        made: Self = DTensor.__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[assignment]
        made._cut = cut
        made._owner = owner
        return made


def is_replicated(tensors: Sequence[ShardTensorBase]) -> bool:
    """Tell whether every rank has all elements of each tensor (stage 0)."""
    return all(t._cut.is_replicated for t in tensors)


def locals_of(value: Any) -> Any:
    """Replace sharded tensors by this rank's elements, in lists too."""
    if isinstance(value, ShardTensorBase):
        return value._local_tensor
    if isinstance(value, list | tuple):
        return type(value)(locals_of(v) for v in value)
    return value


def shards_in(args: Any, kwargs: Mapping[str, Any]) -> list[ShardTensorBase]:
    """Return the sharded tensors among a call's arguments, one list deep."""
    return [value for value in values_one_deep(args, kwargs) if isinstance(value, ShardTensorBase)]


def values_one_deep(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a call's arguments, with the members of lists in place of the lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
