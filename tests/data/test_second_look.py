"""A dataset that gives other samples when it is asked again is told of, once, whatever it is that it depends on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from paceline.data import fetching
from paceline.data.loader import ShardedLoader
from paceline.data.work_source import Assignment

TOLD = "fetched a second time from the same random state, "


class Samples(Dataset[Any]):
    def __init__(self, sample: Callable[[int], Any], **attributes: Any) -> None:
        self._sample = sample
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self._sample(index)


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, index: int) -> Any:
        self.calls += 1
        return torch.tensor(index + 100 * self.calls)


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def __call__(self, index: int) -> Any:
        return {"x": np.full(3, index) + self._random.normal(), "name": str(index)}


def first_of(values: list[Any]) -> Callable[[int], Any]:
    """Each sample is to be had once."""
    return lambda index: values.pop(0)


def drawn(index: int) -> Any:
    return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


def masked(samples: Any, generator: torch.Generator | None) -> Any:
    batch = default_collate(samples)
    return batch + torch.randint(0, 9, batch.shape, generator=generator)


def train_on(dataset: Dataset[Any], *, lanes: int = 2, epochs: int = 2, **options: Any) -> None:
    lanes_here = tuple(range(lanes))
    loader = ShardedLoader(DataLoader(dataset, batch_size=4, **options), Assignment(lanes, 1, lanes_here, seed=3))
    for _ in range(epochs):
        for item, _ in loader.items():
            if item.last_of_step:
                loader.commit(item)


OTHERS = {
    "counts its calls": (Samples(Counter()), None),
    "a transform's generator": (Samples(Jitter()), None),
    "a generator below a Subset": (Subset(Samples(Jitter(), random=random.Random(0)), range(16)), None),
    "tells the time": (Samples(lambda index: float(time.perf_counter_ns())), default_collate),
    "collate_fn's generator": (Samples(torch.tensor), partial(masked, generator=torch.Generator())),
    "is used up": (Samples(first_of([torch.tensor(n) for n in range(4 + 1)])), None),
}


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("what", ["counts its calls", "a transform's generator", "a generator below a Subset"])
def test_samples_that_are_others_the_second_time_are_told_of(
    what: str, processes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset, collate = OTHERS[what]
    train_on(dataset, collate_fn=collate, num_workers=processes, timeout=20 * processes)
    told = capfd.readouterr().err
    assert told.count(TOLD) == 1, told
    assert f"the samples 0, 1, 2, 3 of the {type(dataset).__name__}, {TOLD}gave another batch" in told


@pytest.mark.parametrize("what", ["tells the time", "collate_fn's generator"])
def test_so_are_the_time_and_a_collate_fn_with_a_generator_of_its_own(
    what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset, collate = OTHERS[what]
    train_on(dataset, collate_fn=collate)
    assert capfd.readouterr().err.count(TOLD) == 1


def test_a_second_fetch_that_fails_costs_nothing_but_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    dataset, _ = OTHERS["is used up"]
    loader = ShardedLoader(DataLoader(dataset, batch_size=4), Assignment(2, 1, (0, 1), seed=3))
    _, batch = next(iter(loader.items()))
    assert batch.tolist() == [0, 1, 2, 3]
    told = capfd.readouterr().err
    assert f"{TOLD}failed (DataError: the dataset failed on sample 1: IndexError" in told


PURE = {
    "a number": Samples(torch.tensor),
    "random numbers": Samples(drawn),
    "nan": Samples(lambda index: (float("nan"), torch.full((2,), float("nan")), torch.tensor([True, False]))),
    "many kinds": Samples(lambda index: {"a": np.arange(3), "b": [str(index), index, 1.5], "c": {"d": (index,)}}),
    "a generator made for each": Samples(lambda index: np.random.default_rng(torch.initial_seed()).normal()),
}


@pytest.mark.parametrize("what", PURE)
@pytest.mark.parametrize("processes", [0, 1])
def test_of_others_nothing_is_said(what: str, processes: int, capfd: pytest.CaptureFixture[str]) -> None:
    train_on(PURE[what], num_workers=processes)
    assert capfd.readouterr().err == ""


def calls_of(dataset_of: Callable[[Any], Dataset[Any]], **options: Any) -> int:
    counter = Counter()
    train_on(dataset_of(counter), epochs=1, **options)
    return counter.calls


def test_one_item_of_a_job_is_fetched_again_where_lanes_may_move_and_the_dataset_does_not_say_that_it_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert calls_of(Samples) == 16 + 4
    assert calls_of(Samples, lanes=1) == 16
    assert calls_of(partial(Samples, draws=True)) == 16
    monkeypatch.setattr(fetching, "LONGEST_S", 0.0)  # each item takes longer
    assert calls_of(Samples) == 16
