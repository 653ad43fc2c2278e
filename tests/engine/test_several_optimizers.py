"""A step of several optimizers is whole before anything looks at it, and all their weights are watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline import Engine, World
from paceline.errors import LoopError
from tests.engine.loops import prepared, vectors
from tests.workers import run_workers

Batch = list[torch.Tensor]


def two_nets(engine: Engine) -> tuple[nn.Module, nn.Module, Any, Any, Any]:
    torch.manual_seed(3)
    first, second = nn.Linear(8, 1), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    loader = DataLoader(vectors(), batch_size=4)
    return engine.prepare(first, second, *optimizers, loader)  # type: ignore[return-value]


def drifts(world: World) -> None:
    with Engine(world=world, timeout_s=20) as engine:
        first, second, one, other, loader = two_nets(engine)
        for _ in loader:
            engine.update(one, lambda batch: F.mse_loss(first(batch[0]), batch[1]))
            engine.update(other, lambda batch: F.mse_loss(second(batch[0]), batch[1]))
            if engine.step == 1 and world.rank == 1:
                second.weight.data[0, 3] += 1e-3


@pytest.mark.workers
def test_weights_of_the_second_optimizer_of_engine_update_are_watched_too() -> None:
    for result in run_workers(drifts, 2):
        assert result.error is not None, result.traceback
        assert result.error.startswith("ReplicaError: before step"), result.error
        assert "the weights have drifted apart" in result.error


def test_a_state_between_two_optimizers_of_a_step_is_no_state() -> None:
    with Engine(lanes=1) as engine:
        first, second, one, other, loader = two_nets(engine)
        text = r"engine\.state_dict\(\) at test_several_optimizers\.py:\d+ came between two updates of step 1"
        with pytest.raises(LoopError, match=text):
            for x, y in loader:
                engine.backward(F.mse_loss(first(x), y) + F.mse_loss(second(x), y))
                one.step()
                engine.state_dict()
                other.step()


def test_nor_is_one_between_two_calls_of_engine_update_and_its_place_is_the_scripts(tmp_path: Path) -> None:
    with Engine(lanes=1) as engine:
        first, second, one, other, loader = two_nets(engine)
        text = r"engine\.save_state\(\) at test_several_optimizers\.py:\d+ came between two updates of step 1"
        with pytest.raises(LoopError, match=text):
            for _ in loader:
                engine.update(one, lambda batch: F.mse_loss(first(batch[0]), batch[1]))
                engine.save_state(tmp_path / "half")
                engine.update(other, lambda batch: F.mse_loss(second(batch[0]), batch[1]))


def test_values_may_be_reduced_between_two_updates() -> None:
    with Engine(lanes=1) as engine:
        first, second, one, other, loader = two_nets(engine)
        for _ in loader:
            engine.update(one, lambda batch: F.mse_loss(first(batch[0]), batch[1]))
            engine.reduce(torch.ones(1))
            engine.update(other, lambda batch: F.mse_loss(second(batch[0]), batch[1]))
        assert engine.step == 8


def test_a_state_after_both_is_one_and_an_optimizer_may_stay_out() -> None:
    with Engine(lanes=1) as engine:
        first, second, one, other, loader = two_nets(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(first(x), y) + F.mse_loss(second(x), y))
            if engine.step % 2 == 0:
                other.step()
            one.step()
            engine.state_dict()
        assert engine.step == 8


def test_a_schedule_that_needs_a_value_says_so_where_the_body_leaves_the_last_item() -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        scheduler = engine.prepare(ReduceLROnPlateau(optimizer, patience=1))
        with (
            pytest.warns(UserWarning, match="was left without"),
            pytest.raises(LoopError, match="the loop's body did not step the ReduceLROnPlateau"),
        ):
            for number, (x, y) in enumerate(loader):
                if number == 5:
                    continue
                loss = F.mse_loss(model(x), y)
                engine.backward(loss)
                optimizer.step()
                scheduler.step(float(loss.detach()))
