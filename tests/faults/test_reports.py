"""The worker dies that shows progress and writes the reports: another goes on, and every line is there once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from paceline.tracking.json_lines import rows
from tests.faults.jobs import run_job
from tests.faults.trainer_script import EVALUATED, STEPS

pytestmark = pytest.mark.job

SCRIPT = Path(__file__).with_name("trainer_script.py")


@pytest.mark.parametrize("arguments", ["", "--resume"])
def test_progress_and_reports_outlive_the_worker_that_makes_them_twice(arguments: str, tmp_path: Path) -> None:
    """The second time the one that goes on is a replacement."""
    order = "kill:rank=0,step=3,phase=after_commit,incarnation=0"
    job = run_job(tmp_path, "--workers 2 --elastic", arguments, faults=order, script=SCRIPT)
    assert job.code == 0, job.text
    logged = rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in logged if "loss" in row] == list(range(1, STEPS + 1)), job.text
    assert [row["step"] for row in logged if "eval_loss" in row] == list(range(EVALUATED, STEPS + 1, EVALUATED))
    assert [row["step"] for row in logged if "train_runtime" in row] == [STEPS]
    assert job.text.count("paceline: this worker takes over the reports: json lines, tensorboard") == 2, job.text
    assert f"paceline: step {STEPS}/{STEPS}" in job.text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert Counter(event.step for event in events.Scalars("train/loss")) == dict.fromkeys(range(1, STEPS + 1), 1)
    assert job.left == []
