"""Stream full weights out of a sharded model, one after the other."""

import sys
from collections.abc import Collection, Iterator

import torch

from shardwise.errors import ConfigError
from shardwise.interop.full_weights import FullWeights, named_weights
from shardwise.parallel.parts import Model, modules_of

_BUCKET_BYTES = 64 << 20


def stream(
    model: Model,
    *,
    ranks: Collection[int] | None = None,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = _BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's full weights one after the other, as (name, tensor), between training steps.

    Every rank calls it and iterates to the end. The ``ranks`` (global ranks; None is all) get the
    weights; the other ranks only send, and their loop has no iterations. Names and shapes are those
    of ``state_dict()``, or of ``save_pretrained`` for a model of transformers. Tied weights are
    yielded once. Floating-point weights are cast to ``dtype`` before they are sent; None is the
    master dtype. ``model`` may be a list of a rank's pipeline stages, whose order is kept. The
    caller owns the yielded tensors.

    **Cost** each slice is sent once to each rank that needs it. Ranks that get the weights need
    memory for one tensor and ``bucket_bytes``, in which small tensors are sent together, beside the
    tensors that the caller keeps. Tensors that several axes cut (tensor and expert parallelism,
    pipelines) need one more piece. If the names of transformers need several tensors at once, those
    of a layer are in memory.

    **Raises** ConfigError on all ranks for unknown ``ranks``, when the arguments of ranks differ,
    and for a parameter that is made of several tensors; StateError inside `gathered`, and when a
    weight changes before the last one is yielded.
    """
    if type(bucket_bytes) is not int or bucket_bytes < 0:
        raise ConfigError(f"stream(): bucket_bytes={bucket_bytes!r}: expected bytes, 0 or more")
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ConfigError(f"stream(): dtype={dtype!r}: expected a floating-point dtype, or None")
    weights = FullWeights(model, "stream()", ranks, dtype)
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from shardwise.interop.transformers.saving import Plan

        plan = Plan(model, None, save_original_format=True)
        return weights.stream(plan.tensors, plan.groups, plan.revert, bucket_bytes)
    tensors = {name: t for each in modules_of(model) for name, t in named_weights(each).items()}
    return weights.stream(tensors, [[name] for name in tensors], dict, bucket_bytes)
