"""train_gpt in an elastic job that loses the worker which writes metrics.jsonl: every line is there, and once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.jobs import run_job

pytestmark = pytest.mark.job

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS = 10


@pytest.mark.parametrize(
    "orders",
    [
        ["kill:rank=0,step=3,phase=backward,incarnation=0", "kill:rank=1,step=6,phase=after_commit,incarnation=0"],
        [f"kill:rank=0,step={STEPS},phase=after_commit,incarnation=0"],
    ],
    ids=["and the next one too", "in the last step"],
)
def test_every_line_of_the_metrics_is_written_once(tmp_path: Path, orders: list[str]) -> None:
    arguments = f"--steps {STEPS} --batch-size 1 --run-dir run"
    job = run_job(tmp_path, "--workers 3 --elastic", arguments, faults=";".join(orders), script=SCRIPT)
    assert job.code == 0, job.text
    assert job.err.count("injected fault") == len(orders), job.text
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1)), job.text
    assert [row["step"] for row in rows if "held_out_bits_per_byte" in row] == [STEPS], job.text
    assert (tmp_path / "run/sample.txt").exists()
    assert "weights sha256:" in job.out
