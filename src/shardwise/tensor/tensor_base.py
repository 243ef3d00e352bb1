"""Data of a sharded tensor: this rank's elements, the cut, and the owner."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardwise.tensor.cut import Cut
from shardwise.tensor.elements import elements_of

if TYPE_CHECKING:

    class Sharded(nn.Parameter, DTensor):
        """A tensor of ``model.parameters()``: a DTensor that is a parameter."""


class OwnedGradient(Protocol):
    """The gradient of an owned parameter, for the parameter's ShardTensor."""

    def read(self) -> torch.Tensor | None:
        """Finish reductions in flight and return the reduced gradient."""

    def write(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it, reduced or not."""

    def add_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter once its gradient is reduced; return a handle."""


class Owner(Protocol):
    """The interface of the unit that owns a parameter, for the parameter's ShardTensor."""

    @property
    def name(self) -> str:
        """The parameter's name in the model."""

    @property
    def gradient(self) -> OwnedGradient:
        """The parameter's gradient."""

    @property
    def sharded(self) -> torch.Tensor | None:
        """The parameter itself; None while it is made."""

    @property
    def full(self) -> torch.Tensor:
        """The full parameter, autograd's leaf, if it has been made."""

    def use_full(self) -> torch.Tensor:
        """Return the full parameter, autograd's leaf or a view of it."""

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is running."""

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""

    def note_alias(self, elements: torch.Tensor) -> None:
        """Note a plain tensor over the parameter's elements, also that inside a ShardTensor."""

    def assign(self, value: torch.Tensor) -> None:
        """Take over the values that are assigned to ``p.data``."""


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


def alias_of(tensor: ShardTensorBase) -> ShardTensorBase:
    """Return another tensor of the same elements and the same owner, outside autograd."""
    owner = owner_of_elements(tensor)
    made = tensor.wrap(tensor._local_tensor.detach(), tensor._cut, owner)
    if owner is not None:
        owner.note_alias(elements_of(made))
    return made


def owner_of_elements(tensor: ShardTensorBase) -> Owner | None:
    """Return the owner whose memory a tensor is; None after an assignment to the owner's data."""
    owner = tensor._owner
    if owner is None or owner.sharded is None or owner.sharded is tensor:
        return owner
    own = elements_of(owner.sharded).untyped_storage()  # type: ignore[arg-type]
    return owner if elements_of(tensor).untyped_storage()._cdata == own._cdata else None


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


class Operation:
    """One call of a function that has sharded tensors among its arguments.

    ``name`` is the function's, or that of the ATen packet.
    """

    __slots__ = ("args", "func", "kwargs", "name")

    def __init__(
        self,
        func: Callable[..., object],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.func = func
        self.name = name
        self.args = args
        self.kwargs = kwargs or {}

    def run(self, change: Callable[[Any], object] | None = None) -> object:
        """Call the function, with each argument changed."""
        if change is None:
            return self.func(*self.args, **self.kwargs)
        return self.func(*map(change, self.args), **{k: change(v) for k, v in self.kwargs.items()})

    @property
    def values(self) -> Iterator[object]:
        """The arguments, with the members of lists in place of the lists."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, list | tuple):
                yield from value
            else:
                yield value

    @property
    def shards(self) -> list[ShardTensorBase]:
        """The sharded tensors among `values`."""
        return [value for value in self.values if isinstance(value, ShardTensorBase)]

    @property
    def is_in_place(self) -> bool:
        """Tell by the name whether the function writes its first argument."""
        name = self.name
        if name in ("__setitem__", "module_load"):
            return True
        return name.endswith("_") and not (name.startswith("__") and not name.startswith("__i"))
