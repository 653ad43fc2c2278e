"""Asynchronous clocks: every push once, on arrival, and nobody waits longer than the bound asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.parameter_server.clock import BoundedStaleness
from paceline.parameter_server.staleness_policy import StalenessPolicy
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.update_log import Applied
from paceline.parameter_server.wire import ALL, Kind, WireError, lanes_payload
from tests.parameter_server.core_jobs import (
    Job,
    ask,
    goodbye,
    model,
    open_of,
    plain,
    push_of,
    sgd,
    splits,
    tell,
    two_workers,
    whole_numbers,
)

ASYNCHRONOUS = BoundedStaleness(math.inf)
ONE = BoundedStaleness(1, from_round=0)


@settings(max_examples=60, deadline=None)
@given(st.data(), splits(), st.integers(1, 3), st.integers(1, 4))
def test_pushes_are_applied_exactly_once_whatever_is_sent_again_and_in_any_order(
    data: st.DataObject, split: tuple[int, list[list[int]]], servers: int, total: int
) -> None:
    lanes, holders = split
    start = [torch.zeros_like(tensor) for tensor in model()]
    stats = StalenessCounter()
    told: list[Applied] = []
    options = {"lanes": lanes, "servers": servers, "stats": stats, "log": told.append}
    job = Job(start, sgd, ASYNCHRONOUS, holders=holders, **options)
    random = data.draw(st.randoms(use_true_random=False))
    sent_twice = sum(say_rounds(job, worker, total, random.random) for worker in range(job.workers))
    job.deliver_all(lambda n: random.randrange(n))
    for server in job.held:
        for number, held in server.items():
            pushes = [
                whole_numbers(job.table.keys[number].elements, round, lane)
                for round in range(total)
                for lane in range(lanes)
            ]
            assert torch.equal(held.weights, -torch.stack(pushes).sum(0))
            assert held.version == len(pushes)
    counted = stats.stats(1.0)
    assert (counted.key_updates, counted.duplicates) == (total * lanes * len(job.table.keys), sent_twice)
    for worker in range(job.workers):
        assert sorted(reply.header.key for reply in job.came[worker]) == list(range(len(job.table.keys)))
        assert all(reply.header.complete >= total - 1 for reply in job.came[worker])


def say_rounds(job: Job, worker: int, total: int, random: Callable[[], float] = lambda: 1.0) -> int:
    """All rounds of a worker, some pushes twice, and a pull that needs everything; how many were said twice."""
    twice = 0
    held = job.holders[worker]
    for round in range(total):
        job.say_everywhere(worker, job.header(Kind.OPEN, worker, round=round), lanes_payload(held))
        for key in job.table.keys:
            pushes = [push_of(job, worker, round, lane, key.number) for lane in held]
            again = [pair for pair in pushes if random() < 0.3]
            twice += len(again)
            for header, payload in [*pushes, *again]:
                job.say(worker, key.server, header, None if payload is None else payload.clone())
        job.say_close(worker, round, held, plain(range(job.lanes)))
    job.say_everywhere(worker, job.header(Kind.PULL, worker, round=total, complete=total - 1, key=ALL))
    return twice


@settings(max_examples=80, deadline=None)
@given(st.data(), splits())
def test_an_answer_has_all_that_it_says_even_when_workers_are_lost(
    data: st.DataObject, split: tuple[int, list[list[int]]]
) -> None:
    """Lanes of a lost worker count only as far as it had pushed them; the others' must all be in, and all are told."""
    lanes, holders = split
    told: list[Applied] = []
    job = Job([torch.zeros(3)], sgd, ONE, holders=holders, lanes=lanes, log=told.append)
    random = data.draw(st.randoms(use_true_random=False))
    total = 3
    for worker in range(job.workers):
        say_rounds(job, worker, total)
        pull = job.header(Kind.PULL, worker, round=0, complete=-1, key=0)
        for place in sorted(random.sample(range(len(job.channels[worker, 0])), 2), reverse=True):
            job.channels[worker, 0].insert(place, (pull, None))
    victims = [worker for worker in range(1, job.workers) if random.random() < 0.4]
    lost: set[int] = set()
    while ready := [place for place, queue in job.channels.items() if queue]:
        sender, server = ready[random.randrange(len(ready))]
        if sender in victims and random.random() < 0.2:
            lost.add(sender)
            job.channels[sender, server].clear()
            replies = job.take(job.cores[0].worker_left(sender, said_goodbye=False), 0)
        else:
            replies = job.deliver(sender, server)
        applied = {(a.round, a.lane) for a in told}
        for reply in replies:
            others = [lane for worker, held in enumerate(job.holders) if worker not in lost for lane in held]
            required = {(round, lane) for round in range(reply.header.complete + 1) for lane in others}
            assert required <= applied, f"complete {reply.header.complete} without {required - applied}"
    assert len({(a.round, a.lane) for a in told}) == len(told) == job.held[0][0].version
    for worker in set(range(job.workers)) - lost:
        assert job.came[worker][-1].header.complete >= total - 1


def test_a_push_is_scaled_by_its_weight_and_applied_at_once() -> None:
    job = two_workers(ONE)
    tell(job, open_of(job, 0, 0, [0]))
    tell(job, push_of(job, 0, 0, 0, weight=0.25))
    assert torch.equal(job.held[0][0].weights, whole_numbers(3, 0, 0) * -0.25)


def test_a_piece_that_the_lane_did_not_use_is_not_touched() -> None:
    job = Job([torch.zeros(3), torch.zeros(2)], sgd, ONE, holders=[[0]])
    tell(job, open_of(job, 0, 0, [0]))
    tell(job, push_of(job, 0, 0, 0, flags=0b10))
    second, first = job.table.keys[0].views(job.held[0][0].weights)
    assert not bool(second.any())
    assert torch.equal(first, -whole_numbers(5, 0, 0)[2:])


def test_low_precision_weights_get_the_scaled_gradient_rounded_once() -> None:
    job = Job([torch.zeros(3, dtype=torch.bfloat16)], sgd, ONE, holders=[[0]])
    tell(job, open_of(job, 0, 0, [0]))
    tell(job, push_of(job, 0, 0, 0, weight=0.3))
    assert torch.equal(job.held[0][0].weights, -(whole_numbers(3, 0, 0) * 0.3).bfloat16())


def test_a_pull_waits_until_the_rounds_it_needs_are_in_from_everybody() -> None:
    job = two_workers(ONE)
    tell(job, open_of(job, 0, 0, [0]))
    tell(job, push_of(job, 0, 0, 0))
    assert ask(job, Kind.PULL, 0, round=2, complete=0, key=0) == []
    assert job.cores[0].waiting == 1
    assert tell(job, open_of(job, 1, 0, [1])) == []
    (reply,) = tell(job, push_of(job, 1, 0, 1))
    assert (reply.to, reply.header.kind, reply.header.round) == (0, Kind.WEIGHTS, 2)
    assert (reply.header.version, reply.header.complete, job.cores[0].waiting) == (2, 0, 0)


def test_weights_that_need_no_round_are_there_at_once() -> None:
    (reply,) = ask(two_workers(ASYNCHRONOUS), Kind.PULL, 1, round=5, complete=-1, key=ALL)
    assert reply.header.complete == -1


def test_a_later_question_takes_the_place_of_one_that_waits() -> None:
    job = two_workers(ONE)
    for round in (2, 3):
        assert ask(job, Kind.PULL, 0, round=round, complete=round - 2, key=0) == []
    assert job.cores[0].waiting == 1


def test_pulled_weights_do_not_change_while_they_are_sent_and_one_copy_serves_all() -> None:
    job = two_workers(ASYNCHRONOUS)
    (first,) = ask(job, Kind.PULL, 1, round=0, complete=-1, key=0)
    (second,) = ask(job, Kind.PULL, 0, round=0, complete=-1, key=0)
    assert first.payload is second.payload is not None
    tell(job, open_of(job, 0, 0, [0]))
    tell(job, push_of(job, 0, 0, 0))
    assert first.payload.tolist() == [0, 0, 0]
    (newer,) = ask(job, Kind.PULL, 1, round=1, complete=-1, key=0)
    assert newer.payload is not None
    assert torch.equal(newer.payload, -whole_numbers(3, 0, 0))


def test_a_lane_that_was_skipped_is_not_waited_for_once_its_worker_closed_the_round() -> None:
    job = two_workers(ASYNCHRONOUS)
    for worker in (0, 1):
        tell(job, open_of(job, worker, 0, [worker]))
    tell(job, push_of(job, 0, 0, 0))
    assert job.cores[0].complete(0) == -1
    job.say_close(1, 0, [], plain([0]))
    job.deliver_all()
    assert job.cores[0].complete(0) == 0


def test_a_worker_without_lanes_in_a_round_is_waited_for_only_until_it_says_so() -> None:
    job = two_workers(ASYNCHRONOUS)
    tell(job, open_of(job, 0, 0, [0]))
    tell(job, push_of(job, 0, 0, 0))
    assert job.cores[0].complete(0) == -1
    tell(job, open_of(job, 1, 0, []))
    assert job.cores[0].complete(0) == 0


def test_a_push_of_a_lane_that_was_not_opened_is_refused() -> None:
    job = two_workers(ASYNCHRONOUS)
    tell(job, open_of(job, 0, 0, [0]))
    with pytest.raises(WireError, match=r"worker 0 pushed lane 1 of round 0, but opened the round with lanes \[0\]"):
        tell(job, push_of(job, 0, 0, 1))


# -- workers come and go -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pushed", [False, True])
def test_nobody_waits_for_a_lost_worker_and_what_it_pushed_stays(pushed: bool) -> None:
    job = two_workers(ONE)
    for worker in (0, 1):
        tell(job, open_of(job, worker, 0, [worker]))
    tell(job, push_of(job, 0, 0, 0))
    if pushed:
        tell(job, push_of(job, 1, 0, 1))
    assert len(ask(job, Kind.PULL, 0, round=2, complete=0, key=0)) == pushed
    assert [reply.to for reply in job.cores[0].worker_left(1, said_goodbye=False)] == ([] if pushed else [0])
    assert job.held[0][0].version == 1 + pushed
    tell(job, open_of(job, 0, 1, [0]))
    tell(job, push_of(job, 0, 1, 0))
    assert job.cores[0].complete(0) == 1


def test_a_lost_worker_s_late_messages_are_ignored() -> None:
    job = two_workers(ASYNCHRONOUS)
    list(job.cores[0].worker_left(1, said_goodbye=False))
    for message in (open_of(job, 1, 0, [1]), push_of(job, 1, 0, 1)):
        assert tell(job, message) == []
    assert job.held[0][0].version == 0


def test_a_worker_may_leave_before_the_others() -> None:
    job = two_workers(ONE)
    tell(job, open_of(job, 0, 0, [0]))
    tell(job, push_of(job, 0, 0, 0))
    assert ask(job, Kind.PULL, 0, round=2, complete=0, key=0) == []
    assert [reply.to for reply in goodbye(job, 1)] == [0]


def test_when_all_workers_have_left_what_they_pushed_is_complete() -> None:
    job = two_workers(ONE)
    for worker in (0, 1):
        tell(job, open_of(job, worker, 0, [worker]))
        tell(job, push_of(job, worker, 0, worker))
        assert goodbye(job, worker) == []
    assert job.cores[0].complete(0) == 0


# -- settings and policies ---------------------------------------------------------------------------------------------


def test_each_worker_s_pushes_are_applied_with_its_own_settings() -> None:
    told: list[Applied] = []
    job = two_workers(ASYNCHRONOUS, log=told.append)
    for worker in (0, 1):
        tell(job, open_of(job, worker, 0, [worker]))
    job.optimizer.param_groups[0]["lr"] = 0.5
    vector = torch.tensor(job.settings.read(), dtype=torch.float64)
    assert tell(job, (job.header(Kind.SETTINGS, 1).holding(vector), vector)) == []
    for worker in (0, 1):
        tell(job, push_of(job, worker, 0, worker, version=worker))
    assert [(a.worker, a.settings[0]["lr"], a.order) for a in told] == [(0, 1.0, 0), (1, 0.5, 1)]
    assert torch.equal(job.held[0][0].weights, -whole_numbers(3, 0, 0) - 0.5 * whole_numbers(3, 0, 1))


def test_a_late_push_is_treated_by_its_delay_and_the_next_is_not() -> None:
    told: list[Applied] = []
    stats = StalenessCounter()
    policy = StalenessPolicy(learning_rate="divide by delay", drop_beyond=2)
    job = two_workers(ASYNCHRONOUS, staleness_policy=policy, log=told.append, stats=stats)
    for round in range(4):
        for worker in (0, 1):
            tell(job, open_of(job, worker, round, [worker]))
        tell(job, push_of(job, 0, round, 0, version=round))
    expected = job.held[0][0].copy() - 0.5 * whole_numbers(3, 0, 1)
    tell(job, push_of(job, 1, 0, 1, version=0))  # four updates of two lanes: two rounds late
    assert told[-1].outcome.lr_factor == 0.5
    assert torch.equal(job.held[0][0].weights, expected)
    tell(job, push_of(job, 1, 1, 1, version=0))
    assert told[-1].outcome.dropped
    assert torch.equal(job.held[0][0].weights, expected)
    assert (job.held[0][0].version, job.cores[0].complete(0)) == (5, 1)
    tell(job, push_of(job, 1, 2, 1, version=5))
    assert torch.equal(job.held[0][0].weights, expected - whole_numbers(3, 2, 1))
    counted = stats.stats(1.0)
    assert (counted.delays, counted.dropped) == ({0: 5, 2: 1, 3: 1}, 1)


def test_momentum_is_corrected_for_a_late_push_and_as_given_for_the_next() -> None:
    def heavy(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.75)

    job = Job(
        [torch.zeros(1)], heavy, ASYNCHRONOUS, holders=[[0]], staleness_policy=StalenessPolicy(momentum="corrected")
    )
    for round, version in enumerate([0, 0, 2]):
        tell(job, open_of(job, 0, round, [0]))
        header = job.header(Kind.PUSH, 0, round=round, lane=0, key=0, version=version, flags=1)
        tell(job, (header.holding(torch.ones(1)), torch.ones(1)))
    # The buffer is 1, then 1 + 0.5·1 (one round late), then 1 + 0.75·1.5.
    assert job.held[0][0].weights.tolist() == [-(1 + 1.5 + 2.125)]
