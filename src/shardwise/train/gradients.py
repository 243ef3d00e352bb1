"""One pass of a run's model against one process: `shardwise train --check-gradients`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.check.one_process import GradientReport, check_gradients
from shardwise.device import fork_rng_devices
from shardwise.train.pipeline import Pipeline
from shardwise.train.setup import Run, make_decoder, shard_decoder
from shardwise.train.windows import rank_indices, read_windows


def check_run_gradients(run: Run) -> GradientReport:
    """Compare a pass over the first step's windows with one process that has those of all ranks.

    A second model of the same kind is sharded for it, without dropout and without encodings, and in
    fp32 where the run is in fp16, whose gradients need a scale.

    **Cost** as `shardwise.check_gradients`. **State** the run and its generators stay as they are.

    **Raises** GradientError on all ranks.
    """
    config = run.config.model_copy(update={"dropout": 0.0, "gather": None, "reduce": None})
    if config.precision == "fp16":
        config = config.model_copy(update={"precision": "fp32"})
    config = config.model_copy(update={"pp_schedule": "gpipe", "accumulation": 1})
    axes = config.axes.over(run.place.world_size)
    part, num_parts = run.part_of_batch
    indices = [
        index
        for each in range(num_parts)
        for index in rank_indices(config.micro_batch, 0, each, num_parts)
    ]
    windows = [run.sampler.train_window(1, index, run.global_batch) for index in indices]
    ids, targets = (x.to(run.device) for x in read_windows(run.stream, windows, config.seq))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        inputs, wanted, *positions = batch
        return F.cross_entropy(model(inputs, None, *positions).float().transpose(1, 2), wanted)

    def take_step(stages: Any, batch: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        return Pipeline(stages, axes, config, run.device).step(*batch)

    mine = (x.chunk(num_parts)[part] for x in (ids, targets))
    # Whole windows, those of the one process, are computed as ever in there.
    with torch.random.fork_rng(fork_rng_devices(run.device)), run.cut(*mine) as local:
        return check_gradients(
            lambda: make_decoder(config, run.tokenizer),
            (ids, targets),
            axes,
            compose=lambda model: shard_decoder(config, axes, model),
            run=take_step if config.pp > 1 else None,
            loss=loss,
            local_batch=lambda _: local,
        )
