"""A plain decoder of any `DecoderShape`, for tracing: built on meta, never filled.

Of the Llama family it does what the built-in decoder of ``shardwise train`` does, operation by
operation, and holds what that one holds as long. Attention is causal; ALiBi is left out, which
costs a bias inside the kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.plan.model.shapes import DecoderShape

_EPS = 1e-5
_ROTARY_BASE = 10_000.0


def _norm(shape: DecoderShape, dim: int) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(dim, eps=_EPS)
    return nn.LayerNorm(dim, eps=_EPS, bias=shape.norm_bias)


def _rotary_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    places = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(places, _ROTARY_BASE**-steps)
    return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.to(x.dtype)


class PlainAttention(nn.Module):
    """Causal attention with grouped key/value heads."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.query = nn.Linear(shape.dim, shape.q_dim, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.query_norm = nn.RMSNorm(shape.head_dim, eps=_EPS) if shape.qk_norm else None
        self.key_norm = nn.RMSNorm(shape.head_dim, eps=_EPS) if shape.qk_norm else None
        self.out = nn.Linear(shape.q_dim, shape.dim, bias=shape.bias)

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor:
        """Attend: [B, T, D] -> [B, T, D]."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, -1)
        key = self.key(x).view(batch, length, self.kv_heads, -1)
        value = self.value(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            _turn(query, *rotary) if rotary else query,
            _turn(key, *rotary) if rotary else key,
            value,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return attended


class PlainFeedForward(nn.Module):
    """SwiGLU where gated, else GELU between two maps."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=shape.bias) if shape.gated else None
        self.up = nn.Linear(shape.dim, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself: [B, T, D] -> [B, T, D]."""
        transformed: Tensor
        if self.gate is not None:
            transformed = self.down(F.silu(self.gate(x)) * self.up(x))
        else:
            transformed = self.down(F.gelu(self.up(x), approximate="tanh"))
        return transformed


class PlainBlock(nn.Module):
    """Attention, then feed-forward, each on a normalized copy and added to the stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape, shape.dim)
        self.attention = PlainAttention(shape)
        self.feed_forward_norm = _norm(shape, shape.dim)
        self.feed_forward = PlainFeedForward(shape)

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor:
        """Add both updates: [B, T, D] -> [B, T, D]."""
        attended = self.attention(self.attention_norm(x), *rotary)
        x = x + attended
        transformed = self.feed_forward(self.feed_forward_norm(x))
        updated: Tensor = x + transformed
        return updated


class PlainDecoder(nn.Module):
    """A GPT or Llama of a shape.

    **Raises** ConfigError for a mixture of experts, whose routing depends on values.
    """

    def __init__(self, shape: DecoderShape, checkpointed: bool = False) -> None:
        super().__init__()
        if shape.experts is not None:
            raise ConfigError(
                "model: a mixture of experts cannot be traced from its shape, since its routing "
                "depends on values; plan it by the formulas of its shape"
            )
        self.head_dim, self.checkpointed = shape.head_dim, checkpointed
        self.rotary = shape.norm == "rms" and not shape.positions
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.positions = nn.Embedding(shape.positions, shape.dim) if shape.positions else None
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = _norm(shape, shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in fp32; ids and targets int64 [B, T]."""
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        rotary: tuple[Tensor, ...] = ()
        if self.rotary:
            rotary = _rotary_tables(ids.shape[1], self.head_dim, x.device)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, *rotary, use_reentrant=False)
            else:
                x = block(x, *rotary)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
