"""The built-in decoder over tensor parallelism, by torch's own parallel layers."""

from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.axes import Axes
from shardwise.parallel.experts import MixtureOfExperts

_TOKENS = Shard(1)  # of [B, T, D]: between layers each rank has a part of the tokens


def spread_decoder(model: Any, axes: Axes) -> Any:
    """Cut a `PlainDecoder` over ``axes["tp"]``, in place; return it.

    Heads, columns of the feed-forward and rows of the vocabulary are divided; between layers each
    rank has a part of the tokens (Korthikanti et al., arXiv:2205.05198). Of experts the shared one
    is divided; routed ones are spread over ``ep``, by `spread_experts`. Logits are whole on every
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
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(_TOKENS, None, None),
            desired_input_layouts=(Replicate(), None, None),
        ),
        **{name: ColwiseParallel() for name in heads},
        "attention.out": RowwiseParallel(output_layouts=_TOKENS),
        "feed_forward_norm": SequenceParallel(),
        **_of_feed_forward(block.feed_forward),
    }


def _of_feed_forward(layer: Any) -> dict[str, ParallelStyle]:
    if not isinstance(layer, MixtureOfExperts):
        tokens = PrepareModuleInput(input_layouts=(_TOKENS,), desired_input_layouts=(Replicate(),))
        return {"feed_forward": tokens, **_of_columns("feed_forward", layer, _TOKENS)}
    layouts: Any = (_TOKENS, None)  # the auxiliary loss is no matter of layouts
    tokens_and_balance = PrepareModuleInputOutput(
        input_layouts=(_TOKENS,),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(Replicate(), None),
        desired_output_layouts=layouts,
    )
    shared = {}
    if layer.shared is not None:
        shared = _of_columns("feed_forward.shared", layer.shared, Replicate())
    return {"feed_forward": tokens_and_balance, **shared}


def _of_columns(path: str, layer: Any, to: Placement) -> dict[str, ParallelStyle]:
    columns = [name for name in ("gate", "up") if getattr(layer, name) is not None]
    return {
        **{f"{path}.{name}": ColwiseParallel() for name in columns},
        f"{path}.down": RowwiseParallel(output_layouts=to),
    }
