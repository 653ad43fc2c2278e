from __future__ import annotations

from paceline.launch.failure_attribution import Phase, Process, Raised, attribute_failure


def job(size: int) -> list[Process]:
    return [Process(rank, pid=100 + rank, step=7) for rank in range(size)]


def test_the_first_cause_to_arrive_is_the_verdict() -> None:
    workers = job(4)
    workers[0].raised = Raised("RuntimeError", "[pair.cc:534] Connection closed by peer", traceback="Traceback …")
    workers[1].raised = Raised("PeerLostError", "worker 3 left", ours=True, secondary=True)
    workers[3].status = -9
    for place, rank in enumerate((0, 1, 3)):
        workers[rank].failed_as = place
    outcome = attribute_failure(workers)
    assert outcome.lines == ("paceline: worker 3 (pid 103) was killed by SIGKILL at step 7 (out of memory?)",)
    assert outcome.closing == (
        "paceline: also stopped: worker 0 (RuntimeError: [pair.cc:534] Connection closed by peer); "
        "worker 1 (PeerLostError: worker 3 left); worker 2",
    )
    assert outcome.code == 137


def test_consequences_alone_are_reported_as_they_are() -> None:
    workers = job(2)
    workers[1].raised = Raised("PeerLostError", "worker 0 is silent", ours=True, secondary=True)
    workers[1].failed_as = 0
    outcome = attribute_failure(workers)
    assert outcome.lines == ("paceline: worker 1 (pid 101) raised PeerLostError at step 7: worker 0 is silent",)


def test_an_exception_comes_with_its_traceback_and_ours_without() -> None:
    for ours, lines in ((False, 2), (True, 1)):
        workers = job(2)
        workers[0].raised = Raised("SomeError", "text", traceback="Traceback …\nSomeError: text\n", ours=ours)
        workers[0].failed_as = 0
        assert len(attribute_failure(workers).lines) == lines


def test_an_error_of_ours_names_the_line_of_the_script() -> None:
    for ours, at in ((False, ""), (True, " (train.py:21)")):
        workers = job(2)
        workers[0].raised = Raised("SomeError", "text", place="train.py:21", ours=ours)
        workers[0].failed_as = 0
        assert (
            attribute_failure(workers).lines[0] == f"paceline: worker 0 (pid 100) raised SomeError at step 7{at}: text"
        )


def test_the_same_error_of_several_workers_is_told_once() -> None:
    workers = job(3)
    for place, worker in enumerate(workers):
        worker.raised = Raised("ValueError", "bad path", traceback="Traceback …")
        worker.failed_as = place
    outcome = attribute_failure(workers)
    assert outcome.lines[0] == "paceline: worker 0 (pid 100) raised ValueError at step 7: bad path"
    assert outcome.closing == ("paceline: also stopped: workers 1, 2 (the same ValueError)",)


def test_workers_that_could_not_meet_exit_3() -> None:
    workers = job(1)
    workers[0].raised = Raised("WorldError", "waited 30 s for key 'a'", ours=True)
    workers[0].failed_as = 0
    assert attribute_failure(workers).code == 3


def test_leaving_early_names_how_many_were_still_training() -> None:
    workers = job(3)
    for worker in workers:
        worker.phase = Phase.TRAINING
    workers[0].status, workers[0].failed_as = 0, 0
    workers[2].status = 0
    text = attribute_failure(workers).lines[0]
    assert text == "paceline: worker 0 (pid 100) exited with code 0 at step 7 while 1 other was still training"
