"""Start-up: the stamps of all workers count, and launchers are compared in pairs."""

from __future__ import annotations

import pytest

from paceline.bench.report import console
from tests.benchmarks import script

bench = script("startup")
MACHINE = {"torch": "2.13.0", "python": "3.11", "cpu": "a cpu", "cpu_capability": "AVX2", "cores": 2}


def test_start_up_takes_the_stamps_of_all_workers_and_compares_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.finished_at("[0] first step finished at 12.5\n[1] first step finished at 13.25\n") == [12.5, 13.25]
    starts = {
        "paceline run": [bench.Start(2.0, 3.0, 0.0, 0.0), bench.Start(3.0, 4.0, 0.2, 0.0)],
        "torchrun": [bench.Start(4.0, 5.0, 0.0, 0.0), bench.Start(4.0, 5.0, 0.0, 0.0)],
    }
    summary = bench.summarise_starts(2, starts, MACHINE)
    assert summary["ratio"]["median"] == pytest.approx(0.625)
    assert summary["disturbed_starts"] == 1
    bench.show_startup(summary, console())
    assert "paceline run / torchrun: 0.625" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workers", "text"),
    [("0", "--workers 0: a start needs at least one worker"), ("100000", "--workers 100000: this host has")],
)
def test_bad_input_is_refused_before_anything_starts(
    workers: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--workers", workers])
    assert text in capsys.readouterr().err


@pytest.mark.job
def test_both_launchers_are_started(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_TURNS", 0)
    bench.main(["--workers", "1", "--rounds", "1"])
    shown = capsys.readouterr().out
    assert "From the command to the first finished step, 1 workers" in shown
    assert "paceline run / torchrun: " in shown
