"""transformers' own Trainer in a group of the backend trains as over gloo.

Accelerate takes no `ddp_backend` but gloo and MPI on CPUs; a group that is there already it uses.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import World
from tests.examples.running import variables_of
from tests.workers import run_workers

pytest.importorskip("transformers")
pytestmark = pytest.mark.workers

IMPORTS_S = 180.0


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self._x, self._y = torch.randn(32, 6, generator=draw), torch.randn(32, 1, generator=draw)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "labels": self._y[index]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def trains(world: World, *, backend: str, folder: str) -> tuple[str, list[float], float]:
    os.environ.update(variables_of(world))  # as torchrun leaves them
    torch.manual_seed(1)
    from transformers import Trainer, TrainingArguments

    dist.init_process_group(backend)
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=8, logging_steps=1, per_device_train_batch_size=2,
        learning_rate=0.01, report_to=[], save_strategy="no", disable_tqdm=True, seed=4,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    found = str(dist.get_backend()), losses, float(trainer.evaluate()["eval_loss"])
    dist.destroy_process_group()
    return found


def test_it_trains_with_the_losses_of_gloo(tmp_path: Any) -> None:
    seen = {}
    for backend in ("gloo", "paceline"):
        results = run_workers(trains, 2, timeout_s=IMPORTS_S, backend=backend, folder=str(tmp_path / backend))
        for result in results:
            assert result.error is None, f"{result.error}\n{result.traceback}"
        assert {result.value[0] for result in results} == {backend}
        seen[backend] = results[0].value[1:]
    assert len(seen["gloo"][0]) == 8
    assert seen["paceline"] == seen["gloo"]
