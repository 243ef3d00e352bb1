"""One rank's flat elements of a parameter and its gradient, for any kind of parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.errors import ConfigError
from shardwise.layout.placements import local_of
from shardwise.tensor.cut import as_dtensor
from shardwise.tensor.shard_tensor import ShardTensor


@dataclass(frozen=True)
class Place:
    """Position of a rank's elements: from ``first`` on, in a flattened tensor of ``numel``.

    The tensor is the parameter. If the rank's elements are not one range of it (sharded along
    another dim, or by tensor parallelism), the tensor is this rank's piece.
    """

    first: int
    numel: int


@dataclass(frozen=True)
class Slice:
    """A rank's elements of a parameter and of its gradient, flat and in the same order.

    ``copied_to`` is the parameter's memory if ``param`` is a copy.
    """

    param: torch.Tensor
    grad: torch.Tensor
    place: Place
    copied_to: torch.Tensor | None


def keep(slices: Sequence[Slice]) -> None:
    """Copy updated copies back into the parameters."""
    for each in slices:
        if each.copied_to is not None:
            each.copied_to.copy_(each.param.view(each.copied_to.shape))


def finish(slices: Sequence[Slice]) -> None:
    """Copy back and increment the parameters' versions, which kernels do not do."""
    keep(slices)
    torch.autograd.graph.increment_version([each.param for each in slices])


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded like the parameter, with ``local`` as this rank's elements."""
    if isinstance(param, ShardTensor):
        return ShardTensor.wrap(local, param._cut)
    return as_dtensor(local, param._spec) if isinstance(param, DTensor) else local


def place_of(param: torch.Tensor) -> Place:
    """Return where this rank's elements lie in a parameter, or in its own piece."""
    if isinstance(param, ShardTensor):
        return Place(param._cut.lo, param._cut.piece.numel)
    if isinstance(param, DTensor):
        cuts = [(dim, at) for dim, at in enumerate(param.placements) if not at.is_replicate()]
        if not cuts:
            return Place(0, param.numel())
        if len(cuts) == 1 and type(cuts[0][1]) is Shard and cuts[0][1].dim == 0:
            mesh, rows = param.device_mesh, -(-param.shape[0] // param.device_mesh.size(cuts[0][0]))
            first = min(mesh.get_local_rank(cuts[0][0]) * rows, param.shape[0])
            return Place(first * prod(param.shape[1:]), param.numel())
    return Place(0, local_of(param).numel())


def slice_of(param: torch.Tensor, grad: torch.Tensor) -> Slice:
    """Return a rank's elements. **Raises** ConfigError for tensors the step cannot update."""
    local = local_of(param).detach()
    is_plain = not is_traceable_wrapper_subclass(local)
    if not (is_plain and local.is_floating_point()):
        kind = str(local.dtype) if is_plain else type(local).__name__
        raise ConfigError(
            f"shardwise.optim.AdamW: a parameter of shape {tuple(param.shape)} is a {kind}, and "
            "the step runs on plain real numbers; use torch.optim.AdamW for it, in an optimizer of "
            "its own"
        )
    mine = _grad_of(param, grad)
    if mine.layout is not torch.strided:
        raise ConfigError(
            "shardwise.optim.AdamW: gradients are dense, and that of a parameter of shape "
            f"{tuple(param.shape)} is sparse; use torch.optim.SparseAdam for it"
        )
    is_flat = local.is_contiguous()
    return Slice(
        local.view(-1) if is_flat else local.reshape(-1).clone(),
        mine.reshape(-1),
        place_of(param),
        None if is_flat else local,
    )


def _grad_of(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a gradient, sharded like the parameter."""
    if isinstance(param, ShardTensor) and not isinstance(grad, DTensor):
        return param._cut.slice_of(grad).detach()
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if not isinstance(param, ShardTensor) and grad.placements != param.placements:
            grad = grad.redistribute(param.device_mesh, param.placements)
        return grad.to_local().detach()
    return grad.detach()
