"""Calls that run on slices by what they are given, or by who made them, not by what they are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.unit.tensor_base import ShardTensorBase, is_replicated, locals_of

_BLOCK = 256  # elements of a block, fixed in bitsandbytes


def is_outer(left: Any, right: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether a product of matrices sums over one element only, and has the given shape."""
    if min(left.ndim, right.ndim) < 2 or left.shape[-1] != 1 or right.shape[-2] != 1:
        return False
    return tuple(torch.broadcast_shapes(left.shape, right.shape)) == shape


def is_masked_fill(tensor: Any, index: Any, value: Any) -> bool:
    """Tell whether one number is assigned where a mask, cut as the tensor is, is true."""
    if not isinstance(tensor, ShardTensorBase) or not isinstance(index, ShardTensorBase):
        return False
    is_number = not isinstance(value, torch.Tensor) or (
        value.ndim == 0 and not isinstance(value, ShardTensorBase)
    )
    return is_number and index.dtype == torch.bool and index._cut.matches(tensor._cut)


def run_kernel(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shards: Sequence[ShardTensorBase]
) -> Any:
    """Run a kernel of bitsandbytes on this rank's elements, in blocks of its own.

    NotImplemented where it takes the norm of the whole update (LAMB, LARS, ``max_unorm``).
    """
    takes_norm = func.__name__ == "optimizer_update_32bit" and args[5] is not None
    if takes_norm and not is_replicated(shards):
        return NotImplemented
    numel = shards[0]._local_tensor.numel()
    if numel == 0:
        return None
    names = [argument.name for argument in func.default._schema.arguments]
    given = {**dict(zip(names, locals_of(args), strict=False)), **kwargs}
    for scales in ("absmax1", "absmax2"):  # one of each block, and the slice has fewer
        if given.get(scales) is not None:
            given[scales] = given[scales][: -(-numel // _BLOCK)]
    result = func(**{key: locals_of(value) for key, value in given.items()})
    torch.autograd.graph.increment_version([t._local_tensor for t in shards])
    return result
