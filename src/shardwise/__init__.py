"""Shardwise shards the training state of PyTorch models over data-parallel ranks.

Reading order, which is also the import order (a file imports only from what stands above it)::

    lazy                      names of a package, imported on first use
    errors, quantities        what is raised; how bytes are written
    names                     what units and lines of work are called
    spelling                  which known word an unknown one may have been
    terminal                  the way to the terminal, which nothing commands
    progress                  how far long work is: a bar, or lines
    svg                       three kinds of chart
    trace_events              Chrome traces
    unit_facts                the facts of one unit
    versions                  which versions of other libraries were tested
    strict_json               JSON read strictly and within limits
    keys                      keys of files and flags, checked, with errors for people
    host                      what the host has: memory, cores
    processes                 which process this is, and whether one lives
    device                    what differs between devices
    stages, precisions        the table of stages; names of precisions
    homes                     where state may rest
    config                    what the user asks for
    trace                     what goes on, told to a profiler or a recorder; counts
    axes                      degrees of parallelism, and meshes that follow
    mesh                      shard and replicate axes
    layout/                   integers: units, segments
    comm/                     collectives on flat tensors
    offload/                  state away from the device: files, and buffers that it passes
    tensor/                   ShardTensor: what an optimizer sees, and what operations give
    unit/                     one unit: storage, materialize, unit, reduce
    engine/                   when: order, prefetch, runtime, hooks, shard()
    step/                     an optimizer's step: in the background, through the device
    optim/                    optimizers: AdamW with small moments
    parallel/                 sequences, experts, pipelines: models over other axes
    check/                    a sharded model against one process; ranks against each other
    debug                     what a model holds and sends on this rank
    plan/                     before the run: bytes, time, search, simulation
    bench/                    what this machine does, measured
    checkpoint/               state on disk: written, committed, found, checked, read
    convert/                  other people's checkpoints, in and out
    monitor/                  what a run does: spans, figures, memory, kept and told
    train/                    the recipe behind `shardwise train`
    interop/                  other libraries: fully_shard, DeepSpeed, Hugging Face, Lightning ...
    cli/                      parse, call, print

Names are imported on first use, so that the command line answers without loading torch.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise import optim as optim
    from shardwise.axes import Axes as Axes
    from shardwise.check.compare_ranks import check_replicas as check_replicas
    from shardwise.check.one_process import check_gradients as check_gradients
    from shardwise.checkpoint.checkpoints import Checkpoints as Checkpoints
    from shardwise.checkpoint.save_load import load as load
    from shardwise.checkpoint.save_load import save as save
    from shardwise.config import Precision as Precision
    from shardwise.debug import counting as counting
    from shardwise.debug import stats as stats
    from shardwise.debug import watch as watch
    from shardwise.engine.accumulate import accumulate as accumulate
    from shardwise.engine.accumulate import layer_by_layer as layer_by_layer
    from shardwise.engine.api import shard as shard
    from shardwise.engine.describe import describe as describe
    from shardwise.engine.gathered import gathered as gathered
    from shardwise.homes import Offload as Offload
    from shardwise.interop.deepspeed.settings import from_deepspeed as from_deepspeed
    from shardwise.interop.fsdp2.api import fully_shard as fully_shard
    from shardwise.interop.streaming import stream as stream
    from shardwise.monitor.observer import observe as observe
    from shardwise.parallel.clipping import clip_grad_norm_ as clip_grad_norm_
    from shardwise.parallel.context import ContextParallel as ContextParallel
    from shardwise.parallel.experts import MixtureOfExperts as MixtureOfExperts
    from shardwise.parallel.experts import spread_experts as spread_experts
    from shardwise.parallel.losses import mean_loss as mean_loss
    from shardwise.parallel.routing import balance_experts as balance_experts
    from shardwise.parallel.tying import tie as tie
    from shardwise.parallel.uneven import join as join
    from shardwise.step.overlap import overlap as overlap
    from shardwise.tensor.shard_tensor import ShardTensor as ShardTensor

_HOMES = {
    "Axes": "shardwise.axes",
    "Checkpoints": "shardwise.checkpoint.checkpoints",
    "ContextParallel": "shardwise.parallel.context",
    "MixtureOfExperts": "shardwise.parallel.experts",
    "Offload": "shardwise.homes",
    "Precision": "shardwise.config",
    "ShardTensor": "shardwise.tensor.shard_tensor",
    "accumulate": "shardwise.engine.accumulate",
    "balance_experts": "shardwise.parallel.routing",
    "check_gradients": "shardwise.check.one_process",
    "check_replicas": "shardwise.check.compare_ranks",
    "clip_grad_norm_": "shardwise.parallel.clipping",
    "counting": "shardwise.debug",
    "describe": "shardwise.engine.describe",
    "from_deepspeed": "shardwise.interop.deepspeed.settings",
    "fully_shard": "shardwise.interop.fsdp2.api",
    "gathered": "shardwise.engine.gathered",
    "join": "shardwise.parallel.uneven",
    "layer_by_layer": "shardwise.engine.accumulate",
    "load": "shardwise.checkpoint.save_load",
    "mean_loss": "shardwise.parallel.losses",
    "observe": "shardwise.monitor.observer",
    "optim": "shardwise.optim",
    "overlap": "shardwise.step.overlap",
    "save": "shardwise.checkpoint.save_load",
    "shard": "shardwise.engine.api",
    "spread_experts": "shardwise.parallel.experts",
    "stats": "shardwise.debug",
    "stream": "shardwise.interop.streaming",
    "tie": "shardwise.parallel.tying",
    "watch": "shardwise.comm.watch",
}

__version__ = "0.1.0"
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
