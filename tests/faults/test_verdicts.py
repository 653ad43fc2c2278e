"""What a job says when it can't go on, and who is blamed when it can."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES
from tests.faults.elastic_jobs import ELASTIC, check_unharmed, hash_undisturbed, run_elastic
from tests.faults.jobs import processes_in, run_job, started_job

pytestmark = pytest.mark.job


def test_fewer_workers_than_asked_for_end_the_job_and_the_last_checkpoint_is_named(tmp_path: Path) -> None:
    orders = ["kill:rank=1,step=5,phase=forward"]
    job = run_elastic(tmp_path / "job", "--min-workers 4 --no-restart-workers", "--save-every 2", orders=orders)
    assert job.code == 4, job.text
    assert "worker 1" in job.err, job.text
    assert "the last checkpoint is run/checkpoint-" in job.err, job.text
    assert job.left == []


def test_an_exception_that_follows_the_work_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    """On a second worker in the same step it is the code, not the machine."""
    orders = [f"raise:rank={rank},step=3,phase=forward" for rank in range(4)]
    job = run_elastic(tmp_path / "job", orders=orders)
    assert job.code == 1, job.text
    assert "injected fault in phase forward of step 3" in job.err, job.text
    assert max(job.steps) == 2
    assert job.left == []


def test_a_flipped_bit_is_found_its_worker_named_and_the_step_done_again(tmp_path: Path) -> None:
    job = run_elastic(tmp_path / "job", orders=["flip:rank=2,step=3"])
    check_unharmed(job)
    assert "worker 2's weights differ from those of workers 0, 1 and 3" in job.err, job.text


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_flipped_bit_in_a_part_that_only_one_has_is_found_by_that_one(strategy: str, tmp_path: Path) -> None:
    orders = ["flip:rank=2,step=3"]
    job = run_elastic(tmp_path / "job", f"--strategy {strategy}", "--second-opinion 100", orders=orders)
    check_unharmed(job)
    told = r"worker 2 raised ReplicaError in step 3 \(\w+\.py:\d+\): worker 2: its part of the weights"
    assert re.search(told, job.err), job.text
    assert "between the updates of steps 2 and 3, where nothing writes to it" in job.err, job.text


def test_the_coordinators_death_takes_all_with_it_and_a_restart_has_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with started_job(folder, ELASTIC, "--save-every 2 --step-s 0.05") as job:
        job.wait_until(lambda: len(job.committed) >= 5, "five steps are committed")
        job.signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while left := processes_in(folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
    again = run_job(folder, ELASTIC, "--save-every 2")
    assert again.code == 0, again.text
    assert set(again.hashes.values()) == {hash_undisturbed()}
    assert again.samples.clean, again.samples
    assert again.left == []


def test_lanes_that_the_script_says_stay_when_a_worker_is_replaced(tmp_path: Path) -> None:
    said = {"script": EXAMPLES / "hello.py", "lanes": None}
    alone = run_job(tmp_path / "alone", "--workers 1", **said)
    job = run_job(tmp_path / "job", ELASTIC, faults="kill:rank=1,step=3,phase=forward", **said)
    assert (job.code, job.left) == (0, []), job.text
    assert "worker 1 was killed by SIGKILL in step 3" in job.err, job.text
    weights = [re.findall("sha256:[0-9a-f]+", one.out) for one in (alone, job)]
    assert len(weights[0]) == 1
    assert weights[0] == weights[1]
