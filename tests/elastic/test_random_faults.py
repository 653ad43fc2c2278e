"""Random faults hit workers only, spare one that knows the state, and are the same for the same seed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from paceline.elastic import faults, random_faults
from paceline.elastic.decisions import Commit
from paceline.elastic.random_faults import KINDS, Draw, HurtJob, cut_connection, draws
from paceline.elastic.step_log import line_of
from paceline.world.process import SERVER

pytestmark = pytest.mark.job

# A supervisor, its stable, and four workers that sleep, beside one child of the stable that is no worker.
TREE = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in range(5):
        if os.fork() == 0:
            if number < 4:
                os.setsid()
            time.sleep(60)
            os._exit(0)
    print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree() -> Iterator[int]:
    """The process id of a supervisor whose stable has four workers."""
    process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    wait_until(lambda: len(HurtJob(process.pid, Path("none")).processes()) == 4)
    job = HurtJob(process.pid, Path("none"))
    job.processes()
    yield process.pid
    for pid in (*job.seen, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(10)
    process.stdout.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def commit(ledger: Path, step: int, generation: int, members: list[int], servers: Sequence[int] = ()) -> None:
    with ledger.open("a") as file:
        file.write(line_of(Commit(step, 0, generation, tuple(members), tuple(servers))))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def fault(kind: str, whom: float = 0.0) -> Draw:
    return Draw(kind, whom, 0.1, 0.01)


def test_the_same_seed_draws_the_same_faults() -> None:
    first, again, other = (list(itertools.islice(draws(seed, 1.0), 200)) for seed in (7, 7, 8))
    assert first == again != other
    assert {draw.kind for draw in first} == set(KINDS)
    assert all(0 <= draw.whom < 1 and draw.gap_s > 0 for draw in first)


def test_nobody_is_hurt_before_the_first_commit(tree: int, tmp_path: Path) -> None:
    job = HurtJob(tree, tmp_path / "ledger")
    job.look()
    assert not job.hurt(fault("kill"))
    assert len(job.processes()) == 4


def test_of_those_that_know_the_state_one_is_spared(tree: int, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    job = HurtJob(tree, ledger)
    commit(ledger, 1, 1, [0, 1, 2, 3])
    job.look()
    assert [job.hurt(fault("kill")) for _ in range(5)] == [True, True, True, False, False]
    wait_until(lambda: len(job.processes()) == 1)
    assert [each.kind for each in job.happened] == ["kill"] * 3


def test_servers_are_hurt_and_not_spared(tree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ledger"
    job = HurtJob(tree, ledger)
    worker, *servers = job.processes()
    monkeypatch.setattr(random_faults, "process_name", lambda pid: SERVER if pid in servers else "python")
    commit(ledger, 1, 1, [0], [1, 2, 3])
    job.look()
    assert [job.hurt(fault("kill")) for _ in range(4)] == [True, True, True, False]
    wait_until(lambda: job.processes() == [worker])
    assert [each.kind for each in job.happened] == ["kill"] * 3


def test_a_commit_of_a_later_generation_ends_the_time_that_a_kill_has_cost(tree: int, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    job = HurtJob(tree, ledger)
    commit(ledger, 1, 1, [0, 1, 2, 3])
    job.look()
    assert job.hurt(fault("kill"))
    wait_until(lambda: len(job.processes()) == 3)
    commit(ledger, 2, 1, [0, 1, 2, 3])
    job.look()
    assert job.happened[0].commit_s is None
    commit(ledger, 3, 2, [1, 2, 3])
    job.look()
    assert job.happened[0].commit_s is not None
    assert [row.step for row in job.rows] == [1, 2, 3]


def test_a_line_of_the_ledger_that_is_being_written_is_left_for_the_next_look(tree: int, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    job = HurtJob(tree, ledger)
    whole = json.dumps({"step": 1, "update": 0, "generation": 1, "members": [0]}) + "\n"
    ledger.write_text('{"rewound_to": 0}\n' + whole[:20])
    job.look()
    assert job.rows == []
    with ledger.open("a") as file:
        file.write(whole[20:])
    job.look()
    assert [row.step for row in job.rows] == [1]


def test_several_are_killed_together_and_nobody_is_spared(tree: int, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    job = HurtJob(tree, ledger)
    commit(ledger, 1, 3, [0, 1, 2, 3])
    job.look()
    victims = job.processes()
    job.kill_together(victims, [0, 1, 2, 3])
    wait_until(lambda: job.processes() == [])
    commit(ledger, 2, 3, [0, 1, 2, 3])  # it was on its way
    job.look()
    assert job.happened[0].commit_s is None
    with ledger.open("a") as file:
        file.write('{"rewound_to": 1}\n')
    commit(ledger, 2, 1, [0, 1, 2, 3])
    job.look()
    assert (job.happened[0].kind, job.happened[0].all_anew) == ("kill", True)
    assert job.happened[0].commit_s is not None


def test_a_step_that_the_killed_worker_took_part_in_does_not_know_of_it(tree: int, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    job = HurtJob(tree, ledger)
    commit(ledger, 1, 1, [0, 1, 2, 3])
    job.look()
    job.kill_together(job.processes()[:1], [2])
    commit(ledger, 2, 2, [0, 1, 2, 3])  # of a generation that had begun, of which nobody outside had seen a step
    job.look()
    assert job.happened[0].commit_s is None
    commit(ledger, 3, 3, [0, 1, 2, 3])  # without it nobody made a step, and another is in its place
    job.look()
    assert job.happened[0].commit_s is not None
    assert not job.happened[0].all_anew
    job.kill_together(job.processes()[:1], [0])
    commit(ledger, 4, 4, [1, 2, 3])
    job.look()
    assert job.happened[1].commit_s is not None


def test_a_slow_worker_goes_on_after_its_moment_and_a_stopped_one_does_not(tree: int, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    job = HurtJob(tree, ledger)
    commit(ledger, 1, 1, [0, 1, 2, 3])
    job.look()
    slowed, stopped = job.processes()[0], job.processes()[-1]
    assert job.hurt(fault("slow"))
    assert job.hurt(fault("stop", 0.99))
    wait_until(lambda: (state(slowed), state(stopped)) == ("T", "T"))
    time.sleep(0.02)
    job.look()
    wait_until(lambda: state(slowed) == "S")
    assert state(stopped) == "T"


def test_what_is_left_of_a_job_is_found(tree: int, tmp_path: Path) -> None:
    job = HurtJob(tree, tmp_path / "ledger")
    workers = job.processes()
    assert set(workers) < set(job.left())
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not set(workers) & set(job.left()))


def test_a_connection_of_another_process_can_be_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket, time; c = socket.create_connection(('127.0.0.1', {port})); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            server.settimeout(10)
            ours, _ = server.accept()
            with ours:
                ours.settimeout(10)
                assert cut_connection(process.pid)
                assert ours.recv(1) == b""
            assert not cut_connection(process.pid)
        finally:
            process.kill()
            process.wait(10)


def test_hashes_are_told_where_somebody_asked_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hashes"
    faults.tell_hash(0, "sha256:nobody asked")
    assert faults.last_hash(file) is None
    monkeypatch.setenv("PACELINE_HASH_FILE", str(file))
    faults.tell_hash(0, "sha256:1")
    faults.tell_hash(3, "sha256:2")
    assert faults.last_hash(file) == "sha256:2"
