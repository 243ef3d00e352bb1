"""Steps of units whose optimizer state rests in files.

Note [State in files]
~~~~~~~~~~~~~~~~~~~~~
Each buffer of a ring takes the state of one unit. While a unit is stepped in one buffer, the next
unit's state is read into another, and the previous unit's is written from a third. Host memory is
bounded by three times the largest unit's state, and the disk reads and writes at the same time.
A reader of the state's tensors waits for the write, as a reader of parameters waits for the step.

A step that creates the state, or finds it changed, runs unit by unit and blocks: a unit's state is
stored, and its memory freed, before the next unit's is made. The space for all units is reserved
before the first unit is stepped, so a full disk changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import StorageError
from shardwise.offload.disk import Buffer, Disk
from shardwise.offload.transfers import Transfer
from shardwise.step.local_step import sizes_of_state
from shardwise.step.state_file import Key, StateFile
from shardwise.tensor.background_step import elements_of, set_elements
from shardwise.tensor.plain_state import PLAIN_SCALARS
from shardwise.unit.unit import Unit

Params = Sequence[tuple[int, Any]]  # of an optimizer, with the numbers of their groups
Take = Callable[[dict[Key, torch.Tensor]], dict[Key, torch.Tensor]]


class StoredState:
    """The files of one optimizer's state, one per unit that has a disk."""

    def __init__(self) -> None:
        self._files: dict[Unit, StateFile] = {}
        self._reserved: dict[Unit, StateFile] = {}
        self._sizes: dict[tuple[int, torch.dtype], list[int]] = {}

    def has(self, unit: Unit) -> bool:
        """Return True if a unit's state rests in a file."""
        return unit in self._files

    def fits(self, optimizer: Any, unit: Unit) -> bool:
        """Return True if a unit's file is intact and has the tensors of its present state."""
        file, held = self._files.get(unit), _held_of(optimizer, unit)
        return file is not None and file.fits({key: kept.elements for key, kept in held.items()})

    def needs_storing(self, optimizer: Any, unit: Unit, params: Params) -> bool:
        """Return True if the unit's next step, of these parameters, must store its state again."""
        if unit.home is None or unit.home.files.optimizer is None:
            return False
        return not self.fits(optimizer, unit) or bool(self._sizes_to_come(optimizer, params))

    def _sizes_to_come(self, optimizer: Any, params: Params) -> list[int]:
        """Return the bytes of each part of the state that the next step creates.

        All ranks have the same parts; the bytes are 0 on a rank without elements.
        """
        sizes = []
        for group, param in params:
            local = elements_of(param)
            if optimizer.state.get(param):
                continue
            if hasattr(optimizer, "bytes_to_come"):  # one of `optim`
                sizes += optimizer.bytes_to_come(param)
            else:
                asked = group, local.dtype
                if asked not in self._sizes:
                    self._sizes[asked] = sizes_of_state(optimizer, *asked)
                sizes += [local.numel() * size for size in self._sizes[asked]]
        return sizes

    def reserve(self, optimizer: Any, by_unit: Mapping[Unit | None, Params]) -> None:
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
                file = StateFile(disk, unit.name)
                held = [kept.elements.nbytes for kept in _held_of(optimizer, unit).values()]
                file.reserve([*held, *self._sizes_to_come(optimizer, params)])
                self._reserved[unit] = file
        except BaseException:
            self._reserved.clear()
            raise

    def has_reserved(self, unit: Unit) -> bool:
        """Return True if the step that `reserve` prepared stores this unit's state."""
        return unit in self._reserved

    def step_and_store(self, optimizer: Any, unit: Unit, step: Callable[[], None]) -> None:
        """Step a unit, and move its state into the reserved file."""
        step()
        held = _held_of(optimizer, unit)
        file = self._reserved.pop(unit)
        file.store({key: kept.elements for key, kept in held.items()})
        for key, kept in held.items():
            kept.put(file.at_rest(key))
        self._files[unit] = file
        file.disk.reserve(max(file.num_bytes for file in self._files.values()))

    def step_of(
        self, optimizer: Any, unit: Unit, take: Take, tensors: Sequence[DTensor]
    ) -> StoredStep:
        """Return a unit's step that reads and writes its state file and uses ``tensors``."""
        return StoredStep(take, tensors, self._files[unit], _held_of(optimizer, unit))


class StoredStep:
    """One step of one unit: `begin`, `step` and `finish`, called by different threads.

    ``take`` is `Apart.step_with`, or its equivalent on the device. ``state`` are the DTensors that
    rest in the file, ``tensors`` the parameters and gradients.
    """

    def __init__(
        self, take: Take, tensors: Sequence[DTensor], file: StateFile, held: dict[Key, _Kept]
    ) -> None:
        values = [kept.value for kept in held.values()]
        self.state = [value for value in values if isinstance(value, DTensor)]
        state = {id(value) for value in self.state}
        self.tensors = [tensor for tensor in tensors if id(tensor) not in state]
        self._held = held
        self._take = take
        self._file = file
        self._buffer: Buffer | None = None
        self._read: Transfer | None = None
        self._write: Future[Transfer] = Future()  # set when the write has started

    def begin(self, *, if_free: bool = False) -> None:
        """Start reading the state; with ``if_free``, only if a buffer is free now."""
        if self._buffer is None and (self._file.disk.has_free or not if_free):
            buffer = self._file.disk.take()
            try:
                self._read = self._file.start_read(buffer.memory)
            except BaseException:
                buffer.release()
                raise
            self._buffer = buffer

    def step(self, following: StoredStep | None) -> None:
        """Start reading the state for the step ``following``, step, and start writing."""
        try:
            self.begin()
            assert self._buffer is not None and self._read is not None
            self._read.wait()
            if following is not None:
                with suppress(StorageError):  # its own step begins again, and raises then
                    following.begin(if_free=True)
            memory = self._buffer.memory
            brought = {key: self._file.brought(key, memory) for key in self._held}
            for key, kept in self._held.items():
                if not self._file.is_at_rest(key, kept.elements):  # the caller replaced it
                    brought[key].copy_(kept.elements)
            for key, replaced in self._take(brought).items():
                brought[key].copy_(replaced)
            write = self._file.start_write(memory, self._buffer.release)
        except BaseException as error:
            if self._buffer is not None:
                self._buffer.release()
            self._write.set_exception(error)
            raise
        self._write.set_result(write)

    def finish(self) -> None:
        """Wait until the state is in its file."""
        self._write.result().wait()
        for key, kept in self._held.items():
            if not self._file.is_at_rest(key, kept.elements):
                kept.put(self._file.at_rest(key))


@dataclass(frozen=True)
class _Kept:
    """A tensor of a parameter's state: sharded like it, or local to this rank, as codes are."""

    state: dict[str, Any]
    name: str

    @property
    def value(self) -> torch.Tensor:
        """The tensor itself."""
        found: torch.Tensor = self.state[self.name]
        return found

    @property
    def elements(self) -> torch.Tensor:
        """This rank's elements, without waiting."""
        return elements_of(self.value) if isinstance(self.value, DTensor) else self.value

    def put(self, elements: torch.Tensor) -> None:
        """Replace the memory of this rank's elements, without waiting."""
        if isinstance(self.value, DTensor):
            set_elements(self.value, elements)
        else:
            self.state[self.name] = elements


def _held_of(optimizer: Any, unit: Unit) -> dict[Key, _Kept]:
    """Return the tensors of a unit's state that have elements, without step counts."""
    all_kept = {
        (id(param.sharded), name): _Kept(state, name)
        for param in unit.params
        for state in [optimizer.state.get(param.sharded, {})]
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim and name not in PLAIN_SCALARS
    }
    return {key: kept for key, kept in all_kept.items() if kept.elements.numel()}
