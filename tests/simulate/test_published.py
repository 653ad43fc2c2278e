"""The simulator beside what others have published (benchmarks/results/published.toml); the errors are in the docs."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.benchmarks import script

simulated = script("simulated")
PUBLISHED = simulated.PUBLISHED


@pytest.mark.parametrize("model", PUBLISHED["horovod"]["model"], ids=lambda model: model["name"])
@pytest.mark.parametrize("workers", [128, 512])
def test_horovods_scaling_within_a_tenth(model: dict[str, Any], workers: int) -> None:
    found = simulated.horovod_efficiency(model, workers)
    assert found == pytest.approx(model["efficiency"][str(workers)], rel=0.1)


@pytest.mark.parametrize("told", PUBLISHED["nccl"], ids=lambda told: told["network"])
def test_nccls_bus_bandwidths_within_a_quarter_and_a_tenth_in_the_median(told: dict[str, Any]) -> None:
    errors = [simulated.bus_bandwidth(told, int(nbytes)) / measured - 1 for nbytes, measured in told["bus"].items()]
    assert max(map(abs, errors)) <= 0.25, errors
    assert statistics.median(map(abs, errors)) <= 0.1, errors


def test_the_latency_of_nccls_ring_grows_with_the_gpus_as_published() -> None:
    told = PUBLISHED["nccl_latency"]
    for size, measured in told["small"].items():
        within = 0.01 if int(size) in told["fitted"] else 0.05
        assert simulated.latency_us(int(size)) == pytest.approx(measured, rel=within)
