"""``shard()``, which shards a module in place."""

import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardwise.axes import Axes
from shardwise.comm.collectives import Comm, next_number
from shardwise.comm.control import Control, control_over
from shardwise.config import (
    Init,
    PrecisionLike,
    Schedule,
    ShardConfig,
    Units,
    UnitsLike,
    resolve_config,
)
from shardwise.device import current_device
from shardwise.engine.adoption import Adoption, Optimizers
from shardwise.engine.agreement import (
    HOST_ROW_BYTES,
    agree,
    check_host_room,
    host_row,
    make_room,
    refusal_facts,
    start_facts,
)
from shardwise.engine.model import attach_engine, note_managed
from shardwise.engine.renamed import move_renamed
from shardwise.engine.runtime import Engine
from shardwise.engine.seams import open_homes
from shardwise.engine.tree import ATTRIBUTE
from shardwise.errors import ConfigError, StorageError
from shardwise.homes import OffloadLike
from shardwise.layout.placements import (
    ChooseLayout,
    assign_owners,
    layout_name,
    place_experts,
    place_params,
)
from shardwise.layout.units import UnitSpec, find_device, partition_into_units
from shardwise.mesh import DataAxes, check_nearby, nearby_axis, resolve_axes
from shardwise.names import list_names
from shardwise.tensor.plain_state import owner_of  # the import registers operations on state
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.trace import FullParamLedger
from shardwise.unit.gradient import check_hooks
from shardwise.unit.home import Homes
from shardwise.unit.materialize import Materializer
from shardwise.unit.unit import Unit
from shardwise.versions import warn_if_untested


def shard(
    model: nn.Module,
    *,
    stage: int = 3,
    mesh: DeviceMesh | Axes | None = None,
    units: UnitsLike = None,
    layout: str | ChooseLayout = "rows",
    precision: PrecisionLike = "fp32",
    offload: OffloadLike = None,
    optimizer: Optimizers = None,
    schedule: Schedule | None = None,
    **renamed: Any,
) -> nn.Module:
    """Shard a model's training state over data-parallel ranks, in place; return the model.

    Every rank calls it with the same model. Build the optimizer afterwards, from
    ``model.parameters()``, which are then `ShardTensor`s. Or pass optimizers built before as
    ``optimizer``: their parameters are replaced.

    ``stage`` is the ZeRO stage: 0 replicates, 1 shards the optimizer's state, 2 gradients too, 3
    parameters too. ``mesh`` is `Axes`, or a DeviceMesh of one axis (shard) or two (replicate,
    shard); None is all ranks. ``units`` are module classes, class names or modules that are
    gathered and freed together, or `Units`; None finds them. ``layout`` is "rows", "flat",
    "matrices" or a function (`assign_owners`). ``precision`` is "fp32", "bf16", "fp16", the dtype
    to compute in, or a `Precision`. ``offload`` is "cpu", "nvme:FOLDER" or an `Offload`.
    ``schedule`` is a `Schedule`. ``renamed`` takes parameters of version 0.1, with a warning.

    A model on the meta device is filled by its modules' ``reset_parameters()``, or by
    `Units.init`. Elements left unwritten are an error afterwards. DTensors keep their placements.

    **Cost** one exchange of 64 bytes; one broadcast of the model from the first rank; memory for
    one full unit; one gloo group.

    **Raises** ConfigError, before any change, with the setting and its remedy. All ranks raise if
    they differ in version, setting or model, or if one raises or lacks room (StorageError).
    """
    moved: dict[str, Any] = {"mesh": mesh, "units": units, "schedule": schedule}
    try:
        move_renamed(moved, renamed, "shard")
        arguments = _resolve_arguments(model, stage, layout, precision, offload, optimizer, **moved)
    except (ConfigError, StorageError) as refusal:
        _report_to_other_ranks(refusal, model, moved["mesh"])
        raise
    comm, seed = _agree(model, arguments)
    engine = Engine(arguments.config, comm, FullParamLedger())
    attach_engine(model, engine, _build(model, arguments, engine, seed))
    _forbid_layer_drop(model, engine)
    return model


@dataclass
class _Arguments:
    """The resolved arguments of one `shard` call, before any exchange or change."""

    config: ShardConfig
    axes: DataAxes
    device: torch.device
    init: Init | None
    specs: list[UnitSpec]
    adoption: Adoption
    homes: Homes | None


def _resolve_arguments(
    model: nn.Module,
    stage: int,
    layout: str | ChooseLayout,
    precision: PrecisionLike,
    offload: OffloadLike,
    optimizer: Optimizers,
    mesh: DeviceMesh | Axes | None,
    units: UnitsLike,
    schedule: Schedule | None,
) -> _Arguments:
    """Check the settings; resolve them to units, parameters and axes."""
    config = resolve_config(stage, layout_name(layout), precision, schedule, offload)
    _check_model(model)
    chosen = Units.of(units)
    specs = partition_into_units(model, chosen.modules, chosen.optional)
    device = find_device(specs)
    axes = _axes_for(device, mesh)
    check_nearby(axes, config.nearby_ranks)
    placed = place_experts(specs, chosen.placements, chosen.experts, mesh)
    specs = assign_owners(place_params(specs, placed, axes, config.layout), layout, axes)
    adoption = Adoption(optimizer, specs)
    device = device or current_device(axes.mesh.device_type)
    homes = open_homes(config.state_offload, device)
    return _Arguments(config, axes, device, chosen.init, list(specs), adoption, homes)


_START = struct.Struct("<qQ")  # this rank's number for the model, its seed


def _agree(model: nn.Module, arguments: _Arguments) -> tuple[Comm, int]:
    """Compare the arguments of all ranks; return the collectives and the first rank's seed.

    One exchange carries a digest of the facts, the model's number, the seed, and the free memory of
    the hosts.
    """
    axes = arguments.axes
    config = arguments.config
    comm = Comm(axes, arguments.device, lambda: control_over(axes))
    facts = start_facts(model, arguments.specs, config, axes, arguments.init, arguments.adoption)
    start = _START.pack(next_number(), torch.initial_seed() % 2**63)
    row = start + host_row(arguments.specs, config, axes.shard)
    rows = agree(comm.control, facts, "shard()", row=row)
    check_host_room(comm.control, config, [row[_START.size :] for row in rows])
    comm.number, seed = _START.unpack_from(rows[0])
    return comm, seed


def _build(model: nn.Module, arguments: _Arguments, engine: Engine, seed: int) -> list[Unit]:
    """Build the units one by one; drop each specification, with its original values."""
    specs = arguments.specs
    control = engine.comm.control
    num_nearby = arguments.config.nearby_ranks
    nearby = None
    if num_nearby not in (None, arguments.axes.shard.size):
        nearby = replace(nearby_axis(arguments.axes.mesh, num_nearby), name="nearby")
    materializer = Materializer(
        arguments.config,
        engine.comm,
        engine.ledger,
        engine,
        arguments.init,
        specs,
        arguments.homes,
        nearby,
    )
    materializer.check(specs)
    if arguments.config.state_offload is not None:
        make_room(control, partial(materializer.reserve, specs))
    materializer.take_seed(seed)
    built: list[Unit] = []
    specs.reverse()
    while specs:
        spec = specs.pop()
        built.append(materializer.build(spec, len(built)))
        arguments.adoption.replace_params(spec, built[-1])
        del spec
    materializer.fill_buffers(model)
    if materializer.unwritten is not None:
        _refuse_unwritten(control, materializer.unwritten)
    return built


def _refuse_unwritten(control: Control, names: Sequence[str]) -> None:
    """Raise ConfigError on all ranks for parameters or buffers on meta without values."""
    refusal = None
    if names:
        refusal = ConfigError(
            f"model: {list_names(names)} had no value on the meta device, and reset_parameters(), "
            "or Units(init=), has left elements unwritten. Let it write them, in place or by "
            "setting the attribute, and build the model again: this one is sharded in part"
        )
    agree(control, refusal_facts(refusal), "shard()")
    if refusal is not None:
        raise refusal


def _forbid_layer_drop(model: nn.Module, engine: Engine) -> None:
    """Make transformers run a layer on all ranks, even if layerdrop skips it on one.

    Set its flag on every module whose file has ``is_fsdp_managed_module``. Otherwise ranks would
    wait for each other. A model with ``optional`` units does not need it.
    """
    frees = engine.config.stage.frees_after_forward and engine.comm.axes.num_ranks > 1
    if not frees or any(unit.settings.optional for unit in engine.units):
        return
    for module in model.modules():
        files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
        if any(hasattr(file, "is_fsdp_managed_module") for file in files):
            note_managed(module)


def _report_to_other_ranks(
    refusal: ConfigError | StorageError, model: object, mesh: DeviceMesh | Axes | None
) -> None:
    """Join the other ranks' `agree`; return if all ranks have the same error."""
    axes = None
    with suppress(Exception):  # without axes no exchange is possible
        params = model.parameters() if isinstance(model, nn.Module) else ()
        axes = _axes_for(next((p.device for p in params if not p.is_meta), None), mesh)
    if axes is not None:
        row = bytes(_START.size + HOST_ROW_BYTES)
        agree(control_over(axes), refusal_facts(refusal), "shard()", row=row)


def _axes_for(device: torch.device | None, mesh: DeviceMesh | Axes | None) -> DataAxes:
    """Return the axes; without a device, use the mesh's device type or the accelerator."""
    if device is None and mesh is None:
        device = torch.accelerator.current_accelerator(check_available=True)
    mesh = mesh.mesh if isinstance(mesh, Axes) else mesh
    default = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    return resolve_axes(mesh, default if device is None else device.type)


def _check_model(model: nn.Module) -> None:
    warn_if_untested("torch")
    check_is_module(model)
    for name, module in model.named_modules():
        if ATTRIBUTE in vars(module):
            where = f"its submodule '{name}'" if name else "the model"
            raise ConfigError(f"model: {where} is sharded already; call shard() once, on the whole")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            where = f"its submodule '{name}'" if name else "it"
            raise ConfigError(
                f"model: {where} is wrapped in DistributedDataParallel, whose work shard() does; "
                "pass the module inside, which is its .module"
            )
        if isinstance(module, FullyShardedDataParallel):
            where = f"its submodule '{name}'" if name else "it"
            raise ConfigError(
                f"model: {where} is wrapped in FullyShardedDataParallel, whose work shard() does; "
                "pass the module inside, which is its .module"
            )
    for name, param in model.named_parameters():
        check_hooks(name, param)
        if isinstance(param, ShardTensor):
            raise ConfigError(
                f"model: parameter '{name}' is sharded already, with a model that has this "
                f"{type(model).__name__} in it; call shard() once, on the whole"
            )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError("model: fully_shard() was called on modules of it; use one or the other")
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise ConfigError(f"model: a {type(model).__name__} has no forward; shard the model itself")


def check_is_module(model: object) -> None:
    """Raise ConfigError if ``model`` is not a module."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise ConfigError(
            f"model: expected a torch.nn.Module, got the class {model.__name__}; make one of it: "
            f"{model.__name__}(...)"
        )
    raise ConfigError(f"model: expected a torch.nn.Module, got {_shorten_repr(model)}")


def _shorten_repr(value: object) -> str:
    text = " ".join(repr(value).split())
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return short if value is None else f"{short}, which is of type {type(value).__name__}"


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a sharded model. **Raises** ConfigError for other models."""
    check_is_module(model)
    engine = find_engine(model)
    if engine is None:
        if any(type(p.data) is DTensor for p in model.parameters()):
            raise ConfigError(
                f"model: this {type(model).__name__} was given neither to shardwise.shard() nor to "
                "Shardwise's fully_shard(), though its parameters are DTensors. fully_shard must "
                "be called last on the model itself; for torch's own use "
                "torch.distributed.checkpoint"
            )
        raise ConfigError(
            f"model: this {type(model).__name__} is not sharded; pass the module that was given to "
            "shardwise.shard(), or to shardwise.fully_shard() last"
        )
    return engine


def find_engine(model: nn.Module) -> Engine | None:
    """Return the engine of a model, or None if the model is not sharded."""
    engine: Engine | None = vars(model).get(ATTRIBUTE) or _engine_of_fully_shard(model)
    return engine


def is_sharded(model: object) -> bool:
    """Tell whether a model was given to `shard`, or is the root of a `fully_shard` model.

    Before the engine exists, any module given to `fully_shard` counts as a root.
    """
    if not isinstance(model, nn.Module):
        return False
    state = _fully_shard_state(model)
    is_root = state is not None and (state.engine is None or _is_root(state))
    return is_root or ATTRIBUTE in vars(model)


def has_sharded_parts(model: nn.Module) -> bool:
    """Tell whether parameters of a model are sharded, by `shard` or `fully_shard`."""
    return any(owner_of(param) is not None for param in model.parameters())


class _FullyShardState(Protocol):
    """The state of a module given to `fully_shard`; its engine is made at the first use."""

    engine: Engine | None
    units: list[Unit]

    def lazy_init(self) -> Engine: ...


def _fully_shard_state(model: nn.Module) -> _FullyShardState | None:
    state: Any = _get_module_state(model)
    return state if hasattr(state, "lazy_init") else None


def _is_root(state: _FullyShardState) -> bool:
    return state.lazy_init().units[0] in state.units


def _engine_of_fully_shard(model: nn.Module) -> Engine | None:
    """Return the engine of a `fully_shard` model; make it at the first call."""
    state = _fully_shard_state(model)
    if state is None:
        return None
    engine = state.lazy_init()
    if not _is_root(state):
        raise ConfigError(
            f"model: this {type(model).__name__} is a part of a model of fully_shard(); pass the "
            "whole model, which fully_shard() was called on last"
        )
    return engine
