"""Small random models: what the planner predicts of them is compared with what torch and the engine do."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.wide(self.attention(self.norm(x)))
        return out


def random_model(seed: int) -> tuple[nn.Module, Any]:
    """A model and a batch (inputs, targets)."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = draw.choice(("mlp", "convolutions", "transformer"))
    rows = draw.randint(4, 9)
    if kind == "mlp":
        widths = [draw.randint(3, 40) for _ in range(draw.randint(2, 5))]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after, bias=draw.random() < 0.7), draw.choice((nn.ReLU, nn.Tanh, nn.SiLU))()]
        return nn.Sequential(*layers), (torch.randn(rows, widths[0]), torch.randn(rows, widths[-1]))
    if kind == "convolutions":
        channels = [3] + [draw.randint(2, 12) for _ in range(draw.randint(1, 3))]
        layers = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        side = draw.choice((6, 8))
        return nn.Sequential(*layers), (torch.randn(rows, 3, side, side), torch.randn(rows, channels[-1], side, side))
    width, length = 8 * draw.randint(1, 4), draw.randint(4, 24)
    blocks = nn.Sequential(*(Block(width, draw.choice((1, 2, 4))) for _ in range(draw.randint(1, 3))))
    model = nn.Sequential(nn.Embedding(50, width), blocks, nn.Linear(width, 7))
    return model, (torch.randint(50, (rows, length)), torch.randn(rows, length, 7))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()  # mse_loss keeps a buffer of its own, which no shape tells
