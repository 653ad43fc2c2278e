"""A wait that has timed out is told with who came and who did not, the operation, bucket and step, and late stacks."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from paceline.launch.failure_attribution import FailedWait, Phase, Process, Waits
from paceline.launch.hangs import find_hang
from paceline.world.waiting import LOOP
from tests.faults.jobs import RunningJob, started_job

VOTE = Waits(LOOP, "train.py:30", since=98.0)


def workers(count: int) -> list[Process]:
    return [Process(rank, pid=50 + rank, step=7, phase=Phase.TRAINING) for rank in range(count)]


def failed(text: str = "Timed out waiting 2000ms", doing: str = "in the vote of step 7") -> FailedWait:
    return FailedWait(VOTE, doing, 2.0, text, at=100.0)


def test_those_that_wait_have_come_and_the_others_are_late() -> None:
    processes = workers(5)
    processes[0].failed_wait = failed()
    processes[1].waits = VOTE
    processes[4].failed_wait = FailedWait(VOTE, "", 1.0, "Connection closed by peer", at=100.2)
    hang = find_hang(processes, failed(), {0, 1}, " at step 7")
    assert hang.line == (
        "paceline: hang at step 7: workers 0, 1, 4 waited 2 s in the vote of step 7 (train.py:30) for workers 2, 3, "
        "which have not come; the stacks of these:"
    )
    assert [one.rank for one in hang.late] == [one.rank for one in hang.absent] == [2, 3]


def test_what_the_error_says_of_the_operation_counts_more() -> None:
    text = "the group is broken since …: rank 0: the timeout of 3 s ended in bucket 4 of 336 float32; rank 1 is alive"
    hang = find_hang(workers(2), failed(text), {0}, " in step 7")
    assert hang.line.startswith(
        "paceline: hang in step 7: worker 0 waited 3 s in bucket 4 of 336 float32 (train.py:30)"
    )
    assert hang.line.endswith("for worker 1, which has not come; its stack:")


def test_one_that_waits_in_another_call_is_told_with_that_call() -> None:
    processes = workers(2)
    processes[1].waits = Waits("engine.barrier()", "train.py:12", since=98.0)
    hang = find_hang(processes, failed(), {0}, "")
    assert hang.line.endswith("for worker 1, which waits in engine.barrier() (train.py:12); its stack:")
    assert ([one.rank for one in hang.late], hang.absent) == ([1], ())


def test_where_all_have_come_the_network_is_to_blame() -> None:
    processes = workers(2)
    processes[1].waits = VOTE
    hang = find_hang(processes, failed(), {0, 1}, "")
    assert hang.line.endswith("and all workers have come: is the network between them broken?")
    assert hang.late == ()


def test_an_old_failure_of_a_wait_is_no_sign_that_it_has_come() -> None:
    processes = workers(2)
    processes[1].failed_wait = FailedWait(VOTE, "", 1.0, "Connection closed by peer", at=50.0)
    assert [one.rank for one in find_hang(processes, failed(), {0}, "").late] == [1]


@pytest.mark.parametrize(
    ("text", "timed_out"),
    [
        ("Timed out waiting 2000ms for send operation to complete", True),
        ("Application timeout caused pair closure", True),
        ("Operation timed out!", True),
        ("rank 2: the timeout of 2 s ended in bucket 0 of 336 float32; rank 1 is alive but has not come", True),
        ("exchanging with workers [1] took longer than 7 s", True),
        ("worker 1 did not come", True),
        ("Connection closed by peer [127.0.0.1]:4711", False),
        ("its group is over", False),
    ],
)
def test_a_timeout_is_told_from_a_broken_connection(text: str, timed_out: bool) -> None:
    assert failed(text).timed_out is timed_out


# ---- real processes ------------------------------------------------------------------------------------------

TIMEOUT_S = 3
TOLD_WITHIN_S = 2.0
"""Of the end of a wait, as docs/concepts/monitor.md promises."""
SCRIPT = f"""
import os, signal, sys, time
import torch
import paceline
how, rank = sys.argv[1], int(os.environ["PACELINE_RANK"])
engine = paceline.Engine(device="cpu", timeout_s={TIMEOUT_S}, seed=0)
came = open(f"came-{{rank}}", "a", buffering=1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
model, optimizer, loader = engine.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))

def forward_of_mine(x):
    if engine.step == 2 and rank == 1 and not os.path.exists("was here"):
        open("was here", "w").close()
        if how == "sleeps":
            time.sleep(600)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
    return model(x)

for x, y in loader:
    loss = (forward_of_mine(x) - y).square().mean()
    print(time.monotonic(), file=came)
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if how == "skips" and rank == 1:
    time.sleep(600)
print(time.monotonic(), file=came)
engine.barrier()
"""


def told_after_s(job: RunningJob) -> float:
    """From the moment that the first of those that wait came to where they wait, by the clock of the whole machine."""
    deadline = time.monotonic() + 60
    while "paceline: hang" not in job.printed() and time.monotonic() < deadline:
        time.sleep(0.01)
    told = time.monotonic()
    return told - min(float((job.folder / f"came-{rank}").read_text().split()[-1]) for rank in (0, 2))


@pytest.mark.job
@pytest.mark.parametrize(
    ("how", "flags", "code", "told"),
    [
        ("sleeps", "", 1, r"at step 3: workers 0, 2 waited 3 s in bucket 0 of \d+ float32 \(job.py:\d+\)"),
        ("sleeps", "--backend gloo", 1, r"at step 3: workers 0, 2 waited 3[.\d]* s in (the vote|the sum of bucket 0)"),
        ("sleeps", "--elastic", 0, r"in step 3: workers 0, 2 waited 3 s in bucket 0 of \d+ float32 \(job.py:\d+\)"),
        ("stops", "--backend gloo", 1, r"at step 3: workers 0, 2 waited 3[.\d]* s in (the vote|the sum of bucket 0)"),
        ("skips", "", 1, r"at step \d+: workers 0, 2 waited 3 s in .*\(job.py:\d+\)"),
    ],
    ids=["sleeps", "sleeps, gloo", "sleeps, elastic", "stops, gloo", "skips"],
)
def test_the_late_worker_is_named_with_its_stack(tmp_path: Path, how: str, flags: str, code: int, told: str) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.py").write_text(SCRIPT)
    flags = f"{flags} --heartbeat-timeout-s 20" if "--elastic" in flags else flags
    environment = {"TORCH_FR_BUFFER_SIZE": "100"}
    with started_job(folder, f"--workers 3 {flags}", how, script=folder / "job.py", environment=environment) as running:
        took_s = told_after_s(running)
        job = running.finish()
    assert job.code == code, job.text
    assert re.search(f"paceline: hang {told}.* for worker 1, which has not come; its stack:\n", job.err), job.text
    if how == "stops":
        assert re.search(r"paceline: worker 1 \(pid \d+\) does not answer: it is stopped", job.err), job.text
    else:
        sleeping = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "time.sleep" in line]
        line = f"line {sleeping[0]} in forward_of_mine" if how == "sleeps" else f"line {sleeping[1]} in <module>"
        assert re.search(rf"\[1\] Stack .*\n\[1\]   File \".*job.py\", {line}\n", job.err), job.text
    assert job.err.count("paceline: hang") == 1, job.text
    assert took_s <= TIMEOUT_S + TOLD_WITHIN_S, job.text
    assert took_s >= TIMEOUT_S or "--elastic" in flags, job.text  # whose workers go on, and come to further waits
    records = re.findall(r"worker (\d): torch's flight recorder has its last \d+ collectives, in (\S+\.json);", job.err)
    assert {rank for rank, _ in records} == ({"0", "2"} if "gloo" in flags else set()), job.text
    for _, file in records:
        assert json.loads(Path(file).read_text())["entries"]
        Path(file).unlink()
    # They are the user's to read. Which folder is the temporary one is known to the workers' parent, maybe from before.
    assert set(job.left) <= {file for _, file in records}
