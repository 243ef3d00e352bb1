"""One pass of a run's model against one process: `shardwise train --check-gradients`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.device import fork_rng_devices
from shardwise.engine.gradients import GradientReport, check_gradients
from shardwise.train.setup import Run, hybrid_mesh, make_decoder, shard_decoder
from shardwise.train.windows import rank_indices, read_windows


def check_run_gradients(run: Run) -> GradientReport:
    """Compare a pass over the first step's windows with one process that has those of all ranks.

    A second model of the same kind is sharded for it, without dropout, and in fp32 where the run is
    in fp16, whose gradients need a scale.

    **Cost** as `shardwise.check_gradients`. **State** the run and its generators stay as they are.

    **Raises** GradientError on all ranks.
    """
    config = run.config.model_copy(update={"dropout": 0.0})
    if config.precision == "fp16":
        config = config.model_copy(update={"precision": "fp32"})
    num_ranks = run.place.world_size
    indices = [
        index
        for rank in range(num_ranks)
        for index in rank_indices(config.micro_batch, 0, rank, num_ranks)
    ]
    windows = [run.sampler.train_window(1, index, run.global_batch) for index in indices]
    ids, targets = read_windows(run.stream, windows, config.seq)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, wanted = batch
        return F.cross_entropy(model(inputs).float().transpose(1, 2), wanted)

    with torch.random.fork_rng(fork_rng_devices(run.device)):
        return check_gradients(
            lambda: make_decoder(config, run.tokenizer),
            (ids.to(run.device), targets.to(run.device)),
            hybrid_mesh(config, run.place, run.device),
            compose=lambda model: shard_decoder(config, run.place, run.device, model),
            loss=loss,
        )
