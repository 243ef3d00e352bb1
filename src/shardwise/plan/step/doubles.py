"""Units and reductions that only count bytes: what the engine's schedule is played with.

They answer the schedule as `unit.unit.Unit` and `unit.reduce.Reduction` do, and book what those
allocate, in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.engine.buckets import ReduceQueue
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import TapeUnit
from shardwise.plan.step.footprint import Footprint, Reduce, bucket_of
from shardwise.plan.step.messages import Message
from shardwise.plan.step.offloading import Offloading
from shardwise.plan.step.program import AxisName, CollectiveKind, Recorder
from shardwise.stages import UnitSettings


@dataclass(frozen=True)
class PlayContext:
    """The parts of a played step that its units share.

    ``keeps_buffers``: the memory of the means is used again in the next step.
    """

    recorder: Recorder
    offloading: Offloading
    candidate: Candidate
    settings: UnitSettings
    keeps_buffers: bool


class UnitDouble:
    """A unit of the tape, in the states that `unit.states` names.

    ``grads`` are the bytes of full gradients that autograd has written and no reduction has taken,
    ``sums`` those of sums over micro-batches; ``has_grad`` tells whether ``p.grad`` is there, and
    ``buffer`` whether a gradient buffer is kept for the next step ("kept", or "lent" to p.grad).
    """

    def __init__(
        self, index: int, weight: Footprint, facts: TapeUnit, context: PlayContext
    ) -> None:
        self.index = index
        self.axis: AxisName = "shard" if facts.experts_over is None else "efsdp"
        self.settings = replace(context.settings, reads_in_backward=facts.backward_reads_params)
        self.weight = weight
        self.full_bytes = weight.full_bytes
        self.is_trained = weight.reduce is not None
        self.in_backward = False
        self._recorder, self._offloading = context.recorder, context.offloading
        self._has_copy = self.is_fresh = False  # a copy on the device of offloaded slices
        self.go_stale()
        self.grads = self.sums = 0
        self.has_grad = False
        self.buffer = ""
        self._state = "sharded"
        self._staging = 0
        self._pending: int | None = None

    @property
    def is_resident(self) -> bool:
        """Tell whether to gather it would send nothing."""
        return self._state == "gathering" or self.is_fresh

    def read_ahead(self) -> None:
        """Do nothing: a plan reads from disk when it fetches."""

    def start_unshard(self) -> None:
        """Start gathering: allocate, cast, stage, send."""
        if self._state != "sharded":
            return
        self._state = "gathering"
        message, weight, recorder = self.weight.gather, self.weight, self._recorder
        if self.is_fresh or message is None:
            return
        self.is_fresh = True
        before = recorder.enter("unshard")
        recorder.add("param_full", weight.freed_bytes)
        copied = 0 if self._has_copy else weight.copied_bytes
        self._has_copy = True
        if weight.fetched_bytes + copied:
            recorder.touch({"gather_staging": weight.fetch_staging})
            fetched, read = weight.fetched_bytes + copied, weight.read_bytes + copied
            self._offloading.fetch(fetched, read, self.index, recorder)
        recorder.add("gather_staging", message.staging)
        recorder.touch({"gather_staging": message.packing})
        if message.num_messages or message.payload:
            self._pending = recorder.start("all_gather", self.axis, message, self.index)
        else:
            recorder.move(message.before, self.index)
        self._staging = message.staging
        recorder.phase = before

    def finish_unshard(self) -> None:
        """Wait for the gather, unpack."""
        self.start_unshard()
        if self._state != "gathering":
            return
        recorder, message = self._recorder, self.weight.gather
        if self._pending is not None and message is not None:
            before = recorder.enter("unshard")
            recorder.finish(self._pending, message, self.index)
            recorder.phase, self._pending = before, None
        else:
            recorder.wait_for_fetched()
        recorder.add("gather_staging", -self._staging)
        self._staging = 0
        self._state = "full"

    def reshard(self) -> None:
        """Free the full copy where the stage frees it."""
        if self._state == "gathering":
            self.finish_unshard()
        if self._state == "full":
            if self.weight.freed_bytes:
                self._recorder.add("param_full", -self.weight.freed_bytes)
                self.is_fresh = False
            self._state = "sharded"

    def keep(self) -> None:
        """Add a micro-batch's gradients to the window's sum, in the dtype of the sum."""
        weight, recorder = self.weight, self._recorder
        if not weight.sums_apart:
            if self.sums:  # autograd has added them
                recorder.add("grad_full", -self.grads)
            else:
                self.sums = self.grads
            self.grads = 0
            return
        held, most = weight.keep_next if self.sums else weight.keep_first
        # Under tensor parallelism an embedding's gradient has the rows of all ranks until it is
        # reduced.
        assert weight.reduce is not None and weight.reduce_sums is not None
        others = max(self.grads - weight.written_grads, 0)
        cast = others * weight.reduce_sums.grads // weight.reduce.grads
        held += -others if self.sums else cast - others
        most += cast if most or not self.sums else 0
        recorder.touch({"grad_full": most})
        recorder.add("grad_full", held)
        self.sums += self.grads + held
        self.grads = 0

    def drop_means(self) -> None:
        """Free the means on the device; a buffer that the unit keeps stays."""
        if self.buffer:
            self.buffer = "kept"
        elif self.weight.reduce is not None:
            self._recorder.add("grad_shards", -self.weight.reduce.out)

    def evict_means(self) -> None:
        """Bring the means to where offloaded slices are; the device has them no more."""
        if self.weight.is_away:
            self._offloading.send_grads(self.weight, self.index, self._recorder)
            self.drop_means()

    def go_stale(self) -> None:
        """Note that the optimizer has changed the slices; on the device, also what stays there."""
        weight = self.weight
        self._has_copy = weight.is_away and self._offloading.steps_on_device
        self.is_fresh = weight.gather is None or (self._has_copy and weight.is_mirrored)


class ReductionDouble:
    """The reduction of one bucket; ``defers``: its sum over replicas comes with a later one."""

    def __init__(self, units: Sequence[UnitDouble], context: PlayContext, defers: bool) -> None:
        self.units = list(units)
        self._context, self._recorder = context, context.recorder
        self._unit, self._axis = self.units[0].index, self.units[0].axis
        self._defers = defers
        self._weights: list[Reduce] = []
        self._message = Message()
        self._grads = 0
        self._pending: int | None = None
        self._gathers: list[tuple[int | None, Message]] = []

    def start(self) -> None:
        """Take the gradients, allocate means and staging, send."""
        recorder = self._recorder
        before = recorder.enter("reduce")
        for unit in self.units:
            self._take(unit)
        message = self._message = bucket_of(self._weights)
        recorder.add("reduce_staging", message.staging)
        recorder.touch({"reduce_staging": message.packing})
        kind: CollectiveKind = "all_to_all" if message.parcels else "reduce_scatter"
        self._pending = recorder.start(
            kind, self._axis, message, self._unit, label="reduce_scatter"
        )
        recorder.phase = before

    def _take(self, unit: UnitDouble) -> None:
        weight, recorder = unit.weight, self._recorder
        summed = bool(unit.sums)
        reduce = weight.reduce_sums if summed else weight.reduce
        assert reduce is not None
        if summed and weight.sums_apart and unit.grads:
            unit.keep()
        missing = reduce.grads - unit.grads - unit.sums
        others = self._context.candidate.tp - 1
        if missing < 0 and others:  # rows of other ranks go when its own are copied out of them
            recorder.touch({"grad_full": -missing // others})
        if missing > 0 or others:  # parameters without a gradient contribute zeros
            recorder.add("grad_full", missing)
            self._grads += missing
        self._grads += unit.grads + unit.sums
        unit.grads = unit.sums = 0
        self._weights.append(reduce)
        if not (self._context.keeps_buffers and unit.buffer == "kept"):
            recorder.add("grad_shards", reduce.out)
        if self._context.keeps_buffers:
            unit.buffer = "lent"

    def wait(self) -> None:
        """Wait, sum, free the sent buffers; start the collectives that follow."""
        recorder, message = self._recorder, self._message
        before = recorder.enter("reduce")
        recorder.touch({"reduce_staging": message.summing})
        recorder.finish(self._pending, message, self._unit)
        recorder.add("reduce_staging", -message.staging)
        recorder.add("grad_full", -self._grads)
        for weight in () if self._defers else self._weights:
            for message in weight.replicas:
                recorder.touch({"reduce_staging": message.staging})
                op = recorder.start("all_reduce", "replicate", message, self._unit, counts=2)
                recorder.finish(op, message, self._unit)
            for message in weight.means:
                recorder.add("gather_staging", message.staging)
                op = recorder.start("all_gather", self._axis, message, self._unit)
                self._gathers.append((op, message))
        for unit in self.units:
            if not self._gathers:
                unit.evict_means()
        recorder.phase = before

    def finish(self) -> None:
        """Wait for the gathered means of stage 0."""
        for op, message in self._gathers:
            self._recorder.finish(op, message, self._unit)
            self._recorder.add("gather_staging", -message.staging)
        if self._gathers:
            for unit in self.units:
                unit.evict_means()


class ReductionsDouble:
    """Stands for `engine.reductions.Reductions`."""

    def __init__(self, context: PlayContext, waits_at_close: bool) -> None:
        self._context = context
        self.defers = False  # in the micro-batch under way
        self._queue: ReduceQueue[UnitDouble, ReductionDouble] = ReduceQueue(
            lambda units: ReductionDouble(units, context, self.defers),
            context.candidate.bucket_bytes,
            context.candidate.reduces_in_flight,
            waits_at_close,
            lambda unit: unit.axis,
        )

    def is_waiting(self, unit: UnitDouble) -> bool:
        """Tell whether a unit is in the bucket."""
        return self._queue.holds(unit)

    def add(self, unit: UnitDouble) -> None:
        """Reduce a unit's gradients, if this rank or another one may have any."""
        if self._context.candidate.data_parallel > 1 or unit.grads + unit.sums > 0:
            self._queue.add(unit)

    def keep(self, unit: UnitDouble) -> None:
        """Keep a unit's gradients for the last micro-batch."""
        unit.keep()

    def close(self) -> None:
        """Start the remaining reductions."""
        self._queue.close()

    def finish(self) -> None:
        """Complete every reduction and book the means as ``p.grad``, or add them to it."""
        recorder, added = self._context.recorder, 0
        taken = self._queue.take()
        before = recorder.enter("reduce")
        for reduction in taken:
            reduction.finish()
            for unit in reduction.units:
                if unit.weight.is_away or unit.weight.reduce is None:
                    continue  # the host adds them
                out = unit.weight.reduce.out
                if not unit.weight.updated:  # zeros that no ``p.grad`` takes
                    added += 0 if unit.buffer else out
                    unit.buffer = unit.buffer and "kept"
                    continue
                if unit.has_grad:
                    unit.buffer = ""
                    added += out
                    recorder.move(out * 3, unit.index)  # reads both, writes one
                unit.has_grad = True
        recorder.add("grad_shards", -added)
        recorder.phase = before

    def zero_grad(self, units: Sequence[UnitDouble]) -> None:
        """Drop ``p.grad``; a buffer that the unit keeps stays."""
        for unit in units:
            if unit.has_grad:
                unit.has_grad = False
                unit.drop_means()
