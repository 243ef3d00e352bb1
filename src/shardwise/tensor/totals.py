"""Reductions of sharded tensors: each rank's part, put together over the axes they are cut over."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.tensor.cut import GATHER_SITE, Cut
from shardwise.tensor.norms import LazyNorm, NormKind, check_order, norm_of_nothing
from shardwise.tensor.operations import NORMS, REDUCTIONS
from shardwise.tensor.tensor_base import ShardTensorBase


def order_of_total(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """Return the order when the call is the norm of all elements, else None."""
    names = ("p", "ord")
    order = args[1] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), 2.0)
    others = [*args[2:], *(v for k, v in kwargs.items() if k not in names)]
    if any(v is not None and v is not False for v in others):  # dims, keepdim, dtype
        return None
    return 2.0 if order in (None, "fro") else order


def total_norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return each tensor's norm of all elements, completed over ranks when somebody asks for it."""
    check_order(order)
    parts = [t._local_tensor if isinstance(t, ShardTensorBase) else t for t in tensors]
    filled = [part for part in parts if part.numel()]
    norms = iter(torch._foreach_norm(filled, order) if filled else ())
    found: list[torch.Tensor] = []
    kind: NormKind | None = None
    for tensor, part in zip(tensors, parts, strict=True):
        norm = next(norms) if part.numel() else norm_of_nothing(part, order)
        if isinstance(tensor, ShardTensorBase) and (axes := (cut := tensor._cut).axes):
            if kind is None or kind.axes is not axes or kind.comm is not cut.comm:
                kind = NormKind.of(order, cut)
            norm = LazyNorm.of(norm, kind)
        found.append(norm)
    return found


def reduce_all(func: Any, name: str, tensor: ShardTensorBase) -> torch.Tensor:
    """Reduce all elements to one number. **Cost** one collective."""
    local, cut = tensor._local_tensor, tensor._cut
    if cut.is_replicated:
        result: torch.Tensor = func(local)
        return result
    if REDUCTIONS[name] == "sum":
        partial = local.sum() / tensor.numel() if name == "mean" else func(local)
        return _sum(partial, cut)
    sign = 1 if REDUCTIONS[name] == "max" else -1
    nothing = torch.full((), float("-inf"), dtype=torch.float64, device=local.device)
    extreme = func(local).double() * sign if local.numel() else nothing
    for axis in cut.axes:
        extreme = cut.comm.max(extreme, axis, GATHER_SITE)
    return (extreme * sign).to(torch.bool if name in ("all", "any") else local.dtype)


def reduce_dims(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: ShardTensorBase
) -> Any:
    """Reduce over some dims; NotImplemented for norms that cannot be put together.

    Every rank reduces its elements in a tensor of zeros. Where one rank has all that a result is
    made of, the others add zeros, so its bits stay.

    **Cost** the tensor's full size in memory; one collective of the result's size.
    """
    cut, order = tensor._cut, None
    if name in NORMS:
        order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2.0))
        order = 2.0 if order in (None, "fro") else order
        if not isinstance(order, int | float) or order < 0:
            return NotImplemented
    partial: torch.Tensor = func(cut.place(tensor._local_tensor), *args[1:], **kwargs)
    if order is not None:
        return NormKind.of(order, cut).combine(partial)
    return _sum(partial, cut).to(partial.dtype)


def _sum(partial: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Sum over the axes that a tensor is spread over, one after the other."""
    for axis in cut.axes:
        partial = cut.comm.sum_in_rank_order(partial, axis, GATHER_SITE)
    return partial
