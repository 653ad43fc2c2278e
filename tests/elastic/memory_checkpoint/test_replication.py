"""A state is read over TCP as it is on the host itself, and a copy on another host is whole or not there."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.load import full_tree
from paceline.elastic.memory_checkpoint import files
from paceline.elastic.memory_checkpoint.files import (
    AT_STAMP,
    HEAD_BYTES,
    LocalPart,
    MemoryCheckpoint,
    StoredState,
    state_number,
    steps_of,
)
from paceline.elastic.memory_checkpoint.replication import (
    CheckpointServer,
    RemoteCheckpoint,
    RemotePart,
    Wire,
    prove_to_server,
)
from paceline.errors import CheckpointError, GenerationEnded, PeerLostError
from paceline.world.unauthenticated import MOST_CONNECTIONS
from tests.launch.launching import wait_until

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preload"])
TOKEN = "the job's"  # the same in all processes
LOOPBACK = "127.0.0.1"


def state(step: int, elements: int = 30_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(elements, generator=generator),
        "half": torch.randn(100, 70, generator=generator).bfloat16(),
        "count": torch.tensor(step),
        "lr": 1 / (step + 1),
    }


def same(found: dict[str, Any], step: int, elements: int = 30_000) -> bool:
    expected = state(step, elements)
    tensors = all(torch.equal(found[name], expected[name]) for name in ("weight", "half", "count"))
    return tensors and found["lr"] == expected["lr"]


@dataclass
class Host:
    """A process that serves a folder, as a worker of another host would."""

    process: Any
    address: str


def serve(sender: Connection, folder: Path, slots: dict[int, int], step: int, size: int) -> None:
    """Write the state as the workers of some slots (slot: rank), then serve until the end."""
    for slot, rank in slots.items():
        MemoryCheckpoint(folder, slot).write(step, state(step), rank=rank, size=size)
    server = CheckpointServer(LOOPBACK, folder, TOKEN)
    sender.send(server.address)
    time.sleep(60)


@contextmanager
def host(folder: Path, slots: dict[int, int] | None = None, *, step: int = 0, size: int = 1) -> Iterator[Host]:
    folder.mkdir(exist_ok=True)
    receiver, sender = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=serve, args=(sender, folder, slots or {}, step, size))
    process.start()
    sender.close()
    try:
        assert receiver.poll(30), "the host did not start"
        yield Host(process, receiver.recv())
    finally:
        process.kill()
        process.join(10)
        receiver.close()


@contextmanager
def serving(folder: Path) -> Iterator[CheckpointServer]:
    server = CheckpointServer(LOOPBACK, folder, TOKEN)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connected(address: str, *, token: str = TOKEN, timeout_s: float = 20.0) -> Iterator[RemoteCheckpoint]:
    remote = RemoteCheckpoint(address, token, name="host 1", timeout_s=timeout_s)
    try:
        yield remote
    finally:
        remote.close()


def state_of(folder: Path, step: int, slots: list[int], remote: RemoteCheckpoint) -> StoredState:
    """What these slots made together: from this host where it has it, else from the other."""
    here = [slot for slot in slots if step in steps_of(folder, slot)]
    return StoredState(
        folder, step, {n: LocalPart(folder, n, step) if n in here else RemotePart(remote, n, step) for n in slots}
    )


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.workers
def test_a_state_is_put_together_from_this_host_and_from_another(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for slot in (0, 1):
        MemoryCheckpoint(here, slot).write(5, state(5), rank=slot, size=4)
    with host(tmp_path / "there", {2: 2, 3: 3}, step=5, size=4) as other, connected(other.address) as remote:
        tree = state_of(here, 5, [0, 1, 2, 3], remote).tree
        assert same(full_tree(tree), 5)
        expected = state(5)["weight"]
        for low, high in ((0, 1), (7000, 8000), (7490, 22_600), (29_999, 30_000)):
            assert torch.equal(tree["weight"].part(low, high), expected[low:high])


def test_only_the_bytes_that_are_asked_for_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryCheckpoint(tmp_path, 0).write(1, state(1, 10**6), rank=0, size=1)
    with serving(tmp_path) as server, connected(server.address) as remote:
        tree = state_of(tmp_path / "nothing", 1, [0], remote).tree
        asked: list[int] = []
        original = RemoteCheckpoint.read_into

        def counted(self: RemoteCheckpoint, slot: int, step: int, offset: int, room: memoryview) -> None:
            asked.append(len(room))
            original(self, slot, step, offset, room)

        monkeypatch.setattr(RemoteCheckpoint, "read_into", counted)
        assert torch.equal(tree["weight"].part(500_000, 500_010), state(1, 10**6)["weight"][500_000:500_010])
        assert asked == [40]


@pytest.mark.workers
def test_a_slot_or_step_that_is_not_there_is_told_by_the_host_that_was_asked(tmp_path: Path) -> None:
    with host(tmp_path / "there", {2: 0}, step=state_number(5)) as other, connected(other.address) as remote:
        assert (remote.steps_of(2), remote.steps_of(7)) == ([state_number(5)], [])
        expected = r"host 1 \(127.0.0.1:\d+\): worker 2's part of the state of step 6 is not in this host's in-memory"
        with pytest.raises(CheckpointError, match=expected):
            remote.about(2, state_number(6))


def test_a_state_that_was_written_over_is_an_error_and_the_connection_goes_on(tmp_path: Path) -> None:
    one = MemoryCheckpoint(tmp_path, 0)
    one.write(state_number(1), state(1), rank=0, size=1)
    with serving(tmp_path) as server, connected(server.address) as remote:
        weight = state_of(tmp_path / "nothing", state_number(1), [0], remote).tree["weight"]
        for step in (2, 3):
            one.write(state_number(step), state(step), rank=0, size=1)
        with pytest.raises(
            CheckpointError, match="worker 0's part of the state of step 1 is not in this host's in-memory checkpoint"
        ):
            weight.full_tensor()
        assert same(full_tree(state_of(tmp_path / "nothing", state_number(3), [0], remote).tree), 3)


# -- a server that dies ------------------------------------------------------------------------------------------------


@pytest.mark.workers
def test_a_reader_whose_server_dies_is_told_who(tmp_path: Path) -> None:
    with host(tmp_path / "there", {2: 0}, step=state_number(5)) as other, connected(other.address) as remote:
        tree = state_of(tmp_path, state_number(5), [2], remote).tree
        other.process.kill()
        other.process.join(10)
        expected = (
            r"in-memory checkpoint of host 1 at 127.0.0.1:\d+ is lost \(.*\), while reading worker 2's part of step 5"
        )
        with pytest.raises(GenerationEnded, match=expected):
            tree["weight"].full_tensor()


@pytest.mark.workers
def test_another_worker_of_the_host_stands_in_for_a_server_that_died(tmp_path: Path) -> None:
    there = tmp_path / "there"
    with host(there, {2: 0}, step=5) as first, host(there) as second:
        first.process.kill()
        first.process.join(10)
        with connected(second.address) as alive:
            assert same(full_tree(state_of(tmp_path, 5, [2], alive).tree), 5)


def test_a_server_that_is_silent_is_lost_in_time() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        address = f"{LOOPBACK}:{silent.getsockname()[1]}"
        with connected(address, timeout_s=0.2) as remote, pytest.raises(PeerLostError, match=r"said nothing for 0.2 s"):
            remote.steps_of(0)


def test_waits_of_a_reader_that_gives_up_end_at_once() -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as silent,
        connected(f"{LOOPBACK}:{silent.getsockname()[1]}", timeout_s=60) as remote,
    ):
        gives_up = threading.Timer(0.1, remote.abandon, ["the workers have changed"])
        gives_up.start()
        with pytest.raises(PeerLostError, match="the connection ended"):
            remote.steps_of(0)
        with pytest.raises(PeerLostError, match="it was given up"):
            remote.steps_of(0)
        gives_up.join(10)


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_a_reader_and_a_server_of_two_jobs_refuse_each_other(tmp_path: Path) -> None:
    expected = "does not know this job's token: another job's server"
    with (
        serving(tmp_path) as server,
        connected(server.address, token="another") as remote,
        pytest.raises(PeerLostError, match=expected),
    ):
        remote.steps_of(0)


def test_who_does_not_know_the_token_gets_nothing(tmp_path: Path) -> None:
    MemoryCheckpoint(tmp_path, 0).write(1, state(1), rank=0, size=1)
    with serving(tmp_path) as server, socket.create_connection((LOOPBACK, int(server.address[10:])), 5) as stranger:
        stranger.sendall(bytes(16))
        assert len(stranger.recv(100)) == 48
        stranger.sendall(bytes(32) + b'\x1a\x00\x00\x00{"do": "steps", "slot": 0}')
        with suppress(ConnectionResetError):  # it hung up before it read the rest
            assert stranger.recv(100) == b""


def test_a_slot_that_is_no_number_ends_the_connection(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        connected(server.address) as remote,
        pytest.raises(PeerLostError, match="the connection ended"),
    ):
        remote.steps_of("../secret")  # type: ignore[arg-type]


def test_a_crowd_of_strangers_is_held_to_its_number_and_a_reader_gets_through(tmp_path: Path) -> None:
    MemoryCheckpoint(tmp_path, 0).write(1, state(1), rank=0, size=1)
    before = threading.active_count()
    with serving(tmp_path) as server, ExitStack() as crowd:
        for _ in range(2 * MOST_CONNECTIONS):
            crowd.enter_context(socket.create_connection(place_of(server), timeout=10))
        with connected(server.address) as remote:
            assert remote.steps_of(0) == [1]
        wait_until(lambda: threading.active_count() - before <= MOST_CONNECTIONS + 2, 10, "the crowd is held")
        assert len(server._strangers) <= MOST_CONNECTIONS


def test_a_stranger_that_trickles_is_dropped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.elastic.memory_checkpoint.replication.unauthenticated.PROOF_S", 0.3)
    with serving(tmp_path) as server, socket.create_connection(place_of(server), timeout=10) as stranger:
        for _ in range(15):  # one less than a nonce
            stranger.sendall(b"x")
            time.sleep(0.04)
            if not server._open:
                break
        assert server._open == set()
        assert server._strangers == {}


def test_a_reader_that_is_crowded_out_before_its_proof_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def crowded_out(wire: Wire, token: str) -> None:
        tries.append(1)
        if len(tries) < 3:
            wire.connection.shutdown(socket.SHUT_RDWR)
        prove_to_server(wire, token)

    monkeypatch.setattr("paceline.elastic.memory_checkpoint.replication.prove_to_server", crowded_out)
    with serving(tmp_path) as server, connected(server.address) as remote:
        assert remote.steps_of(0) == []
    assert len(tries) == 3


NESTED = b"[" * 20_000 + b"]" * 20_000


@pytest.mark.parametrize(
    "said",
    [
        NESTED,
        b'{"do": ' + NESTED + b"}",
        b"7",
        b"\xff",
        b"{}",
        b'{"do": []}',
        b'{"do": "keep", "slot": 0, "step": 1, "bytes": ' + b"9" * 400 + b"}",
        b'{"do": "keep", "slot": 0, "step": 1, "bytes": 8}',
        b'{"do": "part", "slot": 1e999}',
    ],
    ids=lambda said: str(said[:40]),
)
def test_a_request_that_makes_no_sense_ends_the_connection_and_nothing_else(tmp_path: Path, said: bytes) -> None:
    """A traceback of a thread would be a warning here, and an error."""
    with serving(tmp_path) as server:
        with connected(server.address) as remote:
            assert remote.steps_of(0) == []
            assert remote._connection is not None
            remote._connection.sendall(len(said).to_bytes(4, "little") + said + bytes(64))
            with suppress(ConnectionError):
                while remote._connection.recv(4096):
                    pass
        with connected(server.address) as remote:
            assert remote.steps_of(0) == []


def place_of(server: CheckpointServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.workers
def test_a_copy_on_another_host_survives_the_loss_of_this_one(tmp_path: Path) -> None:
    lost, there = tmp_path / "lost", tmp_path / "there"
    lost.mkdir()
    with host(there, {1: 1}, step=3, size=2) as other, connected(other.address) as remote:
        one = MemoryCheckpoint(lost, 0)
        for step in range(4):
            one.write(step, state(step), rank=0, size=2)
            remote.keep(one.slot, step, one.memory(step))
            assert remote.steps_of(0) == [step for step in (step - 1, step) if step >= 0]
        assert same(full_tree(state_of(tmp_path, 3, [0, 1], remote).tree), 3)
    assert same(full_tree(files.read(there, 3, [0, 1]).tree), 3)
    assert sorted(path.name for path in there.iterdir()) == ["slot-0-0", "slot-0-1", "slot-1-0"]


def test_a_copy_of_another_layout_replaces_the_old_ones_in_turn(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with serving(tmp_path / "there") as server, connected(server.address) as remote:
        one = MemoryCheckpoint(tmp_path, 0)
        for step, elements in enumerate((90_000, 90_000, 500, 500)):
            one.write(step, state(step, elements), rank=0, size=1)
            remote.keep(one.slot, step, one.memory(step))
            assert same(full_tree(files.read(tmp_path / "there", step, [0]).tree), step, elements)
        assert max(path.stat().st_size for path in (tmp_path / "there").iterdir()) < 60_000


def test_a_push_that_ends_midway_leaves_the_copy_before_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    one = MemoryCheckpoint(tmp_path, 0)
    with serving(tmp_path / "there") as server:
        for step in (1, 2):
            one.write(step, state(step), rank=0, size=1)
            with connected(server.address) as remote:
                remote.keep(one.slot, step, one.memory(step))
        one.write(3, state(3), rank=0, size=1)
        memory = one.memory(3)
        for sent in (0, 10, HEAD_BYTES, HEAD_BYTES + 5000, len(memory) - 1, len(memory)):
            with connected(server.address) as remote:
                ends_after(remote, memory, sent)
            assert steps_of(tmp_path / "there", 0)[-1] == 2
            assert same(full_tree(files.read(tmp_path / "there", 2, [0]).tree), 2)
        with connected(server.address) as remote:
            remote.keep(one.slot, 3, one.memory(3))
        assert steps_of(tmp_path / "there", 0) == [2, 3]


def ends_after(remote: RemoteCheckpoint, memory: memoryview, sent: int) -> None:
    """Send so many bytes of a file, then leave."""
    request = {"do": "keep", "slot": 0, "step": 3, "bytes": len(memory)}
    remote._asked(request, lambda wire, _: wire.send(memory[:sent]))


def test_a_file_that_changes_while_it_is_sent_gives_no_copy(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    one = MemoryCheckpoint(tmp_path, 0)
    one.write(1, state(1), rank=0, size=1)
    memory = memoryview(bytearray(one.memory(1)))
    with serving(tmp_path / "there") as server, connected(server.address) as remote:
        head = memory[:HEAD_BYTES].cast("q")

        def changes(wire: Any, _: Any) -> None:
            wire.send(memory)
            head[AT_STAMP] = 0
            wire.say({"whole": head[AT_STAMP] == 2})
            remote._refuse_error(wire.hear())

        with pytest.raises(CheckpointError, match=r"worker 0's part of .* was written over while it was copied"):
            remote._asked({"do": "keep", "slot": 0, "step": 1, "bytes": len(memory)}, changes)
        assert remote.steps_of(0) == []


def pushes_for_ever(folder: Path, address: str, first: int) -> None:
    one, step = MemoryCheckpoint(folder, 0), first
    with connected(address) as remote:
        while True:
            one.write(step, state(step), rank=0, size=1)
            remote.keep(one.slot, step, one.memory(step))
            step += 1


@pytest.mark.workers
def test_a_worker_that_is_killed_while_it_pushes_leaves_whole_copies(tmp_path: Path) -> None:
    mine, there = tmp_path / "mine", tmp_path / "there"
    mine.mkdir()
    there.mkdir()
    newest = -1
    with serving(there) as server:
        for kill in range(8):
            worker = FORKED.Process(target=pushes_for_ever, args=(mine, server.address, newest + 1))
            worker.start()
            deadline = time.monotonic() + 20
            while steps_of(there, 0)[-1:] in ([], [newest]) and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(0.0007 * kill)
            worker.kill()
            worker.join(10)
            steps = steps_of(there, 0)
            assert steps[-1:] > [newest], f"kill {kill}"
            for step in steps:
                with suppress(CheckpointError):  # the server may still be at the push after it
                    assert same(full_tree(files.read(there, step, [0]).tree), step), f"kill {kill}: step {step}"
            newest = steps[-1]


# -- nothing is left ---------------------------------------------------------------------------------------------------


def test_a_closed_server_leaves_no_thread_and_no_port(tmp_path: Path) -> None:
    before = threading.active_count()
    server = CheckpointServer(LOOPBACK, tmp_path, TOKEN)
    with connected(server.address) as remote, connected(server.address) as idle:
        assert (remote.steps_of(0), idle.steps_of(0)) == ([], [])
        server.close()
        assert threading.active_count() == before
        with pytest.raises(PeerLostError, match="Connection refused"):
            remote.steps_of(0)


def test_a_connection_that_the_server_let_go_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.elastic.memory_checkpoint.replication.IDLE_S", 0.01)
    MemoryCheckpoint(tmp_path, 0).write(1, state(1), rank=0, size=1)
    with serving(tmp_path) as server, connected(server.address) as remote:
        for _ in range(3):
            assert remote.steps_of(0) == [1]
            time.sleep(0.05)
