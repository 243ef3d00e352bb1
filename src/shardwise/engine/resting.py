"""Where the bytes of a model's training state rest on this rank: device, host memory, files."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.activations import Activations
from shardwise.engine.overlap import is_elementwise, staging_bytes
from shardwise.offload.disk import Disk
from shardwise.unit.home import NO_FILES, Files
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
        files = _files_of(unit)
        for storage in unit.storages:
            found[_place(unit, files.params)] += storage.shard_bytes
            found["device"] += storage.copy_bytes + storage.kept_bytes
            found["host"] += storage.bytes_at_home
        for param in unit.params:
            if not param.encoding.in_storage:
                found[_place(unit, None)] += elements_of(param.sharded).nbytes
            if isinstance(param.grad, DTensor):
                grad = elements_of(param.grad)
                if param.storage is None or not param.storage.has_at_home(grad):
                    found[_place(unit, files.grads)] += grad.nbytes
    rests_in_files = optimizer is not None and is_elementwise(optimizer)
    for each, state in () if optimizer is None else optimizer.state.items():
        owner = owner_of(each)
        for value in state.values():
            if isinstance(value, DTensor) and owner is not None:
                disk = _files_of(owner.unit).optimizer if rests_in_files else None
                found[_place(owner.unit, disk)] += elements_of(value).nbytes
            elif isinstance(value, torch.Tensor):
                found["device" if owner is None else _place(owner.unit, None)] += value.nbytes
    found["device"] += staging_bytes(optimizer)
    return dict(+found)


def _files_of(unit: Unit) -> Files:
    return NO_FILES if unit.home is None else unit.home.files


def _place(unit: Unit, disk: Disk | None) -> str:
    if disk is not None:
        return "files"
    return "device" if unit.home is None else "host"
