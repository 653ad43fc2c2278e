"""The canonical reduce-scatter: owners of ranges end with the bits of one process, and nothing comes back."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import World
from paceline.collectives.canonical_sum import (
    Scatter,
    ScatterPlan,
    SumPlan,
    scatter_plan_of_roots,
    scatter_plans_by_lane,
    sum_plan,
)
from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.collectives.direct_all_reduce import CANONICAL_SCATTER
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.errors import PeerLostError
from paceline.world.control import NoSupervisor
from paceline.world.lanes import strided_lanes
from paceline.world.rendezvous_store import open_store
from tests.collectives.one_process import lane_values, one_process_sum, roots_of, same_bits
from tests.workers import run_workers

pytestmark = pytest.mark.workers

# Of the buckets under way together: ranges of one worker only, empty ones, some that need several pieces of a slot.
CUTS = {1: (0, 0, 0), 100: (64, 64, 100), 5_000: (1_000, 4_000, 4_500), 600_000: (300_000, 500_000, 590_000)}


def ranges(elements: int, workers: int) -> tuple[tuple[int, int], ...]:
    cuts = [0, *CUTS[elements][: workers - 1], elements]
    return tuple(pairwise(cuts))


def connect(world: World, backend: str) -> tuple[Communicator, object]:
    store = open_store(world, NoSupervisor(), 20.0)
    return Communicator.connect(world, store, backend=backend, device=torch.device("cpu"), timeout_s=20.0), store


def strided_plan(lanes: int, workers: int, present: tuple[int, ...]) -> SumPlan:
    there = set(present)
    return SumPlan(present, tuple(tuple(x for x in own if x in there) for own in strided_lanes(lanes, workers)))


def by_lane(how: str, world: World, lanes: int, present: tuple[int, ...], values: dict[int, Tensor]) -> Any:
    """What is sent of each lane, and what this worker sends in it."""
    if how == "lanes":
        plan = strided_plan(lanes, world.size, present)
        for sent_now in scatter_plans_by_lane(plan):
            yield sent_now, {lane: values[lane].clone() for lane in sent_now.sent[world.rank]}
    else:
        plan = sum_plan(lanes, world.size, present)
        yield scatter_plan_of_roots(plan), roots_of(plan, world.rank, values)


def scatters(
    world: World, *, lanes: int, present: tuple[int, ...], how: str, backend: str, dtype: torch.dtype = torch.float32
) -> tuple[list[bool], int, int]:
    """Per bucket, whether this worker's range has the bits of one process; and the bytes sent and received."""
    comm, _store = connect(world, backend)
    exchange = GradientExchange(comm, "exact")
    of = exchange.new_set()
    under_way, results = [], []
    for bucket, elements in enumerate(CUTS):
        values = {lane: value.to(dtype) for lane, value in lane_values(present, elements).items()}
        low, high = ranges(elements, world.size)[world.rank]
        held: dict[int, Tensor] = {}
        results.append((held, one_process_sum(values)[low:high]))
        for sent_now, nodes in by_lane(how, world, lanes, present, values):
            if how == "in a slot" and nodes:
                first = next(iter(nodes))
                slot = exchange.slot(of, bucket, elements, dtype)
                nodes[first] = nodes[first] if slot is None else slot.copy_(nodes[first])
            scatter = Scatter(
                bucket, sent_now, ranges(elements, world.size), dtype, nodes, held,
                buffer_for=lambda node, width=high - low: torch.full((width,), torch.nan, dtype=dtype),
            )  # fmt: skip
            under_way.append(exchange.start_scatter(of, scatter, torch.empty(0, dtype=dtype)))
    for pending in under_way:
        pending.wait()
    right = []
    for held, wanted in results:
        found = list(held.values())
        right.append(
            len(found) == 1 and torch.equal(found[0].view(torch.int8), wanted.view(torch.int8))
            if wanted.numel()
            else not found
        )
    moved = comm.traffic.of(CANONICAL_SCATTER)
    assert comm.traffic.operations <= {CANONICAL_SCATTER}
    exchange.close()
    comm.barrier()
    comm.close()
    return right, moved.sent_bytes, moved.received_bytes


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize(
    ("how", "workers", "lanes", "present"),
    [
        ("roots", 2, 2, (0, 1)), ("in a slot", 2, 2, (0, 1)), ("in a slot", 4, 8, tuple(range(8))),
        ("roots", 3, 8, tuple(range(8))), ("in a slot", 3, 8, tuple(range(8))), ("roots", 3, 3, (0, 1)),
        ("lanes", 2, 5, tuple(range(5))), ("lanes", 3, 8, tuple(range(8))), ("lanes", 4, 4, (0, 3)),
    ],
)  # fmt: skip
def test_every_owner_ends_with_its_range_of_the_sum_of_one_process(
    how: str, workers: int, lanes: int, present: tuple[int, ...], backend: str
) -> None:
    for result in run_workers(scatters, workers, lanes=lanes, present=present, how=how, backend=backend):
        assert result.error is None, result.traceback
        assert result.value[0] == [True] * len(CUTS)


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_double_precision_is_added_in_double_precision(backend: str) -> None:
    job: dict[str, Any] = {"lanes": 5, "present": tuple(range(5)), "how": "lanes", "dtype": torch.float64}
    for result in run_workers(scatters, 2, backend=backend, **job):
        assert result.error is None, result.traceback
        assert result.value[0] == [True] * len(CUTS)


@pytest.mark.parametrize("how", ["roots", "lanes"])
def test_a_worker_sends_each_node_once_without_its_own_range_and_gets_its_range_of_the_others(how: str) -> None:
    workers, lanes = 3, 8
    plan = (sum_plan if how == "roots" else strided_plan)(lanes, workers, tuple(range(lanes)))
    sent: list[ScatterPlan] = [scatter_plan_of_roots(plan)] if how == "roots" else list(scatter_plans_by_lane(plan))
    nodes = [sum(len(sent_now.sent[worker]) for sent_now in sent) for worker in range(workers)]
    results = run_workers(scatters, workers, lanes=lanes, present=tuple(range(lanes)), how=how, backend="gloo")
    for rank, result in enumerate(results):
        assert result.error is None, result.traceback
        own = {elements: high - low for elements in CUTS for low, high in [ranges(elements, workers)[rank]]}
        assert result.value[1] == 4 * nodes[rank] * sum(elements - width for elements, width in own.items())
        assert result.value[2] == 4 * (sum(nodes) - nodes[rank]) * sum(own.values())


def test_alone_lanes_are_added_where_they_are_held() -> None:
    present = (0, 1, 2)
    values = lane_values(present, 1_000)
    held: dict[int, Tensor] = {}
    for sent_now in scatter_plans_by_lane(sum_plan(3, 1, present)):
        nodes = {lane: values[lane].clone() for lane in sent_now.sent[0]}
        scatter = Scatter(
            0, sent_now, ((0, 1_000),), torch.float32, nodes, held, buffer_for=lambda _: torch.empty(1_000)
        )
        GradientExchange(SingleWorker(), "exact").start_scatter(0, scatter, torch.empty(0)).wait()
    assert list(held) == [0]
    assert same_bits(held[0], one_process_sum(values))


def loses_the_last_worker(world: World, *, backend: str) -> str:
    comm, _store = connect(world, backend)
    comm.barrier()
    if world.rank == world.size - 1:
        time.sleep(0.1)  # the others may still be inside the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    exchange = GradientExchange(comm, "exact")
    present = tuple(range(world.size))
    plan = sum_plan(world.size, world.size, present)
    roots, held = roots_of(plan, world.rank, lane_values(present, 5_000)), dict[int, Tensor]()
    scatter = Scatter(
        0,
        scatter_plan_of_roots(plan),
        ranges(5_000, world.size),
        torch.float32,
        roots,
        held,
        lambda _: torch.empty(5_000),
    )
    pending = exchange.start_scatter(exchange.new_set(), scatter, torch.empty(0))
    try:
        pending.wait()
    except PeerLostError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_killed_peer_surfaces_where_the_sum_is_waited_for(backend: str) -> None:
    *survivors, dead = run_workers(loses_the_last_worker, 2, backend=backend, timeout_s=30)
    assert dead.exit_code == -signal.SIGKILL
    for result in survivors:
        assert str(result.value).startswith("worker 0 lost its peers"), result
