"""What runs, asked of a sharded model once: its units, its mesh, its device."""

import platform
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from math import prod

import torch
from torch import nn

from shardwise.device import memory_figures, name_of
from shardwise.engine.describe import describe
from shardwise.engine.parts import Parts, modules_of
from shardwise.errors import ConfigError
from shardwise.mesh import Axis
from shardwise.monitor.record import RunFacts, UnitFacts
from shardwise.plan.machine.catalogue import find_accelerator
from shardwise.unit.plain_state import owner_of
from shardwise.unit.unit import Unit

_FLOPS_OF_TRAINED, _FLOPS_OF_FROZEN = 6.0, 4.0  # for each weight and token, forward and backward


def facts_of(
    model: nn.Module | Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    hosts: Sequence[str],
    flops_per_token: float | None = None,
) -> RunFacts:
    """Return what runs, as this rank sees it.

    **Source** of the six operations for each weight and token: Kaplan et al. 2020, section 2.1; of
    a frozen weight the product for its own gradient, a third of them, falls away.
    """
    parts = Parts(model)
    config, device = parts.first.config, parts.comm.device
    described = [unit for each in modules_of(model) for unit in describe(each).units]
    flops = _flops_per_token(parts.units) if flops_per_token is None else flops_per_token
    dtypes = {str(s.compute_dtype).removeprefix("torch.") for u in parts.units for s in u.storages}
    return RunFacts(
        stage=config.stage.number,
        degrees=degrees_of(parts),
        num_ranks=len(hosts),
        device=name_of(device),
        device_bytes=memory_figures(device).capacity_bytes,
        bucket_bytes=config.bucket_bytes,
        prefetch_bytes=config.prefetch_bytes,
        units=tuple(
            UnitFacts(**{f.name: getattr(unit, f.name) for f in fields(UnitFacts)})
            for unit in described
        ),
        hosts=tuple(hosts),
        peak_flops=_peak_flops(name_of(device), dtypes),
        flops_per_token=flops,
        versions={
            "shardwise": version("shardwise"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        optimizer=", ".join(type(each).__name__ for each in optimizers),
        offload="" if config.offload is None else str(config.offload),
        unsharded_bytes=_unsharded_bytes(optimizers),
        reduces_units_alone=any(unit.settings.stands_while_full for unit in parts.units),
    )


def degrees_of(parts: Parts) -> dict[str, int]:
    """Return the size of each axis that parameters are cut over or copied along, by name."""
    axes: list[Axis] = [*parts.comm.axes.all]
    axes += [axis for u in parts.units for p in u.params for axis in p.cut.own_axes]
    axes += [stages for each in parts.comms if (stages := each.axes.stages) is not None]
    return {axis.name: axis.size for axis in axes}


def _flops_per_token(units: Sequence[Unit]) -> float:
    total = 0.0
    for unit in units:
        for param in unit.params:
            looks_up = all(isinstance(use.module, nn.Embedding) for use in param.uses)
            if len(param.shape) > 1 and not looks_up:  # of vectors and tables there is no product
                each = _FLOPS_OF_TRAINED if param.is_trained else _FLOPS_OF_FROZEN
                total += each * prod(param.shape)
    return total


def _unsharded_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the bytes of what optimizers hold that is a parameter of no unit."""
    held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    return sum(p.nbytes for p in held if owner_of(p) is None)


def _peak_flops(name: str, dtypes: set[str]) -> float | None:
    """Return what a device of the catalogue can do; None for any other, and for mixed dtypes."""
    if name == "cpu" or len(dtypes) != 1:
        return None
    try:
        return find_accelerator(name).peak_flops(*dtypes)
    except ConfigError:
        return None
