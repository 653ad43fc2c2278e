"""`torch.optim.swa_utils.AveragedModel` beside `prepare`: an average of the weights, with the same bits everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.engine.replicas import weights_hash
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers
STEPS, HALF = 6, 3


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def averaged(
    world: World, *, made: str = "after", use_buffers: bool = False, folder: str | None = None,
    until: int = STEPS, **job: Any,
) -> str:  # fmt: skip
    """The hash of the average, and of what it gives; the training's own comes with it."""
    with Engine(world=world, lanes=4, bucket_mib=0.001, **job) as engine:
        model = build()
        average = get_ema_multi_avg_fn(0.9)
        ema = AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers) if made == "before" else None
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.randn(48, 8, generator=generator), torch.randn(48, 1, generator=generator))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
        ema = ema or AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)
        if folder is not None:
            engine.register_for_checkpointing(ema)
            if Path(folder).exists():
                engine.load_state(folder)
        while engine.step < until:
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if engine.stepped:
                    ema.update_parameters(model)
                if engine.stepped and engine.step == until:
                    break
        if folder is not None and not Path(folder).exists():
            engine.save_state(folder)
        assert int(ema.n_averaged) == engine.step
        given = ema.eval()(torch.ones(2, 8)).flatten().tolist()
        return f"{weights_hash([ema])} {given} {engine.weights_hash()}"


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("zero2", 2), ("zero3", 2), ("fsdp", 3)])
def test_an_average_has_the_bits_of_one_worker(strategy: str, workers: int, made: str, use_buffers: bool) -> None:
    found = hashes(run_workers(averaged, workers, strategy=strategy, made=made, use_buffers=use_buffers))
    assert found == {averaged(World(), use_buffers=use_buffers)}


def test_a_registered_average_goes_on_from_a_checkpoint_on_other_workers(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    hashes(run_workers(averaged, 2, strategy="fsdp", folder=folder, until=HALF))
    assert hashes(run_workers(averaged, 3, strategy="ddp", folder=folder)) == {averaged(World())}
