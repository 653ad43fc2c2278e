"""When a job is over, and how: the rules without a process or a clock."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.launch.exit_rules import QUIET_S, SERVERS_END_S, Policy, can_go_on, check_last_workers, success
from paceline.launch.failure_attribution import Outcome, Phase, Process, Raised, attribute_failure

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
    assert success(processes) is None
    end(processes[2:])
    assert success(processes) == Outcome(0)


def test_only_a_job_that_says_so_goes_on_without_a_worker() -> None:
    processes = job(3, servers=1)
    kill(processes[0])
    assert not can_go_on(processes, Policy())
    assert can_go_on(processes, SURVIVE)


def test_no_job_goes_on_without_its_server_or_its_last_worker() -> None:
    served = job(2, servers=1)
    kill(served[2])
    assert not can_go_on(served, SURVIVE)
    by_worker_0 = job(2)
    kill(by_worker_0[0])
    assert not can_go_on(by_worker_0, SURVIVE), "worker 0 doubles as the server"
    nobody_left = job(2, servers=1)
    kill(nobody_left[0])
    nobody_left[0].lost = True
    kill(nobody_left[1], 1)
    assert not can_go_on(nobody_left, SURVIVE)


def test_a_job_that_lost_a_worker_ends_well_with_a_warning() -> None:
    processes = job(3, servers=1)
    kill(processes[1])
    processes[1].lost = True
    end([processes[0], processes[2], processes[3]])
    outcome = success(processes)
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
    outcome = attribute_failure(processes)
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
    assert attribute_failure(processes).lines == ("paceline: all 2 workers and 1 server raised ConfigError: 7 keys",)
    processes[2].raised = processes[2].failed_as = None
    assert attribute_failure(processes) == Outcome(1, ("paceline: all 2 workers raised ConfigError: 7 keys",))


def test_servers_that_stay_behind_are_stopped_soon() -> None:
    processes = job(1, servers=2)
    end(processes[:2], at=10.0)
    assert check_last_workers(processes, Policy(), 10.0 + SERVERS_END_S / 2, False).outcome is None
    outcome = check_last_workers(processes, Policy(), 10.0 + SERVERS_END_S, False).outcome
    assert outcome is not None
    assert outcome.lines == (
        "paceline: server 1 (pid 102): still running 10 s after the last worker ended; stopped, with these stacks:",
    )
    assert (outcome.code, outcome.hung) == (1, (2,))


def test_a_worker_that_is_quiet_after_its_peers_is_warned_of_and_then_stopped() -> None:
    processes = job(2)
    end(processes[:1], at=10.0)
    policy = Policy(hang_timeout_s=300.0)
    assert check_last_workers(processes, policy, 10.0 + QUIET_S / 2, False).lines == ()
    warning = check_last_workers(processes, policy, 10.0 + QUIET_S, False)
    assert warning.outcome is None
    assert warning.lines == (
        "paceline: worker 1 (pid 101) at step 7: no message, output or CPU use for 60 s, and the other workers "
        "have ended; stopped when that lasts 300 s",
    )
    assert check_last_workers(processes, policy, 10.0 + QUIET_S, True).lines == ()
    outcome = check_last_workers(processes, policy, 310.0, True).outcome
    assert outcome is not None
    assert (outcome.code, outcome.hung) == (1, (1,))
    assert outcome.lines[0].endswith(
        "no message, output or CPU use for 300 s, and the other workers have ended; stopped, with these stacks:"
    )


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
    assert check_last_workers(processes, Policy(), 1000.0, False).outcome is None


def test_a_worker_without_an_engine_is_waited_for_and_that_is_told_once() -> None:
    processes = job(3)
    end(processes[:2], at=10.0)
    processes[2].phase = Phase.UNKNOWN
    assert check_last_workers(processes, Policy(), 10.0 + QUIET_S / 2, False).lines == ()
    told = check_last_workers(processes, Policy(), 10.0 + QUIET_S, False)
    assert told.outcome is None
    assert "worker 2" in told.lines[0]
    assert "still running 60 s after the other workers ended" in told.lines[0]
    assert check_last_workers(processes, Policy(), 10.0 + QUIET_S, True).lines == ()


def test_an_evaluation_that_one_worker_ran_alone_is_told_at_the_end() -> None:
    processes = job(3)
    for process, evaluations in zip(processes, ((2, 2), (1, 1), (1, 1)), strict=True):
        process.evaluations = evaluations
    end(processes)
    outcome = success(processes)
    assert outcome is not None
    assert outcome.code == 0
    (line,) = outcome.closing
    assert "warning: worker 0 (pid 100) has run through 2 loops over prepared evaluation loaders, worker 1" in line


@pytest.mark.parametrize(
    "evaluations",
    [((1, 1), (1, 1), (1, 1)), (None, None, None), ((2, 2), (2, 2), None), ((2, 1), (2, 2), (2, 0))],
    ids=["by all", "nobody says", "not all say", "left early by some"],
)
def test_nothing_is_told_where_all_did(evaluations: tuple[tuple[int, int] | None, ...]) -> None:
    processes = job(3)
    for process, told in zip(processes, evaluations, strict=True):
        process.evaluations = told
    end(processes)
    assert success(processes) == Outcome(0)


def test_servers_evaluate_nothing() -> None:
    processes = job(2, servers=1)
    for process in processes:
        process.evaluations = (0, 0) if process.is_server else (3, 3)
    end(processes)
    assert success(processes) == Outcome(0)
