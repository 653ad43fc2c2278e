"""The star: ddp's bits by way of one worker, and the formula's bytes through it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import sum_plan
from paceline.errors import ConfigError
from tests.benchmarks import script
from tests.bits.programs import clipped, gpt, short_last_step
from tests.engine.loops import prepared
from tests.workers import hashes, run_workers

theory = script("traffic_theory")

PROGRAMS = {"gpt": gpt, "clipped": clipped, "short_last_step": short_last_step}


@cache
def hash_of_ddp(program: str, workers: int, **job: Any) -> frozenset[str]:
    return frozenset(hashes(run_workers(PROGRAMS[program], workers, strategy="ddp", **job)))


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize(("program", "workers", "lanes"), [("gpt", 2, 4), ("clipped", 3, 5), ("short_last_step", 4, 4)])
def test_star_gives_the_bits_of_ddp(program: str, workers: int, lanes: int, backend: str) -> None:
    star = hashes(run_workers(PROGRAMS[program], workers, strategy="star", lanes=lanes, backend=backend))
    assert star == hash_of_ddp(program, 2, lanes=lanes) == hash_of_ddp(program, 1, lanes=lanes)


@pytest.mark.workers
def test_alone_star_gives_the_bits_of_ddp() -> None:
    assert hashes(run_workers(gpt, 1, strategy="star", lanes=4)) == hash_of_ddp("gpt", 1, lanes=4)


# -- bytes -------------------------------------------------------------------------------------------------------------


def a_step(world: World, **job: Any) -> tuple[Traffic, int, int]:
    """The traffic of the last step, the number of elements, and the buckets that left early."""
    with Engine(world=world, bucket_mib=0.0005, **job) as engine:
        model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(80, 12), torch.randn(80, 12))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        elements = sum(parameter.numel() for parameter in model.parameters())
        return engine.traffic, elements, engine.timing.left_during_backward


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize(("workers", "lanes"), [(2, 2), (4, 4), (3, 5)])
def test_a_step_moves_the_bytes_of_the_formula_and_nothing_before_backward_is_done(
    workers: int, lanes: int, backend: str
) -> None:
    plan = sum_plan(lanes, workers, tuple(range(lanes)))
    results = run_workers(a_step, workers, strategy="star", lanes=lanes, backend=backend)
    for rank, result in enumerate(results):
        assert result.error is None, result.traceback
        traffic, elements, left_early = result.value
        moved = theory.canonical_star(elements, plan)[rank]
        assert (traffic.sent_bytes, traffic.received_bytes) == (4 * moved.sent, 4 * moved.received), f"rank {rank}"
        assert traffic.operations == {"star"}
        assert traffic.native == {"all_gather": 1}  # the vote
        assert left_early == 0


def test_with_one_root_each_the_canonical_star_is_the_star_of_the_literature() -> None:
    for workers in range(1, 9):
        plan = sum_plan(workers, workers, tuple(range(workers)))
        assert theory.canonical_star(100, plan) == theory.star(100, workers)


@pytest.mark.workers
def test_a_fast_star_moves_the_same_bytes() -> None:
    for rank, result in enumerate(run_workers(a_step, 3, strategy="star", reduction="fast")):
        assert result.error is None, result.traceback
        traffic, elements, _ = result.value
        assert traffic.of("star").sent_bytes == 4 * theory.star(elements, 3)[rank].sent


def test_a_star_over_another_algorithm_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"strategy='star' with algorithm='ring'.*strategy='ddp' to train over ring"),
        Engine(world=World(), strategy="star", reduction="fast", algorithm="ring") as engine,
    ):
        prepared(engine)
