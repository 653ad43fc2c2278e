"""Tiny jobs for the tests of the loop's rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine


def vectors(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 8, generator=generator), torch.randn(samples, 1, generator=generator))


def prepared(engine: Engine, *, samples: int = 32, batch_size: int = 4, lr: float = 0.1, **options: Any) -> Any:
    """A linear model, SGD and a loader, prepared."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(vectors(samples), batch_size=batch_size, **options)
    return engine.prepare(model, optimizer, loader)
