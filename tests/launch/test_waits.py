"""A worker that waits for one who won't come is told of within seconds, with both names and the line of the script."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from paceline.launch.exit_rules import PATIENCE_S, STUCK_S, Policy, ReportedWait, check_waits
from paceline.launch.failure_attribution import Phase, Process, Waits
from paceline.world.waiting import LOOP
from tests.faults.jobs import run_job

BARRIER = Waits("engine.barrier()", "train.py:12", since=100.0)


def workers(count: int = 2) -> list[Process]:
    return [Process(rank, pid=50 + rank) for rank in range(count)]


def looked(
    processes: list[Process], now: float, said: set[ReportedWait] | None = None
) -> tuple[tuple[str, ...], int | None]:
    look = check_waits(processes, Policy(), now, PATIENCE_S, set() if said is None else said)
    return (look.lines, None) if look.outcome is None else (look.outcome.lines, look.outcome.code)


def test_who_waits_for_one_that_has_ended_ends_the_job() -> None:
    first, second = workers()
    first.waits = BARRIER
    second.status, second.ended_at = 0, 101.0
    assert looked([first, second], 101.0 + STUCK_S - 0.1) == ((), None)
    told = (
        "paceline: worker 0 (pid 50) waits in engine.barrier() (train.py:12) for worker 1 (pid 51), which exited with "
        "code 0 without reaching it; every worker has to make this call, or none; the job is stopped"
    )
    assert looked([first, second], 101.0 + STUCK_S) == ((told,), 1)


def test_who_waits_while_another_is_elsewhere_is_told_of_once() -> None:
    processes = workers(4)
    processes[0].waits = BARRIER
    processes[1].phase, processes[1].step = Phase.TRAINING, 7
    processes[2].waits = Waits("engine.reduce()", "train.py:30", since=100.0)
    said: set[ReportedWait] = set()
    assert looked(processes, 100.0 + PATIENCE_S - 0.1, said) == ((), None)
    lines, code = looked(processes, 100.0 + PATIENCE_S, said)
    assert code is None
    assert lines == (
        "paceline: worker 0 has waited 5 s in engine.barrier() (train.py:12) for worker 1, which is training at step 7 "
        "and worker 2, which waits in engine.reduce() (train.py:30) and worker 3, which has not reached it",
    )
    assert looked(processes, 200.0, said) == ((), None)


@pytest.mark.parametrize(
    ("mine", "theirs", "phase"),
    [
        (BARRIER, BARRIER, Phase.IDLE),  # all are there: it takes long
        (Waits(LOOP, "train.py:20", since=100.0), None, Phase.TRAINING),  # a slow one, in the same loop
        (Waits(LOOP, "train.py:20", since=100.0), Waits(LOOP, "train.py:21", since=100.0), Phase.TRAINING),
    ],
)
def test_who_waits_where_the_others_are_too_is_left_alone(mine: Waits, theirs: Waits | None, phase: Phase) -> None:
    first, second = workers()
    first.waits, second.waits = mine, theirs
    first.phase = second.phase = phase
    assert looked([first, second], 1000.0) == ((), None)


def test_asynchronous_workers_end_when_they_like() -> None:
    first, second = workers()
    first.waits = BARRIER
    second.status, second.ended_at = 0, 101.0
    look = check_waits([first, second], Policy(survive_worker_loss=True), 1000.0, PATIENCE_S, set())
    assert (look.lines, look.outcome) == ((), None)


def test_one_that_had_ended_before_the_others_met_again_is_not_missed() -> None:
    first, second = workers()
    first.waits = BARRIER
    second.status, second.ended_at = 0, 101.0
    look = check_waits([first, second], Policy(), 1000.0, PATIENCE_S, set(), lambda process: False)
    assert (look.lines, look.outcome) == ((), None)


# ---- real processes ------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import paceline
case, rank = sys.argv[1], int(os.environ["PACELINE_RANK"])
if case == "never there" and rank == 1:
    sys.exit(0)
engine = paceline.Engine(device="cpu")
if rank == 1 and case == "leaves":
    sys.exit(0)
while rank == 1 and case == "dawdles" and "has waited" not in open("err.txt").read():
    time.sleep(0.05)
engine.barrier()
"""


@pytest.mark.job
@pytest.mark.parametrize(
    ("case", "flags", "code", "told"),
    [
        ("never there", "", 1, r"worker 0 \(pid \d+\) waits in Engine\(\) \(job.py:7\) for worker 1 \(pid \d+\), "),
        ("never there", "--elastic", 1, r"worker 0 \(pid \d+\) waits in Engine\(\) \(job.py:7\) for worker 1 "),
        ("leaves", "--elastic", 1, r"worker 0 \(pid \d+\) waits in engine.barrier\(\) \(job.py:12\) for worker 1 "),
        ("leaves", "--backend gloo", 1, r"worker 0 .* raised PeerLostError \(job.py:12\): .*Connection closed by peer"),
        (
            "dawdles",
            "--elastic --heartbeat-timeout-s 1.5",
            0,
            r"worker 0 has waited \d+ s in engine.barrier\(\) \(job.py:12\) for worker 1, which has not reached it\n",
        ),
    ],
    ids=["never there", "never there, elastic", "leaves, elastic", "leaves, gloo", "dawdles"],
)
def test_nobody_waits_in_silence(tmp_path: Path, case: str, flags: str, code: int, told: str) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.py").write_text(SCRIPT)
    begun = time.monotonic()
    job = run_job(folder, f"--workers 2 {flags}", f"'{case}'", script=folder / "job.py")
    assert job.code == code, job.text
    assert re.search(f"paceline: {told}", job.err), job.text
    assert time.monotonic() - begun < 30
    assert job.left == []
