"""Schedules on paper: each looks like its drawing, every message has its receiver, and the sums are right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives import (
    direct_all_reduce,
    halving_doubling,
    ring_all_reduce,
    star_all_reduce,
    tree_all_reduce,
)
from paceline.collectives.canonical_sum import sum_plan
from paceline.collectives.direct_all_reduce import canonical_schedule
from paceline.collectives.hierarchical_all_reduce import hierarchical
from paceline.collectives.ring_all_reduce import RING_ALL_GATHER, RING_REDUCE_SCATTER
from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, cut_evenly, one
from paceline.errors import ConfigError, WorldError
from paceline.world.world import Topology
from tests.collectives.simulator import NAMES, all_hops, error_of, random_tensors, schedule_of, simulate

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
sizes = st.integers(1, 9)
elements = st.integers(0, 200)


def drawn(schedule_hops: list[Hop]) -> list[str]:
    """`sent>to` and `source>received`, with + for added, = for copied, ~ for kept."""
    signs = {How.ADD: "+", How.COPY: "=", How.KEEP: "~"}
    return [
        " ".join(
            [f"{_named(send.chunks, send.part)}>{send.to}" for send in hop.sends]
            + [
                f"{receive.source}{signs[receive.how]}{_named(receive.chunks, receive.part)}"
                for receive in hop.receives
            ]
        )
        for hop in schedule_hops
    ]


def _named(chunks: range, part: int | None) -> str:
    name = ",".join(str(chunk) for chunk in chunks)
    return name if part is None else f"({part})"


# -- each looks like its drawing ---------------------------------------------------------------------------------------


def test_the_star_gathers_in_rank_order_and_sends_back() -> None:
    assert drawn(list(star_all_reduce.hops(0, 4))) == ["1+0 2+0 3+0", "0>1 0>2 0>3"]
    assert drawn(list(star_all_reduce.hops(2, 4))) == ["0>0", "0=0"]


def test_the_unsplit_ring_passes_whole_tensors_on() -> None:
    assert drawn(list(ring_all_reduce.unsplit_hops(0, 3))) == ["(0)>1 2~(2)", "(2)>1 2~(1)"]
    assert drawn(list(ring_all_reduce.unsplit_hops(1, 3))) == ["(1)>2 0~(0)", "(0)>2 0~(2)"]


def test_the_ring_reduce_scatter_of_three_looks_like_the_drawing() -> None:
    assert drawn(list(ring_all_reduce.reduce_scatter_hops(0, 3))) == ["2>1 2+1", "1>1 2+0"]
    assert drawn(list(ring_all_reduce.reduce_scatter_hops(1, 3))) == ["0>2 0+2", "2>2 0+1"]
    assert drawn(list(ring_all_reduce.reduce_scatter_hops(2, 3))) == ["1>0 1+0", "0>0 1+2"]


def test_the_ring_all_gather_of_three_looks_like_the_drawing() -> None:
    assert drawn(list(ring_all_reduce.all_gather_hops(0, 3))) == ["0>1 2=2", "2>1 2=1"]
    assert drawn(list(ring_all_reduce.all_gather_hops(2, 3))) == ["2>0 1=1", "1>0 1=0"]


def test_the_tree_of_five_looks_like_the_drawing() -> None:
    assert drawn(list(tree_all_reduce.hops(0, 5))) == ["1+0", "2+0", "4+0", "0>4", "0>2", "0>1"]
    assert drawn(list(tree_all_reduce.hops(2, 5))) == ["3+0", "0>0", "", "", "0=0", "0>3"]
    assert drawn(list(tree_all_reduce.hops(4, 5))) == ["", "", "0>0", "0=0", "", ""]


def test_halving_and_doubling_of_four_halves_what_is_sent() -> None:
    assert drawn(list(halving_doubling.hops(0, 4))) == ["2,3>1 1+0,1", "1>2 2+0", "0>2 2=1", "0,1>1 1=2,3"]
    assert drawn(list(halving_doubling.hops(3, 4))) == ["0,1>2 2+2,3", "2>1 1+3", "3>1 1=2", "2,3>2 2=0,1"]


def test_halving_and_doubling_of_six_folds_two_ranks_into_their_neighbours() -> None:
    assert drawn(list(halving_doubling.hops(3, 6))) == ["0,1,2,3>2", "", "", "", "", "2=0,1,2,3"]
    assert drawn(list(halving_doubling.hops(2, 6)))[0] == "3+0,1,2,3"
    assert drawn(list(halving_doubling.hops(2, 6)))[-1] == "0,1,2,3>3"
    assert drawn(list(halving_doubling.hops(5, 6)))[0] == ""
    assert drawn(list(halving_doubling.hops(5, 6)))[1] == "0,1>4 4+2,3"


def test_direct_sends_each_owner_its_chunk_and_gets_it_back() -> None:
    assert drawn(list(direct_all_reduce.hops(1, 3))) == ["0>0 2>2 0+1 2+1", "1>0 1>2 0=0 2=2"]


def test_hierarchical_goes_across_only_between_ranks_of_the_same_place() -> None:
    two_hosts = hierarchical(Topology(((0, 1), (2, 3))))
    assert drawn(list(two_hosts.hops(0, 4))) == ["2,3>1 1+0,1", "1>2 2+0", "0>2 2=1", "0,1>1 1=2,3"]
    assert drawn(list(two_hosts.hops(3, 4))) == ["0,1>2 2+2,3", "2>1 1+3", "3>1 1=2", "2,3>2 2=0,1"]


def test_hierarchical_over_uneven_hosts_goes_across_between_their_first_ranks() -> None:
    uneven = hierarchical(Topology(((0,), (1, 2, 3))))
    assert drawn(list(uneven.hops(0, 4))) == ["", "", "1>1 1+0", "0>1 1=1", "", ""]
    assert drawn(list(uneven.hops(1, 4))) == ["2+0,1", "3+0,1", "0>0 0+1", "1>0 0=0", "0,1>3", "0,1>2"]


def test_the_canonical_sum_sends_every_root_to_every_owner() -> None:
    plan = sum_plan(4, 3, (0, 1, 2, 3))  # rank 2 has lanes 2 and 3
    assert plan.roots(2) == (2,)
    assert drawn(list(canonical_schedule(plan).hops(1, 3))) == ["(1)>0 (1)>2 0+(0) 2+(2)", "1>0 1>2 0=0 2=2"]


# -- every message has its receiver ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", range(1, 10))
def test_what_is_sent_in_a_hop_is_received_in_that_hop(name: str, size: int) -> None:
    for number, together in enumerate(zip(*all_hops(schedule_of(name, size), size), strict=True)):
        sent = {(rank, s.to, s.chunks, s.part) for rank, hop in enumerate(together) for s in hop.sends}
        received = {(r.source, rank, r.chunks, r.part) for rank, hop in enumerate(together) for r in hop.receives}
        assert sent == received, f"hop {number}"
        assert all(source != to for source, to, _, _ in sent)


@pytest.mark.parametrize("name", NAMES)
def test_alone_nothing_is_sent(name: str) -> None:
    assert [hop for hop in schedule_of(name, 1).hops(0, 1) if hop != Hop()] == []


def test_rings_send_to_the_right_neighbour_only() -> None:
    for name in ("ring", "unsplit-ring"):
        for rank, hops in enumerate(all_hops(schedule_of(name, 5), 5)):
            assert {send.to for hop in hops for send in hop.sends} == {(rank + 1) % 5}


# -- the sums ----------------------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(NAMES), sizes, elements, st.sampled_from(DTYPES))
def test_every_rank_ends_with_the_sum_and_all_with_the_same_bits(
    name: str, size: int, count: int, dtype: torch.dtype
) -> None:
    tensors = random_tensors(size, count, dtype)
    results = simulate(schedule_of(name, size), tensors)
    assert error_of(results[0], tensors) <= 1
    assert all(torch.equal(result, results[0]) for result in results)


@settings(max_examples=60, deadline=None)
@given(sizes, elements)
def test_reduce_scatter_leaves_rank_r_with_the_finished_chunk_r(size: int, count: int) -> None:
    tensors = random_tensors(size, count, torch.float64)
    ranges = RING_REDUCE_SCATTER.ranges(count, size)
    for rank, result in enumerate(simulate(RING_REDUCE_SCATTER, tensors)):
        own = slice(*ranges[rank])
        torch.testing.assert_close(result[own], torch.stack(tensors).sum(0)[own])


@settings(max_examples=60, deadline=None)
@given(sizes, elements)
def test_all_gather_gives_everybody_chunk_r_of_rank_r(size: int, count: int) -> None:
    tensors = random_tensors(size, count, torch.int64)
    chunks = [tensors[rank][low:high] for rank, (low, high) in enumerate(RING_ALL_GATHER.ranges(count, size))]
    assert all(torch.equal(result, torch.cat(chunks)) for result in simulate(RING_ALL_GATHER, tensors))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 9), elements)
def test_hierarchical_sums_over_any_hosts(data: st.DataObject, size: int, count: int) -> None:
    told = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    tensors = random_tensors(size, count, torch.float64)
    results = simulate(hierarchical(Topology.of(told)), tensors)
    assert error_of(results[0], tensors) <= 1
    assert all(torch.equal(result, results[0]) for result in results)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), elements)
def test_the_view_of_the_canonical_sum_sums_where_every_worker_has_one_root(size: int, count: int) -> None:
    plan = sum_plan(size, size, tuple(range(size)))
    tensors = random_tensors(size, count, torch.float32)
    assert error_of(simulate(canonical_schedule(plan), tensors)[0], tensors) <= 1


# -- cuts and hosts ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 40))
def test_chunks_cover_all_elements_and_differ_by_at_most_one(count: int, chunks: int) -> None:
    ranges = cut_evenly(count, chunks)
    assert [low for low, _ in ranges] + [count] == [0] + [high for _, high in ranges]
    assert [high - low for low, high in ranges] == [-(-(count - chunk) // chunks) for chunk in range(chunks)]
    assert max(high - low for low, high in ranges) - min(high - low for low, high in ranges) <= 1


def test_a_hop_among_others_names_them_and_cuts_finer() -> None:
    hop = Hop((Send(1, one(0), 7),), (Receive(0, one(1), How.ADD),))
    wanted = Hop((Send(8, range(2, 5), 7),), (Receive(4, range(5, 8), How.ADD),))
    assert hop.among([4, 8], first=2, width=3) == wanted


def test_topology_follows_the_host_numbers_that_ranks_tell() -> None:
    topology = Topology.of([3, 0, 3, 0])
    assert topology.hosts == ((1, 3), (0, 2))
    assert (topology.size, topology.is_even, topology.host_of[0]) == (4, True, 1)
    assert not Topology(((0,), (1, 2))).is_even
    assert Topology.one_host(3).hosts == ((0, 1, 2),)


@pytest.mark.parametrize("hosts", [((0, 2),), ((0,), (0, 1)), ((0,), ())])
def test_hosts_that_miss_or_repeat_a_rank_are_refused(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(WorldError, match="each rank from 0 on is on one host"):
        Topology(hosts)


def test_hierarchical_with_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hosts with the ranks \(\(0, 1\),\) have 2 ranks, not 3"):
        hierarchical(Topology.one_host(2)).hops(0, 3)


def test_a_schedule_is_a_value_that_can_be_looked_up() -> None:
    again: Schedule = hierarchical(Topology.one_host(2))
    assert hash(again) == hash(hierarchical(Topology.one_host(2)))
