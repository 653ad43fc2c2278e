"""The store that torch meets through, over a real control channel inside this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from paceline.errors import WorldError
from paceline.launch.control import ControlServer
from paceline.launch.coordinator import Coordinator
from paceline.launch.exit_rules import Policy
from paceline.launch.failure_attribution import Phase
from paceline.launch.rendezvous import HostAssignment
from paceline.world.control import ControlClient, NoSupervisor
from paceline.world.rendezvous_store import ControlStore, StoreTimeoutError, open_store
from paceline.world.terminal import ProgressLine
from paceline.world.world import ControlSocket, LaunchSettings, TcpRendezvous, World


class Channel:
    """A coordinator of three workers on a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.progress: list[ProgressLine] = []
        self.complaints: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(5)
        self._clients: list[ControlClient] = []

    def client(self, rank: int) -> ControlClient:
        self._clients.append(ControlClient.connect(self.path, rank))
        return self._clients[-1]

    def store(self, rank: int, timeout_s: float = 5.0) -> ControlStore:
        return ControlStore(self.client(rank), timeout_s)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(5)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        assignment = HostAssignment(0, 1, 0, 3, 3, LaunchSettings(), "127.0.0.1", "127.0.0.1", 1)
        self.coordinator = Coordinator(assignment, {}, self.progress.append, self.complaints.append)
        server = ControlServer(Path(self.path), self.coordinator, self.complaints.append)
        await server.start()
        self._ready.set()
        await self._end.wait()
        await server.close()
        await self.coordinator.close()


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    opened = Channel(tmp_path / "control.sock")
    yield opened
    opened.close()


def test_it_behaves_as_a_tcp_store_does(channel: Channel) -> None:
    """Every operation, by torch's own PrefixStore in C++, gives what the same call on a TCPStore gives."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        theirs = dist.TCPStore("127.0.0.1", port, None, True, master_listen_fd=listener.detach())
    ours = channel.store(0)
    results = []
    for store in (dist.PrefixStore("p", ours), dist.PrefixStore("p", theirs)):
        store.set("bytes", b"\x00\xff")
        store.append("log", b"a")
        store.append("log", b"b")
        store.multi_set(["x", "y"], [b"1", b"2"])
        before = ours.num_keys()
        results.append([
            store.get("bytes"), store.get("log"), store.multi_get(["x", "y"]),
            store.add("count", 2), store.add("count", -5), store.get("count"),
            store.check(["x", "y"]), store.check(["x", "nowhere"]),
            store.compare_set("x", b"1", b"new"), store.compare_set("x", b"1", b"newer"),
            store.compare_set("absent", b"something", b"new"), store.compare_set("fresh", b"", b"new"),
            store.delete_key("x"), store.delete_key("x"), store.has_extended_api(),
            store.wait(["y"], timedelta(seconds=1)), before >= 4,
        ])  # fmt: skip
    assert results[0] == results[1]


def test_get_waits_for_a_key_that_comes_later_without_holding_up_other_threads(channel: Channel) -> None:
    reader, writer = channel.store(0), channel.store(1)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(reader.get("later")))
    waiting.start()
    assert reader.add("meanwhile", 1) == 1  # the same connection goes on answering
    writer.set("later", b"here")
    waiting.join(5)
    assert got == [b"here"]


def test_a_key_that_never_comes_is_named_with_who_is_connected(channel: Channel) -> None:
    store = channel.store(0, timeout_s=0.1)
    channel.client(2)
    wait = "waited 0.1 s for key 'p/nobody', which no worker has set; connected so far: workers 0, 2; missing: worker 1"
    time.sleep(0.05)
    with pytest.raises(StoreTimeoutError, match=wait):
        dist.PrefixStore("p", store).get("nobody")
    with pytest.raises(dist.DistStoreError, match=r"waited 0\.05 s for key 'nobody'"):
        store.wait(["nobody"], timedelta(seconds=0.05))


def test_gloo_groups_are_built_from_it(channel: Channel) -> None:
    sums: dict[int, list[float]] = {}

    def work(rank: int) -> None:
        store = channel.store(rank)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=10)
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 3, options)
        tensor = torch.ones(2) * (rank + 1)
        group.allreduce([tensor]).wait()
        sums[rank] = tensor.tolist()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sums == {rank: [6.0, 6.0] for rank in range(3)}


def test_what_workers_tell_is_remembered(channel: Channel) -> None:
    client = channel.client(1)
    client.tell("phase", name="training")
    client.tell("step", step=17)
    client.tell("progress", step=17, total=20, fields={"loss": 2.5})
    client.tell("policy", survive_worker_loss=True)
    client.tell("policy", hang_timeout_s=30.0)
    client.tell("holds", what="keys 4…7")
    client.ask("store.check", timeout_s=5, keys=[])  # answered after all that was told before
    worker = channel.coordinator.processes[1]
    assert (worker.step, worker.phase, worker.holds) == (17, Phase.TRAINING, "keys 4…7")
    assert channel.coordinator.policy == Policy(survive_worker_loss=True, hang_timeout_s=30.0)
    assert channel.progress == [ProgressLine(17, 20, {"loss": 2.5})]


def test_words_that_make_no_sense_are_complained_about_and_the_worker_lives_on(channel: Channel) -> None:
    client = channel.client(1)
    client.tell("phase", name="sleeping")
    client.tell("weather", rain=True)
    client.tell("policy", survive_worker_loss="yes")
    client.tell("policy", hang_timeout_s=-1)
    with pytest.raises(WorldError, match=r"'store\.get' is malformed: KeyError"):
        client.ask("store.get", timeout_s=5)
    assert [line.partition(":")[2] for line in channel.complaints] == [
        " worker 1 sent a malformed message 'phase': 'sleeping' is not a valid Phase",
        " worker 1 sent a malformed message 'weather': unknown message kind; use one version of paceline on all hosts",
        " worker 1 sent a malformed message 'policy': survive_worker_loss is 'yes', neither true nor false",
        " worker 1 sent a malformed message 'policy': hang_timeout_s is -1, not a number of seconds",
    ]


def test_a_question_nobody_knows_is_refused_in_words(channel: Channel) -> None:
    with pytest.raises(WorldError, match="no answer to 'weather'; worker and supervisor are of different versions"):
        channel.client(0).ask("weather", timeout_s=5, keys=[])


def test_a_supervisor_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"rank 3: no supervisor answers at .*nowhere\.sock"):
        ControlClient.connect(str(tmp_path / "nowhere.sock"), 3)


def test_a_store_is_opened_for_every_kind_of_world(channel: Channel) -> None:
    alone = open_store(World(), NoSupervisor(), 5)
    alone.set("a", b"1")
    assert alone.get("a") == b"1"
    control = World(rank=0, size=2, local_size=2, rendezvous=ControlSocket(channel.path))
    assert isinstance(open_store(control, channel.client(0), 5), ControlStore)
    with pytest.raises(WorldError, match="needs its ControlClient"):
        open_store(control, NoSupervisor(), 5)


def test_rank_0_serves_a_tcp_store_on_loopback_only() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = World(rank=0, size=2, local_size=2, rendezvous=TcpRendezvous("127.0.0.1", port))
    store = open_store(world, NoSupervisor(), 5)
    store.set("a", b"1")
    host = World(rank=1, size=2, local_rank=1, local_size=2, rendezvous=TcpRendezvous("127.0.0.1", port))
    assert open_store(host, NoSupervisor(), 5).get("a") == b"1"
    listening = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    assert open_store(world, NoSupervisor(), 5) is store  # by another Engine of this process


def test_rank_0_says_when_the_port_of_its_store_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        world = World(rank=0, size=2, local_size=2, rendezvous=TcpRendezvous("127.0.0.1", port))
        with pytest.raises(WorldError, match=f"port {port} on 127.0.0.1 is in use"):
            open_store(world, NoSupervisor(), 5)


def test_a_tcp_store_that_nobody_serves_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = World(rank=1, size=2, local_rank=1, local_size=2, rendezvous=TcpRendezvous("127.0.0.1", port))
    with pytest.raises(WorldError, match=f"rank 1: no store answers at 127.0.0.1:{port} within 0.3 s"):
        open_store(host, NoSupervisor(), 0.3)
