"""Attention of transformers' models over sequences that are cut: no mask is made from a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from shardwise.errors import ConfigError
from shardwise.parallel.context import is_cut

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_NAME = "shardwise_sdpa"


def attend_over_parts(model: PreTrainedModel) -> None:
    """Let a model compute whole sequences as with "sdpa", and cut ones within `cut()`.

    transformers makes masks from what it is given: positions of a part, which jump from its head to
    its tail, look to it like packed documents.

    **Raises** ConfigError for a model that attends otherwise.
    """
    chosen = model.config._attn_implementation
    if chosen not in ("sdpa", _NAME):
        raise ConfigError(
            f"model: its attention is {chosen!r}; context parallelism takes 'sdpa': "
            "model.set_attn_implementation('sdpa')"
        )
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if not is_cut():
        return sdpa_mask(*args, **kwargs)
    if kwargs.get("local_size") is not None:
        raise ConfigError(
            "model: it has layers of sliding windows or chunks, which can't be computed over a "
            "sequence that is cut; use cp=1"
        )
    given = kwargs.get("attention_mask")
    if given is not None and not bool(given.all()):
        raise ConfigError(
            "attention_mask: it masks tokens of a sequence that is cut. Fill sequences up on the "
            "right, with labels of -100 there, and leave the mask out; pack documents by "
            "cut(documents=)"
        )
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not is_cut() or attention_mask is not None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        scale=scaling,
        is_causal=causal,  # also of one token, which transformers takes for the last one
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None
