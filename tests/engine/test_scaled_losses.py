"""A loss that is divided or multiplied by what the engine counts by itself: told once; any other number is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline import Engine, World
from tests.engine.loops import prepared
from tests.workers import run_workers

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def l1(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x), y)


def told(loss: Loss, *, world: World | None = None, batch_size: int = 3, epochs: int = 1, **job: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, Engine(world=world or World(), threads=1, **job) as engine:
        warnings.simplefilter("always")
        model, optimizer, loader = prepared(engine, samples=80, batch_size=batch_size)
        for _ in range(epochs):
            for x, y in loader:
                engine.backward(loss(model, x, y))
                optimizer.step()
    return [f"{warning.filename}: {warning.message}" for warning in caught]


@pytest.mark.parametrize("accumulate", [2, 4, 5])
def test_a_loss_divided_by_accumulate_is_told_once(accumulate: int) -> None:
    (warning,) = told(lambda *given: l1(*given) / accumulate, lanes=2, accumulate=accumulate, epochs=2)
    assert warning.startswith(
        f"{__file__}: the loss of every item is divided by {accumulate}, which is accumulate={accumulate}: "
        "engine.backward() takes the mean over micro-batches, lanes and workers by itself, and the gradient would be "
        f"{accumulate} times too small. Give it the mean"
    )
    assert "if the number is a weight of the loss, it is right" in warning


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (lambda m, x, y: (l1(m, x, y) + m(x).abs().mean()) / 4, "divided by 4, which is accumulate=4"),
        (lambda m, x, y: 4 * l1(m, x, y), "multiplied by 4, which is accumulate=4: .* 4 times too large"),
        (lambda m, x, y: l1(m, x, y) * 4 / 0.5, ""),
        (lambda m, x, y: l1(m, x, y) * 4 / 77, "multiplied by 4, which is accumulate=4"),
        (lambda m, x, y: l1(m, x, y) / 5, "divided by 5, which is the number of lanes"),
        (lambda m, x, y: F.mse_loss(m(x), y) / 4, "divided by 4, which is accumulate=4"),
    ],
)
def test_what_is_told_of(loss: Loss, wanted: str) -> None:
    found = told(loss, lanes=5, accumulate=4)
    if wanted:
        with pytest.warns(UserWarning, match=f"the loss of every item is {wanted}"):
            warnings.warn("".join(found), stacklevel=1)
    else:
        assert found == []


class OwnSum(torch.autograd.Function):
    """As a fused loss has it: nothing says that it is a sum."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.shape = given.shape
        return given.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].expand(ctx.shape)


RIGHT: dict[str, Loss] = {
    "the mean of two": lambda m, x, y: (l1(m, x, y) + m(x).abs().mean()) / 2,
    "the mean of many": lambda m, x, y: (F.cross_entropy(m(x).expand(-1, 2), y[:, 0].long() * 0) + l1(m, x, y) * 2) / 2,
    "half of a square": lambda m, x, y: F.mse_loss(m(x), y) / 2,
    "half of a square by hand": lambda m, x, y: (m(x) - y).square().mean() / 2,
    "a weight": lambda m, x, y: l1(m, x, y) / 2.0,
    "twice": lambda m, x, y: 2 * l1(m, x, y),
    "a sum over samples": lambda m, x, y: (m(x) - y).abs().sum() / 2,
    "a sum by name": lambda m, x, y: F.mse_loss(m(x), y, reduction="sum") / 2,
    "a sum of a sum": lambda m, x, y: (0.5 * F.mse_loss(m(x), y, reduction="sum") - m(x).mean()) / 2,
    "a fused sum over the batch": lambda m, x, y: OwnSum.apply(m(x).abs()) / len(x),  # type: ignore[no-untyped-call]
    "times the batch": lambda m, x, y: l1(m, x, y) * len(x),
    "a count of the data's": lambda m, x, y: l1(m, x, y) / int((x[0] > 0).sum().clamp(min=1)),
    "a tensor": lambda m, x, y: l1(m, x, y) / torch.full((1, 2), 1).sum(),
    "not at all": l1,
    "a half": lambda m, x, y: 0.5 * l1(m, x, y),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_right_is_not_told_of(name: str) -> None:
    assert told(RIGHT[name], lanes=2, accumulate=2, batch_size=2) == []


def test_with_as_many_samples_as_micro_batches_a_mean_that_is_divided_is_told_of() -> None:
    assert len(told(lambda *given: l1(*given) / 4, lanes=2, accumulate=4, batch_size=4)) == 1


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_division_by_two_is_not_one_by_lanes_or_workers(lanes: int) -> None:
    assert told(lambda *given: l1(*given) / 2, lanes=lanes) == []


def test_a_number_of_one_item_alone_is_none_of_the_loops() -> None:
    seen: list[int] = []

    def last(m: Any, x: Tensor, y: Tensor) -> Tensor:
        seen.append(0)
        return l1(m, x, y) / (3 if len(seen) == 5 else 4)

    assert told(last, lanes=2, accumulate=4) == []


def test_what_is_computed_again_in_backward_is_left_alone() -> None:
    calls: list[int] = []

    def loss(m: Any, x: Tensor, y: Tensor) -> Any:
        def whole(x: Tensor) -> Tensor:
            calls.append(0)
            return l1(m, x, y) / torch.full((), 4)

        return checkpoint(whole, x, use_reentrant=False)

    assert told(loss, lanes=1, accumulate=4, batch_size=10) == []
    assert len(calls) == 2 * 8  # 80 samples are 8 items, each with a forward and one in its backward


def test_several_losses_and_updates_are_not_looked_at() -> None:
    with warnings.catch_warnings(), Engine(world=World(), threads=1, lanes=2, accumulate=4) as engine:
        warnings.simplefilter("error")
        model, optimizer, loader = prepared(engine, samples=64)
        for x, y in loader:
            for part in range(4):
                engine.backward(l1(model, x, y) / 4, last=part == 3)
            optimizer.step()
        for _ in loader:
            engine.update(optimizer, lambda batch: l1(model, *batch) / 4)


def _times_workers(world: World) -> list[str]:
    return told(lambda *given: l1(*given) * world.size, world=world, lanes=4, batch_size=5)


@pytest.mark.workers
def test_a_loss_times_the_number_of_workers_is_told_where_there_are_several() -> None:
    assert _times_workers(World()) == []
    for found in run_workers(_times_workers, 2):
        assert found.error is None
        (warning,) = found.value
        assert "multiplied by 2, which is the number of workers: " in warning
        assert "and the gradient would be another on another number of workers. Give it the mean over" in warning


@pytest.mark.workers
def test_half_of_a_loss_is_right_on_two_workers() -> None:
    for found in run_workers(_half, 2):
        assert (found.error, found.value) == (None, [])


def _half(world: World) -> list[str]:
    return told(lambda *given: l1(*given) / 2, world=world, lanes=2, batch_size=5)
