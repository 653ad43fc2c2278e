"""Deterministic clocks: the bits of one process, for any order of arrival and any split of lanes over workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import ReplicaError
from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.clock import BoundedDelay, BoundedStaleness, Clock
from paceline.parameter_server.round_by_round import RoundByRound
from paceline.parameter_server.server_key import ServerKey, hold_keys
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.wire import Close, Kind, WireError, lanes_payload
from paceline.sharding.flat_layout import BLOCK
from tests.parameter_server.core_jobs import (
    Choose,
    Job,
    Setup,
    adamw,
    goodbye,
    model,
    one_process,
    open_of,
    plain,
    push_of,
    same,
    sgd,
    splits,
    table_of,
    tell,
    two_workers,
)

SYNCHRONOUS = BoundedStaleness(0)


def train(job: Job, setups: Sequence[Setup], choose: Choose = lambda _: 0) -> list[list[Tensor]]:
    """All rounds; the weights that were pulled, each time that they were, which must be the same on all workers."""
    pulled = []
    for round, setup in enumerate(setups):
        job.say_round(round, setup)
        if job.clock.pulls_before(round + 1) or round + 1 == len(setups):
            job.say_pulls(round + 1, round)
            job.deliver_all(choose)
            reads = [job.read_pulled(worker, round + 1) for worker in range(job.workers)]
            assert all(same(reads[0], other) for other in reads)
            pulled.append(reads[0])
    return pulled


@st.composite
def rounds(draw: st.DrawFn, lanes: int) -> list[Setup]:
    setups = []
    for _ in range(draw(st.integers(1, 4))):
        present = tuple(sorted(draw(st.sets(st.integers(0, lanes - 1), min_size=1))))
        unused = [(lane, place) for place in range(4) for lane in present if draw(st.integers(0, 3)) == 0]
        setups.append(
            Setup(
                present,
                {lane: draw(st.sampled_from([4.0, 4.0, 1.0, 0.0, 3.5])) for lane in present},
                max_norm=draw(st.sampled_from([None, None, 1.0, 1e9])),
                skip=draw(st.sampled_from([False, False, False, True])),
                learning_rate=draw(st.sampled_from([0.05, 0.1])),
                unused=frozenset(unused),
            )
        )
    return setups


@settings(max_examples=100, deadline=None)
@given(st.data(), splits(), st.integers(1, 3), st.sampled_from([SYNCHRONOUS, BoundedDelay(1), BoundedDelay(3)]))
def test_any_arrival_order_and_split_of_lanes_gives_the_bits_of_one_process(
    data: st.DataObject, split: tuple[int, list[list[int]]], servers: int, clock: Clock
) -> None:
    lanes, holders = split
    setups = data.draw(rounds(lanes))
    random = data.draw(st.randoms(use_true_random=False))
    job = Job(model(), adamw, clock, holders=holders, lanes=lanes, servers=servers)
    train(job, setups, lambda n: random.randrange(n))
    expected = [weights for weights, _ in one_process(model(), adamw, clock, setups)]
    assert same(job.on_servers(), expected[-1])
    assert same(job.read[0], expected[-1])


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("clock", [SYNCHRONOUS, BoundedDelay(0)])
def test_every_pull_of_a_synchronous_clock_brings_the_weights_after_each_round(workers: int, clock: Clock) -> None:
    holders = [[lane for lane in range(4) if lane % workers == worker] for worker in range(workers)]
    setups = [plain(range(4)) for _ in range(3)]
    pulled = train(Job(model(), adamw, clock, holders=holders), setups)
    expected = [weights for weights, _ in one_process(model(), adamw, clock, setups)]
    assert all(same(mine, theirs) for mine, theirs in zip(pulled, expected, strict=True))


def test_low_precision_weights_are_updated_with_sums_in_fp32_rounded_once() -> None:
    start = [tensor.bfloat16() for tensor in model()]
    setups = [plain(range(3), max_norm=5.0), plain(range(3))]
    job = Job(start, adamw, SYNCHRONOUS, holders=[[0], [1, 2]], servers=2)
    train(job, setups)
    expected = [weights for weights, _ in one_process(start, adamw, SYNCHRONOUS, setups)]
    assert {tensor.dtype for tensor in job.on_servers()} == {torch.bfloat16}
    assert same(job.on_servers(), expected[-1])


def test_several_optimizers_update_their_own_pieces_of_a_key() -> None:
    parameters = [Parameter(tensor) for tensor in model()]
    optimizers = [torch.optim.SGD(parameters[:2], lr=1.0), torch.optim.SGD(parameters[2:], lr=10.0)]
    group_settings = GroupSettings(optimizers)
    for key in table_of(parameters, 1, 1 << 20).keys:
        held = ServerKey(key, parameters, optimizers, group_settings)
        before = held.copy()
        held.update(torch.ones(key.elements), (1 << len(key.pieces)) - 1, group_settings.read())
        steps = [float((b - a).mean()) for a, b in zip(key.views(held.weights), key.views(before), strict=True)]
        assert steps == pytest.approx([1.0 if p.parameter < 2 else 10.0 for p in key.pieces], rel=1e-5)


def test_state_that_the_optimizer_has_before_training_is_taken_over() -> None:
    def adagrad(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)

    setups = [plain(range(2)) for _ in range(3)]
    job = Job(model(), adagrad, SYNCHRONOUS, holders=[[0], [1]], servers=2)
    train(job, setups)
    expected = [weights for weights, _ in one_process(model(), adagrad, SYNCHRONOUS, setups)]
    assert same(job.on_servers(), expected[-1])


def test_the_norm_of_a_clipped_round_comes_with_the_weights() -> None:
    job = Job(model(), sgd, SYNCHRONOUS, holders=[[0]], servers=3)
    train(job, [plain([0], max_norm=2.0)])
    (norm,) = {reply.header.weight for reply in job.came[0]}
    assert norm > 2.0
    job.say_round(1, plain([0]))
    job.say_pulls(2, 1)
    job.deliver_all()
    assert math.isnan(job.came[0][-1].header.weight)


def test_a_piece_that_no_lane_used_is_not_touched_and_one_that_one_lane_used_is() -> None:
    start = model()
    job = Job(start, adamw, SYNCHRONOUS, holders=[[0], [1]])
    train(job, [plain([0, 1], unused=frozenset({(0, 3), (1, 3), (0, 1)}))])
    after = job.on_servers()
    assert torch.equal(after[3], start[3])
    assert not torch.equal(after[1], start[1])


@pytest.mark.parametrize("setup", [plain([0, 1], skip=True), Setup((0, 1), {0: 0.0, 1: 0.0})])
def test_a_round_that_is_skipped_or_weighs_nothing_changes_no_weight_but_is_complete(setup: Setup) -> None:
    job = Job(model(), adamw, SYNCHRONOUS, holders=[[0], [1]])
    train(job, [setup])
    assert same(job.on_servers(), model())
    assert {(reply.header.complete, reply.header.version) for reply in job.came[0]} == {(0, 0)}


def test_one_worker_s_word_leaves_a_round_out() -> None:
    """Inside a group of rounds the others have not heard of its loss."""
    job = Job(model(), adamw, SYNCHRONOUS, holders=[[0], [1]])
    job.say_round(0, plain([0, 1]))
    header, _ = job.channels[1, 0].pop()
    close = Close(((1, 4.0),), 8.0, skip=True, settings=tuple(job.settings.read()))
    job.channels[1, 0].append((header.holding(close.packed()), close.packed()))
    job.deliver_all()
    assert same(job.on_servers(), model())


def test_pulls_wait_for_all_workers_and_the_first_layers_come_first() -> None:
    job = Job(model(), sgd, SYNCHRONOUS, holders=[[0], [1]])
    backwards = [key.number for key in reversed(job.table.keys)]
    job.say_round(0, plain([0, 1]))
    job.say_pulls(1, 0)
    while job.channels[0, 0]:
        assert job.deliver(0, 0) == []
    assert job.cores[0].waiting == len(job.table.keys) > 1
    while job.channels[1, 0][0][0].kind is not Kind.CLOSE:
        assert job.deliver(1, 0) == []
    assert [(reply.to, reply.header.key) for reply in job.deliver(1, 0)] == [(0, key) for key in backwards]
    assert [(reply.to, reply.header.key) for reply in job.deliver(1, 0)] == [(1, key) for key in backwards]


def test_a_key_is_answered_before_the_next_one_is_updated() -> None:
    job = Job(model(), sgd, SYNCHRONOUS, holders=[[0]])
    job.say_pulls(1, 0)
    job.deliver_all()
    job.say_round(0, plain([0]))
    while job.channels[0, 0][0][0].kind is not Kind.CLOSE:
        job.deliver(0, 0)
    replies = job.cores[0].handle(*job.channels[0, 0].popleft())
    for number, _ in enumerate(replies, start=1):
        assert sum(held.version for held in job.held[0].values()) == number


def test_a_worker_ahead_of_the_others_is_kept_for_its_round() -> None:
    job = Job(model(), sgd, BoundedDelay(1), holders=[[0], [1]])
    setups = [plain([0, 1]), plain([0, 1])]
    for round, setup in enumerate(setups):
        job.say_round(round, setup)
    while job.channels[0, 0]:
        assert job.deliver(0, 0) == []
    job.deliver_all()
    expected = [weights for weights, _ in one_process(model(), sgd, BoundedDelay(1), setups)]
    assert same(job.on_servers(), expected[-1])


def test_a_push_becomes_a_node_without_a_copy_and_all_memory_is_handed_back_once() -> None:
    given_back: list[Tensor] = []
    job = Job(model(), sgd, SYNCHRONOUS, holders=[[0], [1, 2]], recycle=given_back.append)
    job.say_round(0, plain([0, 1, 2]))
    pushed = [payload for queue in job.channels.values() for header, payload in queue if header.kind is Kind.PUSH]
    job.deliver_all()
    assert sorted(map(id, given_back)) == sorted(map(id, pushed))


def test_a_round_is_as_late_as_its_place_in_its_group() -> None:
    stats = StalenessCounter()
    job = Job(model(), adamw, BoundedDelay(1), holders=[[0], [1]], stats=stats)
    for round in (0, 1):
        job.say_round(round, plain([0, 1]))
    job.deliver_all()
    assert stats.stats(1.0).delays == dict.fromkeys([0, 1], len(job.table.keys))


# -- said twice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.OPEN, Kind.PUSH, Kind.CLOSE])
def test_what_is_said_twice_of_a_round_counts_once(kind: Kind) -> None:
    stats = StalenessCounter()
    job = two_workers(SYNCHRONOUS, stats=stats)
    job.say_round(0, plain([0, 1]))
    expected = two_workers(SYNCHRONOUS)
    expected.say_round(0, plain([0, 1]))
    expected.deliver_all()
    for queue in job.channels.values():
        for place, (header, payload) in reversed(list(enumerate(queue))):
            if header.kind is kind:
                queue.insert(place, (header, None if payload is None else payload.clone()))
    job.deliver_all()
    assert same(job.on_servers(), expected.on_servers())
    assert stats.stats(1.0).duplicates == 2


def test_a_whole_round_sent_again_changes_nothing() -> None:
    job = two_workers(SYNCHRONOUS)
    weights = []
    for _ in range(2):
        job.say_round(0, plain([0, 1]))
        job.deliver_all()
        weights.append([tensor.clone() for tensor in job.on_servers()])
    assert same(*weights)
    assert job.held[0][0].version == 1


# -- aggregate ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data(), splits(), st.integers(1, 3))
def test_aggregate_hands_out_the_scaled_sum_and_what_was_used(
    data: st.DataObject, split: tuple[int, list[list[int]]], servers: int
) -> None:
    lanes, holders = split
    setup = data.draw(rounds(lanes))[0]
    setup.skip, setup.max_norm = False, None
    random = data.draw(st.randoms(use_true_random=False))
    job = Job(model(), sgd, SYNCHRONOUS, holders=holders, lanes=lanes, servers=servers, mode="aggregate")
    job.say_round(0, setup)
    job.say_pulls(0, 0)
    job.deliver_all(lambda n: random.randrange(n))
    expected, _ = next(one_process(model(), sgd, SYNCHRONOUS, [setup]))
    for came in job.came:
        parameters = [Parameter(tensor) for tensor in model()]
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for reply in came:
            assert reply.header.kind is Kind.SUM
            assert reply.payload is not None
            key = job.table.keys[reply.header.key]
            for place, (piece, view) in enumerate(zip(key.pieces, key.views(reply.payload), strict=True)):
                gradients[piece.parameter].view(-1)[piece.start : piece.stop] = view
                if reply.header.flags >> place & 1 and any(setup.weights.values()):
                    parameters[piece.parameter].grad = gradients[piece.parameter]
        optimizer = sgd(parameters)
        optimizer.param_groups[0]["lr"] = setup.learning_rate
        optimizer.step()
        assert same(parameters, expected)


def test_in_a_round_that_is_left_out_no_parameter_has_a_gradient() -> None:
    job = Job(model(), sgd, SYNCHRONOUS, holders=[[0], [1]], mode="aggregate")
    job.say_round(0, plain([0, 1], skip=True))
    job.say_pulls(0, 0)
    job.deliver_all()
    assert {reply.header.flags for came in job.came for reply in came} == {0}


def sums_kept(job: Job) -> int:
    applying = job.cores[0]._applying
    assert isinstance(applying, RoundByRound)
    return len(applying.sums)


def test_aggregate_keeps_a_sum_until_every_worker_has_it_and_not_longer() -> None:
    job = Job(model(), sgd, SYNCHRONOUS, holders=[[0], [1]], mode="aggregate")
    job.say_round(0, plain([0, 1]))
    job.say_pulls(0, 0)
    job.deliver_all()
    assert [len(came) for came in job.came] == [len(job.table.keys)] * 2
    assert sums_kept(job) == 0
    job.say(0, 0, job.header(Kind.PULL, 0, round=0, complete=0, key=0))
    with pytest.raises(WireError, match=r"worker 0 asked for the sum of round 0 of key 0 \(.*\), which it has fetched"):
        job.deliver_all()


def test_aggregate_does_not_keep_a_sum_for_a_worker_that_left() -> None:
    job = two_workers(SYNCHRONOUS, mode="aggregate")
    job.say_round(0, plain([0, 1]))
    job.say(0, 0, job.header(Kind.PULL, 0, round=0, complete=0, key=0))
    job.deliver_all()
    assert sums_kept(job) == 1
    goodbye(job, 1)
    assert sums_kept(job) == 0


def test_keys_are_spread_over_the_devices_of_a_server_by_size() -> None:
    parameters = [Parameter(tensor) for tensor in model()]
    keys = table_of(parameters, 1, 4 * BLOCK).keys
    held = hold_keys(keys, parameters, [sgd(parameters)], GroupSettings([sgd(parameters)]), ["cpu", "meta"])
    assert list(held) == [key.number for key in keys]
    sizes = {
        kind: sum(k.key.gradient_bytes for k in held.values() if k.weights.device.type == kind)
        for kind in ("cpu", "meta")
    }
    assert abs(sizes["cpu"] - sizes["meta"]) <= 4 * BLOCK


# -- workers that contradict each other --------------------------------------------------------------------------------


def test_settings_that_differ_between_workers_are_named_with_both_values() -> None:
    job = two_workers(SYNCHRONOUS)
    for worker, rate in ((0, 0.1), (1, 0.2)):
        job.say_everywhere(worker, job.header(Kind.OPEN, worker, round=0), lanes_payload([]))
        job.say_close(worker, 0, [], plain([0], learning_rate=rate))
    with pytest.raises(ReplicaError, match=r"round 0: lr of group 0 is 0\.1 on worker 0 but 0\.2 on worker 1; the up"):
        job.deliver_all()


def test_workers_that_clip_differently_are_named() -> None:
    job = two_workers(SYNCHRONOUS)
    for worker, norm in ((0, None), (1, 1.0)):
        job.say_everywhere(worker, job.header(Kind.OPEN, worker, round=0), lanes_payload([]))
        job.say_close(worker, 0, [], plain([0], max_norm=norm))
    with pytest.raises(ReplicaError, match=r"round 0: max_norm is None on worker 0 but 1\.0 on worker 1"):
        job.deliver_all()


def test_two_workers_on_one_lane_are_named() -> None:
    job = two_workers(SYNCHRONOUS)
    tell(job, open_of(job, 0, 0, [0, 1]))
    with pytest.raises(ReplicaError, match=r"lanes \[1\] of round 0 are assigned to worker 0 and to worker 1"):
        tell(job, open_of(job, 1, 0, [1]))


def test_a_round_opened_twice_with_different_lanes_is_refused() -> None:
    job = two_workers(SYNCHRONOUS)
    tell(job, open_of(job, 0, 0, [0]))
    with pytest.raises(WireError, match=r"worker 0 opened round 0 with lanes \(0,\) and now with \(1,\)"):
        tell(job, open_of(job, 0, 0, [1]))


def test_a_push_of_a_lane_that_was_not_opened_is_refused() -> None:
    job = two_workers(SYNCHRONOUS)
    tell(job, open_of(job, 0, 0, [0]))
    with pytest.raises(WireError, match=r"worker 0 pushed lane 1 of round 0, but opened the round with lanes \[0\]"):
        tell(job, push_of(job, 0, 0, 1))


def test_a_round_closed_with_other_lanes_than_it_was_opened_with_is_refused() -> None:
    job = two_workers(SYNCHRONOUS)
    tell(job, open_of(job, 0, 0, [0]))
    job.say_close(0, 0, [], plain([0]))
    with pytest.raises(WireError, match=r"worker 0 closed round 0 with lanes \[\], but opened it with \[0\]"):
        job.deliver_all()


def test_a_round_closed_without_its_pushes_names_worker_lane_and_key() -> None:
    job = two_workers(SYNCHRONOUS)
    for worker in (0, 1):
        tell(job, open_of(job, worker, 0, [worker]))
        job.say_close(worker, 0, [worker], plain([0, 1]))
    tell(job, push_of(job, 0, 0, 0))
    with pytest.raises(WireError, match=r"worker 1 closed round 0 without a push of its root 1 for key 0 \(p0\)"):
        job.deliver_all()


def test_lanes_pushed_instead_of_their_root_are_refused() -> None:
    job = Job([torch.zeros(3)], sgd, SYNCHRONOUS, holders=[[0, 1]])
    tell(job, open_of(job, 0, 0, [0, 1]))
    for lane in (0, 1):
        tell(job, push_of(job, 0, 0, lane))
    job.say_close(0, 0, [0, 1], plain([0, 1]))
    with pytest.raises(WireError, match=r"sums of lanes \[0, 1\] are left over; workers push their roots, which are"):
        job.deliver_all()
