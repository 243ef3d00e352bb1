"""The facts of a run, read once from a sharded model: units, mesh, device."""

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from math import prod

import torch
from torch import nn

from shardwise import __version__
from shardwise.device import memory_figures, name_of
from shardwise.engine.parts import Parts, modules_of
from shardwise.errors import ConfigError
from shardwise.monitor.describe import describe
from shardwise.monitor.lines import MAX_NAME
from shardwise.monitor.record import RunFacts
from shardwise.plan.machine.hardware import find_accelerator
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.unit import Unit
from shardwise.unit_facts import UnitFacts

_NDIM_OF_STACKS = 3  # of parameters that hold all experts along the first dim
_FLOPS_OF_TRAINED, _FLOPS_OF_FROZEN = 6.0, 4.0  # for each weight and token, forward and backward


def facts_of(
    model: nn.Module | Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    hosts: Sequence[str],
    flops_per_token: float | None = None,
) -> RunFacts:
    """Return the facts of the run, as this rank sees it.

    **Source** of six operations for each weight and token: Kaplan et al. 2020, section 2.1. A
    frozen weight has no product for its gradient, a third of them. Of a mixture of experts those
    count to which a token is routed, see `_experts_of_a_token`.
    """
    parts = Parts(model)
    config, device = parts.first.config, parts.comm.device
    described = [unit for each in modules_of(model) for unit in describe(each).units]
    flops = flops_per_token
    if flops is None:
        flops = _flops_per_token(parts.units, _experts_of_a_token(modules_of(model)))
    dtypes = {str(s.compute_dtype).removeprefix("torch.") for u in parts.units for s in u.storages}
    axes = [*parts.comm.axes.all]  # that parameters are cut over or copied along
    axes += [axis for u in parts.units for p in u.params for axis in p.cut.own_axes]
    axes += [stages for each in parts.comms if (stages := each.axes.stages) is not None]
    held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    peak_flops = None  # of a device that is not in the catalogue, and for mixed dtypes
    if device.type != "cpu" and len(dtypes) == 1:
        with suppress(ConfigError):
            peak_flops = find_accelerator(name_of(device)).peak_flops(*dtypes)
    return RunFacts(
        stage=config.stage.number,
        degrees={axis.name: axis.size for axis in axes},
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
        peak_flops=peak_flops,
        flops_per_token=flops,
        versions={
            "shardwise": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        optimizer=", ".join(type(each).__name__ for each in optimizers),
        offload="" if config.offload is None else str(config.offload),
        command=shlex.join(("python", *sys.orig_argv[1:]))[:MAX_NAME],
        unsharded_bytes=sum(p.nbytes for p in held if owner_of(p) is None),
        reduces_units_alone=any(unit.settings.stands_while_full for unit in parts.units),
    )


def _experts_of_a_token(modules: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Return the modules of stacked experts, with the number of experts of a token.

    The number is the ``top_k`` of their parent or of a router beside them, as in our modules and
    most of transformers.
    """
    found = {}
    for parent in (inner for each in modules for inner in each.modules()):
        told = {_top_k(each) for each in (parent, *parent.children())} - {None}
        for child in parent.children() if len(told) == 1 else ():
            if any(p is not None and p.ndim == _NDIM_OF_STACKS for p in child._parameters.values()):
                found[child] = max(k for k in told if k is not None)
    return found


def _top_k(module: nn.Module) -> int | None:
    told = getattr(module, "top_k", getattr(getattr(module, "routing", None), "top_k", None))
    return told if isinstance(told, int) and told > 0 else None


def _flops_per_token(units: Sequence[Unit], experts: Mapping[nn.Module, int]) -> float:
    total = 0.0
    for unit in units:
        for param in unit.params:
            looks_up = all(isinstance(use.module, nn.Embedding) for use in param.uses)
            if len(param.shape) > 1 and not looks_up:  # vectors and tables have no product
                each = _FLOPS_OF_TRAINED if param.is_trained else _FLOPS_OF_FROZEN
                met = next((k for use in param.uses if (k := experts.get(use.module))), None)
                if met is None or len(param.shape) != _NDIM_OF_STACKS:
                    met = param.shape[0]
                total += each * met * prod(param.shape[1:])
    return total
