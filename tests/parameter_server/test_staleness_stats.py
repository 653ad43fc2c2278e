"""What was seen on the way: counted by threads, added over processes, told in a line, a few lines or JSON."""

from __future__ import annotations

import json
import threading

from hypothesis import given
from hypothesis import strategies as st

from paceline.parameter_server.staleness_stats import StalenessCounter, StalenessStats, sum_of

COUNTS = st.integers(0, 10**6)
BYTES = st.dictionaries(st.sampled_from(["worker 0", "worker 1", "server 0"]), st.integers(1, 10**9))
STATS = st.builds(
    StalenessStats,
    keys=COUNTS,
    key_updates=COUNTS,
    delays=st.dictionaries(st.integers(0, 20), st.integers(1, 1000)),
    duplicates=COUNTS,
    dropped=COUNTS,
    rounds=COUNTS,
    waits=COUNTS,
    waited_s=st.integers(0, 1000).map(float),
    queue_most=COUNTS,
    queue_total=COUNTS,
    queue_looks=COUNTS,
    sent_bytes=BYTES,
    received_bytes=BYTES,
    seconds=st.integers(0, 1000).map(float),
)


def server() -> StalenessStats:
    counter = StalenessCounter(keys=2)
    for delay in (0, 0, 0, 1, 1, 2):
        counter.applied(delay)
    counter.dropped(9)
    counter.duplicate()
    for length in (1, 4, 1):
        counter.queued(length)
    counter.sent("worker 0", 3 << 20)
    counter.received("worker 0", 2 << 20)
    counter.received("worker 0", 1 << 20)
    return counter.stats(seconds=1.5)


def worker() -> StalenessStats:
    counter = StalenessCounter()
    for waited_s in (0.0, 0.5, 0.75):
        counter.started_round(waited_s)
    counter.sent("server 0", 3 << 20)
    return counter.stats(seconds=2.0)


def test_what_a_server_counts() -> None:
    stats = server()
    assert (stats.updates, stats.updates_per_s) == (3, 2)
    assert stats.delays == {0: 3, 1: 2, 2: 1, 9: 1}
    assert (stats.mean_delay, stats.most_delay) == (13 / 7, 9)
    assert (stats.duplicates, stats.dropped) == (1, 1)
    assert (stats.queue_mean, stats.queue_most) == (2, 4)
    assert (stats.sent_bytes, stats.received_bytes) == ({"worker 0": 3 << 20}, {"worker 0": 3 << 20})


def test_what_a_worker_counts() -> None:
    stats = worker()
    assert (stats.rounds, stats.waits, stats.waited_s) == (3, 2, 1.25)


def test_updates_of_keys_on_two_servers_are_those_of_the_whole_model() -> None:
    counters = [StalenessCounter(keys=3), StalenessCounter(keys=1)]
    for counter, keys in zip(counters, (3, 1), strict=True):
        for _ in range(10 * keys):
            counter.applied(0)
    assert sum_of(counter.stats(2.0) for counter in counters).updates_per_s == 5


def test_threads_lose_no_count() -> None:
    counter = StalenessCounter(keys=1)

    def count() -> None:
        for _ in range(2000):
            counter.applied(1)
            counter.sent("worker 0", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    stats = counter.stats(1.0)
    assert (stats.updates, stats.delays, stats.sent_bytes) == (8000, {1: 8000}, {"worker 0": 8000})


@given(STATS, STATS, STATS)
def test_the_order_of_adding_does_not_matter(a: StalenessStats, b: StalenessStats, c: StalenessStats) -> None:
    assert (a + b) + c == a + (b + c) == sum_of([c, b, a])


@given(STATS)
def test_numbers_come_back_from_json(stats: StalenessStats) -> None:
    assert StalenessStats.of_json(json.loads(json.dumps(stats.to_json()))) == stats


@given(STATS)
def test_anything_can_be_told(stats: StalenessStats) -> None:
    assert all("\n" not in line for line in stats.lines())


def test_json_has_what_a_reader_would_compute() -> None:
    numbers = server().to_json()
    assert numbers["delays"] == {"0": 3, "1": 2, "2": 1, "9": 1}
    assert [numbers[name] for name in ("updates", "updates_per_s", "most_delay", "queue_mean")] == [3, 2, 9, 2]


def test_the_lines_at_the_end_of_a_run() -> None:
    assert (server() + worker()).lines() == [
        "updates    3 of the whole model, 1.5/s",
        "staleness  0: 43 %, 1: 29 %, 2: 14 %, 9: 14 % (mean 1.86, at most 9 rounds)",
        "clock      waited 1.2 s in 2 of 3 rounds",
        "queue      2.0 messages on average, at most 4",
        "ignored    1 duplicates, 1 pushes dropped",
        "traffic    3.0 MiB to and 0.0 MiB from server 0; 3.0 MiB to and 3.0 MiB from worker 0",
    ]


def test_what_was_not_counted_is_not_told() -> None:
    assert [line.split()[0] for line in worker().lines()] == ["clock", "traffic"]
    assert StalenessStats().lines() == []


def test_a_long_tail_of_delays_is_told_as_one() -> None:
    stats = StalenessStats(keys=1, key_updates=100, delays={0: 50, 1: 20, 2: 10, 3: 5, 4: 5, 5: 4, 8: 4, 30: 2})
    assert stats.lines()[1] == (
        "staleness  0: 50 %, 1: 20 %, 2: 10 %, 3: 5 %, 4: 5 %, 5 or more: 10 % (mean 1.87, at most 30 rounds)"
    )


def test_of_many_peers_the_first_are_told() -> None:
    stats = StalenessStats(sent_bytes={f"worker {number}": 1 << 20 for number in range(12)})
    (line,) = stats.lines()
    assert line.endswith("1.0 MiB to and 0.0 MiB from worker 7; and 4 more")
