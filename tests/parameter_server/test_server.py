"""Servers and clients with their threads: rounds go through, whoever is lost is named, and everything ends."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.errors import GenerationEnded, PeerLostError
from paceline.parameter_server.clock import BoundedDelay, BoundedStaleness
from paceline.parameter_server.key_ranges import Key
from paceline.parameter_server.wire import WireError
from tests.launch.launching import wait_until
from tests.parameter_server.one_process import Cluster, space_of

SYNCHRONOUS, ASYNCHRONOUS = BoundedStaleness(0), BoundedStaleness(math.inf)


def all_are(weights: list[Tensor], value: float) -> bool:
    return all(torch.allclose(tensor, torch.full_like(tensor, value)) for tensor in weights)


def nothing(key: Key, tensor: Tensor) -> None: ...


# -- rounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_a_round_of_all_workers_moves_the_weights_of_all(servers: int) -> None:
    with Cluster(workers=3, servers=servers, clock=SYNCHRONOUS) as cluster:
        for round in range(3):
            cluster.say_round(round)
            for worker in range(3):
                assert all_are(cluster.start(worker, round + 1), -(round + 1))


def test_servers_tell_each_other_what_they_need_to_clip() -> None:
    with Cluster(workers=2, servers=3, clock=SYNCHRONOUS) as cluster:
        elements = sum(parameter.numel() for parameter in cluster.space.parameters)
        cluster.say_round(0, max_norm=math.sqrt(elements) / 2)
        assert all_are(cluster.start(0, 1), -0.5)
        assert cluster.clients[0].norm == pytest.approx(math.sqrt(elements))


def test_a_worker_ahead_waits_for_the_others_and_goes_on_when_they_come() -> None:
    with Cluster(workers=2, clock=BoundedStaleness(1, from_round=0)) as cluster:
        cluster.say_round(0, workers=[0])
        cluster.start(0, 1)  # round 1 needs nothing
        cluster.say_round(1, workers=[0])
        came = threading.Event()
        thread = threading.Thread(target=lambda: (cluster.start(0, 2), came.set()))
        thread.start()
        assert not came.wait(0.1)  # round 2 needs all of round 0
        cluster.say_round(0, workers=[1])
        assert came.wait(5)
        thread.join(5)


def test_sums_are_fetched_by_every_worker() -> None:
    with Cluster(workers=2, servers=2, clock=BoundedDelay(1), mode="aggregate") as cluster:
        cluster.say_round(0)
        for client in cluster.clients:
            seen: dict[int, float] = {}
            used = client.sums(0, lambda key, total, seen=seen: seen.update({key.number: float(total.mean())}))
            assert seen == dict.fromkeys(range(len(cluster.table.keys)), 1.0)
            assert set(used) == set(seen)
            assert all(used.values())


def test_at_a_boundary_the_newest_weights_come_whatever_the_clock_shows() -> None:
    with Cluster(workers=1, clock=BoundedDelay(3)) as cluster:
        cluster.say_round(0)
        newest: list[float] = []
        cluster.clients[0].newest(1, lambda _, weights: newest.append(float(weights.mean())))
        assert newest == [-1.0] * len(cluster.table.keys)
        assert all_are(cluster.start(0, 1), 0)  # round 1 still reads what round 0 read


# -- the end -----------------------------------------------------------------------------------------------------------


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-")}


def test_when_all_have_said_goodbye_no_thread_is_left() -> None:
    before = names_of_threads()
    with Cluster(workers=2, servers=2, clock=SYNCHRONOUS) as cluster:
        cluster.say_round(0)
        cluster.start(0, 1)  # a goodbye before the others were heard would be an error
    deadline = time.monotonic() + 5
    while names_of_threads() - before:
        assert time.monotonic() < deadline, names_of_threads()
        time.sleep(0.01)


def test_processes_with_nothing_to_say_are_not_taken_for_lost() -> None:
    with Cluster(workers=2, servers=2, clock=SYNCHRONOUS, timeout_s=0.4) as cluster:
        cluster.say_round(0)
        cluster.start(0, 1)
        cluster.start(1, 1)
        time.sleep(1.0)
        cluster.say_round(1)
        assert all_are(cluster.start(1, 2), -2)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def lose(cluster: Cluster, worker: int) -> None:
    """It says nothing any more."""
    cluster.lines[worker]._silent.set()
    cluster.lines[worker].close = lambda: None  # type: ignore[method-assign]


def expect_lost(cluster: Cluster, worker: int, words: str) -> None:
    with pytest.raises(PeerLostError, match=words):
        cluster.start(worker, 1)


def test_where_rounds_need_all_workers_a_lost_one_is_named_to_the_others() -> None:
    cluster = Cluster(workers=3, clock=SYNCHRONOUS, timeout_s=0.4)
    with pytest.raises(PeerLostError, match="worker 1 was lost"), cluster:
        cluster.say_round(0, workers=[0, 2])
        lose(cluster, 1)
        for worker in (0, 2):
            expect_lost(cluster, worker, r"^worker 1 was lost in round 0, before it had pushed all of it; .* resume")


def test_where_pushes_are_applied_on_arrival_the_others_go_on_without_a_lost_one() -> None:
    left: list[int] = []
    cluster = Cluster(workers=2, clock=BoundedStaleness(1, from_round=0), timeout_s=0.4)
    cluster.servers[0]._on_leave = lambda worker, _: left.append(worker)
    with cluster:
        cluster.say_round(0)
        lose(cluster, 1)
        for round in range(1, 6):
            cluster.start(0, round)
            cluster.say_round(round, workers=[0])
        cluster.clients[0].refresh(6, cluster.putting(0))
        assert all_are(cluster.read[0], -(1 + 5 / 2))
        assert left == [1]


def test_a_message_that_makes_no_sense_ends_the_job_with_its_reason_for_all() -> None:
    cluster = Cluster(workers=2, servers=2, clock=SYNCHRONOUS)
    with pytest.raises(WireError, match="lane is 5"), cluster:
        cluster.say_round(0, workers=[0])
        key = cluster.table.keys[0]
        client = cluster.clients[1]
        client.open(0, [1])
        client.push(key, torch.zeros(key.elements), round=0, lane=5, used=1)
        for worker in (0, 1):
            expect_lost(cluster, worker, r"^worker 1 sent PUSH of round 0 whose lane is 5, expected 0 to 1")
        # The other server heard nothing of it; it is told here so that the test ends.
        cluster.servers[1 - key.server].fail(WireError("lane is 5"))


def test_a_lost_server_is_named_with_what_it_held() -> None:
    cluster = Cluster(workers=1, servers=2, clock=SYNCHRONOUS, timeout_s=0.4)
    cluster.servers[0].start()
    cluster.say_round(0)
    held = cluster.table.held_by(1)
    expect_lost(
        cluster, 0, rf"^server 1, which held {held.replace('(', '.').replace(')', '.')}, was lost .*; .* saved state"
    )
    cluster.lines[0].close()


def test_weights_that_do_not_come_are_named_when_the_time_is_up() -> None:
    cluster = Cluster(workers=2, clock=SYNCHRONOUS, timeout_s=0.5)
    with cluster:
        cluster.say_round(0, workers=[0])
        with pytest.raises(
            PeerLostError, match=r"^worker 0 waited 0.5 s for the weights that round 1 needs from server 0"
        ):
            cluster.start(0, 1)
        cluster.say_round(0, workers=[1])
        wait_until(lambda: cluster.servers[0].stats.updates == 1, 5, "the round")  # or worker 0's goodbye comes first


def test_a_worker_that_leaves_in_a_round_is_named_to_those_that_wait() -> None:
    cluster = Cluster(workers=2, clock=SYNCHRONOUS)
    with pytest.raises(PeerLostError, match="said goodbye in round 0"), cluster:
        cluster.say_round(0, workers=[0])
        cluster.clients[0].flush()
        cluster.lines[1].close()
        expect_lost(cluster, 0, r"^worker 1 said goodbye in round 0, which others are waiting for")
        cluster.servers[0].fail(PeerLostError("worker 1 said goodbye in round 0"))


# -- what was seen -----------------------------------------------------------------------------------------------------


def test_bytes_are_counted_by_peer_on_both_sides() -> None:
    with Cluster(workers=2, servers=2, clock=SYNCHRONOUS) as cluster:
        cluster.say_round(0)
        for worker in (0, 1):
            cluster.start(worker, 1)
        for number, server in enumerate(cluster.servers):
            pushed = sum(key.gradient_bytes for key in cluster.table.of_server(number))
            told = sum(cluster.lines[0].stats_so_far().sent_bytes[f"server {s}"] for s in (number,))
            assert server.stats.received_bytes["worker 0"] == told > pushed
            assert server.stats.sent_bytes == {"worker 0": pushed, "worker 1": pushed}
            assert server.stats.updates == 1


def test_what_a_server_holds_is_told_in_runs_of_keys() -> None:
    table = space_of(1, 2).table
    servers = [table.held_by(server) for server in range(2)]
    assert servers == ["keys 1, 3 (weight)", "keys 0, 2 (bias … weight)"]
    together = replace(table, keys=tuple(replace(key, server=0) for key in table.keys), servers=1)
    assert together.held_by(0) == "keys 0–3 (bias … weight)"


def test_a_ping_does_not_make_a_server_hold_anything() -> None:
    with Cluster(workers=1, clock=ASYNCHRONOUS) as cluster:
        cluster.clients[0].flush()
        assert not cluster.servers[0]._cores


# -- a group that is over ----------------------------------------------------------------------------------------------


def test_when_the_group_is_over_every_wait_says_so_and_no_thread_is_left() -> None:
    before = names_of_threads()
    cluster = Cluster(workers=2, servers=2, clock=SYNCHRONOUS)
    for server in cluster.servers:
        server.start()
    cluster.say_round(0, workers=[0])
    threading.Timer(0.1, cluster.servers[0].abandon, ["worker 1 is gone"]).start()
    with pytest.raises(GenerationEnded, match=r"^worker 1 is gone$"):
        cluster.start(0, 1)
    with pytest.raises(GenerationEnded, match=r"^worker 1 is gone$"):
        cluster.servers[0].join()
    for lines in cluster.lines:
        lines.abandon("worker 1 is gone")
    with pytest.raises(GenerationEnded):
        cluster.clients[0].flush()
    cluster.servers[1].abandon("worker 1 is gone")
    assert names_of_threads() == before


def test_what_was_said_when_the_group_was_over_is_not_applied() -> None:
    """A round that was not committed must not show in what is kept of the one before."""
    cluster = Cluster(workers=1, clock=SYNCHRONOUS)
    cluster.servers[0].start()
    cluster.say_round(0)
    cluster.start(0, 1)
    cluster.servers[0].abandon("the workers have changed")
    with pytest.raises(GenerationEnded):
        cluster.say_round(1)
    assert cluster.servers[0].states(cluster.table.digest, 1) is not None
    assert cluster.servers[0].states(cluster.table.digest, 2) is None
    cluster.lines[0].close()


def test_the_servers_own_states_are_handed_out_once_the_round_is_in() -> None:
    with Cluster(workers=2, clock=SYNCHRONOUS) as cluster:
        (server,), digest = cluster.servers, cluster.table.digest
        assert server.states(digest, 0) is None  # it holds nothing before it hears of the space
        cluster.say_round(0, workers=[0])
        cluster.clients[0].flush()
        assert server.states(digest, 1) is None
        cluster.say_round(0, workers=[1])
        cluster.start(0, 1)
        assert set(server.states(digest, 1) or {}) == {key.number for key in cluster.table.keys}
