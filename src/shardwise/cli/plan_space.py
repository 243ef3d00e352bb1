"""What a search of `shardwise plan` varies: every setting that the user did not decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from shardwise.cli.plan_setup import Setup
from shardwise.cli.plan_write import trainable_degrees
from shardwise.homes import Offload
from shardwise.plan.candidate import Kernels, LossKind
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.request import PlanRequest
from shardwise.plan.space import Limits, Space
from shardwise.precisions import GatherName, ReduceName

if TYPE_CHECKING:
    from shardwise.config import LayoutName

_WINDOWS, _MOST_TOKENS = 48, 1 << 22  # of a rank, and of a step of large models
_MANY_RANKS = 512  # beyond which pipelines with contexts are tried too


def space_of(
    setup: Setup,
    *,
    to_train: bool = False,
    gathers: Sequence[GatherName | None] | None = None,
    reduces: Sequence[ReduceName | None] | None = None,
) -> Space:
    """Return what a search varies: every setting that the user did not decide.

    ``gathers`` and ``reduces``: formats to compare; without, the user's. ``to_train``: no
    offloading, and no degrees that `shardwise train` refuses.

    **Raises** ConfigError where it refuses all of them.
    """
    base, given = setup.candidate, setup.given
    is_wide = isinstance(setup.model, ShapedModel) and setup.config is None
    degrees = setup.degrees or (_degrees(setup) if is_wide else (base.degrees,))
    if to_train and setup.config is not None:
        degrees = trainable_degrees(base, degrees, setup.config, "accumulation" in given)
    checkpointing = ("none", "full") if to_train or not is_wide else ("none", "per_op", "full")
    # Muon steps on whole matrices; finer units are the parts of a block, where the decoder is ours.
    layouts: tuple[LayoutName, ...] = ("rows", "flat")
    layouts = ("matrices",) if base.optimizer == "muon" else layouts
    units: tuple[tuple[str, ...] | None, ...] = (None,)
    if setup.config is not None and not isinstance(setup.model, ShapedModel):
        units = (None, ("Attention", "FeedForward", "TokenEmbedding"))
    return Space(
        base,
        stages=(base.stage,) if "stage" in given else (0, 1, 2, 3),
        layouts=(base.layout,) if "layout" in given else layouts,
        units=(base.units,) if "units" in given else units,
        num_shards=(base.num_shards,) if {"dp_replicate", "dp_shard"} & given else (),
        prefetch_units=(None,) if "prefetch_bytes" in given else (1, 0, 2),
        bucket_bytes=(base.bucket_bytes,) if "bucket_bytes" in given else (1 << 20, 25 << 20),
        reduce_every=(base.reduce_every,),
        gathers=gathers or (base.gather,),
        reduces=reduces or (base.reduce,),
        activation_checkpointing=(
            (base.activation_checkpointing,)
            if "activation_checkpointing" in given
            else checkpointing
        ),
        micro_batches=(base.micro_batch,) if "micro_batch" in given else (),
        offloads=(base.offload,) if to_train else _offloads(setup),
        degrees=degrees,
        expert_degrees=_expert_degrees(setup) if is_wide and not to_train else (base.ep,),
        kernels=_kernels(setup) if is_wide and not to_train else (None,),
        narrows=is_wide,
        fills_pipelines=to_train or (is_wide and "accumulation" not in given),
        may_move_inputs=not given & {"offload", "offload_activations"}
        and setup.cluster.node.accelerator.asynchronous,
    )


def _degrees(setup: Setup) -> tuple[tuple[int, int, int], ...]:
    """Return the tensor, pipeline and context degrees that are worth asking about.

    Powers of two; tensor groups within a node, and pipelines with contexts on the largest clusters
    alone.
    """
    base, given, ranks = setup.candidate, setup.given, setup.cluster.num_ranks
    most = {"tp": min(setup.cluster.node.num_accelerators, ranks), "pp": 16, "cp": 8}
    powers = [1, 2, 4, 8, 16]
    choices = [
        (getattr(base, name),) if name in given else [n for n in powers if n <= min(top, ranks)]
        for name, top in most.items()
    ]
    return tuple(
        each
        for each in product(*choices)
        if not ranks % prod(each) and (min(each[1:]) == 1 or ranks > _MANY_RANKS)
    )


def _expert_degrees(setup: Setup) -> tuple[int, ...]:
    """Return the degrees over which experts may be spread: powers of two that divide them."""
    base, model = setup.candidate, setup.model
    num = model.num_experts if isinstance(model, ShapedModel) else 0
    if "ep" in setup.given or not num:
        return (base.ep,)
    most = min(num, setup.cluster.num_ranks)
    return tuple(n for n in (1 << i for i in range(10)) if n <= most and not num % n)


def _kernels(setup: Setup) -> tuple[tuple[Kernels, LossKind], ...]:
    """Return kernels with losses: what the user has decided, else all that may be."""
    base, given = setup.candidate, setup.given
    pairs: tuple[tuple[Kernels, LossKind], ...] = (
        *(("compiled", "fused"), ("compiled", "compiled")),
        *(("eager", "fused"), ("eager", "eager")),
    )
    if "loss" in given:
        pairs = (("compiled", base.loss), ("eager", base.loss))
    if "kernels" in given:
        pairs = tuple(pair for pair in pairs if pair[0] == base.kernels)
    return pairs


def limits_of(setup: Setup, request: PlanRequest) -> Limits:
    """Return what the plans of a search have to keep to."""
    memory = request.max_memory
    return Limits(
        max_memory_bytes=memory if isinstance(memory, int) else None,
        tokens_per_step=setup.tokens_per_step or _compared_tokens(setup),
        target_tokens_per_s=request.target_tokens_per_s,
    )


def _compared_tokens(setup: Setup) -> int | None:
    """Return the tokens of a step at which plans are compared, where the user has named none.

    Some 100 thousand of each rank, whose windows many micro-batches divide, and no more than
    ``_MOST_TOKENS`` of all. None where the user has decided accumulation, or there can be none.
    """
    base, given = setup.candidate, setup.given
    if "accumulation" in given or base.step_in_backward:
        return None
    each = setup.cluster.num_ranks * setup.model.seq
    most = max(1, _MOST_TOKENS // each)
    windows = _WINDOWS * max(1, 2048 // setup.model.seq)
    if "micro_batch" in given:
        windows = base.micro_batch
    elif windows > most:
        windows = 1 << most.bit_length() - 1
    return windows * each


def _offloads(setup: Setup) -> tuple[Offload, ...]:
    """Return where state may rest; a device that is the host has nowhere else."""
    offload = setup.candidate.offload
    inputs = {"offload_activations"}
    is_given = {name for name in setup.given - inputs if name.startswith("offload")}
    if is_given or not setup.cluster.node.accelerator.asynchronous:
        return (offload,)
    wholly = Offload(optimizer="cpu"), Offload("cpu", optimizer="cpu")
    found = [Offload(), Offload(optimizer="cpu", fraction=0.5), *wholly]
    found += [replace(each, step_on="device") for each in wholly]
    return tuple(replace(each, activations=offload.activations) for each in found)
