"""A parameter that was replaced after `prepare` is named when the next step starts, under every strategy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline import Engine, World
from paceline.errors import LoopError
from paceline.strategies.zero.zero3 import Zero3Config
from tests.engine.loops import prepared
from tests.workers import run_workers


def assigns(world: World, **job: Any) -> None:
    with Engine(world=world, lanes=2, **job) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 1:
                whole = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
                model.load_state_dict(whole, assign=True)


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", Zero3Config(weights="in shards")], ids=str)
def test_weights_loaded_by_assignment_are_refused(strategy: Any) -> None:
    errors = {str(result.error) for result in run_workers(assigns, 2, strategy=strategy, timeout_s=20)}
    text = r"LoopError: another parameter stands where '(weight|bias)' was in engine\.prepare\(\).*Load without assign"
    assert any(re.match(text, error) for error in errors), errors


def test_a_parametrization_moves_a_parameter_and_it_is_trained_all_the_same() -> None:
    with Engine() as engine:
        model, optimizer, loader = prepared(engine)
        torch.nn.utils.parametrize.register_parametrization(model, "weight", nn.Identity())
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()


def test_a_parameter_that_the_script_sets_is_named() -> None:
    with Engine() as engine:
        model, _, loader = prepared(engine)
        model.bias = nn.Parameter(torch.zeros(1))
        with pytest.raises(LoopError, match="another parameter stands where 'bias' was"):
            next(iter(loader))
