"""When a job is over, and how: the rules without a process or a clock."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.launch.activity import Activity, own_processor_seconds, processor_seconds
from paceline.launch.ending import QUIET_S, SERVERS_END_S, Policy, goes_on, good_end, look_at_the_last
from paceline.launch.verdict import Outcome, Phase, Process, Raised, judge
from paceline.launch.vigil import Vigil

SURVIVE = Policy(survive_worker_loss=True)


def job(workers: int, servers: int = 0) -> list[Process]:
    made = [Process(rank, pid=100 + rank, step=7, phase=Phase.IDLE) for rank in range(workers)]
    return made + [Process(workers + index, index, pid=100 + workers + index) for index in range(servers)]


def end(processes: Iterable[Process], at: float = 0.0) -> None:
    for process in processes:
        process.status, process.ended_at = 0, at


def kill(process: Process, place: int = 0) -> None:
    process.status, process.ended_at, process.failed_as = -9, 0.0, place


def test_a_job_ends_well_when_its_servers_have_ended_too() -> None:
    processes = job(2, servers=1)
    end(processes[:2])
    assert good_end(processes) is None
    end(processes[2:])
    assert good_end(processes) == Outcome(0)


def test_only_a_job_that_says_so_goes_on_without_a_worker() -> None:
    processes = job(3, servers=1)
    kill(processes[0])
    assert not goes_on(processes, Policy())
    assert goes_on(processes, SURVIVE)


def test_no_job_goes_on_without_its_server_or_its_last_worker() -> None:
    served = job(2, servers=1)
    kill(served[2])
    assert not goes_on(served, SURVIVE)
    by_worker_0 = job(2)
    kill(by_worker_0[0])
    assert not goes_on(by_worker_0, SURVIVE), "worker 0 doubles as the server"
    nobody_left = job(2, servers=1)
    kill(nobody_left[0])
    nobody_left[0].lost = True
    kill(nobody_left[1], 1)
    assert not goes_on(nobody_left, SURVIVE)


def test_a_job_that_lost_a_worker_ends_well_with_a_warning() -> None:
    processes = job(3, servers=1)
    kill(processes[1])
    processes[1].lost = True
    end([processes[0], processes[2], processes[3]])
    outcome = good_end(processes)
    assert outcome is not None
    assert outcome.code == 0
    assert outcome.closing == (
        "paceline: warning: the job ended well, but without 1 worker: "
        "worker 1 (pid 101) was killed by SIGKILL at step 7 (out of memory?)",
    )


def test_a_worker_lost_before_does_not_explain_a_later_failure() -> None:
    processes = job(2, servers=2)
    kill(processes[1])
    processes[1].lost = True
    processes[3].holds = "keys 4…7"
    kill(processes[3], 2)
    processes[0].raised = Raised("PeerLostError", "server 1 is gone", ours=True, secondary=True)
    processes[0].failed_as = 1
    outcome = judge(processes)
    assert outcome.lines == ("paceline: server 1 (pid 103, holding keys 4…7) was killed by SIGKILL (out of memory?)",)
    assert outcome.closing == (
        "paceline: also stopped: worker 0 (PeerLostError: server 1 is gone); "
        "worker 1 (lost before: SIGKILL); server 0",
    )  # fmt: skip


def test_the_same_error_of_workers_and_servers_is_told_once() -> None:
    processes = job(2, servers=1)
    for place, process in enumerate(processes):
        process.raised, process.failed_as = Raised("ConfigError", "7 keys", ours=True), place
        process.step = None
    assert judge(processes).lines == ("paceline: all 2 workers and 1 server raised ConfigError: 7 keys",)
    processes[2].raised = processes[2].failed_as = None
    assert judge(processes) == Outcome(1, ("paceline: all 2 workers raised ConfigError: 7 keys",))


def test_servers_that_stay_behind_are_stopped_soon() -> None:
    processes = job(1, servers=2)
    end(processes[:2], at=10.0)
    assert look_at_the_last(processes, Policy(), 10.0 + SERVERS_END_S / 2, False).outcome is None
    outcome = look_at_the_last(processes, Policy(), 10.0 + SERVERS_END_S, False).outcome
    assert outcome is not None
    assert outcome.lines == ("paceline: server 1 (pid 102): still there 10 s after the last worker; stopped here:",)
    assert (outcome.code, outcome.hung) == (1, (2,))


def test_a_worker_that_is_quiet_after_its_peers_is_warned_of_and_then_stopped() -> None:
    processes = job(2)
    end(processes[:1], at=10.0)
    policy = Policy(hang_timeout_s=300.0)
    assert look_at_the_last(processes, policy, 10.0 + QUIET_S / 2, False).lines == ()
    warning = look_at_the_last(processes, policy, 10.0 + QUIET_S, False)
    assert warning.outcome is None
    assert warning.lines == (
        "paceline: worker 1 (pid 101) at step 7: no sign of life for 60 s, and the other workers have ended; "
        "stopped when that lasts 300 s",
    )
    assert look_at_the_last(processes, policy, 10.0 + QUIET_S, True).lines == ()
    outcome = look_at_the_last(processes, policy, 310.0, True).outcome
    assert outcome is not None
    assert (outcome.code, outcome.hung) == (1, (1,))
    assert outcome.lines[0].endswith("no sign of life for 300 s, and the other workers have ended; stopped here:")


@pytest.mark.parametrize("why", ["heard of", "no engine", "all still run", "a failure settles"])
def test_a_worker_is_left_alone_when_it(why: str) -> None:
    processes = job(3)
    end(processes[:1], at=0.0)
    match why:
        case "heard of":
            processes[2].heard_at = 900.0
        case "no engine":
            processes[2].phase = Phase.UNKNOWN
        case "all still run":
            processes[0].status = processes[0].ended_at = None
        case _:
            processes[2].failed_as = 0
    assert look_at_the_last(processes, Policy(), 1000.0, False).outcome is None


def test_time_on_a_processor_is_that_of_the_whole_family(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, name, used, children in ((7, "python", "1 2 3 4", "8"), (8, "a) b (c", "10 0 0 0", "")):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/stat").write_text(f"{pid} ({name}) S 1 7 7 0 -1 4194560 9 9 0 0 {used} 20 0 1")
        (tmp_path / f"{pid}/task/{pid}/children").write_text(children)
    assert processor_seconds(7, tmp_path) == 20 / ticks
    assert processor_seconds(9, tmp_path) == 0.0
    assert processor_seconds(os.getpid()) > 0


def test_printing_and_working_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([5.0, 5.0, 5.0, 5.5, 5.501])
    monkeypatch.setattr("paceline.launch.activity.processor_seconds", lambda pid: next(used))
    activity = Activity(pid=1)
    looks = [activity.seen(printed, now) for now, printed in enumerate([0, 0, 12, 12, 12])]
    assert looks == [True, False, True, True, False]


def test_only_the_silent_who_use_a_processor_are_told_of() -> None:
    silence_s = {10: 0.1, 11: 3.0, 12: 3.0, 13: 3.0}
    used: dict[int, float | None] = {10: 5.0, 11: 5.0, 12: 5.0, 13: 5.0}
    now = [0.0]
    vigil = Vigil(2.0, silence_s.__getitem__, lambda: now[0], used.__getitem__)
    assert vigil.look({0: 10, 1: 11, 2: 12, 3: 13}) == []
    now[0] = 0.5
    used.update({10: 5.5, 11: 5.2, 12: 5.01, 13: None})  # heard; computes; polls; stopped
    assert vigil.look({0: 10, 1: 11, 2: 12, 3: 13}) == [1]


def test_a_stopped_process_uses_no_processor(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, state in ((7, "R"), (8, "T")):
        (tmp_path / f"{pid}").mkdir()
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a) b) {state} 1 7 7 0 -1 4194560 9 9 0 0 5 3 100 100 20 0 1")
    assert own_processor_seconds(7, tmp_path) == 8 / ticks
    assert own_processor_seconds(8, tmp_path) is own_processor_seconds(9, tmp_path) is None
