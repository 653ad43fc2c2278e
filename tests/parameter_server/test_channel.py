"""Channels: what is sent arrives in order, what lies in shared memory is not sent, and every wait ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from paceline import World
from paceline.collectives.communicator import Communicator
from paceline.errors import PeerLostError
from paceline.parameter_server.channel import BufferPool, GroupChannel, keepalive_s, local_channels
from paceline.parameter_server.wire import FIELDS, Header, Kind, WireError
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.workers import run_workers

HEADER_BYTES = 8 * FIELDS


def header(kind: Kind = Kind.PUSH, sender: int = 0, **fields: Any) -> Header:
    return Header(kind, sender, digest=7, **fields)


class Meeting:
    """Two ranks with a channel to each other."""

    def __init__(self, world: World, backend: str, timeout_s: float = 20.0, **options: Any) -> None:
        self.store = open_store(world, NoSupervisor(), timeout_s)  # kept: what is built on it needs it
        place = PrefixStore("test", self.store)
        device = torch.device("cpu")
        self.comm = Communicator.connect(world, place, backend=backend, device=device, timeout_s=timeout_s)
        peer = 1 - world.rank
        options = {"check": lambda header: None, **options}
        self.channel = GroupChannel(self.comm, peer, named=peer, outgoing=(0, 1), incoming=(0, 1), **options)


def read_ahead(world: World, *, messages: int) -> tuple[list[float], bool]:
    """Worker 1 hears all messages, the last with a payload too, and then the group is closed under what was posted."""
    meeting = Meeting(world, "gloo", last=lambda about: about.kind is Kind.BYE)
    payloads = [torch.full((50_000,), float(number)) for number in range(messages)]
    heard: list[float] = []
    if world.rank == 0:
        for payload in payloads:
            kind = Kind.BYE if payload is payloads[-1] else Kind.PUSH
            meeting.channel.send(header(kind).holding(payload), payload)
    else:
        for _ in payloads:
            _, payload = meeting.channel.receive()
            assert payload is not None
            heard += [float(payload.min()), float(payload.max())]
    meeting.comm.barrier()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("paceline-reads-ahead")]
    for thread in threads:
        thread.join(10)
    meeting.comm.close()
    return heard, any(thread.is_alive() for thread in threads)


@pytest.mark.workers
@pytest.mark.parametrize("messages", [1, 3, 40])
def test_what_is_read_ahead_arrives_in_order_and_nobody_reads_after_the_last(messages: int) -> None:
    results = run_workers(read_ahead, 2, messages=messages)
    for result in results:
        assert result.error is None, result.traceback
    assert results[1].value == ([float(number) for number in range(messages) for _ in range(2)], False)


def loses_its_writer(world: World) -> list[str]:
    """Worker 0 dies with messages under way, of which worker 1 reads some ahead."""
    meeting = Meeting(world, "gloo", last=lambda about: False)
    if world.rank == 0:
        for _ in range(30):
            meeting.channel.send(header().holding(torch.zeros(100_000)), torch.zeros(100_000))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as lost:
        for _ in range(31):
            meeting.channel.receive()
    told = str(lost.value)
    meeting.comm.close()
    return [told]


@pytest.mark.workers
def test_a_peer_that_dies_while_it_is_read_ahead_is_noticed_at_once() -> None:
    _, reader = run_workers(loses_its_writer, 2, timeout_s=15)
    assert reader.error is None, reader.traceback
    assert "waiting for worker 0" in reader.value[0]


# -- over a group ------------------------------------------------------------------------------------------------------


def exchange(world: World, *, backend: str) -> list[tuple[int, list[float]]]:
    meeting = Meeting(world, backend)
    channel = meeting.channel
    if world.rank == 0:
        sent = []
        for number in range(5):
            payload = torch.full((number * 30_000,), float(number)) if number % 2 else None
            about = header(round=number)
            sent.append(channel.send(about if payload is None else about.holding(payload), payload))
        for one in sent:
            one.wait()
        seen: list[tuple[int, list[float]]] = []
    else:
        messages = [channel.receive() for _ in range(5)]
        seen = [(about.round, [] if payload is None else payload[:2].tolist()) for about, payload in messages]
    meeting.comm.barrier()
    meeting.comm.close()
    return seen


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_messages_arrive_in_order_each_with_its_payload(backend: str) -> None:
    _, receiver = run_workers(exchange, 2, backend=backend)
    assert receiver.value == [(0, []), (1, [1, 1]), (2, []), (3, [3, 3]), (4, [])], receiver.traceback


def share(world: World) -> tuple[int, list[float]]:
    """Worker 0 names a part of its memory; worker 1 writes there, and worker 0 sees it."""
    meeting = Meeting(world, "paceline")
    memory = meeting.comm.shared(1000, torch.float32)
    assert memory is not None
    before = meeting.comm.traffic
    found: list[float] = []
    if world.rank == 0:
        memory.copy_(torch.arange(1000.0))
        meeting.channel.send(header().holding(memory[500:600]), memory[500:600]).wait()
    else:
        _, payload = meeting.channel.receive()
        assert payload is not None
        found = payload[:3].tolist()
        payload.fill_(-1)
    moved = (meeting.comm.traffic - before).sent_bytes
    meeting.comm.barrier()
    if world.rank == 0:
        found = memory[499:502].tolist()
    meeting.comm.close()
    return moved, found


@pytest.mark.workers
def test_a_payload_in_shared_memory_is_named_and_read_where_it_lies() -> None:
    writer, reader = run_workers(share, 2)
    assert reader.value == (0, [500, 501, 502]), reader.traceback
    assert writer.value == (HEADER_BYTES, [499, -1, -1]), writer.traceback


def refuse(world: World) -> str:
    def check(about: Header) -> None:
        raise WireError(f"round {about.round} is not wanted")

    meeting = Meeting(world, "gloo", check=check)
    told = ""
    if world.rank == 0:
        meeting.channel.send(header(round=3, elements=2**60))
    else:
        with pytest.raises(WireError) as refused:
            meeting.channel.receive()
        told = str(refused.value)
    meeting.comm.barrier()
    meeting.comm.close()
    return told


@pytest.mark.workers
def test_a_header_that_does_not_fit_is_refused_before_there_is_room_for_its_payload() -> None:
    assert run_workers(refuse, 2)[1].value == "round 3 is not wanted"


def lose(world: World, *, backend: str) -> str:
    meeting = Meeting(world, backend)
    if world.rank == 0:
        return ""  # the process ends without a word
    with pytest.raises(PeerLostError) as lost:
        meeting.channel.receive()
    return str(lost.value)


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_peer_that_is_gone_ends_the_wait_for_it(backend: str) -> None:
    _, left = run_workers(lose, 2, backend=backend)
    assert "worker 1 lost its peers waiting for worker 0" in str(left.value), left.traceback


def test_a_process_says_something_well_before_the_timeout_of_those_that_wait_for_it() -> None:
    assert keepalive_s(600) == 30
    assert keepalive_s(20) == 5


# -- inside a process --------------------------------------------------------------------------------------------------


def test_inside_a_process_a_push_is_copied_only_where_its_memory_may_be_used_again() -> None:
    for copies in (False, True):
        worker, server = local_channels(timeout_s=1, copies_pushes=copies)
        gradient = torch.ones(3)
        worker.send(header().holding(gradient), gradient).wait()
        gradient.fill_(5)
        _, payload = server.receive()
        assert payload is not None
        assert payload.tolist() == ([1, 1, 1] if copies else [5, 5, 5])


def test_inside_a_process_a_wait_ends_too() -> None:
    worker, _ = local_channels(timeout_s=0.01, copies_pushes=False)
    with pytest.raises(PeerLostError, match=r"^no message came for 0.01 s inside worker 0$"):
        worker.receive()


# -- buffers -----------------------------------------------------------------------------------------------------------


def of(elements: int, dtype: torch.dtype = torch.float32) -> Header:
    return header(elements=elements, dtype=dtype)


def test_a_buffer_that_came_back_is_taken_again_for_payloads_of_its_size() -> None:
    buffers = BufferPool()
    first = buffers.take(of(10))
    address = first.data_ptr()
    buffers.give_back(first)
    assert buffers.take(of(11)).data_ptr() != address
    assert buffers.take(of(10, torch.float64)).dtype == torch.float64
    assert buffers.take(of(10)).data_ptr() == address


def test_memory_that_was_not_lent_is_not_taken() -> None:
    buffers = BufferPool()
    foreign = torch.zeros(10)
    buffers.give_back(foreign)
    assert buffers.take(of(10)).data_ptr() != foreign.data_ptr()


def test_a_buffer_that_is_not_given_back_is_not_kept() -> None:
    buffers = BufferPool()
    lent: list[Tensor] = [buffers.take(of(10))]
    lent.clear()
    gc.collect()
    assert len(buffers._lent) == 0
