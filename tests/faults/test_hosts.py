"""Several hosts: whichever of their workers or supervisors is killed, what is left goes on to the same bits.

Both hosts are on this machine, each with its own supervisor, vault and folder; what they have in common is loopback.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.launch.hosts import free_port
from tests.faults.elastic_jobs import STEPS, hash_undisturbed
from tests.faults.jobs import LEDGER, Job, RunningJob, processes_in, started_job

WORKERS = 2  # on each of them
AWAITS_JOINER = "--step-s 0.1 --await-joiner who"
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "star")
QUICK = {
    "test_a_worker_killed_on_another_host_changes_no_bit": ("ddp", "zero3"),
    "test_all_workers_of_a_host_killed_at_once_change_no_bit": ("zero2", "hybrid"),
    "test_a_host_whose_supervisor_is_killed_is_done_without": ("ddp", "fsdp"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make faults` tries every strategy (--full-product)."""
    if "strategy" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--full-product")
        metafunc.parametrize("strategy", STRATEGIES if whole else QUICK[metafunc.function.__name__])


@contextmanager
def two_hosts(
    folder: Path, flags: str = "", arguments: str = "", *, faults: str | None = None
) -> Iterator[tuple[RunningJob, RunningJob]]:
    """One job on two hosts, in folders of their own."""
    secret, run = folder / "secret", folder / "near" / "run"
    secret.write_text("known to both")
    meeting = f"--hosts 2 --coordinator 127.0.0.1:{free_port('127.0.0.1')} --secret-file {secret} --workers {WORKERS}"
    elastic = f"--elastic --heartbeat-timeout-s 2 --ledger {LEDGER} {flags}"
    near = started_job(
        folder / "near", f"{meeting} --host-rank 0 {elastic}", f"--run-dir {run} {arguments}", faults=faults
    )
    far = started_job(folder / "far", f"{meeting} --host-rank 1", f"--run-dir {run} {arguments}", faults=faults)
    with near as first, far as second:
        yield first, second


def check_unharmed(job: Job) -> None:
    assert job.code == 0, job.text
    assert set(job.hashes.values()) == {hash_undisturbed()}, f"{job.hashes}\n{job.ledger}\n{job.text}"
    assert job.steps == STEPS, f"committed {job.ledger}\n{job.text}"
    assert job.samples.clean, f"{job.samples}\n{job.text}"
    assert job.left == []


def wait_for_joiner(near: RunningJob, far: RunningJob) -> None:
    """A replacement stands in front of the loop on the far host: the others may go on."""
    near.wait_until(lambda: any(far.folder.glob("stands-*-1")), "the replacement is there")
    for host in (near, far):
        (host.folder / "stands-who").touch()


def workers_of(job: RunningJob) -> list[psutil.Process]:
    """The children of its stable."""
    here = processes_in(job.folder)
    (stable,) = [process for process in here if process.ppid() == job.supervisor]
    return [process for process in here if process.ppid() == stable.pid]


def test_a_worker_killed_on_another_host_changes_no_bit(tmp_path: Path, strategy: str) -> None:
    faults = "kill:rank=3,step=3,phase=exchange"
    with two_hosts(tmp_path, f"--strategy {strategy}", AWAITS_JOINER, faults=faults) as (near, far):
        wait_for_joiner(near, far)
        ended = far.finish()
        job = near.finish()
    check_unharmed(job)
    assert "worker 3 is back after step" in job.text
    assert (ended.code, set(ended.hashes.values()), ended.left) == (0, {hash_undisturbed()}, []), ended.text


def test_all_workers_of_a_host_killed_at_once_change_no_bit(tmp_path: Path, strategy: str) -> None:
    faults = "kill:rank=2,step=3,phase=backward;kill:rank=3,step=3,phase=backward"
    with two_hosts(tmp_path, f"--strategy {strategy}", AWAITS_JOINER, faults=faults) as (near, far):
        wait_for_joiner(near, far)
        ended = far.finish()
        job = near.finish()
    check_unharmed(job)
    assert (ended.code, ended.left) == (0, []), ended.text


def test_a_host_whose_supervisor_is_killed_is_done_without(tmp_path: Path, strategy: str) -> None:
    with two_hosts(tmp_path, f"--strategy {strategy}", "--step-s 0.1") as (near, far):
        near.wait_until(lambda: len(near.committed) >= 3, "three steps are done")
        far.signal(signal.SIGKILL)
        job = near.finish()
        near_by = [process.name() for process in processes_in(far.folder)]
    check_unharmed(job)
    assert near_by == []
    assert "paceline: host 1 is lost (its supervisor went away without a word); 2 workers go on" in job.text


def test_what_one_host_alone_had_is_lost_with_its_workers_and_all_start_anew(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "--strategy zero1 --copies 1", "--save-every 2 --step-s 0.1") as (near, far):
        near.wait_until(lambda: len(near.committed) >= 5, "five steps are done")
        for worker in workers_of(far):
            worker.kill()
        ended = far.finish()
        job = near.finish()
    assert re.search(r"worker 2's part of the state of step \d+ is lost with its host \(", job.text), job.text
    assert "--copies 2 keeps every part on a second host: all start anew (1 of at most 3 times)" in job.text
    check_unharmed(job)
    assert ended.code == 0, ended.text


def test_what_a_lost_host_alone_had_is_begun_anew_by_the_others_from_the_checkpoint(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "--strategy zero1 --copies 1", "--save-every 2 --step-s 0.1") as (near, far):
        near.wait_until(lambda: len(near.committed) >= 5, "five steps are done")
        far.signal(signal.SIGKILL)
        job = near.finish()
    told = r"worker 2's part of the state of step \d+ is lost with its host \(no other is left\); --copies 2 keeps"
    assert re.search(told, job.text), job.text
    assert "the 2 workers of the hosts that are left start anew (1 of at most 3 times)" in job.text
    check_unharmed(job)
    assert job.ledger[-1].members == (0, 1)
