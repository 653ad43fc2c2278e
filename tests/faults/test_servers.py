"""A parameter server that is lost takes nothing with it: synchronous rounds are done again by another in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.elastic_jobs import WORKERS, check_unharmed, run_elastic

SERVER = WORKERS  # the rank after the workers'


@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_a_lost_server_changes_no_bit(kind: str, tmp_path: Path) -> None:
    orders = [f"{kind}:rank={SERVER},step=3,phase=serve"]
    job = run_elastic(tmp_path / "job", "--strategy parameter_server --servers 1", orders=orders)
    check_unharmed(job, orders)


def test_workers_and_a_server_are_lost_in_one_job(tmp_path: Path) -> None:
    orders = [f"kill:rank={SERVER + 1},step=2,phase=serve", "kill:rank=1,step=5,phase=exchange"]
    job = run_elastic(tmp_path / "job", "--strategy parameter_server --servers 2", orders=orders)
    check_unharmed(job, orders)
