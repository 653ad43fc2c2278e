"""Every lane has one rider, and no worker carries more than its share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.world.lanes import neighbouring_lanes


@given(st.integers(1, 200), st.integers(1, 200))
def test_neighbouring_lanes_cover_every_lane_once_in_order(lanes: int, workers: int) -> None:
    assignment = neighbouring_lanes(lanes, workers)
    assert (len(assignment), [lane for own in assignment for lane in own]) == (workers, list(range(lanes)))


@given(st.integers(1, 200), st.integers(1, 200))
def test_no_worker_has_two_lanes_more_than_another(lanes: int, workers: int) -> None:
    counts = [len(own) for own in neighbouring_lanes(lanes, workers)]
    assert max(counts) - min(counts) <= 1
