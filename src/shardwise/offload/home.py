"""Slices in host memory, fetched for a gather; gradient means are evicted to the host.

Note [Shards at home on the host]
With a home, the slices are kept there (page-locked by default if the device is an accelerator),
with ``p.grad``, the optimizer's state and its step. The full copies stay on the device. A gather
fetches this rank's slice into its place in the full buffer and gathers in place. The means of the
gradients are evicted before they become ``p.grad``. Neither blocks: a fetch overlaps computation,
and the gather follows it on its stream. The *host* waits for both, since the host writes the slices
and reads the means. It waits for a fetch before the full parameters are used, so that slices may be
written whenever a unit is FULL or SHARDED, and for an eviction before ``p.grad`` is set.

Note [One slab]
~~~~~~~~~~~~~~~
Pages are locked before the first collective, and in one piece. Locking takes about as long as
writing the pages, and allocators of page-locked memory round each piece up to a power of two. A
piece locked in the middle of a reduction makes all ranks wait: a rank that waited for its device
there, while the device waited for its peers, has caused deadlocks. Memory of unknown size before
the first step, such as the optimizer's state, is allocated in that step.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm.listener import WAITS
from shardwise.comm.pending import Pending
from shardwise.device import DeviceTime, follow_current, host_buffer
from shardwise.errors import StorageError
from shardwise.homes import NUM_BUFFERS, Offload, folders_of
from shardwise.offload.disk import Disk
from shardwise.offload.file_slices import FileSlices, map_file
from shardwise.offload.stripes import align
from shardwise.quantities import format_bytes
from shardwise.trace import Tracer
from shardwise.unit.home import MemoryNeed


class Slab:
    """``num_bytes`` of zeros on the host, page-locked if an accelerator copies from them."""

    def __init__(self, num_bytes: int, time: DeviceTime) -> None:
        self._memory = time.locked_memory(num_bytes)
        self._num_allocated = 0  # bytes

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next flat piece of zeros, which ``num_bytes`` must include.

        It has a separate storage over the same memory, so that its references can be counted.
        """
        begin = self._num_allocated
        end = begin + numel * dtype.itemsize
        self._num_allocated = align(end)
        assert end <= self._memory.numel()
        piece = torch.empty(0, dtype=dtype)
        return piece.set_(self._memory.untyped_storage()[begin:end], 0, (numel,), (1,))


@dataclass(frozen=True)
class OffloadFiles:
    """The disk of each kind of state; None if that state is not in files."""

    params: Disk | None = None
    grads: Disk | None = None
    optimizer: Disk | None = None

    @classmethod
    def open(cls, offload: Offload, device: torch.device) -> "OffloadFiles":
        """Open the folders of an `Offload`. **Raises** ConfigError for an unusable folder.

        Slices have a separate disk, so that a step never waits for its buffers.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        cpu = torch.device("cpu")

        def disk(place: str | None, copied_from: torch.device) -> Disk | None:
            folders = [*map(Path, folders_of(place))]
            buffer = partial(host_buffer, device=copied_from)
            return Disk(folders, 0, NUM_BUFFERS, buffer, rank) if folders else None

        optimizer = disk(offload.optimizer, device if offload.step_on == "device" else cpu)
        same = offload.grads == offload.optimizer
        grads = optimizer if same else disk(offload.grads, cpu)
        return cls(disk(offload.params, device), grads, optimizer)


NO_FILES = OffloadFiles()


@dataclass(frozen=True)
class Home:
    """Place of a unit's slices (``place``), and their transfers to the ``device`` and back.

    ``keeps_device_copy``: gathers read a copy in the computing dtype, which stays on the device and
    is fetched once after each step.
    """

    place: torch.device
    device: torch.device
    time: DeviceTime
    is_pinned: bool = True
    keeps_device_copy: bool = False
    steps_on_device: bool = False
    files: OffloadFiles = NO_FILES
    unit: str = ""
    slab: Slab | None = None
    tracer: Tracer = field(default_factory=Tracer)  # receives copies
    reserved: list[FileSlices] = field(default_factory=list)  # for the slices of its storages

    def __str__(self) -> str:
        params = "device and host" if self.keeps_device_copy else "host"
        places = zip(("slices", "gradients", "optimizer"), (params, "host", "host"), strict=True)
        disks = self.files.params, self.files.grads, self.files.optimizer
        texts = [
            f"{kind}: {place if disk is None else f'files in {disk.where}'}"
            for (kind, place), disk in zip(places, disks, strict=True)
        ]
        if self.steps_on_device:
            texts.append("steps: device")
        return ", ".join(texts)

    def in_file(self, disk: Disk, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros that are mapped from a new file; see Note [Two ways to one file]."""
        with WAITS.reporting_failures():
            return map_file(disk.file(self.unit, numel * dtype.itemsize)).view(dtype)

    def allocate_for_model(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed memory at home that is kept as long as the model."""
        if self.slab is None:
            return self.allocate(numel, dtype).zero_()
        return self.slab.allocate(numel, dtype)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory at home."""
        if self.place.type == "cpu":
            return self.time.host_memory(numel, dtype, self.is_pinned)
        return torch.empty(numel, dtype=dtype, device=self.place)

    def start_fetch(
        self, places: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]
    ) -> Pending:
        """Start copying slices to their places on the device.

        **Cost** if dtypes differ, a device buffer in the slices' dtype, which is cast there: torch
        would cast on the host, and block.
        """
        stream = self.time.fetch_stream
        num_bytes = sum(source.nbytes for source in slices)
        with (
            follow_current(self.time, stream),
            self.tracer.copies("to_device", self.unit, num_bytes),
        ):
            for place, source in zip(places, slices, strict=True):
                if place.dtype == source.dtype:
                    place.copy_(source, non_blocking=True)
                else:
                    staged = torch.empty(source.shape, dtype=source.dtype, device=self.device)
                    place.copy_(staged.copy_(source, non_blocking=True))
            return Pending.of_copies(stream.record(), keep=places)

    def start_evict(
        self, values: torch.Tensor, dtype: torch.dtype, to: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Pending]:
        """Start copying flat values home, cast on the device; return their memory there."""
        stream = self.time.evict_stream
        if to is not None:
            evicted = to
        elif self.files.grads is not None:
            evicted = self.in_file(self.files.grads, values.numel(), dtype)
        else:
            evicted = self.allocate(values.numel(), dtype)
        span = self.tracer.copies("to_host", self.unit, evicted.nbytes)
        with follow_current(self.time, stream), span:
            evicted.copy_(values.to(dtype), non_blocking=True)
            return evicted, Pending.of_copies(stream.record(), keep=values)

    def slices_in_file(self, numel: int, dtype: torch.dtype) -> FileSlices:
        """Return the file reserved for the unit's next storage; for a copy a new one."""
        if self.reserved:
            return self.reserved.pop(0)
        assert self.files.params is not None
        return FileSlices(self.files.params, self.unit, numel, dtype)

    def for_copy(self, time: DeviceTime) -> "Home":
        """Return the home of a copy of the unit, with separate memory."""
        return replace(self, time=time, slab=None, reserved=[])

    def after_fetch(self) -> AbstractContextManager[None]:
        """Return a context in which enqueued work follows fetches in flight."""
        return follow_current(self.time, self.time.fetch_stream)


class OffloadHomes:
    """The homes of one model's units: files, and one slab of host memory."""

    def __init__(self, offload: Offload, device: torch.device) -> None:
        """Open the files. **Raises** ConfigError for unusable folders."""
        self._offload = offload
        self._files = OffloadFiles.open(offload, device)
        self._slab: Slab | None = None
        self._in_files: dict[str, list[FileSlices]] = {}  # by unit, in the order of its storages

    def reserve(self, needs: Sequence[MemoryNeed], time: DeviceTime) -> None:
        """Reserve the host memory and file space of all storages, without communication.

        **Raises** StorageError, with nothing changed, if they are not there.
        """
        total = 0
        for need in needs:
            if self._files.params is not None:
                slices = FileSlices(self._files.params, need.unit, need.numel, need.dtype)
                self._in_files.setdefault(need.unit, []).append(slices)
            copies = (self._files.params is None) + (self._files.grads is None and need.trains)
            total += copies * align(need.numel * need.dtype.itemsize)
        if not total:
            return
        try:
            self._slab = Slab(total, time)
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"rank {dist.get_rank()}: the {format_bytes(total)} of host memory for slices and "
                f"gradients could not be allocated: {error}. Use more hosts, offload less "
                "(fraction=), or keep them in files (params= and grads='nvme:FOLDER')"
            ) from error

    def home_of(self, unit: str, device: torch.device, time: DeviceTime, tracer: Tracer) -> Home:
        """Return the home of a unit; the tracer receives its copies, reads and writes."""
        for disk in (self._files.params, self._files.grads, self._files.optimizer):
            if disk is not None:
                disk.tracer = tracer
        return Home(
            torch.device("cpu"),
            device,
            time,
            keeps_device_copy=self._offload.params == "device",
            steps_on_device=self._offload.step_on == "device",
            files=self._files,
            unit=unit,
            slab=self._slab,
            tracer=tracer,
            reserved=self._in_files.get(unit, []),
        )
