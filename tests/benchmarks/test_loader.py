"""The loader's benchmark measures both sides and says what it saw."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from paceline.errors import ConfigError
from tests.benchmarks import script

bench = script("loader")


@pytest.mark.slow
def test_both_sides_are_measured_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "BATCHES", dict.fromkeys(bench.BATCHES, 3))
    monkeypatch.setattr(bench, "STEPS", 3)
    monkeypatch.setattr(bench, "COMPUTE_AND_LOAD_MS", ((1, 2),))
    told: list[str] = []
    result = bench.measure_loader(2, [0], told.append)
    assert [row["dataset"] for row in result["throughput"]] == ["simple", "decoding", "augmenting"]
    for row in [*result["throughput"], *result["steps"]]:
        assert row["ratio"]["median"] > 0
        assert len(row["rounds"]) == 2
    (tmp_path / "loader.json").write_text(json.dumps(result))
    out = io.StringIO()
    bench.show_loader(result, Console(file=out, width=120))
    assert "step / longer" in out.getvalue()
    assert "Target: a step of at most 1.05 times the longer of compute and load" in out.getvalue()
    assert "of 8 rounds disturbed" in out.getvalue()
    assert len(told) == 4


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds 0: at least one round is measured"):
        bench.measure_loader(0, [0], print)


def test_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "datasets", dict)
    monkeypatch.setattr(bench, "STEPS", 1)
    monkeypatch.setattr(bench, "COMPUTE_AND_LOAD_MS", ((1, 1),))
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    bench.measure_loader(1, [], lambda _: None)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_more_loader_processes_than_the_host_carries_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--loader-processes", "100000"])
    assert "--loader-processes 100000: this host has" in capsys.readouterr().err
