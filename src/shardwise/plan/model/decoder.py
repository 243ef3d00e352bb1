"""The built-in decoder of any `DecoderShape`, for `shardwise train` and for tracing presets.

Every module that owns parameters or buffers has `reset_parameters`, so the decoder can be built on
the meta device and filled unit by unit, or traced there and never filled.
Attention is causal; ALiBi is left out, which costs a bias inside the kernel.

In training, `dropout` zeroes that share of the embeddings, of the attention probabilities and of
each update before it is added to the stream, and scales the rest up; in `eval()` it does nothing.

B windows, T positions, D dim, H query heads, K key/value heads, E of a head, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.parallel.experts import MixtureOfExperts
from shardwise.parallel.routing import Routing
from shardwise.plan.model.shapes import DecoderShape

_EPS = 1e-5
_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02


class Projection(nn.Linear):
    """A linear map; weights start normal with the given standard deviation, biases at zero."""

    def __init__(self, rows_in: int, rows_out: int, bias: bool, std: float = _INIT_STD) -> None:
        self.std = std
        super().__init__(rows_in, rows_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight [rows_out, rows_in]."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TokenEmbedding(nn.Embedding):
    """Rows of V x D, started as small as the projections, so that a tied head starts calm."""

    def reset_parameters(self) -> None:
        """Draw the weight [V, D]."""
        nn.init.normal_(self.weight, std=_INIT_STD)


def rotary_tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, both fp32 [T, E / 2], of positions [T] times frequency."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = torch.outer(positions.float(), _ROTARY_BASE**-steps)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + E / 2]) by the angle of its position.

    **Shapes** x [B, heads, T, E], cos and sin [T, E / 2] -> [B, heads, T, E], dtype of x.
    **Source** RoFormer (arXiv:2104.09864), halves instead of neighbours as in Llama.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.to(x.dtype)


def _norm(shape: DecoderShape) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(shape.dim, eps=_EPS)
    return nn.LayerNorm(shape.dim, eps=_EPS, bias=shape.norm_bias)


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share a key/value head."""

    def __init__(self, shape: DecoderShape, out_std: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.query = Projection(shape.dim, shape.q_dim, shape.qkv_bias)
        self.key = Projection(shape.dim, shape.kv_dim, shape.qkv_bias)
        self.value = Projection(shape.dim, shape.kv_dim, shape.qkv_bias)
        self.query_norm = nn.RMSNorm(shape.head_dim, eps=_EPS) if shape.qk_norm else None
        self.key_norm = nn.RMSNorm(shape.head_dim, eps=_EPS) if shape.qk_norm else None
        self.out = Projection(shape.q_dim, shape.dim, shape.bias, std=out_std)

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor:
        """Attend: [B, T, D] -> [B, T, D]; ``rotary`` are cosines and sines, or nothing."""
        of_heads = (-1, self.head_dim)  # as many heads as this rank has
        query = self.query(x).unflatten(-1, of_heads)
        key = self.key(x).unflatten(-1, of_heads)
        value = self.value(x).unflatten(-1, of_heads).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            apply_rotary(query, *rotary) if rotary else query,
            apply_rotary(key, *rotary) if rotary else key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202) where gated: down(silu(gate(x)) * up(x)); else GELU between two."""

    def __init__(self, shape: DecoderShape, out_std: float) -> None:
        super().__init__()
        self.gate = Projection(shape.dim, shape.ffn, shape.bias) if shape.gated else None
        self.up = Projection(shape.dim, shape.ffn, shape.bias)
        self.down = Projection(shape.ffn, shape.dim, shape.bias, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself: [B, T, D] -> [B, T, D]."""
        transformed: Tensor
        if self.gate is not None:
            transformed = self.down(F.silu(self.gate(x)) * self.up(x))
        else:
            transformed = self.down(F.gelu(self.up(x), approximate="tanh"))
        return transformed


def _mixture(shape: DecoderShape, routing: Routing, out_std: float) -> MixtureOfExperts:
    """Return a layer of the shape's experts; shared ones are one of their width together."""
    experts = shape.experts
    assert experts is not None
    if not shape.gated or shape.bias:
        raise ConfigError("model: experts are SwiGLU without biases; the shape has others")
    shared = None
    if experts.shared:
        shared = FeedForward(replace(shape, ffn=experts.shared * experts.ffn), out_std)
    return MixtureOfExperts(shape.dim, experts.ffn, routing, shared, _INIT_STD, out_std)


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalized copy and added to the stream.

    With ``routing`` the feed-forward is a mixture of experts.
    """

    def __init__(self, shape: DecoderShape, dropout: float, routing: Routing | None = None) -> None:
        super().__init__()
        out_std = _INIT_STD / math.sqrt(2 * shape.layers)
        self.dropout = dropout
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape, out_std, dropout)
        self.feed_forward_norm = _norm(shape)
        self.feed_forward: nn.Module
        if routing is None:
            self.feed_forward = FeedForward(shape, out_std)
        else:
            self.feed_forward = _mixture(shape, routing, out_std)

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Add both updates: [B, T, D] -> [B, T, D], and with experts their auxiliary loss."""
        attended = self.attention(self.attention_norm(x), *rotary)
        x = x + F.dropout(attended, self.dropout, self.training)
        transformed = self.feed_forward(self.feed_forward_norm(x))
        balance = None
        if isinstance(transformed, tuple):
            transformed, balance = transformed
        updated = x + F.dropout(transformed, self.dropout, self.training)
        return updated if balance is None else (updated, balance)


def run_blocks(
    blocks: Iterable[nn.Module], x: Tensor, rotary: tuple[Tensor, ...], checkpointed: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return what blocks make of the stream [B, T, D], and the auxiliary losses of experts."""
    balances: list[Tensor] = []
    for block in blocks:
        if checkpointed and torch.is_grad_enabled():
            x = checkpoint(block, x, *rotary, use_reentrant=False)
        else:
            x = block(x, *rotary)
        if isinstance(x, tuple):
            x, balance = x
            balances.append(balance)
    return x, balances


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, fp32, in nats: [B, T, V], int64 [B, T] -> []."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class PlainDecoder(nn.Module):
    """A GPT or Llama of a shape, dense or with experts.

    ``balance`` times the experts' auxiliary loss, summed over layers, is added to the loss in
    training; with ``biased`` their routers have biases, which `balance_experts` moves.
    `spread_experts` lays the experts on several ranks, before the decoder is sharded.

    **Raises** ConfigError for experts that are not SwiGLU without biases.
    """

    def __init__(
        self,
        shape: DecoderShape,
        checkpointed: bool = False,
        dropout: float = 0.0,
        balance: float = 0.0,
        biased: bool = False,
    ) -> None:
        super().__init__()
        experts, routing = shape.experts, None
        if experts is not None:
            routing = Routing(
                experts.num,
                experts.top_k,
                experts.scoring,
                balanced=balance > 0,
                biased=biased,
            )
        dense = experts.dense_layers if experts is not None else 0
        self.balance = balance
        self.head_dim = shape.head_dim
        self.checkpointed = checkpointed
        self.dropout = dropout
        self.rotary = shape.norm == "rms" and not shape.positions
        self.embedding = TokenEmbedding(shape.vocab, shape.dim)
        self.positions = TokenEmbedding(shape.positions, shape.dim) if shape.positions else None
        self.blocks = nn.ModuleList(
            Block(shape, dropout, routing if layer >= dense else None)
            for layer in range(shape.layers)
        )
        self.norm = _norm(shape)
        self.head = Projection(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        with_balance: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, T, V], or with targets their mean cross-entropy, fp32, in nats.

        In training ``balance`` times the auxiliary loss is added to it. With ``with_balance`` the
        auxiliary loss is returned beside the logits or the cross-entropy instead.

        **Shapes** ids and targets int64 [B, T]; ``positions`` int64 [T] or [1, T], 0 to T - 1
        where they are not given.
        """
        x = self.embedding(ids)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = F.dropout(x, self.dropout, self.training)
        rotary: tuple[Tensor, ...] = ()
        if self.rotary:
            rotary = rotary_tables(positions.flatten(), self.head_dim)
        x, balances = run_blocks(self.blocks, x, rotary, self.checkpointed)
        result: Tensor = self.head(self.norm(x))
        if targets is not None:
            result = token_loss(result, targets)
        if with_balance:
            return result, torch.stack(balances).sum() if balances else x.new_zeros(())
        if targets is not None and self.balance and self.training and balances:
            result = result + self.balance * torch.stack(balances).sum()
        return result
