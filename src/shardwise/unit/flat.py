"""Flat views of sharded tensors, joined and taken apart again: what L-BFGS does with gradients.

Note [Flat views]
A rank's elements of a tensor are one range of the flattened tensor, in every layout, so a flat view
is the same memory under another cut, and a row of several flat views has on each rank that rank's
elements of each. Slices of such a row are taken between its parts only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.unit.cut import GATHER_SITE, Cut, Joined, join
from shardwise.unit.tensor_base import ShardTensorBase


def run_flat(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Answer a view, a join, a slice or a product of flat tensors; NotImplemented for all else."""
    first: Any = args[0] if args else None
    if name == "cat" and not isinstance(first, torch.Tensor):
        return _cat(*args, **kwargs)
    if name == "view_as" and not isinstance(first, ShardTensorBase):
        return first.view(args[1].shape)
    if not isinstance(first, ShardTensorBase) or not first._cut.is_range or kwargs:
        return NotImplemented
    if name == "view_as":
        as_it_is = args[1].shape == first.shape
        return _view(first, first._cut if as_it_is else getattr(args[1], "_cut", None))
    if first._owner is not None:  # its views are of a gathered copy, or refused: a rule of its own
        return NotImplemented
    if name in ("view", "reshape", "flatten", "ravel"):
        return _reshape(first, name, args[1:])
    if name == "__getitem__" and isinstance(args[1], slice):
        return _slice(first, args[1])
    if name in ("dot", "vdot", "inner") and first.ndim == 1:
        return _dot(first, args[1])
    return NotImplemented


def _view(tensor: ShardTensorBase, cut: Cut | None) -> Any:
    """Return the tensor's elements under another cut, which has the same on every rank."""
    if cut is None or not cut.is_range or not tensor._cut.flat.matches(cut.flat):
        return NotImplemented
    return tensor.wrap(tensor._local_tensor.view(cut.local_shape), cut, tensor._owner)


def _reshape(tensor: ShardTensorBase, name: str, args: tuple[Any, ...]) -> Any:
    cut = tensor._cut
    if name in ("flatten", "ravel"):
        return NotImplemented if args else _view(tensor, cut.flat)
    shape = tuple(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else args
    if shape in ((-1,), cut.flat.shape):
        return _view(tensor, cut.flat)
    if cut.base is not None and shape == cut.base.shape:
        return _view(tensor, cut.base)
    return NotImplemented


def _cat(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    for tensor in tensors:
        is_ours = isinstance(tensor, ShardTensorBase) and tensor._cut.is_range
        if not is_ours or tensor._owner is not None or tensor.ndim != 1:
            return NotImplemented
    if out is not None or dim not in (0, -1):
        return NotImplemented
    parts = [part for t in tensors for part in _parts(t._cut) if part.shape[0]]
    local = torch.cat([t._local_tensor for t in tensors])
    return tensors[0].wrap(local, join(parts) if parts else tensors[0]._cut)


def _parts(cut: Cut) -> tuple[Cut, ...]:
    return cut.parts if isinstance(cut, Joined) else (cut,)


def _slice(tensor: ShardTensorBase, where: slice) -> Any:
    """Return the parts that begin and end where the slice does."""
    begin, end, step = where.indices(tensor.shape[0])
    if tensor.ndim != 1 or step != 1:
        return NotImplemented
    if begin >= end:
        return tensor._local_tensor.new_empty(0)
    taken: list[Cut] = []
    at = at_local = begin_local = 0
    for part in _parts(tensor._cut):
        if at == begin:
            begin_local = at_local
        if begin <= at and at + part.shape[0] <= end:
            taken.append(part)
        at, at_local = at + part.shape[0], at_local + part.local_shape[0]
    if sum(part.shape[0] for part in taken) != end - begin:
        return NotImplemented
    cut = join(taken)
    local = tensor._local_tensor[begin_local : begin_local + cut.local_shape[0]]
    return tensor.wrap(local, cut)


def _dot(tensor: ShardTensorBase, other: Any) -> Any:
    cut = tensor._cut
    if isinstance(other, ShardTensorBase):
        if not cut.matches(other._cut):
            return NotImplemented
        theirs = other._local_tensor
    else:
        theirs = cut.slice_of(other)
    partial = torch.dot(tensor._local_tensor, theirs)
    return cut.comm.sum_in_rank_order(partial, cut.comm.axes.shard, GATHER_SITE)
