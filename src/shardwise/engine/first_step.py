"""Checks at an optimizer's first step: it trains the model, with the same gradients on all ranks.

An optimizer holds parameters by identity. It trains nothing if these are full parameters from
inside `gathered` or `unshard`, copies or ``p.data``, and a scheduler changes nothing if its
optimizer was built before `shard()`. A plain parameter beside sharded ones has another gradient on
each rank, as no rank sums it.
"""

import gc
import warnings
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from shardwise.engine.tree import ATTRIBUTE
from shardwise.errors import StateError
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.replaced import Replaced, params_of
from shardwise.tensor.tensor_base import ShardTensorBase
from shardwise.unit.full_parameter import FullParameter, name_if_expired

_SHOWN = 3
T = TypeVar("T")


def check_first_step(optimizer: torch.optim.Optimizer, num_ranks: int) -> None:
    """Raise for full parameters, and warn of what would train nothing or differ between ranks.

    ``num_ranks``: the ranks of the optimizer's sharded parameters; 0 without sharded parameters.

    **Raises** StateError if the optimizer holds full parameters of a sharded model.

    **Cost** a walk over the process's objects.
    """
    params = params_of(optimizer)
    _refuse_full(optimizer, params)
    if any(isinstance(param, ShardTensorBase) for param in params):
        _warn_of_copies(optimizer, params)
    if num_ranks > 1:
        _warn_of_plain(optimizer, params)
    if num_ranks:
        _warn_of_schedulers()


def _refuse_full(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
    for param in params:
        name = name_if_expired(param)
        if name is None and not isinstance(param, FullParameter):
            continue
        what = f"'{name}'" if name else f"a parameter of shape {tuple(param.shape)}"
        raise StateError(
            f"{type(optimizer).__name__} was built inside `with gathered(...)` or after "
            f"unshard(): it holds {what} and others in full, which are copies, and its steps would "
            "change nothing. Build it from model.parameters() outside"
        )


def _warn_of_copies(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Warn of sharded tensors without a gradient that are not a model's parameters."""
    for param in params:
        if not isinstance(param, ShardTensorBase) or param.grad is not None:
            continue
        owner = param._owner
        if owner is None or owner.sharded is not param:
            name = f"of '{owner.name}'" if owner else f"of shape {tuple(param.shape)}"
            warnings.warn(
                f"{type(optimizer).__name__} holds a copy or the .data {name}, which never gets a "
                "gradient, so its steps change nothing. Build it from model.parameters()",
                stacklevel=5,
            )
            return


def _warn_of_plain(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
    plain = [
        param
        for param in params
        if not isinstance(param, DTensor) and owner_of(param) is None and param.grad is not None
    ]
    if not plain:
        return
    names, buffers = _names_in_modules(plain)
    more = f" and {len(plain) - _SHOWN} more" if len(plain) > _SHOWN else ""
    beside = f" So may buffers beside the sharded module: {', '.join(buffers)}." if buffers else ""
    warnings.warn(
        f"{type(optimizer).__name__} trains sharded parameters and plain ones: "
        f"{', '.join(names[:_SHOWN])}{more}. No rank sums gradients of plain parameters, so these "
        f"become different on each rank.{beside} Shard the module that holds all of them, or "
        "average their gradients over the ranks before each step and clip with "
        "shardwise.parallel.clip_grad_norm_",
        stacklevel=5,
    )


def _names_in_modules(plain: Sequence[torch.Tensor]) -> tuple[list[str], list[str]]:
    """Return names of parameters in the outermost modules that hold them, and buffers beside."""
    roots = _outermost(plain)
    names: list[str] = []
    buffers: list[str] = []
    for param in plain:
        matches = (n for root in roots for n, p in root.named_parameters() if p is param)
        name = next(matches, None)
        names.append(f"'{name}'" if name else f"{tuple(param.shape)}")
    for root in roots:
        inside = {id(b) for m in root.modules() if ATTRIBUTE in vars(m) for b in m.buffers()}
        buffers += [
            f"'{name}'"
            for name, buffer in root.named_buffers()
            if buffer.is_floating_point() and id(buffer) not in inside
        ]
    return names, buffers[:_SHOWN]


def _outermost(plain: Sequence[torch.Tensor]) -> list[nn.Module]:
    wanted = set(map(id, plain))
    holders = [
        module
        for module in _objects(nn.Module)
        if any(id(param) in wanted for param in module.parameters())
    ]
    inner = {id(child) for module in holders for child in module.modules() if child is not module}
    return [module for module in holders if id(module) not in inner]


def _warn_of_schedulers() -> None:
    """Warn of schedulers whose optimizer holds parameters from before `shard()`."""
    if not _stale_schedulers():
        return
    gc.collect()  # a scheduler that the program has dropped may be in a reference cycle
    for scheduler in _stale_schedulers():
        warnings.warn(
            f"{type(scheduler).__name__} changes the rates of a "
            f"{type(scheduler.optimizer).__name__} that was built before shard(), which trains "
            "nothing. Build the scheduler from the optimizer that steps",
            stacklevel=5,
        )


def _stale_schedulers() -> list[LRScheduler]:
    return [
        scheduler
        for scheduler in _objects(LRScheduler)
        if any(
            isinstance(param, Replaced)
            for group in getattr(scheduler.optimizer, "param_groups", ())
            for param in group["params"]
        )
    ]


def _objects(kind: type[T]) -> list[T]:
    """Return the process's objects of a class, without calling methods of proxies."""
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]
