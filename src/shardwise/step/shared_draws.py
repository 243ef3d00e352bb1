"""Random draws inside the step of an optimizer, the same on all ranks.

Note [Draws of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An optimizer may draw a projection, a probe vector or a probability (APOLLO, PSGD). Ranks have
generators of their own, and a tensor that each rank has drawn by itself is no tensor of the model.
So an optimizer draws from the states of rank 0's generators, torch's, Python's and NumPy's, as one
process would. Afterwards a rank whose generators had other states restores them. Most optimizers
draw nothing: if the first step of one has not moved a generator on any rank, later steps send
nothing, and begin from the state of torch's generator that all ranks had after it. A step with a
closure is left alone, as the model draws in it (dropout).
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.comm.pending import CollectiveId
from shardwise.step.local_step import Args, Kwargs, is_elementwise
from shardwise.tensor.cut import GATHER_SITE, Cut
from shardwise.tensor.draws import generator_states, set_generator_states
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.replaced import params_of

_SITE = CollectiveId("broadcast", "(generators)", 0)
_MAX_BYTES = 1 << 14
_DRAWS = "_shardwise_draws"  # on an optimizer: its `_Draws`


@cache
def draw_as_one_process() -> None:
    """Let optimizers of sharded parameters draw the same on all ranks, from now on.

    See Note [Draws of an optimizer].
    """
    torch_optimizer.register_optimizer_step_pre_hook(_begin)
    torch_optimizer.register_optimizer_step_post_hook(_end)


def _begin(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    if torch.compiler.is_compiling() or is_elementwise(optimizer):
        return
    has_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
    if has_closure or hasattr(optimizer, "optimizers"):  # each of them steps by itself
        return
    draws: _Draws | None = vars(optimizer).get(_DRAWS)
    if draws is None:
        params = params_of(optimizer)
        owned = ((param, owner_of(param)) for param in params)
        found = next(((p.device, by.cut) for p, by in owned if by is not None and by.has_cut), None)
        if found is None or all(axis.size == 1 for axis in (*found[1].comm.axes.all,)):
            return
        draws = vars(optimizer)[_DRAWS] = _Draws(*found)
    if not draws.is_under_way():  # else the class calls its base's step
        draws.call = sys._getframe(1)
        draws.begin()


def _end(optimizer: Optimizer, *_: object) -> None:
    draws: _Draws | None = vars(optimizer).get(_DRAWS)
    if draws is not None and draws.call is sys._getframe(1):
        draws.call = None
        draws.end()


@dataclass(frozen=True)
class GeneratorStates:
    """The states of torch's default generators; of Python's and NumPy's too, or None."""

    of_torch: tuple[torch.Tensor, ...]
    others: tuple[Any, Any] | None

    @classmethod
    def read(cls, device: torch.device, has_others: bool) -> GeneratorStates:
        """Return the present states of the host's generators and the device's."""
        others = (random.getstate(), np.random.get_state()) if has_others else None
        return cls(tuple(generator_states(device)), others)

    def write(self, device: torch.device) -> None:
        """Give the generators these states."""
        set_generator_states(device, self.of_torch)
        if self.others is not None:
            random.setstate(self.others[0])
            np.random.set_state(self.others[1])

    def is_equal(self, other: GeneratorStates) -> bool:
        """Tell whether the next draws would be the same."""
        are_equal = all(map(torch.equal, self.of_torch, other.of_torch))
        if not are_equal or self.others is None or other.others is None:
            return are_equal
        (python, (kind, keys, *rest)), (python_2, (kind_2, keys_2, *rest_2)) = (
            self.others,
            other.others,
        )
        is_same = (python, kind, rest) == (python_2, kind_2, rest_2)
        return is_same and bool(np.array_equal(keys, keys_2))

    def of_first_rank(self, cut: Cut) -> GeneratorStates:
        """Return rank 0's. **Cost** a broadcast of 16 KiB."""
        data = pickle.dumps(([state.numpy() for state in self.of_torch], self.others))
        assert len(data) <= _MAX_BYTES, len(data)
        own = torch.frombuffer(bytearray(data.ljust(_MAX_BYTES, b"\0")), dtype=torch.uint8)
        own = own.to(cut.comm.device)
        cut.comm.broadcast(own, _SITE, also=cut.outer_axes)
        of_torch, others = pickle.loads(own.cpu().numpy().tobytes())
        return GeneratorStates(tuple(map(torch.from_numpy, of_torch)), others)


@dataclass
class _Draws:
    """The draws of one optimizer: ``common`` is the state after a step, equal on all ranks."""

    device: torch.device
    cut: Cut
    common: GeneratorStates | None = None
    has_drawn: bool = False
    call: FrameType | None = None  # of the step under way, or of one that raised
    _own: GeneratorStates | None = None
    _given: GeneratorStates | None = None

    def is_under_way(self) -> bool:
        """Tell whether the step is being called."""
        frame = sys._getframe(1) if self.call is not None else None
        while frame is not None and frame is not self.call:
            frame = frame.f_back
        return frame is not None

    def begin(self) -> None:
        """Give the generators the states of rank 0's, or torch's that of the last step.

        **Cost** one broadcast of 16 KiB in the first step, and in each if the first has drawn.
        """
        is_shared = self.has_drawn or self.common is None
        self._own = GeneratorStates.read(self.device, has_others=is_shared)
        self._given = self.common
        if is_shared or self._given is None:
            self._given = self._own.of_first_rank(self.cut)
        self._given.write(self.device)

    def end(self) -> None:
        """Note whether the step has drawn; give other generators than rank 0's their state back."""
        if self._own is None or self._given is None:
            return
        after = GeneratorStates.read(self.device, has_others=self._own.others is not None)
        moved = not after.is_equal(self._given)
        if self.common is None:  # the first step; a rank may have had nothing to draw
            self.has_drawn = self._any(moved)
        if not moved or not self._own.is_equal(self._given):
            self._own.write(self.device)
        self.common = GeneratorStates(after.of_torch, None)
        self._own = None

    def _any(self, moved: bool) -> bool:
        """Tell whether a generator has moved on any rank. **Cost** one number over each axis."""
        found = torch.tensor(float(moved), device=self.cut.comm.device)
        for axis in (*self.cut.comm.axes.all, *self.cut.outer_axes):
            found = self.cut.comm.max(found, axis, GATHER_SITE)
        return bool(found)
