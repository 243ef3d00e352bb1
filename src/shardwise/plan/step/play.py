"""The player of tapes: a step under a candidate with the engine's schedule, its peak and program.

Note [The step that is played]
It is the second step or a later one: the order of the units is known, and gradient buffers of the
CPU and optimizer state exist. A step is ``accumulation`` micro-batches, one after the other,
clipping, the optimizer's step and ``zero_grad``. Inside a micro-batch the engine's `Schedule` and
`ReduceQueue` are called as the engine calls them, at the visits of the tape.

Note [What an optimizer's step takes]
A fused kernel reads parameter, state and gradient once, and writes all but the gradient once: 28
bytes per parameter for AdamW in float32. Without fusion torch runs eight kernels per tensor, 80
bytes. Torch's optimizers allocate these temporaries: fused none; foreach the square roots of all
second moments at once; loop two tensors of the size of the largest.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.engine.schedule import Schedule
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Cost, LiveBytes, Tape, UnitWork, Visit
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.step.doubles import PlayContext, ReductionsDouble, UnitDouble
from shardwise.plan.step.footprint import Footprint, footprints_of
from shardwise.plan.step.messages import Message
from shardwise.plan.step.offloading import Inputs, Offloading
from shardwise.plan.step.program import (
    AxisName,
    BytesBetweenSteps,
    CollectiveKind,
    Ledger,
    Played,
    StepRecorder,
)
from shardwise.stages import STAGES, Stage, UnitSettings

_OUTER_AXES: tuple[AxisName, ...] = ("replicate", "shard")
_NORM_BYTES = 8  # the partial norm that clipping sends, float64
_UNFUSED_BYTES = 80  # of float32 AdamW per parameter; see the Note
_UNFUSED_KERNELS = 8


def play(tape: Tape, candidate: Candidate) -> Played:
    """Play one steady-state step of the rank that holds and sends the most, usually rank 0.

    **Cost** about 20 microseconds per event of the tape and micro-batch; no tensors.
    """
    player = _Player(tape, candidate)
    for number in range(candidate.accumulation):
        player.run(number)
    player.step()
    return player.result()


def bytes_between_steps(
    tape: Tape, candidate: Candidate, rank: int | None = None
) -> BytesBetweenSteps:
    """Return the bytes that a rank of the shard axis holds between steps, for any batch.

    Inputs of blocks, and memory for the reductions of later micro-batches, are left out. ``rank``
    None is the one that holds the most.
    """
    footprints = footprints_of(tape.units, candidate, rank)
    offloading = Offloading(candidate)
    off_device = offloading.off_device_bytes(footprints, num_reductions=1)
    return BytesBetweenSteps(
        device=_state(footprints, offloading, tape, candidate),
        host=off_device["cpu"],
        files=off_device["nvme"],
    )


def _state(
    footprints: list[Footprint], offloading: Offloading, tape: Tape, candidate: Candidate
) -> Ledger:
    """Return the ledger of the state on the device."""
    on_device = [w for w in footprints if not w.is_offloaded]
    return Ledger(
        param_shards=sum(w.shard_bytes + w.compute_shard_bytes for w in on_device)
        + sum(w.copy_bytes for w in footprints),
        param_full=sum(w.kept_bytes for w in footprints),
        optimizer_state=sum(w.state_bytes + w.outer_bytes for w in on_device),
        state_staging=offloading.staging_bytes(footprints, tape.units[0].comes_last),
        buffers=tape.buffer_bytes,
    )


class _Player:
    """The state of a step while it is played."""

    def __init__(self, tape: Tape, candidate: Candidate) -> None:
        self._tape = tape
        self._candidate = candidate
        self._footprints = footprints_of(tape.units, candidate)
        stage = STAGES[candidate.stage]
        # A pipeline gathers a stage once for all micro-batches, and reduces it after the last.
        self._is_stage = candidate.pp > 1
        self._reduce_every = candidate.reduce_every or stage.reduce_every
        if self._is_stage:
            self._reduce_every = "step"
        self._offloading = Offloading(candidate)
        visits = [e for e in tape.events if isinstance(e, Visit)]
        self._with_backward = {e.unit for e in visits if e.kind == "before_backward"}
        stays_full = not stage.frees_after_backward
        num_ranks = candidate.num_shards * candidate.num_replicas
        # The reductions of a unit in a step.
        self._num_reductions = 1 if self._reduce_every == "step" else candidate.accumulation
        keeps_buffers = candidate.transport == "point_to_point" and stays_full
        # True if the gradient buffers of the previous step still exist.
        has_buffers = keeps_buffers and self._num_reductions == 1
        initial = _state(self._footprints, self._offloading, tape, candidate)
        if has_buffers:
            kept = [
                w.reduce.out for w in self._footprints if w.reduce and (num_ranks > 1 or w.updated)
            ]
            initial = replace(initial, grad_shards=sum(kept))
        self._recorder = StepRecorder(initial, tape.compute_dtype)
        self._inputs = Inputs(tape, candidate, self._recorder)
        self._stage = replace(
            stage,
            reduce_every=self._reduce_every,
            frees_after_forward=stage.frees_after_forward and not self._is_stage,
        )
        context = PlayContext(
            self._recorder,
            self._offloading,
            candidate,
            UnitSettings(self._stage),
            keeps_buffers,
        )
        self._units = [
            UnitDouble(index, footprint, unit, context)
            for index, (footprint, unit) in enumerate(
                zip(self._footprints, tape.units, strict=True)
            )
        ]
        for unit in self._units:
            unit.buffer = "kept" if has_buffers and unit.is_trained else ""
        waits_at_close = candidate.num_replicas > 1 or not stage.shards_state
        self._reductions = ReductionsDouble(context, waits_at_close)
        self._schedule: Schedule[UnitDouble] = Schedule(
            candidate.prefetch_bytes, self._reductions, has_peers=num_ranks > 1
        )
        order = [e.unit for e in visits if e.kind == "before_forward" and not e.recomputes]
        closes = [e.unit for e in visits if e.kind == "after_backward"]
        self._schedule.take_units(self._units, order, closes)
        self._stack: list[tuple[UnitDouble, bool]] = []
        self._in_backward = False
        self._order: list[int] = []
        self._is_last = True
        self._adds = False

    # -- micro-batches
    def run(self, number: int) -> None:
        """Walk the tape for one micro-batch."""
        tape, recorder = self._tape, self._recorder
        ends_step = number == self._candidate.accumulation - 1
        self._is_last = ends_step and not self._is_stage
        offloads = any(w.is_offloaded for w in self._footprints)
        has_replicas = self._candidate.summed_replicas > 1
        self._reductions.defers = not ends_step and has_replicas and not offloads
        recorder.micro_batch = number
        if self._is_stage:
            self._set_stage(replace(self._stage, frees_after_backward=False), stays_full=True)
        has_sums = number > 0 and self._reduce_every == "step"
        self._adds = has_sums and not any(w.sums_in_other_dtype for w in self._footprints)
        self._in_backward = False
        recorder.phase = "forward"
        recorder.add("inputs", tape.input_bytes)
        others = (0 if number else tape.first_bytes) - self._inputs.others(number)
        recorder.add("activations", others)
        self._stack = []
        for event in tape.events:
            if isinstance(event, UnitWork):
                self._work(event)
            else:
                recorder.unit = event.unit
                self._visit(event)
                self._inputs.visit(event, self._in_backward)
        self._end_backward()
        recorder.add("inputs", -tape.input_bytes)
        recorder.add("activations", -others)
        if self._is_stage and ends_step:
            self._end_schedule()

    def _set_stage(self, stage: Stage, stays_full: bool) -> None:
        for unit in self._units:
            unit.settings = replace(unit.settings, stage=stage, stays_full=stays_full)

    def _end_schedule(self) -> None:
        """Reduce the sums of the micro-batches of a pipeline, and free the full parameters."""
        self._is_last = True
        self._set_stage(self._stage, stays_full=False)
        self._recorder.add("activations", self._tape.end_bytes)
        self._schedule.begin_backward([])
        self._end_backward()
        self._recorder.add("activations", -self._tape.end_bytes)

    def _work(self, work: UnitWork) -> None:
        recorder, unit = self._recorder, self._units[work.unit]
        recorder.phase, recorder.unit = work.phase, work.unit
        # If sums and gradients have one dtype, autograd adds to the sums, one by one.
        # Gradients in a unit without parameters belong to another unit.
        has_sums = unit.sums > 0 if unit.footprint.written_grads else self._adds
        adds = has_sums and not unit.footprint.sums_in_other_dtype
        peak, net = work.peak, work.net
        if adds:
            peak, net = _peak_and_net_of_sums(work, unit.footprint.largest_grad)
        unit.grads += 0 if adds else net.grad_full
        recorder.record_temporary(peak.lines())
        for line, num_bytes in net.lines().items():
            recorder.add(line, num_bytes)
        recorder.compute(work.costs, work.unit)

    def _visit(self, visit: Visit) -> None:
        unit = self._units[visit.unit]
        if visit.kind == "before_forward":
            is_next = self._schedule.before_forward(unit, in_backward=self._in_backward)
            if not self._in_backward:
                self._order.append(unit.index)
            self._recorder.sample_engine_lines()
            self._stack.append((unit, is_next))
        elif visit.kind == "after_forward":
            self._recorder.sample_engine_lines()
            _, is_next = self._stack.pop()
            self._schedule.after_forward(
                unit,
                in_backward=self._in_backward,
                expects_backward=not visit.recomputes and visit.unit in self._with_backward,
                backward_is_next=is_next,
                still_runs=any(u is unit for u, _ in self._stack),
                at_root=not self._stack,
            )
        elif visit.kind == "before_backward":
            if not self._in_backward:
                self._reductions.finish()
                self._schedule.begin_backward(self._order)
                self._order = []
                self._in_backward = True
            unit.in_backward = True
            self._schedule.before_backward(unit)
            self._recorder.sample_engine_lines()
        else:
            self._close(unit)

    def _close(self, unit: UnitDouble) -> None:
        self._recorder.sample_engine_lines()
        unit.in_backward = False
        self._claim_grads(unit)
        if not self._schedule.reduces(unit, self._is_last):  # otherwise its sum takes them
            for other in self._units:
                if other.in_backward:
                    self._claim_grads(other)
        self._schedule.after_backward(unit, is_last=self._is_last)

    def _claim_grads(self, unit: UnitDouble) -> None:
        """Book the gradients of a unit that were written in the work of other units.

        One example is a head whose output is the root's output: the backward of both begins at
        once. Another one is learned positions beside an embedding that is a unit.
        """
        for other in self._units:
            missing = unit.footprint.written_grads - unit.grads
            surplus = other.grads - other.footprint.written_grads
            if min(missing, surplus) > 0:
                moved = min(missing, surplus)
                other.grads -= moved
                unit.grads += moved

    def _end_backward(self) -> None:
        for unit in reversed(self._units):
            has_grads = self._schedule.reduces(unit, self._is_last) and unit.grads + unit.sums > 0
            if (unit.in_backward or has_grads) and not self._schedule.is_waiting(unit):
                self._close(unit)
        self._schedule.reduce_unvisited(self._is_last)
        self._reductions.close()
        self._schedule.end_pass()

    # -- the step
    def step(self) -> None:
        """Clip, step, drop the gradients."""
        recorder = self._recorder
        recorder.unit = 0
        recorder.phase = "reduce"
        self._reductions.finish()
        self._clip()
        recorder.phase = "optimizer"
        recorder.sample_engine_lines()
        on_device = [w for w in self._footprints if not w.is_offloaded]
        temporary = _temporary_bytes(self._candidate, on_device)
        recorder.record_temporary({"optimizer_temporary": temporary})
        moved = [_step_bytes(self._candidate, w) for w in self._footprints]
        self._offloading.step(self._footprints, recorder, moved)
        moved_on_device = sum(_step_bytes(self._candidate, w) for w in on_device)
        if moved_on_device:
            kernel = self._candidate.optimizer_kernel
            num_kernels = 1 if kernel == "fused" else _UNFUSED_KERNELS
            if kernel == "loop":
                num_kernels *= sum(len(w.updated) for w in on_device)
            recorder.compute((self._memory_cost(moved_on_device, num_kernels),), 0)
        self._reductions.zero_grad(self._units)
        if self._candidate.local_steps is not None:
            self._synchronize(self._candidate.local_steps.every)
        for unit in self._units:
            unit.go_stale()

    def _synchronize(self, every: int) -> None:
        """Book a step's share of a synchronisation of replicas, which comes in ``every`` steps."""
        recorder = self._recorder
        for index, footprint in enumerate(self._footprints):
            for axis, message in zip(_OUTER_AXES, footprint.outer, strict=False):
                recorder.record_temporary({"optimizer_temporary": footprint.outer_staging})
                kind: CollectiveKind = "all_reduce" if axis == "replicate" else "all_gather"
                part = message._replace(
                    payload=-(-message.payload // every),
                    sent=-(-message.sent // every),
                    before=message.before // every,
                    after=message.after // every,
                )
                counts = (2 if axis == "replicate" else 1) // every
                recorder.finish_collective(
                    recorder.start_collective(kind, axis, part, index, counts=counts), part, index
                )

    def _clip(self) -> None:
        candidate, recorder = self._candidate, self._recorder
        recorder.phase = "clip"
        size = DTYPE_BYTES[candidate.dtypes.reduce]
        grads = sum(w.local_numel for w in self._footprints) * size
        if not grads:
            return
        recorder.compute((self._memory_cost(grads, 1),), 0)
        ratios = (u.experts_over for u in self._tape.units if u.experts_over is not None)
        experts_over = next(ratios, None)
        sizes: dict[AxisName, int] = {}  # of the axes over which the state is cut
        if candidate.stage > 0:
            sizes = {
                "shard": candidate.num_shards,
                "efsdp": int(candidate.num_shards * (experts_over or 0)),
            }
        sizes["ep"] = candidate.ep if experts_over is not None else 1
        for axis, ranks in sizes.items():
            if ranks > 1:
                norm = Message(_NORM_BYTES, _NORM_BYTES * (ranks - 1), ranks - 1)
                recorder.wait(
                    recorder.start_collective("all_reduce", axis, norm, 0, label="scalars")
                )
        recorder.compute((self._memory_cost(2 * grads, 1),), 0)

    def _memory_cost(self, num_bytes: int, num_ops: int) -> Cost:
        return Cost("memory", self._candidate.dtypes.master, 0, num_bytes, num_ops)

    def result(self) -> Played:
        """Return the step as it was played."""
        peaks = self._recorder.peaks()
        off_device = self._offloading.off_device_bytes(self._footprints, self._num_reductions)
        return Played(
            peak=max(peaks, key=lambda m: m.ledger.total),
            peaks=peaks,
            engine_peak=self._recorder.engine_peak,
            device=self._recorder.ledger(),
            host=replace(off_device["cpu"], inputs=self._inputs.host_bytes),
            files=off_device["nvme"],
            program=self._recorder.program(tuple(u.name for u in self._tape.units)),
            padding_bytes=sum(w.padding_bytes for w in self._footprints),
        )


def _peak_and_net_of_sums(work: UnitWork, largest_grad: int) -> tuple[LiveBytes, LiveBytes]:
    """Return peak and net of a work if each gradient is added to a sum and freed at once."""
    if work.summed_peak is not None and work.summed_net is not None:
        return work.summed_peak, work.summed_net
    peak = replace(work.peak, grad_full=min(work.peak.grad_full, largest_grad))
    return peak, replace(work.net, grad_full=0)


# -- the optimizer's step
def _step_bytes(candidate: Candidate, footprint: Footprint) -> int:
    """Return the bytes that the step of a unit reads and writes."""
    dtypes = candidate.dtypes
    master, numel = DTYPE_BYTES[dtypes.master], footprint.local_numel
    if _is_adam(candidate) and candidate.optimizer_kernel != "fused":
        return numel * _UNFUSED_BYTES * master // 4
    return 2 * (numel * master + footprint.state_bytes) + numel * DTYPE_BYTES[dtypes.reduce]


def _temporary_bytes(candidate: Candidate, footprints: Sequence[Footprint]) -> int:
    """Return the bytes that the step of these units allocates and frees again."""
    kernel, dtypes = candidate.optimizer_kernel, candidate.dtypes
    numel = sum(w.local_numel for w in footprints)
    copied = numel * DTYPE_BYTES[dtypes.optimizer_grad] if dtypes.optimizer_grad else 0
    if kernel == "fused" or not _is_adam(candidate):
        return copied
    if kernel == "loop":
        slices = (n * DTYPE_BYTES[dtype] for w in footprints for n, dtype in w.updated)
        return copied + 2 * max(slices, default=0)
    return copied + numel * DTYPE_BYTES[dtypes.master]


def _is_adam(candidate: Candidate) -> bool:
    return candidate.optimizer in ("adam", "adamw")
