"""Errors for operations on sharded tensors that would act on this rank's slice, with remedies."""

from collections.abc import Sequence
from types import FrameType

import torch

from shardwise.errors import ShardError
from shardwise.tensor.replaced import TRAITS, params_of, running_optimizer
from shardwise.tensor.tensor_base import ShardTensorBase, is_replicated


def refusal(name: str, tensors: Sequence[ShardTensorBase]) -> ShardError:
    """Return the error, with the remedy, of an operation that would act on this rank's slice."""
    owner = tensors[0]._owner
    what = (
        f"parameter '{owner.name}'" if owner else f"a ShardTensor of shape {tensors[0]._cut.shape}"
    )
    if is_replicated(tensors):
        return ShardError(
            f"{name} on {what}: autograd takes the full parameter in its place, so the change "
            "would be lost. Change parameters under torch.no_grad()"
        )
    optimizer = running_optimizer()
    if optimizer is not None and any(tensor._cut.outer is not None for tensor in tensors):
        return ShardError(
            f"{type(optimizer).__name__} asks for {name} on {what}: it needs whole tensors, and a "
            "rank has a piece of it at every stage, as the tensor is a DTensor on an axis of its "
            "own. Use an optimizer that works element by element: those of torch.optim but LBFGS "
            "and Muon"
        )
    if optimizer is not None:
        kind = type(optimizer).__name__
        matrices = (
            "shard(layout='matrices'), which lays each matrix whole on one rank and sends nothing, "
            if _steps_only_matrices(optimizer)
            else ""
        )
        return ShardError(
            f"{kind} asks for {name} on {what}: it needs whole tensors, and at stages 1 to 3 each "
            f"rank holds only a slice. Use shardwise.optim.gathering({kind}(...)), which gathers "
            f"them for such operations in every layout, {matrices}"
            "or shard(stage=0), where it runs as it is"
        )
    return ShardError(
        f"{name} on {what}: each rank holds only a slice, so the result would be this rank's, not "
        "the whole tensor's. Use t.full_tensor(), or `with shardwise.gathered(...)` to change it"
    )


# It gives the placements, with the shape, to a new DTensor, which is cut as the parameter is.
_PASSES_PLACEMENTS_ON = ("torchao.optim.adam",)


def check_reader(tensor: ShardTensorBase, frame: FrameType) -> None:
    """Refuse placements of this package to the code of an optimizer, which knows torch's only.

    **Raises** ShardError in the step of an optimizer whose own code asks, by name.
    """
    module = frame.f_globals.get("__name__", "")
    if module.partition(".")[0] in ("torch", "shardwise"):
        return
    is_scalar = not tensor.dim()
    optimizer = running_optimizer()
    if optimizer is None or (module in _PASSES_PLACEMENTS_ON and not is_scalar):
        return
    owner = tensor._owner
    what = f"parameter '{owner.name}'" if owner else f"a tensor of shape {tensor._cut.shape}"
    remedy = "which cuts tensors along dim 0 as torch does" + (
        ", once the scalar has one dim (torch.full((1,), value)), "
        if is_scalar
        else " (a scalar needs one dim there: torch.full((1,), value)), "
    )
    raise ShardError(
        f"{type(optimizer).__name__} reads the placements of {what} to divide it by itself, and "
        f"this rank has elements [{tensor._cut.lo}, {tensor._cut.hi}) of it, which no placement of "
        f"torch's says. Use shard(layout='rows'), {remedy}or shard(stage=0)"
    )


def _steps_only_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an owner of each matrix could take the step, and none has one yet."""
    params = params_of(optimizer)
    has_owners = any(isinstance(p, ShardTensorBase) and p._cut.owner is not None for p in params)
    probed = vars(optimizer).get(TRAITS)
    is_joint = isinstance(optimizer, torch.optim.LBFGS)  # it makes one vector of all
    is_joint |= probed is not None and not probed[1].is_separable
    return not is_joint and not has_owners and all(param.dim() == 2 for param in params)
