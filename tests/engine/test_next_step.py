"""Loops that take a step's items and update behind them: the bits of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.world.world import World
from tests.workers import hashes, run_workers


def prepared(engine: paceline.Engine) -> tuple[Any, Any, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.arange(120.0).view(30, 4) / 100, torch.arange(30.0))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    trained: tuple[Any, Any, Any] = engine.prepare(model, optimizer, loader)
    return trained


def loss_of(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]).flatten(), batch[1])


def plain(world: World, *, lanes: int, strategy: str, steps: int) -> str:
    with paceline.Engine(world=world, lanes=lanes, strategy=strategy, seed=1) as engine:
        model, optimizer, loader = prepared(engine)
        while engine.step < steps:
            for batch in loader:
                engine.backward(loss_of(model, batch))
                engine.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                if engine.stepped and engine.step == steps:
                    engine.stop()
                    break
        return engine.weights_hash()


def by_steps(world: World, *, lanes: int, strategy: str, steps: int, closes: bool = True) -> str:
    engine = paceline.Engine(world=world, lanes=lanes, strategy=strategy, seed=1)
    model, optimizer, loader = prepared(engine)
    epochs = []
    for step in range(steps):
        for batch in loader.next_step():
            engine.backward(loss_of(model, batch))
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step == step + 1
        epochs.append(loader.epoch)
    assert epochs == [(step + 1) // engine.steps_per_epoch(loader) for step in range(steps)]
    digest = engine.weights_hash()
    if closes:
        engine.close()
        assert not loader.in_loop
    return digest


@pytest.mark.workers
@pytest.mark.parametrize(
    ("workers", "strategy", "steps"), [(1, "ddp", 8), (2, "ddp", 5), (3, "zero2", 8), (2, "fsdp", 7), (3, "star", 3)]
)
def test_the_bits_are_those_of_the_plain_loop(workers: int, strategy: str, steps: int) -> None:
    one = hashes(run_workers(plain, 1, lanes=4, strategy="ddp", steps=steps))
    assert hashes(run_workers(by_steps, workers, lanes=4, strategy=strategy, steps=steps)) == one


@pytest.mark.workers
def test_a_script_that_ends_without_close_ends_well() -> None:
    found = hashes(run_workers(by_steps, 2, lanes=2, strategy="ddp", steps=4, closes=False))
    assert found == hashes(run_workers(plain, 1, lanes=2, strategy="ddp", steps=4))


@pytest.mark.unit
def test_after_stop_there_are_no_items() -> None:
    with paceline.Engine(world=World(), lanes=2, seed=1) as engine:
        model, optimizer, loader = prepared(engine)
        taken = 0
        for _ in range(3):
            items = list_of_items(engine, model, loader, stops=taken > 0)
            taken += len(items)
            if items:
                optimizer.step()
        assert (engine.step, taken) == (2, 4)


def list_of_items(engine: paceline.Engine, model: Any, loader: Any, *, stops: bool) -> list[int]:
    seen = []
    for batch in loader.next_step():
        if stops:
            engine.stop()
        engine.backward(loss_of(model, batch))
        seen.append(len(batch))
    return seen
