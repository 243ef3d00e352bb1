"""Full weights of a sharded model one after the other, under the names that others know."""

import sys
from collections.abc import Collection, Iterator

import torch

from shardwise.engine.parts import Model, modules_of
from shardwise.engine.weights import BUCKET_BYTES, FullWeights, named_weights, stream_weights
from shardwise.errors import ConfigError


def stream(
    model: Model,
    *,
    ranks: Collection[int] | None = None,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's weights in full, one after the other, as (name, tensor); training stands.

    Every rank calls it and iterates to the end. The ``ranks``, by their number in the world, get
    the weights, None is all; on the others the loop has no turns, and they only send. Names and
    shapes are those of ``state_dict()``; of a model of transformers, those of ``save_pretrained``.
    Tied weights come once. ``dtype``: floating-point weights are cast before they are sent; None is
    the master dtype. ``model`` may be a list of a rank's pipeline stages, whose order is kept. A
    tensor that was yielded is the caller's.

    **Cost** each slice is sent once to each rank that needs it. Beside what the caller keeps, one
    tensor and ``bucket_bytes`` of memory on the ranks that get the weights: small tensors travel
    together. More for what several axes cut (tensor and expert parallelism, pipelines: the piece
    once more), and where the names of transformers need several tensors at once (those of a layer).

    **Raises** ConfigError on all ranks for ``ranks`` that there are not, where ranks ask for
    different things, and for a parameter that is made of several tensors; StateError inside
    `gathered`, and where a weight changes before the last is taken.
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
        return stream_weights(weights, plan.tensors, plan.groups, plan.revert, bucket_bytes)
    tensors = {name: t for each in modules_of(model) for name, t in named_weights(each).items()}
    return stream_weights(weights, tensors, [[name] for name in tensors], dict, bucket_bytes)
