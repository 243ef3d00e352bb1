"""Construction of units: shards filled from live parameters or from meta, one unit at a time.

Note [Values do not depend on the number of ranks]
Live parameters are broadcast from rank 0 (as DistributedDataParallel does). Parameters that tensor
parallelism does not cut are broadcast from the first rank of its axis. So ranks with different
seeds get equal parameters. Every rank initialises a whole module on meta, from a generator seeded
by rank 0's seed and the module's name. Each rank keeps its slices and frees the rest before the
next module, so the full model is never resident.

Note [Detecting unwritten elements]
Memory for tensors on meta is first filled with a pattern that no initialisation writes: a NaN with
all bits set, or an unlikely integer. Elements with the pattern afterwards were left unwritten.
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
from shardwise.tensor.cut import axes_of_mesh, cut_along, cut_piece, dtensor_axes_of, make_cut
from shardwise.tensor.inner import (
    chunk_of,
    has_own_gather,
    holds_codes,
    plain_parts,
    refuse_opaque,
)
from shardwise.trace import FullParamLedger
from shardwise.unit.encodings import SubclassGather
from shardwise.unit.home import Home, Homes, MemoryNeed
from shardwise.unit.param import ParamEngine, ShardedParam, ShardTensorForm
from shardwise.unit.storage import SecondaryShard, Storage
from shardwise.unit.sums import GradientRows, SumSettings
from shardwise.unit.unit import Gather, Unit

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with the pattern of Note [Detecting unwritten elements]."""
    integers, pattern = _as_integers(tensor)
    integers.fill_(pattern)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has elements with the pattern, or is on meta.

    Integers of up to two bytes and floats of one byte may have the pattern by chance, so they count
    as unwritten only if all elements have it.
    """
    if tensor.is_meta or not tensor.numel():
        return tensor.is_meta
    integers, pattern = _as_integers(tensor)
    has_pattern = integers == pattern
    max_ambiguous_size = 1 if tensor.is_floating_point() else 2
    is_exact = tensor.dtype == torch.bool or integers.element_size() > max_ambiguous_size
    return bool(has_pattern.any() if is_exact else has_pattern.all())


def _as_integers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the tensor's bits as integers, and the pattern as such an integer."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    size = values.element_size()
    pattern = -1 if values.is_floating_point() else int.from_bytes(b"\xa7" * size, signed=True)
    return values.view(_INTEGERS[size]), pattern


Dtypes = tuple[torch.dtype, torch.dtype]  # of a storage: master, computing


def leave_unwritten(module: nn.Module) -> None:
    """Do nothing. As ``init=`` it also switches the check for unwritten elements off.

    It is for callers that write the values afterwards, such as loaders of checkpoints.
    """


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
        self._num_on_device = num_units_on_device(specs, config)
        self._comms = {comm.axes.mesh: comm}
        self._dtensor_axes = dtensor_axes_of(param.param for spec in specs for param in spec.params)
        self._seed = 0
        self.unwritten: list[str] | None = None  # names of tensors from meta; None if not on meta

    def reserve(self, specs: Sequence[UnitSpec]) -> None:
        """Reserve the host memory and file space for slices and reduced gradients.

        Nothing is sent. **Raises** StorageError, with nothing changed, if they are not available.
        """
        needs: list[MemoryNeed] = []
        for spec in specs[self._num_on_device :]:
            for (master, _), params in self._groups(spec.params):
                axis = (spec.axes or self._comm.axes).shard
                layout, _ = self._layout_of(params, axis)
                if self._config.stage.shards_state:
                    numel = layout.shard_numel(axis.rank)
                else:
                    numel = layout.full_numel
                trains = any(param.param.requires_grad for param in params)
                needs.append(MemoryNeed(spec.name, numel, master, trains))
        if self._homes is not None:
            self._homes.reserve(needs, self._comm.time)

    def take_seed(self, seed: int) -> None:
        """Set the seed; if the model has DTensors, broadcast the first rank's over their axes."""
        self._seed = seed
        if self._dtensor_axes:
            value = torch.tensor([seed], device=self._device)
            self._comm.broadcast(
                value, CollectiveId("broadcast", "(seed)", 0), also=self._dtensor_axes
            )
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
        """Refuse a tensor subclass whose own gather does not work with the settings."""
        config = self._config
        kind = type(local_of(spec.param)).__name__
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
        config = self._config
        comm = self._comm_of(spec)
        home: Home | None = None
        if self._homes is not None and index >= self._num_on_device:
            home = self._homes.home_of(spec.name, self._device, comm.time, comm.tracer)
        # A pipeline stage runs many micro-batches. They share one gather, so forward frees nothing.
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
            # Also for experts on a smaller mesh: their layers receive tokens of all these ranks.
            SumSettings(self._comm.axes.num_ranks),
            gather=Gather(secondary=secondary),
            home=home,
        )
        values = self._initial_values(spec)
        stored: list[ParamSpec] = []
        subclasses: dict[torch.dtype, list[ParamSpec]] = {}  # by dtype
        for param in spec.params:
            if has_own_gather(param.param):
                subclasses.setdefault(param.param.dtype, []).append(param)
            else:
                stored.append(param)
        storages = [
            self._build_storage(unit, dtypes, params, values)
            for dtypes, params in self._groups(stored)
        ]
        unit.grads.gradient_rows = [
            self._build_subclasses(unit, params) for params in subclasses.values()
        ]
        unit.set_storages(storages)
        return unit

    def _groups(self, stored: Sequence[ParamSpec]) -> Iterator[tuple[Dtypes, list[ParamSpec]]]:
        """Yield the dtypes and the parameters of each storage.

        Parameters that are cut along dims above 0 have separate storages. So have quantized codes,
        which are never cast.
        """
        precision = self._config.precision
        shards_state = self._config.stage.shards_state
        for along_dim, are_codes in product((False, True), repeat=2):
            params = [
                spec
                for spec in stored
                if (spec.dim > 0 and shards_state) is along_dim
                and holds_codes(spec.param) is are_codes
            ]
            facts = [
                (
                    spec.param.dtype,
                    spec.param.dtype.is_floating_point and not are_codes,
                    spec.param.requires_grad,
                )
                for spec in params
            ]
            groups = group_by_dtypes(params, facts, precision.master, precision.param)
            for (dtypes, _), members in groups.items():
                yield dtypes, members

    def _build_subclasses(self, unit: Unit, params: list[ParamSpec]) -> GradientRows:
        """Add tensor subclasses of one dtype that define their gather to a unit, cut by rows."""
        axis = unit.comm.axes.shard
        device = self._comm.device
        precision = unit.precision
        shapes = [tuple(spec.param.shape) for spec in params]
        layout = build_layout("rows", shapes, axis.size)
        policy = MixedPrecisionPolicy(
            precision.param, precision.reduce_dtype, cast_forward_inputs=precision.cast_inputs
        )
        built: list[ShardedParam] = []
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
            built.append(param)
        dtype = params[0].param.dtype
        return GradientRows(
            layout,
            axis.rank,
            tuple(built),
            master_dtype=dtype,
            compute_dtype=precision.param or dtype,
            device=device,
        )

    def _build_storage(
        self, unit: Unit, dtypes: Dtypes, params: list[ParamSpec], values: dict[str, torch.Tensor]
    ) -> Storage:
        """Build one storage of a unit, fill it, and add its parameters to the unit."""
        stage = unit.settings.stage
        comm = unit.comm
        axis = comm.axes.shard
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
        for number, (spec, dim) in enumerate(zip(params, dims, strict=True)):
            shape = tuple(local_of(spec.param).shape)
            cut_layout = layout if stage.shards_state else None
            cut = cut_along(shape, cut_layout, number, comm, dim, spec.name)
            if isinstance(spec.param, DTensor):
                cut = cut_piece(cut, spec.param._spec)
            if spec.name in values:
                value = cut.piece_of(values.pop(spec.name))
            else:
                value = local_of(spec.param).detach().contiguous()
                collective = CollectiveId("broadcast", spec.name, unit.index)
                comm.broadcast(value, collective, also=self._copied_over(spec.param, comm))
            form = ShardTensorForm(cut, spec.param.requires_grad)
            param = ShardedParam(unit, spec.uses, form, shape, cut=cut, dim=dim)
            param.holds_codes = holds_codes(spec.param)
            param.attach_storage(storage, number)
            storage.fill(number, param.encoding.order_by_rank(value))
            param.copy_attributes(vars(spec.param))
            param.gradient.hooks.adopt(spec.param)
            unit.add(param)
        storage.free()
        return storage

    def _layout_of(self, params: Sequence[ParamSpec], axis: Axis) -> tuple[Layout, list[int]]:
        """Return the layout of one storage's parameters, and the dim along which each is cut.

        A parameter that is cut along another dim than 0 is laid out as one row per rank.
        """
        shapes = [tuple(local_of(p.param).shape) for p in params]
        dims = [p.dim if self._config.stage.shards_state else 0 for p in params]
        shapes_in_memory = [
            (axis.size, prod(shape) // axis.size) if dim else shape
            for shape, dim in zip(shapes, dims, strict=True)
        ]
        owners = [param.owner for param in params]
        return build_layout(self._config.layout, shapes_in_memory, axis.size, owners), dims

    def _copied_over(self, tensor: torch.Tensor, comm: Comm) -> Sequence[Axis]:
        """Return the axes of tensor parallelism whose ranks have copies of a tensor.

        A plain tensor of a unit on a separate mesh may differ between such meshes.
        """
        if not isinstance(tensor, DTensor):
            return self._dtensor_axes if comm is self._comm else ()
        placed = zip(axes_of_mesh(tensor.device_mesh), tensor.placements, strict=True)
        return [axis for axis, placement in placed if placement.is_replicate()]

    def _comm_of(self, spec: UnitSpec) -> Comm:
        """Return the collectives over a unit's mesh; units on an equal mesh share them.

        Making them is a collective. All ranks of the mesh build its units in the same order.
        """
        if spec.axes is None:
            return self._comm
        if spec.axes.mesh not in self._comms:
            self._comms[spec.axes.mesh] = make_comm(spec.axes, self._device)
        return self._comms[spec.axes.mesh]

    def _initial_values(self, spec: UnitSpec) -> dict[str, torch.Tensor]:
        """Return the initial values of the unit's parameters on meta, by name."""
        values: dict[str, torch.Tensor] = {}
        by_module: dict[int, list[ParamSpec]] = {}
        for param in spec.params:
            if param.param.is_meta:
                by_module.setdefault(id(param.uses[0].module), []).append(param)
        for params in by_module.values():
            use = params[0].uses[0]
            names = {param.uses[0].attribute: param.name for param in params}
            module_name = use.name.rpartition(".")[0]
            filled = self._fill(use.module, module_name, self._seed_suffix(spec), names)
            values |= {names[attribute]: value for attribute, value in filled.items()}
        return values

    def _seed_suffix(self, spec: UnitSpec) -> str:
        """Return a suffix for the seed, so that units of one name on other ranks differ.

        Units on separate meshes may hold different experts under the same name. DTensors are pieces
        of one tensor, so all ranks must draw the same values and the suffix is empty.
        """
        if spec.axes is None or any(isinstance(p.param, DTensor) for p in spec.params):
            return ""
        first, main = (int(axes.mesh.mesh.min()) for axes in (spec.axes, self._comm.axes))
        return f"@{first}" if first != main else ""

    def _fill(
        self,
        module: nn.Module,
        name: str,
        seed_suffix: str = "",
        attributes: Iterable[str] = (),
    ) -> dict[str, torch.Tensor]:
        """Initialise a module; return the full values of the parameters ``attributes``.

        Its buffers on meta keep their new memory. All of its parameters get temporary memory,
        because a live or sharded one (such as a tied one) must not be initialised again. Tensors
        left unwritten are recorded in ``unwritten``.
        """
        before = dict(module._parameters)
        for key, param in before.items():
            if param is not None:
                memory = self._unwritten_like(param)
                module._parameters[key] = nn.Parameter(memory, requires_grad=param.requires_grad)
        on_meta = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
        module._buffers.update((key, self._unwritten_like(b)) for key, b in on_meta.items())
        try:
            with self._seeded(name + seed_suffix):
                self._reset_of(module, name)(module)
            values = {key: module._parameters[key].detach() for key in attributes}  # type: ignore[union-attr]
        finally:
            module._parameters.update(before)
        if self._init is leave_unwritten:
            return values
        self.unwritten = self.unwritten or []
        buffers = {key: module._buffers.get(key) for key in on_meta}
        for key, value in (*values.items(), *buffers.items()):
            if value is not None and is_unwritten(local_of(value)):
                self.unwritten.append(f"{name}.{key}".lstrip("."))
        return values

    def _unwritten_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory like a tensor's; `is_unwritten` detects its unwritten elements."""
        memory = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self._device)
        if self._init is not leave_unwritten:
            poison(memory)
        return memory

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        """Seed the generators by the seed and a module's name; restore them afterwards."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(fork_rng_devices(self._device)):
            seed_generators(self._device, int.from_bytes(digest))
            yield

    def _reset_of(self, module: nn.Module, name: str) -> Init:
        """Return the function that initialises a module. **Raises** ConfigError if none does."""
        reset: Init | None = self._init or getattr(type(module), "reset_parameters", None)
        if reset is None:
            place = f"'{name or '(root)'}' ({type(module).__name__})"
            raise ConfigError(
                f"model: {place} is on the meta device and has no reset_parameters(); "
                "give shard(units=Units(init=...)), a function that initialises one module"
            )
        return reset

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


def num_units_on_device(specs: Sequence[UnitSpec], config: ShardConfig) -> int:
    """Return the number of units, from the first on, whose state stays on the device."""
    if config.state_offload is None:
        return len(specs)
    numels = [sum(param.param.numel() for param in spec.params) for spec in specs]
    return config.state_offload.num_staying(numels)
