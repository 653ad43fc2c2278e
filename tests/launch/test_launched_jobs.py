"""`paceline run` from the outside: real processes, most without torch so that each takes a fraction of a second."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch.launching import QUICK, Launch, alive, wait_until, wait_until_gone
from tests.workers import free_port

pytestmark = pytest.mark.job

Start = Callable[..., Launch]

TRAINS_FOR_EVER = """
control.tell("phase", name="training")
control.tell("step", step=3)
grandchild = subprocess.Popen(["sleep", "60"])
detached = subprocess.Popen(["sleep", "60"], start_new_session=True)
print("pids", os.getpid(), grandchild.pid, detached.pid, flush=True)
time.sleep(60)
"""


def pids_printed(started: Launch, workers: int) -> list[int]:
    assert started.process.stdout is not None
    pids: list[int] = []
    for _ in range(workers):
        line = started.process.stdout.readline().decode()
        pids += map(int, re.findall(r"\d+", line.partition("pids")[2]))
    return pids


def test_torch_workers_meet_and_leave_nothing_behind(launch: Start) -> None:
    started = launch(
        "--workers 2 --lanes 4 --threads 1 --seed 7",
        """
import json, os, sys, torch, torch.distributed as dist
from paceline.world.environment import read_world
from paceline.world.control import ControlClient
from paceline.world.rendezvous_store import open_store
world = read_world()
client = ControlClient.connect(world.rendezvous.path, world.rank)
store = open_store(world, client, timeout_s=20)
dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
total = torch.ones(3) * (world.rank + 1)
dist.all_reduce(total)
dist.destroy_process_group()
dist.init_process_group("gloo")  # and once more as a foreign script does
dist.all_reduce(total)
dist.destroy_process_group()
print(json.dumps([total.tolist(), sys.argv, world.settings.lanes, torch.get_num_threads(), sys.stdin.read()]))
print("to stderr", file=sys.stderr)
os.write(1, b"caf\\xff without an end")
client.tell("progress", step=1, total=1, fields={"loss": 0.5})
""",
        "--workers 9 -m x -- --lanes",
        torch=True,
    )
    wait_until(lambda: len(started.descendants()) == 3, 20, "the fork server and two workers run")
    finished = started.finish()
    assert finished.code == 0, finished.err
    expected = '[[6.0, 6.0, 6.0], ["script0.py", "--workers", "9", "-m", "x", "--", "--lanes"], 4, 1, ""]'
    for rank in (0, 1):
        assert f"[{rank}] {expected}\n" in finished.out
        assert f"[{rank}] caf\ufffd without an end\n" in finished.out
        assert f"[{rank}] to stderr\n" in finished.err
    assert "paceline: step 1/1 · loss 0.5\n" in finished.out
    assert started.run_folders() == []


def test_a_worker_that_raises_is_named_first_with_its_step_and_traceback(launch: Start) -> None:
    finished = launch(
        "--workers 3",
        """
control.tell("step", step=3)
print("reading sample", rank, end="", flush=True)
def load():
    raise ValueError("bad sample")
if rank == 1:
    load()
time.sleep(60)
""",
    ).finish()
    assert finished.code == 1
    lines = finished.err.splitlines()
    assert re.fullmatch(r"paceline: worker 1 \(pid \d+\) raised ValueError at step 3: bad sample", lines[0])
    assert lines[1] == "Traceback (most recent call last):"
    assert not re.search("runpy|worker_main", finished.err)
    assert lines[-1] == "paceline: also stopped: workers 0, 2"
    assert "[1] reading sample 1\n" in finished.out
    assert finished.seconds < 5


def test_a_worker_killed_by_a_signal_is_the_cause_and_its_peers_are_not(launch: Start) -> None:
    started = launch(
        "--workers 3",
        """
from paceline.errors import PeerLostError
control.tell("step", step=17)
control.ask("store.add", timeout_s=5, keys=["here"], amount=1)
while control.ask("store.add", timeout_s=5, keys=["here"], amount=0)["value"] < 3:
    time.sleep(0.01)
if rank == 2:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.05)
raise PeerLostError("worker 2 left") if rank else RuntimeError("pair.cc:534] Connection closed by peer")
""",
    )
    finished = started.finish()
    assert finished.code == 128 + signal.SIGKILL
    lines = finished.err.splitlines()
    assert re.fullmatch(
        r"paceline: worker 2 \(pid \d+\) was killed by SIGKILL at step 17 \(out of memory\?\)", lines[0]
    )
    assert "worker 1 (PeerLostError: worker 2 left)" in lines[1]
    assert len(lines) == 2
    assert "[2] last words\n" in finished.out


def test_a_worker_that_exits_0_while_others_train_fails_the_job(launch: Start) -> None:
    finished = launch(
        "--workers 4",
        """
control.tell("phase", name="training")
control.tell("step", step=3)
if rank == 0:
    sys.exit(0)
time.sleep(60)
""",
    ).finish()
    assert finished.code == 1
    first = finished.err.splitlines()[0]
    assert re.fullmatch(
        r"paceline: worker 0 \(pid \d+\) exited with code 0 at step 3 while 3 others were still training", first
    )


def test_our_own_error_on_every_worker_is_one_line(launch: Start) -> None:
    finished = launch(
        "--workers 3", 'from paceline.errors import ConfigError\nraise ConfigError("7 is not divisible by 2")'
    ).finish()
    told = r"paceline: all 3 workers raised ConfigError \(script\d+\.py:\d+\): 7 is not divisible by 2\n"
    assert finished.code == 1
    assert re.fullmatch(told, finished.err), finished.err


def test_an_exit_code_of_the_scripts_own_is_said_and_the_job_exits_1(launch: Start) -> None:
    finished = launch("--workers 1", "print('no prefix'); sys.exit(5)").finish()
    assert finished.code == 1
    assert re.fullmatch(r"paceline: worker 0 \(pid \d+\) exited with code 5\n", finished.err)
    assert finished.out == "no prefix\n"


@pytest.mark.parametrize(("number", "says"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_interrupting_stops_everything(launch: Start, number: signal.Signals, says: str) -> None:
    started = launch("--workers 2", TRAINS_FOR_EVER)
    pids = pids_printed(started, 2) + started.descendants()
    started.interrupt(number)
    finished = started.finish()
    assert (finished.code, finished.err) == (128 + number, f"paceline: stopped by {says} at step 3\n")
    assert alive(pids) == []
    assert started.run_folders() == []


def test_a_second_ctrl_c_does_not_wait_for_workers_that_ignore_sigterm(launch: Start) -> None:
    started = launch("--workers 1", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAINS_FOR_EVER)
    pids = pids_printed(started, 1)
    begun = time.monotonic()
    started.interrupt(signal.SIGINT)
    time.sleep(0.1)
    started.interrupt(signal.SIGINT)
    assert started.finish().code == 130
    assert time.monotonic() - begun < 0.9
    assert alive(pids) == []


def test_no_process_and_no_folder_outlives_a_killed_supervisor_by_two_seconds(launch: Start) -> None:
    started = launch("--workers 2", TRAINS_FOR_EVER)
    pids = pids_printed(started, 2) + started.descendants()
    assert len(set(pids)) == 7  # the fork server, two workers, two children of each
    started.process.kill()
    wait_until_gone(pids, timeout_s=2)
    wait_until(lambda: not started.run_folders(), 1, "the run folder is gone")


def test_killing_the_fork_server_ends_the_job_with_its_grandchildren(launch: Start) -> None:
    started = launch("--workers 2", TRAINS_FOR_EVER)
    pids_printed(started, 2)
    (fork_server,) = psutil.Process(started.process.pid).children()
    workers = fork_server.children()
    grandchildren = [child.pid for worker in workers for child in worker.children()]
    fork_server.kill()
    finished = started.finish()
    assert finished.code == 137
    told = "was killed by SIGKILL, and all of them with it: start the job again"
    assert finished.err == f"paceline: the process that workers are forked from {told}\n"
    assert alive([worker.pid for worker in workers]) == []
    in_their_group = [pid for pid in grandchildren if pid in alive(grandchildren)]
    for pid in in_their_group:  # those that left the group on purpose had only the fork server to find them
        psutil.Process(pid).kill()
    assert len(in_their_group) <= 2


def test_one_host_opens_no_tcp_port(launch: Start) -> None:
    started = launch("--workers 2", TRAINS_FOR_EVER)
    pids_printed(started, 2)
    for pid in [started.process.pid, *started.descendants()]:
        assert psutil.Process(pid).net_connections(kind="inet") == []
    started.interrupt(signal.SIGINT)
    started.finish()


def test_fast_output_arrives_whole(launch: Start) -> None:
    finished = launch("--workers 2", "for i in range(20000): print('line', i, 'x' * 50)").finish()
    for rank in (0, 1):
        lines = [line for line in finished.out.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] line {i} {'x' * 50}" for i in range(20000)]


def test_a_module_runs_as_main(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "job.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")
    command = [*QUICK, "-m", "pkg.job", "--lanes"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"__main__ ['--lanes'] {tmp_path}\n", "")


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("nowhere.py", 2, "no script 'nowhere.py' in "),
        ("-m nowhere", 2, "no module named 'nowhere'"),
        (
            "--workers 4 --lanes 2 {me}",
            2,
            "4 workers but only 2 lanes; every worker needs at least one: use",
        ),
        ("--workers 0 {me}", 2, "--workers 0; a job has at least one"),
        ("--workers two {me}", 2, "--workers 'two' is neither a number nor auto"),
        ("--servers -1 {me}", 2, "--servers -1; a job has none (worker 0 doubles as the server) or more"),
        ("--servers 1,2 {me}", 2, "--servers '1,2' is not a number of servers, such as 2"),
        ("--servers 5000 {me}", 2, "--servers 5000, but they all run on this host, which has "),
        ("--nnodes 2 {me}", 2, "several hosts need --host-rank"),
        ("--nnodes 1:2 {me}", 2, "a changing number of hosts is not supported"),
        ("--hosts 2 --host-rank 2 --coordinator 127.0.0.1:1 --secret-file {me} {me}", 2, "--host-rank 2 of --hosts 2"),
        ("--hosts 2 --node_rank 0 {me}", 2, "several hosts need --coordinator"),
        ("--host-rank 1 {me}", 2, "several hosts need --coordinator"),
        (
            "--workers 2 --max-workers 4 {me}",
            2,
            "--max-workers 4 with --workers 2: further workers come with further hosts, which have to find this one",
        ),
        (
            "--workers 2 --max-workers 4 --servers 1 --coordinator 127.0.0.1:1 --secret-file {me} {me}",
            2,
            "no further workers can join a job with server processes",
        ),
        (
            "--workers 2 --max-workers 4 --coordinator 127.0.0.1:1 --secret-file {me} {me}",
            2,
            "--max-workers 4, but 2 lanes; every worker needs at least one: use --lanes 4 or more",
        ),
        ("--hosts 2 --node-rank 0 --master-addr 127.0.0.1 {me}", 2, "several hosts need a secret"),
        ("--hosts 2 --host-rank 0 --coordinator 127.0.0.1 --secret-file {me} {me}", 2, "is not ADDRESS:PORT"),
        (
            "--hosts 2 --host-rank 0 --coordinator 127.0.0.1:{busy} --secret-file {me} {me}",
            3,
            "port {busy} on 127.0.0.1",
        ),
        (
            "--hosts 2 --host-rank 1 --coordinator 127.0.0.1:{free} --secret-file {me} --meet-timeout-s 0.3 {me}",
            3,
            "no coordinator answered at 127.0.0.1:{free} within 0.3 s",
        ),
        (
            "--hosts 3 --host-rank 0 --coordinator 127.0.0.1:{free} --secret-file {me} --meet-timeout-s 0.3 {me}",
            3,
            "for 3 hosts, but host 1, 2 did not come",
        ),
    ],
)
def test_bad_input_is_one_clear_line(flags: str, code: int, says: str) -> None:
    with socket.socket() as busy, socket.socket() as free:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        free.bind(("127.0.0.1", 0))
        names = {"me": __file__, "busy": busy.getsockname()[1], "free": free.getsockname()[1]}
        free.close()
        done = subprocess.run(
            [*QUICK, *flags.format(**names).split()], capture_output=True, text=True, timeout=20, check=False
        )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("paceline: ")
    assert says.format(**names) in done.stderr
    assert done.stderr.count("\n") == 1


def test_neither_help_nor_the_supervisor_imports_torch() -> None:
    check = "import sys, paceline.cli.main, paceline.cli.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=20, check=False).returncode == 0


# ---- several hosts: two supervisors on loopback ------------------------------------------------------------


MEETS_THE_OTHERS = """
import base64
key = base64.b64encode(str(rank).encode()).decode()
control.ask("store.set", timeout_s=10, keys=[f"rank{rank}"], values=[key])
size = int(os.environ["PACELINE_WORLD_SIZE"])
answer = control.ask("store.get", timeout_s=10, keys=[f"rank{r}" for r in range(size)])
names = ("LOCAL_RANK", "LOCAL_SIZE", "HOST_RANK", "HOSTS", "HOST_ADDRESS", "SEED")
place = [os.environ.get(f"PACELINE_{name}") for name in names]
print("met", *[base64.b64decode(v).decode() for v in answer["values"]], "as", *place)
assert "PACELINE_SECRET" not in os.environ
control.tell("step", step=5)
"""


def test_two_hosts_with_unequal_workers_meet_by_secret(launch: Start) -> None:
    where = f"--hosts 2 --coordinator 127.0.0.1:{free_port()}"
    secret = {"PACELINE_SECRET": "a secret of this job"}
    second = launch(f"{where} --host-rank 1 --workers 2", MEETS_THE_OTHERS, environment=secret)
    first = launch(f"{where} --host-rank 0 --workers 1 --seed 3", MEETS_THE_OTHERS, environment=secret)
    one, two = first.finish(), second.finish()
    assert (one.code, one.out, one.err) == (0, "[0] met 0 1 2 as 0 1 0 2 127.0.0.1 3\n", "")
    assert (two.code, two.err) == (0, "")
    assert sorted(two.out.splitlines()) == [
        "[1] met 0 1 2 as 0 2 1 2 127.0.0.1 3",
        "[2] met 0 1 2 as 1 2 1 2 127.0.0.1 3",
    ]


def test_a_death_on_one_host_ends_both_with_the_same_words(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of this job\n")
    where = f"--hosts 2 --coordinator 127.0.0.1:{free_port()} --secret-file {tmp_path / 'secret'}"
    script = MEETS_THE_OTHERS + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    first = launch(f"{where} --host-rank 0", script)
    second = launch(f"{where} --host-rank 1", script)
    one, two = first.finish(), second.finish()
    for host in (one, two):
        assert host.code == 137
        assert re.match(r"paceline: worker 1 \(pid \d+\) was killed by SIGKILL at step 5", host.err)
    assert one.err == two.err


def test_a_wrong_secret_is_refused_on_both_sides_and_the_job_goes_on_waiting(launch: Start) -> None:
    where = f"--hosts 2 --coordinator 127.0.0.1:{free_port()}"
    first = launch(f"{where} --host-rank 0", MEETS_THE_OTHERS, environment={"PACELINE_SECRET": "right"})
    stranger = launch(f"{where} --host-rank 1", MEETS_THE_OTHERS, environment={"PACELINE_SECRET": "wrong"})
    refused = stranger.finish()
    assert refused.code == 3
    assert refused.err == (
        "paceline: the coordinator has another secret than this host; give every host the same --secret-file\n"
    )
    host = launch(f"{where} --host-rank 1", MEETS_THE_OTHERS, environment={"PACELINE_SECRET": "right"})
    one = first.finish()
    assert (one.code, host.finish().code) == (0, 0)
    assert one.err.startswith("paceline: refused a connection from 127.0.0.1: ")
    assert "right" not in one.err + refused.err


def test_workers_of_other_hosts_leave_when_the_coordinator_is_killed(launch: Start) -> None:
    where = f"--hosts 2 --coordinator 127.0.0.1:{free_port()}"
    secret = {"PACELINE_SECRET": "a secret of this job"}
    first = launch(f"{where} --host-rank 0", TRAINS_FOR_EVER, environment=secret)
    second = launch(f"{where} --host-rank 1", TRAINS_FOR_EVER, environment=secret)
    pids = pids_printed(first, 1) + pids_printed(second, 1)
    first.process.kill()
    wait_until_gone(pids, timeout_s=2)
    finished = second.finish()
    assert (finished.code, finished.err) == (
        3,
        "paceline: lost the coordinator (host 0); its own output says why\n",
    )


def test_the_fork_server_cleans_up_after_a_supervisor_that_was_killed_before_it_had_read_everything(
    tmp_path: Path,
) -> None:
    run, kept = (
        tmp_path / "run",
        tmp_path / "paceline-1-0123abcd",
    )  # only a folder of such a name is removed
    run.mkdir(mode=0o700)
    kept.mkdir(mode=0o700)
    (run / "memory").symlink_to(kept)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = [str(its.fileno()), str(os.getpid()), str(run), "json", "script", "nothing.py"]
    fork_server = subprocess.Popen(
        [sys.executable, "-m", "paceline.launch.fork_server", *told], pass_fds=[its.fileno()]
    )
    its.close()
    assert select.select([ours], [], [], 30)[0], "it never said that it is ready"
    ours.close()  # unread
    assert fork_server.wait(30) == 0
    assert not run.exists()
    assert not kept.exists()


NOTES = """
import warnings
from paceline.world import messages
messages.logger("engine").info("paceline: a note")
messages.warn("a warning")
print("the script's", flush=True)
"""


def test_with_quiet_only_what_the_script_prints_is_shown_and_errors(launch: Start) -> None:
    quiet = launch("--quiet --workers 2", NOTES).finish()
    assert (quiet.code, quiet.err) == (0, "")
    assert sorted(quiet.out.splitlines()) == ["[0] the script's", "[1] the script's"]
    failed = launch("--quiet --workers 2", NOTES + "if rank == 1: raise KeyError('boom')\ntime.sleep(60)").finish()
    assert failed.code == 1
    assert "raised KeyError: 'boom'" in failed.err
    assert "Traceback" in failed.err


def test_without_it_notes_are_shown_too_and_the_environment_may_ask_for_it(launch: Start) -> None:
    shown = launch("", NOTES).finish()
    assert shown.out == "paceline: a note\nthe script's\n"
    assert "UserWarning: a warning" in shown.err
    assert launch("", NOTES, environment={"PACELINE_QUIET": "1"}).finish().out == "the script's\n"
