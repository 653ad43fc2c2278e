"""Which slots the hosts of a job have, and which host that comes later is let in."""

from __future__ import annotations

import pytest

from paceline.elastic.slots import SlotAssignment
from paceline.errors import LaunchError


def test_hosts_have_neighbouring_slots_in_their_order() -> None:
    assignment = SlotAssignment([2, 1, 3], most=6, lanes=6)
    assert [list(assignment.slots_of(host)) for host in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert [assignment.host_of(slot) for slot in range(6)] == [0, 0, 1, 2, 2, 2]


def test_a_host_comes_back_to_its_slots_also_with_fewer_workers() -> None:
    assignment = SlotAssignment([2, 3, 1], most=6, lanes=8)
    assignment.leave(1)
    assert not assignment.is_there(1)
    assert assignment.workers_there == 3
    assert list(assignment.take(1, 2).slots) == [2, 3]
    assert (assignment.host_of(4), assignment.size) == (1, 6), "the last is empty, and still its own"
    assignment.leave(1)
    assert list(assignment.take(1, 3).slots) == [2, 3, 4]


def test_a_host_that_comes_back_with_more_workers_gets_new_slots() -> None:
    assignment = SlotAssignment([2, 1], most=6, lanes=8)
    assignment.leave(1)
    assert list(assignment.take(1, 3).slots) == [3, 4, 5]
    assert assignment.host_of(3) == 1


def test_further_hosts_get_slots_at_the_end_as_they_come() -> None:
    assignment = SlotAssignment([2], most=6, lanes=8)
    assert list(assignment.take(3, 2).slots) == [2, 3]
    assert list(assignment.take(1, 1).slots) == [4]
    assert (assignment.most_hosts, assignment.workers_there) == (4, 5)


def test_more_workers_than_allowed_or_than_lanes_are_refused_with_the_numbers() -> None:
    with pytest.raises(LaunchError, match=r"it brings 3 workers, and 2 are there: the job has at most 4 \(--max"):
        SlotAssignment([2], most=4, lanes=8).take(1, 3)
    with pytest.raises(LaunchError, match=r"it brings 1 worker, and 1 is there, but the job has 1 lane, fixed since"):
        SlotAssignment([1], most=4, lanes=1).take(1, 1)
    with pytest.raises(LaunchError, match="host 1 brings no worker"):
        SlotAssignment([1], most=4, lanes=1).take(1, 0)


def test_workers_of_a_lost_host_are_not_counted_so_another_may_come_instead() -> None:
    assignment = SlotAssignment([2, 2], most=4, lanes=4)
    assignment.leave(1)
    assert list(assignment.take(2, 2).slots) == [4, 5]
    with pytest.raises(LaunchError, match="it brings 2 workers, and 4 are there"):
        assignment.take(1, 2)


def test_a_job_with_servers_takes_its_own_hosts_back_and_no_others() -> None:
    assignment = SlotAssignment([2, 2], most=8, lanes=8, servers=1)
    with pytest.raises(LaunchError, match="gets no further workers; only its own hosts may come back"):
        assignment.take(2, 2)
    assignment.leave(1)
    with pytest.raises(LaunchError, match="come back with 2 workers at most"):
        assignment.take(1, 3)
    assert list(assignment.take(1, 2).slots) == [2, 3]
