"""Meters by a clock that the test turns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.trainer.meters import Meters, PeakFlops, PeakMemory, Stretch, gpu_peak, measured_peak, model_flops


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_those_since_the_last_log() -> None:
    clock = Clock()
    meters = Meters(clock=clock)
    meters.restart()
    for seconds in (2.0, 2.0):
        clock.now += seconds
        meters.step(samples=8, tokens=400, waited_s=0.5)
    assert meters.since_last_log() == {
        "samples_per_second": 4.0,
        "step_time_s": 2.0,
        "data_wait_s": 0.5,
        "tokens_per_second": 200.0,
    }
    clock.now += 1.0
    meters.step(samples=8)
    assert meters.since_last_log() == {"samples_per_second": 8.0, "step_time_s": 1.0, "data_wait_s": 0.0}
    assert meters.since_last_log() == {}
    assert meters.whole == Stretch(steps=3, samples=24, tokens=800, seconds=5.0, waited_s=1.0)


def test_communication_that_nothing_hides_is_logged_where_there_are_others() -> None:
    clock = Clock()
    meters = Meters(2, clock=clock)
    meters.restart()
    for exposed_s in (0.25, 0.5):
        clock.now += 1.0
        meters.step(samples=8, exposed_s=exposed_s)
    assert meters.since_last_log()["exposed_communication_s"] == 0.375


def test_an_evaluation_slows_no_meter_down() -> None:
    clock = Clock()
    meters = Meters(clock=clock)
    clock.now += 50.0  # before training
    meters.restart()
    clock.now += 1.0
    meters.step(samples=4)
    clock.now += 500.0
    meters.restart()
    clock.now += 1.0
    meters.step(samples=4)
    assert meters.since_last_log()["samples_per_second"] == 4.0


def test_a_loss_that_is_not_finite_is_shown_as_it_is() -> None:
    meters = Meters(clock=Clock())
    meters.step(samples=1, loss=1.0)
    meters.step(samples=1, loss=math.nan)
    assert meters.last_loss is not None
    assert math.isnan(meters.last_loss)


@pytest.mark.parametrize(("tokens", "mfu"), [(100, 0.5), (0, 0.005)])
def test_mfu_is_what_the_model_did_over_what_all_workers_could(tokens: int, mfu: float) -> None:
    clock = Clock()
    meters = Meters(2, 6e6, PeakFlops(6e8, "measured"), memory=lambda: 3 * 2**29, clock=clock)
    meters.restart()
    clock.now += 1.0
    meters.step(samples=1, tokens=tokens)
    logged = meters.since_last_log()
    assert logged["mfu"] == pytest.approx(mfu)
    assert logged["peak_memory_gib"] == 1.5


def test_there_is_no_mfu_without_a_peak_or_anything_done() -> None:
    clock = Clock()
    meters = Meters(flops_per_unit=1.0, clock=clock)
    meters.restart()
    clock.now += 1.0
    meters.step(samples=1)
    assert "mfu" not in meters.since_last_log()
    meters.peak = PeakFlops(1.0, "")
    clock.now += 1.0
    meters.step(samples=0)
    assert "mfu" not in meters.since_last_log()


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("AMD Instinct MI300X", 1307.0),
    ],
)
def test_the_peak_of_a_gpu_is_read_from_its_name(name: str, tera: float) -> None:
    peak = gpu_peak(name)
    assert peak is not None
    assert peak.per_worker == tera * 1e12


def test_an_unknown_gpu_has_no_peak() -> None:
    assert gpu_peak("Some Accelerator 9000") is None
    assert gpu_peak("NVIDIA RTX A4000") is None


def test_parameters_that_are_not_trained_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 1))
    model[0].requires_grad_(False)
    assert model_flops(model) == 66.0


def test_a_cpu_is_measured_without_drawing_random_numbers() -> None:
    before = torch.get_rng_state()
    ticks = iter(range(1000))
    peak = measured_peak(torch.float32, clock=lambda: next(ticks) / 2)
    assert peak.per_worker == 2 * 1024**3 / 0.5
    assert peak.source.startswith("measured, float32 matmul on ")
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_shared_with_others_counts_by_its_share_which_is_asked_for_once_a_minute(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  1000 kB\n")
    (tmp_path / "smaps_rollup").write_text("5500-7fff ---p 00000000 00:00 0\nRss:  800 kB\nPss:  500 kB\n")
    clock = Clock()
    memory = PeakMemory(torch.device("cpu"), tmp_path, clock)
    assert memory() == 700 * 1024
    (tmp_path / "status").write_text("VmHWM:\t  1100 kB\n")
    (tmp_path / "smaps_rollup").write_text("Rss:  800 kB\nPss:  800 kB\n")
    assert memory() == 800 * 1024
    clock.now += 60.0
    assert memory() == 1100 * 1024


def test_memory_is_known_for_this_process_and_where_the_kernel_hides_its_files(tmp_path: Path) -> None:
    for proc in (Path("/proc/self"), tmp_path / "missing"):
        assert PeakMemory(torch.device("cpu"), proc)() > 2**20
