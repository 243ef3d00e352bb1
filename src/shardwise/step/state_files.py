"""Files that hold an optimizer's state between steps, one for each unit.

Note [State in files]
~~~~~~~~~~~~~~~~~~~~~
A step passes each unit's state through a buffer of the disk; see `step.unit_step`. All other
readers use tensors that are mapped from the file; see Note [Two ways to one file].

A step that creates the state, or finds it changed, runs unit by unit and blocks: a unit's state is
stored, and its memory freed, before the next unit's is made. The space for all units is reserved
before the first unit is stepped, so a full disk changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.offload.disk import BufferRead, Disk
from shardwise.offload.file_slices import map_file
from shardwise.offload.files import DiskFile
from shardwise.offload.stripes import regions_of
from shardwise.offload.transfers import FileTransfer
from shardwise.step.local_step import Key, Params, State, SteppedByParts, sizes_of_state
from shardwise.tensor.elements import elements_of, set_elements
from shardwise.tensor.plain_state import PLAIN_SCALARS
from shardwise.unit.unit import Unit


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a parameter's state: sharded like it, or local to this rank, as codes are."""

    state: dict[str, object]
    name: str

    @property
    def value(self) -> torch.Tensor:
        """The tensor itself."""
        value = self.state[self.name]
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def elements(self) -> torch.Tensor:
        """This rank's elements, without waiting."""
        value = self.value
        return elements_of(value) if isinstance(value, DTensor) else value

    def put(self, elements: torch.Tensor) -> None:
        """Replace the memory of this rank's elements, without waiting."""
        value = self.value
        if isinstance(value, DTensor):
            set_elements(value, elements)
        else:
            self.state[self.name] = elements


def state_tensors_of(optimizer: Optimizer, unit: Unit) -> dict[Key, StateTensor]:
    """Return the tensors of a unit's state that have elements, without step counts."""
    held = {
        (id(param.sharded), name): StateTensor(state, name)
        for param in unit.params
        for state in [optimizer.state.get(param.sharded, {})]
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim and name not in PLAIN_SCALARS
    }
    return {key: tensor for key, tensor in held.items() if tensor.elements.numel()}


@dataclass(frozen=True)
class _FileEntry:
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

    Its tensors are one range of bytes, which a step reads and writes at once.
    """

    def __init__(self, disk: Disk, unit: str, sizes: Sequence[int]) -> None:
        """Reserve space for tensors with these sizes in bytes."""
        self.disk = disk
        self._unit = unit
        self._entries: dict[Key, _FileEntry] = {}
        self._file: DiskFile = disk.file(unit, regions_of(sizes).num_bytes)
        self._mapped = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the state takes outside the file."""
        return self._mapped.numel()

    def fits(self, held: Mapping[Key, StateTensor]) -> bool:
        """Return True if the file is intact and has exactly these tensors."""
        if self._file.transfers.failed or held.keys() != self._entries.keys():
            return False
        pairs = ((tensor.elements, self._entries[key]) for key, tensor in held.items())
        return all(
            (elements.dtype, elements.shape) == (entry.dtype, entry.shape)
            for elements, entry in pairs
        )

    def store(self, held: State) -> None:
        """Write tensors into the file, and wait."""
        sizes = regions_of([tensor.nbytes for tensor in held.values()])
        if self._file.num_bytes != sizes.num_bytes:
            self._file = self.disk.file(self._unit, sizes.num_bytes)
        places = zip(sizes.begins, held.items(), strict=True)
        self._entries = {
            key: _FileEntry(begin, t.nbytes, t.dtype, t.shape) for begin, (key, t) in places
        }
        for key, tensor in held.items():
            write = self.disk.start_write(self._file, self._entries[key].begin, tensor.contiguous())
            write.wait()
        self._mapped = map_file(self._file)

    def mapped(self, key: Key) -> torch.Tensor:
        """Return a tensor that is mapped from the file."""
        return self._entries[key].view(self._mapped)

    def is_mapped(self, key: Key, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is the memory that `mapped` returns."""
        return tensor.data_ptr() == self._mapped.data_ptr() + self._entries[key].begin

    def view_in(self, memory: torch.Tensor, key: Key) -> torch.Tensor:
        """Return a tensor as a view of memory that the file was read into."""
        return self._entries[key].view(memory[: self.num_bytes])

    def start_reading(self) -> BufferRead:
        """Start reading the whole file into a buffer, when one is free."""
        return self.disk.start_reading(self._file, self.num_bytes)

    def start_write(self, memory: torch.Tensor, then: Callable[[], None]) -> FileTransfer:
        """Start writing the whole file from memory, and call ``then`` at the end."""
        return self.disk.start_write(self._file, 0, memory[: self.num_bytes], then)


class StateFiles:
    """The files of one optimizer's state, one per unit that has a disk."""

    def __init__(self) -> None:
        self._files: dict[Unit, StateFile] = {}
        self._reserved: dict[Unit, StateFile] = {}  # for the step that is about to store
        # By group and dtype of a parameter: the result of `sizes_of_state`.
        self._sizes: dict[tuple[int, torch.dtype], list[int]] = {}

    def file_of(self, unit: Unit, held: Mapping[Key, StateTensor]) -> StateFile | None:
        """Return a unit's file if it is intact and has the tensors of its current state."""
        file = self._files.get(unit)
        return file if file is not None and file.fits(held) else None

    def needs_storing(self, optimizer: Optimizer, unit: Unit, params: Params) -> bool:
        """Return True if the unit's next step, of these parameters, must store its state again."""
        if unit.home is None or unit.home.files.optimizer is None:
            return False
        file = self.file_of(unit, state_tensors_of(optimizer, unit))
        return file is None or bool(self._sizes_to_come(optimizer, params))

    def _sizes_to_come(self, optimizer: Optimizer, params: Params) -> list[int]:
        """Return the bytes of each part of the state that the next step creates.

        All ranks have the same parts; the bytes are 0 on a rank without elements.
        """
        sizes = []
        for group, param in params:
            if optimizer.state.get(param):
                continue
            if isinstance(optimizer, SteppedByParts):
                sizes += optimizer.bytes_to_come(param)
                continue
            local = elements_of(param) if isinstance(param, DTensor) else param
            key = (group, local.dtype)
            if key not in self._sizes:
                self._sizes[key] = sizes_of_state(optimizer, group, local.dtype)
            sizes += [local.numel() * size for size in self._sizes[key]]
        return sizes

    def reserve(self, optimizer: Optimizer, by_unit: Mapping[Unit | None, Params]) -> None:
        """Reserve the space for all state that a step will store.

        **Raises** StorageError, with nothing changed, if there is not enough.
        """
        self._reserved.clear()
        try:
            for unit, params in by_unit.items():
                if unit is None or not self.needs_storing(optimizer, unit, params):
                    continue
                disk = None if unit.home is None else unit.home.files.optimizer
                assert isinstance(disk, Disk)
                tensors = state_tensors_of(optimizer, unit).values()
                sizes = [tensor.elements.nbytes for tensor in tensors]
                sizes += self._sizes_to_come(optimizer, params)
                self._reserved[unit] = StateFile(disk, unit.name, sizes)
        except BaseException:
            self._reserved.clear()
            raise

    def store(self, optimizer: Optimizer, unit: Unit) -> None:
        """Move a unit's state into the file that `reserve` has made for it, if there is one."""
        file = self._reserved.pop(unit, None)
        if file is None:
            return
        held = state_tensors_of(optimizer, unit)
        file.store({key: tensor.elements for key, tensor in held.items()})
        for key, tensor in held.items():
            tensor.put(file.mapped(key))
        self._files[unit] = file
        file.disk.reserve(max(file.num_bytes for file in self._files.values()))
