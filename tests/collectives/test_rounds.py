"""A schedule's rounds say what its hops say: the same messages, hop by hop."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.collectives.ring_all_reduce import RING_ALL_GATHER, RING_REDUCE_SCATTER
from paceline.collectives.schedule import Schedule
from tests.collectives.simulator import NAMES, all_hops, schedule_of

SIZES = [*range(2, 18), 24, 31, 32, 33]
Messages = Counter[tuple[int, int, int]]  # (source, target, chunks)


def by_hops(schedule: Schedule, size: int) -> list[Messages]:
    together = zip(*all_hops(schedule, size), strict=True)
    return [
        Counter((rank, send.to, len(send.chunks)) for rank, hop in enumerate(hops) for send in hop.sends)
        for hops in together
    ]


def by_rounds(schedule: Schedule, size: int) -> list[Messages]:
    assert schedule.rounds is not None
    found = []
    for each in schedule.rounds(size):
        sources, targets = (ranks.tolist() for ranks in each.pattern.messages())
        sent = Counter((s, t, each.chunks) for s, t in zip(sources, targets, strict=True))
        found += [sent] * each.times
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hierarchical, uneven"])
@pytest.mark.parametrize("size", SIZES)
def test_rounds_are_the_hops_of_all_ranks(name: str, size: int) -> None:
    schedule = schedule_of(name, size)
    if schedule.rounds is None:
        assert (name, size % 2) == ("hierarchical", 1)  # hosts of unequal size
        return
    assert by_rounds(schedule, size) == by_hops(schedule, size)


@pytest.mark.parametrize("schedule", [RING_REDUCE_SCATTER, RING_ALL_GATHER])
def test_half_a_ring_too(schedule: Schedule) -> None:
    assert by_rounds(schedule, 5) == by_hops(schedule, 5)
