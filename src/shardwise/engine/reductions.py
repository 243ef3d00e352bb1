"""The reductions of one backward pass: collected in buckets, a few in flight, then ``p.grad``.

Note [Gradients of some ranks only]
A parameter may get a gradient on one rank and none on another. Every rank reduces every unit that
ran, with zeros where it has nothing; one small all-reduce of flags per backward pass says which
parameters had a gradient anywhere. A parameter that had none keeps ``grad`` None, and so its value
and its optimizer state. The flags are read only by a rank that missed a gradient, so there is no
synchronisation with the device in the usual case.
"""

from typing import Protocol

import torch

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import Pending, Site
from shardwise.config import ShardConfig
from shardwise.engine.schedule import ReduceQueue
from shardwise.unit.reduce import Reduction, add_to_grad
from shardwise.unit.states import GradState
from shardwise.unit.unit import Slot, Unit

_FLAGS = Site("flags", "(all)", 0)


class Collected(Protocol):
    """What becomes of the units' gradients, as the engine asks for it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the means that are not in ``p.grad`` yet."""

    def is_waiting(self, unit: Unit) -> bool:
        """Tell whether a unit's reduction is yet to be started."""

    def add(self, unit: Unit) -> None:
        """Reduce a unit's gradients."""

    def keep(self, unit: Unit) -> None:
        """Keep a unit's gradients on this rank."""

    def close(self) -> None:
        """Start what is left, at the end of a backward pass."""

    def finish(self) -> None:
        """Complete every reduction and set ``p.grad``."""

    def drop(self) -> None:
        """Complete every reduction and forget the results."""


class Reductions:
    """Gradients on their way from the units to ``p.grad``."""

    def __init__(self, config: ShardConfig, comm: Comm) -> None:
        self._config = config
        self._comm = comm
        self._queue: ReduceQueue[Unit, Reduction] = ReduceQueue(
            lambda units: Reduction(units, comm, config.precision.reduce),
            config.bucket_bytes,
            config.reduces_in_flight,
            settles_at_close=comm.axes.replicate is not None or not config.stage.shards_state,
        )
        self._flags: tuple[list[Slot], torch.Tensor, list[Pending]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the means that are not in ``p.grad`` yet."""
        return sum(r.nbytes for r in self._queue.all)

    def is_waiting(self, unit: Unit) -> bool:
        """Tell whether a unit is in the bucket, its reduction not started yet."""
        return unit in self._queue.bucket

    def add(self, unit: Unit) -> None:
        """Take a unit's gradients to reduce them, which may wait for the oldest reduction."""
        self._queue.add(unit)

    def keep(self, unit: Unit) -> None:
        """Keep a unit's gradients on this rank, added to those of the window so far."""
        unit.enter_grad_state(GradState.PARTIAL)
        unit.has_local_sum = True
        for slot in unit.slots:
            slot.keep_partial(self._config.precision.reduce or slot.storage.master.dtype)

    def close(self) -> None:
        """Start what is left, and the flags of Note [Gradients of some ranks only]."""
        self._queue.close()
        reductions = self._queue.all
        if not reductions or self._comm.axes.num_ranks == 1:
            return
        units = sorted((u for r in reductions for u in r.units), key=lambda u: u.index)
        slots = [s for u in units for s in u.slots if s.leaf.requires_grad]
        used = self._used_here()
        flags = torch.ones(len(slots), dtype=torch.uint8, device=slots[0].leaf.device)
        missing = [i for i, slot in enumerate(slots) if slot not in used]
        if missing:
            flags[missing] = 0
        self._flags = slots, flags, self._comm.start_any(flags, _FLAGS)

    def finish(self) -> None:
        """Complete every reduction and set ``p.grad``. **State** REDUCING -> REDUCED."""
        self._queue.settle()
        if not self._queue.settled:
            return
        used = self._used_here()
        used |= self._used_elsewhere(used)
        for reduction in self._queue.settled:
            for slot, mean in reduction.finish().items():
                if slot in used:
                    add_to_grad(slot, mean)
        self._end()

    def drop(self) -> None:
        """Complete every reduction and forget the results, after a backward pass that raised."""
        self._queue.settle()
        for reduction in self._queue.settled:
            reduction.finish()
        self._queue.bucket, self._flags = [], None
        self._end()

    def _end(self) -> None:
        units = {unit for reduction in self._queue.settled for unit in reduction.units}
        self._queue.settled = []
        for unit in units:
            unit.enter_grad_state(GradState.REDUCED)
            unit.forget_grads_if_none()

    def _used_here(self) -> set[Slot]:
        return set().union(*(r.used_here for r in self._queue.all))

    def _used_elsewhere(self, used_here: set[Slot]) -> set[Slot]:
        flags, self._flags = self._flags, None
        if flags is None:
            return set()
        slots, values, pendings = flags
        for pending in pendings:
            pending.wait()
        if used_here.issuperset(slots):
            return set()
        return {slot for slot, flag in zip(slots, values.tolist(), strict=True) if flag}
