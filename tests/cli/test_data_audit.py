"""`paceline data audit`: the last line is the answer, the exit code agrees, and what is wrong is in between."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.data import app
from paceline.data.sample_log import file_name
from paceline.errors import ConfigError
from tests.data.logged_runs import RecordedRun, lines_of, write_lines


def asked(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def lines_printed(result: Result) -> list[str]:
    return [line.rstrip() for line in result.stdout.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path, samples=1000, batch_size=8, lanes=4)
    run.attempt(workers=4, steps=12)
    run.attempt(workers=2, steps=30, back=2)
    return run


def test_a_clean_run_looks_like_the_drawing_and_exits_with_0(run: RecordedRun) -> None:
    result = asked(run.folder)
    assert result.exit_code == 0
    assert lines_printed(result) == [
        f"{run.folder}: 2 attempts, 4 lanes",
        "",
        "attempt  workers  from                   steps  samples          rolled back",
        "1              4  epoch 0, position 0       12      384  2 steps, 64 samples",
        "2              2  epoch 0, position 320     30      936",
        "",
        "epoch  steps    samples used  lost  repeated  dropped  left out",
        "0         32  1,000 of 1,000     0         0        0         0",
        "1          8    256 of 1,000     0         0        0         0",
        "",
        "0 lost, 0 repeated",
    ]


def test_lost_and_repeated_samples_are_listed_with_their_places_and_the_exit_code_is_1(run: RecordedRun) -> None:
    path = run.folder / "samples" / file_name(2, 1)
    lines = lines_of(path)
    del lines[4]
    write_lines(path, [*lines[:10], lines[9], *lines[10:]])
    result = asked(run.folder, "--list", "1")
    printed = lines_printed(result)
    assert result.exit_code == 1
    assert printed[-1] == "8 lost, 8 repeated"
    lost, never, repeated = (line for line in printed if line.startswith(("lost ", "repeated ")))
    assert lost.startswith("lost     epoch 0, position 376 (id ")
    assert lost.endswith("): belongs in step 12, lane 3, attempt 2, worker 1")
    assert never.startswith("lost     epoch 0 never used id ")
    assert never.endswith(" …")
    assert repeated.startswith("repeated epoch 0, position 472 (id ")
    assert repeated.endswith("in step 15, lane 3, attempt 2, worker 1; and in step 15, lane 3, attempt 2, worker 1")


def test_what_can_not_be_proved_exits_with_1_and_says_why_before_the_last_line(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=1000, batch_size=8, lanes=4)
    run.attempt(workers=4, steps=12, skip=1)
    result = asked(tmp_path)
    assert result.exit_code == 1
    *_, problem, why, last = lines_printed(result)
    assert problem == "problem  attempt 1 begins at epoch 0, position 32, but what was used before it was not recorded"
    assert why == "not proved: 1 problem"
    assert last == "0 lost, 0 repeated"


def test_samples_left_out_by_the_loop_are_in_the_last_line(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=1000, batch_size=8, lanes=4)
    run.attempt(workers=4, steps=12, used=lambda entry: entry.step != 3)
    result = asked(tmp_path)
    assert result.exit_code == 0
    assert result.stdout.endswith("0 lost, 0 repeated, 32 left out by the loop\n")


def test_thousands_are_separated_in_the_last_line(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=3000, batch_size=50, lanes=1)
    run.attempt(workers=1, steps=1)
    run.attempt(workers=1, steps=1, skip=30)
    assert lines_printed(asked(tmp_path))[-1] == "1,500 lost, 0 repeated"


def test_many_alike_epochs_and_many_attempts_take_few_lines(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, samples=8, batch_size=2, lanes=2)
    for _ in range(30):
        run.attempt(workers=2, steps=3)
    printed = lines_printed(asked(tmp_path))
    assert len(printed) < 35
    assert "and 10 more" in printed
    assert any(line.startswith("0 – 44") for line in printed)


def test_long_paths_and_lines_are_not_broken(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("[bold]" * 10)
    run = RecordedRun(folder, samples=1000, batch_size=8, lanes=4)
    run.attempt(workers=4, steps=12, behind=(1,))
    printed = lines_printed(asked(folder))
    assert printed[0] == f"{folder}: 1 attempt, 4 lanes"
    assert sum(line.startswith("note ") for line in printed) == 1


def test_the_json_has_every_number(run: RecordedRun, tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    assert asked(run.folder / "samples", "--json", file).exit_code == 0
    written = json.loads(file.read_text())
    assert (written["lost"], written["repeated"], written["clean"]) == (0, 0, True)
    assert written["verdict"] == "0 lost, 0 repeated"
    assert [attempt["rolled_back_samples"] for attempt in written["attempts"]] == [64, 0]
    assert [epoch["samples"] for epoch in written["epochs"]] == [1000, 256]


def test_a_json_file_that_can_not_be_written_is_wrong_usage(run: RecordedRun) -> None:
    result = asked(run.folder, "--json", run.folder)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"--json {run.folder} can't be written: Is a directory"


@pytest.mark.job
def test_wrong_usage_exits_with_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.cli.main", "data", "audit", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"paceline: there is no sample log in {tmp_path / 'nowhere'}: ")
    assert len(done.stderr.splitlines()) == 1
    assert asked().exit_code == 2
    assert asked(tmp_path, "--list", "-1").exit_code == 2
