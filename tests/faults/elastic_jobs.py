"""Elastic jobs of the tests' script, and all that must hold when one has ended."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.jobs import LEDGER, Job, run_job

WORKERS = 4
STEPS = [1, 2, 3, 4, 5, 6, 7, 8]
ELASTIC = f"--workers {WORKERS} --elastic --heartbeat-timeout-s 1 --ledger {LEDGER}"


@cache
def hash_undisturbed(arguments: str = "") -> str:
    """Of a plain run on one worker, which knows nothing of elasticity."""
    with TemporaryDirectory() as folder:
        job = run_job(Path(folder).resolve() / "plain", "--workers 1", arguments)
        assert job.code == 0, job.text
        return job.hashes[0]


def run_elastic(folder: Path, flags: str = "", arguments: str = "", *, orders: list[str], **options: Any) -> Job:
    return run_job(folder, f"{ELASTIC} {flags}", arguments, faults=";".join(orders), **options)


def check_unharmed(job: Job, orders: list[str] | None = None, trained: str = "") -> None:
    """Its weights, its ledger, its samples, and that everything ordered did happen and nothing is left."""
    assert job.code == 0, job.text
    for order in orders or []:
        assert f"injected fault {order} in phase" in job.err, f"{order} never happened:\n{job.text}"
    assert set(job.hashes.values()) == {hash_undisturbed(trained)}, f"{job.hashes}\n{job.ledger}\n{job.text}"
    assert job.steps == STEPS, f"committed {job.ledger}\n{job.text}"
    assert job.samples.clean, f"{job.samples}\n{job.text}"
    assert job.left == []
