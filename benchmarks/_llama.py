"""A Llama in plain torch, for the GPU benchmark: the 1B shapes and a tiny one.

It stands alone so that the benchmark needs nothing but torch. Measures nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its windows."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int


LLAMA_1B = Shape(2048, 16, 32, 8, 8192, 128_256, 2048)
TINY = Shape(64, 4, 4, 2, 160, 256, 32)


def _linear(rows_in: int, rows_out: int) -> nn.Linear:
    linear = nn.Linear(rows_in, rows_out, bias=False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


class Block(nn.Module):
    """Grouped-query attention and SwiGLU, each on a normalized copy of the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        head_dim = shape.dim // shape.heads
        self.head_dim = head_dim
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.query = _linear(shape.dim, shape.dim)
        self.key = _linear(shape.dim, shape.kv_heads * head_dim)
        self.value = _linear(shape.dim, shape.kv_heads * head_dim)
        self.out = _linear(shape.dim, shape.dim)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.gate = _linear(shape.dim, shape.ffn)
        self.up = _linear(shape.dim, shape.ffn)
        self.down = _linear(shape.ffn, shape.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), _rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.ffn_norm(x)
        updated: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return updated


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Llama(nn.Module):
    """Embedding, blocks, tied head; returns the mean cross-entropy of a window."""

    def __init__(self, shape: Shape, checkpointed: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        cos, sin = self._rotary_tables(x.device)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())

    def _rotary_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        head_dim = self.shape.dim // self.shape.heads
        steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        positions = torch.arange(self.shape.seq, device=device, dtype=torch.float32)
        angles = torch.outer(positions, 500_000.0**-steps)
        return angles.cos(), angles.sin()
