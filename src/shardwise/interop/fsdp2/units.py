"""The units of a ``fully_shard`` call, with FSDP2's settings.

Parameters are sharded one by one; each rank keeps a chunk of its present values. Then the unit is
laid out. It is laid out again if ``model.to()``, ``to_empty()`` or a load replaces its parameters.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import Comm
from shardwise.comm.control import control_over
from shardwise.config import Precision
from shardwise.interop.fsdp2.meshes import ShardingMesh, sharded_spec
from shardwise.layout.segments import build_layout
from shardwise.layout.units import ParamUse
from shardwise.mesh import Axis
from shardwise.offload.home import Home
from shardwise.stages import STAGES, UnitSettings
from shardwise.tensor.cut import as_dtensor, cut_along, cut_piece, make_cut
from shardwise.tensor.inner import chunk_of, has_own_gather, holds_codes
from shardwise.tensor.plain_state import FULLY_SHARD, FullyShardOwner
from shardwise.trace import FullParamLedger
from shardwise.unit.encodings import CONTIGUOUS, AlongDim, SubclassGather
from shardwise.unit.param import DTensorForm, ShardedParam
from shardwise.unit.storage import SecondaryShard, Storage
from shardwise.unit.sums import GradientRows, SumSettings
from shardwise.unit.unit import Gather, Unit

if TYPE_CHECKING:
    from shardwise.tensor.tensor_base import Sharded

# Without ``reduce_dtype`` torch sums in the dtype of computation before 2.15, and from 2.15 in that
# of the sharded parameter. We do the same as the installed torch.
_SUMS_IN_OWN_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


@dataclass(frozen=True)
class Asked:
    """Settings of one call. Its units have the ``precision``, the call itself the rest.

    ``frees_unless_root``: ``reshard_after_forward`` was None, so the root keeps its parameters.
    ``moves_activations``: inputs of checkpointed blocks rest in host memory.
    """

    device: torch.device
    mp: MixedPrecisionPolicy
    precision: Precision
    offload: CPUOffloadPolicy | None
    frees_unless_root: bool = False
    moves_activations: bool = False


def make_unit(
    modules: Sequence[nn.Module],
    spread: ShardingMesh,
    asked: Asked,
    frees: bool,
    nearby: Axis | None,
) -> Unit:
    """Make the unit of a call on one mesh, without parameters yet.

    ``frees``: full parameters are freed after forward. ``nearby``: the axis on which they stay
    sharded until backward.
    """
    axes = spread.axes
    comm = Comm(axes, asked.device, lambda: control_over(axes))
    stage = replace(STAGES[3], frees_after_forward=frees)
    home = None
    if asked.offload is not None:
        pins, tracer = asked.offload.pin_memory, comm.tracer
        home = Home(torch.device("cpu"), asked.device, comm.time, pins, tracer=tracer)
    return Unit(
        "",
        0,
        modules,
        comm,
        None,
        UnitSettings(stage, keeps_last=False, full_between_calls=True),
        asked.precision,
        SumSettings(spread.divisor or axes.num_ranks, in_param_dtype=_SUMS_IN_OWN_DTYPE),
        home=home,
        gather=Gather(secondary=SecondaryShard(nearby) if nearby is not None else None),
    )


def take(
    unit: Unit, spread: ShardingMesh, uses: tuple[ParamUse, ...], param: nn.Parameter, dim: int
) -> None:
    """Shard one parameter along ``dim``: each rank keeps a chunk of its present values.

    It must be contiguous, and only dim 0 can be sharded unevenly.
    """
    values = param._local_tensor if isinstance(param, DTensor) else param.detach()
    shard = spread.axes.shard
    _check(uses[0].name, param, values, dim, shard.size)
    spec = sharded_spec(param, uses[0].name, dim, spread)
    form = DTensorForm(
        spec,
        # It identifies tied parameters of two calls; `id` may be reused.
        vars(param).setdefault("_fully_shard_identity", object()),
        param._spec if isinstance(param, DTensor) else None,
        spread.outer(param._spec) if isinstance(param, DTensor) else None,
        spread.reduced_dims,
    )
    made = ShardedParam(unit, uses, form, tuple(values.shape), dim=dim)
    made.holds_codes = holds_codes(param)
    chunk = chunk_of(values, shard.size, shard.rank, dim)
    held = nn.Parameter(as_dtensor(chunk, spec), requires_grad=param.requires_grad)
    made.sharded = cast("Sharded", held)
    made.sharded._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    vars(made.sharded)[FULLY_SHARD] = FullyShardOwner(made)
    unit.add(made)


def _check(name: str, param: nn.Parameter, values: torch.Tensor, dim: int, num_ranks: int) -> None:
    if not param.is_contiguous() or not values.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: '{name}' has "
            f"{param.shape=} {param.stride()=}; call .contiguous() on it first"
        )
    if dim >= values.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {values.ndim}D tensor: {param.shape}")
    if dim > 0 and values.shape[dim] % num_ranks:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: '{name}' has "
            f"{values.shape} (world size: {num_ranks})"
        )


@torch.no_grad()
def adopt(unit: Unit, asked: Asked, ledger: FullParamLedger) -> None:
    """Adopt the sharded parameters in the unit's modules.

    Parameters on meta are not laid out yet.
    """
    is_new = [_reread(param) for param in unit.params]  # a list: each must be read
    if not any(is_new):
        return
    if unit.gather.secondary is not None:
        unit.gather.secondary.drop_parts()
    storages: list[Storage] = []
    axis = unit.comm.axes.shard
    groups: dict[Any, list[ShardedParam]] = {}
    for param in unit.params:
        local, param.cut = param.sharded._local_tensor, None
        if has_own_gather(local):
            param.detach_storage(SubclassGather(asked.mp, axis.size, param.dim))
            if not (param.dim or param.form.outer or local.is_meta):
                layout = build_layout("rows", [param.shape], axis.size)
                param.cut = make_cut(param.shape, layout, 0, unit.comm, param.name)
            continue
        param.detach_storage(AlongDim(param.dim, param.shape) if param.dim else CONTIGUOUS)
        if not local.is_meta:
            are_codes = holds_codes(local) or param.holds_codes
            casts = local.is_floating_point() and not are_codes
            compute = unit.precision.param if casts else None
            key = local.dtype, compute or local.dtype, param.dim > 0, are_codes
            groups.setdefault(key, []).append(param)
    for (master, compute, _, are_codes), params in groups.items():
        shapes = [_shape_in_memory(param, axis.size) for param in params]
        layout = build_layout("rows", shapes, axis.size)
        storage = Storage(
            layout,
            axis.rank,
            unit.settings.stage,
            (master, compute),
            unit.comm.device,
            ledger,
            home=unit.home,
            coding=None if are_codes else unit.precision.coding,
        )
        for index, param in enumerate(params):
            cut = cut_along(param.shape, layout, index, unit.comm, param.dim, param.name)
            param.cut = cut if param.form.outer is None else cut_piece(cut, param.form.outer)
            param.attach_storage(storage, index)
        storage.free()
        storages.append(storage)
    unit.grads.gradient_rows = list(_gradient_rows(unit))
    unit.set_storages(storages)


def _gradient_rows(unit: Unit) -> Iterator[GradientRows]:
    """Yield the layouts of gradients of parameters that define their gather, one per dtype."""
    axis = unit.comm.axes.shard
    groups: dict[torch.dtype, list[ShardedParam]] = {}
    for param in unit.params:
        if not param.encoding.is_in_storage and not param.sharded.is_meta:
            groups.setdefault(param.sharded.dtype, []).append(param)
    for dtype, params in groups.items():
        layout = build_layout("rows", [_shape_in_memory(p, axis.size) for p in params], axis.size)
        for number, param in enumerate(params):
            param.index = number
        compute = unit.precision.param or dtype
        yield GradientRows(layout, axis.rank, tuple(params), dtype, compute, unit.comm.device)


def _reread(param: ShardedParam) -> bool:
    """Adopt the module's parameter as the sharded one; return True if it is new."""
    found: Any = param.uses[0].module._parameters[param.uses[0].attribute]
    if not isinstance(found, DTensor):
        raise AssertionError(f"parameter '{param.name}': expected DTensor, got {type(found)}")
    param.sharded = cast("Sharded", found)
    vars(found)[FULLY_SHARD] = FullyShardOwner(param)
    local = found._local_tensor
    return local is not param.local or has_own_gather(local) == param.encoding.is_in_storage


def _shape_in_memory(param: ShardedParam, num_ranks: int) -> tuple[int, ...]:
    """Return the shape to cut along dim 0 in memory; for another dim, one row per rank."""
    if param.dim == 0:
        return param.shape
    return num_ranks, torch.Size(param.shape).numel() // num_ranks


def check_device(unit: Unit) -> None:
    """Refuse parameters that are still on meta, or not at their home."""
    on_meta = [s.name for s in unit.params if s.sharded.device.type == "meta"]
    if on_meta:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {on_meta}\nFor example, call "
            "module.to_empty(device) to materialize to device and call "
            "module.reset_parameters() on each module to initialize values."
        )
    if unit.home is None:
        return
    misplaced = [
        (s.name, s.sharded.device) for s in unit.params if s.sharded.device != unit.home.place
    ]
    if misplaced:
        raise RuntimeError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For "
            'example, load a CPU state dict or call module.to_empty(device="cpu"). Found '
            f"following parameters on non-CPU device: {misplaced}\n"
        )


def tie_free(params: Iterable[ShardedParam]) -> None:
    """Check that no parameter is in two groups. **Raises** ValueError, with its name."""
    seen: set[object] = set()
    for param in params:
        identity = getattr(param.form, "identity", None)
        if identity in seen:
            raise ValueError(
                f"Parameter '{param.name}' is shared with a parameter already managed by another "
                "FSDP group. For shared/tied parameters, use fully_shard([module_a, module_b]) to "
                "place them in the same FSDP group."
            )
        seen.add(identity)
