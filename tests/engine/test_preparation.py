"""`engine.prepare` takes things in any order, finds the loader that trains, and refuses what can't be together."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from paceline import Engine
from paceline.engine.evaluation import EvaluationLoader
from paceline.engine.loop import PreparedLoader
from paceline.errors import ConfigError
from tests.engine.loops import vectors


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return itertools.cycle(vectors(4))


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::7], ids=str)
def test_five_things_in_any_order_come_back_in_that_order(order: tuple[int, ...]) -> None:
    with Engine() as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data, held_out = vectors(16), vectors(8)
        train, evaluation = DataLoader(data, batch_size=4, shuffle=True), DataLoader(held_out, batch_size=4)
        given = [model, optimizer, train, evaluation, scheduler]
        back = dict(zip(order, engine.prepare(*(given[place] for place in order)), strict=True))
        assert [back[0], back[1], back[4]] == [model, optimizer, scheduler]
        assert isinstance(back[2], PreparedLoader)
        assert isinstance(back[3], EvaluationLoader)
        assert (back[2].dataset, back[3].dataset) == (data, held_out)


def shuffled() -> DataLoader[Any]:
    return DataLoader(vectors(), batch_size=4, shuffle=True)


def plain() -> DataLoader[Any]:
    return DataLoader(vectors(), batch_size=4)


def drawn() -> DataLoader[Any]:
    return DataLoader(vectors(), batch_size=4, sampler=RandomSampler(range(32), replacement=True))


def stream() -> DataLoader[Any]:
    return DataLoader(Endless(), batch_size=4)


@pytest.mark.parametrize(
    ("loaders", "trains"),
    [
        ((plain, plain), 0), ((shuffled, shuffled), 0), ((plain, shuffled), 1), ((plain, drawn, plain), 1),
        ((stream, shuffled), 0), ((plain, stream), 1), ((vectors, vectors), 0), ((plain, vectors), 1),
    ],
)  # fmt: skip
def test_of_several_loaders_the_first_that_is_not_in_plain_order_trains(
    loaders: Any, trains: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(global_batch_size=4) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, *back = engine.prepare(model, optimizer, *(make() for make in loaders))
    assert [isinstance(loader, PreparedLoader) for loader in back] == [at == trains for at in range(len(loaders))]
    assert f"(in loader {trains + 1} of {len(loaders)})" in capsys.readouterr().out


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
