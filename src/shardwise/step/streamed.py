"""Steps on the device for units whose state rests on the host.

Note [Steps on the device]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A unit's parameters, gradients and state are copied to the device in loads of a fixed size. A copy
of the user's optimizer steps a load there, and parameters and state are copied back. A parameter
larger than a load is stepped in pieces, so this is for elementwise optimizers. One thread enqueues
the loads of all units, in the order in which the next forward pass needs the units. Another thread
waits until a unit is back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.device import Event
from shardwise.homes import LOAD_BYTES
from shardwise.offload.lane import Lane
from shardwise.tensor.background_step import elements_of, set_elements
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.home import Home
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Unit

State = dict[tuple[int, str], torch.Tensor]  # see `Apart.step_with`


class StreamedStep:
    """The step of some parameters on the device: `step` and `finish`, called by two threads."""

    def __init__(
        self, part: Any, unit: Unit, home: Home, lane: Lane, called: Event, state: State
    ) -> None:
        self._part = part
        self._mirrors = _Mirrors(unit)
        self._loads = part.loads(LOAD_BYTES, self._mirrors.of, home.memory, state)
        self._lane = lane
        self._called = called  # work enqueued before may still read the mirrors
        self._back: Future[Event | None] = Future()

    def step(self) -> None:
        """Enqueue all loads."""
        back = None
        try:
            self._lane.follow(self._called)
            for load in self._loads:
                back = self._lane.run(load)
        except BaseException as error:
            self._back.set_exception(error)
            raise
        self._back.set_result(back)

    def finish(self) -> None:
        """Wait until all loads are back on the host."""
        back = self._back.result()
        if back is not None:
            back.wait()
        self._mirrors.settle()
        self._part.hand_on()

    def __call__(self) -> None:
        """Step, and wait."""
        self.step()
        self.finish()


class _Mirrors:
    """Device copies of a unit's parameters, which receive their new values too.

    A copy is current after the step if it was before, and if no other write changed the slices.
    """

    def __init__(self, unit: Unit) -> None:
        self._versions = {
            storage: storage.version
            for storage in unit.storages
            if storage.mirror(0) is not None and storage.mirrored_version == storage.version
        }

    def of(self, param: Any) -> torch.Tensor | None:
        """Return a parameter's device copy or None; called once per piece that will change."""
        owner = owner_of(param)
        storage: Storage | None = owner.storage if owner is not None and owner.has_storage else None
        if storage is None or storage not in self._versions:
            return None
        self._versions[storage] += 1
        return storage.mirror(owner.index)

    def settle(self) -> None:
        """Record that the new values have arrived."""
        for storage, version in self._versions.items():
            storage.note_mirrored(version)


class Streaming:
    """The lane of one optimizer's steps, made when the first unit needs it."""

    def __init__(self) -> None:
        self._lane: Lane | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the lane's buffers on the device."""
        return 0 if self._lane is None else self._lane.num_bytes

    def step_of(self, unit: Unit, part: Any) -> StreamedStep:
        """Return the step of a part of a unit with a home; called inside the optimizer's step."""
        return self._step(unit, part, _moment(unit), {})

    def step_with_of(self, unit: Unit, part: Any) -> Callable[[State], State]:
        """Return an `Apart.step_with` that replaces nothing; called as `step_of` is."""
        called = _moment(unit)

        def step_with(state: State) -> State:
            self._step(unit, part, called, state)()
            return {}

        return step_with

    def _step(self, unit: Unit, part: Any, called: Event, state: State) -> StreamedStep:
        assert unit.home is not None
        if self._lane is None:
            self._lane = Lane(unit.home.device, unit.home.time)
        return StreamedStep(part, unit, unit.home, self._lane, called, state)


def _moment(unit: Unit) -> Event:
    """Record an event on the caller's stream."""
    assert unit.home is not None
    return unit.home.time.current_stream().record()


def lock_pages(optimizer: Any, unit: Unit) -> None:
    """Move a unit's state into page-locked memory.

    **Cost** one copy of each tensor that is not page-locked; a check of each tensor per step.
    """
    home = unit.home
    if home is None or not home.is_pinned:
        return
    for param in unit.params:
        state = optimizer.state.get(param.sharded, {})
        for key, value in state.items():
            rests_in_file = home.files.optimizer is not None
            if not isinstance(value, torch.Tensor) or not value.ndim or rests_in_file:
                continue
            held = elements_of(value) if isinstance(value, DTensor) else value
            if held.numel() and not home.time.is_page_locked(held):
                locked = home.memory(held.numel(), held.dtype).view(held.shape).copy_(held)
                if isinstance(value, DTensor):
                    set_elements(value, locked)
                else:
                    state[key] = locked
