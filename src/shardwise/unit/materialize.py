"""Construction of units: shards filled from live parameters or from meta, one unit at a time.

Note [Values do not depend on the number of ranks]
Live parameters are taken from rank 0 (as DistributedDataParallel does). Parameters that tensor
parallelism does not cut are taken from the first rank of its axis. So ranks with different seeds
still agree. A module on meta is initialised whole on every rank, from a generator seeded by rank
0's seed and the module's name. Each rank keeps its slices and frees the rest before the next
module, so the full model is never resident.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import prod

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import Comm, make_comm
from shardwise.comm.pending import CollectiveId
from shardwise.config import Init, ShardConfig
from shardwise.device import fork_rng_devices, seed_generators
from shardwise.errors import ConfigError
from shardwise.layout.memory import group_by_dtypes
from shardwise.layout.placements import local_of
from shardwise.layout.segments import Layout, build_layout
from shardwise.layout.units import ParamSpec, UnitSpec
from shardwise.mesh import Axis
from shardwise.stages import UnitSettings
from shardwise.tensor.cut import axes_of_mesh, cut_along, cut_piece, make_cut, own_axes_of
from shardwise.tensor.inner import (
    chunk_of,
    has_own_gather,
    holds_codes,
    plain_parts,
    refuse_opaque,
)
from shardwise.trace import FullParamLedger
from shardwise.unit.encodings import SubclassGather
from shardwise.unit.home import Home, Homes, Room
from shardwise.unit.param import ParamEngine, ShardedParam, ShardTensorForm
from shardwise.unit.storage import SecondaryShard, Storage
from shardwise.unit.sums import GradientRows, SumSettings
from shardwise.unit.unit import Gather, Unit

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with the pattern."""
    integers, pattern = _as_integers(tensor)
    integers.fill_(pattern)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has an element with the pattern, or is on meta.

    Integers of up to two bytes and floats of one may have any value, so all must have the pattern.
    """
    if tensor.is_meta or not tensor.numel():
        return tensor.is_meta
    integers, pattern = _as_integers(tensor)
    found = integers == pattern
    is_float, size = tensor.is_floating_point(), integers.element_size()
    is_exact = tensor.dtype == torch.bool or size > (1 if is_float else 2)
    return bool(found.any() if is_exact else found.all())


def _as_integers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bits, and the pattern: a NaN that no operation gives, or an unlikely integer."""
    bits = tensor.detach()
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    size, is_float = bits.element_size(), bits.is_floating_point()
    pattern = -1 if is_float else int.from_bytes(b"\xa7" * size, signed=True)
    return bits.view(_INTEGERS[size]), pattern


Dtypes = tuple[torch.dtype, torch.dtype]


def leave_values(module: nn.Module) -> None:
    """Leave memory unwritten and unchecked; for ``init=`` if the caller writes it afterwards."""


class Materializer:
    """Builds units with filled shards from unit specifications."""

    def __init__(
        self,
        config: ShardConfig,
        comm: Comm,
        ledger: FullParamLedger,
        engine: ParamEngine,
        init: Init | None,
        specs: Sequence[UnitSpec],
        homes: Homes | None = None,
        secondary_axis: Axis | None = None,
    ) -> None:
        self._secondary_axis = secondary_axis
        self._config = config
        self._comm = comm
        self._device = comm.device
        self._ledger = ledger
        self._engine = engine
        self._init = init
        self._homes = homes
        self._first_away = first_away(specs, config)
        self._comms = {comm.axes.mesh: comm}
        self._own_axes = own_axes_of(param.param for spec in specs for param in spec.params)
        self._seed = 0
        self.unwritten: list[str] | None = None  # names of tensors from meta; None if not on meta

    def reserve(self, specs: Sequence[UnitSpec]) -> None:
        """Reserve the host memory and file space for slices and reduced gradients.

        Nothing is sent. **Raises** StorageError, with nothing changed, if they are not available.
        """
        rooms = []
        for spec in specs[self._first_away :]:
            for (master, _), params in self._groups(spec.params):
                axis = (spec.axes or self._comm.axes).shard
                layout, _ = self._layout_of(params, axis)
                sharded = self._config.stage.shards_state
                numel = layout.shard_numel(axis.rank) if sharded else layout.full_numel
                trains = any(param.param.requires_grad for param in params)
                rooms.append(Room(spec.name, numel, master, trains))
        if self._homes is not None:
            self._homes.reserve(rooms, self._comm.time)

    def take_seed(self, seed: int) -> None:
        """Take the data-parallel ranks' seed; share the first's over the meshes of DTensors."""
        self._seed = seed
        if self._own_axes:
            value = torch.tensor([seed], device=self._device)
            self._comm.broadcast(value, CollectiveId("broadcast", "(seed)", 0), also=self._own_axes)
            self._seed = int(value.item())

    def check(self, specs: Sequence[UnitSpec]) -> None:
        """Refuse specifications that cannot be built, before any change."""
        for spec in specs:
            for param in spec.params:
                refuse_opaque(local_of(param.param), param.name)
                if has_own_gather(local_of(param.param)):
                    self._check_own_gather(param)
                if param.param.is_meta:
                    use = param.uses[0]
                    self._reset_of(use.module, use.name.rpartition(".")[0])

    def _check_own_gather(self, spec: ParamSpec) -> None:
        config, kind = self._config, type(local_of(spec.param)).__name__
        reason = None
        if not config.stage.shards_state:
            reason = f"nothing is gathered at stage {config.stage.number}; use stage 1, 2 or 3"
        elif config.state_offload is not None:
            reason = "offload= takes plain parameters alone; leave it out"
        elif spec.dim or isinstance(spec.param, DTensor):
            reason = "it can be cut along dim 0 alone, by data parallelism alone"
        elif spec.param.is_meta or not spec.param.shape:
            reason = "it needs values, and a dim to be cut along"
        elif not all(part.is_contiguous() for part in plain_parts(spec.param).values()):
            reason = "what it is made of is not contiguous; call .contiguous() on it first"
        if reason is not None:
            raise ConfigError(
                f"parameter '{spec.name}' is a {kind}, which defines its own gather: {reason}"
            )

    @torch.no_grad()
    def build(self, spec: UnitSpec, index: int) -> Unit:
        """Build one unit and replace its parameters in the modules by ShardTensors.

        **Cost** the unit's full parameters once, freed on return; a broadcast of each.
        """
        config, comm = self._config, self._comm_of(spec)
        home: Home | None = None
        if self._homes is not None and index >= self._first_away:
            home = self._homes.home_of(spec.name, self._device, comm.time, comm.tracer)
        # A pipeline stage runs many micro-batches; the first one gathers for all of them.
        frees = config.stage.frees_after_forward and self._comm.axes.stages is None
        settings = UnitSettings(
            replace(config.stage, reduce_every=config.reduce_every, frees_after_forward=frees),
            optional=spec.optional,
            reads_in_backward=type(spec.module).forward is not nn.Embedding.forward,
        )
        secondary: SecondaryShard | None = None
        if self._secondary_axis is not None and comm is self._comm:
            secondary = SecondaryShard(self._secondary_axis)
        unit = Unit(
            spec.name,
            index,
            [spec.module],
            comm,
            self._engine,
            settings,
            config.precision,
            # Experts on a separate mesh get the gradients of all batches from their layers.
            SumSettings(self._comm.axes.num_ranks),
            Gather(secondary=secondary),
            home,
        )
        values = self._initialised(spec)
        own = [param for param in spec.params if has_own_gather(param.param)]
        stored = [param for param in spec.params if not any(param is each for each in own)]
        storages = [self._build_storage(unit, *group, values) for group in self._groups(stored)]
        by_dtype: dict[torch.dtype, list[ParamSpec]] = {}
        for param in own:
            by_dtype.setdefault(param.param.dtype, []).append(param)
        unit.grads.gradient_rows = [self._build_apart(unit, params) for params in by_dtype.values()]
        unit.set_storages(storages)
        return unit

    def _groups(self, stored: Sequence[ParamSpec]) -> Iterator[tuple[Dtypes, list[ParamSpec]]]:
        """Yield the parameters of each storage.

        Those cut along dims above 0 have separate ones, and so have codes, which are never cast.
        """
        precision, sharded = self._config.precision, self._config.stage.shards_state
        for along_dim, are_codes in product((False, True), repeat=2):
            params = [
                spec
                for spec in stored
                if (spec.dim > 0 and sharded) is along_dim and holds_codes(spec.param) is are_codes
            ]
            tensors = [spec.param for spec in params]
            facts = [
                (t.dtype, t.dtype.is_floating_point and not are_codes, t.requires_grad)
                for t in tensors
            ]
            found = group_by_dtypes(params, facts, precision.master, precision.param)
            yield from ((dtypes, members) for (dtypes, _), members in found.items())

    def _build_apart(self, unit: Unit, params: list[ParamSpec]) -> GradientRows:
        """Add to a unit parameters of one dtype that define their gather, cut by rows."""
        axis, device, precision = unit.comm.axes.shard, self._comm.device, unit.precision
        shapes = [tuple(spec.param.shape) for spec in params]
        layout = build_layout("rows", shapes, axis.size)
        policy = MixedPrecisionPolicy(
            precision.param, precision.reduce_dtype, cast_forward_inputs=precision.cast_inputs
        )
        made = []
        for number, (spec, shape) in enumerate(zip(params, shapes, strict=True)):
            value = spec.param.detach()
            collective = CollectiveId("broadcast", spec.name, unit.index)
            also = self._copied_over(spec.param, unit.comm)
            for part in plain_parts(value).values():
                unit.comm.broadcast(part, collective, also=also)
            cut = make_cut(shape, layout, number, unit.comm, spec.name)
            form = ShardTensorForm(cut, spec.param.requires_grad)
            param = ShardedParam(unit, spec.uses, form, shape, cut=cut)
            form.make_sharded(param, chunk_of(value, axis.size, axis.rank).to(device))
            frees = self._config.stage.frees_after_backward
            param.detach_storage(SubclassGather(policy, axis.size, frees=frees))
            param.index = number
            param.gradient.hooks.adopt(spec.param)
            unit.add(param)
            made.append(param)
        dtype = params[0].param.dtype
        return GradientRows(layout, axis.rank, tuple(made), dtype, precision.param or dtype, device)

    def _build_storage(
        self, unit: Unit, dtypes: Dtypes, params: list[ParamSpec], values: dict[str, torch.Tensor]
    ) -> Storage:
        """Build one storage of a unit, fill it, and add its parameters to the unit."""
        stage, comm, axis = unit.settings.stage, unit.comm, unit.comm.axes.shard
        layout, dims = self._layout_of(params, axis)
        storage = Storage(
            layout,
            axis.rank,
            stage,
            dtypes,
            self._device,
            self._ledger,
            home=unit.home,
            coding=None if holds_codes(params[0].param) else unit.precision.coding,
        )
        if any(param.param.requires_grad for param in params):
            storage.mean_memory.reserve()
        for number, (param, dim) in enumerate(zip(params, dims, strict=True)):
            shape = tuple(local_of(param.param).shape)
            cut_layout = layout if stage.shards_state else None
            cut = cut_along(shape, cut_layout, number, comm, dim, param.name)
            if isinstance(param.param, DTensor):
                cut = cut_piece(cut, param.param._spec)
            if param.name in values:
                value = cut.piece_of(values.pop(param.name))
            else:
                value = local_of(param.param).detach().contiguous()
                collective = CollectiveId("broadcast", param.name, unit.index)
                comm.broadcast(value, collective, also=self._copied_over(param.param, comm))
            form = ShardTensorForm(cut, param.param.requires_grad)
            made = ShardedParam(unit, param.uses, form, shape, cut=cut, dim=dim)
            made.holds_codes = holds_codes(param.param)
            made.attach_storage(storage, number)
            storage.fill(number, made.encoding.order_by_rank(value))
            made.copy_attributes(vars(param.param))
            made.gradient.hooks.adopt(param.param)
            unit.add(made)
        storage.free()
        return storage

    def _layout_of(self, params: Sequence[ParamSpec], axis: Axis) -> tuple[Layout, list[int]]:
        """Return the layout of one storage's parameters, and the dim that each is cut along."""
        shapes = [tuple(local_of(p.param).shape) for p in params]
        dims = [p.dim if self._config.stage.shards_state else 0 for p in params]
        lying = [
            (axis.size, prod(shape) // axis.size) if dim else shape
            for shape, dim in zip(shapes, dims, strict=True)
        ]
        owners = [param.owner for param in params]
        return build_layout(self._config.layout, lying, axis.size, owners), dims

    def _copied_over(self, tensor: torch.Tensor, comm: Comm) -> Sequence[Axis]:
        """Return the axes of tensor parallelism whose ranks have copies of a tensor.

        A plain tensor of a unit on a separate mesh may differ between such meshes.
        """
        if not isinstance(tensor, DTensor):
            return self._own_axes if comm is self._comm else ()
        placed = zip(axes_of_mesh(tensor.device_mesh), tensor.placements, strict=True)
        return [axis for axis, placement in placed if placement.is_replicate()]

    def _comm_of(self, spec: UnitSpec) -> Comm:
        """Return the collectives over a unit's mesh; its ranks build its units in one order."""
        if spec.axes is None:
            return self._comm
        if spec.axes.mesh not in self._comms:
            self._comms[spec.axes.mesh] = make_comm(spec.axes, self._device)
        return self._comms[spec.axes.mesh]

    def _initialised(self, spec: UnitSpec) -> dict[str, torch.Tensor]:
        """Return the initial values of the unit's parameters on meta, by name."""
        values: dict[str, torch.Tensor] = {}
        by_module: dict[int, list[ParamSpec]] = {}
        for param in spec.params:
            if param.param.is_meta:
                by_module.setdefault(id(param.uses[0].module), []).append(param)
        for params in by_module.values():
            use = params[0].uses[0]
            names = {param.uses[0].attribute: param.name for param in params}
            found = self._fill(use.module, use.name.rpartition(".")[0], self._seed_of(spec), names)
            values |= {names[attribute]: value for attribute, value in found.items()}
        return values

    def _seed_of(self, spec: UnitSpec) -> str:
        """Return a seed suffix that separates a unit's values from a namesake's on other ranks.

        A unit on a separate mesh may hold different experts on every such mesh. DTensors are
        pieces of one tensor, so all ranks draw the same values and need no suffix.
        """
        if spec.axes is None or any(isinstance(p.param, DTensor) for p in spec.params):
            return ""
        first, main = (int(axes.mesh.mesh.min()) for axes in (spec.axes, self._comm.axes))
        return f"@{first}" if first != main else ""

    def _fill(
        self, module: nn.Module, name: str, apart: str = "", wanted: Iterable[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Initialise a module; return its ``wanted`` parameters, whole.

        Its buffers on meta keep their new memory. All of its parameters get temporary memory,
        because a live or sharded one (such as a tied one) must not be initialised again. Tensors
        left unwritten are recorded in ``unwritten``.
        """
        before = dict(module._parameters)
        for key, param in before.items():
            if param is not None:
                real = self._unwritten_like(param)
                module._parameters[key] = nn.Parameter(real, requires_grad=param.requires_grad)
        on_meta = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
        module._buffers.update((key, self._unwritten_like(b)) for key, b in on_meta.items())
        try:
            with self._seeded(name + apart):
                self._reset_of(module, name)(module)
            values = {key: module._parameters[key].detach() for key in wanted}  # type: ignore[union-attr]
        finally:
            module._parameters.update(before)
        if self._init is leave_values:
            return values
        made = [*values.items(), *((key, module._buffers.get(key)) for key in on_meta)]
        left = [key for key, value in made if value is not None and is_unwritten(local_of(value))]
        self.unwritten = [*(self.unwritten or ()), *(f"{name}.{key}".lstrip(".") for key in left)]
        return values

    def _unwritten_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor on meta; `is_unwritten` detects its unwritten elements."""
        made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self._device)
        if self._init is not leave_values:
            poison(made)
        return made

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(fork_rng_devices(self._device)):
            seed_generators(self._device, int.from_bytes(digest))
            yield

    def _reset_of(self, module: nn.Module, name: str) -> Init:
        reset = self._init or getattr(type(module), "reset_parameters", None)
        if reset is None:
            place = f"'{name or '(root)'}' ({type(module).__name__})"
            raise ConfigError(
                f"model: {place} is on the meta device and has no reset_parameters(); "
                "give shard(units=Units(init=...)), a function that initialises one module"
            )
        found: Init = reset
        return found

    def fill_buffers(self, model: nn.Module) -> None:
        """Initialise modules that have only meta buffers; broadcast live buffers from rank 0."""
        for name, module in model.named_modules():
            buffers = {k: b for k, b in module._buffers.items() if b is not None}
            if any(b.is_meta for b in buffers.values()):
                self._fill(module, name)
                continue
            for key, buffer in buffers.items():
                collective = CollectiveId("broadcast", f"{name}.{key}".lstrip("."), 0)
                also = self._copied_over(buffer, self._comm)
                self._comm.broadcast(local_of(buffer), collective, also=also)


def first_away(specs: Sequence[UnitSpec], config: ShardConfig) -> int:
    """Return the number of first units that stay on the device: all without offload."""
    if config.state_offload is None:
        return len(specs)
    return config.state_offload.num_staying([sum(p.param.numel() for p in s.params) for s in specs])
