"""A prepared evaluation loader deals its batches to all workers: who runs it alone is told before it believes it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from paceline import Engine, World
from paceline.world import messages
from tests.engine.loops import prepared, vectors
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def evaluates(world: World, *, who: str, to_its_end: bool = True) -> int:
    with Engine(world=world, lanes=2, timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine)
        evaluation = engine.prepare(DataLoader(vectors(12), batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.step == 2 and (who == "all" or world.rank == 0):
                for _ in evaluation:
                    if not to_its_end:
                        break
        return engine.step


def test_an_evaluation_by_one_worker_alone_is_an_error_in_the_next_step() -> None:
    for result in run_workers(evaluates, 2, who="one"):
        assert result.error is not None
        assert result.error.startswith("LoopError: worker 0 has run through 1 loops over prepared evaluation loaders")


@pytest.mark.parametrize(("who", "to_its_end"), [("all", True), ("one", False)])
def test_one_by_all_is_none_and_neither_is_a_look_at_a_batch(who: str, to_its_end: bool) -> None:
    assert [result.value for result in run_workers(evaluates, 2, who=who, to_its_end=to_its_end)] == [4, 4]


def leaves_early(world: World) -> int:
    with Engine(world=world, lanes=2, timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine)
        evaluation = engine.prepare(DataLoader(vectors(28), batch_size=4))  # 7 batches: 4 rounds, and 3
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.step == 2:
                for number, _ in enumerate(evaluation):
                    if number + 1 == 4:
                        break
        return engine.step


def test_one_that_a_worker_leaves_early_and_another_runs_through_is_one_by_all() -> None:
    assert [result.value for result in run_workers(leaves_early, 2)] == [4, 4]


def adds_up(world: World, *, asks: bool) -> tuple[int, list[str]]:
    told: list[str] = []
    logging.getLogger("paceline").handlers[:] = [messages.ToCaller(told.append)]
    with Engine(world=world, lanes=4, timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=18)  # 16, and 2 for the first of 4 lanes
        seen = 0
        for x, y in loader:
            if not (asks and loader.shadow):
                seen += len(y)
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        return seen, [text for text in told if "a copy of another one's batch" in text]


@pytest.mark.parametrize("asks", [True, False])
def test_a_batch_that_is_a_copy_is_told_to_a_body_that_does_not_ask(asks: bool) -> None:
    found = [result.value for result in run_workers(adds_up, 4, asks=asks)]
    assert (sum(seen for seen, _ in found) == 18) is asks, found
    assert [len(told) for _, told in found] == [0, 0 if asks else 1, 0, 0]  # one tells it for all


def sums(world: World, *, where: str) -> list[str]:
    told: list[str] = []
    logging.getLogger("paceline").handlers[:] = [messages.ToCaller(told.append)]
    with Engine(world=world, lanes=2, timeout_s=20) as engine:
        evaluation = engine.prepare(DataLoader(vectors(28), batch_size=4))
        for _ in range(3):
            seen = torch.zeros(())
            for x, _ in evaluation:
                seen += len(x)
                if where == "in the loop":
                    engine.gather_for_metrics(x)
            if where == "behind it":
                assert engine.reduce(seen) == 28
            if where == "behind it, by torch":
                torch.distributed.all_reduce(seen)
                assert seen == 28
    return [text for text in told if "nothing was gathered or reduced" in text]


@pytest.mark.parametrize("where", ["in the loop", "behind it", "behind it, by torch", "nowhere"])
def test_an_evaluation_that_nobody_puts_together_is_told_once(where: str) -> None:
    found = [result.value for result in run_workers(sums, 2, where=where)]
    assert [len(told) for told in found] == [int(where == "nowhere"), 0]
    assert run_workers(sums, 1, where=where)[0].value == []
