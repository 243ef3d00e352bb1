"""Plays a tape under a candidate with the engine's own schedule: peak memory, and a program.

Note [The step that is played]
The second one and all after it: the order of the units is known, gradient buffers of the CPU are
there, optimizer state exists. A step is ``accumulation`` micro-batches, one after the other,
clipping, the optimizer's step and ``zero_grad``. Inside a micro-batch the engine's
`Schedule` and `ReduceQueue` are called as the engine calls them, at the visits of the tape.

Note [What an optimizer's step takes]
Bytes: each of parameter, state and gradient is read once, and all but the gradient written once,
by a fused kernel: 28 per parameter for AdamW in float32. Without fusion torch runs eight kernels
per tensor, 80 bytes. Temporaries, as torch.optim allocates them: fused none; foreach the square
roots of all second moments at once; loop two tensors of the size of the largest.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.engine.schedule import Schedule
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Cost, LiveBytes, Tape, Visit, Work
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.step.doubles import PlayContext, ReductionsDouble, UnitDouble
from shardwise.plan.step.footprint import Footprint, weigh
from shardwise.plan.step.messages import Message
from shardwise.plan.step.offloading import Inputs, Offloading
from shardwise.plan.step.program import AxisName, CollectiveKind, Ledger, Played, Recorder, Rest
from shardwise.stages import STAGES, Stage, UnitSettings

_OUTER_AXES: tuple[AxisName, ...] = ("replicate", "shard")
_NORM_BYTES = 8  # the partial norm that clipping sends, float64
_UNFUSED_BYTES = 80  # of float32 AdamW per parameter; see the Note
_UNFUSED_KERNELS = 8


def play(tape: Tape, candidate: Candidate) -> Played:
    """Play one steady-state step of the rank that holds and sends the most: rank 0, as a rule.

    **Cost** about 20 microseconds per event of the tape and micro-batch; no tensors.
    """
    player = _Player(tape, candidate)
    for number in range(candidate.accumulation):
        player.run(number)
    player.step()
    return player.result()


def resting_state(tape: Tape, candidate: Candidate, rank: int | None = None) -> Rest:
    """Return what a rank of the shard axis holds between steps, whatever the batch.

    That is all but inputs of blocks, and memory that later micro-batches are reduced to. ``rank``
    None is the one that holds the most.
    """
    weights, offloading = weigh(tape.units, candidate, rank), Offloading(candidate)
    away = offloading.away(weights, num_reductions=1)
    return Rest(_state(weights, offloading, tape, candidate), away["cpu"], away["nvme"])


def _state(
    weights: list[Footprint], offloading: Offloading, tape: Tape, candidate: Candidate
) -> Ledger:
    here = [w for w in weights if not w.is_away]
    return Ledger(
        param_shards=sum(w.shard_bytes + w.compute_shard_bytes for w in here)
        + sum(w.copy_bytes for w in weights),
        param_full=sum(w.kept_bytes for w in weights),
        optimizer_state=sum(w.state_bytes + w.outer_bytes for w in here),
        state_staging=offloading.staging_bytes(weights, tape.units[0].comes_last),
        buffers=tape.buffer_bytes,
    )


class _Player:
    """One step under way."""

    def __init__(self, tape: Tape, candidate: Candidate) -> None:
        self._tape = tape
        self._candidate = candidate
        self._weights = weigh(tape.units, candidate)
        stage = STAGES[candidate.stage]
        # A pipeline gathers a stage once for all micro-batches, and reduces it after the last.
        self._is_stage = candidate.pp > 1
        asked = candidate.reduce_every or stage.reduce_every
        self._reduce_every = "step" if self._is_stage else asked
        self._offloading = Offloading(candidate)
        visits = [e for e in tape.events if isinstance(e, Visit)]
        self._with_backward = {e.unit for e in visits if e.kind == "before_backward"}
        stays_full = not stage.frees_after_backward
        num_ranks = candidate.num_shards * candidate.num_replicas
        is_one = self._reduce_every == "step"
        self._num_reductions = 1 if is_one else candidate.accumulation  # of a unit in a step
        keeps_buffers = candidate.transport == "point_to_point" and stays_full
        # True if the gradient buffers of the step before exist at its end.
        has_buffers = keeps_buffers and self._num_reductions == 1
        rest = _state(self._weights, self._offloading, tape, candidate)
        if has_buffers:
            in_turns = num_ranks > 1
            kept = [w.reduce.out for w in self._weights if w.reduce and (in_turns or w.updated)]
            rest = replace(rest, grad_shards=sum(kept))
        self._recorder = Recorder(rest, tape.compute_dtype)
        self._inputs = Inputs(tape, candidate, self._recorder)
        frees = stage.frees_after_forward and not self._is_stage
        self._row = replace(stage, reduce_every=self._reduce_every, frees_after_forward=frees)
        settings = UnitSettings(self._row)
        context = PlayContext(self._recorder, self._offloading, candidate, settings, keeps_buffers)
        self._units = [
            UnitDouble(i, w, u, context)
            for i, (w, u) in enumerate(zip(self._weights, tape.units, strict=True))
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
        ends = number == self._candidate.accumulation - 1
        self._is_last = ends and not self._is_stage
        is_away = any(w.is_away for w in self._weights)
        self._reductions.defers = not ends and self._candidate.summed_replicas > 1 and not is_away
        recorder.micro_batch = number
        if self._is_stage:
            self._set_stage(replace(self._row, frees_after_backward=False), stays_full=True)
        keeps = number > 0 and self._reduce_every == "step"
        self._adds = keeps and not any(w.sums_apart for w in self._weights)
        self._in_backward = False
        recorder.phase = "forward"
        recorder.add("inputs", tape.input_bytes)
        there = (0 if number else tape.first_bytes) - self._inputs.others(number)
        recorder.add("activations", there)
        self._stack = []
        for event in tape.events:
            if isinstance(event, Work):
                self._work(event)
            else:
                recorder.unit = event.unit
                self._visit(event)
                self._inputs.visit(event, self._in_backward)
        self._end_backward()
        recorder.add("inputs", -tape.input_bytes)
        recorder.add("activations", -there)
        if self._is_stage and ends:
            self._end_schedule()

    def _set_stage(self, row: Stage, stays_full: bool) -> None:
        for unit in self._units:
            unit.settings = replace(unit.settings, stage=row, stays_full=stays_full)

    def _end_schedule(self) -> None:
        """Reduce what the micro-batches of a pipeline have left, and free its stage."""
        self._is_last = True
        self._set_stage(self._row, stays_full=False)
        self._recorder.add("activations", self._tape.end_bytes)
        self._schedule.begin_backward([])
        self._end_backward()
        self._recorder.add("activations", -self._tape.end_bytes)

    def _work(self, work: Work) -> None:
        recorder, unit = self._recorder, self._units[work.unit]
        recorder.phase, recorder.unit = work.phase, work.unit
        # If sums and gradients have one dtype, autograd adds to the sums, one by one.
        # Gradients in a unit that has no parameters are those of another one.
        is_sum = unit.sums > 0 if unit.weight.written_grads else self._adds
        adds = is_sum and not unit.weight.sums_apart
        peak, net = _added(work, unit.weight.largest_grad) if adds else (work.peak, work.net)
        unit.grads += 0 if adds else net.grad_full
        recorder.touch(peak.lines())
        for line, num_bytes in net.lines().items():
            recorder.add(line, num_bytes)
        recorder.compute(work.costs, work.unit)

    def _visit(self, visit: Visit) -> None:
        unit = self._units[visit.unit]
        if visit.kind == "before_forward":
            is_next = self._schedule.before_forward(unit, in_backward=self._in_backward)
            if not self._in_backward:
                self._order.append(unit.index)
            self._recorder.look()
            self._stack.append((unit, is_next))
        elif visit.kind == "after_forward":
            self._recorder.look()
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
            self._recorder.look()
        else:
            self._close(unit)

    def _close(self, unit: UnitDouble) -> None:
        self._recorder.look()
        unit.in_backward = False
        self._claim_grads(unit)
        if not self._schedule.reduces(unit, self._is_last):  # else its sum would take them
            for other in self._units:
                if other.in_backward:
                    self._claim_grads(other)
        self._schedule.after_backward(unit, is_last=self._is_last)

    def _claim_grads(self, unit: UnitDouble) -> None:
        """Give a unit the gradients of its parameters that works of other units have written.

        Examples are a head with the root's output, as the backward of both begins at once, and
        learned positions beside an embedding that is a unit.
        """
        for other in self._units:
            wanted = unit.weight.written_grads - unit.grads
            surplus = other.grads - other.weight.written_grads
            if min(wanted, surplus) > 0:
                other.grads -= min(wanted, surplus)
                unit.grads += min(wanted, surplus)

    def _end_backward(self) -> None:
        for unit in reversed(self._units):
            left = self._schedule.reduces(unit, self._is_last) and unit.grads + unit.sums > 0
            if (unit.in_backward or left) and not self._schedule.is_waiting(unit):
                self._close(unit)
        self._schedule.close_turns(self._is_last)
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
        recorder.look()
        here = [w for w in self._weights if not w.is_away]
        recorder.touch({"optimizer_temporary": _temporary_bytes(self._candidate, here)})
        moved = [_step_bytes(self._candidate, w) for w in self._weights]
        self._offloading.step(self._weights, recorder, moved)
        on_device = sum(m for m, w in zip(moved, self._weights, strict=True) if not w.is_away)
        if on_device:
            kernel = self._candidate.optimizer_kernel
            kernels = 1 if kernel == "fused" else _UNFUSED_KERNELS
            kernels *= sum(len(w.updated) for w in here) if kernel == "loop" else 1
            recorder.compute((self._memory(on_device, kernels),), 0)
        self._reductions.zero_grad(self._units)
        if self._candidate.local_steps is not None:
            self._synchronize(self._candidate.local_steps.every)
        for unit in self._units:
            unit.go_stale()

    def _synchronize(self, every: int) -> None:
        """Synchronise replicas that step apart: a step has its share of one in ``every`` steps."""
        recorder = self._recorder
        for index, weight in enumerate(self._weights):
            for axis, message in zip(_OUTER_AXES, weight.outer, strict=False):
                recorder.touch({"optimizer_temporary": weight.outer_staging})
                kind: CollectiveKind = "all_reduce" if axis == "replicate" else "all_gather"
                part = message._replace(
                    payload=-(-message.payload // every),
                    sent=-(-message.sent // every),
                    before=message.before // every,
                    after=message.after // every,
                )
                counts = (2 if axis == "replicate" else 1) // every
                recorder.finish(recorder.start(kind, axis, part, index, counts=counts), part, index)

    def _clip(self) -> None:
        candidate, recorder = self._candidate, self._recorder
        recorder.phase = "clip"
        size = DTYPE_BYTES[candidate.dtypes.reduce]
        grads = sum(w.local_numel for w in self._weights) * size
        if not grads:
            return
        recorder.compute((self._memory(grads, 1),), 0)
        over = next((u.experts_over for u in self._tape.units if u.experts_over is not None), None)
        sizes: dict[AxisName, int] = {}  # of the axes over which the state is cut
        if candidate.stage > 0:
            sizes = {
                "shard": candidate.num_shards,
                "efsdp": int(candidate.num_shards * (over or 0)),
            }
        sizes["ep"] = candidate.ep if over is not None else 1
        for axis, ranks in sizes.items():
            if ranks > 1:
                norm = Message(_NORM_BYTES, _NORM_BYTES * (ranks - 1), ranks - 1)
                recorder.wait(recorder.start("all_reduce", axis, norm, 0, label="scalars"))
        recorder.compute((self._memory(2 * grads, 1),), 0)

    def _memory(self, num_bytes: int, num_ops: int) -> Cost:
        return Cost("memory", self._candidate.dtypes.master, 0, num_bytes, num_ops)

    def result(self) -> Played:
        """Return the step as it was played."""
        peaks = self._recorder.peaks()
        away = self._offloading.away(self._weights, self._num_reductions)
        return Played(
            peak=max(peaks, key=lambda m: m.ledger.total),
            peaks=peaks,
            engines_peak=self._recorder.engines_peak,
            resting=self._recorder.ledger(),
            host=replace(away["cpu"], inputs=self._inputs.host_bytes),
            files=away["nvme"],
            program=self._recorder.program(tuple(u.name for u in self._tape.units)),
            padding_bytes=sum(w.padding_bytes for w in self._weights),
        )


def _added(work: Work, largest_grad: int) -> tuple[LiveBytes, LiveBytes]:
    """Return peak and net of a work whose gradients are added to sums and freed, one by one."""
    if work.summed_peak is not None and work.summed_net is not None:
        return work.summed_peak, work.summed_net
    peak = replace(work.peak, grad_full=min(work.peak.grad_full, largest_grad))
    return peak, replace(work.net, grad_full=0)


# -- the optimizer's step
def _step_bytes(candidate: Candidate, weight: Footprint) -> int:
    """Return the bytes that the step of a unit reads and writes."""
    row = candidate.dtypes
    master, numel = DTYPE_BYTES[row.master], weight.local_numel
    if _is_adam(candidate) and candidate.optimizer_kernel != "fused":
        return numel * _UNFUSED_BYTES * master // 4
    return 2 * (numel * master + weight.state_bytes) + numel * DTYPE_BYTES[row.reduce]


def _temporary_bytes(candidate: Candidate, weights: Sequence[Footprint]) -> int:
    """Return what the step of these units allocates meanwhile."""
    kernel, row = candidate.optimizer_kernel, candidate.dtypes
    numel = sum(w.local_numel for w in weights)
    copied = numel * DTYPE_BYTES[row.optimizer_grad] if row.optimizer_grad else 0
    if kernel == "fused" or not _is_adam(candidate):
        return copied
    if kernel == "loop":
        slices = (n * DTYPE_BYTES[dtype] for w in weights for n, dtype in w.updated)
        return copied + 2 * max(slices, default=0)
    return copied + numel * DTYPE_BYTES[row.master]


def _is_adam(candidate: Candidate) -> bool:
    return candidate.optimizer in ("adam", "adamw")
