"""Sharded forms of a parameter in the model: a `ShardTensor`, or torch's DTensor.

`shard()` uses the first; a read of its gradient asks the unit. `fully_shard` uses the second, as
torch's does; its gradient is an attribute, set as soon as it is reduced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwise.comm.packed import waited_for
from shardwise.tensor.cut import Cut, as_dtensor
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.unit.storage import Storage


class Form(Protocol):
    """The sharded form of a parameter; ``asks_unit``: reads of its gradient ask the unit."""

    asks_unit: bool

    def place(self, param: Any, storage: Storage) -> None:
        """Put the elements of the parameter in the model into a storage."""

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a tensor with the parameter's cut and the local tensor ``local``."""

    def is_alike(self, value: Any) -> bool:
        """Tell whether a tensor has the parameter's cut."""

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return the layers' tensor over the full parameter's memory."""

    def full_grad(self, grad: Any) -> torch.Tensor:
        """Return the memory of a full gradient."""

    def grad_of(self, param: Any) -> torch.Tensor | None:
        """Return the reduced gradient."""

    def add_to_grad(self, param: Any, mean: torch.Tensor) -> None:
        """Set the parameter's gradient to a mean, or add the mean to it."""


@dataclass(frozen=True)
class AsShardTensor:
    """A `ShardTensor`, cut as ``cut`` says."""

    cut: Cut
    asks_unit = True

    def place(self, param: Any, storage: Storage) -> None:
        """Make the parameter over the storage's memory."""
        local = storage.local(param.index, self.cut.local_shape)
        param.sharded = nn.Parameter(
            ShardTensor.wrap(local, self.cut, param), requires_grad=param.requires_grad
        )

    def place_apart(self, param: Any, local: torch.Tensor) -> None:
        """Make the parameter from elements outside any storage."""
        made = ShardTensor.wrap(local, self.cut, param)
        param.sharded = nn.Parameter(made, requires_grad=param.requires_grad)

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a ShardTensor that no unit owns."""
        return ShardTensor.wrap(local, self.cut)

    def is_alike(self, value: Any) -> bool:
        """Tell whether the tensor is a ShardTensor whose cut matches."""
        return isinstance(value, ShardTensor) and value._cut.matches(self.cut)

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return a DTensor if the parameter was one."""
        return view if self.cut.outer is None else as_dtensor(view, self.cut.outer)

    def full_grad(self, grad: Any) -> torch.Tensor:
        """Return the local tensor of a DTensor's gradient, placed as the parameter is."""
        found: torch.Tensor = grad
        return found if self.cut.outer is None else _local_grad(grad, self.cut.outer)

    def grad_of(self, param: Any) -> torch.Tensor | None:
        """Return the parameter's mean."""
        found: torch.Tensor | None = param.mean
        return found

    def add_to_grad(self, param: Any, mean: torch.Tensor) -> None:
        """Set the parameter's mean, or add to it, as autograd would."""
        param.grad_hooks.is_due = True
        if param.mean is None:
            param.mean = ShardTensor.wrap(mean, self.cut)
        else:
            if param.storage is not None:
                param.storage.forget_grad_buffer()  # the sum lies elsewhere; do not keep two
            grad = param.mean
            (grad._local_tensor if isinstance(grad, ShardTensor) else grad).add_(mean)


@dataclass(frozen=True)
class AsDTensor:
    """A DTensor of torch with ``spec``.

    ``full_spec`` is set if the parameter was a DTensor before (tensor parallelism); its full form
    is one too. Its gradients may be partial sums over ``summed_dims`` of its mesh, which are
    data-parallel axes. ``outer`` is ``full_spec`` without these. ``identity`` identifies parameters
    that two calls tie.
    """

    spec: DTensorSpec
    identity: object
    full_spec: DTensorSpec | None = None
    outer: DTensorSpec | None = None
    summed_dims: Sequence[int] = ()
    asks_unit = False

    def place(self, param: Any, storage: Storage) -> None:
        """Move the local tensor's elements into the storage."""
        local_shape = tuple(param.sharded._local_tensor.shape)
        shape = local_shape if param.dim == 0 else (1, torch.Size(local_shape).numel())
        place = storage.local_apart(param.index, shape).view(local_shape)
        place.copy_(param.sharded._local_tensor)
        param.sharded._local_tensor = place

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a DTensor of the same mesh and placements."""
        return as_dtensor(local, self.spec)

    def is_alike(self, value: Any) -> bool:
        """Compare mesh and placements."""
        meta = self.spec.tensor_meta
        if not isinstance(value, DTensor) or meta is None or value.shape != meta.shape:
            return False
        return (value.device_mesh, value.placements) == (self.spec.mesh, self.spec.placements)

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return a DTensor if the parameter was one."""
        return view if self.full_spec is None else as_dtensor(view, self.full_spec)

    def full_grad(self, grad: Any) -> torch.Tensor:
        """Return the local tensor of a DTensor's gradient, placed as the parameter is."""
        found: torch.Tensor = grad
        if self.full_spec is None:
            return found
        return _local_grad(grad, self.full_spec, self.summed_dims)

    def grad_of(self, param: Any) -> torch.Tensor | None:
        """Return the DTensor's ``grad``."""
        found: torch.Tensor | None = param.sharded.grad
        return found

    def add_to_grad(self, param: Any, mean: torch.Tensor) -> None:
        """Set the DTensor's ``grad``, or add to it; run the user's hooks."""
        held = param.sharded
        mean = mean.to(held.device)
        if held.grad is None:
            held.grad = as_dtensor(mean, held._spec)
        else:
            held.grad._local_tensor.add_(mean)
        hooks = getattr(held, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(held)


def _local_grad(grad: Any, spec: DTensorSpec, summed_dims: Sequence[int] = ()) -> torch.Tensor:
    """Return this rank's part of a DTensor's gradient, placed as in ``spec``.

    A partial sum over ``summed_dims`` of its mesh stays partial; the reduction completes it.
    """
    grad = waited_for(grad)
    wanted = list(spec.placements)
    for dim in summed_dims:
        wanted[dim] = grad.placements[dim]
    if tuple(wanted) != tuple(grad.placements):
        grad = grad.redistribute(placements=wanted)
    found: torch.Tensor = grad._local_tensor
    return found
