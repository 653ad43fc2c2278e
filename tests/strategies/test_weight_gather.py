"""Every worker ends with every owner's pieces, by messages or by the backend's all-gather."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from paceline import World
from paceline.collectives.communicator import Communicator
from paceline.sharding.bucket import cut_buckets, plan_buckets
from paceline.sharding.flat_layout import BLOCK, in_logical_order, piece_of
from paceline.strategies.buckets import gradient_specs
from paceline.strategies.zero.sharded_optimizer import LocalPieces
from paceline.strategies.zero.weights import WeightGather
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def parameters_of(worker: int) -> list[Parameter]:
    """Large and small ones, sideways ones, two precisions, a scalar, an empty one."""
    made = [
        torch.empty(9, BLOCK), torch.empty(7, 300).t(), torch.empty(200), torch.empty(3, BLOCK, dtype=torch.bfloat16),
        torch.empty(()), torch.empty(0, 4), torch.empty(5, dtype=torch.bfloat16),
    ]  # fmt: skip
    return [Parameter(tensor.fill_(worker)) for tensor in made]


def gathers(world: World, *, backend: str, by_messages: bool, of: list[int]) -> list[list[float]]:
    """What each parameter holds after every worker has written its own number into what it owns."""
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend=backend, device=torch.device("cpu"), timeout_s=20.0)
    parameters = parameters_of(-1)
    specs = gradient_specs(parameters)
    uncut = {number for number, parameter in enumerate(parameters) if not in_logical_order(parameter)}
    shards = cut_buckets(plan_buckets(specs, range(len(specs)), 40_000), world.size, uncut)
    pieces = LocalPieces([(str(number), p) for number, p in enumerate(parameters)], shards, world.rank)
    for tensor in pieces.tensors.values():
        tensor.fill_(world.rank)
    WeightGather(comm, parameters, shards, of, by_messages=by_messages).run()
    comm.barrier()
    comm.close()
    wanted = parameters_of(-1)
    for number in range(len(wanted)):
        for worker, piece in shards.owners.get(number, ()):
            if number in of or worker == world.rank:
                piece_of(wanted[number], piece).fill_(worker)
    return [[float(a.sum()), float(b.sum()), float(torch.equal(a, b))] for a, b in zip(parameters, wanted, strict=True)]


@pytest.mark.parametrize(("backend", "by_messages"), [("gloo", True), ("paceline", True), ("gloo", False)])
@pytest.mark.parametrize("of", [[0, 1, 2, 3, 4, 5, 6], [1, 4]])
def test_all_pieces_of_the_wanted_parameters_arrive(backend: str, by_messages: bool, of: list[int]) -> None:
    for result in run_workers(gathers, 3, backend=backend, by_messages=by_messages, of=of):
        assert result.error is None, result.traceback
        assert all(same for _, _, same in result.value), result.value
