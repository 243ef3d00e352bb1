"""Optimizer classes that step slices of parameters wrongly, refused before their first step.

Nothing that such a class asks of a tensor shows it; those whose own code for DTensors is wrong are
wrong with torch's FSDP2, too. The
versions are those that were tried; an entry leaves when `make soak CAMPAIGN=optimizers` is right
without it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.errors import ShardError
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.replaced import params_of

_DDP = "torch.nn.parallel.DistributedDataParallel"
_CHECKED = "_shardwise_class_checked"  # on an optimizer that was looked up


class _Refused(NamedTuple):
    """The reason to refuse a class, with the version that was tried, and a right setting."""

    why: str
    runs_with: str = _DDP
    is_right_whole: bool = False  # where every rank has all of every parameter


_REFUSED = {
    ("heavyball", "Scion"): _Refused(
        "its first step initialises a gathered copy of each parameter, and drops the copy "
        "(heavyball 3.2.1)"
    ),
    ("heavyball", "SUDSAdamW"): _Refused(
        "its update of a gathered tensor has another shape than the tensor (heavyball 3.2.1)"
    ),
    ("pytorch_optimizer", "DASH"): _Refused(
        "it compares the address of a parameter with that of its matrix, and a slice has no "
        "matrix (pytorch_optimizer 4.1.0)",
        runs_with="shard(stage=0)",
        is_right_whole=True,
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
    refused = _REFUSED.get((kind.__module__.partition(".")[0], kind.__name__))
    owners = [owner for param in params_of(optimizer) if (owner := owner_of(param)) is not None]
    if refused is not None and owners:
        are_whole = all(owner.cut.is_replicated for owner in owners)
        if not (refused.is_right_whole and are_whole):
            raise ShardError(
                f"{kind.__name__} over sharded parameters: {refused.why}. Use it with "
                f"{refused.runs_with}, or another optimizer: docs/how-to/optimizers.md has a table"
            )
    vars(optimizer)[_CHECKED] = True
