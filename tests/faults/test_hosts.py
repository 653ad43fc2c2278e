"""Several hosts: whichever of their workers or supervisors is killed, what is left goes on to the same bits.

Both hosts are on this machine, each with its own supervisor and folders; what they have in common is loopback.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.launch.rendezvous import free_port
from tests.faults.elastic_jobs import STEPS, hash_undisturbed
from tests.faults.jobs import LEDGER, Job, RunningJob, processes_in, started_job

pytestmark = pytest.mark.job

StartedJob = AbstractContextManager[RunningJob]
WORKERS = 2  # on each of them
AWAITS_JOINER = "--step-s 0.1 --await-joiner who"
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "star")
SERVED = "parameter_server --servers 1"  # on the first host; a job with servers does not grow
QUICK = {
    "test_a_worker_killed_on_another_host_changes_no_bit": ("ddp", "zero3"),
    "test_all_workers_of_a_host_killed_at_once_change_no_bit": ("zero2", "hybrid"),
    "test_a_host_whose_supervisor_is_killed_is_done_without": ("ddp", "fsdp"),
    "test_a_host_that_is_started_again_comes_back_and_changes_no_bit": ("zero3",),
    "test_a_further_host_joins_a_job_that_began_on_one_and_changes_no_bit": ("zero1",),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make faults` tries every strategy (--full-product)."""
    if "strategy" in metafunc.fixturenames:
        name = metafunc.function.__name__
        every = STRATEGIES if "further_host" in name else (*STRATEGIES, SERVED)
        metafunc.parametrize("strategy", every if metafunc.config.getoption("--full-product") else QUICK[name])


def meeting_in(folder: Path) -> str:
    """The flags that all hosts of a job have."""
    secret = folder / "secret"
    secret.write_text("known to both")
    return f"--coordinator 127.0.0.1:{free_port('127.0.0.1')} --secret-file {secret} --workers {WORKERS}"


@contextmanager
def two_hosts(
    folder: Path, flags: str = "", arguments: str = "", *, faults: str | None = None, meeting: str = ""
) -> Iterator[tuple[RunningJob, RunningJob]]:
    """One job on two hosts, in folders of their own."""
    meeting = f"--hosts 2 {meeting or meeting_in(folder)}"
    first = first_host(folder, f"{meeting} --host-rank 0 {flags}", arguments, faults=faults)
    with first as near, another_host(folder / "far", f"{meeting} --host-rank 1", near, arguments, faults=faults) as far:
        yield near, far


def first_host(folder: Path, flags: str, arguments: str, *, faults: str | None = None) -> StartedJob:
    elastic = f"--elastic --heartbeat-timeout-s 2 --ledger {LEDGER}"
    return started_job(folder / "near", f"{elastic} {flags}", f"--run-dir run {arguments}", faults=faults)


def another_host(
    folder: Path, flags: str, first: RunningJob, arguments: str, *, faults: str | None = None
) -> StartedJob:
    return started_job(folder, flags, f"--run-dir {first.folder / 'run'} {arguments}", faults=faults)


def check_unharmed(job: Job) -> None:
    assert job.code == 0, job.text
    assert set(job.hashes.values()) == {hash_undisturbed()}, f"{job.hashes}\n{job.ledger}\n{job.text}"
    assert job.steps == STEPS, f"committed {job.ledger}\n{job.text}"
    assert job.samples.clean, f"{job.samples}\n{job.text}"
    assert job.left == []


def wait_for_joiner(near: RunningJob, far: RunningJob, joiners: int = 1) -> None:
    """A replacement stands in front of the loop on the far host: the others may go on."""
    near.wait_until(lambda: stand_at_the_loop(far, joiners), "the replacement is there")
    for host in (near, far):
        (host.folder / "stands-who").touch()


def stand_at_the_loop(host: RunningJob, joiners: int) -> bool:
    return len([*host.folder.glob("stands-*-1")]) >= joiners


def workers_of(job: RunningJob) -> list[psutil.Process]:
    """The children of its fork server."""
    here = processes_in(job.folder)
    (fork_server,) = [process for process in here if process.ppid() == job.supervisor]
    return [process for process in here if process.ppid() == fork_server.pid]


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
    assert "paceline: host 1 is lost (its supervisor ended without giving a reason); 2 workers go on" in job.text


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


def test_what_a_lost_host_alone_had_is_begun_anew_by_the_others_and_it_may_come_back(tmp_path: Path) -> None:
    """The first and the last of three hosts go on from the checkpoint, with slots 0 and 2."""
    meeting = f"--hosts 3 {meeting_in(tmp_path)} --workers 1"
    arguments = "--save-every 2 --step-s 0.3 --await-joiner who"

    def another(rank: int, name: str) -> StartedJob:
        return another_host(tmp_path / name, f"{meeting} --host-rank {rank}", near, arguments)

    first = first_host(tmp_path, f"{meeting} --host-rank 0 --strategy zero1 --copies 1", arguments)
    with first as near, another(1, "middle") as middle, another(2, "last") as last:
        near.wait_until(lambda: len(near.committed) >= 2, "two steps are done")
        middle.signal(signal.SIGKILL)
        near.wait_until(lambda: "start anew" in near.printed(), "the others begin anew")  # or the host would with them
        with another(1, "again") as back:
            near.wait_until(lambda: stand_at_the_loop(back, 1), "its worker is there")
            for host in (near, last, back):
                (host.folder / "stands-who").touch()
            job, *others = near.finish(), last.finish(), back.finish()
    assert "worker 1's part of the state of step" in job.text
    assert "the 2 workers of the hosts that are left start anew (1 of at most 3 times)" in job.text
    assert "host 1 is back; its 1 worker joins after a step" in job.text
    check_unharmed(job)
    assert (0, 2) in {row.members for row in job.ledger}, job.ledger
    assert job.ledger[-1].members == (0, 1, 2)
    for other in others:
        assert (other.code, set(other.hashes.values()), other.left) == (0, {hash_undisturbed()}, []), other.text


def test_a_host_that_is_started_again_comes_back_and_changes_no_bit(tmp_path: Path, strategy: str) -> None:
    meeting = meeting_in(tmp_path)
    with two_hosts(tmp_path, f"--strategy {strategy}", AWAITS_JOINER, meeting=meeting) as (near, far):
        near.wait_until(lambda: len(near.committed) >= 2, "two steps are done")
        far.signal(signal.SIGKILL)
        again = f"--hosts 2 {meeting} --host-rank 1"
        with another_host(tmp_path / "again", again, near, AWAITS_JOINER) as back:
            wait_for_joiner(near, back, joiners=WORKERS)
            ended = back.finish()
        job = near.finish()
    check_unharmed(job)
    assert "paceline: host 1 is back; its 2 workers join after a step" in job.text
    assert "paceline: worker 3 is back after step" in job.text
    assert job.ledger[-1].members == (0, 1, 2, 3)
    assert (ended.code, set(ended.hashes.values()), ended.left) == (0, {hash_undisturbed()}, []), ended.text


def test_a_further_host_joins_a_job_that_began_on_one_and_changes_no_bit(tmp_path: Path, strategy: str) -> None:
    meeting = meeting_in(tmp_path)
    with first_host(tmp_path, f"{meeting} --max-workers 4 --strategy {strategy}", AWAITS_JOINER) as near:
        with another_host(tmp_path / "far", f"{meeting} --host-rank 3", near, AWAITS_JOINER) as far:
            near.wait_until(lambda: stand_at_the_loop(far, WORKERS), "the new workers are there")
            with another_host(tmp_path / "third", f"{meeting} --host-rank 1", near, "") as third:
                refused = third.finish()
            wait_for_joiner(near, far, joiners=WORKERS)
            ended = far.finish()
        job = near.finish()
    check_unharmed(job)
    assert "paceline: host 3 has joined; its 2 workers join after a step" in job.text
    assert "paceline: worker 3 joined after step" in job.text
    assert job.ledger[-1].members == (0, 1, 2, 3)
    assert (ended.code, set(ended.hashes.values()), ended.left) == (0, {hash_undisturbed()}, []), ended.text
    assert refused.code == 3
    assert "refused this host: it brings 2 workers, and 4 are there: the job has at most 4" in refused.text
