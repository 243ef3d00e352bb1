"""Doubles of units and reductions, which count bytes, for playing the engine's schedule.

They have the interface of `unit.unit.Unit` and `engine.reductions.Reduction`, and book the bytes
that those allocate, in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.engine.buckets import ReduceQueue
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import TapeUnit
from shardwise.plan.step.footprint import Footprint, ReduceBytes, bucket_of
from shardwise.plan.step.messages import Message
from shardwise.plan.step.offloading import Offloading
from shardwise.plan.step.program import AxisName, CollectiveKind, StepRecorder
from shardwise.stages import UnitSettings


@dataclass(frozen=True)
class PlayContext:
    """The parts of a played step that its units share.

    ``keeps_buffers``: the memory of the means is used again in the next step.
    """

    recorder: StepRecorder
    offloading: Offloading
    candidate: Candidate
    settings: UnitSettings
    keeps_buffers: bool


class UnitDouble:
    """A unit of the tape, in the states of `unit.states`.

    ``grads`` are the bytes of full gradients that autograd has written and that are not in a
    reduction yet, ``sums`` those of sums over micro-batches. ``has_grad``: ``p.grad`` is set.
    ``buffer`` is "kept" if the unit keeps a gradient buffer for the next step, "lent" while
    ``p.grad`` uses it, and else "".
    """

    def __init__(
        self, index: int, footprint: Footprint, facts: TapeUnit, context: PlayContext
    ) -> None:
        self.index = index
        self.axis: AxisName = "shard" if facts.experts_over is None else "efsdp"
        self.settings = replace(context.settings, reads_in_backward=facts.backward_reads_params)
        self.footprint = footprint
        self.full_bytes = footprint.full_bytes
        self.is_trained = footprint.reduce is not None
        self.in_backward = False
        self._recorder = context.recorder
        self._offloading = context.offloading
        self._has_copy = False  # of offloaded slices, on the device
        self.is_fresh = False
        self.go_stale()
        self.grads = 0
        self.sums = 0
        self.has_grad = False
        self.buffer = ""
        self._state = "sharded"
        self._staging = 0
        self._pending: int | None = None

    @property
    def is_resident(self) -> bool:
        """True if a gather sends nothing."""
        return self._state == "gathering" or self.is_fresh

    def read_ahead(self) -> None:
        """Do nothing: a plan reads from disk when it fetches."""

    def start_unshard(self) -> None:
        """Start gathering: allocate, cast, stage, send."""
        if self._state != "sharded":
            return
        self._state = "gathering"
        footprint, recorder = self.footprint, self._recorder
        message = footprint.gather
        if self.is_fresh or message is None:
            return
        self.is_fresh = True
        before = recorder.enter("unshard")
        recorder.add("param_full", footprint.freed_bytes)
        copied = 0 if self._has_copy else footprint.copied_bytes
        self._has_copy = True
        fetched = footprint.fetched_bytes + copied
        if fetched:
            recorder.record_temporary({"gather_staging": footprint.fetch_staging})
            self._offloading.fetch(fetched, footprint.read_bytes + copied, self.index, recorder)
        recorder.add("gather_staging", message.staging)
        recorder.record_temporary({"gather_staging": message.packing})
        if message.num_messages or message.payload:
            self._pending = recorder.start_collective("all_gather", self.axis, message, self.index)
        else:
            recorder.move(message.before, self.index)
        self._staging = message.staging
        recorder.phase = before

    def finish_unshard(self) -> None:
        """Wait for the gather, unpack."""
        self.start_unshard()
        if self._state != "gathering":
            return
        recorder, message = self._recorder, self.footprint.gather
        if self._pending is not None and message is not None:
            before = recorder.enter("unshard")
            recorder.finish_collective(self._pending, message, self.index)
            recorder.phase = before
            self._pending = None
        else:
            recorder.wait_for_fetches()
        recorder.add("gather_staging", -self._staging)
        self._staging = 0
        self._state = "full"

    def reshard(self) -> None:
        """Free the full copy if the stage frees it."""
        if self._state == "gathering":
            self.finish_unshard()
        if self._state == "full":
            if self.footprint.freed_bytes:
                self._recorder.add("param_full", -self.footprint.freed_bytes)
                self.is_fresh = False
            self._state = "sharded"

    def keep(self) -> None:
        """Add a micro-batch's gradients to the window's sum, in the dtype of the sum."""
        footprint, recorder = self.footprint, self._recorder
        if not footprint.sums_in_other_dtype:
            if self.sums:  # autograd has added them
                recorder.add("grad_full", -self.grads)
            else:
                self.sums = self.grads
            self.grads = 0
            return
        held, most = footprint.keep_next if self.sums else footprint.keep_first
        # Under tensor parallelism an embedding's gradient has the rows of all ranks until it is
        # reduced.
        assert footprint.reduce is not None and footprint.reduce_sums is not None
        others = max(self.grads - footprint.written_grads, 0)
        cast = others * footprint.reduce_sums.grads // footprint.reduce.grads
        held += -others if self.sums else cast - others
        most += cast if most or not self.sums else 0
        recorder.record_temporary({"grad_full": most})
        recorder.add("grad_full", held)
        self.sums += self.grads + held
        self.grads = 0

    def drop_means(self) -> None:
        """Free the means on the device; a buffer that the unit keeps stays."""
        if self.buffer:
            self.buffer = "kept"
        elif self.footprint.reduce is not None:
            self._recorder.add("grad_shards", -self.footprint.reduce.out)

    def evict_means(self) -> None:
        """Copy the means to the tier of offloaded gradients, and free them on the device."""
        if self.footprint.is_offloaded:
            self._offloading.send_grads(self.footprint, self.index, self._recorder)
            self.drop_means()

    def go_stale(self) -> None:
        """Mark full copies as stale, as the optimizer has changed the slices.

        A step on the device also updates the copy that stays there.
        """
        footprint = self.footprint
        self._has_copy = footprint.is_offloaded and self._offloading.steps_on_device
        self.is_fresh = footprint.gather is None or (self._has_copy and footprint.is_mirrored)


class ReductionDouble:
    """The reduction of one bucket.

    With ``defers``, the sum over replicas is left to the reduction of a later micro-batch.
    """

    def __init__(self, units: Sequence[UnitDouble], context: PlayContext, defers: bool) -> None:
        self.units = list(units)
        self._context = context
        self._recorder = context.recorder
        self._unit = self.units[0].index
        self._axis = self.units[0].axis
        self._defers = defers
        self._reduce_bytes: list[ReduceBytes] = []
        self._message = Message()
        self._grads = 0
        self._pending: int | None = None
        self._gathers: list[tuple[int | None, Message]] = []

    def start(self) -> None:
        """Take the gradients of the units, allocate means and staging, and send."""
        recorder = self._recorder
        before = recorder.enter("reduce")
        for unit in self.units:
            self._take_grads(unit)
        message = self._message = bucket_of(self._reduce_bytes)
        recorder.add("reduce_staging", message.staging)
        recorder.record_temporary({"reduce_staging": message.packing})
        kind: CollectiveKind = "all_to_all" if message.parcels else "reduce_scatter"
        self._pending = recorder.start_collective(
            kind, self._axis, message, self._unit, label="reduce_scatter"
        )
        recorder.phase = before

    def _take_grads(self, unit: UnitDouble) -> None:
        """Move a unit's gradients into the reduction, and allocate their means."""
        footprint, recorder = unit.footprint, self._recorder
        has_sums = unit.sums > 0
        reduce = footprint.reduce_sums if has_sums else footprint.reduce
        assert reduce is not None
        if has_sums and footprint.sums_in_other_dtype and unit.grads:
            unit.keep()
        missing = reduce.grads - unit.grads - unit.sums
        others = self._context.candidate.tp - 1
        if missing < 0 and others:  # the rank's rows are copied; then those of others are freed
            recorder.record_temporary({"grad_full": -missing // others})
        if missing > 0 or others:  # parameters without a gradient contribute zeros
            recorder.add("grad_full", missing)
            self._grads += missing
        self._grads += unit.grads + unit.sums
        unit.grads = unit.sums = 0
        self._reduce_bytes.append(reduce)
        if not (self._context.keeps_buffers and unit.buffer == "kept"):
            recorder.add("grad_shards", reduce.out)
        if self._context.keeps_buffers:
            unit.buffer = "lent"

    def wait(self) -> None:
        """Wait for the reduction, free its buffers, and start the collectives that follow it."""
        recorder, message = self._recorder, self._message
        before = recorder.enter("reduce")
        recorder.record_temporary({"reduce_staging": message.summing})
        recorder.finish_collective(self._pending, message, self._unit)
        recorder.add("reduce_staging", -message.staging)
        recorder.add("grad_full", -self._grads)
        for reduce in () if self._defers else self._reduce_bytes:
            for message in reduce.replicas:
                recorder.record_temporary({"reduce_staging": message.staging})
                op = recorder.start_collective(
                    "all_reduce", "replicate", message, self._unit, counts=2
                )
                recorder.finish_collective(op, message, self._unit)
            for message in reduce.means:
                recorder.add("gather_staging", message.staging)
                op = recorder.start_collective("all_gather", self._axis, message, self._unit)
                self._gathers.append((op, message))
        for unit in self.units:
            if not self._gathers:
                unit.evict_means()
        recorder.phase = before

    def finish(self) -> None:
        """Wait for the gathered means of stage 0."""
        for op, message in self._gathers:
            self._recorder.finish_collective(op, message, self._unit)
            self._recorder.add("gather_staging", -message.staging)
        if self._gathers:
            for unit in self.units:
                unit.evict_means()


class ReductionsDouble:
    """The double of `engine.reductions.Reductions`."""

    def __init__(self, context: PlayContext, waits_at_close: bool) -> None:
        self._context = context
        self.defers = False  # in the present micro-batch
        self._queue: ReduceQueue[UnitDouble, ReductionDouble] = ReduceQueue(
            lambda units: ReductionDouble(units, context, self.defers),
            context.candidate.bucket_bytes,
            context.candidate.reduces_in_flight,
            waits_at_close,
            lambda unit: unit.axis,
        )

    def is_waiting(self, unit: UnitDouble) -> bool:
        """True if a unit is in the bucket."""
        return self._queue.holds(unit)

    def add(self, unit: UnitDouble) -> None:
        """Reduce a unit's gradients, unless this is the only rank and has none."""
        if self._context.candidate.data_parallel > 1 or unit.grads + unit.sums > 0:
            self._queue.add(unit)

    def keep(self, unit: UnitDouble) -> None:
        """Add a unit's gradients to its sums, for the last micro-batch."""
        unit.keep()

    def close(self) -> None:
        """Start the remaining reductions."""
        self._queue.close()

    def finish(self) -> None:
        """Complete every reduction and book the means as ``p.grad``, or add them to it."""
        recorder, added = self._context.recorder, 0
        reductions = self._queue.collect()
        before = recorder.enter("reduce")
        for reduction in reductions:
            reduction.finish()
            for unit in reduction.units:
                if unit.footprint.is_offloaded or unit.footprint.reduce is None:
                    continue  # offloaded gradients are added on the host
                out = unit.footprint.reduce.out
                if not unit.footprint.updated:  # zeros, which do not become ``p.grad``
                    added += 0 if unit.buffer else out
                    unit.buffer = unit.buffer and "kept"
                    continue
                if unit.has_grad:
                    unit.buffer = ""
                    added += out
                    recorder.move(out * 3, unit.index)  # reads two tensors, writes one
                unit.has_grad = True
        recorder.add("grad_shards", -added)
        recorder.phase = before

    def zero_grad(self, units: Sequence[UnitDouble]) -> None:
        """Drop ``p.grad``; a buffer that the unit keeps stays."""
        for unit in units:
            if unit.has_grad:
                unit.has_grad = False
                unit.drop_means()
