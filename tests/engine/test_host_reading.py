"""Numbers that go to the host while the device works on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline import Engine
from paceline.engine.vote import HostReading
from paceline.world.world import World

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_reading_is_of_the_value_as_it_was() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    reading = HostReading(value)
    with torch.no_grad():
        value += 1
    assert reading.read().tolist() == [1.0, 2.0]
    assert HostReading(torch.tensor(3)).number() == 3.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x).square().mean()
        return made


@GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_call_of_a_step_makes_the_host_wait_for_all_of_the_device(strategy: str, precision: str) -> None:
    data: Any = torch.randn(64, 8)
    torch.manual_seed(0)
    with Engine(world=World(), strategy=strategy, precision=precision, lanes=2) as engine:
        model = Net().to(engine.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        try:
            for batch in loader:
                loss = model(batch)
                engine.mean("loss", loss)
                engine.backward(loss)
                engine.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                if engine.step == 3:  # buckets are cut anew after the first
                    torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.step == 8
        assert engine.means["loss"] > 0
