"""The harness itself: a whole job in a second, its result, and what it would have left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import processes_in, run_job

pytestmark = pytest.mark.job


def test_a_whole_job_runs_and_leaves_nothing(tmp_path: Path) -> None:
    alone = run_job(tmp_path / "alone", "--workers 1")
    three = run_job(tmp_path / "three", "--workers 3")
    assert (alone.code, three.code) == (0, 0), alone.text + three.text
    assert set(three.hashes) == {0, 1, 2}
    assert {*three.hashes.values()} == {*alone.hashes.values()}
    assert three.samples.clean, three.samples
    assert (alone.left, three.left) == ([], [])


def test_what_a_job_leaves_is_found_by_the_folder_that_it_runs_in(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path)
    try:
        assert [process.pid for process in processes_in(tmp_path)] == [sleeper.pid]
    finally:
        sleeper.kill()
        sleeper.wait(10)
    assert processes_in(tmp_path) == []
