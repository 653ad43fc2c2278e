"""Medians, quartiles and paired ratios on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from paceline.bench.race import steps_that_fill
from paceline.bench.statistics import CpuClock, Spread, foreign_and_steal, is_disturbed, paired_ratios
from paceline.errors import ConfigError


def test_spread_gives_median_quartiles_and_extremes() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, 1.0, 5.0)


def test_quartiles_between_two_values_are_interpolated() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0]) == Spread(2.5, 1.75, 3.25, 1.0, 4.0)


def test_one_value_is_its_own_spread() -> None:
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)


def test_no_values_are_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match="every round was dropped"):
        Spread.of([])


def test_a_slow_round_cancels_in_paired_ratios() -> None:
    assert paired_ratios([1.0, 10.0], [2.0, 20.0]) == [0.5, 0.5]


def test_ratios_of_different_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios([1.0, 2.0], [1.0])


STAT = "cpu  {user} 0 100 5000 7 0 0 {steal} 0 0\ncpu0 1 0 0 0 0 0 0 0 0 0\ncpu1 1 0 0 0 0 0 0 0 0 0\nintr 5\n"


def test_foreign_work_is_what_the_machine_did_beyond_our_own() -> None:
    before = CpuClock.parse(STAT.format(user=1000, steal=10), at_s=50.0, ticks_per_s=100)
    after = CpuClock.parse(STAT.format(user=1300, steal=50), at_s=52.0, ticks_per_s=100)
    # 2 cores for 2 s are 4 CPU seconds: 3 were used, 2 of them by us, and 0.4 were stolen.
    assert list(foreign_and_steal(before, after, ours_s=2.0)) == pytest.approx([0.25, 0.1])


def test_ticks_that_lag_behind_our_own_clock_are_no_foreign_work() -> None:
    before = CpuClock.parse(STAT.format(user=1000, steal=0), at_s=0.0, ticks_per_s=100)
    after = CpuClock.parse(STAT.format(user=1100, steal=0), at_s=1.0, ticks_per_s=100)
    assert foreign_and_steal(before, after, ours_s=1.01) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("foreign", "steal", "disturbed"), [(0.05, 0.02, False), (0.05, 0.04, True), (0.0, 0.09, True)]
)
def test_more_than_eight_percent_of_other_work_disturbs(foreign: float, steal: float, disturbed: bool) -> None:
    assert is_disturbed(foreign, steal) is disturbed


def test_a_round_gets_the_steps_that_fill_it() -> None:
    assert steps_that_fill(0.75, [0.2, 0.25, 0.3], most=200) == 3
    assert steps_that_fill(0.75, [9.0], most=200) == 1
    assert steps_that_fill(0.75, [1e-6], most=200) == 200
