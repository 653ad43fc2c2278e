"""`engine.prepare` refuses what does not belong together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline import Engine
from paceline.errors import ConfigError


def test_an_optimizer_of_another_model_is_refused() -> None:
    with Engine() as engine:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())
        with pytest.raises(ConfigError, match="got a AdamW none of whose 2 parameters belongs to a model given to it"):
            engine.prepare(model, optimizer)


def test_an_optimizer_with_a_parameter_of_no_prepared_model_is_refused() -> None:
    with Engine() as engine:
        model, temperature = nn.Linear(4, 1), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
        told = r"got a SGD of whose 3 parameters 1 belong to no model given to it, the first of shape \(3,\)"
        with pytest.raises(ConfigError, match=told):
            engine.prepare(model, optimizer)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    with Engine() as engine:
        model = nn.Linear(4, 1)
        optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
        with pytest.raises(ConfigError, match="got a StepLR of an optimizer that was not given to it"):
            engine.prepare(model, optimizer, scheduler)


def test_what_belongs_together_may_come_in_several_models_and_schedulers() -> None:
    with Engine() as engine:
        first, second = nn.Linear(4, 2), nn.Linear(2, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)]
        chained = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[2])
        engine.prepare(first, second, optimizer)
        engine.prepare(chained)
