"""Loaders that scripts for DDP bring: their DistributedSampler gives way to the dealing of `prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.errors import ConfigError
from paceline.world.world import World
from tests.workers import hashes, run_workers

DATA = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20.0))


def train(world: World, *, divided: bool, shuffle: bool) -> str:
    with paceline.Engine(world=world, lanes=4, seed=1) as engine:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sampler = DistributedSampler(DATA, shuffle=shuffle) if divided else None
        loader = DataLoader(DATA, batch_size=2, sampler=sampler, shuffle=None if divided else shuffle)
        test_loader = DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, shuffle=False))
        model, optimizer, train_loader, test_loader = engine.prepare(model, optimizer, loader, test_loader)
        for epoch in range(1, 3):
            train_loader.sampler.set_epoch(epoch)
            for points, labels in train_loader:
                engine.backward(nn.functional.mse_loss(model(points).flatten(), labels))
                optimizer.step()
                optimizer.zero_grad()
            seen = [engine.gather_for_metrics(labels) for _, labels in test_loader]
            assert torch.cat(seen).tolist() == list(range(20))
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize("shuffle", [True, False])
def test_it_trains_as_without_one(shuffle: bool) -> None:
    plain = hashes(run_workers(train, 1, divided=False, shuffle=shuffle))
    for workers in (1, 2, 3):
        assert hashes(run_workers(train, workers, divided=True, shuffle=shuffle)) == plain


class Own(DistributedSampler[Any]):
    """Whatever it does, it is not known here."""


@pytest.mark.unit
def test_a_subclass_is_refused() -> None:
    loader = DataLoader(DATA, batch_size=2, sampler=Own(DATA, num_replicas=2, rank=0))
    with paceline.Engine(world=World()) as engine, pytest.raises(ConfigError, match="already has a Own"):
        engine.prepare(loader)


def resumes(world: World, *, start: int, heard: str, folder: str) -> str:
    """Epochs from `start` on, by hand, with what `torch.save` has of the epoch before; `heard` is told the epochs."""
    with paceline.Engine(world=world, lanes=4, seed=1) as engine:
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
        sampler = DistributedSampler(DATA, num_replicas=world.size, rank=world.rank)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(DATA, batch_size=2, sampler=sampler))
        if start:
            saved = torch.load(f"{folder}/{start - 1}.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for epoch in range(start, 4):
            {"sampler": sampler, "loader": loader}[heard].set_epoch(epoch)
            for points, labels in loader:
                engine.backward(nn.functional.mse_loss(model(points).flatten(), labels))
                optimizer.step()
                optimizer.zero_grad()
            if engine.is_main_process:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{epoch}.pt")
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.filterwarnings("ignore:the optimizer or scheduler has made steps")
@pytest.mark.parametrize("heard", ["sampler", "loader"])
def test_set_epoch_of_the_old_sampler_is_heard_when_a_script_resumes_by_hand(heard: str, tmp_path: Path) -> None:
    expected = hashes(run_workers(resumes, 2, start=0, heard=heard, folder=str(tmp_path)))
    assert hashes(run_workers(resumes, 3, start=2, heard=heard, folder=str(tmp_path))) == expected
