"""The training loop: plain PyTorch around a sharded model, with two exceptions.

`shardwise.accumulate` marks the last micro-batch. Once a step the ranks
sum their losses, together with flags on which all must act after the same step: a stop request, a
failed save, a replayed step with other bits.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.check.compare_ranks import check_replicas
from shardwise.check.one_process import GradientReport, check_gradients
from shardwise.checkpoint.files import replacing
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.device import fork_rng_devices, peak_memory_bytes
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.monitor.lines import JsonLines
from shardwise.monitor.observer import Observation, observe
from shardwise.monitor.recovery import Recovery, StartClock
from shardwise.parallel.routing import balance_experts
from shardwise.progress import Advance, run_bar
from shardwise.quantities import format_bytes
from shardwise.train.checks import config_path, metrics_path
from shardwise.train.config import TrainConfig, dump_config
from shardwise.train.decoder import Pipeline, generate
from shardwise.train.integrity import IntegrityBudget, compute_twice, raise_difference
from shardwise.train.launch import RankPlace, StopRequest
from shardwise.train.saves import RunCheckpoints
from shardwise.train.setup import (
    Run,
    gather_integers,
    join_ranks,
    make_decoder,
    prepare_run,
    shard_decoder,
)
from shardwise.train.summary import RunResult, StateBytes, count_state
from shardwise.train.text import read_windows


class NonFiniteLossError(ShardwiseError, ArithmeticError):
    """The loss became infinite or not a number; further steps would be lost.

    Set a lower `lr`, more `warmup_steps`, or `grad_clip`.
    """


@dataclass(frozen=True)
class StepReport:
    """One step: the mean loss over its micro-batches, of this rank or of all."""

    loss: float
    lr: float
    grad_norm: float
    state: StateBytes

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that a replay compares beside the state, by name."""
        return {"the loss of its own windows": self.loss, "the gradient norm": self.grad_norm}


def train(
    config: TrainConfig,
    place: RankPlace,
    stop: StopRequest,
    say: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Run the whole training as one rank. Every rank calls this with the same config.

    ``config`` is the result of `check_run`. If ``stop`` is requested on any rank, all ranks end
    after their current step. ``say`` gets lines for people before the first step.

    **Raises** ConfigError if the run cannot start, GradientError before the first step,
    NonFiniteLossError if the loss is not a number, CheckpointError if a checkpoint could not be
    saved or loaded, ReplicaError or ReplayError if bits differ that must be equal.
    """
    started_s, clock = time.perf_counter(), StartClock(knows_birth=True)
    clock.mark("imports")
    with join_ranks(place, config.threads) as device:
        clock.mark("process group")
        run = prepare_run(config, place, device)
        if config.check_gradients:
            say(str(check_run_gradients(run)))
        clock.mark("rebuild")
        result = train_prepared(run, stop, say, clock)
    result.wall_s = time.perf_counter() - started_s
    return result


def train_prepared(
    run: Run,
    stop: StopRequest,
    say: Callable[[str], None] = lambda line: None,
    clock: StartClock | None = None,
) -> RunResult:
    """Take all steps of a run from `prepare_run`; see `train`."""
    config, place = run.config, run.place
    first, clock, recovery = place.rank == 0, clock or StartClock(), None
    with RunCheckpoints(run) as saves:  # locks the folder before a file in it changes
        loaded = saves.resume(say)
        done = loaded.step if loaded is not None else 0
        clock.mark("load")
        if first and loaded is not None:
            path = metrics_path(config)
            recovery = Recovery.after(config.output, path, True, clock, done, loaded.from_memory)
        if first:
            with replacing(config_path(config)) as part:
                part.write_text(dump_config(config), encoding="utf-8")
        result = RunResult(run.unigram_entropy, first_step=done + 1, steps=done)
        with (
            JsonLines(metrics_path(config) if first else None, done) as metrics,
            run_bar(config.steps, shown=first, num_done=done) as advance,
            observe(run.model, run.optimizer, config.output, first_step=done + 1)
            if config.observe
            else nullcontext() as observation,
        ):
            if loaded is not None:
                metrics.write(**loaded._asdict())
            stop.listen()
            loop = _Loop(run, stop, metrics, advance, saves, result, observation)
            for step in range(done + 1, config.steps + 1):
                loop.take_step(step)
                if step == done + 1 and recovery is not None:
                    restart = recovery.verdict(say)
                    metrics.write(step=done, restart=vars(restart))
                    if observation is not None:
                        observation.note(restart)
                if result.stopped:
                    break
            saves.finish(metrics)
    result.saved_step, result.save_stall_s = saves.saved_step, saves.stall_s
    if result.losses and not result.stopped:
        result.sample = _sample(run)
    peak_bytes = peak_memory_bytes(run.device)
    result.peak_bytes_of_ranks = gather_integers(place, peak_bytes)
    result.added_bytes_of_ranks = gather_integers(place, peak_bytes - run.base_memory_bytes)
    result.state_bytes_of_ranks = gather_integers(place, result.state.total_bytes)
    if config.pp > 1:  # world_size / pp ranks have the same pipeline stage
        sizes = {
            name: sum(gather_integers(place, getattr(result.state, name)))
            for name in ("num_params", "replicated_bytes")
        }
        whole = {name: size * config.pp // place.world_size for name, size in sizes.items()}
        result.state = replace(result.state, **whole)
    return result


def check_run_gradients(run: Run) -> GradientReport:
    """Compare one pass over the first step's windows with one process that has all of them.

    The pass runs on a second sharded model, without dropout and encodings. If the run is in fp16,
    whose gradients need a loss scale, that model is in fp32.

    **Cost** as `shardwise.check.gradients`. **State** the run and its generators do not change.

    **Raises** GradientError on all ranks.
    """
    config = run.config.model_copy(update={"dropout": 0.0, "gather": None, "reduce": None})
    if config.precision == "fp16":
        config = config.model_copy(update={"precision": "fp32"})
    config = config.model_copy(update={"pp_schedule": "gpipe", "accumulation": 1})
    axes = config.axes.over(run.place.world_size)
    part, num_parts = run.part_of_batch
    indices = range(config.micro_batch * num_parts)
    windows = [run.sampler.train_window(1, index, run.global_batch) for index in indices]
    ids, targets = (x.to(run.device) for x in read_windows(run.tokens, windows))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        inputs, wanted, *positions = batch
        return F.cross_entropy(model(inputs, None, *positions).float().transpose(1, 2), wanted)

    def take_step(stage: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        return Pipeline(stage, axes, config, run.device).step(*batch)

    local_rows = (x.chunk(num_parts)[part] for x in (ids, targets))
    # Inside `cut`, the whole windows of the one process are computed as usual.
    with torch.random.fork_rng(fork_rng_devices(run.device)), run.cut(*local_rows) as local:
        return check_gradients(
            lambda: make_decoder(config, run.tokenizer),
            (ids, targets),
            axes,
            compose=lambda model: shard_decoder(config, axes, model),
            run=take_step if config.pp > 1 else None,
            loss=loss,
            local_batch=lambda _: local,
        )


class _Loop:
    """Takes the steps of one rank, and writes their figures."""

    def __init__(
        self,
        run: Run,
        stop: StopRequest,
        metrics: JsonLines,
        advance: Advance,
        saves: RunCheckpoints,
        result: RunResult,
        observation: Observation | None,
    ) -> None:
        self._run = run
        self._stop = stop
        self._log = observation.log if observation is not None else lambda **_: None
        self._paused = observation.paused if observation is not None else nullcontext
        self._metrics = metrics
        self._advance = advance
        self._result = result
        self._saves = saves
        self._budget = IntegrityBudget(run.config.integrity)

    def take_step(self, step: int) -> None:
        """Take one step; then write its figures and, if due, check, evaluate and save."""
        run, config, result, metrics = self._run, self._run.config, self._result, self._metrics
        tokens = run.global_batch * config.seq
        sent_before, started_s = _sent_bytes(run), time.perf_counter()
        is_due = _is_multiple(step, config.check_replicas_every)
        compares = is_due or self._budget.agreed == "replicas"
        report, is_stopped, save_failed = self._agreed_step(step)
        step_s = time.perf_counter() - started_s
        peak_bytes = peak_memory_bytes(run.device)
        metrics.write(
            step=step,
            loss=report.loss,
            lr=report.lr,
            grad_norm=report.grad_norm,
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            tokens=step * tokens,
            state_bytes=report.state.total_bytes,
            sent_bytes=_sent_bytes(run) - sent_before,
            **{"peak_rss_bytes" if run.device.type == "cpu" else "peak_device_bytes": peak_bytes},
        )
        self._log(loss=report.loss, lr=report.lr, grad_norm=report.grad_norm)
        if config.precision == "fp16":
            self._log(loss_scale=run.scaler.get_scale())
        result.add_step(step, report.loss, step_s, tokens, report.state)
        self._advance(
            f"loss {report.loss:.3f}",
            f"{result.tokens_per_s:,.0f} tokens/s",
            f"state {format_bytes(report.state.total_bytes)}",
            f"peak {format_bytes(peak_bytes)}",
        )
        if save_failed:
            self._saves.finish(metrics)
            raise CheckpointError("saving failed on another rank; see that rank's error")
        if not math.isfinite(report.loss) and config.precision != "fp16":
            raise NonFiniteLossError(
                f"the loss of step {step} is {report.loss}; lower lr ({config.lr:g}), lengthen "
                "warmup_steps, or set grad_clip"
            )
        if compares:
            with self._budget.comparing():
                check_replicas(run.model, run.optimizer)
        result.stopped = is_stopped
        is_last = step == config.steps or is_stopped
        is_due = is_last or _is_multiple(step, config.eval_every)
        if config.eval_windows and not is_stopped and is_due:
            with self._paused():
                result.eval_loss = evaluate(run)
            metrics.write(step=step, eval_loss=result.eval_loss)
            self._log(eval_loss=result.eval_loss)
        self._saves.after_step(step, is_last, metrics)  # last, as it may raise

    def _agreed_step(self, step: int) -> tuple[StepReport, bool, bool]:
        """Take an optimizer step; return its report, and flags: a rank stops, a save has failed.

        A step that is computed twice is observed the second time.

        **Cost** one collective of five numbers beside those of the model.

        **Raises** ReplayError if the step was computed twice and gave other bits on any rank.
        """
        run, budget = self._run, self._budget
        difference = 0
        begun_s = time.perf_counter()
        is_replayed = budget.agreed == "replay" or _is_multiple(step, run.config.replay_every)
        if is_replayed:
            first_only = iter([self._paused()])

            def compute() -> StepReport:
                with next(first_only, nullcontext()):
                    return compute_step(run, step)

            local, difference = compute_twice(run, compute, lambda result: result.numbers)
        else:
            local = compute_step(run, step)
        synchronize(run, step)
        budget.note_step(time.perf_counter() - begun_s, is_replayed)
        next_check = budget.next_check() if run.place.rank == 0 else 0
        mean = local.loss / run.place.world_size
        addends = [mean, self._stop.requested, self._saves.failed, difference > 0, next_check]
        loss, *flags, check = all_reduce_scalars([float(addend) for addend in addends])
        is_stopped, save_failed, is_different = (num_ranks > 0 for num_ranks in flags)
        budget.agree(int(check))
        if is_different:
            raise_difference(run, step, difference, local.numbers)
        return replace(local, loss=loss), is_stopped, save_failed


def _sent_bytes(run: Run) -> int:
    return sum(shardwise.debug.stats(run.model).sent_bytes.values())


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def compute_step(run: Run, step: int) -> StepReport:
    """Take one optimizer step over the global batch; return this rank's report."""
    config, model, optimizer = run.config, run.model, run.optimizer
    lr = config.learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = _passes(run, step)
    run.scaler.unscale_(optimizer)
    norm = shardwise.parallel.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    run.scaler.step(optimizer)
    run.scaler.update()
    balance_experts(model)
    state = count_state(model, optimizer, 0 if run.local is None else run.local.state_bytes)
    optimizer.zero_grad()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return StepReport(loss.item(), lr, float(norm), state)


def synchronize(run: Run, step: int) -> None:
    """Count a local step of the replicas; synchronise them after the last step."""
    if run.local is not None:
        run.local.step()
        if step == run.config.steps:
            run.local.synchronize()


def _passes(run: Run, step: int) -> Tensor:
    """Run forward and backward of all micro-batches; return this rank's mean loss."""
    share, model = run.share, run.model
    num = share.num_passes
    counts = [share.counts(number) for number in range(num)]
    if run.pipeline is not None or run.config.accumulation_order == "breadth_first":
        run.seed_draws(step, 0)
        rows = run.cut(*run.train_batch(step, *range(num)))
        with shardwise.accumulate(model, last=True), rows as (ids, targets, positions):
            if run.pipeline is not None:
                return run.pipeline.step(ids, targets, positions)
            batches = list(zip(ids.chunk(num), targets.chunk(num), counts, strict=True))
            loss_sum = shardwise.accumulate(
                model,
                lambda batch: _counted(model(*batch[:2], positions), batch[2]),
                batches,
                order="breadth_first",
            )
            run.scaler.scale(loss_sum / share.divisor).backward()
        return loss_sum.detach() / share.divisor
    loss_sum = torch.zeros((), device=run.device)
    for number in range(num):
        batch = run.train_batch(step, number)
        run.seed_draws(step, number)
        with shardwise.accumulate(model, last=number == num - 1), run.cut(*batch) as inputs:
            loss = _counted(model(*inputs), counts[number])  # over as many tokens on every rank
            run.scaler.scale(loss / share.divisor).backward()
        loss_sum += loss.detach()
    return loss_sum / share.divisor


def _counted(loss: Tensor, counts: bool) -> Tensor:
    """Return the loss of a pass; 0 if it has no micro-batch, but with a backward pass."""
    return loss if counts else loss * 0


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Return the mean loss over the held-out windows, in nats per token.

    Every rank takes the same number of forward passes; rows beyond the last window have weight 0.
    Dropout is off, so no random numbers are drawn.
    """
    config, (part, num_parts) = run.config, run.part_of_batch
    run.model.eval()
    rows = config.micro_batch * (run.share.num_passes if run.pipeline is not None else 1)
    total, count = 0.0, 0.0
    for number in range(math.ceil(config.eval_windows / (rows * num_parts))):
        first = (number * num_parts + part) * rows
        indices = range(first, first + rows)
        real = sum(index < config.eval_windows for index in indices)
        windows = [run.sampler.eval_window(index % config.eval_windows) for index in indices]
        whole = (x.to(run.device) for x in read_windows(run.tokens, windows))
        with run.cut(*whole) as (ids, targets, positions):
            if run.pipeline is None:
                logits = run.model(ids, None, positions)
            else:
                logits = run.pipeline.logits(ids, targets, positions)
        if logits is None:  # only a pipeline's last stage has them
            continue
        logits, targets = logits[:real].float(), targets[:real]
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum")
        total, count = total + float(losses), count + targets.numel()
    run.model.train()
    total, count = all_reduce_scalars([total, count])
    return total / count


def _sample(run: Run) -> str:
    """Continue the prompt; every rank draws the same tokens."""
    config = run.config
    if not config.sample_tokens or run.pipeline is not None:
        return ""  # a pipeline cannot sample
    run.model.eval()
    ids = torch.tensor(list(run.tokenizer.encode(config.prompt)), dtype=torch.int64)
    ids = generate(
        run.model,
        ids.to(run.device),
        config.sample_tokens,
        config.seq,
        temperature=0.7,
        seed=config.seed,
        multiple=config.tp,
    )
    return run.tokenizer.decode(ids.tolist())
