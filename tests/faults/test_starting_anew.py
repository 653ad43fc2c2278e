"""All workers were lost and start anew: whoever is lost on that way, at any moment of it, changes nothing either.

    kill -9 of all ─► fresh processes ─► kill or stop some of those ─► fresh ones again ─► the hash of a plain run

The faults come from outside, at moments of a start that differ: a process that has just been forked, one that reads the
checkpoint, one that waits for the others.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.elastic.random_faults import HurtJob
from tests.faults.elastic_jobs import ELASTIC, WORKERS, check_unharmed
from tests.faults.jobs import LEDGER, RunningJob, started_job

pytestmark = pytest.mark.job

MOMENTS_S = (0.0, 0.05, 0.15, 0.4)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def workers_of_start(job: RunningJob, number: int, known: set[int]) -> list[int]:
    """Wait until all have been forked that start anew for the `number`-th time; 0: the job begins.

    Oldest first: that may be a replacement for one that was killed before the last, which goes in a moment.
    """
    hurt = HurtJob(job.supervisor, job.folder / LEDGER)
    found: list[int] = []

    def forked() -> bool:
        found[:] = [pid for pid in hurt.processes() if pid not in known]
        errors = job.folder / "err.txt"
        told = errors.exists() and f"start anew ({number} of" in errors.read_text()
        return len(found) == WORKERS and (told or number == 0)

    job.wait_until(forked, f"all workers of start {number} are there")
    known.update(found)
    return found


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a replacement for one of those that were killed a moment ago
            os.kill(pid, number)


@pytest.mark.parametrize(
    ("moment_s", "lost", "number", "flags"),
    [
        (MOMENTS_S[0], 1, KILL, "--strategy ddp --backend paceline"),
        (MOMENTS_S[1], 2, KILL, "--strategy zero2 --backend gloo"),
        (MOMENTS_S[2], 1, KILL, "--strategy fsdp --backend gloo"),
        (MOMENTS_S[3], 3, KILL, "--strategy zero3 --backend paceline"),
        (MOMENTS_S[2], 1, STOP, "--strategy ddp --backend gloo"),
        (MOMENTS_S[1], WORKERS, KILL, "--strategy parameter_server"),
    ],
)
def test_workers_lost_while_all_start_anew_change_no_bit(
    tmp_path: Path, moment_s: float, lost: int, number: signal.Signals, flags: str
) -> None:
    known: set[int] = set()
    with started_job(tmp_path / "job", f"{ELASTIC} {flags}", "--save-every 2 --step-s 0.02") as job:
        first = workers_of_start(job, 0, known)
        job.wait_until(lambda: len(job.committed) >= 3, "three steps are committed")
        send(KILL, first)
        second = workers_of_start(job, 1, known)
        time.sleep(moment_s)
        send(number, second[-lost:])
        ended = job.finish()
    assert "all start anew (1 of at most 3 times)" in ended.err, ended.text
    check_unharmed(ended)


def test_two_deaths_in_a_row_while_all_start_anew_change_no_bit_without_a_checkpoint(tmp_path: Path) -> None:
    known: set[int] = set()
    with started_job(tmp_path / "job", ELASTIC, "--step-s 0.02") as job:
        first = workers_of_start(job, 0, known)
        job.wait_until(lambda: len(job.committed) >= 3, "three steps are committed")
        send(KILL, first)
        send(KILL, workers_of_start(job, 1, known)[-1:])
        send(KILL, workers_of_start(job, 2, known)[-1:])
        ended = job.finish()
    assert "all start anew (3 of at most 3 times)" in ended.err, ended.text
    check_unharmed(ended)
