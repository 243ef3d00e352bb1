"""The built-in decoder over tensor parallelism, by torch's own parallel layers."""

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.axes import Axes

_TOKENS = Shard(1)  # of [B, T, D]: between layers each rank has a part of the tokens


def spread_decoder(model: Any, axes: Axes) -> Any:
    """Cut a `PlainDecoder` over ``axes["tp"]``, in place; return it.

    Heads, columns of the feed-forward and rows of the vocabulary are divided; between layers each
    rank has a part of the tokens (Korthikanti et al., arXiv:2205.05198). Logits are whole on every
    rank. A tied head stays one parameter with the embedding. **State** parameters become DTensors.
    """
    if axes.tp == 1:
        return model
    mesh = axes["tp"]
    tied = model.head.weight is model.embedding.weight
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=_TOKENS),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=_TOKENS, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    if tied:
        model.head.weight = model.embedding.weight
    for block in model.blocks:
        parallelize_module(block, mesh, _of_block(block))
    return model


def _of_block(block: Any) -> dict[str, ParallelStyle]:
    heads = ("attention.query", "attention.key", "attention.value")
    columns = [name for name in ("gate", "up") if getattr(block.feed_forward, name) is not None]
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(_TOKENS, None, None),
            desired_input_layouts=(Replicate(), None, None),
        ),
        **{name: ColwiseParallel() for name in heads},
        "attention.out": RowwiseParallel(output_layouts=_TOKENS),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(_TOKENS,), desired_input_layouts=(Replicate(),)
        ),
        **{f"feed_forward.{name}": ColwiseParallel() for name in columns},
        "feed_forward.down": RowwiseParallel(output_layouts=_TOKENS),
    }
