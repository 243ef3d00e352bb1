"""A model and its optimizer as a table of tensors, each with this rank's elements of it.

Note [Saved state]
~~~~~~~~~~~~~~~~~~~~
Parameters in their master dtype, frozen ones too; a low-precision copy is never saved, as the
gather derives it. Persistent buffers. The optimizer's tensors: those cut like their parameter are
saved by slices, others (step counts) once. A buffer or a plain optimizer tensor that differs
between ranks is saved by each rank for itself. Gradients are not saved.

At stage 0, where every rank has everything, each rank still writes only the slice that it would own
at another stage: replicas are written once, by all ranks together.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.checkpoint.container import dtype_name
from shardwise.checkpoint.manifest import LayoutRow, OptimizerRow, TensorRow
from shardwise.checkpoint.replicas import (
    KEY,
    OUTER,
    PARAMETER,
    facts_of,
    local_steps_of,
    outer_tensors,
    own_prefix,
)
from shardwise.checkpoint.source import Kind, TensorInfo
from shardwise.checkpoint.values import encode
from shardwise.comm.collectives import Comm
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.layout.boxes import Region, full_region
from shardwise.parallel.parts import Model, Optimizer, Parts, StageOptimizers, named_modules_of
from shardwise.tensor.cut import Cut
from shardwise.tensor.inner import Inner, cut_by_rows, inner_of, plain_parts
from shardwise.tensor.plain_state import cut_plain_state
from shardwise.unit.param import ShardedParam
from shardwise.unit.states import GradState

Ranks = tuple[tuple[int, ...], ...]  # of the process group, as [replica][shard]
# Wrappers that add a part to the names of the modules inside.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.")


@dataclass(frozen=True)
class Item:
    """One tensor of the table, or a piece of one, with the manifest's row of it.

    ``data`` are this rank's elements, flat: with a layout those from ``lo`` on, else all.
    """

    row: TensorRow
    data: torch.Tensor
    lo: int = 0

    @property
    def info(self) -> TensorInfo:
        """The whole tensor's description."""
        return self.row.info


@dataclass(frozen=True)
class Table:
    """All training state of one rank, not yet copied.

    ``meshes`` are the ranks over which ``layouts`` are cut. ``is_uniform``: all ranks have these
    tensors, cut over one mesh. ``is_staged``: only the tensors that this rank writes were copied.
    ``own_mesh_params`` are parameters with their own mesh; on other ranks, the names may be other
    parameters. ``place`` is that of this rank's stages in a pipeline.
    """

    stage: int
    meshes: tuple[Ranks, ...]
    layouts: tuple[LayoutRow, ...]
    sharded: tuple[Item, ...]
    uncut: tuple[Item, ...]
    tied: Mapping[str, str]
    optimizer: OptimizerRow | None
    own: tuple[Item, ...]
    values: Mapping[str, object]
    is_uniform: bool = True
    is_staged: bool = False
    own_mesh_params: tuple[str, ...] = ()
    place: int | None = None


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts of activation checkpointing and torch.compile."""
    return _WRAPPERS.sub("", name)


def param_names(param: ShardedParam) -> tuple[str, ...]:
    """Return every name of a parameter; it is saved under the first."""
    names = [clean_name(use.name) for use in param.uses]
    return tuple(dict.fromkeys(names if param.tie is None else [param.tie.name, *names]))


def persistent_buffers(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to the state, by name."""
    for prefix, module in named_modules_of(model):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{key}" if prefix else key), buffer


def module_states(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with an extra state beside parameters and buffers, by name."""
    for name, module in named_modules_of(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield clean_name(name), module


def collect(
    model: Model,
    optimizer: Optimizer | None,
    extra: Mapping[str, object],
    generators: Mapping[str, object],
) -> Table:
    """List everything that a checkpoint of this moment holds. See Note [Saved state].

    **Raises** StateError in the middle of an accumulation window or after a load that failed,
    ConfigError for an optimizer of another model, CheckpointError for state that cannot be written,
    naming it.
    """
    engine = Parts(model)
    _check_moment(engine)
    engine.finish_pending_work("save()")
    params = [param for unit in engine.units for param in unit.params]
    found = _Tensors(engine)
    for param in params:
        found.add(param, param.sharded._local_tensor)
    row = (
        None if optimizer is None else _collect_optimizer(StageOptimizers(optimizer), params, found)
    )
    for param, key, data in outer_tensors(engine):
        found.add_outer(param, data, key)
    for name, buffer in persistent_buffers(model):
        found.uncut.append(_uncut("buffer", name, buffer))
    values, own = _own_values(model, extra, generators, engine)
    members = [rank for replica in found.meshes[0] for rank in replica]
    has_all = engine.all_ranks.num_ranks == 1 or members == list(engine.all_ranks.members)
    has_pieces = any(item.row.of for item in (*found.sharded, *found.uncut))
    return Table(
        stage=engine.first.config.stage.number,
        meshes=tuple(found.meshes),
        layouts=tuple(found.layouts),
        sharded=tuple(found.sharded),
        uncut=tuple(found.uncut),
        tied={
            found.prefix + name + suffix: found.prefix + first + suffix
            for param in params
            for first, *others in [param_names(param)]
            for suffix in plain_parts(param.sharded._local_tensor)
            for name in others
        },
        optimizer=row,
        own=own,
        values=values,
        place=None if engine.comm.axes.stages is None else engine.comm.axes.stages.rank,
        own_mesh_params=tuple(
            found.names[id(p)]
            for p in params
            if p.unit.comm.axes.mesh != engine.comm.axes.mesh and p.cut.outer is None
        ),
        is_uniform=len(found.meshes) == 1 and has_all and not has_pieces,
    )


_T = TypeVar("_T")


def names_of_params(
    known: Sequence[tuple[object, _T]], optimizer: StageOptimizers
) -> list[list[_T]]:
    """Return the value of each parameter of each of the optimizer's groups.

    ``known`` are pairs of a parameter, as the optimizer holds it, and its value.

    **Raises** ConfigError for parameters that are not in ``known``.
    """
    by_id = {id(held): what for held, what in known}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for place, held in enumerate(group["params"]):
            if id(held) not in by_id:
                is_sharded = any(isinstance(ours, DTensor) for ours, _ in known)
                model = "sharded model" if is_sharded else "model"
                raise ConfigError(
                    f"optimizer: parameter {place} of group {number} {tuple(held.shape)} is not "
                    f"one of the {model}'s; build it from the {model}'s parameters(), and keep "
                    "other parameters in an optimizer of their own (extra=)"
                )
        groups.append([by_id[id(held)] for held in group["params"]])
    return groups


def _check_moment(engine: Parts) -> None:
    if engine.suspended:
        raise StateError(
            "save() inside gathered(): leave that context first; changes come back then"
        )
    engine.check_usable("save(): ")
    engine.finish_reductions()
    partial = [u.name or "(root)" for u in engine.units if u.grads.state is GradState.PARTIAL]
    if partial or engine.is_in_window:
        where = f"unit '{partial[0]}' holds gradients of" if partial else "this is inside of"
        raise StateError(
            f"save(): {where} an accumulation window that is not over, and a checkpoint has no "
            "gradients. Save after optimizer.step() and zero_grad()"
        )


@dataclass(frozen=True)
class _Cut:
    """Where this rank's elements lie in a parameter, and in its local memory."""

    layout: int
    index: int
    lo: int
    inside: slice
    piece: Region
    is_here: bool = True  # or all of it is on another rank


class _Tensors:
    """The tensors of this rank, the layouts that cut them, and the ranks of these layouts."""

    def __init__(self, engine: Parts) -> None:
        self.sharded: list[Item] = []
        self.uncut: list[Item] = []
        self.layouts: list[LayoutRow] = []
        self.names: dict[int, str] = {}  # under which the state of each parameter is saved
        self._cuts: dict[int, _Cut] = {}  # by parameter
        self._numbers: dict[object, int] = {}
        self._ranks: dict[int, Ranks] = {}
        self._replicas_differ = engine.replicas_differ
        self.prefix = own_prefix(engine)  # of this replica's names
        self.meshes = [self._ranks_of(engine.comm)]
        for unit in engine.units:
            used = {
                id(param.storage) for param in unit.params if param.has_storage and param.dim == 0
            }
            for storage in unit.storages:
                layout = storage.layout
                shapes = tuple(layout.params[index].shape for index in layout.spread)
                if id(storage) in used and shapes:
                    kind: Literal["rows", "flat"] = "rows" if layout.kind == "rows" else "flat"
                    mesh = self._ranks_of(unit.comm)
                    self._numbers[id(storage)] = self._add_layout(kind, shapes, mesh)

    def _add_layout(
        self, kind: Literal["rows", "flat"], shapes: tuple[tuple[int, ...], ...], mesh: Ranks
    ) -> int:
        if mesh not in self.meshes:
            self.meshes.append(mesh)
        self.layouts.append(LayoutRow(kind=kind, shapes=shapes, mesh=self.meshes.index(mesh)))
        return len(self.layouts) - 1

    def add(self, param: ShardedParam, local: torch.Tensor, state: str = "") -> None:
        """Add a parameter, or a state of one: each part of it that is here."""
        first = self.prefix + param_names(param)[0]
        parts = inner_of(local, param.cut, first)
        name = self.names.setdefault(id(param), first + parts[0].suffix)
        for part in parts:
            if state:
                self._add_part(param, part, name, state + part.suffix)
            else:
                self._add_part(param, part, first + part.suffix, PARAMETER if self.prefix else "")

    def add_outer(self, param: ShardedParam, local: torch.Tensor, state: str) -> None:
        """Add a tensor of the outer step's state."""
        first = OUTER + param_names(param)[0]
        for part in inner_of(local, param.cut, first):
            self._add_part(param, part, first, state)

    def _add_part(self, param: ShardedParam, part: Inner, name: str, state: str) -> None:
        cut = self._cut_of(param, part.cut)
        if not cut.is_here:
            return
        data = part.local.detach().contiguous().reshape(-1)[cut.inside]  # as files have it
        kind: Kind = "optimizer" if state else "param"
        shape = part.cut.shape if param.has_storage else cut.piece.shape
        info = TensorInfo(kind, name, dtype_name(data.dtype, name), shape, state)
        row = _row_of(info, cut.piece, cut.layout, cut.index)
        self.sharded.append(Item(row, data, cut.lo))

    def _cut_of(self, param: ShardedParam, of: Cut) -> _Cut:
        """Return this rank's part of a parameter, or of a tensor inside it, and its layout."""
        if not param.has_storage:
            of = of if of is not param.cut else cut_by_rows(param.shape, param.cut)
            key = of.shape, id(of.comm)
            if key not in self._numbers:
                ranks = self._ranks_of(of.comm)
                self._numbers[key] = self._add_layout("rows", (of.shape,), ranks)
            return _Cut(self._numbers[key], 0, of.lo, slice(None), full_region(of.shape))
        if id(param) not in self._cuts:
            self._cuts[id(param)] = self._cut_of_storage(param, of)
        return self._cuts[id(param)]

    def _cut_of_storage(self, param: ShardedParam, cut: Cut) -> _Cut:
        storage, piece = param.storage, cut.piece
        comm, owner = param.unit.comm, storage.layout.owner(param.index)
        if param.dim == 0 and owner is None:
            held = storage.layout.piece(param.index, storage.rank)
            inside = slice(held.lo - cut.lo, held.hi - cut.lo)
            number, index = self._numbers[id(storage)], storage.layout.spread.index(param.index)
            return _Cut(number, index, held.lo, inside, piece)
        # A chunk along another dim, and a matrix that has an owner: no other rank cuts these.
        holder = comm.axes.shard.rank if owner is None else owner
        alone = tuple((replica[holder],) for replica in self._ranks_of(comm))
        number = self._add_layout("rows", (piece.shape,), alone)
        return _Cut(number, 0, 0, slice(None), piece, comm.axes.shard.rank == holder)

    def _ranks_of(self, comm: Comm) -> Ranks:
        if id(comm) not in self._ranks:
            table = comm.axes.mesh.mesh
            rows = table.reshape(-1, table.shape[-1]).tolist()
            if self._replicas_differ and comm.axes.replicate is not None:
                rows = [rows[comm.axes.replicate.rank]]
            self._ranks[id(comm)] = tuple(map(tuple, rows))
        return self._ranks[id(comm)]


def _row_of(
    info: TensorInfo, piece: Region, layout: int | None = None, index: int | None = None
) -> TensorRow:
    try:
        return TensorRow.of_piece(info, piece, layout, index)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CheckpointError(
            f"tensor {reprlib.repr(info.key)} cannot be saved: {first['msg']} as its "
            f"{'.'.join(map(str, first['loc'])) or 'row'}; it has {len(info.name)}"
        ) from None


def _uncut(kind: Kind, name: str, tensor: torch.Tensor, state: str = "") -> Item:
    info = TensorInfo(kind, name, "", tuple(tensor.shape), state)
    local, piece = local_piece(tensor, info.key)
    info = TensorInfo(kind, name, dtype_name(local.dtype, info.key), info.shape, state)
    return Item(_row_of(info, piece), local.detach().contiguous().reshape(-1))


def local_piece(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Region]:
    """Return what a rank has of a buffer, and which box of it that is."""
    if not isinstance(tensor, DTensor):
        return tensor, full_region(tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"'{name}' is a sum that is not taken yet {tensor.placements}; give it a placement of "
            "Replicate() or Shard() first"
        )
    shape, at = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), Region(tuple(at), tuple(shape))


def _collect_optimizer(
    optimizer: StageOptimizers, params: list[ShardedParam], tensors: _Tensors
) -> OptimizerRow:
    """Add the optimizer's tensors; return what else it has."""
    by_group = names_of_params([(param.sharded, param) for param in params], optimizer)
    for each in optimizer.optimizers:
        cut_plain_state(each)
    optimizer.check_settings()
    values: dict[str, dict[str, object]] = {}
    for param in (param for group in by_group for param in group):
        name = tensors.names[id(param)]
        for key, value in optimizer.saved_state(param.sharded).items():
            listed = value if isinstance(value, list | tuple) else ()
            is_cut = isinstance(value, DTensor)
            is_other = is_cut and not param.form.has_same_cut(value)
            if is_other or any(isinstance(each, DTensor) for each in listed):
                raise CheckpointError(
                    f"optimizer: {optimizer.name} keeps its state '{key}', found at '{name}', "
                    "in tensors that are not cut as that parameter is. Save with optimizer=None, "
                    "and it starts anew after a load; at stage 0 its state is saved"
                )
            if is_cut:
                tensors.add(param, value._local_tensor, key)
            elif isinstance(value, torch.Tensor):
                tensors.uncut.append(_uncut("optimizer", name, value, key))
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {**group, "params": [tensors.names[id(param)] for param in of_group]}
        for group, of_group in zip(optimizer.param_groups, by_group, strict=True)
    ]
    encoded_groups, inside = encode(groups, "groups")
    encoded_state, inside = encode(values, "state", inside)
    for place, tensor in inside.items():
        tensors.uncut.append(_uncut("optimizer", "", tensor, place))
    return OptimizerRow(class_name=optimizer.name, groups=encoded_groups, state=encoded_state)


def _own_values(
    model: Model, extra: Mapping[str, object], generators: Mapping[str, object], engine: Parts
) -> tuple[dict[str, object], tuple[Item, ...]]:
    """Return this rank's values for its index, and the tensors that they hold."""
    states = dict(extra)
    for key, value in extra.items():  # schedulers, scalers, loaders; other values as they are
        if callable(state_dict := getattr(value, "state_dict", None)):
            states[key] = state_dict()
    encoded_extra, tensors = encode(states, "extra")
    modules = {name: module.get_extra_state() for name, module in module_states(model)}
    if (steps := local_steps_of(engine)) is not None:
        modules[KEY] = facts_of(steps)
    encoded_modules, tensors = encode(modules, "modules", tensors)
    values = {"extra": encoded_extra, "modules": encoded_modules, "generators": dict(generators)}
    own = tuple(_uncut("extra", place, tensor) for place, tensor in tensors.items())
    return values, own
