"""Barriers in the store: no worker goes on before all that are left have come."""

from __future__ import annotations

import threading
from collections.abc import Set

import pytest
from torch._C._distributed_c10d import HashStore

from paceline.errors import PeerLostError
from paceline.parameter_server.handshake import StoreBarrier


def barriers(workers: int, timeout_s: float = 10.0) -> list[StoreBarrier]:
    store = HashStore()
    return [StoreBarrier(store, worker, workers, timeout_s) for worker in range(workers)]


def test_no_worker_goes_on_before_the_last_has_come() -> None:
    first, second = barriers(2)
    went_on = threading.Event()

    def come() -> None:
        for _ in range(2):
            first.wait()
        went_on.set()

    thread = threading.Thread(target=come)
    thread.start()
    second.wait()
    assert not went_on.wait(0.05)
    second.wait()
    assert went_on.wait(10)
    thread.join(10)


def test_a_worker_that_is_gone_is_not_waited_for_and_is_named() -> None:
    first, _, third = barriers(3)
    found: list[Set[int]] = []
    thread = threading.Thread(target=lambda: found.append(first.wait()))
    thread.start()
    third.mark_gone(1)
    found.append(third.wait())
    thread.join(10)
    assert found == [{1}, {1}]


def test_who_came_and_then_left_was_there() -> None:
    first, second = barriers(2)
    thread = threading.Thread(target=second.wait)
    thread.start()
    assert first.wait() == set()
    thread.join(10)
    second.mark_gone(1)
    assert first.wait() == {1}


def test_a_worker_that_does_not_come_is_named_when_the_time_is_up() -> None:
    first, *_ = barriers(3, timeout_s=0.05)
    with pytest.raises(PeerLostError, match=r"^worker 0 waited 0.05 s at a boundary for workers 1, 2$"):
        first.wait()


def test_what_others_published_is_read_as_far_as_it_is_there() -> None:
    first, second = barriers(2)
    second.publish("stats/worker 1", {"rounds": 3})
    assert first.published(["stats/worker 1", "stats/server 0"], within_s=0.05) == {"stats/worker 1": {"rounds": 3}}


def test_a_process_that_is_alone_does_not_wait() -> None:
    alone = StoreBarrier(None, 0, 1, 10.0)
    assert alone.wait() == set()
    alone.publish("stats/worker 0", 1)
    assert alone.published(["stats/worker 0"], within_s=0) == {}
