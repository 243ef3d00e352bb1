"""Slices that live on the host: they are fetched for a gather, and means of gradients go back.

Note [Shards at home on the host]
With a home the slices live there (page-locked, unless told otherwise, where the device is an
accelerator), and with them ``p.grad``, the optimizer's state and its step; the full copies stay on
the device. A gather fetches this rank's share into its place in the full buffer and gathers in
place, and the means of the gradients are evicted before they become ``p.grad``. Neither blocks:
what is fetched runs beside what is computed, and the gather follows it on its stream. The *host*
waits for both, as it is the host that writes the slices and reads the means: a fetch before the
full parameters are used, so that slices may be written whenever a unit is FULL or SHARDED, an
eviction before ``p.grad`` is set.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from shardwise.comm.listener import WAITS
from shardwise.comm.pending import Pending
from shardwise.device import DeviceTime, follow_current
from shardwise.offload.disk import Disk
from shardwise.offload.mapped import mapped
from shardwise.offload.slab import Slab
from shardwise.trace import Tracer
from shardwise.unit.ahead import FileSlices


@dataclass(frozen=True)
class Files:
    """The disks of what rests in files, by kind of state; None for what does not."""

    params: Disk | None = None
    grads: Disk | None = None
    optimizer: Disk | None = None

    def tell(self, tracer: Tracer) -> None:
        """Let a model's tracer hear of reads and writes."""
        for disk in (self.params, self.grads, self.optimizer):
            if disk is not None:
                disk.tracer = tracer


NO_FILES = Files()


@dataclass(frozen=True)
class Home:
    """Where slices live (``place``), and how they travel to the ``device`` and back.

    ``leaves_copy``: gathers read a copy in the computing dtype that stays on the device, and that
    is fetched once after each step.
    """

    place: torch.device
    device: torch.device
    time: DeviceTime
    is_pinned: bool = True
    leaves_copy: bool = False
    steps_on_device: bool = False
    files: Files = NO_FILES
    unit: str = ""
    slab: Slab | None = None
    tracer: Tracer = field(default_factory=Tracer)  # told of copies
    slices_in_files: list[FileSlices] = field(default_factory=list)  # reserved for its storages

    def __str__(self) -> str:
        params = "device and host" if self.leaves_copy else "host"
        places = zip(("slices", "gradients", "optimizer"), (params, "host", "host"), strict=True)
        disks = self.files.params, self.files.grads, self.files.optimizer
        said = [
            f"{kind}: {place if disk is None else f'files in {disk.where}'}"
            for (kind, place), disk in zip(places, disks, strict=True)
        ]
        return ", ".join([*said, "steps: device"] if self.steps_on_device else said)

    def in_file(self, disk: Disk, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that is a file's, zeros; see Note [Two ways to one file]."""
        with WAITS.reporting_failures():
            return mapped(disk.file(self.unit, numel * dtype.itemsize)).view(dtype)

    def lasting(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory at home for as long as the model is there: zeros."""
        if self.slab is None:
            return self.memory(numel, dtype).zero_()
        return self.slab.take(numel, dtype)

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory at home."""
        if self.place.type == "cpu":
            return self.time.host_memory(numel, dtype, self.is_pinned)
        return torch.empty(numel, dtype=dtype, device=self.place)

    def start_fetch(
        self, places: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]
    ) -> Pending:
        """Start copying slices to their places on the device.

        **Cost** where dtypes differ a buffer in that of the slices, cast on the device: torch would
        cast on the host, and block.
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
        """Start copying flat values home, cast on the device; return where they will be."""
        stream = self.time.evict_stream
        if to is not None:
            brought = to
        elif self.files.grads is not None:
            brought = self.in_file(self.files.grads, values.numel(), dtype)
        else:
            brought = self.memory(values.numel(), dtype)
        told = self.tracer.copies("to_host", self.unit, brought.nbytes)
        with follow_current(self.time, stream), told:
            brought.copy_(values.to(dtype), non_blocking=True)
            return brought, Pending.of_copies(stream.record(), keep=values)

    def after_fetch(self) -> AbstractContextManager[None]:
        """Enqueue inside what needs the slices on the device: it follows fetches under way."""
        return follow_current(self.time, self.time.fetch_stream)
