"""Buckets on their way: several at once, in any reduction, and what happens when a peer dies under them."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from paceline import World
from paceline.collectives.canonical_sum import sum_plan
from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.collectives.gradient_exchange import GradientExchange, Reduction
from paceline.errors import PeerLostError
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.collectives.one_process import lane_values, one_process_sum, roots_of, same_bits
from tests.workers import run_workers

ELEMENTS = (1, 100, 5_000, 64)  # of the buckets that are under way together


def connect(world: World, backend: str = "gloo") -> tuple[Communicator, object]:
    """The communicator, and the store that lives as long as it does."""
    store = open_store(world, NoSupervisor(), 20.0)
    return Communicator.connect(world, store, backend=backend, device=torch.device("cpu"), timeout_s=20.0), store


def exchanges(
    world: World,
    *,
    lanes: int,
    present: tuple[int, ...],
    reduction: Reduction,
    backend: str = "gloo",
    in_slot: bool = False,
) -> tuple[list[bool], float]:
    """Per bucket, whether its bits are those of one process; and the largest relative error.

    `in_slot`: each worker's first root is made where the exchange likes it best.
    """
    comm, _store = connect(world, backend)
    exchange = GradientExchange(comm, reduction)
    plan = sum_plan(lanes, world.size, present)
    started = []
    for bucket, elements in enumerate(ELEMENTS):
        roots = roots_of(plan, world.rank, lane_values(present, elements))
        slot = exchange.slot(0, bucket, elements, torch.float32) if in_slot else None
        if slot is not None and roots:
            first = next(iter(roots))
            roots[first] = slot.copy_(roots[first])
        started.append(exchange.start(0, bucket, plan, roots, lambda n=elements: torch.full((n,), torch.nan)))  # type: ignore[misc]
    sums = [pending.wait() for pending in started]
    wanted = [one_process_sum(lane_values(present, elements)) for elements in ELEMENTS]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(sums, wanted, strict=True)]
    exchange.close()
    comm.barrier()
    comm.close()
    return [same_bits(a, b) for a, b in zip(sums, wanted, strict=True)], max(errors)


@pytest.mark.workers
@pytest.mark.parametrize(
    ("backend", "in_slot"),
    [("gloo", False), ("paceline", False), ("paceline", True)],
    ids=["gloo", "away", "in a slot"],
)
@pytest.mark.parametrize(
    ("workers", "lanes", "present"),
    [(2, 2, (0, 1)), (3, 4, (0, 1, 2, 3)), (4, 4, (0, 1, 2, 3)), (3, 3, (0, 1)), (3, 8, tuple(range(8)))],
    ids=["native", "direct", "halving", "one worker without a root", "several roots"],
)
def test_exact_sums_of_buckets_under_way_together_have_the_bits_of_one_process(
    workers: int, lanes: int, present: tuple[int, ...], backend: str, in_slot: bool
) -> None:
    job = {"lanes": lanes, "present": present, "reduction": "exact", "backend": backend, "in_slot": in_slot}
    for result in run_workers(exchanges, workers, **job):
        assert result.error is None, result.traceback
        assert result.value[0] == [True] * len(ELEMENTS)


@pytest.mark.workers
def test_fast_sums_are_close_to_the_exact_ones_also_with_a_worker_without_a_root() -> None:
    for result in run_workers(exchanges, 3, lanes=3, present=(0, 1), reduction="fast"):
        assert result.error is None, result.traceback
        assert result.value[1] < 1e-6


def test_alone_the_sum_is_the_root_itself() -> None:
    root = torch.ones(3)
    pending = GradientExchange(SingleWorker(), "exact").start(
        0, 0, sum_plan(1, 1, (0,)), {0: root}, lambda: torch.empty(3)
    )
    assert pending.wait() is root


def loses_the_last_worker(world: World) -> tuple[bool, bool]:
    """Whether `start` came back, and whether `wait` raised, when the last worker was killed before the exchange."""
    comm, _store = connect(world)
    comm.barrier()
    if world.rank == world.size - 1:
        time.sleep(0.1)  # the others may still be inside the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    exchange = GradientExchange(comm, "exact")
    present = tuple(range(world.size))
    plan = sum_plan(world.size, world.size, present)
    pending = exchange.start(
        0, 0, plan, roots_of(plan, world.rank, lane_values(present, 1000)), lambda: torch.empty(1000)
    )
    try:
        pending.wait()
    except PeerLostError as error:
        return True, str(error).startswith(f"worker {world.rank} lost its peers")
    return True, False


@pytest.mark.workers
@pytest.mark.parametrize("workers", [2, 3, 4], ids=["native", "direct", "halving"])
def test_a_killed_peer_surfaces_where_the_sum_is_waited_for(workers: int) -> None:
    *survivors, dead = run_workers(loses_the_last_worker, workers, timeout_s=30)
    assert dead.exit_code == -signal.SIGKILL
    assert [result.value for result in survivors] == [(True, True)] * (workers - 1), survivors[0].traceback
