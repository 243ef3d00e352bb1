"""One step of one unit: fetch its state, compute, put the state back.

Note [A step in three parts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A `UnitStep` holds where the state is kept and where the arithmetic runs. Its caller decides when
the parts run: one after another, or on two threads. With the state in a file, a buffer of the disk
holds the state of one unit. While a unit is stepped in one buffer, the
next unit's state is read into another, and the previous unit's is written from a third. Host memory
is bounded by three times the largest unit's state, and the disk reads and writes at the same time.
A reader of the state's tensors waits for the write, as a reader of parameters waits for the step.

Note [Steps on the device]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A unit's parameters, gradients and state are copied to the device in loads of a fixed size. A copy
of the user's optimizer steps a load there, and parameters and state are copied back. A parameter
larger than a load is stepped in pieces, so this is for elementwise optimizers. One thread enqueues
the loads of all units, in the order in which the next forward pass needs the units. Another thread
waits until a unit is back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.device import Event
from shardwise.errors import StorageError
from shardwise.homes import LOAD_BYTES
from shardwise.offload.disk import BufferRead
from shardwise.offload.staging import StagingBuffers
from shardwise.step.local_step import Key, PlainStep
from shardwise.step.state_files import StateFile, StateTensor
from shardwise.tensor.elements import elements_of, set_elements
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.home import Home
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Unit


class UnitStep:
    """One step of one unit, or of parameters of no unit: `fetch`, `compute`, `put_back`.

    ``file`` holds the state ``held`` between steps; None if it is in memory. ``device`` computes
    the step; None is the host. ``tensors`` are those that the step uses. A reader of ``computed``
    waits for `compute`, a reader of ``put`` for `put_back`.
    """

    def __init__(
        self,
        plain: PlainStep,
        tensors: Sequence[DTensor],
        file: StateFile | None = None,
        held: Mapping[Key, StateTensor] | None = None,
        device: OnDevice | None = None,
    ) -> None:
        self._plain = plain
        self._device = device
        self.file = file
        self._held = held or {}
        self.computed: Sequence[DTensor] = tensors
        self.put: Sequence[DTensor] = ()
        if file is not None:
            values = [tensor.value for tensor in self._held.values()]
            self.put = [value for value in values if isinstance(value, DTensor)]
            put = {id(value) for value in self.put}
            self.computed = [tensor for tensor in tensors if id(tensor) not in put]
        elif device is not None:
            self.computed = ()
            self.put = tensors
        self._reading: BufferRead | None = None
        self._putting: Future[Callable[[], None]] = Future()  # a function that waits for the end

    @property
    def puts_back(self) -> bool:
        """Tell whether `put_back` has something to wait for."""
        return self.file is not None or self._device is not None

    def __call__(self) -> None:
        """Step, and wait."""
        self.compute()
        self.put_back()

    def fetch(self, *, if_free: bool = False) -> None:
        """Start reading the state from its file; with ``if_free``, only if a buffer is free now."""
        if self.file is None or self._reading is not None:
            return
        if self.file.disk.pool.num_free or not if_free:
            self._reading = self.file.start_reading()

    def compute(self, following: UnitStep | None = None) -> None:
        """Step; meanwhile fetch for the step ``following``. Start to put the state back."""
        try:
            self._putting.set_result(self._compute(following))
        except BaseException as error:
            if self._reading is not None:
                self._reading.release()
            self._putting.set_exception(error)
            raise

    def _compute(self, following: UnitStep | None) -> Callable[[], None]:
        """Return the function that waits until the state is back."""
        if self.file is None:
            if self._device is not None:
                return self._device.start(self._plain)
            self._plain()
            return _return_at_once
        self.fetch()
        assert self._reading is not None
        memory = self._reading.wait()
        if following is not None:
            with suppress(StorageError):  # that step fetches again, and raises then
                following.fetch(if_free=True)
        in_buffer = {key: self.file.view_in(memory, key) for key in self._held}
        for key, held in self._held.items():
            if not self.file.is_mapped(key, held.elements):  # the caller replaced it
                in_buffer[key].copy_(held.elements)
        self._plain.use_state(in_buffer)
        if self._device is not None:
            self._device.start(self._plain)()
        else:
            for key, replaced in self._plain().items():
                in_buffer[key].copy_(replaced)
        return self.file.start_write(memory, self._reading.release).wait

    def put_back(self) -> None:
        """Wait until the state is in its file or in host memory again."""
        self._putting.result()()
        for key, held in self._held.items():
            if self.file is not None and not self.file.is_mapped(key, held.elements):
                held.put(self.file.mapped(key))


def _return_at_once() -> None:
    pass


class OnDevice:
    """Computation of one unit's step on the device; created inside the optimizer's step.

    Copies of parameters that stay on the device receive the new values too. Such a copy is current
    after the step if it was before, and if no other write changed the slices.
    """

    def __init__(self, unit: Unit, home: Home, staging: StagingBuffers) -> None:
        self._staging = staging
        self._make_memory = home.allocate
        self._called = home.time.current_stream().record()  # earlier work may read the copies
        self._versions = {
            storage: storage.version
            for storage in unit.storages
            if storage.mirror(0) is not None and storage.mirrored_version == storage.version
        }

    def start(self, plain: PlainStep) -> Callable[[], None]:
        """Enqueue a step; return the function that waits until all loads are back on the host."""
        last: Event | None = None  # the end of the last load
        self._staging.follow(self._called)
        for load in plain.loads(LOAD_BYTES, self._mirror, self._make_memory):
            last = self._staging.run(load)

        def wait() -> None:
            if last is not None:
                last.wait()
            for storage, version in self._versions.items():
                storage.note_mirrored(version)
            plain.write_back()

        return wait

    def _mirror(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's copy or None; called once per piece that will change."""
        owner = owner_of(param)
        storage: Storage | None = owner.storage if owner is not None and owner.has_storage else None
        if storage is None or storage not in self._versions:
            return None
        self._versions[storage] += 1
        return storage.mirror(owner.index)


def lock_pages(optimizer: Optimizer, unit: Unit, home: Home) -> None:
    """Move a unit's state into page-locked memory, if it is in host memory.

    **Cost** one copy of each tensor that is not page-locked; a check of each tensor per step.
    """
    if not home.is_pinned or home.files.optimizer is not None:
        return
    for param in unit.params:
        state = optimizer.state.get(param.sharded, {})
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            held = elements_of(value) if isinstance(value, DTensor) else value
            if held.numel() and not home.time.is_page_locked(held):
                locked = home.allocate(held.numel(), held.dtype).view(held.shape).copy_(held)
                if isinstance(value, DTensor):
                    set_elements(value, locked)
                else:
                    state[key] = locked
