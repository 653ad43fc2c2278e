"""The network between workers: what is asked, a small measurement between real processes, and what is estimated."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.bench.network import NetworkRun, advice, estimates
from paceline.bench.network_measure import measure
from paceline.bench.report import show_network
from paceline.cli import bench as cli
from paceline.errors import ConfigError
from paceline.world.less_traffic import WAYS, Way
from paceline.world.world import World
from tests.workers import run_workers

MACHINE = {"torch": "2.13.0", "python": "3.11", "cpu": "a cpu", "cpu_capability": "AVX2", "cores": 2}


def a_result(*, bandwidth: float, latency_s: float = 1e-4, workers: int = 4, **asked: Any) -> dict[str, Any]:
    run = json.loads(NetworkRun(workers=workers, **asked).to_json())
    pairs = [{"pair": [0, n], "latency_s": latency_s / n, "bandwidth": 2 * bandwidth} for n in range(1, workers)]
    together = {"time_s": 1.0, "bandwidth": bandwidth}
    return {"asked": run, "workers": workers, "pairs": pairs, "together": together, "machine": MACHINE}


def test_a_step_of_ddp_over_100_mbit_waits_for_its_bytes() -> None:
    """10 million parameters on 4 workers: 60 MB at 12.5 MB/s."""
    ddp, bf16, _, local, diloco, int8 = estimates(a_result(bandwidth=12.5e6, latency_s=1e-3, step_s=0.2))
    assert ddp["sent_bytes"] == 60e6
    assert ddp["waits_s"] == pytest.approx(4.802)
    assert ddp["share"] == pytest.approx(4.802 / 5.002)
    assert bf16["sent_bytes"] == 30e6
    assert local["waits_s"] == pytest.approx(4.802 / 8)
    assert diloco["waits_s"] == pytest.approx(4.802 / 50)
    assert ddp["sent_bytes"] / int8["sent_bytes"] == pytest.approx(4 * 50 / (1 + 4 / 256))


@pytest.mark.parametrize("seed", range(5))
def test_more_steps_apart_fewer_bytes_or_more_bandwidth_never_wait_longer(seed: int) -> None:
    drawn = random.Random(seed)
    job = drawn.randint(1, 10**8), drawn.randint(2, 64)
    bandwidth, latency_s = drawn.uniform(1e6, 1e9), drawn.uniform(1e-6, 1e-2)
    way = Way("one", every=drawn.randint(1, 50), element_bytes=drawn.choice([4.0, 2.0, 1.0]))
    waits = way.waits(*job, bandwidth, latency_s)
    assert Way("apart", way.every + 1, way.element_bytes).waits(*job, bandwidth, latency_s) < waits
    assert Way("smaller", way.every, way.element_bytes / 2).waits(*job, bandwidth, latency_s) < waits
    assert way.waits(*job, 2 * bandwidth, latency_s) < waits
    assert way.sent(job[0], 1) == 0


def test_the_advice_is_the_first_way_whose_wait_is_small_with_its_gain() -> None:
    told = advice(estimates(a_result(bandwidth=12.5e6, latency_s=1e-3, step_s=1.0)))
    assert told == "ddp waits for the network in 83% of a step, diloco every=50 in 9%: 5.3 times the steps per second"
    assert "at most: leave it as it is" in advice(estimates(a_result(bandwidth=5e9, step_s=1.0)))
    assert "--step-ms" in advice(estimates(a_result(bandwidth=5e9)))
    told = advice(estimates(a_result(bandwidth=1e5, step_s=0.01)))
    assert WAYS[-1].name in told, "where none is small, the one that waits least"
    assert "outer_gradients=int8, with one lane on each worker, in" in told


@pytest.mark.parametrize(("lanes", "payloads"), [(1, 1.0), (2, 1.5), (4, 2.5), (8, 4.5)])
def test_a_worker_with_more_lanes_sends_more_only_of_what_is_compressed(lanes: int, payloads: float) -> None:
    """There each lane's payload, and back the sum's."""
    for way in WAYS:
        assert way.share(lanes) == pytest.approx(way.share() * (payloads if way.is_compressed else 1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 1}, "--workers 1: a network needs at least two"),
        ({"message_bytes": 8}, "--mib: messages of 8 bytes"),
        ({"rounds": 0}, "--rounds 0: at least one"),
        ({"parameters": 0}, "--parameters 0: "),
        ({"step_s": 0.0}, "--step-ms 0: a step takes some time"),
        ({"step_s": float("nan")}, "--step-ms nan: a step takes some time"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        NetworkRun(**options)


def test_a_measurement_is_its_text_and_nothing_else_is() -> None:
    run = NetworkRun(workers=3, step_s=0.1)
    assert NetworkRun.from_json(run.to_json()) == run
    with pytest.raises(ConfigError, match="started by `paceline bench network`"):
        NetworkRun.from_json('{"workers": 2}')


def measured(world: World, *, text: str) -> dict[str, Any]:
    return measure(NetworkRun.from_json(text), world)


@pytest.mark.workers
def test_every_pair_and_all_at_once_are_measured_and_shown() -> None:
    run = NetworkRun(workers=3, message_bytes=2**16, rounds=3, step_s=0.1)
    results = run_workers(measured, 3, text=run.to_json())
    for result in results:
        assert result.error is None, result.traceback
    found = json.loads(json.dumps(results[0].value))
    assert [pair["pair"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(0 < pair["latency_s"] < 1 and pair["bandwidth"] > 2**16 for pair in found["pairs"])
    assert found["together"]["bandwidth"] == pytest.approx(4 / 3 * 2**16 / found["together"]["time_s"])
    shown = io.StringIO()
    show_network(found, Console(file=shown, width=120))
    lines = shown.getvalue().splitlines()
    assert lines[0] == "3 workers over gloo · messages of 65,536 bytes"
    assert [line.split("  ")[0] for line in lines[2:6]] == ["0 – 1", "0 – 2", "1 – 2", "all at once"]
    assert all(any(line.startswith(way.name) for line in lines) for way in WAYS)


def test_the_command_shows_and_writes_what_workers_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[NetworkRun] = []

    def run(given: NetworkRun) -> dict[str, Any]:
        asked.append(given)
        return a_result(bandwidth=12.5e6, step_s=given.step_s)

    monkeypatch.setattr(cli.network_bench, "run_in_workers", run)
    file = tmp_path / "network.json"
    words = ["network", "--workers", "4", "--mib", "0.5", "--rounds", "2", "--step-ms", "10", "--json", str(file)]
    ran = CliRunner().invoke(cli.app, words)
    assert ran.exit_code == 0, ran.output
    assert asked == [NetworkRun(workers=4, message_bytes=2**19, rounds=2, step_s=0.01)]
    assert "ddp waits for the network in" in ran.output
    assert {row["way"] for row in json.loads(file.read_text())["estimates"]} == {way.name for way in WAYS}


def test_a_failed_measurement_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.network_bench, "run_in_workers", lambda run: 3)
    assert CliRunner().invoke(cli.app, ["network"]).exit_code == 3
