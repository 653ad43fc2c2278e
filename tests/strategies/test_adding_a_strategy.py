"""The strategy of docs/adding_a_strategy.md, taken from the page: it gives the bits of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.strategies.registry import STRATEGIES
from tests.workers import run_workers

pytestmark = pytest.mark.workers

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_strategy.md"


def trains(world: World, strategy: str) -> str:
    if strategy not in STRATEGIES:
        (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        names: dict[str, Any] = {"__name__": "adding_a_strategy"}
        exec(compile(code, str(PAGE), "exec"), names)
    with Engine(strategy=strategy, lanes=5, seed=3, bucket_mib=0.001, world=world) as engine:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(46, 8, generator=torch.Generator().manual_seed(1)))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            engine.clip_grad_norm_(0.5)
            optimizer.step()
        return engine.weights_hash()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_strategy_of_the_page_gives_the_bits_of_one_process(workers: int) -> None:
    alone = run_workers(trains, 1, strategy="ddp")
    together = run_workers(trains, workers, strategy="gathered")
    assert [result.error for result in together] == [None] * workers
    assert {result.value for result in together} == {alone[0].value}
