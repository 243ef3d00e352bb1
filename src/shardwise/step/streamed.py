"""Steps on the device, of units whose state rests on the host.

Note [Steps on the device]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A unit's parameters, gradients and state pass the device in loads of a fixed size, whatever the size
of the unit: an optimizer like the user's steps what is there, and parameters and state go back. A
parameter that is larger than a load passes it in pieces, so that is for optimizers that work
element by element. One thread enqueues the loads of all units, in the order in which the next
forward pass needs these; another waits until a unit is back.
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
    """The step of some parameters on the device: `step` and `finish`, by different threads."""

    def __init__(
        self, part: Any, unit: Unit, home: Home, lane: Lane, called: Event, state: State
    ) -> None:
        self._part = part
        self._mirrors = _Mirrors(unit)
        self._loads = part.loads(LOAD_BYTES, self._mirrors.of, home.memory, state)
        self._lane = lane
        self._called = called  # what was enqueued before may still read the mirrors
        self._back: Future[Event | None] = Future()

    def step(self) -> None:
        """Enqueue all of it."""
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
        """Return when all is back on the host."""
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
    """What the device keeps of a unit's parameters, which gets their new values as well.

    It is as new as the slices again if it was so before, and nobody else has changed them since.
    """

    def __init__(self, unit: Unit) -> None:
        self._versions = {
            storage: storage.version
            for storage in unit.storages
            if storage.mirror(0) is not None and storage.mirrored_version == storage.version
        }

    def of(self, param: Any) -> torch.Tensor | None:
        """Return what there is for a parameter, of which one piece is going to change."""
        owner = owner_of(param)
        storage: Storage | None = None if owner is None else owner.storage
        if storage is None or storage not in self._versions:
            return None
        self._versions[storage] += 1
        return storage.mirror(owner.index)

    def settle(self) -> None:
        """Note that they have arrived."""
        for storage, version in self._versions.items():
            storage.note_mirrored(version)


class Streaming:
    """The lane that one optimizer's steps take, made when the first unit needs it."""

    def __init__(self) -> None:
        self._lane: Lane | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers on the device."""
        return 0 if self._lane is None else self._lane.num_bytes

    def step_of(self, unit: Unit, part: Any) -> StreamedStep:
        """Return the step of a part of a unit with a home; called where the optimizer's step is."""
        return self._step(unit, part, _moment(unit), {})

    def step_with_of(self, unit: Unit, part: Any) -> Callable[[State], State]:
        """Return what does as `Apart.step_with`, but replaces nothing; called as `step_of` is."""
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
    """Return the moment of the caller's stream."""
    assert unit.home is not None
    return unit.home.time.current_stream().record()


def lock_pages(optimizer: Any, unit: Unit) -> None:
    """Let a unit's state rest in page-locked memory, wherever it came from.

    **Cost** a copy of what is not, once; a look at each tensor in every step.
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
