"""Interfaces of the memory of offloaded slices, called their home.

`offload` implements them. The core does not import it; a model without offload has no homes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.comm.pending import Pending
from shardwise.device import DeviceTime
from shardwise.trace import Tracer


class StateFolder(Protocol):
    """The folders with the files of one kind of state."""

    @property
    def where(self) -> str:
        """The folders' paths, as text."""


class StateFolders(Protocol):
    """The folders of each kind of state; None for a kind that is not in files."""

    @property
    def params(self) -> StateFolder | None:
        """The folders of slices."""

    @property
    def grads(self) -> StateFolder | None:
        """The folders of reduced gradients."""

    @property
    def optimizer(self) -> StateFolder | None:
        """The folders of the optimizer's state."""


class SlicesInFile(Protocol):
    """The slices of one storage in a file.

    ``mapped`` is the file as a flat tensor of all slices [S]; it is zeroed when it is made.
    """

    mapped: torch.Tensor

    def start_read(self, version: int) -> None:
        """Start reading the slices of a version, unless they are in memory or no buffer is free."""

    def finish_read(self, version: int) -> None:
        """Wait for the read of a version. **Raises** StorageError if it has failed."""

    def take_slices(self, version: int) -> torch.Tensor:
        """Return memory with the slices: the buffer that was read, or the mapped file."""

    def release(self) -> None:
        """Return the buffer to its pool."""


class Home(Protocol):
    """The memory of one unit's offloaded slices, and their copies to the device and back.

    ``keeps_device_copy``: gathers read a copy in the computing dtype, which stays on the device and
    is fetched once after each step.
    """

    @property
    def place(self) -> torch.device:
        """The device of the memory at home."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""

    @property
    def time(self) -> DeviceTime:
        """The streams of the device."""

    @property
    def is_pinned(self) -> bool:
        """Tell whether memory at home is page-locked."""

    @property
    def keeps_device_copy(self) -> bool:
        """Tell whether a copy stays on the device."""

    @property
    def steps_on_device(self) -> bool:
        """Tell whether the optimizer's step runs on the device."""

    @property
    def files(self) -> StateFolders:
        """The folders of the unit's state."""

    def slices_in_file(self, numel: int, dtype: torch.dtype) -> SlicesInFile:
        """Return the file of the unit's next storage: a reserved one, or a new one."""

    def allocate_for_model(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed memory at home that is kept as long as the model."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory at home."""

    def start_fetch(
        self, places: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]
    ) -> Pending:
        """Start copying slices into ``places`` on the device."""

    def start_evict(
        self, values: torch.Tensor, dtype: torch.dtype, to: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Pending]:
        """Cast flat values on the device, start copying them home, and return the destination."""

    def after_fetch(self) -> AbstractContextManager[None]:
        """Return a context in which enqueued work of the device follows the fetches in flight."""

    def for_copy(self, time: DeviceTime) -> "Home":
        """Return the home of a copy of the unit."""


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that one storage of a unit needs at home.

    ``numel`` is the size of the slices; ``trains``: their gradients need memory, too.
    """

    unit: str
    numel: int
    dtype: torch.dtype
    trains: bool


class Homes(Protocol):
    """The homes of one model's units."""

    def reserve(self, needs: Sequence[MemoryNeed], time: DeviceTime) -> None:
        """Reserve the host memory and the file space that storages need.

        **Raises** StorageError, with nothing changed, if they are not available.
        """

    def home_of(self, unit: str, device: torch.device, time: DeviceTime, tracer: Tracer) -> Home:
        """Return the home of a unit."""
