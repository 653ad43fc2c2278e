"""Messages on paper: both ends agree on every message, and nobody ever waits for the future."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.executor import Message, Pipeline, pipeline
from paceline.collectives.ring_all_reduce import RING
from paceline.collectives.schedule import How
from tests.collectives.simulator import NAMES, all_hops, schedule_of

names = st.sampled_from(NAMES)
sizes = st.integers(2, 8)
elements = st.integers(0, 120)
most_per_message = st.integers(1, 40)


def pipelines(name: str, size: int, count: int, most: int) -> list[Pipeline]:
    return [pipeline(schedule_of(name, size), rank, size, count, most) for rank in range(size)]


def test_a_ring_of_two_with_two_segments_looks_like_the_drawing() -> None:
    messages = pipeline(RING, 0, 2, 8, 2).messages
    assert [(m.beat, m.peer, m.low, m.high, m.how, m.after) for m in messages] == [
        (0, 1, 0, 2, How.ADD, ()),
        (0, 1, 4, 6, None, ()),
        (1, 1, 2, 4, How.ADD, ()),
        (1, 1, 6, 8, None, ()),
        (2, 1, 4, 6, How.COPY, (1,)),  # the finished chunk may overwrite what has left
        (2, 1, 0, 2, None, (0,)),  # the chunk leaves when it is added
        (3, 1, 6, 8, How.COPY, (3,)),
        (3, 1, 2, 4, None, (2,)),
    ]


@settings(max_examples=150, deadline=None)
@given(names, sizes, elements, most_per_message)
def test_the_messages_between_two_ranks_are_the_same_seen_from_both_ends_in_the_same_order(
    name: str, size: int, count: int, most: int
) -> None:
    """Messages between two ranks are matched by order alone."""

    def between(plan: Pipeline, peer: int, *, sent: bool) -> list[tuple[int, int, int, int | None]]:
        return [(m.beat, m.low, m.high, m.part) for m in plan.messages if m.peer == peer and m.is_sent == sent]

    plans = pipelines(name, size, count, most)
    for rank in range(size):
        for peer in range(size):
            assert between(plans[rank], peer, sent=True) == between(plans[peer], rank, sent=False)


@settings(max_examples=150, deadline=None)
@given(names, sizes, elements, most_per_message)
def test_a_message_waits_only_for_messages_of_earlier_beats_or_listed_before_it(
    name: str, size: int, count: int, most: int
) -> None:
    for plan in pipelines(name, size, count, most):
        for number, message in enumerate(plan.messages):
            for earlier in message.after:
                before = plan.messages[earlier]
                assert earlier < number
                if message.how is How.ADD:  # several addends of one hop have an order
                    assert before.beat <= message.beat
                else:
                    assert before.beat < message.beat


@settings(max_examples=100, deadline=None)
@given(names, sizes, elements, most_per_message)
def test_messages_carry_each_chunk_of_the_schedule_once_and_are_never_empty(
    name: str, size: int, count: int, most: int
) -> None:
    schedule = schedule_of(name, size)
    ranges = schedule.ranges(count, size)
    for rank, hops in enumerate(all_hops(schedule, size)):
        plan = pipeline(schedule, rank, size, count, most)
        wanted = Counter(
            (send.to, element)
            for hop in hops
            for send in hop.sends
            for chunk in send.chunks
            for element in range(*ranges[chunk])
        )
        assert wanted == Counter((m.peer, n) for m in plan.messages if m.is_sent for n in range(m.low, m.high))
        assert all(message.low < message.high for message in plan.messages)


@settings(max_examples=60, deadline=None)
@given(names, sizes, st.integers(50, 200), st.integers(1, 8))
def test_a_chunk_that_is_cut_makes_no_message_above_the_limit(name: str, size: int, count: int, most: int) -> None:
    longest = max(high - low for low, high in schedule_of(name, size).ranges(count, size))
    for plan in pipelines(name, size, count, most):
        if longest > most:
            assert all(message.high - message.low <= most for message in plan.messages)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_not_cut_sends_one_message_per_transfer(name: str) -> None:
    for rank, hops in enumerate(all_hops(schedule_of(name, 4), 4)):
        messages: tuple[Message, ...] = pipeline(schedule_of(name, 4), rank, 4, 40, 40).messages
        assert sum(message.is_sent for message in messages) == sum(len(hop.sends) for hop in hops)


def test_slots_hold_at_least_what_one_beat_brings() -> None:
    plan = pipeline(schedule_of("star", 30), 0, 30, 100, 10)
    assert plan.slots == 29
    assert pipeline(schedule_of("ring", 3), 0, 3, 9, 100).slots == 2
