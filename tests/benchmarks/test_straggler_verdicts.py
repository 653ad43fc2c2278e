"""Each cause that is put into one of four workers on shaped hosts is named, and none where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks import FOLDER, script


@pytest.mark.job
@pytest.mark.slow
def test_each_cause_is_named_on_real_hosts() -> None:
    if why := script("shaped_links").why_not():
        pytest.skip(why)
    command = [sys.executable, str(FOLDER / "straggler_verdicts.py"), "--rounds", "1", "--causes", "nothing,link,rare"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("1 of 1 right") == 3
