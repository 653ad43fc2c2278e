"""The closed forms: they agree with the schedules for any size, and say what the literature says where Z divides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.canonical_sum import sum_plan
from paceline.collectives.direct_all_reduce import canonical_schedule
from paceline.collectives.hierarchical_all_reduce import hierarchical
from paceline.collectives.ring_all_reduce import RING_ALL_GATHER, RING_REDUCE_SCATTER
from paceline.collectives.schedule import Schedule
from paceline.world.world import Topology
from tests.benchmarks import script
from tests.collectives.simulator import FLAT

theory = script("traffic_theory")
Moved = theory.Moved

FORMS: dict[str, tuple[Schedule, Callable[[int, int], list[Moved]]]] = {
    "star": (FLAT["star"], theory.star),
    "unsplit-ring": (FLAT["unsplit-ring"], theory.unsplit_ring),
    "ring-reduce-scatter": (RING_REDUCE_SCATTER, theory.ring_reduce_scatter),
    "ring-all-gather": (RING_ALL_GATHER, theory.ring_all_gather),
    "ring": (FLAT["ring"], theory.ring),
    "tree": (FLAT["tree"], theory.tree),
    "halving-doubling": (FLAT["halving-doubling"], theory.halving_doubling),
    "direct": (FLAT["direct"], theory.direct),
}
elements = st.integers(0, 500)


def of_schedule(schedule: Schedule, n: int, size: int) -> list[Moved]:
    ranges = schedule.ranges(n, size)

    def length(chunks: range) -> int:
        return sum(ranges[chunk][1] - ranges[chunk][0] for chunk in chunks)

    return [
        Moved(
            sum(length(send.chunks) for hop in schedule.hops(rank, size) for send in hop.sends),
            sum(length(receive.chunks) for hop in schedule.hops(rank, size) for receive in hop.receives),
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(elements, st.integers(2, 17))
def test_every_rank_of_a_schedule_moves_what_its_closed_form_says(name: str, n: int, size: int) -> None:
    schedule, form = FORMS[name]
    assert of_schedule(schedule, n, size) == form(n, size)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), elements)
def test_hierarchical_moves_what_its_closed_form_says_over_any_hosts(told: list[int], n: int) -> None:
    topology = Topology.of(told)
    assert of_schedule(hierarchical(topology), n, topology.size) == theory.hierarchical(n, topology)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.integers(2, 8), st.integers(0, 1000), st.data())
def test_the_canonical_sum_moves_what_its_closed_form_says_with_any_roots(
    lanes: int, size: int, n: int, data: st.DataObject
) -> None:
    present = tuple(sorted(data.draw(st.sets(st.integers(0, lanes - 1), min_size=1))))
    plan = sum_plan(lanes, size, present)
    assert of_schedule(canonical_schedule(plan), n, size) == theory.canonical(n, plan)


@pytest.mark.parametrize("size", range(2, 9))
def test_ring_and_star_move_the_same_in_all_and_only_the_busiest_differs(size: int) -> None:
    z = 840
    ring, star, unsplit = theory.ring(z, size), theory.star(z, size), theory.unsplit_ring(z, size)
    assert sum(moved.sent for moved in ring) == sum(moved.sent for moved in star) == 2 * (size - 1) * z
    assert {moved.sent for moved in ring} == {2 * (size - 1) * z // size}
    assert max(moved.sent for moved in star) == max(moved.received for moved in star) == (size - 1) * z
    assert {moved.sent for moved in unsplit} == {(size - 1) * z}


@pytest.mark.parametrize("workers", range(2, 9))
def test_a_dedicated_server_moves_all_tensors_each_way(workers: int) -> None:
    server, *others = theory.star(100, workers + 1)
    assert server == Moved(workers * 100, workers * 100)
    assert set(others) == {Moved(100, 100)}


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("servers", [1, 3, 4])
def test_servers_divide_what_one_of_them_would_move(workers: int, servers: int) -> None:
    plan = sum_plan(workers, workers, tuple(range(workers)))
    moved = theory.parameter_server([120 // servers] * servers, plan)
    assert moved[:workers] == [Moved(120, 120)] * workers
    assert moved[workers:] == [Moved(workers * 120 // servers, workers * 120 // servers)] * servers
    assert sum(each.sent for each in moved) == sum(each.received for each in moved) == 2 * workers * 120


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.integers(1, 6), st.lists(elements, min_size=1, max_size=4), st.booleans())
def test_what_workers_push_is_what_servers_receive(lanes: int, workers: int, held: list[int], named: bool) -> None:
    plan = sum_plan(max(lanes, workers), workers, tuple(range(max(lanes, workers))))
    moved = theory.parameter_server(held, plan, named=named)
    at_workers, at_servers = moved[:workers], moved[workers:]
    assert sum(each.sent for each in at_workers) == sum(each.received for each in at_servers)
    assert sum(each.received for each in at_workers) == sum(each.sent for each in at_servers)


@settings(max_examples=60, deadline=None)
@given(elements, st.integers(2, 9))
def test_where_z_does_not_divide_a_ring_is_within_two_elements_of_the_formula(n: int, size: int) -> None:
    for moved in theory.ring(n, size):
        assert abs(moved.sent - 2 * (size - 1) * n / size) < 2


def test_hierarchical_sends_across_hosts_what_a_ring_of_hosts_would() -> None:
    topology = Topology.of([0, 0, 0, 1, 1, 1])
    across = sum(
        len(send.chunks) * 100
        for rank in topology.hosts[0]
        for hop in hierarchical(topology).hops(rank, 6)
        for send in hop.sends
        if topology.host_of[send.to] == 1
    )
    assert across == 600  # 2·(H-1)/H · Z with Z = 600; the flat ring sends 2·(N-1)/N · Z = 1000 of them
