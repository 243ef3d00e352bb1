"""Ring attention over a sharded sequence, by torch's implementation.

torch has the loop over the ranks, the merging of partial results and its gradient
(torch.distributed.tensor.experimental, a prototype whose functions start with an underscore; Ring
Attention, arXiv:2310.01889). It places heads and tails on ranks as we do, see Note [Head and tail]
in sequences.py. The loop is called directly, because torch's `context_parallel` changes the
attention of all DTensors, also of tensor-parallel ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.comm.exchange import Exchange
    from shardwise.parallel.sequences import SequenceCut

_TOKENS = 2  # the dim of tokens in [B, H, t, E]
_ATEN = torch.ops.aten
# Further outputs of the GPU's flash kernel for its backward, in order; the CPU's lacks them.
_FLASH_OUTPUTS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


def check_ring(cut: SequenceCut, is_causal: bool, has_mask: bool, dropout_p: float) -> None:
    """Raise ConfigError for attention that torch's ring does not support."""
    chunks = 2 * cut.num_ranks
    wrong = {
        "it is not causal": not is_causal,
        "there is a mask": has_mask,
        "there is dropout": dropout_p > 0,
        "documents are packed": len(cut.documents) > 1,
        f"2 x cp = {chunks} does not divide the {cut.length} tokens": bool(cut.length % chunks),
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"context parallelism by ring: {why}, which torch's ring attention does not "
                "compute; choose method='gather'"
            )


def by_ring(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, exchange: Exchange
) -> Tensor:
    """Return this rank's part of causal attention over the whole sequence.

    **Shapes** query [B, H, t, E], key and value [B, K, t, E] -> [B, H, t, E].

    **Cost** sends keys and values to each other rank in forward and again in backward, and their
    gradients in fp32 in backward. On a GPU, torch's flash attention: bf16 or fp16.
    """
    times = query.shape[1] // key.shape[1]
    if times > 1:
        key = key.repeat_interleave(times, dim=1)
        value = value.repeat_interleave(times, dim=1)
    mixed: Tensor = _Ring.apply(query.contiguous(), key, value, scale, exchange)
    return mixed


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None, exchange: Exchange
    ) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        exchange.count("ring", (key.nbytes + value.nbytes) * (exchange.axis.size - 1))
        mixed, sums, *flash_outputs = _attention._templated_ring_attention(
            exchange.axis.group,
            _TOKENS,
            _forward_of(query),
            query,
            key,
            value,
            is_causal=True,
            dropout_p=0.0,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.flash_outputs = flash_outputs
        ctx.scale = scale
        ctx.exchange = exchange
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        query, key, value, mixed, sums = ctx.saved_tensors
        exchange = ctx.exchange
        exchange.count("ring", (key.nbytes + value.nbytes) * (exchange.axis.size - 1))
        exchange.count("ring", 4 * (key.numel() + value.numel()) * exchange.axis.size)
        grads = _attention._templated_ring_attention_backward(
            exchange.axis.group,
            _TOKENS,
            _backward_of(query),
            grad.contiguous(),
            "grad_out",
            query,
            key,
            value,
            mixed,
            sums,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
            **dict(zip(_FLASH_OUTPUTS, ctx.flash_outputs, strict=False)),
        )
        return (*grads[:3], None, None)


def _forward_of(query: Tensor) -> Any:
    if query.device.type == "cpu":
        return _ATEN._scaled_dot_product_flash_attention_for_cpu
    return _ATEN._scaled_dot_product_flash_attention


def _backward_of(query: Tensor) -> Any:
    if query.device.type == "cpu":
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return _ATEN._scaled_dot_product_flash_attention_backward.default
