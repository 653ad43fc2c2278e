"""`paceline verify` on jobs that are forked from a process that has torch: the real thing in a tenth of the time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.verify.jobs import Outcome, Plan, Verification, settings_of
from paceline.world import environment
from tests.faults.jobs import BorrowedPopen

PLANTED = Path(__file__).parent / "planted.py"


def verified(
    folder: Path,
    *command: str,
    workers: Sequence[int] = (1, 2),
    strategies: Sequence[str] | None = None,
    steps: int = 6,
    lanes: int = 3,
    tolerance: float = 1e-4,
) -> tuple[Plan, Outcome]:
    plan = Plan(tuple(command), settings_of(workers, strategies), steps, lanes, tolerance, folder)
    of_job = lambda of: {**environment.verify_environment(of, lanes), "PACELINE_QUIET": "1"}  # noqa: E731
    return plan, Verification(plan, BorrowedPopen, of_job).outcome()
