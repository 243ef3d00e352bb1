"""Optimizer classes whose own code for DTensors is wrong, refused before their first step.

Such a class is wrong with torch's FSDP2, too, and nothing that it asks of a tensor shows it. The
versions are those that were tried; an entry leaves when `make soak CAMPAIGN=optimizers` is right
without it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.errors import ShardError
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.replaced import params_of

_CHECKED = "_shardwise_class_checked"  # on an optimizer that was looked up
_WRONG = {
    ("heavyball", "Scion"): (
        "its first step initialises a gathered copy of each parameter, and drops the copy "
        "(heavyball 3.2.1)"
    ),
    ("heavyball", "SUDSAdamW"): (
        "its update of a gathered tensor has another shape than the tensor (heavyball 3.2.1)"
    ),
}


@cache
def refuse_wrong_classes() -> None:
    """Refuse these classes over sharded parameters, from now on."""
    torch_optimizer.register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or _CHECKED in vars(optimizer):
        return
    kind = type(optimizer)
    why = _WRONG.get((kind.__module__.partition(".")[0], kind.__name__))
    params = params_of(optimizer)
    if why is not None and any(owner_of(param) is not None for param in params):
        raise ShardError(
            f"{kind.__name__} over sharded parameters: {why}. Use it with "
            "torch.nn.parallel.DistributedDataParallel, or another optimizer: docs/how-to/"
            "optimizers.md has a table"
        )
    vars(optimizer)[_CHECKED] = True
