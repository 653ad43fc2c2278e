"""`paceline run --servers`, workers that are lost, and processes that stay behind: real processes, few with torch."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from tests.launch.launching import Launch
from tests.workers import free_port

pytestmark = pytest.mark.job

Start = Callable[..., Launch]

# `meet(key)` waits until all workers and servers have come as far; `wait_for(key, n)` until n have.
TOGETHER = """
from paceline.world.environment import read_world
world = read_world()
def count(key, amount):
    return control.ask("store.add", timeout_s=5, keys=[key], amount=amount)["value"]
def wait_for(key, n):
    deadline = time.monotonic() + 20
    while count(key, 0) < n:
        assert time.monotonic() < deadline, key
        time.sleep(0.01)
def meet(key):
    count(key, 1)
    wait_for(key, world.size + world.servers)
"""


def test_servers_run_the_same_script_after_the_workers(launch: Start) -> None:
    finished = launch(
        "--workers 2 --servers 2 --lanes 4",
        TOGETHER
        + """
meet("here")
joint = world.joint()
print(world.name, world.size, world.servers, joint.rank, joint.size, joint.local_size, *sys.argv[1:])
if world.is_server:
    wait_for("bye", world.size)
    raise SystemExit(0)
count("bye", 1)
""",
        "--epochs 3",
    ).finish()
    assert (finished.code, finished.err) == (0, "")
    assert sorted(finished.out.splitlines()) == [
        "[0] worker 0 2 2 0 4 4 --epochs 3",
        "[1] worker 1 2 2 1 4 4 --epochs 3",
        "[server 0] server 0 2 2 2 4 4 --epochs 3",
        "[server 1] server 1 2 2 3 4 4 --epochs 3",
    ]


def test_a_server_that_dies_is_the_cause_with_what_it_held_and_where_to_resume(launch: Start) -> None:
    finished = launch(
        "--workers 2 --servers 2",
        TOGETHER
        + """
from paceline.errors import PeerLostError
control.tell("policy", survive_worker_loss=True)
if world.is_main:
    control.tell("checkpoint", folder="runs/7/step-400")
if world.is_server:
    control.tell("holds", what=f"keys {3 * world.server_index}…{3 * world.server_index + 2}")
meet("here")
if world.name == "server 1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.05 if not world.is_server else 60)
raise PeerLostError("server 1 is gone")
""",
    ).finish()
    assert finished.code == 128 + signal.SIGKILL
    first, *rest = finished.err.splitlines()
    assert re.fullmatch(
        r"paceline: server 1 \(pid \d+, holding keys 3…5\) was killed by SIGKILL \(out of memory\?\)", first
    )
    assert rest == [
        "paceline: also stopped: workers 0, 1 (PeerLostError: server 1 is gone); server 0",
        "paceline: the last checkpoint is runs/7/step-400",
    ]


def test_a_server_that_stays_behind_is_stopped_and_shows_where_it_is(launch: Start) -> None:
    finished = launch(
        "--workers 1 --servers 1",
        TOGETHER
        + """
def serve_for_ever():
    meet("here")
    time.sleep(60)
serve_for_ever() if world.is_server else meet("here")
""",
    ).finish()
    assert finished.code == 1
    lines = finished.err.splitlines()
    assert re.fullmatch(
        r"paceline: server 0 \(pid \d+\): still running 1 s after the last worker ended; stopped, with these stacks:",
        lines[0],
    )
    assert re.search(r"^\[server 0\]   File \".*script0.py\", line \d+ in serve_for_ever$", finished.err, re.MULTILINE)


LOSES_WORKER_1 = (
    TOGETHER
    + """
control.tell("policy", survive_worker_loss=True)
control.tell("phase", name="training")
control.tell("step", step=17)
meet("here")
if world.is_server:
    wait_for("bye", world.size - 1)
    control.tell("phase", name="idle")
    raise SystemExit(0)
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.8)
control.tell("phase", name="idle")
count("bye", 1)
"""
)


def test_an_asynchronous_job_goes_on_without_a_dead_worker_on_another_host(launch: Start) -> None:
    where = f"--hosts 2 --coordinator 127.0.0.1:{free_port()}"
    secret = {"PACELINE_SECRET": "a secret of this job"}
    second = launch(f"{where} --host-rank 1 --workers 2", LOSES_WORKER_1, environment=secret)
    first = launch(f"{where} --host-rank 0 --workers 1 --servers 1", LOSES_WORKER_1, environment=secret)
    one, two = first.finish(), second.finish()
    assert (one.code, two.code) == (0, 0), one.err
    assert one.err == two.err
    death = r"worker 1 \(pid \d+\) was killed by SIGKILL at step 17 \(out of memory\?\)"
    told, warned = one.err.splitlines()
    assert re.fullmatch(rf"paceline: {death}; the job goes on without it", told)
    assert re.fullmatch(rf"paceline: warning: the job ended well, but without 1 worker: {death}", warned)


STAYS_BEHIND = (
    TOGETHER
    + """
control.tell("policy", hang_timeout_s=0.6)
control.tell("step", step=7)
control.tell("phase", name="idle")
def wait_for_a_peer():
    time.sleep(60)
def save():
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        sum(range(1000))
meet("here")
if rank == 1:
    {}()
"""
)


def test_a_worker_that_hangs_after_its_peers_is_stopped_and_shows_where_it_is(launch: Start) -> None:
    finished = launch("--workers 3", STAYS_BEHIND.replace("{}", "wait_for_a_peer")).finish()
    assert finished.code == 1
    assert re.fullmatch(
        r"paceline: worker 1 \(pid \d+\) at step 7: no message, output or CPU use for 0\.6 s, and the other workers "
        "have ended; stopped, with these stacks:",
        finished.err.splitlines()[0],
    )
    assert re.search(r"^\[1\]   File \".*script0.py\", line \d+ in wait_for_a_peer$", finished.err, re.MULTILINE)


def test_a_worker_that_works_on_after_its_peers_is_left_to_it(launch: Start) -> None:
    finished = launch("--workers 3", STAYS_BEHIND.replace("{}", "save")).finish()
    assert (finished.code, finished.err) == (0, "")


TRAINS_ON_SERVERS = """
import os, signal, sys, threading
import torch
import paceline
from paceline.parameter_server.clock import parse_clock
from paceline.strategies.server import ParameterServer

clock, victim = sys.argv[1], " ".join(sys.argv[2:])
engine = paceline.Engine(strategy=ParameterServer(clock=parse_clock(clock)), device="cpu")
model = torch.nn.Linear(3000, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4000, 3000)), batch_size=1)

def die_when_a_state_is_saved():
    while not os.path.exists("saved"):
        threading.Event().wait(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

if engine.world.name == victim:
    threading.Thread(target=die_when_a_state_is_saved, daemon=True).start()
model, optimizer, data = engine.prepare(model, optimizer, data)
for (x,) in data:
    engine.backward(model(x).square().sum())
    optimizer.step()
    optimizer.zero_grad()
    if engine.stepped and engine.step == 5:
        engine.save_state("runs/mine")
        open("saved", "w").close()
"""


def test_a_server_that_is_killed_while_a_script_trains_ends_it_with_what_it_held_and_the_checkpoint(
    launch: Start,
) -> None:
    finished = launch("--workers 2 --servers 2", TRAINS_ON_SERVERS, "s=2 server 1", torch=True).finish()
    assert finished.code == 128 + signal.SIGKILL, finished.err
    cause, others, resume = finished.err.splitlines()
    held = r"keys 0, 2 \(bias … weight\)"
    assert re.fullmatch(
        rf"paceline: server 1 \(pid \d+, holding {held}\) was killed by SIGKILL \(out of memory\?\)", cause
    )
    lost = rf"PeerLostError: server 1, which held {held}, was lost \(its process has ended\); what it had learned is "
    assert re.fullmatch(rf"paceline: also stopped: workers 0, 1 \({lost}.*\); server 0 .*", others), others
    assert resume == "paceline: the last checkpoint is runs/mine"


def test_a_worker_that_is_killed_in_a_synchronous_job_is_the_one_cause(launch: Start) -> None:
    finished = launch("--workers 2 --servers 1", TRAINS_ON_SERVERS, "s=0 worker 1", torch=True).finish()
    assert finished.code == 128 + signal.SIGKILL, finished.err
    cause, _, resume = finished.err.splitlines()
    assert re.fullmatch(r"paceline: worker 1 \(pid \d+\) was killed by SIGKILL at step \d+ \(out of memory\?\)", cause)
    assert resume == "paceline: the last checkpoint is runs/mine"
