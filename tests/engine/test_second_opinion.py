"""A second opinion: lanes computed twice give the bits of lanes computed once, and who computes wrong is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from paceline import Engine, World
from paceline.engine.second_opinion import MOST_PASSES, SecondOpinion
from paceline.errors import ConfigError, ReplicaError
from tests.engine.loops import vectors
from tests.workers import hashes, run_workers


def trains(
    world: World, *, every: int | None = None, strategy: str = "ddp", wrong: tuple[int, int] | None = None
) -> tuple[str, list[str]]:
    """`wrong`: (worker, step) in whose first item a gradient is off by one bit."""
    told: list[str] = []
    with Engine(world=world, lanes=4, strategy=strategy, second_opinion=every, bucket_mib=0.001) as engine:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = engine.prepare(
            model, optimizer, DataLoader(vectors(100), batch_size=4, shuffle=True)
        )
        done = False
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                if wrong == (world.rank, engine.step + 1) and not done:
                    done = True
                    loss = loss * (1 + 2**-20)
                engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            told = [str(one.message) for one in found]
        return engine.weights_hash(), told


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "star", "zero1", "zero2", "zero3"])
def test_steps_computed_twice_give_the_same_bits(strategy: str) -> None:
    (once,) = hashes([*run_workers(_hash, 1, strategy="ddp")])
    assert hashes(run_workers(_hash, 3, strategy=strategy, every=2)) == {once}


def _hash(world: World, **options: Any) -> str:
    return trains(world, **options)[0]


@pytest.mark.workers
def test_a_worker_that_computes_wrong_is_named_and_leaves() -> None:
    results = run_workers(trains, 3, every=2, wrong=(1, 4))
    assert results[1].error is not None
    assert "worker 1 computed lane 1 of step 4 otherwise than two other passes did" in results[1].error
    assert "not to be trusted" in results[1].error


@pytest.mark.workers
def test_what_is_wrong_between_two_opinions_is_not_seen() -> None:
    """It costs a pass each time, so it is asked for every so many steps; this says that the test above can fail."""
    results = run_workers(trains, 3, every=2, wrong=(1, 3))
    assert all(result.error is None for result in results)


def test_two_of_three_passes_decide() -> None:
    opinion, holders = SecondOpinion(1), [(0, 1), (2, 3)]
    right = {0: 5, 1: 6, 2: 7, 3: 8}
    assert opinion.hear(right, holders, 1).again
    assert opinion.hear({**right, 2: 9}, holders[::-1], 1).again
    verdict = opinion.hear(right, holders, 1)
    assert (verdict.again, verdict.wrong) == (False, ((0, 2),))


def test_passes_that_never_agree_end_the_job() -> None:
    opinion = SecondOpinion(1)
    for number in range(MOST_PASSES - 1):
        assert opinion.hear({0: number}, [(0,)], 7).again
    with pytest.raises(ReplicaError, match=r"lane 0 of step 7 was computed 5 times, and no two workers agree"):
        opinion.hear({0: 99}, [(0,)], 7)


def test_it_is_refused_where_lanes_cannot_be_passed_on() -> None:
    with pytest.raises(ConfigError, match=r"second_opinion=0: every so many steps"):
        Engine(second_opinion=0)
    with Engine(second_opinion=2, strategy="parameter_server") as engine:
        model = nn.Linear(8, 1)
        with pytest.raises(ConfigError, match="lanes are passed on to other workers under ddp, fsdp, star, zero1"):
            engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(vectors(), batch_size=4))
