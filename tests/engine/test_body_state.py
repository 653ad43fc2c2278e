"""What the loop's body carries from item to item is told of; what is made anew in every item is not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import DataLoader

from paceline import Engine, World
from paceline.engine import rules
from paceline.engine.forward_state import ForwardState
from tests.engine.loops import vectors
from tests.engine.test_habits import adam, net
from tests.workers import run_workers

Body = Callable[[Engine, Any, Any], Any]


def told_of(body: Body, *, lanes: int = 2) -> list[str]:
    """Trains with a body that makes the loss; what the warnings say about generators."""
    with warnings.catch_warnings(record=True) as caught, Engine(world=World(), lanes=lanes, threads=1) as engine:
        warnings.simplefilter("always")
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(body(engine, x, y)), y))
            optimizer.step()
            optimizer.zero_grad()
    assert _get_current_function_mode_stack() == []
    return [str(one.message) for one in caught if "random generator" in str(one.message)]


def of_torch() -> Body:
    mine = torch.Generator().manual_seed(0)
    return lambda engine, x, y: x + torch.randn(x.shape, generator=mine)


def in_place() -> Body:
    kept = {"rng": torch.Generator()}
    return lambda engine, x, y: x + torch.empty_like(x).normal_(generator=kept["rng"])


def of_numpy() -> Body:
    mine = np.random.default_rng(0)
    return lambda engine, x, y: x + float(mine.normal())


def old_of_numpy() -> Body:
    mine = np.random.RandomState(0)
    return lambda engine, x, y: x + float(mine.rand())


def of_python() -> Body:
    mine = random.Random(0)
    return lambda engine, x, y: x + mine.random()


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (of_torch, "torch.Generator, in randn()"),
        (in_place, "torch.Generator, in normal_()"),
        (of_numpy, "numpy's Generator"),
        (old_of_numpy, "numpy's RandomState"),
        (of_python, "random's Random"),
    ],
)
@pytest.mark.parametrize("lanes", [2, 4])
def test_a_generator_that_goes_on_from_item_to_item_is_told_of(body: Callable[[], Body], name: str, lanes: int) -> None:
    (told,) = told_of(body(), lanes=lanes)
    assert told.startswith(f"the loop's body draws from a random generator of its own ({name}): "), told


def seeded_anew() -> Body:
    mine = torch.Generator()

    def body(engine: Engine, x: Any, y: Any) -> Any:
        mine.manual_seed(int(x.sum() * 1000))
        return x + torch.randn(x.shape, generator=mine)

    return body


def made_anew() -> Body:
    return lambda engine, x, y: x + float(np.random.default_rng(np.random.randint(1 << 30)).normal())


def shared() -> Body:
    return lambda engine, x, y: x + torch.randn(x.shape) + float(np.random.rand()) + random.random()


def given_the_shared_one() -> Body:
    return lambda engine, x, y: x + torch.randn(x.shape, generator=torch.default_generator)


def unused() -> Body:
    mine = torch.Generator(), np.random.default_rng(0), random.Random(0)
    return lambda engine, x, y: x + 0 * len(mine)


def of_one_lane() -> Body:
    """Only one item of a job draws from it."""
    left = [torch.Generator()]
    return lambda engine, x, y: x + (torch.randn(x.shape, generator=left.pop()) if left else 0)


@pytest.mark.parametrize("body", [seeded_anew, made_anew, shared, given_the_shared_one, unused, of_one_lane])
def test_of_others_nothing_is_said(body: Callable[[], Body]) -> None:
    assert told_of(body()) == []


def test_with_one_lane_there_is_nobody_to_disagree() -> None:
    assert told_of(of_torch(), lanes=1) == []


class Mine(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_body_around_its_backward_is_left_alone() -> None:
    """Ours is below it when the item ends, and leaves with a later one."""
    with Engine(world=World(), lanes=2, threads=1) as engine:
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        for x, y in loader:
            mine = Mine()
            with mine:
                engine.backward(F.mse_loss(model(x), y))
                assert _get_current_function_mode_stack()[-1] is mine
            optimizer.step()
            optimizer.zero_grad()
        assert _get_current_function_mode_stack() == []


def test_nothing_is_left_of_a_loop_whose_body_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        told_of(lambda engine, x, y: x / (1 // 0))
    assert _get_current_function_mode_stack() == []


def test_nor_of_one_that_skips_its_backward() -> None:
    with pytest.warns(UserWarning, match="it counts as empty"), Engine(world=World(), lanes=2, threads=1) as engine:
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        for number, (x, y) in enumerate(loader):
            if number % 4 == 0:
                continue
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
    assert _get_current_function_mode_stack() == []


# -- tensors -----------------------------------------------------------------------------------------------------------


class Bank:
    def __init__(self) -> None:
        self.rows = torch.ones(4)


def train(how: str, *, lanes: int, world: World | None = None) -> None:
    """A loop with a tensor that goes on from item to item, or seems to."""
    with Engine(world=world or World(), lanes=lanes, threads=1) as engine:
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        h, kept, bank, total, cache, by_lane = None, [torch.ones(4)], Bank(), torch.zeros(()), None, {}

        def of_closure() -> Any:
            nonlocal h
            before, h = h, torch.tanh(x.sum(1))
            return 0.0 if before is None else before

        for x, y in loader:
            now, more = torch.tanh(x.sum(1)), 0.0
            if how == "a variable":
                h, more = now, 0.0 if h is None else h
            elif how == "a variable of a function in the loop's":
                more = of_closure()
            elif how == "written to":
                more = bank.rows * 2
                bank.rows[1:3] = now[:2]
            elif how == "an element":
                more, kept[0] = kept[0].view(2, 2).mT.reshape(4), now
            elif how == "an attribute":
                more, bank.rows = bank.rows, now
            elif how == "made once":
                cache = now if cache is None else cache
                more = cache
            elif how == "one for each lane":
                more, by_lane[engine.lane] = by_lane.get(engine.lane, 0.0), now
            elif how == "only its shape":
                h, more = now, 0.0 if h is None else torch.zeros_like(h)
            loss = F.mse_loss(model(x) + (more if isinstance(more, float) else more.mean()), y)
            if how == "none":
                torch.nn.init.zeros_(tensor=torch.ones(2))
                torch.relu_(input=torch.ones(2))
            if how == "only printed":
                total = total + loss.detach()
            elif how == "in inference mode":
                with torch.inference_mode():
                    kept.append(model(x))
            elif how == "the loss itself":
                h, loss = loss.detach() * 2, loss if h is None else loss * 0 + h
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if how == "changed between steps":
                more = bank.rows
                if engine.stepped:
                    bank.rows = now


def told_of_tensors(how: str, *, lanes: int = 4) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(how, lanes=lanes)
    assert _get_current_function_mode_stack() == []
    return [str(one.message) for one in caught if "carries from item to item" in str(one.message)]


@pytest.mark.parametrize(
    "how",
    [
        "a variable",
        "a variable of a function in the loop's",
        "written to",
        "an element",
        "an attribute",
        "the loss itself",
    ],
)
@pytest.mark.parametrize("lanes", [2, 4])
def test_a_tensor_that_goes_on_into_the_loss_of_the_next_item_is_told_of(how: str, lanes: int) -> None:
    (told,) = told_of_tensors(how, lanes=lanes)
    assert told.startswith("a tensor that the loop's body carries from item to item is part of the loss (test_body"), (
        told
    )


@pytest.mark.parametrize(
    "how",
    [
        "made once",
        "one for each lane",
        "only its shape",
        "only printed",
        "in inference mode",
        "changed between steps",
        "none",
    ],
)
def test_of_tensors_that_do_no_harm_nothing_is_said(how: str) -> None:
    assert told_of_tensors(how) == []


def test_with_one_lane_a_tensor_goes_on_as_it_would_in_torch() -> None:
    assert told_of_tensors("a variable", lanes=1) == []


def told_of_joiners(world: World, *, how: str) -> list[str]:
    """Each worker has one lane, and others may join."""
    rules.ForwardState = lambda models, _: ForwardState(models, lambda: True)  # type: ignore[assignment, misc]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(how, lanes=2, world=world)
    return [str(one.message) for one in caught if "from step to step" in str(one.message)]


@pytest.mark.workers
@pytest.mark.parametrize("how", ["a variable", "written to", "an attribute", "one for each lane"])
def test_a_tensor_that_a_joining_worker_would_lack_is_told_of(how: str) -> None:
    for worker in run_workers(told_of_joiners, 2, how=how):
        (told,) = worker.value
        assert "a worker that joins this elastic job later begins without it" in told


@pytest.mark.workers
@pytest.mark.parametrize("how", ["made once", "only its shape", "only printed", "in inference mode", "none"])
def test_of_what_a_joining_worker_can_do_without_nothing_is_said(how: str) -> None:
    assert [worker.value for worker in run_workers(told_of_joiners, 2, how=how)] == [[], []]
