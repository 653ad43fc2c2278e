"""What a late push is worth, against the table of the file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.parameter_server.staleness_policy import (
    Outcome,
    StalenessPolicy,
    corrected_momentum,
    delay_in_rounds,
    lr_factor,
)

ALL = StalenessPolicy(learning_rate="divide by delay", momentum="corrected", drop_beyond=4)
DELAYS = st.integers(0, 1000)


def test_the_table_of_the_file() -> None:
    delays = [0, 1, 2, 4, 9]
    assert [lr_factor(delay) for delay in delays] == [1, 1, 1 / 2, 1 / 4, 1 / 9]
    assert [corrected_momentum(0.9, delay) for delay in delays] == pytest.approx([0.9, 0.8, 0.7, 0.5, 0.0])
    assert [ALL.of(delay).dropped for delay in delays] == [False, False, False, False, True]


@given(DELAYS, st.floats(0, 1))
def test_nothing_asked_for_changes_nothing(delay: int, momentum: float) -> None:
    assert StalenessPolicy().of(delay, momentum) == Outcome(delay)


@given(st.floats(0, 1))
def test_a_push_without_delay_keeps_the_bits_of_its_settings(momentum: float) -> None:
    assert ALL.of(0, momentum) == Outcome(0, 1.0, momentum)


@given(DELAYS, st.floats(0, 0.9999))
def test_the_two_momenta_together_are_the_one_that_was_tuned(delay: int, momentum: float) -> None:
    explicit = corrected_momentum(momentum, delay)
    implicit = 1 - 1 / (delay + 1)
    together = 1 - (1 - explicit) * (1 - implicit)
    assert 0 <= explicit <= momentum
    assert together == pytest.approx(momentum if explicit else max(momentum, implicit), abs=1e-9)


@given(DELAYS)
def test_a_later_push_is_never_worth_more(delay: int) -> None:
    assert lr_factor(delay + 1) <= lr_factor(delay)
    assert corrected_momentum(0.9, delay + 1) <= corrected_momentum(0.9, delay)


def test_momentum_is_corrected_by_updates_and_the_learning_rate_by_rounds() -> None:
    assert ALL.of(2, 0.9, 4) == Outcome(2, 0.5, corrected_momentum(0.9, 4), updates=4)


def test_an_optimizer_without_momentum_has_none_to_correct() -> None:
    assert ALL.of(2, None) == Outcome(2, 0.5, None)


def test_nothing_else_happens_to_a_dropped_push() -> None:
    assert ALL.of(5, 0.9) == Outcome(5, dropped=True)


@pytest.mark.parametrize(
    ("now", "read", "lanes", "delay"), [(8, 8, 4, 0), (9, 8, 4, 1), (11, 8, 4, 1), (12, 8, 4, 1), (13, 8, 4, 2)]
)
def test_the_delay_is_counted_in_rounds_begun(now: int, read: int, lanes: int, delay: int) -> None:
    assert delay_in_rounds(now, read, lanes) == delay


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"learning_rate": "halved"},
            "StalenessPolicy(learning_rate='halved') is not known; choose 'as given' or 'divide by delay'",
        ),
        ({"momentum": 0.9}, "StalenessPolicy(momentum=0.9) is not known; choose 'as given' or 'corrected'"),
        (
            {"drop_beyond": -1},
            "StalenessPolicy(drop_beyond=-1): pushes are dropped beyond a whole number of rounds, from 0, "
            "or never (None)",
        ),
        (
            {"drop_beyond": 1.5},
            "StalenessPolicy(drop_beyond=1.5): pushes are dropped beyond a whole number of rounds, from 0, "
            "or never (None)",
        ),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StalenessPolicy(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (StalenessPolicy(), "as given"),
        (StalenessPolicy(drop_beyond=1), "dropped beyond 1 round"),
        (StalenessPolicy(look_ahead=False), "weights not looked ahead"),
        (ALL, "learning rate divided by the delay, momentum corrected, dropped beyond 4 rounds"),
    ],
)
def test_a_policy_says_what_it_does(policy: StalenessPolicy, text: str) -> None:
    assert str(policy) == text
