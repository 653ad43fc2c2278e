"""The executor: over a wire that is as nasty as the rules allow, and between real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import World
from paceline.collectives.byte_count import Flow
from paceline.collectives.communicator import Communicator, Handle
from paceline.collectives.executor import Scratch, run_schedule
from paceline.collectives.ring_all_reduce import RING, RING_ALL_GATHER, RING_REDUCE_SCATTER
from paceline.errors import PeerLostError
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from paceline.world.world import TcpRendezvous
from tests.collectives.simulator import NAMES, error_of, random_tensors, schedule_of, simulate
from tests.workers import run_workers

PATIENCE_S = 10.0


class Wire:
    """Threads for ranks. A send reads its tensor as late as it may, a posted receive spoils its own at once, and nobody
    goes on before the other end is there: what a backend may do, this one does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int], list[Message]] = defaultdict(list)  # receives, by (source, to)
        self.offered: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def match(self, pair: tuple[int, int]) -> None:
        """Called when somebody waits: only then do bytes move."""
        while self.posted[pair] and self.offered[pair]:
            target, source = self.posted[pair].pop(0), self.offered[pair].pop(0)
            assert target.tensor.shape == source.tensor.shape
            target.tensor.copy_(source.tensor)
            target.done = source.done = True
            self.changed.notify_all()


class Message:
    def __init__(self, wire: Wire, pair: tuple[int, int], tensor: Tensor) -> None:
        self.wire, self.pair, self.tensor, self.done = wire, pair, tensor, False

    def wait(self) -> None:
        with self.wire.changed:
            self.wire.match(self.pair)
            assert self.wire.changed.wait_for(lambda: self.wire.match(self.pair) or self.done, PATIENCE_S), "deadlock"


class ThreadRank:
    """The part of a Communicator that the executor uses."""

    def __init__(self, wire: Wire, rank: int, *, batched: bool) -> None:
        self.wire, self.rank, self.size, self.batched = wire, rank, wire.size, batched

    def sends(self, device: torch.device) -> bool:
        return True

    def batches(self, device: torch.device) -> bool:
        return self.batched

    def send(self, tensor: Tensor, *, to: int, tag: int, operation: str) -> Handle:
        with self.wire.changed:
            message = Message(self.wire, (self.rank, to), tensor)
            self.wire.offered[self.rank, to].append(message)
            self.wire.changed.notify_all()
        return message

    def receive(self, tensor: Tensor, *, source: int, tag: int, operation: str) -> Handle:
        with self.wire.changed:
            tensor.fill_(77)
            message = Message(self.wire, (source, self.rank), tensor)
            self.wire.posted[source, self.rank].append(message)
            self.wire.changed.notify_all()
        return message

    def send_and_receive(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], *, operation: str
    ) -> list[Handle]:
        return [
            *(self.send(tensor, to=to, tag=0, operation=operation) for tensor, to in sends),
            *(self.receive(tensor, source=source, tag=0, operation=operation) for tensor, source in receives),
        ]


def run_in_threads(schedule: Any, tensors: list[Tensor], segment_bytes: int, *, batched: bool) -> list[Tensor]:
    wire = Wire(len(tensors))
    results = [tensor.clone() for tensor in tensors]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            comm: Any = ThreadRank(wire, rank, batched=batched)
            run_schedule(comm, schedule, results[rank], segment_bytes=segment_bytes)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 7), st.integers(0, 150), st.integers(4, 400), st.booleans())
def test_over_a_nasty_wire_every_rank_gets_the_bits_of_the_simulator(
    name: str, size: int, count: int, segment_bytes: int, batched: bool
) -> None:
    schedule = schedule_of(name, size)
    tensors = random_tensors(size, count, torch.float32)
    results = run_in_threads(schedule, tensors, segment_bytes, batched=batched)
    for result, wanted in zip(results, simulate(schedule, tensors), strict=True):
        assert torch.equal(result, wanted)


def test_more_addends_than_slots_are_added_in_order() -> None:
    tensors = random_tensors(20, 600, torch.float32)
    for name in ("star", "direct"):
        wanted = simulate(schedule_of(name, 20), tensors)
        for batched in (False, True):
            results = run_in_threads(schedule_of(name, 20), tensors, 40, batched=batched)
            assert all(torch.equal(result, want) for result, want in zip(results, wanted, strict=True))


class RecordingGroup:
    """A process group that starts messages only as a group, and writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append("start")

    def send(self, tensors: list[Tensor], to: int, tag: int) -> None:
        self.asked.append(f"send {tensors[0].numel()} to {to}")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        self.asked.append(f"receive {tensors[0].numel()} from {source}")

    def _end_coalescing(self, device: torch.device) -> RecordingGroup:
        self.asked.append("end")
        return self

    def wait(self) -> None:
        self.asked.append("wait")


def test_nccl_gets_the_messages_of_a_beat_as_one_group_and_they_are_counted() -> None:
    """On torch's device without memory: what is asked of the group is the same as on two GPUs."""
    group, store = RecordingGroup(), torch.distributed.HashStore()
    world = World(rank=0, size=2, local_size=2, rendezvous=TcpRendezvous("127.0.0.1", 1))
    comm = Communicator({"meta": group}, store, world, backend="nccl", timeout_s=1.0)
    run_schedule(comm, RING, torch.empty(10, device="meta"))
    one_beat = ["start", "send 5 to 1", "receive 5 from 1", "end"]
    assert [asked for asked in group.asked if asked != "wait"] == 2 * one_beat
    assert group.asked.index("wait") == len(one_beat)  # the sum of the first beat is sent in the second
    assert (comm.traffic.sent, comm.traffic.received) == ({1: Flow(40, 2)}, {1: Flow(40, 2)})


# -- real processes ----------------------------------------------------------------------------------------------------


def wrong_sums(world: World) -> list[str]:
    """What is not the sum, or not the same on all ranks: every algorithm, some dtypes, segments and shapes."""
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    scratch = Scratch()
    wrong = []
    cases = [(torch.float32, 3, 2**20), (torch.float32, 100_003, 2**14), (torch.bfloat16, 5_000, 2**11)]
    cases += [(torch.float16, 999, 2**20), (torch.float64, 4096, 2**10), (torch.int64, 77, 64)]
    for tag, (name, (dtype, count, segment)) in enumerate([(n, case) for n in NAMES for case in cases]):
        tensors = random_tensors(world.size, count, dtype)
        mine = tensors[world.rank].clone()
        run_schedule(comm, schedule_of(name, world.size), mine, tag=tag, scratch=scratch, segment_bytes=segment)
        rows, handle = comm.all_gather(mine.view(torch.uint8))
        handle.wait()
        if error_of(mine, tensors) > 1 or not all(torch.equal(row, rows[0]) for row in rows):
            wrong.append(f"{name} of {count} {dtype} in segments of {segment} bytes")
    transposed = random_tensors(world.size, 12, torch.float32)[world.rank].view(3, 4).t()
    wanted = torch.stack(random_tensors(world.size, 12, torch.float32)).sum(0).view(3, 4).t()
    run_schedule(comm, RING, transposed, tag=1000, scratch=scratch)
    if not torch.allclose(transposed, wanted):
        wrong.append("a tensor that is not contiguous")
    halves = torch.stack(random_tensors(world.size, 50, torch.float64))
    mine = halves[world.rank].clone()
    run_schedule(comm, RING_REDUCE_SCATTER, mine, tag=1001, scratch=scratch)
    run_schedule(comm, RING_ALL_GATHER, mine, tag=1001, scratch=scratch)
    if not torch.allclose(mine, halves.sum(0)):
        wrong.append("reduce-scatter, then all-gather")
    comm.barrier()
    comm.close()
    return wrong


@pytest.mark.workers
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_between_processes_every_algorithm_gives_all_workers_the_sum(workers: int) -> None:
    for result in run_workers(wrong_sums, workers):
        assert result.error is None, result.traceback
        assert result.value == []


def loses_the_last_worker(world: World, *, name: str) -> str:
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    comm.barrier()
    if world.rank == world.size - 1:
        time.sleep(0.1)  # the others may still be inside the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(2):  # a send may have left before the peer was gone
            run_schedule(comm, schedule_of(name, world.size), torch.ones(100_000), segment_bytes=2**16)
    except PeerLostError as error:
        return str(error)
    return "nobody was missed"


@pytest.mark.workers
@pytest.mark.parametrize("name", ["ring", "star", "tree", "unsplit-ring"])
def test_a_killed_peer_is_missed_by_everybody(name: str) -> None:
    *survivors, dead = run_workers(loses_the_last_worker, 3, name=name, timeout_s=30)
    assert dead.exit_code == -signal.SIGKILL
    for rank, result in enumerate(survivors):
        assert str(result.value).startswith(f"worker {rank} lost its peers"), result


def sums_on_one_gpu(world: World) -> float:
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend="gloo", device=torch.device("cuda"), timeout_s=20.0)
    tensors = random_tensors(world.size, 50_001, torch.float32)
    mine = tensors[world.rank].cuda()
    run_schedule(comm, RING, mine, segment_bytes=2**14)
    comm.barrier()
    comm.close()
    return error_of(mine.cpu(), tensors)


@pytest.mark.workers
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_over_gloo_a_gpus_tensors_are_staged_through_the_host() -> None:
    for result in run_workers(sums_on_one_gpu, 2):
        assert result.error is None, result.traceback
        assert result.value <= 1
