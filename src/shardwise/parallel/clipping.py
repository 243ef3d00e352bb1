"""Clip gradients by their total norm, across meshes."""

from collections.abc import Iterable
from functools import reduce

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import Comm
from shardwise.layout.placements import local_of
from shardwise.mesh import DataAxes
from shardwise.parallel.tying import ties_of
from shardwise.tensor.cut import axes_of_mesh
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.tensor_base import ShardTensorBase
from shardwise.tensor.totals import LazyNorm, NormKind, norm_of_nothing


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients so that their total norm is at most ``max_norm``.

    Return the norm before the scaling, a plain tensor, the same on all ranks. torch's function of
    that name takes DTensors of one mesh only (pytorch#180346). This one takes DTensors and
    ShardTensors of any meshes, and plain tensors, which must be the same on all ranks.
    ``foreach`` has no effect. For a model on `Axes` with a pipeline it is the norm over all stages;
    ranks of all stages call it, each with all parameters of its stage, frozen or not.

    **Cost** one collective of a number over each axis of each mesh that parameters are sharded on.
    Every rank must pass the same parameters; a rank without a parameter's gradient adds nothing.

    **Raises** RuntimeError for a non-finite norm, with ``error_if_nonfinite``.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not params:
        return torch.zeros(())
    owners = [owner_of(param) for param in params]
    ties = ties_of(owners)
    for tie in ties:
        tie.sum_grads()
    local_grads = [_local(param.grad) for param in params]  # None or empty without a local part
    grads = [grad for grad in local_grads if grad is not None and grad.numel()]
    order = float(norm_type)
    computed = iter(torch._foreach_norm(grads, order)) if grads else iter(())
    # One dtype on all ranks, with and without gradients, because norms are sent.
    dtype = reduce(torch.promote_types, [param.dtype for param in params])
    nothing = norm_of_nothing(order, dtype, params[0].device)
    norms = [
        next(computed) if grad is not None and grad.numel() else nothing for grad in local_grads
    ]
    for place, owner in enumerate(owners if ties else ()):
        if owner is not None and owner.tie is not None and not owner.tie.counts(owner):
            norms[place] = nothing  # a tied copy; the first stage with a copy counts it
    comms: dict[DeviceMesh, Comm] = {}
    kinds = [_kind(param, order, comms) for param in params]
    partials = torch.stack([norm.to(nothing.device, dtype) for norm in norms])
    total = LazyNorm.of(partials, *kinds).total(order)
    owner = next(filter(None, owners), None)
    if owner is not None and (stages := owner.unit.comm.axes.stages) is not None:
        total = NormKind(order, owner.unit.comm, (stages,)).combine(total)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite "
            "norm anyway, set `error_if_nonfinite=False`"
        )
    if owner is not None and (recorder := owner.unit.comm.tracer.detailed) is not None:
        recorder.see_norm(total, max_norm)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's formula, and its epsilon
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([g for g in grads if g.device == device], factor.to(device))
    return total


def _local(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's part of a gradient. **Raises** ValueError for an incomplete sum."""
    if isinstance(grad, DTensor) and any(at.is_partial() for at in grad.placements):
        raise ValueError(f"a gradient is {grad.placements}: sum it first, with redistribute()")
    return None if grad is None else local_of(grad)


def _kind(param: torch.Tensor, order: float, comms: dict[DeviceMesh, Comm]) -> NormKind:
    """Return the axes to combine a parameter's norm over; ``comms`` caches those of DTensors."""
    if isinstance(param, ShardTensorBase):
        return NormKind.of(order, param._cut)
    if not isinstance(param, DTensor):
        return NormKind(order, None, ())
    mesh = param.device_mesh
    owner = owner_of(param)
    placed = zip(axes_of_mesh(mesh), param.placements, strict=True)
    axes = [axis for axis, at in placed if not at.is_replicate()]
    if not axes:
        return NormKind(order, None, ())
    if owner is not None:
        return NormKind(order, owner.unit.comm, tuple(axes))
    if mesh not in comms:
        comms[mesh] = Comm(DataAxes(mesh, axes[0], None), param.device)
    return NormKind(order, comms[mesh], tuple(axes))
