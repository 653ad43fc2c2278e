"""Parts of a state on several hosts: each has a copy on the next one, and is found wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from paceline.checkpoint.load import full_tree
from paceline.elastic.memory_checkpoint.files import MemoryCheckpoint, state_number, steps_of
from paceline.elastic.memory_checkpoint.replication import Replication, on_hosts
from paceline.elastic.worker_agent import Abandonable, WorkerAgent
from paceline.engine.group import among_members
from paceline.errors import GenerationEnded, PeerLostError, StateLostError
from paceline.sharding.local_shard import LocalShard
from paceline.world.world import ControlSocket, Elasticity, World

HOSTS = (0, 0, 1, 1, 2)  # by slot
ELEMENTS = 100


class Quiet:
    """A worker agent that nothing happens to, unless the test says so."""

    def __init__(self) -> None:
        self.watched: list[Abandonable] = []

    def watch(self, one: Abandonable, generation: int) -> None:
        self.watched.append(one)


class Job:
    """Workers of several hosts, each with the folder of its host."""

    def __init__(self, folder: Path, copies: int, slots: tuple[int, ...] = tuple(range(len(HOSTS)))) -> None:
        self.slots, self.members = slots, {slot: Quiet() for slot in slots}
        self.checkpoints: dict[int, MemoryCheckpoint] = {}
        self.copies: dict[int, Replication] = {}
        for slot in slots:
            host = folder / str(HOSTS[slot])
            host.mkdir(parents=True, exist_ok=True)
            size, here = len(HOSTS), HOSTS.count(HOSTS[slot])
            seat = World(slot, size, 0, here, HOSTS[slot], 3, rendezvous=ControlSocket("nowhere"))
            self.checkpoints[slot] = MemoryCheckpoint(host, slot)
            self.copies[slot] = Replication(seat, self.checkpoints[slot], copies)
        self.meet(slots)

    def meet(self, slots: tuple[int, ...]) -> None:
        self.slots = slots
        offers = [self.copies[slot].offer() for slot in slots]
        for slot in slots:
            self.copies[slot].connect(lambda _: offers, cast(WorkerAgent, self.members[slot]), 1)

    def write(self, number: int) -> None:
        """Each its slice of one tensor."""
        each = ELEMENTS // len(self.slots)
        values = torch.arange(ELEMENTS, dtype=torch.float32) + number
        for rank, slot in enumerate(self.slots):
            stop = ELEMENTS if rank == len(self.slots) - 1 else (rank + 1) * each
            mine = LocalShard.of(values.shape, values.dtype, [(rank * each, values[rank * each : stop])])
            self.checkpoints[slot].write(number, {"weight": mine}, rank=rank, size=len(self.slots))
            self.copies[slot].keep(number)

    def read(self, slot: int, number: int, writers: tuple[int, ...]) -> Any:
        return full_tree(self.copies[slot].read(number, writers).tree)["weight"]


@contextmanager
def job(folder: Path, *, copies: int) -> Iterator[Job]:
    made = Job(folder, copies)
    try:
        yield made
    finally:
        for one in made.copies.values():
            one.close()


def expected(number: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + number


def test_each_part_has_a_copy_on_the_next_host_and_no_other(tmp_path: Path) -> None:
    with job(tmp_path, copies=2) as made:
        made.write(8)
        found = {host: [slot for slot in range(5) if steps_of(tmp_path / str(host), slot)] for host in range(3)}
    assert found == {0: [0, 1, 4], 1: [0, 1, 2, 3], 2: [2, 3, 4]}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_whichever_host_is_lost_those_who_are_left_read_all_of_the_state(tmp_path: Path, lost: int) -> None:
    with job(tmp_path, copies=2) as made:
        made.write(8)
        left = tuple(slot for slot in range(5) if HOSTS[slot] != lost)
        made.meet(left)
        for slot in left:
            assert torch.equal(made.read(slot, 8, (0, 1, 2, 3, 4)), expected(8)), slot


def test_without_copies_a_lost_host_is_a_lost_state_and_the_error_says_how_to_keep_it(tmp_path: Path) -> None:
    with job(tmp_path, copies=1) as made:
        made.write(number := state_number(8))
        assert torch.equal(made.read(0, number, (0, 1, 2, 3, 4)), expected(number))
        made.meet((0, 1, 4))
        with pytest.raises(StateLostError) as lost:
            made.read(0, number, (0, 1, 2, 3, 4))
    assert str(lost.value) == (
        "worker 2's part of the state of step 8 is lost with its host (this host has no copy of it, nor has host 2); "
        "--copies 2 keeps every part on a second host"
    )


def test_a_copy_that_an_older_generation_left_is_passed_over(tmp_path: Path) -> None:
    with job(tmp_path, copies=2) as made:
        made.write(8)  # never committed: host 1 has slot 0 as worker 0 of 5
        made.meet((0, 1, 4))
        made.write(8)  # as one of 3, with its copies on host 2
        made.meet((0, 1, 2, 3, 4))
        assert torch.equal(made.read(2, 8, (0, 1, 4)), expected(8))


def test_state_that_is_read_late_from_a_host_that_is_lost_ends_the_group(tmp_path: Path) -> None:
    with job(tmp_path, copies=1) as made:
        made.write(8)
        tree = made.copies[0].read(8, (0, 1, 2, 3, 4)).tree
        for slot in (2, 3):
            made.copies[slot].close()
        with pytest.raises(GenerationEnded, match=r"the in-memory checkpoint of host 1 at .* is lost"):
            full_tree(tree)


def test_when_the_workers_change_a_copy_is_not_waited_for(tmp_path: Path) -> None:
    with job(tmp_path, copies=2) as made:
        for one in made.members[0].watched:
            one.abandon("worker 3 died")
        made.checkpoints[0].write(8, {"weight": torch.ones(3)}, rank=0, size=5)
        with pytest.raises(PeerLostError, match="it was given up"):
            made.copies[0].keep(8)


def test_a_worker_knows_its_place_among_the_hosts_that_are_left() -> None:
    world = World(size=3, rendezvous=ControlSocket("nowhere"))
    places = [on_hosts(replace(world, rank=rank), [0, 2, 2]) for rank in range(3)]
    assert [(at.local_rank, at.local_size, at.host_rank, at.hosts) for at in places] == [
        (0, 1, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 1, 2),
    ]


def test_a_worker_that_starts_anew_without_a_host_knows_its_place_from_its_slot() -> None:
    members = ((0, 0), (4, 2), (5, 2))
    seat = World(rank=5, size=6, local_rank=1, local_size=2, host_rank=2, hosts=3, rendezvous=ControlSocket("nowhere"))
    at = among_members(replace(seat, elastic=Elasticity(members=members)))
    assert (at.rank, at.size, at.local_rank, at.local_size, at.host_rank, at.hosts) == (2, 3, 1, 2, 1, 2)
    assert among_members(replace(seat, elastic=Elasticity())).rank == 5
