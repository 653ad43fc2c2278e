"""Two hosts that share nothing but a network: namespaces joined by a veth pair, one `paceline run` in each.

In an elastic job the link between them is cut and restored, or one of them is killed with all that runs on it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from paceline.elastic.decisions import Commit
from paceline.elastic.step_log import read_step_log
from paceline.launch.folders import RUN, SHARED_MEMORY, sweep
from tests.faults.elastic_jobs import STEPS, hash_undisturbed

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 to make network namespaces"
    ),
]

SCRIPT = """
import torch, paceline
engine = paceline.Engine()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, loader = engine.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for x, y in loader:
    engine.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
engine.print("weights", engine.weights_hash(), "on", engine.world.hosts, "hosts")
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, with loopback up."""
    names = (f"paceline-a{os.getpid()}", f"paceline-b{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "pl0", "netns", names[0], "type", "veth", "peer", "name", "pl0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "pl0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "pl0", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def test_two_hosts_train_to_the_bits_of_one(hosts: tuple[str, str], tmp_path: Path) -> None:
    script, secret = tmp_path / "train.py", tmp_path / "secret"
    script.write_text(SCRIPT)
    secret.write_text("known to both hosts")
    paceline = [sys.executable, "-c", "from paceline.cli.main import main; main()"]
    job = ["run", "--workers", "1", "--lanes", "2", "--hosts", "2", "--coordinator", "10.77.0.1:29650"]
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *paceline, *job, "--host-rank", str(rank), "--secret-file", secret, script],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=60)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    alone = subprocess.run(
        [*paceline, "run", "--lanes", "2", str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    (expected,) = [line.split()[1] for line in alone.stdout.splitlines() if line.startswith("weights")]
    assert f"weights {expected} on 2 hosts" in said[0]


# -- elastic jobs ------------------------------------------------------------------------------------------------------

HEARTBEAT_S = 2.0
TRAINING = Path(__file__).parents[1] / "faults" / "training.py"


@dataclass
class Host:
    """One `paceline run` and all that it has started, in a folder of its own."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def said(self) -> str:
        return (self.folder / "said.txt").read_text()

    @property
    def committed(self) -> list[Commit]:
        ledger = self.folder / "ledger.jsonl"
        return read_step_log(ledger) if ledger.exists() else []

    @property
    def hashes(self) -> set[str]:
        return {file.read_text() for file in (self.folder / "hashes").glob("*")}

    def processes(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> float:
        """How long it took."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() < begun + timeout_s, f"waited in vain until {what}:\n{self.said}"
            time.sleep(0.01)
        return time.monotonic() - begun

    def ends(self, timeout_s: float = 15.0) -> int:
        return self.process.wait(timeout_s)


class ElasticJob:
    """Two workers on each host. Nothing of it outlives the block, nor a host's kill."""

    def __init__(self, hosts: tuple[str, str], folder: Path, strategy: str, arguments: str) -> None:
        self._hosts, self._folder = hosts, folder
        (folder / "secret").write_text("known to both hosts")
        meeting = f"--hosts 2 --coordinator 10.77.0.1:29651 --secret-file {folder / 'secret'}"
        elastic = f"--elastic --heartbeat-timeout-s {HEARTBEAT_S} --ledger ledger.jsonl"
        self._flags = f"--workers 2 --lanes 8 --strategy {strategy} {meeting} {elastic}".split()
        self._script = [str(TRAINING), "--run-dir", str(folder / "run"), *arguments.split()]
        self._running: list[Host] = []

    def __enter__(self) -> ElasticJob:
        return self

    def start(self, rank: int) -> Host:
        """The same command whenever it is given."""
        own = self._folder / f"host-{rank}-{len(self._running)}"
        own.mkdir()
        paceline = [sys.executable, "-c", "from paceline.cli.main import main; main()"]
        command = ["ip", "netns", "exec", self._hosts[rank], *paceline, "run", "--host-rank", str(rank), *self._flags]
        with (own / "said.txt").open("wb") as said:
            process = subprocess.Popen([*command, *self._script], cwd=own, stdout=said, stderr=said)
        self._running.append(Host(process, own))
        return self._running[-1]

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            kill_all(one)
            one.process.wait(10)
        sweep()  # as the next elastic job on that host does


def kill_all(host: Host) -> None:
    """The whole host, as if its power had gone."""
    for process in [*host.processes(), host.process]:
        process.send_signal(signal.SIGKILL)


def folders_of(host: Host) -> list[Path]:
    """In memory and on disk; the supervisor is what `ip netns exec` became."""
    folders = list(SHARED_MEMORY.glob(f"paceline-{host.process.pid}-*"))
    return [*folders, *((kept / RUN).readlink() for kept in folders)]


def next_commit_after(host: Host, act: Callable[[], None]) -> float:
    """Seconds from an act to the next commit of the workers that are left."""
    host.wait_until(lambda: len(host.committed) >= 2, "two steps are done", 30.0)
    act()
    everyone = host.committed[0].members
    return host.wait_until(lambda: host.committed[-1].members != everyone, "the others go on")


def check_unharmed(host: Host, at_last: tuple[int, ...]) -> None:
    assert host.ends() == 0, host.said
    assert host.hashes == {hash_undisturbed()}, host.said
    assert [row.step for row in host.committed] == STEPS, host.committed
    assert host.committed[-1].members == at_last


def pull_the_plug(hosts: tuple[str, str]) -> None:
    """Both sides see that the link is down."""
    ip("-n", hosts[0], "link", "set", "pl0", "down")


def lose_packets(hosts: tuple[str, str]) -> None:
    """All that is sent is gone, and nobody is told."""
    for host, other in ((hosts[0], "10.77.0.2"), (hosts[1], "10.77.0.1")):
        send_nowhere(host, other)


def send_nowhere(host: str, other: str) -> None:
    ip("-n", host, "neigh", "replace", other, "lladdr", "02:00:00:00:00:99", "dev", "pl0", "nud", "permanent")


def restore(hosts: tuple[str, str]) -> None:
    ip("-n", hosts[0], "link", "set", "pl0", "up")
    for host in hosts:
        ip("-n", host, "neigh", "flush", "all", "nud", "permanent")


@pytest.mark.parametrize(("strategy", "cut"), [("ddp", pull_the_plug), ("zero2", lose_packets)])
def test_a_cut_link_leaves_the_coordinators_side_to_go_on_and_the_other_may_come_back(
    hosts: tuple[str, str], tmp_path: Path, strategy: str, cut: Callable[[tuple[str, str]], None]
) -> None:
    with ElasticJob(hosts, tmp_path, strategy, "--step-s 0.4 --await-joiner who") as job:
        near, far = job.start(0), job.start(1)
        passed_s = next_commit_after(near, lambda: cut(hosts))
        print(f"{strategy}: {passed_s:.2f} s from the cut to the next commit")
        workers = far.processes()
        assert far.ends(HEARTBEAT_S + 4.0) == 3, far.said
        assert not [process for process in workers if process.is_running()]
        restore(hosts)
        back = job.start(1)
        near.wait_until(lambda: len([*back.folder.glob("stands-*-1")]) == 2, "its workers stand at the loop", 30.0)
        for host in (near, back):
            (host.folder / "stands-who").touch()
        check_unharmed(near, at_last=(0, 1, 2, 3))
        assert (back.ends(), back.hashes) == (0, {hash_undisturbed()}), back.said
    assert f"host 1 is lost (no message came from it for {HEARTBEAT_S:g} s); 2 workers go on" in near.said
    assert "host 1 is back; its 2 workers join after a step" in near.said
    assert "lost the coordinator (host 0): no message came from it" in far.said
    assert not far.committed
    assert not far.hashes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_host_that_is_killed_whole_is_done_without(hosts: tuple[str, str], tmp_path: Path, strategy: str) -> None:
    with ElasticJob(hosts, tmp_path, strategy, "--step-s 0.1") as job:
        near, far = job.start(0), job.start(1)
        passed_s = next_commit_after(near, lambda: kill_all(far))
        print(f"{strategy}: {passed_s:.2f} s from the kill to the next commit")
        left = folders_of(far)
        check_unharmed(near, at_last=(0, 1))
    assert len(left) == 2
    assert [folder for folder in left if folder.exists()] == []
    # Its supervisor may have had the time to say that its fork server was killed.
    assert re.search(r"host 1 is lost \(.*\); 2 workers go on", near.said)
