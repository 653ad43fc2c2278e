"""A worker that fails between steps under weights in shards: its error shows at once, whatever the others are doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline import Engine, World
from tests.workers import run_workers

pytestmark = pytest.mark.workers

PATIENCE_S = 20.0


class FailsFrom(Dataset[Tensor]):
    def __init__(self, first: int) -> None:
        self._first = first

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if index >= self._first:
            raise ValueError("can't be read")
        return torch.full((4,), float(index))


def trains(world: World, *, where: str, left: str, **job: Any) -> None:
    """Worker 1 fails after step 3; worker 0 is busy until it has left."""
    fails = world.rank == 1
    try:
        with Engine(world=world, lanes=2, timeout_s=3 * PATIENCE_S, **job) as engine:
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
            data = FailsFrom(24 if fails and where == "dataset" else 64)
            model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
            for x in loader:
                engine.backward(model(x).square().mean())
                optimizer.step()
                if engine.step == 3 and fails and where == "body":
                    raise ValueError("the body fails")
                if engine.step == 3 and not fails:
                    _wait_for(Path(left))
    finally:
        if fails:
            Path(left).touch()


def _wait_for(file: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < until, "worker 1 waits for worker 0"
        time.sleep(0.02)


@pytest.mark.parametrize("where", ["dataset", "body"])
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_it_does_not_wait_for_the_others_and_they_hear_why(where: str, backend: str, tmp_path: Path) -> None:
    job = {"strategy": "fsdp", "backend": backend, "where": where, "left": str(tmp_path / "left")}
    other, failing = run_workers(trains, 2, **job)
    assert "can't be read" in str(failing.error) or "the body fails" in str(failing.error)
    assert other.error == "PeerLostError: worker 0 waited for worker 1, but it left its training loop after step 3"
