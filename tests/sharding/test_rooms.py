"""A few rooms serve all buckets in turn."""

from __future__ import annotations

import torch

from paceline.sharding.bucket import Bucket, GradientSpec, plan_buckets
from paceline.sharding.rooms import Rooms

CPU = torch.device("cpu")


def bucket(elements: int, dtype: torch.dtype = torch.float32) -> Bucket:
    (made,) = plan_buckets([GradientSpec((elements,), dtype, CPU)], [0], 10**6)
    return made


def test_a_room_that_was_given_back_serves_any_other_bucket_of_its_dtype() -> None:
    rooms, small, large, other = Rooms(), bucket(10), bucket(1000), bucket(10, torch.float64)
    for expected in (small, large):
        rooms.expect(expected)
    first = rooms.take(small)
    assert first.shape == (10,)
    rooms.give_back(first)
    second = rooms.take(large)
    assert second.shape == (1000,)
    assert second.data_ptr() == first.data_ptr()
    assert rooms.take(other).dtype == torch.float64
    assert rooms.bytes == 4000 + 80


def test_rooms_that_are_out_are_not_lent_twice() -> None:
    rooms = Rooms()
    taken = [rooms.take(bucket(10)) for _ in range(3)]
    assert len({room.data_ptr() for room in taken}) == 3
    for room in taken:
        rooms.give_back(room)
    assert rooms.bytes == 3 * 40


def test_rooms_too_small_for_new_buckets_are_let_go() -> None:
    rooms = Rooms()
    rooms.give_back(rooms.take(bucket(10)))
    rooms.give_back(rooms.take(bucket(20)))
    assert rooms.bytes == 80


def test_an_empty_bucket_takes_no_room() -> None:
    rooms = Rooms()
    for _ in range(2):
        rooms.give_back(rooms.take(bucket(0)))
    assert rooms.bytes == 0
