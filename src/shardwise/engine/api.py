"""``shard()``: from a module to a sharded module, in place."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.axes import Axes
from shardwise.comm.collectives import Comm
from shardwise.comm.control import Control, control_over
from shardwise.comm.exchange import Exchange
from shardwise.comm.listener import WAITS, checked_timeout
from shardwise.config import PrecisionLike, ShardConfig, resolve_config
from shardwise.device import current_device, host_buffer
from shardwise.engine.adoption import Adoption, Optimizers
from shardwise.engine.agreement import agree, make_room, refusal_facts, start_facts
from shardwise.engine.host_room import check_host_room
from shardwise.engine.model import ATTRIBUTE, attach_engine
from shardwise.engine.module_state import ModuleState, note_managed
from shardwise.engine.resting import bytes_by_place
from shardwise.engine.runtime import Engine
from shardwise.errors import ConfigError, StorageError
from shardwise.homes import NUM_BUFFERS, Offload, OffloadLike, folders_of
from shardwise.layout.placements import (
    ChooseLayout,
    Placements,
    layout_name,
    place_params,
    with_experts,
    with_owners,
)
from shardwise.layout.units import UnitChoice, UnitSpec, find_device, partition_into_units
from shardwise.mesh import DataAxes, resolve_axes
from shardwise.names import list_names
from shardwise.offload.disk import Disk
from shardwise.stages import DEFAULT_BUCKET_BYTES
from shardwise.trace import FullParamLedger, Stats, Traffic
from shardwise.unit.grad_hooks import check_hooks
from shardwise.unit.home import Files
from shardwise.unit.inner import plain_parts
from shardwise.unit.materialize import Init, Materializer
from shardwise.unit.plain_state import owner_of  # and registers what cuts an optimizer's state
from shardwise.unit.stepping import elements_of
from shardwise.unit.tensor import ShardTensor
from shardwise.unit.unit import Unit
from shardwise.versions import warn_if_untested


def shard(
    model: nn.Module,
    *,
    stage: int = 3,
    precision: PrecisionLike = "fp32",
    layout: str | ChooseLayout = "rows",
    units: UnitChoice | Iterable[UnitChoice] | None = None,
    mesh: DeviceMesh | Axes | None = None,
    shard_axis: str | None = None,
    replicate_axis: str | None = None,
    reduce_every: str | None = None,
    prefetch_bytes: int | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    init: Init | None = None,
    optional: UnitChoice | Iterable[UnitChoice] = (),
    optimizer: Optimizers = None,
    offload: OffloadLike = None,
    placements: Placements | None = None,
    experts: str | Sequence[str] = (),
    hang_timeout: float | None = None,
) -> nn.Module:
    """Shard a model's training state over data-parallel ranks, in place; return the model.

    Every rank calls it with the same model. Build the optimizer afterwards, from
    ``model.parameters()``, then `ShardTensor`, or pass those built before, which are cut.
    ``precision`` is "fp32", "bf16", "fp16", the dtype to compute in, or a `Precision`; ``layout``
    may be a function: `with_owners`; ``units`` are module classes, class names or modules (default:
    found); ``mesh`` is `Axes` or has one axis (shard) or two (replicate, shard), or name them;
    ``placements``, ``experts``: `place_params`; ``hang_timeout``: `watch`. A model on meta is
    filled by its modules' ``reset_parameters()`` or by ``init(module)``; what is left unwritten is
    refused, afterwards. ``optional`` modules may be skipped at stage 3. DTensors keep their
    placements. The rest is in `ShardConfig`.

    **Cost** one broadcast of the model from the first rank; one unit in full; one gloo group.

    **Raises** ConfigError, before anything is changed, naming setting and remedy; on all ranks when
    they differ in version, setting or model, or when one refuses or lacks room (StorageError).
    """
    try:
        wanted = layout_name(layout), precision, reduce_every, prefetch_bytes, bucket_bytes, offload
        config = resolve_config(stage, *wanted)
        _check_model(model, init, hang_timeout)
        specs = partition_into_units(model, units, optional)
        device = find_device(specs)
        axes = _axes_for(device, mesh, shard_axis, replicate_axis)
        placed = with_experts(specs, placements, experts, mesh)
        specs = with_owners(place_params(specs, placed, axes, config.layout), layout, axes)
        adoption = Adoption(optimizer, specs)
        files = _open_files(config, device or current_device(axes.mesh.device_type))
    except (ConfigError, StorageError) as refusal:
        _tell_other_ranks(refusal, model, mesh, shard_axis, replicate_axis)
        raise
    facts = start_facts(model, specs, config, axes, init, adoption)
    comm = _agreed(facts, axes, device, hang_timeout)
    engine = Engine(config, comm, FullParamLedger())
    materializer = _materializer(engine, config, comm, init, specs, files)
    remaining, specs = list(specs)[::-1], ()  # the parameters as they came are freed unit by unit
    attach_engine(model, engine, _build(model, remaining, materializer, adoption, comm.control))
    _run_all_layers(model, engine)
    return model


def _agreed(
    facts: list[str], axes: DataAxes, device: torch.device | None, hang_timeout: float | None
) -> Comm:
    """Return the collectives, once all ranks have begun alike; waits are watched from here on."""
    if hang_timeout is not None:
        WAITS.set_limit(hang_timeout)
    comm = Comm(axes, device or current_device(axes.mesh.device_type), lambda: control_over(axes))
    agree(comm.control, [*facts, f"hang_timeout={hang_timeout}"], "shard()")
    comm.agree_on_number()
    return comm


def _materializer(
    engine: Engine,
    config: ShardConfig,
    comm: Comm,
    init: Init | None,
    specs: Sequence[UnitSpec],
    files: Files,
) -> Materializer:
    """Refuse what cannot be built, or has no room on some rank, before anything is changed."""
    check_host_room(comm.control, specs, config, comm.axes.shard)
    materializer = Materializer(config, comm, engine.ledger, engine, init, specs, files)
    materializer.check(specs)
    if config.state_offload is not None:
        make_room(comm.control, partial(materializer.reserve, specs))
    materializer.agree_on_seed()
    return materializer


def _build(
    model: nn.Module,
    remaining: list[UnitSpec],
    materializer: Materializer,
    adoption: Adoption,
    control: Control,
) -> list[Unit]:
    """Build the units, the last of the list first, and drop each one's specification."""
    built: list[Unit] = []
    while remaining:
        spec = remaining.pop()
        built.append(materializer.build(spec, len(built)))
        adoption.take(spec, built[-1])
    materializer.fill_buffers(model)
    if materializer.unwritten is not None:
        _refuse_unwritten(control, materializer.unwritten)
    return built


def _refuse_unwritten(control: Control, names: Sequence[str]) -> None:
    """Refuse a model on meta of which parameters or buffers have no values, on all ranks."""
    refusal = None
    if names:
        refusal = ConfigError(
            f"model: {list_names(names)} had no value on the meta device, and reset_parameters(), "
            "or init=, has left elements unwritten. Let it write them, in place or by setting the "
            "attribute, and build the model again: this one is sharded in part"
        )
    agree(control, refusal_facts(refusal), "shard()")
    if refusal is not None:
        raise refusal


def _open_files(config: ShardConfig, device: torch.device) -> Files:
    """Open the folders that are to have state in files. **Raises** ConfigError if one has none.

    Slices have a disk of their own, whose buffers a step never waits for.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    offload, cpu = config.offload or Offload(), torch.device("cpu")

    def disk(place: str | None, copied_from: torch.device) -> Disk | None:
        folders = [*map(Path, folders_of(place))]
        buffer = partial(host_buffer, device=copied_from)
        return Disk(folders, 0, NUM_BUFFERS, buffer, rank) if folders else None

    optimizer = disk(offload.optimizer, device if offload.step_on == "device" else cpu)
    same = offload.grads == offload.optimizer
    return Files(
        disk(offload.params, device), optimizer if same else disk(offload.grads, cpu), optimizer
    )


def _run_all_layers(model: nn.Module, engine: Engine) -> None:
    """Set the switch by which layers of transformers run on all ranks, even if one drops them.

    On every module whose code looks at it (transformers.integrations.is_fsdp_managed_module), so
    that layerdrop does not make ranks wait for each other. Who names ``optional`` units needs none.
    """
    frees = engine.config.stage.frees_after_forward and engine.comm.axes.num_ranks > 1
    if not frees or any(unit.settings.optional for unit in engine.units):
        return
    for module in model.modules():
        files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
        if any(hasattr(file, "is_fsdp_managed_module") for file in files):
            note_managed(module)


def _tell_other_ranks(
    refusal: ConfigError | StorageError,
    model: object,
    mesh: DeviceMesh | Axes | None,
    shard_axis: str | None,
    replicate_axis: str | None,
) -> None:
    """Meet the other ranks in their `agree`; return when all of them refuse alike."""
    axes = None
    with suppress(Exception):  # without axes the others cannot be told; the refusal is what counts
        params = model.parameters() if isinstance(model, nn.Module) else ()
        device = next((p.device for p in params if not p.is_meta), None)
        axes = _axes_for(device, mesh, shard_axis, replicate_axis)
    if axes is not None:
        agree(control_over(axes), refusal_facts(refusal), "shard()")


def _axes_for(
    device: torch.device | None,
    mesh: DeviceMesh | Axes | None,
    shard_axis: str | None,
    replicate_axis: str | None,
) -> DataAxes:
    """Return the axes; without a device, those of the mesh's, else on the accelerator there is."""
    if device is None and mesh is None:
        device = torch.accelerator.current_accelerator(check_available=True)
    mesh = mesh.mesh if isinstance(mesh, Axes) else mesh
    default = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    device_type = default if device is None else device.type
    return resolve_axes(mesh, shard_axis, replicate_axis, device_type)


def _check_model(model: nn.Module, init: Init | None, hang_timeout: float | None) -> None:
    warn_if_untested("torch")
    checked_timeout(hang_timeout)
    check_is_module(model)
    if init is not None and not callable(init):
        raise ConfigError(f"init={init!r}: expected a function that takes a module, or None")
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
    """Raise ConfigError where a model is none, saying what came."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise ConfigError(
            f"model: expected a torch.nn.Module, got the class {model.__name__}; make one of it: "
            f"{model.__name__}(...)"
        )
    raise ConfigError(f"model: expected a torch.nn.Module, got {_shown(model)}")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return short if value is None else f"{short}, which is of type {type(value).__name__}"


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a sharded model. **Raises** ConfigError for any other."""
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
    """Return the engine of a model, or None where it is not one of ours."""
    engine: Engine | None = vars(model).get(ATTRIBUTE) or _engine_of_calls(model)
    return engine


def is_sharded(model: object) -> bool:
    """Tell whether a model was given to `shard`, or is one that `fully_shard` has sharded.

    Not so a part of one, as far as is known: the last call of `fully_shard` may be yet to come.
    """
    if not isinstance(model, nn.Module):
        return False
    state = _state_of_calls(model)
    is_root = state is not None and (state.engine is None or _is_root(state))
    return is_root or ATTRIBUTE in vars(model)


def has_sharded_parts(model: nn.Module) -> bool:
    """Tell whether parameters of a model are sharded, by `shard` or `fully_shard`."""
    return any(owner_of(param) is not None for param in model.parameters())


def _state_of_calls(model: nn.Module) -> ModuleState | None:
    state = _get_module_state(model)
    return state if isinstance(state, ModuleState) else None


def _is_root(state: ModuleState) -> bool:
    return state.engine.units[0] in state.units


def _engine_of_calls(model: nn.Module) -> Engine | None:
    """Return the engine of a model of `fully_shard`, whose state makes it when it is needed."""
    state = _state_of_calls(model)
    if state is None:
        return None
    engine = state.lazy_init()
    if not _is_root(state):
        raise ConfigError(
            f"model: this {type(model).__name__} is a part of a model of fully_shard(); pass the "
            "whole model, which fully_shard() was called on last"
        )
    return engine


def stats(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Stats:
    """Return what this rank holds and has sent, in bytes, right now.

    ``optimizer``: its state counts in ``bytes_by_place``. What torch itself sends (tensor
    parallelism, stages of a pipeline) is in it where it was sent inside of `counting`.
    """
    engine = engine_of(model)
    storages = [s for u in engine.units for s in u.storages]
    params = [s for u in engine.units for s in u.params]
    grads = [elements_of(g).nbytes for s in params if isinstance(g := s.grad, DTensor)]
    in_leaves = [getattr(s.full, "grad", None) for s in params]  # none before a first gather
    partials = [t for t in (*(s.partial for s in params), *in_leaves) if t is not None]
    kept = sum(s.kept_bytes for s in storages)
    traffic = traffic_of(model)
    apart = [elements_of(p.sharded) for p in params if not p.encoding.in_storage]
    apart_bytes = sum(part.nbytes for local in apart for part in plain_parts(local).values())
    return Stats(
        param_shard_bytes=sum(s.shard_bytes for s in storages) + apart_bytes,
        param_full_bytes=kept,
        param_full_peak_bytes=max(engine.ledger.peak, kept),
        grad_shard_bytes=sum(grads) + engine.reductions.nbytes,
        grad_partial_bytes=sum(t.nbytes for t in partials),
        bytes_by_place=bytes_by_place(engine.units, optimizer, engine.activations),
        sent_bytes=dict(traffic.sent_bytes),
        num_collectives=dict(traffic.num_collectives),
    )


def traffic_of(model: nn.Module) -> Traffic:
    """Return what this rank has sent for a sharded model, over all meshes."""
    engine, total = engine_of(model), Traffic()
    here = [engine.comm.traffic, *(u.comm.traffic for u in engine.units)]
    here += [exchange.traffic for exchange in exchanges_of(model)]
    for traffic in {id(each): each for each in here}.values():
        total.sent_bytes.update(traffic.sent_bytes)
        total.num_collectives.update(traffic.num_collectives)
    return total


def exchanges_of(model: nn.Module) -> list[Exchange]:
    """Return what modules of a model keep to exchange activations by."""
    attributes = (each for module in model.modules() for each in vars(module).values())
    return [each for each in attributes if isinstance(each, Exchange)]
