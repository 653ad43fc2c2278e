"""Every lane has one rider, and no worker carries more than its share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.world.lanes import neighbouring_lanes


@given(st.integers(1, 200), st.integers(1, 200))
def test_neighbouring_lanes_cover_every_lane_once_in_order(lanes: int, workers: int) -> None:
    rides = neighbouring_lanes(lanes, workers)
    assert (len(rides), [lane for ride in rides for lane in ride]) == (workers, list(range(lanes)))


@given(st.integers(1, 200), st.integers(1, 200))
def test_no_worker_rides_two_lanes_more_than_another(lanes: int, workers: int) -> None:
    counts = [len(ride) for ride in neighbouring_lanes(lanes, workers)]
    assert max(counts) - min(counts) <= 1
