"""``fully_shard``: shard one or several modules in place."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._composable import contract
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _adjust_managed_modules,
    _get_managed_states,
)
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _get_root_modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.axes import Axes
from shardwise.config import Precision, resolve_precision
from shardwise.device import current_device
from shardwise.engine.api import check_is_module
from shardwise.engine.hooks import register_load_check
from shardwise.engine.model import compare_load, note_managed
from shardwise.errors import ConfigError
from shardwise.homes import Offload, resolve_offload
from shardwise.interop.fsdp2.meshes import (
    ShardingMesh,
    chosen_placement,
    default_mesh,
    spread_over,
)
from shardwise.interop.fsdp2.state import State, sharded_class, state_of
from shardwise.interop.fsdp2.units import Asked, make_unit, take
from shardwise.layout.placements import local_of
from shardwise.layout.units import ParamUse
from shardwise.mesh import Axis, nearby_axis
from shardwise.surface.methods import FSDPModule
from shardwise.tensor.inner import refuse_opaque
from shardwise.tensor.replaced import retire
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.unit.gradient import check_hooks
from shardwise.unit.unit import Unit
from shardwise.versions import warn_if_untested

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # torch 2.11 lacks it

_NO_CASTS = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
_KINDS = {
    "mesh": (DeviceMesh | Axes | None, "shardwise.Axes, torch's DeviceMesh or None"),
    "mp_policy": (
        MixedPrecisionPolicy | Precision,
        "torch's MixedPrecisionPolicy or shardwise.Precision",
    ),
    "offload_policy": (
        OffloadPolicy | Offload | None,
        "shardwise.Offload, torch's OffloadPolicy or None",
    ),
}


def _checking(function: Any) -> Any:
    """Check the kinds of arguments before `contract` inspects them."""

    @wraps(function)
    def checked(module: Any, *args: Any, **options: Any) -> Any:
        modules = list(module) if isinstance(module, list | tuple) else [module]
        for each in modules:
            check_is_module(each)
            for name, param in each.named_parameters():
                if param not in (options.get("ignored_params") or ()):
                    check_hooks(name, param)
        if not modules:
            raise ConfigError("model: expected a module, or a list of some, got an empty list")
        for name, (kind, expected) in _KINDS.items():
            if name in options and not isinstance(options[name], kind):
                raise ConfigError(f"{name}={options[name]!r}: expected {expected}")
        return function(module, *args, **options)

    return checked


@_checking
@contract(state_cls=State)
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | Axes | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | Precision = _NO_CASTS,
    offload_policy: OffloadPolicy | Offload | None = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: "DataParallelMeshDims | None" = None,
) -> Any:
    """Shard a module's parameters, or a list of modules' as one group, in place; return it.

    It has the semantics of ``torch.distributed.fsdp.fully_shard``, and takes torch's policies. Call
    it from the inside out, last on the model. Parameters become DTensors; each rank keeps a chunk
    of its present values. ``offload_policy`` may also be a `shardwise.Offload`, for its
    ``activations``; one call sets that for the whole model. ``mp_policy`` may also be a
    `shardwise.Precision`, for its ``gather`` and encoded ``reduce``.

    **Cost** no communication.

    **Raises** ValueError for containers without a forward, scalar parameters, and unsuitable
    meshes; NotImplementedError for parameters that cannot be sharded.
    """
    _check_container(module)
    offload, moves = _state_and_activations(offload_policy)
    mp, precision = _policy_and_precision(mp_policy)
    warn_if_untested("torch")
    spread = spread_over(mesh or default_mesh(), dp_mesh_dims)
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(module))
    device = torch.device("cpu")
    if spread.mesh.device_type != "cpu":
        device = current_device(spread.mesh.device_type)
    managed = _managed_modules(modules, ignored_params)
    params, buffers = _get_managed_states(managed, ignored_params)
    uses = _uses_of(modules, params)
    for param in params:
        refuse_opaque(local_of(param), uses[param][0].name)
    _move((*params, *buffers), device)
    asked = Asked(device, mp, precision, offload, reshard_after_forward is None, moves)
    units: dict[ShardingMesh, Unit] = {}

    def unit_on(where: ShardingMesh) -> Unit:
        if where not in units:
            reshards = _checked_reshard(reshard_after_forward, where)
            units[where] = make_unit(modules, where, asked, *reshards)
        return units[where]

    def take_over(param: nn.Parameter) -> None:
        dim, where = chosen_placement(param, shard_placement_fn, spread)
        take(unit_on(where), where, uses[param], param, dim)
        retire(param, uses.pop(param)[0].name, "fully_shard()")

    if not params:
        unit_on(spread)  # for its hooks: the root may own no parameters
    while params:  # frees the original values before the units' buffers are made
        take_over(params.pop(0))
    state: State = fully_shard.state(modules[0])
    state.attach(modules, list(units.values()), asked)
    _mark(managed, modules)
    return module


def _policy_and_precision(
    policy: MixedPrecisionPolicy | Precision,
) -> tuple[MixedPrecisionPolicy, Precision]:
    """Return torch's policy, and ours for the units, without the cast of inputs.

    **Raises** ConfigError for ``master``.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy, Precision(policy.param_dtype, None, policy.reduce_dtype, False)
    asked = resolve_precision(policy)
    if asked.master is not None:
        raise ConfigError(
            f"mp_policy.master={asked.master!r}: fully_shard keeps the parameters' own dtype as "
            "the masters'; cast the model to it first and leave master= out, or use shard()"
        )
    casts = asked.cast_inputs and asked.param is not None
    mp = MixedPrecisionPolicy(asked.param, asked.reduce_dtype, cast_forward_inputs=casts)
    return mp, replace(asked, cast_inputs=False)


def _state_and_activations(
    policy: OffloadPolicy | Offload | None,
) -> tuple[CPUOffloadPolicy | None, bool]:
    """Return torch's policy for a rank's state, and True if activations are offloaded.

    **Raises** ConfigError for an `Offload` of part of the state, or to files.
    """
    if not isinstance(policy, Offload):
        return policy if isinstance(policy, CPUOffloadPolicy) else None, False
    asked = resolve_offload(policy)
    if asked is None or not asked.moves_state:
        return None, asked is not None
    if asked.tiers[:4] != ("cpu", "cpu", "cpu", 1) or asked.step_on == "device":
        raise ConfigError(
            f"offload_policy={policy!r}: fully_shard has all state of a rank in host memory, and "
            "steps it there, or none; let params=, grads= and optimizer= be 'cpu', leave them and "
            "the others out, or use shard()"
        )
    return CPUOffloadPolicy(), asked.activations == "cpu"


def _mark(managed: Iterable[nn.Module], modules: Iterable[nn.Module]) -> None:
    """Mark the modules for torch and dynamo."""
    for inner in managed:
        note_managed(inner)
    for each in modules:
        cls: Any = type(each)
        each.__class__ = sharded_class(cls)
        register_load_check(each, compare_load)


def _check_container(module: Any) -> None:
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )
    parts = (module,) if isinstance(module, nn.Module) else module
    if any(isinstance(p, ShardTensor) for part in parts for p in part.parameters()):
        raise ConfigError("module: it is sharded already, by shard(); use one or the other")
    inner = (child for part in parts for child in part.modules())
    if any(isinstance(m, TorchFSDPModule) and not isinstance(m, FSDPModule) for m in inner):
        raise ConfigError(
            "module: torch's fully_shard() was called on modules of it; call shardwise.fully_shard "
            "on all of them"
        )


def _checked_reshard(asked: bool | int | None, spread: ShardingMesh) -> tuple[bool, Axis | None]:
    """Return True if parameters are freed after forward, and the axis they then stay sharded on.

    None means True, except for the root and for stages of a pipeline, where the first micro-batch
    gathers for the whole step. An int makes a mesh of groups of that many ranks.
    """
    if asked is None:
        return spread.axes.stages is None, None
    if isinstance(asked, bool):
        return asked, None
    size = spread.axes.shard.size
    if not isinstance(asked, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {asked}"
        )
    if spread.spmd is not None:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    if asked < 1 or asked > size or size % asked:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, not "
            f"{asked}"
        )
    if asked in (1, size):
        return asked != 1, None
    return True, nearby_axis(spread.mesh, asked)


def _managed_modules(
    roots: tuple[nn.Module, ...], ignored: set[nn.Parameter] | None
) -> list[nn.Module]:
    """Return the modules that no earlier call manages, children first."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        is_managed = module not in roots and state_of(module) is not None
        if is_managed or "replicate" in (_get_registry(module) or {}):  # torch's
            return
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen:
                yield from walk(child)
        yield module

    found = [module for root in roots for module in walk(root)]
    return found if ignored is None else _adjust_managed_modules(found, ignored)


def _uses_of(
    roots: tuple[nn.Module, ...], params: Iterable[nn.Parameter]
) -> dict[nn.Parameter, tuple[ParamUse, ...]]:
    """Return all uses of each parameter below the modules."""
    found: dict[nn.Parameter, list[ParamUse]] = {param: [] for param in params}
    for root in roots:
        for prefix, module in root.named_modules(remove_duplicate=False):
            for attribute, param in module._parameters.items():
                if param is not None and param in found:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    found[param].append(ParamUse(module, attribute, name))
    return {param: tuple(uses) for param, uses in found.items()}


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move parameters and buffers to the device; those on meta stay there."""
    for tensor in tensors:
        if tensor.device == device or tensor.is_meta:
            continue
        if isinstance(tensor, DTensor):
            raise ValueError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{tensor.device_mesh.device_type} for DTensor and {device.type} for FSDP"
            )
        if is_traceable_wrapper_subclass(tensor):
            with torch.no_grad():
                moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = tensor.to(device)
