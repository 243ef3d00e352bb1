"""The built-in decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

Every module that owns parameters has `reset_parameters`, and no module owns a buffer, so the
decoder can be built on the meta device and filled unit by unit.

In training, `dropout` zeroes that share of the embeddings, of the attention probabilities and of
each update before it is added to the stream, and scales the rest up; in `eval()` it does nothing.

B windows, T positions, D dim, H query heads, K key/value heads, E = D / H, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.train.config import TrainConfig

__all__ = ["Decoder", "apply_rotary", "generate", "rotary_tables"]

_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02


class Projection(nn.Linear):
    """A linear map without bias; weights start normal with a standard deviation of its own."""

    def __init__(self, in_features: int, out_features: int, std: float = _INIT_STD) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight [out_features, in_features]."""
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """Rows of V x D, started as small as the projections, so that a tied head starts calm."""

    def reset_parameters(self) -> None:
        """Draw the weight [V, D]."""
        nn.init.normal_(self.weight, std=_INIT_STD)


def rotary_tables(num_positions: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, both fp32 [T, E / 2], of position times frequency."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(num_positions, device=device, dtype=torch.float32)
    angles = torch.outer(positions, _ROTARY_BASE**-steps)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + E / 2]) by the angle of its position.

    Shapes: x [B, heads, T, E], cos and sin [T, E / 2] -> [B, heads, T, E], dtype of x.
    Source: RoFormer (arXiv:2104.09864), halves instead of neighbours as in Llama.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share a key/value head."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, out_std: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.query = Projection(dim, dim)
        self.key = Projection(dim, kv_heads * self.head_dim)
        self.value = Projection(dim, kv_heads * self.head_dim)
        self.out = Projection(dim, dim, std=out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend: [B, T, D] -> [B, T, D]."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            apply_rotary(query, cos, sin),
            apply_rotary(key, cos, sin),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return attended


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, out_std: float) -> None:
        super().__init__()
        self.gate = Projection(dim, hidden)
        self.up = Projection(dim, hidden)
        self.down = Projection(hidden, dim, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself: [B, T, D] -> [B, T, D]."""
        transformed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return transformed


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalized copy and added to the stream."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        dim, out_std = config.dim, _INIT_STD / math.sqrt(2 * config.layers)
        self.dropout = config.dropout
        hidden = 32 * max(1, round(config.ffn_multiple * dim / 32))
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        kv_heads = config.kv_heads or config.heads
        self.attention = Attention(dim, config.heads, kv_heads, out_std, config.dropout)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = FeedForward(dim, hidden, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add both updates: [B, T, D] -> [B, T, D]."""
        attended = self.attention(self.attention_norm(x), cos, sin)
        x = x + F.dropout(attended, self.dropout, self.training)
        transformed = self.feed_forward(self.feed_forward_norm(x))
        updated: Tensor = x + F.dropout(transformed, self.dropout, self.training)
        return updated


class Decoder(nn.Module):
    """A Llama-style language model.

    Args:
        config: the model keys (dim, layers, heads, kv_heads, ffn_multiple, seq, tied_head,
            dropout) and activation_checkpointing.
        vocab: V, at least the tokenizer's size.
    """

    def __init__(self, config: TrainConfig, vocab: int) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.dropout = config.dropout
        self.checkpointed = config.activation_checkpointing
        self.embedding = TokenEmbedding(vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = Projection(config.dim, vocab)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V], or with targets their mean cross-entropy, fp32, in nats.

        Shapes: ids and targets int64 [B, T].
        """
        x = F.dropout(self.embedding(ids), self.dropout, self.training)
        cos, sin = rotary_tables(ids.shape[1], self.head_dim, x.device)
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Tensor,
    num_tokens: int,
    seq: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Continue one window; every rank must call this with the same arguments.

    The number of forward passes is fixed, and each sees at most the last `seq` tokens, so the
    ranks of a sharded model stay in lockstep.

    Shapes: ids int64 [T] -> int64 [T + num_tokens].

    Args:
        model: maps ids [1, T] to logits [1, T, V].
        ids: the prompt, at least one token.
        num_tokens: how many tokens to add.
        seq: the longest context the model was trained on.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: of the draws.
    """
    generator = torch.Generator(ids.device).manual_seed(seed)
    for _ in range(num_tokens):
        logits = model(ids[-seq:].unsqueeze(0))[0, -1].float()
        if temperature > 0:
            shares = torch.softmax(logits / temperature, dim=-1)
            token = torch.multinomial(shares, 1, generator=generator)
        else:
            token = logits.argmax().unsqueeze(0)
        ids = torch.cat([ids, token])
    return ids
