"""Stopping on request: what the launcher does with a signal, and how such a job ends."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import LaunchError
from paceline.launch.exit_rules import Policy, StopRequest, stopped_as_asked, stopped_early, success
from paceline.launch.failure_attribution import Outcome, Phase, Process, Raised, attribute_failure
from paceline.launch.job import Job
from paceline.launch.worker_main import Script
from paceline.world.world import LaunchSettings, World
from tests.launch.launching import Launch, alive
from tests.workers import run_workers

Start = Callable[..., Launch]

# What the engine of a job that stops on request does, without torch: "training" lasts until the signal, "saving" 0.2 s.
OBEDIENT = """
control.tell("policy", stops_on_request=True)
control.tell("phase", name="training")
control.tell("step", step=6)
def stop(number, frame):
    control.tell("phase", name="idle")
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
helper = subprocess.Popen(["sleep", "60"])
print("pids", os.getpid(), helper.pid, flush=True)
time.sleep(60)
"""


def when_all_have_printed(started: Launch, workers: int) -> list[int]:
    assert started.process.stdout is not None
    lines = [started.process.stdout.readline().decode() for _ in range(workers)]
    return [int(pid) for line in lines for pid in re.findall(r"\d+", line.partition("pids")[2])]


@pytest.mark.job
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGINT, "stopping after this step, then saving; Ctrl-C again leaves at once"),
        (signal.SIGTERM, "SIGTERM: stopping after this step, then saving, for at most 30 s"),
        (signal.SIGUSR1, "SIGUSR1: stopping after this step, then saving"),
    ],
)
def test_workers_that_stop_on_request_save_and_the_job_leaves_with_75(
    launch: Start, number: signal.Signals, says: str
) -> None:
    started = launch("--workers 2", OBEDIENT)
    pids = when_all_have_printed(started, 2)
    started.interrupt(number)
    finished = started.finish()
    assert sorted(finished.out.splitlines()) == ["[0] saved", "[1] saved"]
    assert finished.err == f"paceline: {says}\npaceline: stopped on request after step 6; start again to continue\n"
    assert finished.code == 75
    assert alive(pids) == []


@pytest.mark.job
def test_a_signal_to_every_process_of_the_job_as_slurm_sends_it_still_lets_workers_save(launch: Start) -> None:
    started = launch("--workers 2", OBEDIENT)
    when_all_have_printed(started, 2)
    (fork_server,) = psutil.Process(started.process.pid).children()
    for process in (fork_server, *fork_server.children()):
        process.send_signal(signal.SIGTERM)
    fork_server.send_signal(signal.SIGUSR1)
    finished = started.finish()
    assert sorted(finished.out.splitlines()) == ["[0] saved", "[1] saved"]
    assert (finished.code, finished.err) == (75, "paceline: stopped on request after step 6; start again to continue\n")


@pytest.mark.job
def test_whoever_is_late_is_killed_and_counted(launch: Start) -> None:
    stubborn = OBEDIENT.replace("time.sleep(0.2)", "time.sleep(60 * rank)")
    started = launch("--workers 2 --grace-s 0.5", stubborn)
    pids = when_all_have_printed(started, 2)
    started.interrupt(signal.SIGTERM)
    finished = started.finish()
    assert finished.code == 143
    assert finished.err.splitlines()[1] == "paceline: stopped by SIGTERM at step 6; 1 worker did not end within 0.5 s"
    assert alive(pids) == []


@pytest.mark.job
def test_a_second_ctrl_c_leaves_at_once(launch: Start) -> None:
    started = launch("--workers 2", OBEDIENT.replace("time.sleep(0.2)", "print('saving', flush=True); time.sleep(60)"))
    pids = when_all_have_printed(started, 2)
    started.interrupt(signal.SIGINT)
    assert started.process.stdout is not None
    started.process.stdout.readline()
    started.interrupt(signal.SIGINT)
    finished = started.finish()
    assert (finished.code, finished.err.splitlines()[1]) == (130, "paceline: stopped by Ctrl-C at step 6")
    assert alive(pids) == []


@pytest.mark.job
def test_a_worker_that_fails_while_it_saves_is_named(launch: Start) -> None:
    failing = OBEDIENT.replace("time.sleep(0.2)", "if rank: raise OSError('no space left')\n    time.sleep(60)")
    started = launch("--workers 2", failing)
    when_all_have_printed(started, 2)
    started.interrupt(signal.SIGTERM)
    finished = started.finish()
    assert finished.code == 1
    assert re.search(r"^paceline: worker 1 \(pid \d+\) raised OSError at step 6: no space left$", finished.err, re.M)


@pytest.mark.job
def test_a_script_that_takes_its_time_without_an_engine_is_waited_for(launch: Start) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), sys.exit(0)))\nprint('pids')\ntime.sleep(60)"
    started = launch("--workers 1", script)
    when_all_have_printed(started, 1)
    started.interrupt(signal.SIGTERM)
    finished = started.finish()
    assert (finished.code, finished.err) == (
        0,
        "paceline: waiting up to 30 s for 1 worker to end; Ctrl-C leaves at once\n",
    )


@pytest.mark.job
def test_an_order_follows_a_notice(launch: Start) -> None:
    script = """
control.tell("policy", stops_on_request=True)
control.tell("phase", name="idle")
signal.signal(signal.SIGUSR1, lambda *_: print("a notice", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("pids")
while True:
    time.sleep(0.1)
"""
    started = launch("--workers 1", script)
    when_all_have_printed(started, 1)
    started.interrupt(signal.SIGUSR1)
    assert started.process.stdout is not None
    assert started.process.stdout.readline() == b"a notice\n"
    started.interrupt(signal.SIGTERM)
    finished = started.finish()
    assert [line.split(":")[1].strip() for line in finished.err.splitlines()[:2]] == ["SIGUSR1", "SIGTERM"]
    assert finished.code == 75


@pytest.mark.job
def test_a_signal_to_one_host_stops_all_hosts(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of this job\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = f"--hosts 2 --coordinator 127.0.0.1:{port} --secret-file {tmp_path / 'secret'}"
    hosts = [launch(f"{where} --host-rank {rank}", OBEDIENT) for rank in (0, 1)]
    for host in hosts:
        when_all_have_printed(host, 1)
    hosts[1].interrupt(signal.SIGTERM)
    for host in hosts:
        finished = host.finish()
        assert (finished.code, finished.err) == (
            75,
            "paceline: SIGTERM on host 1: stopping after this step, then saving, for at most 30 s\n"
            "paceline: stopped on request after step 6; start again to continue\n",
        )


# -- real training -----------------------------------------------------------------------------------------------------

TRAINS = """
import pathlib, sys, time, torch, paceline
from torch.nn.functional import mse_loss
with paceline.Engine(lanes=2, threads=1) as engine:
    data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    engine.stop_on_signals()
    if pathlib.Path("state").exists():
        engine.load_state("state")
    slow = "--slow" in sys.argv
    for x, y in loader:
        engine.backward(mse_loss(model(x), y))
        optimizer.step()
        if slow and engine.stepped:
            engine.print("step", engine.step)
            time.sleep(0.05)
    if engine.stop_requested:
        engine.save_state("state")
    engine.exit_if_stopped()
    ended = engine.step, engine.weights_hash()
"""


def runs_alone(world: World, *, folder: str) -> tuple[int, str]:
    """The script by one worker, in a process that has torch already."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(TRAINS, "train.py", "exec"), names)
    ended: tuple[int, str] = names["ended"]
    return ended


@pytest.mark.job
def test_a_job_stopped_by_the_launcher_goes_on_to_the_bits_of_one_never_stopped(launch: Start, tmp_path: Path) -> None:
    started = launch("--workers 2", TRAINS, "--slow", torch=True)
    assert started.process.stdout is not None
    while b"step 3" not in (line := started.process.stdout.readline()):
        assert line, started.finish().err
    started.interrupt(signal.SIGTERM)
    stopped = started.finish()
    assert stopped.code == 75, stopped.err
    assert "; start again to continue\n" in stopped.err
    assert "paceline: the last checkpoint is state\n" in stopped.err
    (tmp_path / "never stopped").mkdir()
    (resumed,) = run_workers(runs_alone, 1, folder=str(tmp_path))
    (whole,) = run_workers(runs_alone, 1, folder=str(tmp_path / "never stopped"))
    assert whole.value is not None, whole.traceback
    assert whole.value[0] == 32
    assert resumed.value == whole.value, resumed.traceback


# -- the rules, without processes --------------------------------------------------------------------------------------


def ended(*statuses: int, phase: Phase = Phase.IDLE) -> list[Process]:
    return [Process(rank, pid=100 + rank, step=9, phase=phase, status=status) for rank, status in enumerate(statuses)]


def test_one_worker_with_75_makes_the_job_one_that_was_stopped() -> None:
    outcome = success(ended(0, 75))
    assert outcome == Outcome(75, closing=("paceline: stopped on request after step 9; start again to continue",))


def test_a_worker_that_takes_75_in_the_middle_of_training_has_left_early() -> None:
    process, other = Process(0, pid=7, step=3, phase=Phase.TRAINING, status=75, failed_as=0), Process(1)
    assert process.left_early
    assert attribute_failure([process, other]).lines == (
        "paceline: worker 0 (pid 7) exited with code 75 at step 3 while 1 other was still training",
    )


def test_falling_by_our_signal_or_after_others_is_no_failure() -> None:
    by_signal, by_crash, after_others, own_error = ended(-signal.SIGTERM, -signal.SIGSEGV, 1, 1)
    after_others.raised = Raised("RuntimeError", "Connection closed by peer")
    own_error.raised = Raised("OSError", "no space left")
    assert [stopped_as_asked(process) for process in (by_signal, by_crash, after_others, own_error)] == [
        True,
        False,
        True,
        False,
    ]


def test_the_words_at_the_end_tell_where_and_by_what() -> None:
    request = StopRequest(signal.SIGTERM, " on host 1", grace_s=30.0, since=0.0)
    assert stopped_early(request, ended(-15)) == Outcome(143, ("paceline: stopped by SIGTERM on host 1 at step 9",))


def test_a_word_on_stopping_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(TypeError, match="stops_on_request is 'yes', neither true nor false"):
        Policy(stops_on_request="yes")  # type: ignore[arg-type]


def test_a_grace_that_is_no_time_is_refused() -> None:
    with pytest.raises(LaunchError, match="--grace-s -1; workers that are asked to stop get 0 or more seconds"):
        Job(Script("train.py"), 1, LaunchSettings(), grace_s=-1.0)
