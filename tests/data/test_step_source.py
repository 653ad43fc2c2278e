"""Loops without a dataset: a function makes the batches, and the bits are those of one worker."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.data import StepPlace, StepSource
from paceline.errors import ConfigError
from paceline.world.world import World
from tests.workers import hashes, run_workers


def noise(place: StepPlace) -> tuple[Tensor, Tensor]:
    """Draws from all libraries; a batch is larger the later its step."""
    rows = 2 + place.step
    points = torch.randn(rows, 4) + random.random() + float(np.random.rand())
    return points, torch.full((rows,), float(place.lane + 10 * place.micro_batch + 100 * place.epoch))


def train(world: World, *, lanes: int, strategy: str, epochs: int = 2, resume: str | None = None) -> str:
    made: list[StepPlace] = []

    def make(place: StepPlace) -> tuple[Tensor, Tensor]:
        made.append(place)
        return noise(place)

    with paceline.Engine(world=world, lanes=lanes, accumulate=2, strategy=strategy, seed=3) as engine:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, source = engine.prepare(model, optimizer, StepSource(make, steps=3))
        if resume is not None and (Path(resume) / "saved").exists():
            engine.load_state(Path(resume) / "saved")
        while source.epoch < epochs:
            for points, labels in source:
                engine.backward(nn.functional.mse_loss(model(points).flatten(), labels), weight=len(points))
                optimizer.step()
                optimizer.zero_grad()
                if resume is not None and engine.stepped and engine.step == 2 and epochs == 1:
                    engine.save_state(Path(resume) / "saved")
                    engine.stop()
            if engine.step == 2:
                return ""
        assert len(set(made)) == len(made)  # each of them once, on this worker
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), [(2, "ddp"), (3, "zero2"), (2, "fsdp")])
def test_the_bits_are_those_of_one_worker(workers: int, strategy: str) -> None:
    one = hashes(run_workers(train, 1, lanes=4, strategy="ddp"))
    assert hashes(run_workers(train, workers, lanes=4, strategy=strategy)) == one


@pytest.mark.workers
def test_it_goes_on_from_the_next_place_on_other_workers(tmp_path: Path) -> None:
    one = hashes(run_workers(train, 1, lanes=4, strategy="ddp"))
    for result in run_workers(train, 2, lanes=4, strategy="ddp", epochs=1, resume=str(tmp_path)):
        assert result.error is None, result.traceback
    assert hashes(run_workers(train, 3, lanes=4, strategy="ddp", resume=str(tmp_path))) == one


@pytest.mark.unit
def test_every_place_of_an_epoch_is_made_once() -> None:
    made: list[StepPlace] = []

    def make(place: StepPlace) -> Tensor:
        made.append(place)
        return torch.zeros(1, 1)

    with paceline.Engine(world=World(), lanes=3, accumulate=2) as engine:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert engine.steps_per_epoch(StepSource(make, steps=4)) == 4
        model, optimizer, source = engine.prepare(model, optimizer, StepSource(make, steps=4))
        for batch in source:
            engine.backward(model(batch).sum())
            optimizer.step()
    assert len(made) == 4 * 3 * 2
    assert set(made) == {StepPlace(0, step, lane, part) for step in range(4) for lane in range(3) for part in range(2)}


def prepared(engine: paceline.Engine, *others: Any) -> None:
    model = nn.Linear(1, 1)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *others)


@pytest.mark.unit
def test_what_can_not_work_is_refused_by_name() -> None:
    source = StepSource(lambda place: torch.zeros(1, 1), steps=2)
    with paceline.Engine(world=World()) as engine, pytest.raises(ConfigError, match="what trains"):
        engine.prepare(source)
    with (
        paceline.Engine(world=World(), global_batch_size=8) as engine,
        pytest.raises(ConfigError, match="leave it out"),
    ):
        prepared(engine, source)
    with pytest.raises(ConfigError, match="steps"):
        StepSource(noise, steps=0)
    with pytest.raises(ConfigError, match="a function of a place, not list"):
        StepSource([], steps=1)  # type: ignore[arg-type]
