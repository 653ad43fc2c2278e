"""After `engine.close()` an optimizer is torch's own again, or says why it can't be: it is never idle in silence."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import LoopError
from tests.workers import run_workers

DATA = TensorDataset(torch.linspace(-1, 1, 96).view(24, 4), torch.linspace(0, 2, 24).view(24, 1))
OPTIMIZERS = [
    lambda p: torch.optim.AdamW(p, lr=0.05),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adagrad(p, lr=0.05),
]


class Training:
    def __init__(self, make: Any = OPTIMIZERS[0]) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.optimizer = make(self.model.parameters())
        self.scheduler = ExponentialLR(self.optimizer, 0.9)

    def engine(self, epochs: range, world: World | None = None, **options: Any) -> str:
        with Engine(world=world or World(), lanes=2, threads=1, seed=3, **options) as engine:
            things = (self.model, self.optimizer, DataLoader(DATA, batch_size=4), self.scheduler)
            model, optimizer, loader, scheduler = engine.prepare(*things)
            for epoch in epochs:
                loader.set_epoch(epoch)
                for x, y in loader:
                    engine.backward(F.mse_loss(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            return engine.weights_hash()

    def plain_step(self) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.model(DATA.tensors[0]), DATA.tensors[1]).backward()
        self.optimizer.step()
        self.scheduler.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.model.parameters()])


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_two_engines_one_after_the_other_train_as_one(make: Any) -> None:
    at_once, in_two = Training(make), Training(make)
    expected = at_once.engine(range(4))
    in_two.engine(range(2))
    assert in_two.engine(range(2, 4)) == expected


def two_engines(world: World, strategy: str) -> str:
    training = Training()
    training.engine(range(2), world, strategy=strategy)
    return training.engine(range(2, 4), World(), strategy=strategy)


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "star"])
def test_what_workers_trained_goes_on_alone(strategy: str) -> None:
    results = run_workers(two_engines, 2, strategy=strategy)
    assert [result.error for result in results] == [None, None], results[0].traceback
    assert {result.value for result in results} == {Training().engine(range(4))}


@pytest.mark.parametrize("strategy", ["ddp", "star"])
def test_then_a_plain_step_is_the_one_of_torch(strategy: str) -> None:
    ours, plain = Training(), Training()
    ours.engine(range(1), strategy=strategy)
    plain.model.load_state_dict(ours.model.state_dict())
    plain.optimizer.load_state_dict(deepcopy(ours.optimizer.state_dict()))  # it takes tensors as they are
    plain.scheduler.load_state_dict(ours.scheduler.state_dict())
    for _ in range(3):
        ours.plain_step()
        plain.plain_step()
    assert torch.equal(ours.weights(), plain.weights())
    assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()


def test_then_a_closure_and_a_grad_scaler_are_torchs_affair() -> None:
    training = Training(lambda p: torch.optim.SGD(p, lr=0.1))
    training.engine(range(1))
    before = training.weights()
    training.optimizer.step(lambda: F.mse_loss(training.model(DATA.tensors[0]), DATA.tensors[1]))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(F.mse_loss(training.model(DATA.tensors[0]), DATA.tensors[1])).backward()
    scaler.step(training.optimizer)
    assert not torch.equal(before, training.weights())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"strategy": "zero2"}, r"state was that job's \(strategy='zero2'\)"),
        ({"strategy": "fsdp"}, r"state was that job's \(strategy='fsdp'\)"),
        ({"precision": "bf16"}, r"fp32 master weights were that job's \(precision='bf16'\)"),
    ],
)
def test_state_that_went_with_the_job_is_not_begun_anew_in_silence(options: dict[str, Any], kept: str) -> None:
    training = Training()
    training.engine(range(1), **options)
    with pytest.raises(LoopError, match=kept):
        training.engine(range(1, 2))
    with pytest.raises(LoopError, match=r"Make a new optimizer of model\.parameters\(\)"):
        training.optimizer.step()
    training.model.float()
    training.optimizer = OPTIMIZERS[1](training.model.parameters())
    training.scheduler = ExponentialLR(training.optimizer, 0.9)
    before = training.weights()
    training.engine(range(1, 2))
    assert not torch.equal(before, training.weights())


def test_its_state_goes_on_by_way_of_a_folder(tmp_path: Path) -> None:
    expected = Training().engine(range(2), strategy="zero2")

    def part(epochs: range, load: bool) -> str:
        training = Training()
        with Engine(world=World(), lanes=2, threads=1, seed=3, strategy="zero2") as engine:
            things = (training.model, training.optimizer, DataLoader(DATA, batch_size=4), training.scheduler)
            model, optimizer, loader, scheduler = engine.prepare(*things)
            if load:
                engine.load_state(tmp_path / "state")
            for _ in epochs:
                for x, y in loader:
                    engine.backward(F.mse_loss(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            if not load:
                engine.save_state(tmp_path / "state")
            return engine.weights_hash()

    part(range(1), load=False)
    assert part(range(1), load=True) == expected


def test_an_engine_that_is_open_keeps_its_optimizer() -> None:
    training = Training()
    with Engine(world=World(), lanes=2, threads=1) as first:
        first.prepare(training.model, training.optimizer, DataLoader(DATA, batch_size=4))
        with (
            Engine(world=World(), lanes=2, threads=1) as second,
            pytest.raises(LoopError, match=r"close\(\) of that one"),
        ):
            second.prepare(training.model, training.optimizer, DataLoader(DATA, batch_size=4))
