"""Servers on the workers' hosts: words wait in queues, and nothing else about a round is new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.simulate.exchange import push_and_pull
from paceline.simulate.network import network_named
from tests.benchmarks import script

served_round = script("served_round")

NETWORK = network_named("shaped-100m")
BYTES, KEYS = 4_193_280, 24
BULK = 1e6
BULK_S = BULK / NETWORK.for_workers(2).bandwidths[0]


def round_s(workers: int, servers: int, places: list[int]) -> float:
    placed = NETWORK.for_workers(max(places) + 1).with_places(np.asarray(places))
    starts = np.random.default_rng(0).uniform(0, 1e-3, (9, workers))
    made = served_round.ServedRound(placed, workers, servers, BYTES, KEYS)
    return float(np.median([(made.run(each) - each).max() for each in starts]))


def bytes_s(nbytes: float) -> float:
    """Each way over one link."""
    return 2 * nbytes / NETWORK.for_workers(2).bandwidths[0]


def word_s(*bulk: tuple[int, int]) -> float:
    """How long a reader's word takes from host 1 to host 0; `bulk` is on its way, half of it by then."""
    pieces = 50
    sources, targets = (np.asarray(each).repeat([pieces] * len(bulk) + [1]) for each in zip(*bulk, (1, 0), strict=True))
    sizes = np.append(np.full(len(sources) - 1, BULK / pieces), served_round.WORD_BYTES)
    asks = np.append(np.zeros(len(sources) - 1, dtype=np.int64), round(BULK_S / 2 * 1e9))
    path = served_round._Path(NETWORK.for_workers(4), sources, targets, sizes)
    return float(path.take(asks)[-1] - asks[-1]) / 1e9


def test_a_readers_word_takes_a_latency_on_links_that_carry_nothing_else() -> None:
    assert word_s() == pytest.approx(NETWORK.levels[0].latency_s, rel=0.2)


@pytest.mark.parametrize("to", [0, 2])
def test_a_readers_word_waits_for_what_its_host_sends(to: int) -> None:
    assert word_s((1, to)) == pytest.approx(BULK_S / 2, rel=0.05)


def test_a_readers_word_waits_for_what_others_send_to_its_senders_host() -> None:
    assert word_s((2, 0), (3, 0)) == pytest.approx(BULK_S / 2, rel=0.05)


def test_a_readers_word_does_not_wait_for_what_goes_the_other_way() -> None:
    assert word_s((0, 1)) == word_s()


def test_two_hosts_that_both_send_and_serve_take_longer_than_one_way_traffic() -> None:
    """Of what a link's bytes take: half of them stay on the host where both are on it."""
    both = round_s(2, 2, [0, 1, 0, 1]) / bytes_s(BYTES / 2)
    one_way = round_s(2, 2, [0, 1, 2, 3]) / bytes_s(BYTES)
    assert both > 1.2 > 1.1 > one_way, f"both ways: {both:.2f} times their bytes' time, one way: {one_way:.2f}"


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_one_server_on_a_host_of_its_own_takes_as_long_as_its_bytes(workers: int) -> None:
    placed = NETWORK.for_workers(workers + 1)
    plain = sum(each.seconds for each in push_and_pull(placed, workers, np.asarray([workers]), BYTES))
    assert round_s(workers, 1, list(range(workers + 1))) == pytest.approx(plain, rel=0.06)


def test_a_server_beside_the_only_worker_sends_nothing() -> None:
    assert round_s(1, 1, [0, 0]) < 0.02


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 9)), max_size=40))
def test_links_are_queues_in_which_who_joins_first_leaves_first(messages: list[tuple[int, int, int]]) -> None:
    links, joins, takes = np.asarray(messages, dtype=np.int64).reshape(-1, 3).T
    found = joins.copy()
    served_round._Queues(np.arange(len(links)), links, takes).take(found)
    free = dict.fromkeys(range(4), 0)
    for place in np.argsort(joins, kind="stable"):
        free[links[place]] = max(free[links[place]], joins[place]) + takes[place]
        assert found[place] == free[links[place]]
