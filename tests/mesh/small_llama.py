"""A Llama-shaped model small enough for eight processes on two cores, and the plan that shards it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 4, 16


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, :, None].to(x.dtype) * 100.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


class Attention(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.n_heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, WIDTH // self.n_heads).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = rotated(q, positions), rotated(k, positions)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(functional.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(), Attention(heads), Norm(), Mlp(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), positions))
        return x + self.mlp(self.norm2(x))


class SmallLlama(nn.Module):
    def __init__(self, *, blocks: int = 2, heads: int = HEADS, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, dropout) for _ in range(blocks))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


PLAN: dict[str, Any] = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.o": "rowwise",
    "blocks.*.mlp.gate": "colwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}


def tokens(samples: int = 32) -> TensorDataset:
    drawn = torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return TensorDataset(drawn, drawn.roll(-1, 1))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
