"""The unit of one ``fully_shard`` call: parameters that are gathered, reduced and freed together.

Note [State, not freshness]
FSDP2's contract is about what stands in the modules: full parameters from the gather until they
are resharded, DTensors otherwise. So here the modules hold the full parameters as long as the unit
is FULL, also between passes, and between them nobody else frees them.

Note [Spread over fewer ranks]
With an int as ``reshard_after_forward`` a rank keeps, from forward to backward, one of that many
equal parts of the unit's full memory, and backward gathers over that many neighbours only. The
modules hold the ordinary sharded parameters meanwhile. A part is dropped when they have changed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shardwise.comm.packed import PackedComm
from shardwise.comm.pending import GatherItem
from shardwise.config import Precision
from shardwise.interop.fsdp2.extension import Extension
from shardwise.interop.fsdp2.meshes import Spread
from shardwise.interop.fsdp2.settings import GroupSettings
from shardwise.interop.fsdp2.slot import GroupSlot
from shardwise.layout.segments import Segment, build_layout
from shardwise.layout.units import ParamUse
from shardwise.trace import FullBytes, span
from shardwise.unit.home import Home
from shardwise.unit.states import GradState, ParamState
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Unit


class GroupUnit(Unit):
    """A unit whose parameters are DTensors, and whose modules hold what its state says."""

    settings: GroupSettings
    comm: PackedComm

    def __init__(
        self,
        modules: Sequence[nn.Module],
        spread: Spread,
        device: torch.device,
        offload: CPUOffloadPolicy | None,
        settings: GroupSettings,
    ) -> None:
        comm = PackedComm(spread.axes, device)
        super().__init__("", 0, modules[0], comm, _NoEngine(), settings, Precision())
        self.modules = tuple(modules)
        self.spread = spread
        self.device = device
        self.home = torch.device("cpu") if offload is not None else None
        self._pins = offload is not None and offload.pin_memory
        self.slots: list[GroupSlot] = []  # type: ignore[assignment]
        self.unreduced: torch.Tensor | None = None  # reduced over shards, not over replicas
        self._inside = {id(m) for module in modules for m in module.modules()}
        self.ledger = FullBytes()
        self.leaves_part = False  # while a forward pass ends; see Note [Spread over fewer ranks]
        self._parts: list[torch.Tensor] = []
        self._part_versions: list[int] = []
        self._is_ready = False

    def contains(self, other: Unit) -> bool:
        """Tell whether the other unit's module lies inside one of this one's."""
        return id(other.module) in self._inside

    @property
    def shard_mesh(self) -> Any:
        """The mesh of the shard axis alone."""
        mesh = self.spread.mesh
        return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]

    def take(self, uses: tuple[ParamUse, ...], param: nn.Parameter, dim: int) -> None:
        """Shard one parameter: every rank keeps its chunk of its own values."""
        self.slots.append(GroupSlot(self, uses, param, dim))

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what stands in the modules, which must be sharded now.

        It may have been replaced by ``model.to()``, ``to_empty()`` or a load with ``assign=True``.
        On meta there is nothing to lay out yet.
        """
        self._is_ready = False
        is_new = [slot.reread() for slot in self.slots]  # each of them must look
        if not any(is_new):
            return
        self.storages = []
        self.__dict__.pop("full_bytes", None)
        groups: dict[Any, list[GroupSlot]] = {}
        for slot in self.slots:
            local = slot.param._local_tensor
            slot.extension = Extension.of(local)
            slot.local, slot.leaf, slot.storage = local, None, None
            if slot.extension is None and not local.is_meta:
                groups.setdefault((*self._dtypes(local), slot.dim > 0), []).append(slot)
        for (master, compute, _), slots in groups.items():
            axis = self.spread.axes.shard
            layout = build_layout("rows", [s.layout_shape for s in slots], axis.size)
            storage = Storage(
                layout,
                axis.rank,
                self.settings.stage,
                (master, compute),
                self.device,
                self.ledger,
                self.home,
                self._pins,
                self.comm.time,
            )
            for index, slot in enumerate(slots):
                slot.settle(storage, index)
            storage.free()
            self.storages.append(storage)

    def _dtypes(self, local: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        compute = self.settings.mp.param_dtype
        if compute is None or not local.is_floating_point():
            compute = local.dtype
        return local.dtype, compute

    # -- what the schedule asks
    @property
    def backward_reads_params(self) -> bool:
        """Tell whether backward needs the full parameters, as the user has said."""
        return self.settings.reads_in_backward

    @property
    def is_trained(self) -> bool:
        """Tell whether any parameter has a gradient."""
        return any(slot.param.requires_grad for slot in self.slots)

    @property
    def is_fresh(self) -> bool:
        """Tell whether the full parameters are there; see Note [State, not freshness]."""
        return self.param_state is ParamState.FULL

    def read_versions(self) -> tuple[int, ...]:
        """Return nothing: parameters may change between forward and backward, as in FSDP2."""
        return ()

    # -- parameters
    @property
    def frees_in_backward(self) -> bool:
        """Tell whether a backward pass leaves no memory under the full parameters."""
        if not self.settings.stage.frees_after_backward or self.settings.stays_full:
            return False
        apart = any(slot.dim or slot.extension is not None for slot in self.slots)
        return apart or super().frees_in_backward

    def start_unshard(self) -> None:
        """Start gathering the full parameters, if they are not there already."""
        if self.param_state is not ParamState.SHARDED:
            return
        with torch._C._DisableFuncTorch():
            self._start_unshard()

    def _start_unshard(self) -> None:
        if not self._is_ready:
            self.adopt()
            self.check_device()
            self._is_ready = True
        self._enter(ParamState.GATHERING)
        axis, items = self.spread.axes.shard, self._take_parts()
        with span("unshard", self.name):
            if items:
                axis = self.settings.nearby or axis
            else:
                for storage in self.storages:
                    items += storage.prepare_gather()
            for slot in self.slots:
                if slot.extension is not None:
                    items += slot.extension.start(slot)
            if axis.size > 1:
                site = self.comm.site("all_gather", self.name, self.index)
                transfer = self.settings.all_gather
                with self._after_fetch():
                    self._pending = self.comm.gather_packed(items, axis, site, transfer)
            else:
                _copy_alone(items)

    def finish_unshard(self) -> None:
        """Wait until the full parameters may be read; put them into the modules."""
        was = self.param_state
        super().finish_unshard()
        if was is not ParamState.FULL:
            with torch._C._DisableFuncTorch():
                for slot in self.slots:
                    slot.complete(self.settings.mp.param_dtype)
            for storage in self.storages:
                is_put_together = all(s.dim for s in self.slots if s.storage is storage)
                if is_put_together and self.settings.nearby is None:
                    storage.free()  # what was gathered is put together elsewhere

    def _take_parts(self) -> list[GatherItem]:
        """List the parts that were left after forward, to be gathered; none when they are stale."""
        parts, self._parts = self._parts, []
        if not parts or self._part_versions != self._local_versions():
            return []
        items = []
        for storage, part in zip(self.storages, parts, strict=True):
            storage.allocate()
            segment = Segment(storage.full.numel(), part.numel(), 0, 0)
            items.append(GatherItem(segment, part, storage.full.data, False))
        return items

    @torch.no_grad()
    def _leave_parts(self) -> None:
        axis = self.settings.nearby
        if axis is None or any(slot.extension is not None for slot in self.slots):
            return
        if self.leaves_part and self.param_state is ParamState.FULL:
            self._part_versions = self._local_versions()
            self._parts = [s.full.data.chunk(axis.size)[axis.rank].clone() for s in self.storages]

    def _local_versions(self) -> list[int]:
        """Return numbers that change whenever a sharded parameter is modified."""
        return [slot.param._local_tensor._version for slot in self.slots]

    def reshard(self) -> None:
        """Put the sharded parameters into the modules and free the full ones."""
        was = self.param_state
        self._leave_parts()
        super().reshard()
        if was is not ParamState.SHARDED:
            for slot in self.slots:
                slot.release()

    def check_device(self) -> None:
        """Refuse parameters that are on meta still, or away from their home."""
        on_meta = [s.name for s in self.slots if s.param.device.type == "meta"]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta}\nFor example, call "
                "module.to_empty(device) to materialize to device and call "
                "module.reset_parameters() on each module to initialize values."
            )
        if self.home is None:
            return
        away = [(s.name, s.param.device) for s in self.slots if s.param.device != self.home]
        if away:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. For "
                'example, load a CPU state dict or call module.to_empty(device="cpu"). Found '
                f"following parameters on non-CPU device: {away}\n"
            )

    def bind(self) -> None:
        """Do nothing: the modules hold the full parameters since the gather."""

    def unbind(self) -> None:
        """Do nothing: the modules hold the full parameters until they are resharded."""

    # -- gradients
    def bring_home(self, values: torch.Tensor) -> torch.Tensor:
        """Return reduced values where the slices live."""
        if self.home is None:
            return values
        home = Home(self.home, self.device, self.comm.time, self._pins)
        brought, arrival = home.start_evict(values, values.dtype)
        arrival.wait()
        return brought

    def drop_partials(self) -> None:
        """Forget unreduced gradients, after a pass that was cut short."""
        for slot in self.slots:
            slot.drop_grad()
        self.unreduced = None
        self.has_local_sum = False
        if self.grad_state is GradState.PARTIAL:
            self.enter_grad_state(GradState.EMPTY)

    # -- names that tools look for on torch's parameter groups
    def post_backward(self) -> None:
        """Do nothing: what ends a pipeline's step for all units reduces them."""

    @property
    def is_unsharded(self) -> bool:
        """Tell whether the modules hold full parameters."""
        return self.param_state is ParamState.FULL

    @property
    def is_sharded(self) -> bool:
        """Tell whether the modules hold sharded parameters."""
        return not self.is_unsharded


class _NoEngine:
    """Stands for the engine until the first forward pass makes one."""

    def finish_reductions(self) -> None:
        """Do nothing."""

    def use_outside(self, unit: Unit) -> None:
        """Do nothing."""

    def is_running(self) -> bool:
        """Tell that no forward pass is under way."""
        return False

    def watch_grad(self, unit: Unit, leaf: torch.Tensor) -> None:
        """Do nothing: the engine asks again when there is one."""

    def __bool__(self) -> bool:
        """Tell that there is no engine."""
        return False


def _copy_alone(items: Sequence[GatherItem]) -> None:
    """Copy what a rank that is alone has gathered from itself."""
    for item in items:
        if not item.in_place:
            item.full.view(-1)[: item.source.numel()].copy_(item.source.view(-1))
