"""What error feedback is for: with it a compressed run ends where the uncompressed one does, without it it does not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.compression import Compression, Int8, PowerSgd, Sign, TopK

ROWS, WIDTH = 512, 32


def loss_after(compression: Any, *, lr: float = 0.05, epochs: int = 12) -> float:
    """Of a small network that learns another one's output, on all of its data, by plain SGD."""
    with Engine(world=World(), lanes=4, device="cpu", compression=compression, seed=3) as engine:
        teacher = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH)).requires_grad_(False)
        x = torch.randn(ROWS, WIDTH)
        y = teacher(x) * 3
        model = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.0)
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for _ in range(epochs):
            for given, wanted in loader:
                engine.backward(F.mse_loss(model(given), wanted))
                optimizer.step()
                optimizer.zero_grad()
        return float(F.mse_loss(model(x), y).detach())


@cache
def loss_of_plain() -> float:
    return loss_after(None)


@pytest.mark.parametrize(
    ("compressor", "within"),
    [("bf16", 0.005), (Int8(), 0.005), (PowerSgd(rank=4), 0.02), (TopK(share=0.1), 0.02), (Sign(block=128), 0.02)],
    ids=str,
)
def test_with_feedback_the_loss_is_that_of_the_uncompressed_run(compressor: Any, within: float) -> None:
    plain, found = loss_of_plain(), loss_after(compressor)
    assert abs(found - plain) <= within * plain, (found, plain)


@pytest.mark.parametrize("compressor", [PowerSgd(rank=4), TopK(share=0.1), Sign(block=128)], ids=str)
def test_without_feedback_it_is_visibly_worse(compressor: Any) -> None:
    plain = loss_of_plain()
    with_it, without = loss_after(compressor), loss_after(Compression(compressor, feedback=False))
    assert without - plain > 5 * abs(with_it - plain), (plain, with_it, without)
    assert without > 1.03 * plain, (plain, with_it, without)
