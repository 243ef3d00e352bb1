"""Where slices rest if not on the device: what the core asks of a home.

`offload` has the homes; the core does not import it, and a model without offload has none.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.comm.pending import Pending
from shardwise.device import DeviceTime
from shardwise.trace import Tracer


class Folder(Protocol):
    """The files of one kind of state."""

    @property
    def where(self) -> str:
        """The folders, as text."""


class KindsInFiles(Protocol):
    """The files of each kind of state; None for kinds that do not rest in files."""

    @property
    def params(self) -> Folder | None:
        """Of slices."""

    @property
    def grads(self) -> Folder | None:
        """Of reduced gradients."""

    @property
    def optimizer(self) -> Folder | None:
        """Of the optimizer's state."""


class SlicesInFile(Protocol):
    """The slices of one storage in a file; ``mapped`` are all of them, flat, zeros at first."""

    mapped: torch.Tensor

    def start_read(self, version: int) -> None:
        """Begin to read the slices of a version, if they are not in memory and there is room."""

    def finish_read(self, version: int) -> None:
        """Wait for a read of this version. **Raises** StorageError if it has failed."""

    def take(self, version: int) -> torch.Tensor:
        """Return memory with the slices: a buffer that was read into, or the file itself."""

    def release(self) -> None:
        """Give the buffer back."""


class Home(Protocol):
    """Where one unit's slices rest, and how they travel to the device and back.

    ``leaves_copy``: gathers read a copy in the computing dtype that stays on the device, and that
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
    def leaves_copy(self) -> bool:
        """Tell whether a copy stays on the device."""

    @property
    def steps_on_device(self) -> bool:
        """Tell whether the optimizer's step runs on the device."""

    @property
    def files(self) -> KindsInFiles:
        """What rests in files."""

    def take_slices_in_file(self) -> SlicesInFile:
        """Return what was reserved in files for the unit's next storage."""

    def lasting(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory at home for as long as the model is there: zeros."""

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory at home."""

    def start_fetch(
        self, places: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]
    ) -> Pending:
        """Start copying slices to their places on the device."""

    def start_evict(
        self, values: torch.Tensor, dtype: torch.dtype, to: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Pending]:
        """Start copying flat values home, cast on the device; return where they will be."""

    def after_fetch(self) -> AbstractContextManager[None]:
        """Enqueue inside what needs the slices on the device: it follows fetches under way."""

    def over(self, time: DeviceTime) -> "Home":
        """Return the home of a copy of the unit."""


@dataclass(frozen=True)
class Room:
    """What one storage of a unit needs at home: elements, dtype, and whether it is trained."""

    unit: str
    numel: int
    dtype: torch.dtype
    trains: bool


class Homes(Protocol):
    """Gives the units of one model their homes."""

    def reserve(self, rooms: Sequence[Room], time: DeviceTime) -> None:
        """Take the host memory and the space in files that storages need.

        **Raises** StorageError, with nothing changed, if they are not there.
        """

    def home_of(self, unit: str, device: torch.device, time: DeviceTime, tracer: Tracer) -> Home:
        """Return the home of a unit."""
