"""The choice of an algorithm: costs of the literature on paper, and agreement between processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline import World
from paceline.collectives.choice import (
    ALGORITHMS,
    AUTO,
    FLAT,
    Choice,
    Link,
    Network,
    check_algorithm,
    choose,
    predicted_s,
    schedule_named,
)
from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from paceline.world.world import Topology
from tests.workers import run_workers

A, B, G = 30e-6, 1e-9, 0.2e-9
SAME = Network(Link(A, B), Link(A, B), gamma_s=G)
N_BYTES = 8 * 9 * 5 * 7 * 1000


def cost(name: str, size: int, network: Network = SAME, topology: Topology | None = None) -> float:
    topology = topology or Topology.one_host(size)
    return predicted_s(schedule_named(name, topology), N_BYTES, topology, network)


# -- the walk gives the formulas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", range(2, 10))
def test_walking_the_ring_costs_what_the_formula_says(p: int) -> None:
    n = N_BYTES
    assert cost("ring", p) == pytest.approx(2 * (p - 1) * A + 2 * (p - 1) / p * n * B + (p - 1) / p * n * G)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_walking_halving_doubling_costs_log_steps_and_the_rings_bytes(p: int) -> None:
    n, steps = N_BYTES, p.bit_length() - 1
    assert cost("halving-doubling", p) == pytest.approx(2 * steps * A + 2 * (p - 1) / p * n * B + (p - 1) / p * n * G)


@pytest.mark.parametrize("p", range(2, 10))
def test_walking_tree_star_and_unsplit_ring_costs_whole_tensors(p: int) -> None:
    n, steps = N_BYTES, (p - 1).bit_length()
    assert cost("tree", p) == pytest.approx(2 * steps * (A + n * B) + steps * n * G)
    assert cost("star", p) == pytest.approx(2 * A + 2 * (p - 1) * n * B + (p - 1) * n * G)
    assert cost("unsplit-ring", p) == pytest.approx((p - 1) * (A + n * B + n * G))


def test_further_messages_of_one_moment_cost_the_direct_way_more() -> None:
    costly = replace(SAME, inside=Link(A, B, further_s=5e-6))
    assert cost("direct", 8, costly) - cost("direct", 8) == pytest.approx(2 * 6 * 5e-6)
    assert cost("ring", 8, costly) == cost("ring", 8)


@pytest.mark.parametrize(("g", "hosts"), [(2, 2), (4, 2), (2, 4), (3, 3)])
def test_walking_the_hierarchy_costs_what_the_formula_says_with_a_card_for_each_rank(g: int, hosts: int) -> None:
    n = N_BYTES
    inside, across = Link(1e-6, 0.1e-9), Link(50e-6, 8e-9)
    network = Network(inside, across, shared=False)
    topology = Topology.of([rank // g for rank in range(g * hosts)])
    assert cost("hierarchical", g * hosts, network, topology) == pytest.approx(
        2 * (g - 1) * inside.alpha_s
        + 2 * (g - 1) / g * n * inside.beta_s
        + 2 * (hosts - 1) * across.alpha_s
        + 2 * (hosts - 1) / hosts * n / g * across.beta_s
    )


def test_ranks_that_share_a_card_wait_for_each_other() -> None:
    topology = Topology.of([0, 0, 1, 1])
    network = Network(Link(0, 0), Link(0, B), shared=True)
    assert cost("hierarchical", 4, network, topology) == pytest.approx(N_BYTES * B)
    assert cost("hierarchical", 4, replace(network, shared=False), topology) == pytest.approx(N_BYTES * B / 2)


# -- the choice --------------------------------------------------------------------------------------------------------


def test_few_bytes_take_few_steps_and_many_bytes_take_few_bytes() -> None:
    network = Network(Link(30e-6, 1e-9, further_s=10e-6), Link(30e-6, 1e-9, further_s=10e-6), gamma_s=G)
    assert choose(64, Topology.one_host(3), network) == "unsplit-ring"  # two steps of one message
    assert choose(64, Topology.one_host(5), network) == "direct"  # two steps of four messages
    assert choose(64, Topology.one_host(16), network) == "halving-doubling"
    assert choose(2**26, Topology.one_host(6), network) in ("ring", "direct")
    assert choose(2**26, Topology.one_host(8), network) == "halving-doubling"


def test_dear_messages_make_the_ring_the_choice_for_many_bytes_on_an_odd_number_of_ranks() -> None:
    network = Network(Link(30e-6, 1e-9, further_s=30e-6), Link(30e-6, 1e-9, further_s=30e-6))
    assert choose(2**26, Topology.one_host(7), network) == "ring"


def test_slow_links_between_hosts_make_the_hierarchy_the_choice() -> None:
    network = Network(inside=Link(5e-6, 0.1e-9), across=Link(50e-6, 8e-9), gamma_s=G)
    assert choose(2**24, Topology.of([rank // 6 for rank in range(18)]), network) == "hierarchical"


def test_halving_over_hosts_of_a_power_of_two_is_a_hierarchy_of_its_own() -> None:
    network = Network(inside=Link(5e-6, 0.1e-9), across=Link(50e-6, 8e-9), gamma_s=G)
    assert choose(2**24, Topology.of([rank // 8 for rank in range(32)]), network) == "halving-doubling"


def test_where_all_ranks_share_a_host_the_hierarchy_is_no_candidate() -> None:
    assert choose(2**24, Topology.one_host(8), SAME) in FLAT


def test_the_cheapest_by_the_walk_is_chosen() -> None:
    for size in range(2, 10):
        for nbytes in (8, 2**12, 2**18, 2**24):
            topology = Topology.one_host(size)
            costs = {name: predicted_s(FLAT[name], nbytes, topology, SAME) for name in FLAT}
            assert costs[choose(nbytes, topology, SAME)] == min(costs.values())


def test_a_name_overrides_the_choice() -> None:
    for name in ALGORITHMS[:-1]:
        assert Choice(name, Topology.one_host(4)).schedule(2**20).name == name


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(
        ConfigError,
        match="algorithm='rind' is not known; choose one of ring, halving-doubling, direct, tree, star, unsplit-ring, "
        "hierarchical, auto",
    ):
        check_algorithm("rind")


def agrees(world: World) -> tuple[Choice, Choice, list[str], dict[str, int]]:
    """Two hosts of which the first has two ranks: both links are there to be measured."""
    told = replace(world, host_rank=world.rank // 2, hosts=2)
    store = open_store(told, NoSupervisor(), 20.0)
    comm = Communicator.connect(told, store, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    before = comm.traffic
    measured = Choice.agreed(comm, AUTO)
    operations = sorted((comm.traffic - before).operations)
    given = Choice.agreed(comm, AUTO, network=SAME)
    native = dict((comm.traffic - before).native)
    comm.barrier()
    comm.close()
    return measured, given, operations, native


@pytest.mark.workers
def test_all_ranks_agree_on_hosts_and_on_one_measured_network() -> None:
    results = run_workers(agrees, 3)
    for result in results:
        assert result.error is None, result.traceback
    measured, given, _, _ = results[0].value
    assert all(result.value[:2] == (measured, given) for result in results)
    assert measured.topology == Topology(((0, 1), (2,)))
    assert measured.network is not None
    for link in (measured.network.inside, measured.network.across):
        assert link.alpha_s > 0
        assert link.beta_s >= 0
    assert measured.network.gamma_s > 0
    assert all(result.value[2] == ["ping-pong"] for result in results)
    assert given.network == SAME
