"""Several updates in a step, over a stream of which each worker knows only its own place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.jobs import Job, run_job

pytestmark = [pytest.mark.job, pytest.mark.beside]

SCRIPT = Path(__file__).with_name("gan_script.py")


def result(job: Job) -> str:
    assert job.code == 0, job.text
    found = re.search(r"weights sha256:\w+ after 6 steps", job.out)
    assert found, job.text
    return found[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_dying_between_two_updates_or_after_the_last_repeats_none_of_them(strategy: str, tmp_path: Path) -> None:
    plain = run_job(tmp_path / "plain", f"--workers 1 --strategy {strategy}", script=SCRIPT)
    dies = {"DIES": "1:2:2,2:4:1"}
    flags = f"--workers 3 --elastic --strategy {strategy}"
    hurt = run_job(tmp_path / "hurt", flags, script=SCRIPT, environment=dies)
    assert result(hurt) == result(plain), hurt.text
    assert hurt.err.count("was killed by SIGKILL") == 2, hurt.text
    assert hurt.left == []
