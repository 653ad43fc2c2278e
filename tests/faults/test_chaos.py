"""`paceline chaos`: random faults change nothing; and where something differs, it says what."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import chaos
from paceline.cli.main import app
from paceline.errors import ConfigError
from tests.faults.jobs import SCRIPT, BorrowedPopen


@dataclass(frozen=True)
class Said:
    code: int
    text: str
    error: BaseException | None


@pytest.fixture
def storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Said]:
    """Run `paceline chaos OPTIONS -- run JOB` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos, "start", BorrowedPopen)

    def run(options: str, job: str) -> Said:
        result = CliRunner().invoke(app, ["chaos", *options.split(), "--", *job.split()])
        return Said(result.exit_code, result.output, result.exception)

    return run


JOB = f"run --workers 4 --lanes 8 --heartbeat-timeout-s 1 {SCRIPT} --run-dir {{folder}}/run --step-s 0.03"


@pytest.mark.job
@pytest.mark.timeout(600)
def test_a_storm_of_faults_changes_nothing(storm: Callable[[str, str], Said], full_product: bool) -> None:
    faults, epochs, minutes = (100, 600, 2.0) if full_product else (6, 30, 0.1)
    said = storm(f"--faults {faults} --minutes {minutes} --seed 3", f"{JOB} --epochs {epochs}")
    assert said.code == 0, said.text
    assert f"{faults} of {faults}" in said.text
    assert re.search(r"weights +sha256:\w+, as undisturbed", said.text), said.text
    assert f"ledger   {4 * epochs:,} steps, each committed once" in said.text, said.text
    assert "samples  0 lost, 0 repeated" in said.text, said.text
    assert "left     no process, no port, nothing in /dev/shm" in said.text, said.text


@pytest.mark.job
@pytest.mark.parametrize(
    ("job", "line"),
    [
        ("walk away", "paceline chaos runs a job, not 'walk away'"),
        ("run", "paceline chaos runs a job, not 'run'"),
        ("run --workers 2 nothing.py", "the job fails undisturbed, with code 2; the end of its log:\n"),
    ],
)
def test_what_can_not_be_compared_is_refused(storm: Callable[[str, str], Said], job: str, line: str) -> None:
    said = storm("", job)
    assert isinstance(said.error, ConfigError), said
    assert line in str(said.error)


def test_a_folder_of_an_earlier_storm_is_refused(storm: Callable[[str, str], Said]) -> None:
    Path("runs/chaos").mkdir(parents=True)
    assert "--folder runs/chaos exists" in str(storm("", JOB).error)


def test_a_difference_in_anything_is_named(tmp_path: Path) -> None:
    plain, hurt = (chaos.Run(tmp_path / name, 0, 1.0) for name in ("plain", "hurt"))
    for run, digest, steps in ((plain, "sha256:a", (1, 2)), (hurt, "sha256:b", (1,))):
        run.folder.mkdir()
        (run.folder / "hashes").write_text(f"0 {digest}\n")
        rows = [f'{{"step": {step}, "update": 0, "generation": 1, "members": [0]}}\n' for step in steps]
        (run.folder / "ledger.jsonl").write_text("".join(rows))
    hurt.left = ["process 7"]
    wrong = {found.about: found.text for found in chaos._compared(plain, hurt, asked=5) if not found.fine}
    assert wrong == {
        "faults": "0 of 5; the job or the minutes ended first: give it more of them",
        "weights": "sha256:b, but undisturbed sha256:a",
        "ledger": "1 steps committed, but 2 undisturbed",
        "left": "process 7",
    }
