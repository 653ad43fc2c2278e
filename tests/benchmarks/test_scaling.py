"""Weak scaling: what is asked of `paceline bench`, and tables and a plot from what it wrote."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench.statistics import Spread
from paceline.cli import bench
from tests.benchmarks import script

scaling = script("scaling")


def spread(*values: float) -> dict[str, float]:
    return asdict(Spread.of(values))


def write(folder: Path, workers: int) -> None:
    """What the three parts would have written."""
    for name in scaling.WORKLOADS:
        names = (scaling.OURS, *scaling.PEERS)
        steps = {
            "race": {"workers": workers},
            "workload": {"name": name, "unit": "samples/s"},
            "contestants": {each: {"throughput": spread(990.0, 1000.0, 1010.0)} for each in names},
            "ratios": [{"peer": peer, "throughput": spread(0.8, 0.9, 1.2)} for peer in scaling.PEERS],
            "rounds": [{}] * 3,
            "disturbed_rounds": 1,
        }
        scaling.Part(name, workers).file(folder).write_text(json.dumps(steps))
    calls = {name: {"time_s": spread(0.002), "times_baseline": spread(4.0, 5.0, 6.0)} for name in scaling.BACKENDS}
    calls["gloo"] = {"time_s": spread(0.01), "times_baseline": None}
    case = {"size": "25 MiB", "workers": workers, "contestants": calls, "rounds": [{}] * 3, "disturbed_rounds": 0}
    scaling.Part(scaling.ALL_REDUCE, workers).file(folder).write_text(json.dumps({"cases": [case]}))


def test_tables_and_plot_hold_medians_quartiles_and_disturbed_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for workers in (2, 16):
        write(tmp_path, workers)
    scaling.main(
        ["show", str(tmp_path), "--png", str(tmp_path / "scaling.png"), "--json", str(tmp_path / "drawn.json")]
    )
    said = capsys.readouterr().out
    assert "| 16 | 0.90 (0.85 – 1.05) | 0.90 (0.85 – 1.05) | 0.90 (0.85 – 1.05) | 1 of 3 |" in said
    assert "| 2 | 1,000 (995 – 1,005) |" in said
    ours = "2,000 · 5.0 (4.5 – 5.5) ×"
    assert f"| 25 MiB | 16 | {ours} | {ours} | 10,000 | {ours} | 0 of 3 |" in said
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    drawn = json.loads((tmp_path / "drawn.json").read_text())
    assert [row["workers"] for row in drawn["gpt10m"]] == [2, 16]
    assert drawn["all_reduce"][0]["times_gloo"]["bound"]["median"] == 5.0


@pytest.mark.parametrize("name", scaling.PARTS)
def test_what_is_asked_for_is_a_race_or_a_comparison(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(plan: Any) -> int:
        asked.append(plan)
        return 7

    monkeypatch.setattr(bench, "run_in_workers", refuse)
    monkeypatch.setattr(bench.comparing, "run_in_workers", refuse)
    _, *words = scaling.Part(name, 4).words(rounds=20)
    assert CliRunner().invoke(bench.app, words).exit_code == 7
    assert (asked[0].workers, asked[0].rounds) == (4, 20)


def test_a_part_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(part: Any, folder: Path, rounds: int) -> int:
        write(folder, part.workers)
        return 3 if part.name == "mlp25m" else 0

    monkeypatch.setattr(scaling, "run", run)
    with pytest.raises(SystemExit) as ended:
        scaling.main(["measure", str(tmp_path), "--workers", "2"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "mlp25m-2: failed with 3 after 0 s, see" in said
    assert "gpt10m-2, 0 s: / torch-ddp 0.90 (0.85 – 1.05)" in said


def test_a_plot_of_nothing_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"scaling: no mlp25m-N\.json in .*; measure it first"):
        scaling.points(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parts", "gpt11m"], "--parts gpt11m: choose of all_reduce, mlp25m, gpt10m"),
        (["--workers", "2,one"], "--workers 2,one: a list of numbers from 2, such as 2,4,8,16"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_line(tmp_path: Path, options: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        scaling.main(["measure", str(tmp_path), *options])
