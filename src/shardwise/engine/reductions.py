"""The reductions of one backward pass: collected in buckets, a few in flight, then ``p.grad``.

Note [Gradients of some ranks only]
A parameter may get a gradient on one rank and none on another. Every rank reduces every unit that
ran, with zeros where it has nothing; one small all-reduce of flags per backward pass says which
parameters had a gradient anywhere. A parameter that had none keeps ``grad`` None, and so its value
and its optimizer state. The flags are read only by a rank that missed a gradient, so there is no
synchronisation with the device in the usual case.
"""

import torch

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import Pending, Site
from shardwise.config import ShardConfig
from shardwise.unit.reduce import Reduction, add_to_grad
from shardwise.unit.states import GradState
from shardwise.unit.unit import Slot, Unit

_FLAGS = Site("flags", "(all)", 0)


class Reductions:
    """Gradients on their way from the units to ``p.grad``."""

    def __init__(self, config: ShardConfig, comm: Comm) -> None:
        self._config = config
        self._comm = comm
        self._bucket: list[Unit] = []
        self._in_flight: list[Reduction] = []
        self._settled: list[Reduction] = []
        self._flags: tuple[list[Slot], torch.Tensor, list[Pending]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the means that are not in ``p.grad`` yet."""
        return sum(r.nbytes for r in self._all)

    @property
    def _all(self) -> list[Reduction]:
        return self._settled + self._in_flight

    def is_waiting(self, unit: Unit) -> bool:
        """Tell whether a unit is in the bucket, its reduction not started yet."""
        return unit in self._bucket

    def add(self, unit: Unit) -> None:
        """Take a unit's gradients; a full bucket starts, which may wait for the oldest reduction.

        **Cost** small units share one reduction of ``bucket_bytes``.
        """
        if unit in self._bucket:
            return
        self._bucket.append(unit)
        if sum(u.full_bytes for u in self._bucket) >= self._config.bucket_bytes:
            self._start_bucket()

    def _start_bucket(self) -> None:
        if not self._bucket:
            return
        reduction = Reduction(self._bucket, self._comm, self._config.precision.reduce)
        self._bucket = []
        reduction.start()
        self._in_flight.append(reduction)
        self._settle(self._config.reduces_in_flight)

    def _settle(self, num_left: int) -> None:
        """Wait for the oldest reductions until ``num_left`` are in flight."""
        while len(self._in_flight) > num_left:
            self._in_flight[0].settle()
            self._settled.append(self._in_flight.pop(0))

    def close(self) -> None:
        """Start what is left, and the flags of Note [Gradients of some ranks only].

        What comes after a reduction (stage 0, a replicate axis) is started here too, so that no
        collective is left for the first reader of ``p.grad``, who may be one rank alone.
        """
        self._start_bucket()
        if self._comm.axes.replicate is not None or not self._config.stage.shards_state:
            self._settle(0)
        if not self._all or self._comm.axes.num_ranks == 1:
            return
        slots = [s for r in self._all for u in r.units for s in u.slots if s.leaf.requires_grad]
        used = self._used_here()
        flags = torch.ones(len(slots), dtype=torch.uint8, device=slots[0].leaf.device)
        missing = [i for i, slot in enumerate(slots) if slot not in used]
        if missing:
            flags[missing] = 0
        self._flags = slots, flags, self._comm.start_any(flags, _FLAGS)

    def finish(self) -> None:
        """Complete every reduction and set ``p.grad``. **State** REDUCING -> REDUCED."""
        self._settle(0)
        if not self._settled:
            return
        used = self._used_here() | self._used_elsewhere()
        for reduction in self._settled:
            for slot, mean in reduction.finish().items():
                if slot in used:
                    add_to_grad(slot, mean)
        self._end()

    def drop(self) -> None:
        """Complete every reduction and forget the results, after a backward pass that raised."""
        self._settle(0)
        for reduction in self._settled:
            reduction.finish()
        self._bucket, self._flags = [], None
        self._end()

    def _end(self) -> None:
        units = {unit for reduction in self._settled for unit in reduction.units}
        self._settled = []
        for unit in units:
            unit.enter_grad_state(GradState.REDUCED)
            unit.forget_grads_if_none()

    def _used_here(self) -> set[Slot]:
        return set().union(*(r.used_here for r in self._all))

    def _used_elsewhere(self) -> set[Slot]:
        flags, self._flags = self._flags, None
        if flags is None:
            return set()
        slots, values, pendings = flags
        for pending in pendings:
            pending.wait()
        if self._used_here().issuperset(slots):
            return set()
        return {slot for slot, flag in zip(slots, values.tolist(), strict=True) if flag}
