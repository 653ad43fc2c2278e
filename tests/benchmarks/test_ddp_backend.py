"""torch's DDP beside itself on our backend: jobs that wait for their turns, and a job that ends says what it said."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.report import console
from paceline.errors import LaunchError
from tests.benchmarks import script

bench = script("ddp_backend")


@pytest.mark.job
def test_jobs_take_turns_and_one_that_ends_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CONTESTANTS", bench.CONTESTANTS[:1])
    result = bench.measure("convnet", workers=1, rounds=2, steps=1)
    bench.show(result, console())
    assert result["to gloo"]["gloo"]["median"] == 1
    assert result["per second"]["gloo"]["least"] > 0
    assert "gloo" in capsys.readouterr().out

    job = bench.Job(bench.Contestant("nowhere", "no-such-backend", {}), "convnet", 1, 1, tmp_path)
    with pytest.raises(LaunchError, match=r"(?s)nowhere ended or was silent.*[Nn]o-such-backend"):
        job.turn()
    job.close()
