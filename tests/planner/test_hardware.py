"""Hardware by name, by file, and what is said where neither is any good."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench.hardware import merged
from paceline.bench.hardware_measure import SHAPES, fitted
from paceline.errors import ConfigError
from paceline.planner import hardware_here
from paceline.planner.hardware import Exchange, Hardware, Link, Rates, hardware_named, link_named, read_hardware

ROOT = Path(__file__).parents[2]


def machine(**changed: Any) -> Hardware:
    rates = {1: Rates({"float32": 100e9}, 10e9, 1e-6, 8e9), 4: Rates({"float32": 50e9}, 4e9, 2e-6, 4e9)}
    exchanges = {"paceline": {2: {"ddp": Exchange(1e-3, 1e-9, 1e-5)}}}
    given = {"name": "box", "device": "cpu", "memory_bytes": 8 * 2**30, "rates": rates}
    return Hardware(**given | {"inside": Link("memory", 3e9, 5e-5), "exchanges": exchanges} | changed)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(machine().to_json())
    assert read_hardware(file) == machine()
    assert hardware_named(str(file)).is_measured


def test_names_are_found_however_they_are_written() -> None:
    assert hardware_named("h100").name == hardware_named("NVIDIA H100").name
    assert hardware_named("rtx-4090").name == "NVIDIA GeForce RTX 4090 24 GB"
    assert link_named("infiniband 400").name == "InfiniBand 400"


def test_between_two_measured_numbers_of_workers_seconds_are_interpolated_and_beyond_they_take_turns() -> None:
    found = machine()
    assert found.rates_for(1).flops["float32"] == 100e9
    assert 50e9 < found.rates_for(2).flops["float32"] < 100e9
    assert found.rates_for(8).flops["float32"] == pytest.approx(25e9)
    assert found.rates_for(8).memory_bandwidth == pytest.approx(2e9)


def test_a_gpu_is_its_worker_s_alone() -> None:
    device = hardware_named("A100")
    assert device.rates_for(8) == device.rates_for(1)


def test_attention_has_a_rate_of_its_own_where_one_is_known() -> None:
    assert Rates({"float32": 1e9}, 1e8).seconds(1000, 1, "float32 attention") == 1e-6
    assert Rates({"float32": 1e9, "float32 attention": 1e8}, 1e8).seconds(1000, 1, "float32 attention") == 1e-5
    rates = {name: hardware_named(name).rates_for(1).flops for name in ("H200", "A100")}
    parts = {name: found["bfloat16 attention"] / found["bfloat16"] for name, found in rates.items()}
    assert parts["H200"] < parts["A100"] == pytest.approx(0.5)


def test_an_operator_takes_as_long_as_what_is_slower() -> None:
    rates = Rates({"float32": 1e9, "bfloat16": 2e9}, 1e8)
    assert rates.seconds(1000, 1, "float32") == 1e-6
    assert rates.seconds(1000, 1000, "float32") == 1e-5
    assert rates.seconds(1000, 1, "float16") == 1e-6  # of which nothing is known: as fp32


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "H9000",
            r"hardware 'H9000' is not known; choose one of H100, .*, or give --hardware FILE: for CPUs what paceline "
            r"bench hardware --json FILE measures on that machine, for another GPU .*docs/concepts/plan\.md#hardware",
        ),
        ("no.json", r"hardware profile no\.json: "),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hardware_named(name)
    with pytest.raises(ConfigError, match=r"network 'string' is not known; choose one of NVLink 4"):
        hardware_named("H100", "string")


def test_hosts_without_a_network_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"16 workers, 8 on each host: nothing says how hosts are connected"):
        hardware_named("H100").link_of(16, 8)
    assert hardware_named("H100", "InfiniBand 200").link_of(16, 8).bandwidth == pytest.approx(0.8 * 25e9)


def test_files_that_are_no_profiles_are_refused(tmp_path: Path) -> None:
    told = json.loads(machine().to_json())
    for name, change, said in (
        ("other", {"kind": "something"}, "is no hardware profile of this version"),
        ("cut", {"rates": None}, "is damaged"),
        ("zero", {"memory_bytes": 0}, "not positive"),
        ("text", {"memory_bytes": "80 GB"}, "is damaged"),
        ("endless", {"inside": {"name": "memory", "bandwidth": 1e9, "latency_s": "short"}}, "is damaged"),
        ("gpu", {"device": "gpu"}, "device 'gpu', which is neither cpu nor cuda"),
        ("half", {"rates": {"1": {"flops": {"bfloat16": 1e12}, "memory_bandwidth": 1e9}}}, "no rate of float32"),
    ):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(told | change))
        with pytest.raises(ConfigError, match=said):
            read_hardware(file)


def test_costs_of_three_models_give_their_coefficients_back() -> None:
    wanted = Exchange(2e-3, 3e-10, 4e-6)
    costs = [wanted.seconds(4 * layers * elements, layers) for layers, elements in SHAPES]
    assert fitted(costs) == pytest.approx(
        {"fixed_s": wanted.fixed_s, "per_byte_s": wanted.per_byte_s, "per_tensor_s": wanted.per_tensor_s}
    )
    assert min(fitted([3e-3, 1e-3, 2e-3]).values()) >= 0  # noise gives no negative cost


def test_an_exchange_of_next_to_nothing_takes_what_was_measured() -> None:
    cost = Exchange(1e-4, 1e-9, 0.0, least_s=1e-3)
    assert cost.seconds(100, 8) == 1e-3
    assert cost.seconds(10**7, 8) == pytest.approx(1.01e-2)


def test_what_workers_measured_becomes_a_profile_that_can_be_read(tmp_path: Path) -> None:
    rates = {"flops": {"float32": 1e9}, "memory_bandwidth": 1e9, "operator_s": 1e-6, "update_bandwidth": 1e9}
    cost = {"fixed_s": 1e-3, "per_byte_s": 1e-9, "per_tensor_s": 1e-6}
    alone = {"name": "cpu", "memory_bytes": 2**30, "cores": 2, "threads": 1, "torch": "2", "rates": rates}
    profile = merged({}, alone | {"exchanges": {}, "collectives": {}, "link": None}, 1)
    link = {"name": "paceline", "bandwidth": 1e9, "latency_s": 1e-4}
    two = {"exchanges": {"paceline": {"ddp": cost}}, "collectives": {"paceline": []}, "link": link}
    profile = merged(profile, alone | two, 2)
    file = tmp_path / "here.json"
    file.write_text(json.dumps(profile))
    found = read_hardware(file)
    assert found.exchange("ddp", "paceline", 2) == Exchange(**cost)
    assert found.exchange("ddp", "gloo", 2) is None
    assert sorted(found.rates) == [1, 2]


@pytest.mark.parametrize(("crowded", "rate"), [(False, 1.0), (True, 0.5)])
def test_workers_that_take_turns_are_charged_for_their_waiting(
    crowded: bool, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run in two has a core to itself and takes 1 s, the other waits and takes 3."""
    now, runs = [0.0], itertools.cycle((1.0, 3.0))

    def run() -> None:
        now[0] += next(runs)

    monkeypatch.setattr(hardware_here.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(hardware_here, "ENOUGH_S", 80.0)
    monkeypatch.setattr(hardware_here, "CROWDED_S", 80.0)
    assert hardware_here.rate_of(run, 1.0, crowded) == pytest.approx(rate)


# -- the GPU of this machine -------------------------------------------------------------------------------------------


def give_gpu(monkeypatch: pytest.MonkeyPatch, name: str, memory_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = SimpleNamespace(total_memory=memory_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: device)


@pytest.mark.parametrize(
    ("reported", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_gpu_has_the_rates_of_its_data_sheet_and_the_memory_that_it_reports(
    reported: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch, reported, 23 * 2**30 + 1)
    assert hardware_here.quick_hardware() == replace(hardware_named(model), memory_bytes=23 * 2**30 + 1)


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA L40S",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_a_gpu_whose_data_sheet_is_not_here_is_told_so_and_never_taken_for_another(
    reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch, reported, 40 * 2**30)
    with pytest.raises(ConfigError) as refused:
        hardware_here.quick_hardware()
    said = str(refused.value)
    assert f"no data sheet of this GPU ({reported}, 40.0 GiB) is known, only of NVIDIA H100 SXM5 80 GB" in said
    assert "--hardware FILE" in said
    assert "docs/concepts/plan.md#hardware" in said
    assert "bench hardware" not in said  # it measures CPUs
    assert "\n" not in said


def test_the_profile_of_a_gpu_that_the_docs_show_can_be_read_and_planned_with(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/concepts/plan.md").read_text(), re.DOTALL)
    file = tmp_path / "l40s.json"
    file.write_text(shown)
    found = read_hardware(file)
    assert (found.name, found.device, found.is_measured) == ("NVIDIA L40S", "cuda", False)
    assert found.rates_for(4).seconds(10**12, 0, "bfloat16") == pytest.approx(1 / 0.62 / 362.05, rel=0.01)
    assert read_hardware(file, "25 GbE").link_of(16, 8).name == "25 GbE"
