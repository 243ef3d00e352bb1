"""Description of a sharded model: its units as a tree, their bytes and cuts; the facts of a run."""

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardwise import __version__
from shardwise.device import memory_figures, name_of
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError
from shardwise.layout.boxes import Region
from shardwise.monitor.lines import MAX_NAME
from shardwise.monitor.record import RunFacts
from shardwise.parallel.parts import Parts, modules_of
from shardwise.plan.machine.hardware import find_accelerator
from shardwise.quantities import format_bytes, format_count
from shardwise.tensor.inner import inner_of
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.replaced import params_of
from shardwise.unit.param import ShardedParam
from shardwise.unit.unit import Unit
from shardwise.unit_facts import UnitFacts

_PADDING_TO_MENTION = 0.03
_NDIM_OF_STACKS = 3  # of parameters that hold all experts along the first dim
_FLOPS_OF_TRAINED, _FLOPS_OF_FROZEN = 6.0, 4.0  # for each weight and token, forward and backward


@dataclass(frozen=True)
class ParamDescription:
    """One parameter: the axes that cut it, and the place of this rank's elements.

    ``cuts`` are pairs of an axis and the dim that it cuts, outermost first; dim -1 means flat
    elements (layout "flat"). This rank has elements [``lo``, ``hi``) of the box of ``piece_shape``
    that begins ``at``. ``owner`` is the rank of the shard axis that has the whole parameter (layout
    "matrices"), or None if it is cut.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...]
    at: tuple[int, ...]
    piece_shape: tuple[int, ...]
    lo: int
    hi: int
    owner: int | None = None

    def __str__(self) -> str:
        """Format the parameter as one line."""
        if self.owner is not None:
            here = "" if self.hi > self.lo else ", so not here"
            return f"{self.name} {list(self.shape)}: whole on shard rank {self.owner}{here}"
        cuts = ", ".join(
            f"{'elements' if dim < 0 else f'dim {dim}'} over {axis}" for axis, dim in self.cuts
        )
        ends = tuple(a + n for a, n in zip(self.at, self.piece_shape, strict=True))
        box = ", ".join(f"{a}:{b}" for a, b in zip(self.at, ends, strict=True))
        part = "" if self.hi - self.lo == prod(self.piece_shape) else f"{self.lo} to {self.hi} of "
        what = f"here elements {part}[{box}]" if part else f"here [{box}]"
        return f"{self.name} {list(self.shape)}: {cuts or 'not cut'}; {what}"


@dataclass(frozen=True)
class UnitDescription(UnitFacts):
    """One unit: its facts, its parameters, and the encodings of its collectives.

    ``gather`` is the encoding of gathered parameters and ``reduce`` that of sent gradients. Each is
    "" if values are sent in the dtype of computation.
    """

    params: tuple[ParamDescription, ...] = ()
    gather: str = ""
    reduce: str = ""


@dataclass(frozen=True)
class Description:
    """A sharded model: its stage, its ranks, its units."""

    stage: int
    num_shards: int
    num_replicas: int
    units: tuple[UnitDescription, ...]
    activation_bytes: int | None = None  # on the host; None if activations stay on the device

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters in the master dtype."""
        return sum(u.full_bytes for u in self.units)

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's slices of all parameters, padding included."""
        return sum(u.rank_bytes for u in self.units)

    def __str__(self) -> str:
        """Format the units as a tree."""
        replicas = f" x {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        lines = [
            f"stage {self.stage} over {self.num_shards} ranks{replicas}: "
            f"{format_count(sum(u.numel for u in self.units))} parameters, "
            f"{format_bytes(self.full_bytes)} full, {format_bytes(self.rank_bytes)} per rank"
        ]
        root, *others = self.units
        names = {u.name for u in others}
        lines.append(self._line(root, "", root.class_name))
        for number, unit in enumerate(others):
            depth = sum(unit.name.startswith(f"{n}.") for n in names)
            branch = "└─ " if number == len(others) - 1 else "├─ "
            lines.append(self._line(unit, "│  " * depth + branch, unit.name))
        lines += [
            f"'{unit.name or '(root)'}': rows that do not divide by {self.num_shards} cost "
            f'{unit.padding_share:.1%} padding; layout="flat" would cost none'
            for unit in self.units
            if unit.layout == "rows" and unit.padding_share > _PADDING_TO_MENTION
        ]
        if self.activation_bytes is not None:
            held = format_bytes(self.activation_bytes)
            lines.append(f"inputs of checkpointed blocks: {held} of host memory so far")
        return "\n".join(lines)

    def _line(self, unit: UnitDescription, branch: str, label: str) -> str:
        padding = f"{format_bytes(unit.padding_bytes)} ({unit.padding_share:.1%})"
        rests = f"; {unit.home}" if unit.home else ""
        gathered = f"; gathered as {unit.gather}" if unit.gather else ""
        sent = f"; gradients sent as {unit.reduce}" if unit.reduce else ""
        return (
            f"{branch}{label} [{unit.class_name}]  {unit.num_params} parameters, "
            f"{format_count(unit.numel)} elements, {unit.dtype}, {unit.layout}: "
            f"{format_bytes(unit.full_bytes)} full, {format_bytes(unit.rank_bytes)} per rank, "
            f"padding {padding}, stage {self.stage}{rests}{gathered}{sent}"
        )


def describe(model: nn.Module) -> Description:
    """Describe a sharded model's units; ``print`` the result for a tree.

    ``units[i].params`` describe each parameter's cut and this rank's elements.
    """
    engine = engine_of(model)
    axes = engine.comm.axes
    return Description(
        engine.config.stage.number,
        axes.shard.size,
        axes.replicate.size if axes.replicate else 1,
        tuple(_describe_unit(u) for u in engine.units),
        None if engine.activations is None else engine.activations.host_bytes,
    )


def _describe_unit(unit: Unit) -> UnitDescription:
    full = padding = numel = rank_bytes = 0
    names = set()
    for storage in unit.storages:
        size = storage.master.element_size()
        numel += storage.layout.numel
        full += storage.layout.numel * size
        padding += (storage.layout.full_numel - storage.layout.numel) * size
        rank_bytes += storage.memory.shard_bytes
        dtypes = storage.master.dtype, storage.full.dtype
        master, compute = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        names.add(master if master == compute else f"{master} (computes in {compute})")
    for param in (param for param in unit.params if not param.encoding.is_in_storage):
        numel += prod(param.shape)
        local = param.sharded._local_tensor
        for part in inner_of(local, param.cut, param.name):
            full += prod(part.cut.shape) * part.local.element_size()
            rank_bytes += part.local.nbytes
        names.add(type(local).__name__)
    coding, gather = next((s.coding for s in unit.storages if s.coding is not None), None), ""
    if coding is not None:
        gathers = (storage.memory.gather_bytes for storage in unit.storages)
        sent, whole = map(sum, zip(*gathers, strict=True))
        gather = f"{coding}" + (f": {sent / whole:.3f} x the bytes" if whole else "")
    return UnitDescription(
        name=unit.name,
        class_name=type(unit.module).__name__,
        num_params=len(unit.params),
        numel=numel,
        full_bytes=full,
        rank_bytes=rank_bytes,
        padding_bytes=padding,
        dtype=", ".join(sorted(names)) or "-",
        layout=unit.storages[0].layout.kind if unit.storages else "-",
        params=tuple(_describe_param(param) for param in unit.params),
        home=str(unit.home or ""),
        gather=gather,
        reduce=str(unit.precision.reduce_coding or ""),
        num_modules=len({use.module for param in unit.params for use in param.uses}),
    )


def _describe_param(param: ShardedParam) -> ParamDescription:
    cut, axes = param.cut, param.unit.comm.axes
    piece: Region = cut.piece
    placed = () if cut.outer is None else zip(cut.outer_axes, cut.outer.placements, strict=True)
    cuts = [(axis.name, at.dim) for axis, at in placed if isinstance(at, Shard)]
    lo, hi = cut.lo, cut.hi
    owner = cut.owner if axes.shard.size > 1 else None
    if cut.layout is not None and axes.shard.size > 1 and owner is None:
        is_flat = cut.layout.kind != "rows" and param.dim == 0
        names = axes.mesh.mesh_dim_names or ("replicate", "shard")
        cuts.append((names[-1], -1 if is_flat else param.dim))
    if param.dim > 0:  # the box holds this rank's elements only
        lo, hi = 0, prod(piece.shape)
    elif piece.shape and (row := prod(piece.shape[1:])) and not (lo % row or hi % row):
        begin, end = lo // row, hi // row
        piece = Region((piece.at[0] + begin, *piece.at[1:]), (end - begin, *piece.shape[1:]))
        lo, hi = 0, prod(piece.shape)
    return ParamDescription(
        param.name, cut.shape, tuple(cuts), piece.at, piece.shape, lo, hi, owner
    )


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
    axes += [axis for u in parts.units for p in u.params for axis in p.cut.outer_axes]
    axes += [stages for each in parts.comms if (stages := each.axes.stages) is not None]
    held = [param for each in optimizers for param in params_of(each)]
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
        reduces_units_alone=any(unit.settings.full_between_calls for unit in parts.units),
    )


def _experts_of_a_token(modules: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Return the modules of stacked experts, with the number of experts of a token.

    The number is the ``top_k`` of their parent or of a router beside them, as in our modules and
    most of transformers.
    """
    found = {}
    for parent in (inner for each in modules for inner in each.modules()):
        counts = {_top_k(each) for each in (parent, *parent.children())} - {None}
        for child in parent.children() if len(counts) == 1 else ():
            if any(p is not None and p.ndim == _NDIM_OF_STACKS for p in child._parameters.values()):
                found[child] = max(k for k in counts if k is not None)
    return found


def _top_k(module: nn.Module) -> int | None:
    top_k = getattr(module, "top_k", getattr(getattr(module, "routing", None), "top_k", None))
    return top_k if isinstance(top_k, int) and top_k > 0 else None


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
