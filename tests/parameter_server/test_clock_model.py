"""The rule of the clock under random schedules: what is checked here is what runs (`WeightsInHand`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from paceline.errors import ReplicaError
from paceline.parameter_server.clock import BoundedDelay, BoundedStaleness, Clock, WeightsInHand
from tests.parameter_server.clock_model import CHOICES, CLOCKS, Action, Miniature, Shape, shapes

QUICK = settings(
    max_examples=100, stateful_step_count=12, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
SEARCH = settings(QUICK, max_examples=300, phases=[Phase.generate])


class ClockMachine(RuleBasedStateMachine):
    """Every step of the miniature checks reads and waits; the end checks that everybody gets there."""

    def __init__(self, clock: Clock, obeyed: Clock | None = None, hand: type[WeightsInHand] = WeightsInHand) -> None:
        super().__init__()
        self.make: Callable[[Shape], Miniature] = lambda shape: Miniature(clock, shape, obeyed, hand)
        self.failed = False

    @initialize(shape=shapes())
    def build(self, shape: Shape) -> None:
        self.miniature = self.make(shape)

    @rule(choices=CHOICES)
    def anything_happens(self, choices: list[int]) -> None:
        for choice in choices:
            if actions := self.miniature.actions():
                self._act(actions[choice % len(actions)])

    @rule(choice=st.integers(0, 2))
    def one_worker_runs_as_far_as_it_may(self, choice: int) -> None:
        number = choice % self.miniature.shape.workers
        while mine := [a for a in self.miniature.actions() if a in (("send", number), ("start", number))]:
            self._act(mine[0])

    @rule(choice=st.integers(0, 11))
    def one_channel_is_emptied(self, choice: int) -> None:
        channels = list(self.miniature.channels)
        channel = channels[choice % len(channels)]
        while self.miniature.channels[channel]:
            self._act(("deliver", *channel))

    def _act(self, action: Action) -> None:
        self.failed = True
        self.miniature.act(*action)
        self.failed = False

    def teardown(self) -> None:
        if not self.failed:
            self.miniature.run_to_end()


@pytest.mark.parametrize("clock", CLOCKS, ids=str)
def test_no_schedule_breaks_the_rule_of_the_clock(clock: Clock) -> None:
    run_state_machine_as_test(lambda: ClockMachine(clock), settings=QUICK)


# -- the machine notices what is wrong ---------------------------------------------------------------------------------


class OffByOne:
    """A clock that takes a round for the one after it, or before it."""

    def __init__(self, clock: Clock, by: int) -> None:
        self._clock, self._by = clock, by
        self.synchronous, self.deterministic = clock.synchronous, clock.deterministic
        self.see_own_updates = clock.see_own_updates

    def needs(self, round: int) -> int:
        return self._clock.needs(max(0, round + self._by))

    def pulls_before(self, round: int) -> bool:
        return self._clock.pulls_before(round)


class OneKeyIsEnough(WeightsInHand):
    def lacking(self, round: int) -> tuple[int, ...]:
        lacking = super().lacking(round)
        return lacking if len(lacking) == len(self._newest) else ()

    def start(self, round: int) -> dict[int, int]:
        self._read = dict(self._newest)
        return {key: read.version for key, read in self._read.items()}


class AsksOnce(WeightsInHand):
    def _worth_asking(self, key: int, round: int) -> bool:
        return key not in self._asked


class ForgetsOwn(OffByOne):
    def __init__(self, clock: Clock, by: int) -> None:
        super().__init__(clock, by)
        self.see_own_updates = False


def fails(clock: Clock, obeyed: Clock | None = None, hand: type[WeightsInHand] = WeightsInHand) -> str:
    with pytest.raises((AssertionError, ReplicaError)) as caught:
        run_state_machine_as_test(lambda: ClockMachine(clock, obeyed, hand), settings=SEARCH)
    return str(caught.value)


@pytest.mark.parametrize("clock", [BoundedStaleness(1, from_round=0), BoundedStaleness(2, from_round=0)], ids=str)
def test_a_staleness_clock_that_asks_for_one_round_less_is_caught_reading_too_early(clock: Clock) -> None:
    assert "read without" in fails(clock, OffByOne(clock, -1))


@pytest.mark.parametrize("clock", [BoundedStaleness(1, from_round=0), BoundedStaleness(2, from_round=0)], ids=str)
def test_a_staleness_clock_that_asks_for_one_round_more_is_caught_waiting_for_nothing(clock: Clock) -> None:
    assert "all that the bound requires was delivered" in fails(clock, OffByOne(clock, 1))


@pytest.mark.parametrize("clock", [BoundedStaleness(0), BoundedDelay(0), BoundedDelay(1)], ids=str)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_deterministic_clock_that_is_off_by_one_is_caught(clock: Clock, by: int) -> None:
    fails(clock, OffByOne(clock, by))


def test_a_sliding_window_in_the_place_of_groups_is_caught() -> None:
    assert "which are not its own" in fails(BoundedDelay(3), BoundedStaleness(3, from_round=0))


def test_a_worker_that_forgets_its_own_updates_is_caught() -> None:
    clock = BoundedStaleness(math.inf, see_own_updates=True)
    assert "read without" in fails(clock, ForgetsOwn(clock, 0))


def test_a_worker_that_looks_at_one_key_only_is_caught() -> None:
    assert "read without" in fails(BoundedStaleness(1, from_round=0), hand=OneKeyIsEnough)


def test_a_worker_that_asks_too_seldom_is_caught_in_a_deadlock() -> None:
    assert "deadlock" in fails(BoundedStaleness(1, see_own_updates=True, from_round=0), hand=AsksOnce)
