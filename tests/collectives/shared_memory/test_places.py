"""A tensor in shared memory is told to a peer as one number, and read where it lies."""

from __future__ import annotations

import pytest
import torch

from paceline import World
from paceline.collectives.communicator import Communicator
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def tells_a_place(world: World) -> list[float]:
    """What rank 1 finds at the place that rank 0 names; rank 0 finds nothing."""
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend="paceline", device=torch.device("cpu"), timeout_s=20.0)
    comm.shared(3, torch.int64)
    room = comm.shared(100, torch.float32)
    assert room is not None
    part = room[10:14]
    number = torch.zeros(1, dtype=torch.int64)
    found: list[float] = []
    if world.rank == 0:
        part.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        told = comm.number_of(part)
        assert told is not None
        comm.send(number.fill_(told), to=1, tag=0).wait()
    else:
        comm.receive(number, source=0, tag=0).wait()
        found = comm.there(0, int(number), 4, torch.float32).tolist()
    assert comm.number_of(torch.zeros(4)) is None
    comm.barrier()
    comm.close()
    return found


def test_a_place_told_in_a_message_is_found_by_the_peer() -> None:
    sender, reader = run_workers(tells_a_place, 2)
    assert (sender.error, reader.error) == (None, None), reader.traceback or sender.traceback
    assert reader.value == [1.0, 2.0, 3.0, 4.0]
