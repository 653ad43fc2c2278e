"""The global order: a shuffle without a list is still a shuffle.

Every statistic is turned into standard deviations from what chance gives. Seeds are fixed, and a fair shuffle passes 4
standard deviations once in some 30,000 tests, so a failure means a changed order that is not fair.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import global_order
from paceline.data.global_order import ARRAY_FROM, TABLE_UP_TO, GlobalOrder, Listed, Sequential, Shuffled

# A table, its last size, the network with long walks (257 of 1024), with short ones and with none.
SIZES = [13, TABLE_UP_TO, TABLE_UP_TO + 1, 1000, 1024]


def whole(order: Shuffled) -> list[int]:
    return order.samples_at(range(order.samples))


def orders(samples: int, count: int) -> list[list[int]]:
    return [whole(Shuffled(samples, seed=7, epoch=epoch)) for epoch in range(count)]


def surprise(found: Iterable[Hashable], chances: Mapping[Hashable, float]) -> float:
    """Chi-square as standard deviations, by Wilson and Hilferty's cube root, which holds for few kinds too."""
    counts = Counter(found)
    assert set(counts) <= set(chances)
    total = counts.total()
    chi_square = sum((counts[kind] - total * chance) ** 2 / (total * chance) for kind, chance in chances.items())
    freedom = len(chances) - 1
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def equally(kinds: Iterable[Hashable]) -> dict[Hashable, float]:
    names = list(kinds)
    return dict.fromkeys(names, 1 / len(names))


def off_by(values: list[int], mean: float, variance: float) -> float:
    """How far the mean of independent values is from what it should be."""
    return abs(sum(values) / len(values) - mean) / (variance / len(values)) ** 0.5


def cycles(order: list[int]) -> int:
    seen: set[int] = set()
    count = 0
    for start in order:
        count += start not in seen
        while start not in seen:
            seen.add(start)
            start = order[start]
    return count


def test_every_size_up_to_three_hundred_is_a_bijection() -> None:
    broken = [n for n in range(1, 301) if sorted(whole(Shuffled(n, seed=n, epoch=0))) != list(range(n))]
    assert broken == []


@pytest.mark.parametrize("samples", [1023, 1024, 1025, 4096, 70_000])
def test_larger_sizes_are_bijections_whether_the_walks_are_long_or_not(samples: int) -> None:
    assert sorted(whole(Shuffled(samples, seed=1, epoch=2))) == list(range(samples))


@pytest.mark.parametrize("samples", [10**6 + 3, 2**32, 10**12 + 39, 2**62 + 1, 2**63 - 1, 2**63])
def test_positions_of_a_large_order_never_share_a_sample(samples: int) -> None:
    order = Shuffled(samples, seed=1, epoch=2)
    found = order.samples_at(range(1500)) + order.samples_at(range(samples - 1500, samples))
    assert len(set(found)) == len(found)
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


@st.composite
def orders_and_ranges(draw: st.DrawFn) -> tuple[GlobalOrder, range]:
    samples = draw(st.one_of(st.integers(1, 2000), st.integers(1, 2**63), st.sampled_from([2**32, 2**62 + 1, 2**63])))
    start = draw(st.one_of(st.integers(0, samples - 1), st.integers(0, min(samples - 1, 3))))
    positions = range(start, min(samples, start + draw(st.integers(0, 4 * ARRAY_FROM))), draw(st.integers(1, 3)))
    return Shuffled(samples, draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 9))), positions


@settings(max_examples=200, deadline=None)
@given(orders_and_ranges(), st.booleans())
def test_a_batch_at_a_time_gives_the_samples_of_one_at_a_time(case: tuple[GlobalOrder, range], backwards: bool) -> None:
    order, positions = case
    positions = positions[::-1] if backwards else positions
    one_by_one = [order.sample_at(position) for position in positions]
    together = order.samples_at(positions)
    assert together == one_by_one
    assert {type(sample) for sample in together} <= {int}


def test_sequential_and_listed_orders_are_what_they_say() -> None:
    assert [Sequential(3).sample_at(position) for position in range(3)] == [0, 1, 2]
    assert [Listed((4, 4, 1)).sample_at(position) for position in range(3)] == [4, 4, 1]
    assert Sequential(9).samples_at(range(4, 7)) == [4, 5, 6]
    assert Listed((4, 4, 1)).samples_at(range(1, 3)) == [4, 1]


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    found = [tuple(whole(Shuffled(50, seed, epoch))) for seed in range(20) for epoch in range(20)]
    assert len(set(found)) == len(found)


def test_the_order_stays_what_it_was_when_jobs_began() -> None:
    assert whole(Shuffled(12, seed=0, epoch=0)) == [11, 1, 3, 4, 7, 10, 9, 5, 0, 6, 8, 2]
    assert Shuffled(1000, seed=0, epoch=1).samples_at(range(8)) == [577, 766, 640, 127, 772, 492, 745, 789]
    assert Shuffled(1000, seed=0, epoch=0).samples_at(range(8)) == [998, 600, 807, 319, 196, 662, 16, 6]
    assert Shuffled(2**63, seed=5, epoch=3).sample_at(2**62) == 6998571768529931310


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_all_orders_of_few_samples_come_equally_often(samples: int) -> None:
    kinds = list(itertools.permutations(range(samples)))
    found = (tuple(order) for order in orders(samples, 100 * len(kinds)))
    assert surprise(found, equally(kinds)) < 4


def test_the_network_alone_would_not_be_fair_to_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_order, "TABLE_UP_TO", 1)
    found = (tuple(order) for order in orders(5, 12_000))
    assert surprise(found, equally(itertools.permutations(range(5)))) > 4


@pytest.mark.parametrize("samples", [3, 5, 16, 30, 300])
def test_every_sample_stands_first_equally_often_and_last_equally_often(samples: int) -> None:
    found = [Shuffled(samples, seed=7, epoch=epoch) for epoch in range(50 * samples)]
    assert surprise((order.sample_at(0) for order in found), equally(range(samples))) < 4
    assert surprise((order.sample_at(samples - 1) for order in found), equally(range(samples))) < 4


def test_a_sample_lands_on_every_position_equally_often() -> None:
    landings = (order.index(4) for order in orders(13, 1000))
    assert surprise(landings, equally(range(13))) < 4


@pytest.mark.parametrize("samples", SIZES)
def test_either_of_two_samples_comes_first_half_of_the_time(samples: int) -> None:
    places = [np.argsort(order) for order in orders(samples, 400)]
    for one, other in [(0, 1), (0, samples - 1), (2, samples // 2), (samples - 2, samples - 1)]:
        assert off_by([int(place[one] < place[other]) for place in places], 1 / 2, 1 / 4) < 4


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 32), (5, 37), (31, 992)])
def test_two_positions_get_every_pair_of_samples_equally_often(one: int, other: int) -> None:
    # 32 apart are equal right halves in the network over 2 × 5 bits, where short networks give themselves away.
    found = [Shuffled(1024, seed=7, epoch=epoch) for epoch in range(6000)]
    differences = (order.sample_at(one) ^ order.sample_at(other) for order in found)
    assert surprise(differences, equally(range(1, 1024))) < 4


def test_neighbours_in_the_dataset_are_not_neighbours_in_the_order() -> None:
    distances = ((order[6] - order[5]) % 11 for order in orders(11, 2000))
    assert surprise(distances, equally(range(1, 11))) < 4


@pytest.mark.parametrize("samples", SIZES)
def test_samples_stay_where_they_were_as_often_as_chance_has_it(samples: int) -> None:
    poisson = {count: math.exp(-1) / math.factorial(count) for count in range(4)}
    fixed = (sum(map(int.__eq__, order, range(samples))) for order in orders(samples, 600))
    assert surprise((min(count, 4) for count in fixed), poisson | {4: 1 - sum(poisson.values())}) < 4


@pytest.mark.parametrize("samples", SIZES)
def test_orders_have_as_many_cycles_as_chance_has_it_and_are_odd_half_of_the_time(samples: int) -> None:
    found = [cycles(order) for order in orders(samples, 400)]
    mean = sum(1 / size for size in range(1, samples + 1))
    variance = mean - sum(1 / size**2 for size in range(1, samples + 1))
    assert off_by(found, mean, variance) < 4
    assert off_by([(samples - count) % 2 for count in found], 1 / 2, 1 / 4) < 4


@pytest.mark.parametrize("samples", SIZES)
def test_samples_rise_and_fall_as_often_as_chance_has_it(samples: int) -> None:
    falls = [sum(later < earlier for earlier, later in itertools.pairwise(order)) for order in orders(samples, 200)]
    assert off_by(falls, (samples - 1) / 2, (samples + 1) / 12) < 4


def test_one_long_order_mixes_near_and_far() -> None:
    tenths = (sample // 1000 for sample in Shuffled(10_000, seed=3, epoch=0).samples_at(range(1000)))
    assert surprise(tenths, equally(range(10))) < 4


@pytest.mark.parametrize("samples", [10**6, 2**20, 10**9, 2**62 + 1])
def test_a_sample_of_a_long_order_tells_nothing_about_a_later_one(samples: int) -> None:
    found = np.array(Shuffled(samples, seed=3, epoch=0).samples_at(range(100_000)), float) / samples
    for lag in (1, 2, 32, 1024, 2**15):
        correlation = np.corrcoef(found[:-lag], found[lag:])[0, 1]
        assert abs(correlation) * (len(found) - lag) ** 0.5 < 4, lag


@pytest.mark.parametrize(
    "other", [lambda n: Shuffled(n, 3, 1), lambda n: Shuffled(n, 4, 0), Sequential], ids=["epoch", "seed", "dataset"]
)
def test_an_order_tells_nothing_about_the_next_epochs_another_seeds_or_the_datasets(
    other: Callable[[int], GlobalOrder],
) -> None:
    one, another = (order.samples_at(range(50_000)) for order in (Shuffled(50_000, 3, 0), other(50_000)))
    assert abs(np.corrcoef(one, another)[0, 1]) * 50_000**0.5 < 4
