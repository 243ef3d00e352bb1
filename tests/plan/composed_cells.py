"""Composed runs of the built-in decoder: as they are planned by formula, and on real ranks.

Imported by tests and by ``tests/campaigns/composed.py``. Each token goes to all experts, so that
how many rows a rank's experts get does not depend on routing. Four layers 256 wide, so that each
stage of up to two has several.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

import shardwise
from allocator import AllocatorTrace, traced
from ranks import HANG_S
from shardwise.parallel.context import ContextParallel
from shardwise.plan.candidate import ALL_DEGREES, Candidate
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.step.play import play
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder, Pipeline
from shardwise.train.setup import shard_decoder

DENSE = {
    **{"dim": 256, "layers": 4, "heads": 4, "kv_heads": 4, "seq": 128, "micro_batch": 2},
    **{"vocab": 2048, "precision": "fp32"},
}
MIXED = {
    **DENSE,
    **{"experts": 4, "experts_per_token": 4, "expert_ffn_multiple": 1.0, "shared_experts": 1},
    **{"dense_layers": 1, "expert_balance": 0.0, "expert_bias": True},
}


NUM_STEPS = 3
_COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce")
_FUNCTIONAL = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


@dataclass(frozen=True)
class ComposedCell:
    """One setting: keys of `shardwise train` beside those of ``DENSE`` or ``MIXED``."""

    settings: dict[str, Any] = field(hash=False)
    mixed: bool = False

    @property
    def name(self):
        said = [f"{key}={value}" for key, value in self.settings.items()]
        return ", ".join(["experts" if self.mixed else "dense", *said])

    @property
    def config(self):
        return TrainConfig(**{**(MIXED if self.mixed else DENSE), **self.settings})

    def candidate(self, num_ranks):
        return candidate_of(self.config, num_ranks)


def candidate_of(config, num_ranks):
    axes = config.axes.over(num_ranks)
    return Candidate(
        stage=config.stage,
        num_shards=axes.dp_shard,
        num_replicas=axes.dp_replicate,
        **{name: getattr(axes, name) for name in ALL_DEGREES},
        precision=config.precision,
        layout=config.layout,
        micro_batch=config.micro_batch,
        accumulation=config.accumulation or 1,
        activation_checkpointing="full" if config.activation_checkpointing else "none",
        pp_schedule=config.pp_schedule,
        cp_method=config.cp_method,
        transport="point_to_point",
        local_steps=config.local_steps,
    )


@dataclass(frozen=True)
class Measured:
    """The stage of a rank, and the most bytes that its tensors had in a step; 0 if not traced."""

    stage: int
    peak: int


# -- predicted
def predict(cell, num_ranks):
    """Play a step on each stage of the pipeline."""
    config, candidate = cell.config, cell.candidate(num_ranks)
    model = ShapedModel("decoder", config.shape(config.vocab or 0), config.seq)
    # Context ranks are shard ranks; see planning.
    as_played = replace(candidate, num_shards=candidate.num_shards * candidate.cp, cp=1)
    tapes = [model.tape(candidate, stage) for stage in range(candidate.pp)]
    return [play(tape, as_played) for tape in tapes]


# -- measured, in the ranks
def compose(config, num_ranks):
    """Return a decoder over the axes, and what runs all forward and backward passes of a step."""
    axes, num = config.axes.over(num_ranks), config.accumulation or 1
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(config, config.vocab or 0)
    model = shard_decoder(config, axes, model)
    context = ContextParallel(model, axes, config.cp_method) if config.cp > 1 else None
    pipeline = Pipeline(model, axes, config, torch.device("cpu")) if config.pp > 1 else None
    rows = config.micro_batch * (1 if pipeline is None else num)

    def run_passes():
        for number in range(num if pipeline is None else 1):
            ids = torch.zeros(rows, config.seq, dtype=torch.int64)
            cut = nullcontext((ids, ids, None)) if context is None else context.cut(ids, ids)
            with cut as inputs:
                if pipeline is not None:
                    pipeline.step(*inputs)
                    continue
                with shardwise.accumulate(model, last=number + 1 == num):
                    model(*inputs).backward()

    return model, run_passes


def measure(cell, num_ranks, traces=True):
    """Take a few steps, and trace them."""
    config, axes = cell.config, cell.config.axes.over(num_ranks)
    tracing = traced(skips_transport=True) if traces else nullcontext(AllocatorTrace())
    with tracing as allocator, _watched_frees():
        model, run_passes = compose(config, num_ranks)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for number in range(NUM_STEPS):
            with allocator.window(f"step {number}"):
                run_passes()
                shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    # All steps are alike. What another thread frees after all (a garbage collection that begins
    # there) is seen later than it happens, and never earlier: the least peak is the nearest.
    steps = [f"step {number}" for number in range(1, NUM_STEPS)]
    peak = min(map(allocator.peak, steps)) if traces else 0
    return Measured(axes["pp"].get_local_rank() if config.pp > 1 else 0, peak)


@contextmanager
def _watched_frees():
    """Let gloo's threads let go of a collective's tensors before it returns.

    The trace sees what this thread frees. A thread that holds the last reference for a moment
    longer would make what is measured larger.
    """
    functional = torch.ops._c10d_functional
    places = [(dist, name) for name in _COLLECTIVES if hasattr(dist, name)]
    places += [(functional, name) for name in _FUNCTIONAL]
    plain = [getattr(place, name) for place, name in places]

    def settled(call, is_functional):
        def then_wait(*args, **kwargs):
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            held = [(tensor, _references(tensor)) for tensor in given]
            done = call(*args, **kwargs)
            if is_functional:
                functional.wait_tensor(done)
                held.append((done, _references(torch.empty(1))))
            _wait_until_let_go(held)
            return done

        return then_wait

    for (place, name), call in zip(places, plain, strict=True):
        setattr(place, name, settled(call, place is functional))
    try:
        yield
    finally:
        for (place, name), call in zip(places, plain, strict=True):
            setattr(place, name, call)


def _references(tensor):
    """Count what refers to a tensor, and to its memory: views of it do the second alone."""
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), memory


def _wait_until_let_go(held):
    """Sleep until no tensor, and no memory, has more references than are named with it."""
    deadline = time.monotonic() + HANG_S
    for tensor, (of_it, of_memory) in held:
        while (now := _references(tensor))[0] > of_it or now[1] > of_memory:
            assert time.monotonic() < deadline, "a thread of the transport keeps a tensor"
            time.sleep(0.0001)


def measure_all(rank, num_ranks, cells, *, traces_all=True):
    """Return what this rank measures in each cell, or only if it is the first one of its stage."""
    in_stage = [rank % (num_ranks // cell.config.pp) for cell in cells]
    return [
        measure(cell, num_ranks, traces=traces_all or number == 0)
        for cell, number in zip(cells, in_stage, strict=True)
    ]
