"""The worker that doubles as the parameter server may be lost as any other; processes of servers can't be replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.elastic_jobs import check_unharmed, run_elastic


@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_losing_the_server_changes_no_bit(kind: str, tmp_path: Path) -> None:
    orders = [f"{kind}:rank=0,step=3,phase=exchange"]
    job = run_elastic(tmp_path / "job", "--strategy parameter_server", orders=orders)
    check_unharmed(job, orders)


def test_every_server_in_turn_is_lost(tmp_path: Path) -> None:
    """Who comes first of those that are left is the next one to serve."""
    orders = [f"kill:rank={rank},step={2 * rank + 2},phase=apply" for rank in range(3)]
    job = run_elastic(tmp_path / "job", "--strategy parameter_server --no-restart-workers", orders=orders)
    check_unharmed(job, orders)


def test_processes_of_servers_are_refused(tmp_path: Path) -> None:
    job = run_elastic(tmp_path / "job", "--strategy parameter_server --servers 1", orders=[])
    assert job.code == 1, job.text
    assert "--elastic with --servers 1: server processes can't be replaced; leave it out" in job.err, job.text
    assert job.left == []
