"""Files that hold an optimizer's state of one unit between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.offload.disk import Disk
from shardwise.offload.file_slices import mapped
from shardwise.offload.files import DiskFile
from shardwise.offload.stripes import regions_of
from shardwise.offload.transfers import Transfer

Key = tuple[int, str]  # a parameter's id, and the name of a part of its state
Held = Mapping[Key, torch.Tensor]  # this rank's elements of each


@dataclass(frozen=True)
class _Row:
    begin: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of memory that holds the whole file."""
        part = memory[self.begin : self.begin + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


class StateFile:
    """The file of one unit's state on one rank; empty until `store`.

    Its tensors are one range of bytes, which a step reads and writes at once. All other readers use
    ``mapped`` tensors over the same bytes. See Note [Two ways to one file].
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
        """Bytes of memory that the state takes outside the file."""
        return self._mapped.numel()

    def fits(self, held: Held) -> bool:
        """Return True if the file is intact and has exactly these tensors."""
        if self._file is None or self._file.transfers.failed or held.keys() != self._rows.keys():
            return False
        rows = ((t, self._rows[key]) for key, t in held.items())
        return all((t.dtype, t.shape) == (row.dtype, row.shape) for t, row in rows)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Reserve space for the next `store`, of tensors with these sizes in bytes."""
        self._reserved = self.disk.file(self._unit, regions_of(sizes).num_bytes)

    def store(self, held: Held) -> None:
        """Write tensors into a new file, which replaces the old one, and wait."""
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
        """Return a tensor that is mapped from the file."""
        return self._rows[key].view(self._mapped)

    def is_at_rest(self, key: Key, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is the memory that `at_rest` returns."""
        return tensor.data_ptr() == self._mapped.data_ptr() + self._rows[key].begin

    def brought(self, key: Key, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor as a view of memory that the file was read into."""
        return self._rows[key].view(memory[: self.num_bytes])

    def start_read(self, memory: torch.Tensor) -> Transfer:
        """Start reading the whole file into memory of at least ``num_bytes``."""
        assert self._file is not None
        return self.disk.start_read(self._file, 0, memory[: self.num_bytes])

    def start_write(self, memory: torch.Tensor, then: Callable[[], None]) -> Transfer:
        """Start writing the whole file from memory, and call ``then`` at the end."""
        assert self._file is not None
        return self.disk.start_write(self._file, 0, memory[: self.num_bytes], then)
