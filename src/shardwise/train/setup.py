"""The setup of a run before its first step: process group, data, model, optimizer.

Note [Leaving the process group]
Gloo's threads end with the last reference to its process group. A group that is alive when the
interpreter ends may abort the process ("terminate called without an active exception"). Two things
would keep it alive. The sharded model's hooks form reference cycles, so garbage is collected first.
`torch.distributed.nn.functional` stores the group that exists when it is imported as a default
argument, so this file imports it before a group exists, and not the first optimizer step.

Note [Generators of the ranks]
All ranks draw the weights from `seed`. Dropout draws by micro-batch, so that the masks of a step do
not depend on the number of ranks: see Note [Random numbers of a micro-batch]. Pipelines and
breadth-first accumulation run all passes of a rank in one call, so there the seed of the first
micro-batch is used for all.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists: Note [Leaving the process group]
from torch import nn

import shardwise
from shardwise.axes import Axes
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.config import PRECISIONS, Schedule, Units
from shardwise.data.order import BatchShare, seed_draws, seed_of
from shardwise.data.tokens import TokenFiles
from shardwise.debug import watch
from shardwise.device import local_device, reset_peak_memory
from shardwise.engine.agreement import agree
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError
from shardwise.hangs.abort import WATCH
from shardwise.outer import Outer, OuterName, Windows
from shardwise.parallel.context import ContextParallel
from shardwise.parallel.experts import spread_experts
from shardwise.parallel.local_steps import LocalSteps
from shardwise.stages import DEFAULT_BUCKET_BYTES
from shardwise.train.checks import check_output
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import TIED, Decoder, DecoderStage, Pipeline, spread_decoder
from shardwise.train.launch import RankPlace
from shardwise.train.optimizers import OPTIMIZERS, is_shardwise_adamw, optimizer_class
from shardwise.train.text import (
    Tokenizer,
    WindowSampler,
    find_documents,
    load_tokenizer,
    open_stream,
    read_windows,
    write_stream,
)

_OF_HOST = {"data", "tokenizer", "output", "offload", "ranks", "threads"}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # ids, targets, positions


@dataclass(frozen=True)
class Run:
    """One rank's part of a training run, ready to step."""

    config: TrainConfig
    place: RankPlace
    device: torch.device
    tokenizer: Tokenizer
    tokens: TokenFiles
    unigram_entropy: float  # of the tokens: see `open_stream`
    sampler: WindowSampler
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    context: ContextParallel | None  # if windows are cut over ranks
    pipeline: Pipeline | None  # if the model is cut into pipeline stages
    local: LocalSteps | None  # if replicas step locally
    base_memory_bytes: int  # in use before the model was built

    @property
    def global_batch(self) -> int:
        """Windows per step over all ranks."""
        return self.config.global_batch or self.config.micro_batch

    @property
    def part_of_batch(self) -> tuple[int, int]:
        """The index of this rank's part of a batch, and the number of parts."""
        return self.config.axes.over(self.place.world_size).part_of_batch(self.place.rank)

    @property
    def share(self) -> BatchShare:
        """This rank's micro-batches of a step."""
        return BatchShare(self.global_batch, self.config.micro_batch, *self.part_of_batch)

    def train_batch(self, step: int, *numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's ids and targets of passes `numbers`: int64 [windows, seq]."""
        indices = [index for number in numbers for index in self.share.indices(number)]
        with engine_of(self.model).comm.tracer.span("data", ""):
            windows = [self.sampler.train_window(step, i, self.global_batch) for i in indices]
            ids, targets = read_windows(self.tokens, windows)
            return ids.to(self.device), targets.to(self.device)

    def seed_draws(self, step: int, number: int) -> None:
        """Seed the generators for a pass, if it draws: see Note [Generators of the ranks]."""
        if self.config.dropout:
            axes = self.config.axes.over(self.place.world_size)
            place = self.share.micro_batch_of(number)
            seed_draws(self.config.seed, step, place, axes.peer_in_part(self.place.rank))

    def cut(self, ids: torch.Tensor, targets: torch.Tensor) -> AbstractContextManager[Inputs]:
        """Cut windows over context-parallel ranks, for one pass.

        The context gives this rank's ids and targets, and their positions (None: from 0).
        """
        if self.context is None:
            return nullcontext((ids, targets, None))
        return cast(AbstractContextManager[Inputs], self.context.cut(ids, targets))


@contextmanager
def join_ranks(
    place: RankPlace,
    threads: int | None,
    store: dist.Store | None = None,
    timeout_s: float | None = None,
) -> Iterator[torch.device]:
    """Join the process group, yield the device, and leave the group at the end.

    The ranks connect through ``store``, or through the address in the environment; one rank needs
    no network. ``timeout_s`` is that of the collectives.

    **State** sets this process's number of CPU threads, by default cores / local ranks.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, num_cores // place.local_world_size))
    device = local_device(place.local_rank)
    backend = "gloo" if device.type == "cpu" else "nccl"
    if place.world_size == 1:
        store = dist.HashStore()
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, timeout=timeout, store=store, rank=place.rank, world_size=place.world_size
    )
    try:
        yield device
    finally:
        gc.collect()  # Note [Leaving the process group]
        dist.destroy_process_group()


def prepare_run(config: TrainConfig, place: RankPlace, device: torch.device) -> Run:
    """Build data, model and optimizer of this rank; ``config`` is the result of `check_run`.

    **Raises** ConfigError on every rank if the output holds an earlier run, the text is too short,
    or the ranks have other keys or data.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    _prepare_output(config, place, tokenizer)
    tokens, entropy = open_stream(config.output, config.seq)
    sampler = WindowSampler.over(tokens, config.eval_windows, config.seed)
    base_memory_bytes = reset_peak_memory(device)
    axes = config.axes.over(place.world_size)
    model = shard_decoder(config, axes, make_decoder(config, tokenizer))
    context = ContextParallel(model, axes, config.cp_method) if config.cp > 1 else None
    pipeline = Pipeline(model, axes, config, device) if config.pp > 1 else None
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=config.loss_scale,
        growth_interval=config.loss_scale_window,
        enabled=config.precision == "fp16",
    )
    optimizer = _make_optimizer(config, model)
    # The keys that decide the steps are the same on all ranks; paths may differ by host.
    values = config.model_dump(mode="json")
    facts = [f"{name}: {values[name]}" for name in values if name not in _OF_HOST]
    facts.append(f"data: {len(tokens)} windows, {tokens.num_tokens} tokens")
    agree(engine_of(model).all_ranks, facts, "the keys of the run")
    return Run(
        config=config,
        place=place,
        device=device,
        tokenizer=tokenizer,
        tokens=tokens,
        unigram_entropy=entropy,
        sampler=sampler,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        context=context,
        pipeline=pipeline,
        local=make_local_steps(config, model),
        base_memory_bytes=base_memory_bytes,
    )


def make_decoder(config: TrainConfig, tokenizer: Tokenizer) -> nn.Module:
    """Make the model of a run on meta. **State** seeds torch's generator with the run's seed."""
    torch.manual_seed(config.seed)
    with torch.device("meta"):
        return Decoder(config, config.vocab or tokenizer.vocab)


def shard_decoder(config: TrainConfig, axes: Axes, model: nn.Module) -> nn.Module:
    """Shard a decoder over the ranks by the config; return this rank's pipeline stage of it."""
    decoder = spread_decoder(cast(Decoder, spread_experts(model, axes)), axes)
    if axes.pp > 1:
        stage = axes["pp"].get_local_rank()
        model = DecoderStage(decoder, stage, axes.pp, axes.tp)
        torch.manual_seed(seed_of(config.seed, stage, "stages"))  # stages draw other weights
    WATCH.tells_of_launcher = False  # `StopRequest` ends the run with it
    if config.hang_timeout is not None:
        watch(config.hang_timeout)
    precision = PRECISIONS[config.precision]
    model = shardwise.shard(
        model,
        stage=config.stage,
        precision=replace(
            precision,
            reduce=config.reduce or precision.reduce,
            gather=config.gather,
            block=config.gather_block,
        ),
        layout=config.layout,
        offload=config.offloaded,
        mesh=axes,
        units=Units(config.units, experts="*.experts" if config.ep > 1 else ()),
        schedule=Schedule(
            config.prefetch_bytes,
            DEFAULT_BUCKET_BYTES if config.bucket_bytes is None else config.bucket_bytes,
            config.reduce_every,
            config.nearby_ranks,
        ),
    )
    if axes.pp > 1 and config.tied_head:
        shardwise.parallel.tie(model, TIED)
    return model


def make_local_steps(config: TrainConfig, model: nn.Module) -> LocalSteps | None:
    """Make the local steps of replicas, if the config has any."""
    if config.local_steps is None:
        return None
    windows = Windows.of_fields(config.local_steps)
    outer: Outer | OuterName = windows.outer or "average"
    return LocalSteps(model, every=windows.every, outer=outer, streams=windows.streams)


def _make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer on the shards, with torch's fused kernel if the class has one."""
    _, arguments = OPTIMIZERS[config.optimizer]
    options: dict[str, Any] = {"lr": config.lr}
    if "betas" in arguments:
        options["betas"] = config.beta1, config.beta2
    user_options = config.optimizer_options or {}
    if "fused" in arguments and not is_shardwise_adamw(config.optimizer, user_options):
        options["fused"] = True
    options |= user_options
    params = list(model.parameters())
    groups = [  # vectors (norms) do not decay
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    try:
        optimizer = optimizer_class(config.optimizer, user_options)(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer_options: {config.optimizer} refuses {user_options}: {error}"
        ) from None
    return shardwise.overlap(optimizer) if config.overlap_step else optimizer


def _prepare_output(config: TrainConfig, place: RankPlace, tokenizer: Tokenizer) -> None:
    """Check the output and write the tokens; if that fails on one rank, all ranks raise."""
    failure: ConfigError | None = None
    try:
        if place.rank == 0:
            check_output(config)
        if place.local_rank == 0:
            write_stream(find_documents(config.data), tokenizer, config.output)
    except (ConfigError, OSError) as error:
        failure = ConfigError(str(error))
    (num_failed,) = all_reduce_scalars([float(failure is not None)])
    if failure is not None:
        raise failure
    if num_failed:
        raise ConfigError("preparing the run failed on another rank; see that rank's error")


def gather_integers(place: RankPlace, value: int) -> list[int]:
    """Return the values of all ranks in rank order. Every rank calls it."""
    shares = [0.0] * place.world_size
    shares[place.rank] = float(value)
    return [int(share) for share in all_reduce_scalars(shares)]
