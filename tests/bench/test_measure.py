"""A whole race, small, in this process: a world of one."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from paceline.bench.measure import deterministic, measure
from paceline.bench.race import PEERS, Race
from paceline.cli.bench import app
from paceline.errors import ConfigError
from paceline.world.world import World


def test_a_small_race_measures_everyone_and_leaves_the_process_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    race = Race("convnet", 1, ours=("paceline-exact", "paceline-fast"), against=PEERS, rounds=2, steps_per_round=1)
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    result = json.loads(json.dumps(measure(race, World())))
    assert set(result["contestants"]) == set(race.contestants)
    assert all(facts["throughput"]["least"] > 0 for facts in result["contestants"].values())
    assert len(result["ratios"]) == 8
    assert len(result["rounds"]) == 2
    assert result["workload"]["parameters"] == 1_129_514
    assert "round 4/4" in capsys.readouterr().out
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (threads, exact)
    assert not dist.is_initialized()


def test_a_race_for_another_number_of_workers_is_refused() -> None:
    race = Race("convnet", 2, ours=("paceline-exact",), against=("torch-ddp",))
    with pytest.raises(ConfigError, match="the race is for 2 workers, but this world has 1"):
        measure(race, World())


def test_a_contestant_runs_under_its_own_determinism() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with deterministic(False):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() is before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["step", "--workload", "resnet"], "workload 'resnet' is not known"),
        (["step", "--against", "horovod"], "contestant 'horovod' is not known"),
        (["step", "--reduction", "quick"], "--reduction 'quick' is not known; choose one of exact, fast"),
        (["step", "--workers", "0"], "--workers 0"),
        (["step", "--json", "no/such/folder/f.json"], "there is no folder no/such/folder"),
        (["overlap", "--workload", "resnet"], "workload 'resnet' is not known"),
        (["startup", "--workers", "0"], "--workers 0"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(command: list[str], words: str) -> None:
    """`paceline.cli.main` prints a ConfigError as one line and exits with 2."""
    refused = CliRunner().invoke(app, command).exception
    assert isinstance(refused, ConfigError), refused
    assert words in str(refused)
