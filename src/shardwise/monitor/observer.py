"""``observe()``: record the steps of a sharded model, in any loop.

Note [Where a step ends]
~~~~~~~~~~~~~~~~~~~~~~~~
When ``optimizer.step()`` returns, of several optimizers the last one's. So a step lasts from one
return to the next: reading of data, all micro-batches, clipping, the step itself. A step that a
loss scaler skips is part of the next one, which then counts two backward passes.
"""

import logging
import math
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.save_load import Loaded
from shardwise.comm.control import Control, exchange_any
from shardwise.comm.torch_collectives import TORCH_CALLS
from shardwise.errors import ConfigError
from shardwise.monitor import metrics as m
from shardwise.monitor.describe import facts_of
from shardwise.monitor.doctor import LiveDoctor
from shardwise.monitor.findings import Finding
from shardwise.monitor.gatherer import Gatherer, ObservedStep, Outputs, Sink
from shardwise.monitor.gradient_checks import GradientChecks, LostUpdates
from shardwise.monitor.lines import MAX_NAME, JsonLines
from shardwise.monitor.loop_checks import LoopChecks
from shardwise.monitor.memory import MemoryWatch, describe_out_of_memory
from shardwise.monitor.pauses import Collections, CoreWait
from shardwise.monitor.record import (
    FOLDER,
    Begin,
    IdleScheduler,
    RankLine,
    RunFacts,
    Save,
    StepLine,
    keys_of,
    rank_files,
    write_facts,
)
from shardwise.monitor.recovery import Recovery, StartClock
from shardwise.monitor.spans import SpanRecorder
from shardwise.monitor.torch_steps import STEP_CALLS, StepFigures, is_stepped, schedulers_of
from shardwise.names import MAIN
from shardwise.parallel.parts import Model, Optimizer, Parts
from shardwise.processes import own_process

T = TypeVar("T")
_LOG = logging.getLogger("shardwise")
_TIMED_EVERY = 10  # steps of which the device's time is measured, which costs events
_MAX_RANKS_WITH_LINES = 64  # ranks beyond these write no file
_SCHEDULED_STEPS = 20  # after which a scheduler should have been stepped


def observe(
    model: Model,
    optimizer: Optimizer,
    output: str | Path | None = None,
    *,
    every: int | None = None,
    detail_every: int = 200,
    first_step: int = 1,
    resumed: Loaded | None = None,
    flops_per_token: float | None = None,
    sinks: Sequence[Sink] = (),
) -> "Observation":
    """Observe a sharded model's steps inside ``with observe(...) as run``.

    Every rank calls it, with its ``model`` and ``optimizer`` of `shard` or `fully_shard`; for a
    pipeline lists over its stages. Figures of the steps (`metrics`, over all ranks) are written as
    a line for ``every`` steps; None is 10 or more steps that take two seconds. Every
    ``detail_every`` steps a timeline and the memory of one step are written. Lines go to files in
    ``output``, see Note [The folder of a run], and on rank 0 to ``sinks``. Without an ``output`` no
    file is written, and ``run.latest`` has the figures. Findings of the doctor on rank 0 are
    logged, and kept in ``findings.jsonl`` and in ``run.findings``.
    ``first_step`` is the number of the first step: lines of an earlier run from this step on are
    removed. ``resumed`` is what a load returned: the run goes on after its step, and rank 0 logs
    and keeps why the run before ended, and what the restart has cost. ``flops_per_token`` of this
    rank's part of the model gives its MFU; None counts its weights.

    **Cost** less than a microsecond for each phase of each unit. For each line two small
    exchanges between all ranks, behind the training; every ``detail_every`` steps some
    microseconds for each parameter at each phase. One gloo group.

    **Raises** ConfigError if the model is not sharded or already observed, or a number is less
    than 1; on all ranks an error of one that cannot write in ``output``. Later a full disk or a
    tracker that fails is logged once, and no more is written.
    """
    first_step = first_step if resumed is None else _step_after(resumed, first_step)
    counts = {"every": every, "detail_every": detail_every, "first_step": first_step}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: expected 1 or more")
    given = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    # accelerate and Lightning wrap optimizers; hooks on steps run in torch's own, which is inside.
    optimizers = tuple(getattr(each, "optimizer", each) for each in given)
    if not optimizers:
        raise ConfigError("optimizer: expected one, or a list of them, got an empty list")
    parts = Parts(model)
    if any(comm.tracer.recorder is not None for comm in parts.comms):
        raise ConfigError(
            "model: it is observed already; close that run before another one begins. `shardwise "
            "train` and callbacks observe it themselves"
        )
    done, folder = first_step - 1, None if output is None else Path(output)
    control = parts.first.open_control()
    hosts = [row.decode() for row in exchange_any(control, socket.gethostname().encode())]
    facts = facts_of(model, optimizers, hosts, flops_per_token)
    rank, recovery = control.rank, _look_back(control, folder, resumed)

    def open_files() -> Outputs:
        shared = folder / FOLDER if folder is not None and rank == 0 else None
        own_path = folder / FOLDER / f"rank-{rank}.jsonl" if folder is not None else None
        if shared is not None:
            write_facts(shared, facts)
            for other, path in rank_files(shared):  # of an earlier run
                if other >= facts.num_ranks:
                    path.unlink()
        steps = JsonLines(shared and shared / "steps.jsonl", done)
        own = JsonLines(own_path if rank < _MAX_RANKS_WITH_LINES else None, done)
        own.write(**keys_of(Begin(done + 1, own_process())))
        doctor = LiveDoctor(facts, shared, done)
        return Outputs(rank, steps, own, doctor, sinks if rank == 0 else ())

    outputs = on_all_ranks(control, open_files)  # an error of one rank is raised on all
    params = {p.name: prod(p.shape) for u in parts.units for p in u.params}
    gatherer = Gatherer(control, facts, outputs, every, parts.comm.device, params)
    return Observation(parts, optimizers, facts, gatherer, done, detail_every, recovery)


def _step_after(resumed: Loaded, first_step: int) -> int:
    if resumed.step is None:
        raise ConfigError(f"resumed={resumed.path}: it does not say its step; give first_step")
    if first_step != 1:
        raise ConfigError(f"resumed= is of step {resumed.step}: leave out first_step={first_step}")
    return resumed.step + 1


def _look_back(control: Control, folder: Path | None, resumed: Loaded | None) -> Recovery | None:
    """Return on rank 0 how the run before ended, before any rank removes its lines of it."""
    if resumed is None:
        return None

    def read() -> Recovery | None:
        if folder is None or control.rank:
            return None
        clock = StartClock(knows_birth=True)
        clock.mark("start")
        path, step = folder / FOLDER / "steps.jsonl", resumed.step or 0
        return Recovery.after(folder, path, False, clock, step, resumed.from_memory)

    return on_all_ranks(control, read)


class Observation:
    """An observed run: a context manager, or `start` and `close`."""

    def __init__(
        self,
        parts: Parts,
        optimizers: Sequence[torch.optim.Optimizer],
        facts: RunFacts,
        gatherer: Gatherer,
        num_done: int,
        detail_every: int,
        recovery: Recovery | None = None,
    ) -> None:
        self.facts = facts
        self._recovery = recovery
        self._parts = parts
        self._optimizers = optimizers
        self._gatherer = gatherer
        self._detail_every = detail_every
        self._step, self._num_observed = num_done, 0
        self._num_passes = _num_passes(parts)
        self._values: dict[str, float] = {}
        self._last_step: ObservedStep | None = None
        casts_to_half = partial(_casts_to_half, parts.comm.device)
        clock = parts.comm.time.clock()
        self._is_timed = clock is not None
        self._recorder = SpanRecorder(
            clock,
            casts_to_half=casts_to_half,
            records_grads=torch.is_grad_enabled,
        )
        self._core_wait = CoreWait()
        self._collections = Collections()
        self._gradients = GradientChecks()
        self._lost_updates = LostUpdates(optimizers)
        self._checks = LoopChecks(parts, optimizers)
        self._step_figures = StepFigures(
            optimizers, lambda: self._step, lambda: self._recorder.is_detailed, self.note
        )
        self._num_epochs = 0
        self._schedulers: list[LRScheduler] = []
        self._knows_schedulers = False
        self._open = ExitStack()
        self._memory = MemoryWatch(parts, optimizers, facts, gatherer.rank)

    @property
    def latest(self) -> StepLine | None:
        """The newest figures over all ranks; None before there are any."""
        return self._gatherer.latest

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the doctor so far, on rank 0; see `shardwise doctor`."""
        return tuple(self._gatherer.outputs.doctor.found)

    @property
    def step(self) -> int:
        """The number of the last step that has ended."""
        return self._step

    def start(self) -> Self:
        """Begin to observe."""
        for comm in self._parts.comms:
            self._open.enter_context(comm.tracer.telling(self._recorder))
        self._open.enter_context(TORCH_CALLS.reporting(self._recorder))
        self._open.enter_context(STEP_CALLS.reporting(self._step_figures))
        self._recorder.on_norm = self._step_figures.see_norm
        for each in self._optimizers:
            last = each is self._optimizers[-1]
            before = each.register_step_pre_hook(self._before_step)
            after = each.register_step_post_hook(lambda *_, last=last: self._after_step(last))
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        self._memory.start()
        self._open.callback(self._core_wait.close)
        self._core_wait.add(self._gatherer.start())
        self._recorder.on_error = self._look_at_error
        self._recorder.on_saved = lambda path, is_finite: self._gatherer.outputs.note(
            Save(max(self._step, 1), path, is_finite)
        )
        self._recorder.cut()
        # Of a program that ends without `close`: by torch.multiprocessing too.
        self._exit = Finalize(None, self._note_exit, exitpriority=0)
        return self

    def _note_exit(self) -> None:
        """Note that the program ends, though the run was not closed."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        self._gatherer.note_end(error)

    def close(self) -> None:
        """Write the figures of all steps and end. **Raises** the error of the gathering thread."""
        self._look_for_idle_scheduler()
        self._detach()
        try:
            self._hand_over()
        finally:
            self._gatherer.end()

    def _detach(self) -> None:
        """Stop to record, and keep neither the model nor the optimizers alive."""
        self._exit.cancel()
        self._open.close()
        self._checks.clear()
        self._schedulers.clear()
        self._step_figures.clear()
        self._recorder.on_main = self._recorder.on_inputs = None
        self._parts.engines, self._optimizers = [], ()
        self._memory.clear()
        self._lost_updates.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return self.close()
        phase, unit = self._recorder.current_phase()
        self._look_at_error(error, phase, unit or "")
        self._detach()
        last, during = self._last_step, self._step + 1
        place = {"phase": phase} if unit is None else {"phase": phase, "unit": unit}
        self._gatherer.end(error, last, during=during, **place)

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; the time until each arrives counts as data loading."""
        iterator = iter(batches)
        while True:
            try:
                with self.during("data"):
                    batch = next(iterator)
            except StopIteration:
                self._num_epochs += 1
                return
            yield batch

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the time inside as a phase: "data", "save"."""
        self._recorder.enter(MAIN, phase, "")
        try:
            yield
        finally:
            self._recorder.leave(MAIN, phase, "")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude work from the step under way, such as an evaluation.

        Optimizer steps inside are not counted, and the clock of the record stops.
        """
        is_inner, before = self._recorder.is_paused, _num_passes(self._parts)
        try:
            with self._recorder.paused():
                yield
        finally:
            if not is_inner:
                more = zip(self._num_passes, _num_passes(self._parts), before, strict=True)
                begun, reduced = (then + now - was for then, now, was in more)
                self._num_passes = begun, reduced

    def log(self, **values: float) -> None:
        """Record figures of the loop with a step: loss, learning rate.

        They belong to the step under way if its forward pass has begun, else to the last one.
        """
        last = None if self._recorder.has_begun else self._last_step
        figures = {name: float(value) for name, value in values.items()}  # a tensor is waited for
        (self._values if last is None else last.values).update(figures)

    def note(self, line: RankLine) -> None:
        """Keep a line of this rank in the record."""
        self._gatherer.outputs.note(line)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        values, last = self._values, self._last_step
        has_bad = bool(values) and _has_bad(values)
        if last is not None and last.values:
            has_bad = has_bad or _has_bad(last.values)
        if has_bad or self._gradients.is_due:
            self._gradients.look(self._parts.units, optimizer, has_bad)
        if self._lost_updates.has_params:
            self._lost_updates.look(optimizer)
        if self._checks.is_checking:
            self._checks.look(optimizer)
        self._recorder.enter(MAIN, "step", "")

    def _after_step(self, is_last: bool) -> None:
        self._recorder.leave(MAIN, "step", "")
        if not is_last or self._recorder.is_paused:
            return
        self._step += 1
        self._num_observed += 1
        number = self._num_observed
        if self._recovery is not None and number == 1:
            if self._parts.comm.device.type != "cpu":  # the step ends there
                torch.accelerator.synchronize(self._parts.comm.device)
            self.note(self._recovery.verdict(_LOG.warning))
        keeps_timeline = number == 2 or number % self._detail_every == 0
        next_keeps = (number + 1) % self._detail_every == 0
        samples_next = number == 2 or next_keeps
        checks_next = self._checks.is_due(number + 1) or next_keeps
        times = self._is_timed and (
            number == 1 or (number + 1) % min(_TIMED_EVERY, self._detail_every) == 0
        )
        is_detailed = samples_next or times or checks_next
        is_detailed = is_detailed or self._gatherer.wants_details(number + 1)
        recorded = self._recorder.cut(times, is_detailed)
        figures: dict[str, float | torch.Tensor] = {m.CORE_WAIT_S: self._core_wait.take_s()}
        if collections := self._collections.take():
            figures[m.COLLECTIONS] = collections
        figures |= self._figures_of_passes()
        figures |= self._step_figures.take()
        num_bad, bad = self._gradients.take(self._step)
        figures |= num_bad
        own_lines: list[RankLine] = [*bad]
        digest, idle = None, None
        if self._lost_updates.has_params:
            lost, worst = self._lost_updates.take(self._step)
            figures |= lost
            own_lines += worst
        if self._recorder.on_main is not None:
            checked, digest, idle = self._checks.take()
            figures |= checked
            own_lines += self._memory.take(self._step)
        if samples_next or checks_next or self._recorder.on_main is not None:
            self._watch(samples_next, checks_next)
        if checks_next and not self._knows_schedulers:
            self._schedulers = schedulers_of(self._optimizers)
            self._knows_schedulers = bool(self._schedulers)
        elif checks_next and self._num_epochs:
            self._look_for_idle_scheduler()
        self._hand_over()
        values, self._values = self._values, {}
        self._last_step = ObservedStep(
            *(self._step, recorded, values, figures, own_lines, keeps_timeline, digest, idle)
        )

    def _watch(self, samples: bool, checks: bool) -> None:
        """Let the next step be sampled or checked."""
        watchers = [self._memory.sample] * samples + [self._checks.see_phase] * checks

        def on_main(phase: str, unit: str) -> None:
            for see in watchers:
                see(phase, unit)

        self._recorder.on_main = on_main if watchers else None
        self._recorder.on_inputs = self._checks.see_inputs if checks else None
        self._checks.begin(checks)

    def _look_for_idle_scheduler(self) -> None:
        """Note schedulers that were not stepped, after an epoch or at the end of a run."""
        if self._schedulers and self._num_observed >= _SCHEDULED_STEPS:
            schedulers, self._schedulers = self._schedulers, []
            if not any(map(is_stepped, schedulers)):
                name = type(schedulers[0]).__name__
                rate = float(self._optimizers[0].param_groups[0].get("lr", 0.0))
                self.note(IdleScheduler(max(self._step, 1), name[:MAX_NAME], rate))

    def _figures_of_passes(self) -> dict[str, float]:
        """Return the figures of skipped steps, of the learning rate and of autocast."""
        before, self._num_passes = self._num_passes, _num_passes(self._parts)
        begun, reduced = (now - then for now, then in zip(self._num_passes, before, strict=True))
        # `fully_shard` does not see that gradients are dropped, so there all passes count.
        skipped = max((begun or reduced) - 1, 0)
        rate = self._optimizers[0].param_groups[0].get("lr")
        found = {m.IN_HALF: float(self._recorder.in_half), m.SKIPPED_STEPS: skipped}
        if isinstance(rate, float):
            found[m.LEARNING_RATE] = rate
        return found

    def _hand_over(self) -> None:
        """Give the last step to the thread, with the values logged since its end."""
        over, self._last_step = self._last_step, None
        if over is not None:
            self._gatherer.take(over)

    def _look_at_error(self, error: BaseException, phase: str, unit: str) -> None:
        report = self._memory.explain(error, self._step + 1, phase, unit)
        if report is not None:
            _LOG.error("shardwise: %s", describe_out_of_memory(report))
            self._gatherer.outputs.note(report)


def _has_bad(values: Mapping[str, float]) -> bool:
    return not all(map(math.isfinite, values.values()))


def _casts_to_half(device: torch.device) -> bool:
    """Tell whether torch.autocast is on, for the CPU or this device, and casts to float16."""
    return any(
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        for kind in {"cpu", device.type}
    )


def _num_passes(parts: Parts) -> tuple[int, int]:
    """Return the number of passes that began without gradients, and of reduced ones."""
    begun = reduced = 0
    for engine in parts.engines:  # none after the end of a run
        begun = max(begun, engine.backward.num_begun)
        reduced = max(reduced, engine.backward.num_reduced)
    return begun, reduced
