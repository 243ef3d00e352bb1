"""Where the state that an optimizer keeps of one unit rests between its steps: in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.offload.disk import Disk
from shardwise.offload.files import DiskFile
from shardwise.offload.mapped import mapped
from shardwise.offload.regions import regions_of
from shardwise.offload.transfers import Transfer

Key = tuple[int, str]  # a parameter, by its id, and the name of a part of its state
Held = Mapping[Key, torch.Tensor]  # this rank's elements of each


@dataclass(frozen=True)
class _Row:
    begin: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor, of memory that is as long as the file."""
        part = memory[self.begin : self.begin + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


class StateFile:
    """The file of one unit's state on one rank; empty until something was stored.

    All its tensors are one range, which a step reads and writes at once; ``mapped`` tensors over
    the same bytes are what everybody else sees. See Note [Two ways to one file].
    """

    def __init__(self, disk: Disk, unit: str) -> None:
        self.disk = disk
        self._unit = unit
        self._rows: dict[Key, _Row] = {}
        self._file: DiskFile | None = None
        self._reserved: DiskFile | None = None
        self._mapped = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """The memory that the state takes outside the file."""
        return self._mapped.numel()

    def fits(self, held: Held) -> bool:
        """Tell whether the file is whole, with a place for each of these tensors and no other."""
        if self._file is None or self._file.transfers.failed or held.keys() != self._rows.keys():
            return False
        rows = ((t, self._rows[key]) for key, t in held.items())
        return all((t.dtype, t.shape) == (row.dtype, row.shape) for t, row in rows)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take the space for tensors of so many bytes, which are to be stored."""
        self._reserved = self.disk.file(self._unit, regions_of(sizes).num_bytes)

    def store(self, held: Held) -> None:
        """Write tensors into a new file, whatever the old one has, and wait for it."""
        sizes = regions_of([tensor.nbytes for tensor in held.values()])
        file, self._reserved = self._reserved, None
        if file is None or file.num_bytes != sizes.num_bytes:
            file = self.disk.file(self._unit, sizes.num_bytes)
        places = zip(sizes.begins, held.items(), strict=True)
        rows = {key: _Row(begin, t.nbytes, t.dtype, t.shape) for begin, (key, t) in places}
        for key, tensor in held.items():
            self.disk.start_write(file, rows[key].begin, tensor.contiguous()).wait()
        self._rows, self._file, self._mapped = rows, file, mapped(file)

    def at_rest(self, key: Key) -> torch.Tensor:
        """Return a tensor as it rests, mapped."""
        return self._rows[key].view(self._mapped)

    def is_at_rest(self, key: Key, tensor: torch.Tensor) -> bool:
        """Tell whether this is the memory that `at_rest` returns."""
        return tensor.data_ptr() == self._mapped.data_ptr() + self._rows[key].begin

    def brought(self, key: Key, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor in memory that the file was read into."""
        return self._rows[key].view(memory[: self.num_bytes])

    def start_read(self, memory: torch.Tensor) -> Transfer:
        """Begin to read all of it into memory of at least ``num_bytes``."""
        assert self._file is not None
        return self.disk.start_read(self._file, 0, memory[: self.num_bytes])

    def start_write(self, memory: torch.Tensor, then: Callable[[], None]) -> Transfer:
        """Begin to write all of it from memory, and call ``then`` at the end."""
        assert self._file is not None
        return self.disk.start_write(self._file, 0, memory[: self.num_bytes], then)
