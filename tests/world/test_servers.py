"""Workers and servers as real processes: two groups over one store, and neither in the other's way."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.distributed import PrefixStore

from paceline.collectives.communicator import Communicator
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from paceline.world.world import World
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

CPU = torch.device("cpu")


def sum_at_the_servers(world: World, backend: str) -> list[float]:
    """Each worker sends its rank to every server and gets the sum back; then the workers add up alone."""
    store = open_store(world, NoSupervisor(), 20.0)
    joint = Communicator.connect(
        world.joint(), PrefixStore("joint", store), backend=backend, device=CPU, timeout_s=20.0
    )
    if world.is_server:
        pushed = [torch.zeros(1) for _ in range(world.size)]
        for rank, tensor in enumerate(pushed):
            joint.receive(tensor, source=rank, tag=0).wait()
        for rank in range(world.size):
            joint.send(sum(pushed, torch.zeros(1)), to=rank, tag=1).wait()
        joint.close()
        sys.exit(0)
    own = Communicator.connect(world, PrefixStore("own", store), backend=backend, device=CPU, timeout_s=20.0)
    pulled = [torch.zeros(1) for _ in range(world.servers)]
    for server, tensor in enumerate(pulled):
        joint.send(torch.tensor([world.rank + 1.0]), to=world.size + server, tag=0).wait()
        joint.receive(tensor, source=world.size + server, tag=1).wait()
    alone = torch.ones(1)
    own.all_reduce(alone).wait()
    own.barrier()
    own.close()
    joint.close()
    return [*torch.cat(pulled).tolist(), *alone.tolist()]


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_workers_talk_to_servers_in_one_group_and_to_each_other_in_another(backend: str) -> None:
    results = run_workers(sum_at_the_servers, 2, servers=2, backend=backend)
    assert [result.name for result in results] == ["worker 0", "worker 1", "server 0", "server 1"]
    assert [result.error for result in results] == [None] * 4, [result.traceback for result in results]
    assert [result.value for result in results] == [[3.0, 3.0, 2.0]] * 2 + [None] * 2


def hash_or_serve(world: World, failing: str) -> str:
    if world.name == failing:
        raise ValueError("no weights here")
    if world.is_server:
        sys.exit(0)
    return "one hash"


def test_the_harness_wants_hashes_of_workers_and_a_good_end_of_everyone() -> None:
    assert hashes(run_workers(hash_or_serve, 1, servers=1, failing="nobody")) == {"one hash"}
    with pytest.raises(AssertionError, match="server 0: ValueError: no weights here"):
        hashes(run_workers(hash_or_serve, 1, servers=1, failing="server 0"))
