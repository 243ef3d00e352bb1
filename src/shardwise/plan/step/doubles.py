"""Units and reductions that only count bytes: what the engine's schedule is played with.

They answer the schedule as `unit.unit.Unit` and `unit.reduce.Reduction` do, and book what those
allocate, in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.engine.buckets import ReduceQueue
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import TapeUnit
from shardwise.plan.sizes import DtypeName
from shardwise.plan.step.footprint import Bucket, Footprint, Reduce, bucket_of
from shardwise.plan.step.ledger import Meter
from shardwise.plan.step.messages import Message
from shardwise.plan.step.offloading import Offloading
from shardwise.plan.step.program import AxisName, CollectiveKind, Issuer
from shardwise.stages import UnitSettings


@dataclass(frozen=True)
class PlayContext:
    """The parts of a played step that its doubles share."""

    meter: Meter
    issue: Issuer
    offloading: Offloading
    candidate: Candidate
    dtype: DtypeName
    settings: UnitSettings


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
        self.is_trained = weight.num_trained > 0
        self.in_backward = False
        self._context = context
        self._has_copy = self.is_fresh = False  # a copy on the device of offloaded slices
        self.go_stale()
        self.grads = self.sums = 0
        self.has_grad = False
        self.is_stepped = False  # in backward
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
        message = self.weight.gather
        if self.is_fresh or message is None:
            return
        meter, issue, weight = self._context.meter, self._context.issue, self.weight
        before, meter.phase = meter.phase, "unshard"
        meter.add("param_full", weight.freed_bytes)
        copied = 0 if self._has_copy else weight.copied_bytes
        fetched = weight.fetched_bytes + copied
        self._has_copy = True
        if fetched:
            meter.touch({"gather_staging": weight.fetch_staging})
            read = weight.read_bytes + copied
            self._context.offloading.fetch(fetched, read, self.index, issue)
        self._staging = message.staging
        meter.add("gather_staging", self._staging)
        meter.touch({"gather_staging": weight.coding_bytes})
        meter.phase = before
        issue.move(message.before, self._context.dtype, self.index, "unshard")
        if message.num_messages or message.payload:
            self._pending = issue.collective(
                "all_gather", self.axis, message, self.index, "unshard"
            )
        self.is_fresh = True

    def finish_unshard(self) -> None:
        """Wait for the gather, unpack."""
        self.start_unshard()
        if self._state != "gathering":
            return
        if self._pending is not None:
            message = self.weight.gather
            assert message is not None
            self._context.issue.wait(self._pending)
            self._context.issue.move(message.after, self._context.dtype, self.index, "unshard")
            self._pending = None
        else:
            self._context.issue.wait_for_fetched()
        self._context.meter.add("gather_staging", -self._staging)
        self._staging = 0
        self._state = "full"

    def reshard(self) -> None:
        """Free the full copy where the stage frees it."""
        if self._state == "gathering":
            self.finish_unshard()
        if self._state == "full":
            if self.weight.freed_bytes:
                self._context.meter.add("param_full", -self.weight.freed_bytes)
                self.is_fresh = False
            self._state = "sharded"

    def drop_means(self) -> None:
        """Free the means on the device; a buffer that the unit keeps stays."""
        if self.buffer:
            self.buffer = "kept"
        elif self.weight.reduce is not None:
            self._context.meter.add("grad_shards", -self.weight.reduce.out)

    def go_stale(self) -> None:
        """Note that the optimizer has changed the slices; on the device, also what stays there."""
        weight = self.weight
        self._has_copy = weight.is_away and self._context.offloading.steps_on_device
        self.is_fresh = weight.gather is None or (self._has_copy and weight.is_mirrored)


class ReductionDouble:
    """The reduction of one bucket; ``defers``: its sum over replicas comes with a later one."""

    def __init__(self, units: Sequence[UnitDouble], context: PlayContext, defers: bool) -> None:
        self.defers = defers
        self.units = list(units)
        self._context = context
        self._weights: list[Reduce] = []
        self._bucket = Bucket(Message(), False, 0, 0)
        self._grads = 0
        self._pending: int | None = None
        self._gathers: list[int | None] = []
        self._means: list[Message] = []

    @property
    def _unit(self) -> int:
        return self.units[0].index

    @property
    def _axis(self) -> AxisName:
        return self.units[0].axis

    def start(self) -> None:
        """Take the gradients, allocate means and staging, send."""
        context = self._context
        meter, before = context.meter, context.meter.phase
        meter.phase = "reduce"
        for unit in self.units:
            self._take(unit)
        self._bucket = bucket_of(self._weights)
        message = self._bucket.message
        meter.add("reduce_staging", message.staging)
        meter.touch({"reduce_staging": self._bucket.packing})
        meter.phase = before
        context.issue.move(message.before, context.dtype, self._unit, "reduce")
        kind: CollectiveKind = "all_to_all" if self._bucket.is_encoded else "reduce_scatter"
        self._pending = context.issue.collective(
            kind, self._axis, message, self._unit, "reduce", label="reduce_scatter"
        )

    def _take(self, unit: UnitDouble) -> None:
        weight, meter = unit.weight, self._context.meter
        summed = bool(unit.sums)
        reduce = weight.reduce_sums if summed else weight.reduce
        assert reduce is not None
        if summed and weight.sums_apart and unit.grads:
            add_micro_batch(unit, self._context)
        missing = reduce.grads - unit.grads - unit.sums
        others = self._context.candidate.tp - 1
        if missing < 0 and others:  # rows of other ranks go when its own are copied out of them
            meter.touch({"grad_full": -missing // others})
        if missing > 0 or others:  # parameters without a gradient contribute zeros
            meter.add("grad_full", missing)
            self._grads += missing
        self._grads += unit.grads + unit.sums
        unit.grads = unit.sums = 0
        self._weights.append(reduce)
        if not (weight.keeps_buffer and unit.buffer == "kept"):
            meter.add("grad_shards", reduce.out)
        if weight.keeps_buffer:
            unit.buffer = "lent"

    def wait(self) -> None:
        """Wait, sum, free the sent buffers; start the collectives that follow."""
        context, meter = self._context, self._context.meter
        before, meter.phase = meter.phase, "reduce"
        context.issue.wait(self._pending)
        meter.touch({"reduce_staging": self._bucket.summing})
        context.issue.move(self._bucket.message.after, context.dtype, self._unit, "reduce")
        meter.add("reduce_staging", -self._bucket.message.staging)
        meter.add("grad_full", -self._grads)
        for weight in () if self.defers else self._weights:
            for message in weight.replicas:
                self._sum_over_replicas(message)
            for message in weight.means:
                self._start_gather(message)
        if not self._means:
            self._evict()
        if context.candidate.step_in_backward:
            self._step()
        meter.phase = before

    def _step(self) -> None:
        """Use and free the means; the bytes that the step moves are those of one at its end."""
        for unit in self.units:
            reduce = unit.weight.reduce
            if reduce is not None and unit.weight.num_updated and not unit.weight.is_away:
                self._context.meter.add("grad_shards", -reduce.out)
                unit.is_stepped = True

    def _evict(self) -> None:
        """Bring the means to where the slices are; the device has them no more."""
        context = self._context
        for unit in self.units:
            if unit.weight.is_away:
                context.offloading.send_grads(unit.weight, unit.index, context.issue)
                unit.drop_means()

    def _sum_over_replicas(self, message: Message) -> None:
        context = self._context
        context.meter.touch({"reduce_staging": message.staging})
        context.issue.move(message.before, context.dtype, self._unit, "reduce")
        done = context.issue.collective(
            "all_reduce", "replicate", message, self._unit, "reduce", counts=2
        )
        context.issue.wait(done)
        context.issue.move(message.after, context.dtype, self._unit, "reduce")

    def _start_gather(self, message: Message) -> None:
        context = self._context
        context.meter.add("gather_staging", message.staging)
        context.issue.move(message.before, context.dtype, self._unit, "reduce")
        self._gathers.append(
            context.issue.collective("all_gather", self._axis, message, self._unit, "reduce")
        )
        self._means.append(message)

    def finish(self) -> None:
        """Wait for the gathered means of stage 0."""
        context = self._context
        for pending, message in zip(self._gathers, self._means, strict=True):
            context.issue.wait(pending)
            context.issue.move(message.after, context.dtype, self._unit, "reduce")
            context.meter.add("gather_staging", -message.staging)
        if self._means:
            self._evict()


def add_micro_batch(unit: UnitDouble, context: PlayContext) -> None:
    """Add a micro-batch's gradients to the window's sum, in the dtype of the sum."""
    weight = unit.weight
    if not weight.sums_apart:
        if unit.sums:  # autograd has added them
            context.meter.add("grad_full", -unit.grads)
        else:
            unit.sums = unit.grads
        unit.grads = 0
        return
    held, most = weight.keep_next if unit.sums else weight.keep_first
    held_beside, most_beside = _kept_beside(unit)
    held, most = held + held_beside, most + most_beside
    context.meter.touch({"grad_full": most})
    context.meter.add("grad_full", held)
    unit.sums += unit.grads + held
    unit.grads = 0


def _kept_beside(unit: UnitDouble) -> tuple[int, int]:
    """Return (bytes held more, at most meanwhile) for gradients of rows of other ranks.

    Under tensor parallelism an embedding's gradient has the rows of all ranks until it is reduced.
    """
    weight = unit.weight
    assert weight.reduce is not None and weight.reduce_sums is not None
    beside = max(unit.grads - weight.written_grads, 0)
    cast = beside * weight.reduce_sums.grads // weight.reduce.grads
    if unit.sums:
        return -beside, cast if weight.keep_next[1] else 0
    return cast - beside, cast


class ReductionsDouble:
    """Stands for `engine.reductions.Reductions`."""

    def __init__(
        self, context: PlayContext, bucket_bytes: int, reduces_in_flight: int, waits_at_close: bool
    ) -> None:
        self._context = context
        self.defers = False  # in the micro-batch under way
        self._queue: ReduceQueue[UnitDouble, ReductionDouble] = ReduceQueue(
            lambda units: ReductionDouble(units, context, self.defers),
            bucket_bytes,
            reduces_in_flight,
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
        add_micro_batch(unit, self._context)

    def close(self) -> None:
        """Start the remaining reductions."""
        self._queue.close()

    def finish(self) -> None:
        """Complete every reduction and book the means as ``p.grad``, or add them to it."""
        added = 0
        for reduction in self._queue.take():
            reduction.finish()
            for unit in reduction.units:
                if unit.weight.is_away or unit.weight.reduce is None:
                    continue  # the host adds them
                if unit.is_stepped:
                    unit.is_stepped = False
                    continue
                out = unit.weight.reduce.out
                if not unit.weight.num_updated:  # zeros that no ``p.grad`` takes
                    added += 0 if unit.buffer else out
                    unit.buffer = unit.buffer and "kept"
                    continue
                if unit.has_grad:
                    unit.buffer = ""
                    added += out
                    moved = out * 3  # reads both, writes one
                    self._context.issue.move(moved, self._context.dtype, unit.index, "reduce")
                unit.has_grad = True
        self._context.meter.add("grad_shards", -added)

    def zero_grad(self, units: Sequence[UnitDouble]) -> None:
        """Drop ``p.grad``; a buffer that the unit keeps stays."""
        for unit in units:
            if unit.has_grad:
                unit.has_grad = False
                unit.drop_means()
