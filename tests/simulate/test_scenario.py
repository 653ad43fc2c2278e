"""Scenarios from files and flags, one clear line for what can't be, and what the command prints and writes."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.simulate import report
from paceline.simulate.network import Level, Network, network_named, presets
from paceline.simulate.result import simulate
from paceline.simulate.scenario import STRATEGIES, WINDOWS, Scenario, read_scenarios
from paceline.strategies.registry import choose
from paceline.world import known_names

TOML = """
workers = 16
network = "dgx-a100"
parameters = 1e8
steps = 3

[[scenario]]
name = "elastic"
[[scenario]]
name = "restart"
recovery = "restart"
"""


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *words])


# -- what can't be -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--network", "dgx-a10"], "network='dgx-a10' is not known; did you mean 'dgx-a100'?"),
        (["--network", "tin-cans"], "network='tin-cans' is not known; there are ideal, "),
        (["--network", "dgx-a100", "--workers", "12"], "has 8 workers in each host; choose 8 or 16"),
        (["--network", "racks-100g", "--workers", "40"], "has 32 workers in each rack; choose 32 or 64"),
        (["--workers", "0"], "workers=0: it is at least 1"),
        (["--workers", "ten"], "--workers 'ten': expected a number, or several with commas"),
        (["--workers", "8,,16"], "--workers '8,,16': a word of the list is empty"),
        (["--workers", "2.5"], "--workers '2.5': expected whole numbers"),
        (["--workers", "2000000"], "workers=2000000: it is at most 1,048,576"),
        (["--compute-ms=-5"], "compute_ms=-5.0: it is a number of at least 0"),
        (["--update-ms=-5"], "--update-ms '-5.0': it must not be below 0"),
        (["--compute-ms", "nan"], "compute_ms=nan: expected a number of at least 0, and a finite one"),
        (["--mtbf-hours", "0"], "mtbf_hours=0.0: it is a number above 0"),
        (["--strategy", "zero9"], "strategy='zero9' is not known; choose ddp, "),
        (["--algorithm", "butterfly"], "algorithm='butterfly' is not known; choose one of ring, "),
        (["--algorithm", "ring", "--strategy", "zero2"], "only ddp, local_sgd and diloco have an all-reduce to choose"),
        (["--algorithm", "hierarchical", "--workers", "8", "--network", "dgx-a100"], "one host, and it needs two"),
        (["--recovery", "prayer"], "recovery='prayer' is not known; choose elastic or restart"),
        (["--servers", "2"], "servers=2 with strategy='ddp': only parameter_server has servers"),
        (["--strategy", "parameter_server", "--servers", "100", "--workers", "100000"], "at most 8,388,608 pairs are"),
        (["--every", "4"], "every=4 with strategy='ddp': only local_sgd and diloco have it"),
        (["--slow-factor", "0.5"], "a slow worker takes at least as long as the others"),
        (["--slow-workers", "9"], "slow_workers=9 of 8 workers: there are fewer"),
        (["--pause-chance", "1.5"], "pause_chance=1.5"),
        (["--bucket-mb", "0"], "bucket_mb=0.0: it is a number above 0"),
        (["--workers", "1,2,3,4,5,6,7,8,9", "--bucket-mb", "1,2,3,4,5,6,7,8"], "72 scenarios: at most 64 are compared"),
        (["no-such.toml"], "no-such.toml: No such file or directory"),
    ],
)  # fmt: skip
def test_what_cant_be_is_said_in_one_line(words: list[str], said: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, ConfigError), result.output
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "workers = ", "a.toml: Invalid value"),
        ("a.toml", "wokers = 4", "'wokers' is not known; did you mean 'workers'?"),
        ("a.toml", 'workers = "many"', "workers='many': expected a whole number"),
        ("a.toml", "scenario = 3", "scenario is a list of tables"),
        ("a.toml", 'network = {name = "own"}', "network 'own': expected a table with levels"),
        ("a.toml", 'network = {levels = [{name = "n"}]}', "a level has a name, gbit_s and latency_us"),
        ("a.toml", 'network = {levels = [{name = "n", gbit_s = 0, latency_us = 1}]}', "gbit_s=0.0: it is a number"),
        ("a.json", "[1, 2]", "it holds a list and not a table of settings"),
        ("a.json", "{", "a.json: Expecting"),
        ("a.yaml", "workers: [", "a.yaml: while parsing"),
        ("a.ini", "workers=3", "a scenario is a file that ends with .toml, .yaml or .json"),
    ],
)  # fmt: skip
def test_a_bad_file_is_said_in_one_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_scenarios(tmp_path / name, {})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_names_and_defaults_are_the_engines() -> None:
    assert set(STRATEGIES) == set(known_names.STRATEGIES)
    assert inspect.signature(Engine).parameters["bucket_mib"].default == Scenario.bucket_mb
    assert {name: choose(name).config.every for name in WINDOWS} == WINDOWS


# -- what can ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["toml", "json", "yaml"])
def test_a_scenario_is_the_same_in_every_format(kind: str, tmp_path: Path) -> None:
    told = {"workers": 24, "network": "dgx-a100", "parameters": 1000000, "jitter": 0.1}
    texts = {
        "toml": 'workers = 24\nnetwork = "dgx-a100"\nparameters = 1e6\njitter = 0.1\n',
        "json": json.dumps(told),
        "yaml": "\n".join(f"{key}: {value}" for key, value in told.items()),
    }
    (tmp_path / f"it.{kind}").write_text(texts[kind])
    (found,) = read_scenarios(tmp_path / f"it.{kind}", {"jitter": 0.2})
    assert found == Scenario(name="it", workers=24, network="dgx-a100", parameters=10**6, jitter=0.2)


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'workers = 8\n[network]\nname = "mine"\npayload = 0.9\n'
        'levels = [{name = "host", units = 4, gbit_s = 80, latency_us = 2}, '
        '{name = "net", gbit_s = 8, latency_us = 9}]\n'
    )
    (found,) = read_scenarios(tmp_path / "a.toml", {})
    assert found.net == Network("mine", (Level("host", 4, 1e10, 2e-6), Level("net", None, 1e9, 9e-6)), payload=0.9)
    assert simulate(found).exposed_s > 0


def test_every_preset_has_a_source_and_carries_a_step() -> None:
    for name, network in presets().items():
        assert network.source, name
        assert network.about, name
        assert simulate(Scenario(workers=32, network=name, parameters=10**6, steps=2)).step_s > 0
    assert network_named("racks-100g").for_workers(4096).below == (1, 8, 32)


def test_the_command_compares_files_and_writes_a_timeline_that_perfetto_reads(tmp_path: Path) -> None:
    scenario, trace, numbers = tmp_path / "what-if.toml", tmp_path / "trace.json", tmp_path / "all.json"
    scenario.write_text(TOML)
    result = run(str(scenario), "--mtbf-hours", "100", "--trace", str(trace), "--json", str(numbers), "--steps", "4")
    assert result.exit_code == 0, result.exception
    assert "elastic" in result.output
    assert "does most" in result.output
    found = json.loads(numbers.read_text())
    assert [each["scenario"]["recovery"] for each in found] == ["elastic", "restart"]
    assert found[0]["goodput"] > found[1]["goodput"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    assert {"forward", "backward", "bucket 0", "vote", "recovery", "restart"} <= {event["name"] for event in spans}
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for track in by_track.values():
        track.sort()
        assert all(later[0] >= first[1] - 0.01 for first, later in itertools.pairwise(track))


def test_the_example_says_what_the_docs_say() -> None:
    made = read_scenarios(Path(__file__).parents[2] / "examples" / "simulate_recovery.toml", {"steps": 5})
    goodput = {scenario.name: simulate(scenario).job.goodput for scenario in made}
    assert list(goodput) == ["restart", "restart, 4 × the checkpoints", "elastic", "elastic, 8 spares"]
    assert (
        goodput["elastic, 8 spares"] > goodput["elastic"] > goodput["restart"] > goodput["restart, 4 × the checkpoints"]
    )


def test_lists_with_commas_are_a_product() -> None:
    result = run("--workers", "8,16", "--strategy", "ddp,zero2", "--network", "dgx-a100", "--steps", "2")
    assert result.exit_code == 0, result.exception
    for row in ("8 workers · ddp", "8 workers · zero2", "16 workers · ddp", "16 workers · zero2"):
        assert row in result.output


def test_the_networks_are_listed_with_their_sources() -> None:
    result = run("--list-networks")
    assert result.exit_code == 0
    assert all(name in result.output for name in presets())
    assert result.output.count("from: ") == len(presets())


def test_one_scenario_is_told_in_a_few_lines() -> None:
    out = Console(width=100, record=True, file=io.StringIO())
    scenario = Scenario(workers=64, network="dgx-a100", mtbf_hours=1000, recovery="restart", checkpoint_every=100,
                        checkpoint_s=3, jitter=0.1, steps=5)  # fmt: skip
    report.show([simulate(scenario)], out)
    text = out.export_text()
    assert len(text.splitlines()) < 16
    for word in ("a step", "waiting for the slowest worker", "waiting for the network", "scaling", "goodput", "Young"):
        assert word in text


@pytest.mark.job
def test_the_package_stays_light_and_the_verb_imports_its_own_needs() -> None:
    code = (
        "import sys, paceline; from paceline.cli import simulate; "
        "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "[]"
