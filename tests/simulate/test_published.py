"""The simulator beside what others have published (benchmarks/results/published.toml); the errors are in the docs."""

from __future__ import annotations

import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest

from paceline.collectives.choice import FLAT
from paceline.simulate.collective import Collective
from paceline.simulate.exchange import Exchange
from paceline.simulate.network import network_named
from paceline.simulate.result import simulate
from paceline.simulate.scenario import Scenario

PUBLISHED = tomllib.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "published.toml").read_text())


def efficiency(model: dict[str, Any], workers: int) -> float:
    told = PUBLISHED["horovod"]
    scenario = Scenario(
        workers=workers, network=told["network"], algorithm=told["algorithm"], parameters=model["parameters"],
        layers=50, compute_ms=1e3 * told["batch"] / model["images_per_s"], bucket_mb=told["bucket_mb"],
        jitter=told["jitter"], steps=10,
    )  # fmt: skip
    return simulate(scenario).scaling


@pytest.mark.parametrize("model", PUBLISHED["horovod"]["model"], ids=lambda model: model["name"])
@pytest.mark.parametrize("workers", [128, 512])
def test_horovods_scaling_within_a_tenth(model: dict[str, Any], workers: int) -> None:
    assert efficiency(model, workers) == pytest.approx(model["efficiency"][str(workers)], rel=0.1)


def bus_bandwidth(told: dict[str, Any], nbytes: int) -> float:
    """In GB/s, by the cheapest of our algorithms."""
    size = told["workers"]
    exchange = Exchange(Scenario(workers=size, network=told["network"], algorithm="auto"))
    return nbytes / exchange.all_reduce(float(nbytes)).seconds * 2 * (size - 1) / size / 1e9


@pytest.mark.parametrize("told", PUBLISHED["nccl"], ids=lambda told: told["network"])
def test_nccls_bus_bandwidths_within_a_quarter_and_a_tenth_in_the_median(told: dict[str, Any]) -> None:
    errors = [bus_bandwidth(told, int(nbytes)) / measured - 1 for nbytes, measured in told["bus"].items()]
    assert max(map(abs, errors)) <= 0.25, errors
    assert statistics.median(map(abs, errors)) <= 0.1, errors


def test_the_latency_of_nccls_ring_grows_with_the_gpus_as_published() -> None:
    told = PUBLISHED["nccl_latency"]
    for size, measured in told["small"].items():
        placed = network_named(told["network"]).for_workers(int(size))
        found = Collective.of(FLAT["ring"], int(size), 8.0, placed, None).seconds * 1e6
        assert found == pytest.approx(measured, rel=0.01 if int(size) in told["fitted"] else 0.05)
