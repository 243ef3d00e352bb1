"""Shardwise shards the training state of PyTorch models over data-parallel ranks.

Reading order, which is also the import order (a file imports only from files above it)::

    lazy                      names of a package, imported on first use
    errors, quantities        exceptions; formats of bytes and durations
    names                     names of units and lines of work
    spelling                  suggestions for misspelt words
    terminal                  output with control characters escaped
    progress                  progress of long work: a bar, or lines
    svg                       elements, axes and curves of pictures as SVG text
    charts                    charts as SVG text: lines, bars, areas, timelines
    trace_events              Chrome traces
    unit_facts                the facts of one unit
    versions                  tested versions of other libraries
    strict_json               JSON read strictly and within limits
    keys                      keys of files and flags, checked
    host                      memory and cores of the host
    processes                 identity and life of processes
    device                    differences between devices
    stages, precisions        the table of stages; names of precisions
    homes                     places of state: device, host, files
    outer                     settings of replicas that step separately
    axes                      degrees of parallelism, and their meshes
    config                    settings of `shard()`
    trace                     events for a profiler or a recorder; counts
    mesh                      shard and replicate axes
    layout/                   integers: units, segments
    comm/                     collectives on flat tensors
    tensor/                   ShardTensor: the optimizer's view, and its operations
    unit/                     one unit: storage, materialize, unit, reduce
    engine/                   order, prefetch, runtime, hooks, shard()
    codes/                    gathers and reductions of fewer bytes
    surface/                  class, methods and copies of sharded modules; `gathered`
    offload/                  state on the host and in files; device buffers for its steps
    step/                     optimizer steps: in the background, on the device
    optim/                    optimizers: AdamW with small moments
    parallel/                 parallelism over sequences, experts and pipelines
    check/                    comparison with one process, and between ranks
    hangs/                    hangs and deaths of ranks: heartbeats, diagnosis, verdicts
    debug                     memory and traffic of a model on this rank
    plan/                     before the run: bytes, time, search, simulation
    bench/                    measurements of this machine
    checkpoint/               checkpoints: write, commit, find, verify, read
    convert/                  import and export of other checkpoint formats
    monitor/                  records of a run: spans, figures, memory
    data/                     samples of each rank and step, token files
    train/                    the recipe behind `shardwise train`
    preflight/                checks of machines, network and folder before a run
    interop/                  other libraries: fully_shard, DeepSpeed, Hugging Face, Lightning ...
    cli/                      parse, call, print

Public names: those of ``__all__``, of the groups `check`, `data`, `debug`, `optim`, `parallel` and
`interop`, and of `config` and `errors`. They are imported on first use, so that the command line
answers without loading torch.
"""

import warnings
from typing import TYPE_CHECKING

from shardwise.comm.listener import WAITS as _WAITS
from shardwise.comm.listener import Listener as _Listener
from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise import check as check
    from shardwise import data as data
    from shardwise import debug as debug
    from shardwise import interop as interop
    from shardwise import optim as optim
    from shardwise import parallel as parallel
    from shardwise.axes import Axes as Axes
    from shardwise.checkpoint.checkpoints import Checkpoints as Checkpoints
    from shardwise.checkpoint.save_load import load as load
    from shardwise.checkpoint.save_load import save as save
    from shardwise.config import Precision as Precision
    from shardwise.engine.api import shard as shard
    from shardwise.homes import Offload as Offload
    from shardwise.interop.fsdp2.api import fully_shard as fully_shard
    from shardwise.monitor.describe import describe as describe
    from shardwise.monitor.observer import observe as observe
    from shardwise.parallel.accumulate import accumulate as accumulate
    from shardwise.step.overlap import overlap as overlap
    from shardwise.surface.gathered import gathered as gathered
    from shardwise.tensor.shard_tensor import ShardTensor as ShardTensor

_HOMES = {
    "Axes": "shardwise.axes",
    "Checkpoints": "shardwise.checkpoint.checkpoints",
    "Offload": "shardwise.homes",
    "Precision": "shardwise.config",
    "ShardTensor": "shardwise.tensor.shard_tensor",
    "accumulate": "shardwise.parallel.accumulate",
    "describe": "shardwise.monitor.describe",
    "fully_shard": "shardwise.interop.fsdp2.api",
    "gathered": "shardwise.surface.gathered",
    "load": "shardwise.checkpoint.save_load",
    "observe": "shardwise.monitor.observer",
    "overlap": "shardwise.step.overlap",
    "save": "shardwise.checkpoint.save_load",
    "shard": "shardwise.engine.api",
}
_GROUPS = {
    name: f"shardwise.{name}" for name in ("check", "data", "debug", "interop", "optim", "parallel")
}
# Names of version 0.1: where each is now.
_RENAMED = {
    "ContextParallel": "shardwise.parallel:ContextParallel",
    "MixtureOfExperts": "shardwise.parallel:MixtureOfExperts",
    "balance_experts": "shardwise.parallel:balance_experts",
    "check_gradients": "shardwise.check:gradients",
    "check_replicas": "shardwise.check:replicas",
    "clip_grad_norm_": "shardwise.parallel:clip_grad_norm_",
    "counting": "shardwise.debug:counting",
    "from_deepspeed": "shardwise.interop.deepspeed:from_deepspeed",
    "join": "shardwise.parallel:join",
    "layer_by_layer": "shardwise.parallel.breadth_first:layer_by_layer",
    "mean_loss": "shardwise.parallel:mean_loss",
    "spread_experts": "shardwise.parallel:spread_experts",
    "stats": "shardwise.debug:stats",
    "stream": "shardwise.interop:stream",
    "tie": "shardwise.parallel:tie",
    "watch": "shardwise.debug:watch",
}


def _warn_of_name(name: str) -> None:
    if name in _RENAMED:
        new = _RENAMED[name].replace(":", ".")
        if name == "layer_by_layer":
            new = "shardwise.accumulate(model, forward, micro_batches, order='breadth_first')"
        warnings.warn(
            f"shardwise.{name} is now {new}; the old name goes with version 0.4",
            FutureWarning,
            stacklevel=3,
        )


def _hang_watch() -> _Listener:
    from shardwise.hangs.abort import WATCH

    return WATCH


_WAITS.attach(_hang_watch)

__version__ = "0.3.1"
__all__ = list(_HOMES)
__getattr__ = lazily(__name__, _HOMES | _GROUPS | _RENAMED, _warn_of_name)[0]
__dir__ = lazily(__name__, _HOMES | _GROUPS)[1]
