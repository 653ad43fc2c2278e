"""The two clocks on paper, their words on a command line, and one worker's weights under them."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, ReplicaError
from paceline.parameter_server.clock import (
    BoundedDelay,
    BoundedStaleness,
    Clock,
    PullRequest,
    WeightsInHand,
    parse_clock,
)

BOUNDS = st.integers(0, 50)
CLOCKS = st.one_of(
    st.builds(BoundedStaleness, st.one_of(BOUNDS, st.just(math.inf)), st.booleans(), BOUNDS),
    st.builds(BoundedDelay, BOUNDS),
)


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clock", "needs"),
    [
        (BoundedStaleness(0), [-1, 0, 1, 2, 3, 4]),
        (BoundedStaleness(1, from_round=0), [-1, -1, 0, 1, 2, 3]),
        (BoundedStaleness(2, from_round=0), [-1, -1, -1, 0, 1, 2]),
        (BoundedStaleness(2), [-1, 0, 1, 2, 3, 4]),
        (BoundedStaleness(math.inf), [-1, -1, -1, -1, -1, -1]),
        (BoundedStaleness(2, from_round=2), [-1, 0, 1, 1, 1, 2]),
        (BoundedStaleness(math.inf, from_round=2), [-1, 0, 1, 1, 1, 1]),
        (BoundedDelay(0), [-1, 0, 1, 2, 3, 4]),
        (BoundedDelay(1), [-1, -1, 1, 1, 3, 3]),
        (BoundedDelay(3), [-1, -1, -1, -1, 3, 3]),
    ],
    ids=str,
)
def test_what_the_first_rounds_need(clock: Clock, needs: list[int]) -> None:
    assert [clock.needs(round) for round in range(6)] == needs


def test_with_a_delay_of_one_rounds_10_and_11_share_their_weights_and_12_needs_both() -> None:
    clock = BoundedDelay(1)
    assert [clock.needs(round) for round in (10, 11, 12)] == [9, 9, 11]
    assert [clock.pulls_before(round) for round in (10, 11, 12)] == [True, False, True]


@given(CLOCKS, st.integers(0, 1000))
def test_what_a_round_needs_never_shrinks_and_is_always_before_it(clock: Clock, round: int) -> None:
    assert -1 <= clock.needs(round) <= clock.needs(round + 1) <= round


@given(CLOCKS, st.integers(0, 1000))
def test_a_round_that_pulls_nothing_needs_what_the_round_before_it_needed(clock: Clock, round: int) -> None:
    assert clock.pulls_before(round + 1) or clock.needs(round + 1) == clock.needs(round)


@pytest.mark.parametrize(
    ("clock", "synchronous", "deterministic"),
    [
        (BoundedStaleness(), True, True),
        (BoundedStaleness(1), False, False),
        (BoundedStaleness(math.inf), False, False),
        (BoundedDelay(0), True, True),
        (BoundedDelay(3), False, True),
    ],
    ids=str,
)
def test_which_clocks_are_synchronous_and_which_deterministic(
    clock: Clock, synchronous: bool, deterministic: bool
) -> None:
    assert (clock.synchronous, clock.deterministic) == (synchronous, deterministic)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [-1, 1.5, 2.0, -math.inf, math.nan, True, None, "2"])
def test_a_staleness_that_is_no_bound_is_refused_in_one_line(steps: float) -> None:
    with pytest.raises(ConfigError) as caught:
        BoundedStaleness(steps)
    assert str(caught.value) == (
        f"BoundedStaleness(steps={steps!r}): the bound is a whole number of rounds, from 0 (synchronous), "
        "or math.inf (asynchronous)"
    )


@pytest.mark.parametrize("round", [-1, 1.5, True, "100"])
def test_a_window_that_opens_in_no_round_is_refused_in_one_line(round: int) -> None:
    with pytest.raises(ConfigError) as caught:
        BoundedStaleness(2, from_round=round)
    assert str(caught.value) == (
        f"BoundedStaleness(from_round={round!r}): the window opens in a round, from 0 (at once)"
    )


@pytest.mark.parametrize("rounds", [-1, 1.5, math.inf, False, None, "1"])
def test_a_delay_that_is_no_bound_is_refused_in_one_line(rounds: int) -> None:
    with pytest.raises(ConfigError) as caught:
        BoundedDelay(rounds)
    assert str(caught.value) == (
        f"BoundedDelay(rounds={rounds!r}): the delay is a whole number of rounds, from 0 (synchronous); "
        "to run without a bound use BoundedStaleness(steps=math.inf)"
    )


@given(CLOCKS)
def test_a_clock_comes_back_from_its_text(clock: Clock) -> None:
    assert parse_clock(str(clock)) == clock


@pytest.mark.parametrize(
    ("text", "clock"),
    [
        ("s=0", BoundedStaleness()),
        ("s=2,from=0", BoundedStaleness(2, from_round=0)),
        ("s=inf", BoundedStaleness(math.inf)),
        ("s=4,own,from=0", BoundedStaleness(4, see_own_updates=True, from_round=0)),
        ("s=2,from=100", BoundedStaleness(2)),
        ("s=inf,own,from=9", BoundedStaleness(math.inf, see_own_updates=True, from_round=9)),
        ("d=1", BoundedDelay(1)),
    ],
)
def test_the_words_of_a_command_line(text: str, clock: Clock) -> None:
    assert parse_clock(text) == clock
    assert str(clock) == text


@pytest.mark.parametrize("text", ["s=1", "s=2", "s=2,own"])
def test_a_bounded_window_opens_in_round_100_unless_told_otherwise_and_the_clock_says_so(text: str) -> None:
    clock = parse_clock(text)
    assert str(clock) == f"{text},from=100"
    assert [clock.needs(round) for round in (98, 99, 100, 101)] == [97, 98, 99, 99]


@pytest.mark.parametrize("text", ["", "2", "s=", "s=-1", "s=1.5", "d=inf", "d=1,own", "s=2 d=1", "async"])
def test_a_text_that_is_no_clock_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_clock(text)
    assert str(caught.value) == (
        f"clock {text!r} is not known; write s=N or s=inf (bounded staleness, with ,own to see own updates "
        "and ,from=N to wait for each other up to round N, 100 if you don't say) or d=N (bounded delay), such as s=2, "
        "s=2,from=0 or d=1"
    )


# -- one worker's weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clock", [BoundedStaleness(2, from_round=0), BoundedStaleness(math.inf, see_own_updates=True)], ids=str
)
def test_after_other_weights_were_shown_a_round_starts_only_on_new_ones(clock: Clock) -> None:
    hand = WeightsInHand(clock, keys=[0])
    hand.request_for(0)
    hand.forget()
    assert hand.lacking(0)
    assert hand.request_for(0) == PullRequest(0, -1, (0,))
    assert hand.arrived(0, version=0, complete=-1, round=0)
    assert hand.start(0) == {0: 0}


def test_a_worker_goes_on_with_old_weights_as_far_as_the_bound_allows() -> None:
    hand = WeightsInHand(BoundedStaleness(2, from_round=0), keys=[0, 1])
    assert [not hand.lacking(round) for round in range(5)] == [True, True, True, False, False]


def test_weights_that_came_are_read_from_the_next_start_on() -> None:
    hand = WeightsInHand(BoundedStaleness(1, from_round=0), keys=[0, 1])
    assert hand.start(0) == {0: 0, 1: 0}
    assert hand.request_for(1) == PullRequest(round=1, complete=-1, keys=(0, 1))
    assert hand.arrived(0, version=3, complete=0, round=1)
    assert hand.lacking(2) == (1,)
    assert hand.start(1) == {0: 3, 1: 0}


def test_nothing_is_asked_again_while_an_answer_that_is_new_enough_is_on_its_way() -> None:
    hand = WeightsInHand(BoundedStaleness(math.inf), keys=[0, 1])
    assert hand.request_for(1) == PullRequest(1, -1, (0, 1))
    hand.arrived(1, version=1, complete=-1, round=1)
    assert hand.request_for(2) == PullRequest(2, -1, (1,))
    assert hand.request_for(3) is None


def test_an_answer_that_would_be_too_old_does_not_keep_a_worker_from_asking() -> None:
    hand = WeightsInHand(BoundedStaleness(1, from_round=0), keys=[0])
    assert hand.request_for(1) == PullRequest(1, -1, (0,))
    assert hand.request_for(2) == PullRequest(2, 0, (0,))


def test_inside_a_group_nothing_is_asked() -> None:
    hand = WeightsInHand(BoundedDelay(1), keys=[0])
    assert [hand.request_for(round) for round in (0, 1)] == [None, None]
    assert hand.request_for(2) == PullRequest(2, 1, (0,))


def test_an_answer_older_than_what_is_there_is_thrown_away() -> None:
    hand = WeightsInHand(BoundedStaleness(4, from_round=0), keys=[0])
    assert hand.arrived(0, version=5, complete=1, round=2)
    assert not hand.arrived(0, version=3, complete=0, round=1)
    assert hand.start(2) == {0: 5}


def test_a_worker_that_wants_its_own_updates_waits_for_an_answer_to_what_it_asked_after_its_push() -> None:
    hand = WeightsInHand(BoundedStaleness(math.inf, see_own_updates=True), keys=[0])
    hand.request_for(1)
    hand.start(0)
    hand.pushed(0)
    hand.arrived(0, version=2, complete=-1, round=0)
    assert hand.lacking(1)
    hand.arrived(0, version=2, complete=-1, round=1)
    assert not hand.lacking(1)


def test_a_worker_without_samples_in_a_round_does_not_wait_to_see_them() -> None:
    hand = WeightsInHand(BoundedStaleness(math.inf, see_own_updates=True), keys=[0])
    hand.start(0)
    assert not hand.lacking(1)


def test_a_job_that_goes_on_from_round_6_has_all_updates_before_it() -> None:
    hand = WeightsInHand(BoundedStaleness(0), keys=[0, 1], first_round=6)
    assert hand.start(6) == {0: 0, 1: 0}
    assert hand.lacking(7)


def test_a_round_that_must_wait_cannot_be_started() -> None:
    hand = WeightsInHand(BoundedStaleness(0), keys=[0, 1])
    hand.arrived(1, version=1, complete=0, round=1)
    text = r"round 1 was started without the weights of keys \[0\] it must wait for"
    with pytest.raises(ReplicaError, match=text):
        hand.start(1)


def test_weights_newer_than_those_of_the_group_are_an_error() -> None:
    hand = WeightsInHand(BoundedDelay(1), keys=[0])
    hand.arrived(0, version=3, complete=2, round=2)
    with pytest.raises(ReplicaError) as caught:
        hand.start(2)
    assert str(caught.value) == (
        "round 2 reads the weights after round 1, but those of key 0 have the updates up to round 2; a server went on "
        "without this worker, or the job was resumed inside a group of d=1: resume from a step at which a group starts"
    )


@pytest.mark.job
def test_clocks_come_without_torch() -> None:
    modules = ["clock", "update_log", "replay_order", "staleness_stats"]
    script = "import sys\n" + "".join(f"import paceline.parameter_server.{name}\n" for name in modules)
    done = subprocess.run([sys.executable, "-c", script + "sys.exit('torch' in sys.modules)"], check=False, timeout=60)
    assert done.returncode == 0
