"""The global order: a shuffle without a list is still a shuffle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.global_order import Listed, Sequential, Shuffled


def whole(order: Shuffled) -> list[int]:
    return [order.sample_at(position) for position in range(order.samples)]


def unlikeliness(found: Iterable[int], kinds: int) -> float:
    """Chi-square against the uniform distribution, in standard deviations from what chance gives."""
    counts = Counter(found)
    expected = counts.total() / kinds
    chi_square = sum((counts[kind] - expected) ** 2 / expected for kind in range(kinds))
    return (chi_square - (kinds - 1)) / (2 * (kinds - 1)) ** 0.5


def test_every_size_up_to_three_hundred_is_a_bijection() -> None:
    broken = [n for n in range(1, 301) if sorted(whole(Shuffled(n, seed=n, epoch=0))) != list(range(n))]
    assert broken == []


@pytest.mark.parametrize("samples", [10**6 + 3, 2**32, 10**12 + 39, 2**63])
def test_positions_of_a_large_order_never_share_a_sample(samples: int) -> None:
    order = Shuffled(samples, seed=1, epoch=2)
    positions = {*range(1500), *range(samples - 1500, samples)}
    found = {order.sample_at(position) for position in positions}
    assert len(found) == len(positions)
    assert min(found) >= 0
    assert max(found) < samples


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_random_access_gives_what_iteration_gives(samples: int, seed: int, epoch: int, chance: random.Random) -> None:
    order = Shuffled(samples, seed, epoch)
    iterated = [order.sample_at(position) for position in range(min(samples, 60))]
    asked = list(range(len(iterated)))
    chance.shuffle(asked)
    assert {place: Shuffled(samples, seed, epoch).sample_at(place) for place in asked} == dict(enumerate(iterated))


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    orders = [tuple(whole(Shuffled(50, seed, epoch))) for seed in range(20) for epoch in range(20)]
    assert len(set(orders)) == len(orders)


def test_the_order_stays_what_it_was_when_jobs_began() -> None:
    assert whole(Shuffled(12, seed=0, epoch=0)) == [10, 2, 7, 9, 4, 8, 6, 5, 3, 11, 1, 0]


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 16, 30])
def test_every_sample_stands_first_equally_often_and_last_equally_often(samples: int) -> None:
    orders = [Shuffled(samples, seed=7, epoch=epoch) for epoch in range(100 * samples)]
    assert unlikeliness((order.sample_at(0) for order in orders), samples) < 4
    assert unlikeliness((order.sample_at(samples - 1) for order in orders), samples) < 4


def test_a_sample_lands_on_every_position_equally_often() -> None:
    landings = [whole(Shuffled(13, seed=5, epoch=epoch)).index(4) for epoch in range(1000)]
    assert unlikeliness(landings, 13) < 4


def test_neighbours_in_the_dataset_are_not_neighbours_in_the_order() -> None:
    orders = [Shuffled(11, seed=3, epoch=epoch) for epoch in range(2000)]
    distances = [(order.sample_at(6) - order.sample_at(5)) % 11 - 1 for order in orders]
    assert unlikeliness(distances, 10) < 4


def test_one_long_order_mixes_near_and_far() -> None:
    tenths = [Shuffled(10_000, seed=3, epoch=0).sample_at(position) // 1000 for position in range(1000)]
    assert unlikeliness(tenths, 10) < 4


def test_sequential_and_listed_orders_are_what_they_say() -> None:
    assert [Sequential(3).sample_at(position) for position in range(3)] == [0, 1, 2]
    assert [Listed((4, 4, 1)).sample_at(position) for position in range(3)] == [4, 4, 1]
