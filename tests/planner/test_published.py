"""Against tables that others have published; the numbers and where they stand are in planner/data/published.json."""

from __future__ import annotations

import pytest

from paceline.collectives.ring_all_reduce import RING, RING_ALL_GATHER, RING_REDUCE_SCATTER
from paceline.planner.hardware import device_names, hardware_named, link_named, network_names, published
from paceline.planner.traffic import sent_by
from paceline.sharding.footprint import Model, footprint


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_memory_of_zero_is_that_of_its_paper(strategy: str) -> None:
    table = published("zero_memory")
    model, workers = Model.mixed(int(table["parameters"])), table["workers"]
    sizes = table["bytes_per_parameter"]
    assert (model.weight, model.gradient, model.state) == (
        sizes["weights"], sizes["gradients"], sizes["optimizer_state"],
    )  # fmt: skip
    held = footprint(strategy, model, workers=workers, lanes=workers).held
    assert held / 1e9 == pytest.approx(table["gigabytes"][strategy], rel=0.03)


SCHEDULES = {"all_reduce": RING, "reduce_scatter": RING_REDUCE_SCATTER, "all_gather": RING_ALL_GATHER}


@pytest.mark.parametrize("operation", SCHEDULES)
def test_a_ring_sends_what_the_bus_bandwidth_of_nccl_tests_counts(operation: str) -> None:
    elements = 16 * 1024
    for workers, factor in published("nccl_bus_bandwidth")["factors"][operation].items():
        assert max(sent_by(SCHEDULES[operation], elements, int(workers))) == factor * elements


@pytest.mark.parametrize("name", device_names())
def test_a_device_has_a_source_and_more_flops_in_low_precision(name: str) -> None:
    device = hardware_named(name)
    assert device.source
    assert device.rates_for(8).flops["bfloat16"] > device.rates_for(1).flops["float32"] > 1e12
    assert 20e9 < device.memory_bytes < 200e9


def test_networks_are_ordered_by_their_rate() -> None:
    rates = {name: link_named(name).bandwidth for name in network_names()}
    assert rates["InfiniBand 400"] == 2 * rates["InfiniBand 200"] == 4 * rates["InfiniBand 100"]
    assert rates["NVLink 4"] > rates["PCIe 5 x16"] > rates["25 GbE"] > rates["10 GbE"]
