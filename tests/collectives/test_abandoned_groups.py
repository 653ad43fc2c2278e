"""An abandoned group: every wait in it ends at once, on every backend, and the workers that are left build another."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store

from paceline.collectives import process_groups
from paceline.collectives.communicator import Communicator, wait_all
from paceline.errors import ConfigError, GenerationEnded, WorldError
from paceline.world.world import Elasticity, TcpRendezvous, World
from tests.workers import run_workers

pytestmark = pytest.mark.workers

BACKENDS = ["paceline", "gloo"]
CPU = torch.device("cpu")
LONG = timedelta(seconds=30)


def connected(world: World, backend: str, folder: str) -> tuple[Store, Communicator]:
    store = FileStore(f"{folder}/store")
    elastic = replace(world, elastic=Elasticity())
    place = PrefixStore("first", store)
    return store, Communicator.connect(elastic, place, backend=backend, device=CPU, timeout_s=30.0)


def survive(world: World, backend: str, operation: str, how: str, folder: str) -> list[float]:
    store, comm = connected(world, backend, folder)
    child = Communicator.connect(
        comm.world,
        PrefixStore("child", store),
        backend=backend,
        device=CPU,
        timeout_s=30.0,
    )
    child.counts_with(comm)
    comm.barrier()
    if world.rank == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["worker 2 may end"], LONG)  # as if it were stopped until nobody waits for it any more
        os._exit(1)
    threading.Timer(0.3, comm.abandon, ["worker 2 is gone"]).start()
    began = time.monotonic()
    tensor = torch.ones(300_000)
    with pytest.raises(GenerationEnded):
        if operation == "all_reduce":
            comm.all_reduce(tensor).wait()
        elif operation == "receive":
            comm.receive(tensor, source=2, tag=1).wait()
        else:
            child.barrier()
    waited = time.monotonic() - began
    store.set("worker 2 may end", "")
    assert comm.is_over
    with pytest.raises(GenerationEnded):
        comm.barrier()
    child.close()
    comm.close()
    left = replace(world, size=2, local_size=2, elastic=Elasticity())
    again = Communicator.connect(
        left,
        PrefixStore("second", store),
        backend=backend,
        device=CPU,
        timeout_s=30.0,
    )
    ones = torch.ones(10)
    again.all_reduce(ones).wait()
    again.close()
    return [waited, float(ones.sum())]


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("operation", ["all_reduce", "receive", "in a child"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_waits_in_an_abandoned_group_end_and_the_others_go_on(
    backend: str, operation: str, how: str, tmp_path: Path
) -> None:
    results = run_workers(survive, 3, backend=backend, operation=operation, how=how, folder=str(tmp_path))
    for result in results[:2]:
        assert result.error is None, result.traceback
        assert result.value[1] == 20.0
        assert result.value[0] < 10, "it waited for the one that was stopped"


def wait_twice(world: World, backend: str, folder: str) -> float:
    """What was received before the group ended is waited for a second time, to be sure that nothing writes any more."""
    store, comm = connected(world, backend, folder)
    tensor, never = torch.ones(1000), torch.ones(1000)
    if world.rank == 1:
        comm.send(tensor, to=0, tag=1).wait()
        store.wait(["worker 0 has waited"], LONG)
        comm.abandon("over")
        comm.close()
        return 0.0
    handles = [comm.receive(tensor, source=1, tag=1), comm.receive(never, source=1, tag=2)]
    handles[0].wait()
    threading.Timer(0.2, comm.abandon, ["over"]).start()
    began = time.monotonic()
    with pytest.raises(GenerationEnded):
        handles[1].wait()
    for handle in handles:
        with suppress(GenerationEnded):
            handle.wait()
    waited = time.monotonic() - began
    store.set("worker 0 has waited", "")
    comm.close()
    return waited


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_again_for_what_has_come_takes_no_time(backend: str, tmp_path: Path) -> None:
    results = run_workers(wait_twice, 2, backend=backend, folder=str(tmp_path))
    assert [result.error for result in results] == [None, None], results
    assert results[0].value < 1.5, "it waited for a message that it had"


def start_when_it_is_over(world: World, backend: str, folder: str) -> list[bool]:
    store, comm = connected(world, backend, folder)
    comm.barrier()
    tensor, peer = torch.ones(1000), 1 - world.rank
    under_way = comm.receive(tensor.clone(), source=peer, tag=1)
    store.set(f"worker {world.rank} receives", "")
    store.wait(["worker 0 receives", "worker 1 receives"], LONG)
    comm.abandon("over")
    started = [comm.send(tensor, to=peer, tag=2), comm.receive(tensor, source=peer, tag=3), comm.all_reduce(tensor)]
    with pytest.raises(GenerationEnded, match=r"^over$"):
        wait_all([under_way, *started])
    with pytest.raises(GenerationEnded, match=r"^over$"):
        started[-1].wait()
    ended = [work.ended() for work in (under_way, *started)]
    comm.close()
    return ended


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_started_in_a_group_that_is_over_raises_where_it_is_waited_for(backend: str, tmp_path: Path) -> None:
    results = run_workers(start_when_it_is_over, 2, backend=backend, folder=str(tmp_path))
    assert [(result.error, result.value) for result in results] == [(None, [False] * 4)] * 2, results


def wait_for_a_slow_peer(world: World, folder: str) -> list[str]:
    process_groups.REBUILD_IN_S = 1.0
    _, comm = connected(world, "gloo", folder)
    failed, first = [], world.rank == 0
    for operation in ("receive", "send", "all_reduce"):
        tensor = torch.ones(500_000)
        if not first:
            time.sleep(1.5)
        try:
            match operation:
                case "receive":
                    (comm.receive(tensor, source=1, tag=1) if first else comm.send(tensor, to=0, tag=1)).wait()
                case "send":
                    (comm.send(tensor, to=1, tag=2) if first else comm.receive(tensor, source=0, tag=2)).wait()
                case _:
                    comm.all_reduce(tensor).wait()
        except GenerationEnded as error:
            failed.append(f"{operation}: {error}")
            break
    comm.close()
    return failed


def test_a_peer_may_be_late_for_longer_than_a_group_may_take_to_be_built(tmp_path: Path) -> None:
    results = run_workers(wait_for_a_slow_peer, 2, folder=str(tmp_path))
    assert [(result.error, result.value) for result in results] == [(None, [])] * 2, results


def lose_a_peer_in_the_middle_of_a_message(world: World, operation: str, after_s: float, folder: str) -> float | None:
    """How long the survivor waited; None where the message had come as a whole before its peer stopped."""
    store, comm = connected(world, "gloo", folder)
    tensor, peer = torch.ones(40_000_000), 1 - world.rank
    receives = (world.rank == 0) == (operation == "receive")
    if world.rank == 1:
        store.set("pid", str(os.getpid()))
    comm.barrier()
    work = comm.receive(tensor, source=peer, tag=1) if receives else comm.send(tensor, to=peer, tag=1)
    if world.rank == 1:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(int(store.get("pid")), signal.SIGKILL)
    threading.Timer(0.2, comm.abandon, ["worker 1 is gone"]).start()
    began, waited = time.monotonic(), None
    try:
        work.wait()
    except GenerationEnded:
        waited = time.monotonic() - began
    comm.close()
    return waited


@pytest.mark.parametrize("operation", ["receive", "send"])
def test_a_message_of_which_half_was_there_is_waited_for_no_longer(operation: str, tmp_path: Path) -> None:
    """gloo tells nobody of its end, and would wait for its timeout."""
    for after_s in (0.02, 0.005, 0.001, 0.0):  # a worker that is woken late has sent all of it
        folder = tmp_path / str(after_s)
        folder.mkdir()
        survivor, _ = run_workers(
            lose_a_peer_in_the_middle_of_a_message,
            2,
            operation=operation,
            after_s=after_s,
            folder=str(folder),
            timeout_s=20,
        )
        assert survivor.error is None, survivor.traceback
        if survivor.value is not None:
            break
    assert survivor.value is not None, "no peer stopped in the middle of a message"
    assert survivor.value < 1.5


def come_late(world: World, backend: str, folder: str) -> float:
    process_groups.REBUILD_IN_S = 1.0
    if world.rank == 1:
        time.sleep(2.5)  # it finishes what it computes
    _, comm = connected(world, backend, folder)
    ones = torch.ones(10)
    comm.all_reduce(ones).wait()
    comm.close()
    return float(ones.sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_may_come_later_than_a_group_may_take_to_be_built(backend: str, tmp_path: Path) -> None:
    results = run_workers(come_late, 2, backend=backend, folder=str(tmp_path))
    assert [(result.error, result.value) for result in results] == [(None, 20.0)] * 2, results


def test_a_group_that_is_being_built_is_left_behind_when_its_generation_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, over, stuck = HashStore(), threading.Event(), threading.Event()
    for rank in (0, 1):
        store.set(f"paceline/here/{rank}", "")
    monkeypatch.setattr(process_groups, "_build_group", lambda *_: stuck.wait(10))
    monkeypatch.setattr(process_groups, "_is_over", lambda _: over.is_set())
    threading.Timer(0.2, over.set).start()
    world = World(size=2, local_size=2, rendezvous=TcpRendezvous("127.0.0.1", 1), elastic=Elasticity())
    began = time.monotonic()
    with pytest.raises(WorldError, match="building a group was given up"):
        process_groups.build_groups(world, store, "gloo", CPU, 30.0)
    assert time.monotonic() - began < 2
    stuck.set()


def connect_during_a_build(world: World, folder: str) -> tuple[bytes, list[int]]:
    """A thread of the user connects to a server of its own while gloo builds the group."""
    build, ends = process_groups._build_group, []

    def meanwhile() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            here = socket.create_connection(server.getsockname())
            ends.extend([here, server.accept()[0]])

    def build_meanwhile(*about: Any) -> Any:
        group = build(*about)
        user = threading.Thread(target=meanwhile)
        user.start()
        user.join()
        return group

    process_groups._build_group = build_meanwhile
    _, comm = connected(world, "gloo", folder)
    known = [len(comm._sockets._found)]
    comm.barrier()
    comm.abandon("over")
    with pytest.raises(GenerationEnded):
        comm.barrier()
    here, there = ends
    here.sendall(b"still here")
    said = there.recv(100)
    comm.close()
    for end in ends:
        end.close()
    return said, known


def test_a_connection_that_a_user_s_thread_makes_meanwhile_is_not_the_group_s(tmp_path: Path) -> None:
    results = run_workers(connect_during_a_build, 3, folder=str(tmp_path))
    assert [(result.error, result.value) for result in results] == [(None, (b"still here", [2]))] * 3, results


def test_a_gloo_that_tells_nobody_where_it_listens_is_refused_by_its_torch() -> None:
    store = HashStore()
    for rank in (0, 1):
        store.set(f"0/{rank}", "somewhere")
    with pytest.raises(ConfigError, match="does not tell where it listens"):
        process_groups.gloo_connections(store, 0, 2)


def connections_by_address(world: World, address: str, folder: str) -> int:
    _, comm = connected(replace(world, host_address=address), "gloo", folder)
    count = len(comm._sockets._found)
    comm.close()
    return count


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_gloo_s_connections_are_found_at_either_kind_of_address(address: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        pytest.skip(f"no interface here has {address}")
    results = run_workers(connections_by_address, 3, address=address, folder=str(tmp_path))
    assert [(result.error, result.value) for result in results] == [(None, 2)] * 3, results


def go_on_without_one(world: World, folder: str) -> int:
    store, comm = connected(world, "gloo", folder)
    if world.rank == 2:
        comm.close()
        return 0
    before = set(comm._sockets._found.values())
    comm.reconnect(comm.world.without({2}), PrefixStore("without 2", store))
    new = set(comm._sockets._found.values()) - before
    threading.Timer(0.2, comm.abandon, ["over"]).start()
    with pytest.raises(GenerationEnded):
        comm.receive(torch.ones(3), source=1 - comm.rank, tag=1).wait()
    comm.close()
    return len(new)


def test_a_group_that_went_on_without_a_worker_knows_its_new_connections(tmp_path: Path) -> None:
    results = run_workers(go_on_without_one, 3, folder=str(tmp_path))
    assert [(result.error, result.value) for result in results] == [(None, 1), (None, 1), (None, 0)], results


@pytest.mark.unit
def test_a_backend_that_can_not_be_had_is_a_config_error_and_no_failure_to_meet() -> None:
    with pytest.raises(ConfigError, match="moves CPU tensors only, but this worker trains on cuda"):
        process_groups.build_groups(World(), HashStore(), "paceline", torch.device("cuda"), 5.0)
