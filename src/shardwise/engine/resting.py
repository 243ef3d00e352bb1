"""Where the bytes of a model's training state rest on this rank: device, host memory, files."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.activations import Activations
from shardwise.engine.overlap import is_elementwise, staging_bytes
from shardwise.unit.param import ShardedParam
from shardwise.unit.plain_state import owner_of
from shardwise.unit.stepping import elements_of
from shardwise.unit.unit import Unit


def bytes_by_place(
    units: Iterable[Unit],
    optimizer: torch.optim.Optimizer | None = None,
    activations: Activations | None = None,
) -> dict[str, int]:
    """Return bytes by "device", "host" and "files": slices, their copies, means, full parameters.

    With the ``optimizer`` its state too, with the ``activations`` what they take of the host. Of a
    model without offload all is on the device.
    """
    found: Counter[str] = Counter()
    if activations is not None:
        found["host"] += activations.host_bytes
    for unit in units:
        for storage in unit.storages:
            found[place_of(unit, "params")] += storage.shard_bytes
            found["device"] += storage.copy_bytes + storage.kept_bytes
            found["host"] += storage.bytes_at_home
        for param in unit.params:
            if not param.encoding.in_storage:
                found[place_of(unit)] += elements_of(param.sharded).nbytes
            if isinstance(param.grad, DTensor):
                grad = elements_of(param.grad)
                if param.storage is None or not param.storage.has_at_home(grad):
                    found[place_of(unit, "grads")] += grad.nbytes
    for each, state in () if optimizer is None else optimizer.state.items():
        owner = owner_of(each)
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local = elements_of(value) if isinstance(value, DTensor) else value
                found[place_of_state(optimizer, owner, value)] += local.nbytes
    found["device"] += staging_bytes(optimizer)
    return dict(+found)


def place_of(unit: Unit, kind: Literal["params", "grads", "optimizer"] | None = None) -> str:
    """Return where a kind of a unit's state rests; None is what never rests in files."""
    if unit.home is None:
        return "device"
    return "host" if kind is None or getattr(unit.home.files, kind) is None else "files"


def place_of_state(
    optimizer: torch.optim.Optimizer | None, owner: ShardedParam | None, value: torch.Tensor
) -> str:
    """Return where a tensor of an optimizer's state rests, of the parameter that ``owner`` is."""
    if owner is None:
        return "device"
    is_count = not value.ndim  # of steps, which stays in memory
    stepper = None if is_count else _stepper(optimizer, owner.sharded)
    in_files = stepper is not None and is_elementwise(stepper)
    return place_of(owner.unit, "optimizer" if in_files else None)


def _stepper(optimizer: Any, param: Any) -> torch.optim.Optimizer | None:
    """Return which of several optimizers, where it is made of such, steps a parameter."""
    for each in (parts := getattr(optimizer, "optimizers", (optimizer,))):
        if len(parts) == 1 or any(param is p for g in each.param_groups for p in g["params"]):
            found: torch.optim.Optimizer | None = each
            return found
    return None
