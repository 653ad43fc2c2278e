"""Replay: every log that can happen has an order, and in it every item reads exactly what it read then."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError
from paceline.parameter_server.clock import BoundedStaleness, Clock
from paceline.parameter_server.replay_order import Item, Turn, replay_order
from paceline.parameter_server.staleness_policy import Outcome
from paceline.parameter_server.update_log import Applied, JobFacts, Read, RecordedRun, UpdateLog, read_log
from tests.parameter_server.clock_model import CHOICES, CLOCKS, Miniature, Shape, shapes

SETTINGS = ({"lr": 0.1},)
ASYNCHRONOUS = [clock for clock in CLOCKS if not clock.deterministic]  # the others are not recorded
Value = int


def run_of(keys: int, reads: Sequence[Read], applied: Sequence[Applied]) -> RecordedRun:
    by_key = {key: tuple(record for record in applied if record.key == key) for key in range(keys)}
    return RecordedRun(1, JobFacts(2, 1, 2, keys, "s=inf"), tuple(reads), by_key, ())


def recorded(miniature: Miniature) -> RecordedRun:
    """What the processes of the miniature would have written."""
    reads = [Read(entry.worker, entry.round, entry.lanes, entry.versions) for entry in miniature.reads]
    applied: dict[int, list[Applied]] = defaultdict(list)
    for server in miniature.servers:
        for entry in server.applied:
            order = len(applied[entry.key])
            applied[entry.key].append(
                Applied(entry.server, entry.key, order, entry.round, entry.lane, entry.worker, SETTINGS)
            )
    return run_of(miniature.shape.keys, reads, [record for records in applied.values() for record in records])


def final_weights(run: RecordedRun) -> dict[int, Value]:
    """What the log means, by its own definition: each version from the one before, each gradient from what it read.

    Numbers that depend on every value and on the order stand for tensors.
    """
    reads = {Item(read.round, lane, read.worker): read.versions for read in run.reads for lane in read.lanes}

    def items_of(record: Applied) -> list[Item]:
        return [i for i in sorted(reads) if (i.round, i.lane) == (record.round, record.lane)]

    @cache
    def weights(key: int, version: int) -> Value:
        if version == 0:
            return hash(("start", key))
        record = [record for record in run.applied[key] if not record.outcome.dropped][version - 1]
        return hash((weights(key, version - 1), *(gradient(item, key) for item in items_of(record))))

    @cache
    def gradient(item: Item, key: int) -> Value:
        return hash((item, key, *(weights(other, version) for other, version in sorted(reads[item].items()))))

    return {
        key: weights(key, sum(not record.outcome.dropped for record in records)) for key, records in run.applied.items()
    }


class Replay:
    """One process that follows the order, and keeps no more than it says."""

    def __init__(self, turns: Sequence[Turn], keys: int) -> None:
        self.turns = turns
        self.weights = {key: hash(("start", key)) for key in range(keys)}
        self.version = dict.fromkeys(range(keys), 0)
        self.copies: dict[tuple[int, int], Value] = {}
        self.gradients: dict[tuple[Item, int], Value] = {}
        self.most_copies = self.most_gradients = 0
        for turn in turns:
            self._compute(turn.item, turn.reads, turn.keys)
            for place in turn.forget:
                del self.copies[place]
            for step in turn.applications:
                self._apply(step.record, step.version, step.keep_old)

    def _compute(self, item: Item, reads: Mapping[int, int], keys: Sequence[int]) -> None:
        read = [
            self.weights[key] if version == self.version[key] else self.copies[key, version]
            for key, version in sorted(reads.items())
        ]
        self.gradients |= {(item, key): hash((item, key, *read)) for key in keys}
        self.most_gradients = max(self.most_gradients, len(self.gradients))

    def _apply(self, record: Applied, version: int, keep_old: bool) -> None:
        key = record.key
        if keep_old:
            self.copies[key, self.version[key]] = self.weights[key]
        self.most_copies = max(self.most_copies, len(self.copies))
        of_round = [i for i, k in sorted(self.gradients) if k == key and i.round == record.round]
        whose = [item for item in of_round if record.lane == item.lane]
        assert whose, f"no gradient for {record}"
        self.weights[key] = hash((self.weights[key], *(self.gradients.pop((item, key)) for item in whose)))
        self.version[key] += 1
        assert self.version[key] == version


def check(run: RecordedRun) -> Replay:
    replay = Replay(replay_order(run), len(run.applied))
    assert replay.weights == final_weights(run)
    assert (replay.copies, replay.gradients) == ({}, {})
    return replay


# -- logs that can happen ----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(shape=shapes(), clock=st.sampled_from(ASYNCHRONOUS), choices=CHOICES, to_the_end=st.booleans())
def test_any_run_can_be_replayed_also_one_that_was_cut(
    shape: Shape, clock: Clock, choices: list[int], to_the_end: bool
) -> None:
    miniature = Miniature(clock, shape)
    for choice in choices * 4:
        miniature.step(choice)
    if to_the_end:
        miniature.run_to_end(choices)
    check(recorded(miniature))


@settings(max_examples=50, deadline=None)
@given(shape=shapes(), choices=CHOICES, drop=st.sets(st.integers(0, 30)))
def test_dropped_pushes_make_no_version_and_are_left_out(shape: Shape, choices: list[int], drop: set[int]) -> None:
    miniature = Miniature(BoundedStaleness(math.inf), shape)
    miniature.run_to_end(choices)
    run = recorded(miniature)
    applied = {
        key: tuple(replace(r, outcome=Outcome(9, dropped=True)) if r.order in drop else r for r in records)
        for key, records in run.applied.items()
    }
    # A read counts updates, so it must be told without those that were dropped before it.
    reads = tuple(
        replace(read, versions={key: v - sum(n < v for n in drop) for key, v in read.versions.items()})
        for read in run.reads
    )
    order = check(replace(run, reads=reads, applied=applied))
    assert all(step.record.order not in drop for turn in order.turns for step in turn.applications)


def test_a_run_can_be_replayed_from_its_files(tmp_path: Path) -> None:
    shape = Shape(workers=2, lanes=3, servers=2, keys=3, rounds=5)
    miniature = Miniature(BoundedStaleness(1, from_round=0), shape)
    miniature.run_to_end([5, 2, 7, 1, 0])
    run = recorded(miniature)
    job = JobFacts(workers=2, servers=2, lanes=3, keys=3, clock="s=1")
    logs = {
        (role, number): UpdateLog(tmp_path, 1, role, number, job)
        for role in ("server", "worker")
        for number in range(2)
    }
    for log in logs.values():
        log.begin(0)
    for read in run.reads:
        logs["worker", read.worker].read(read)
    for record in (record for records in run.applied.values() for record in records):
        logs["server", record.server].applied(record)
    for log in logs.values():
        log.end(well=True)
    assert replay_order(read_log(tmp_path)) == check(run).turns


def test_the_order_of_the_drawing() -> None:
    reads = [
        Read(0, 0, (0,), {0: 0, 1: 0}),
        Read(1, 0, (1,), {0: 0, 1: 1}),
        Read(1, 1, (1,), {0: 1, 1: 2}),
    ]
    lanes = {0: [(0, 1), (0, 0), (1, 1)], 1: [(0, 0), (0, 1), (1, 1)]}
    applied = [
        Applied(0, key, order, round, lane, lane, SETTINGS)
        for key, places in lanes.items()
        for order, (round, lane) in enumerate(places)
    ]
    order = check(run_of(2, reads, applied))
    assert [
        ((turn.item.round, turn.item.lane), [(step.record.key, step.version) for step in turn.applications])
        for turn in order.turns
    ] == [((0, 0), [(1, 1)]), ((0, 1), [(0, 1), (0, 2), (1, 2)]), ((1, 1), [(0, 3), (1, 3)])]
    assert [step.version - 1 for turn in order.turns for step in turn.applications if step.keep_old] == [1]
    assert [turn.forget for turn in order.turns] == [(), (), ((0, 1),)]


def test_an_item_that_was_never_applied_is_not_computed() -> None:
    reads = [Read(0, 0, (0, 1), {0: 0}), Read(0, 1, (0, 1), {0: 1})]
    order = check(run_of(1, reads, [Applied(0, 0, 0, 0, 1, 0, SETTINGS)]))
    assert [turn.item for turn in order.turns] == [Item(0, 1, 0)]


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    shape, copies = Shape(workers=3, lanes=3, servers=2, keys=2, rounds=40), 2 * 3 * 4
    miniature = Miniature(BoundedStaleness(2, from_round=0), shape)
    miniature.run_to_end([7, 0, 3, 11, 2, 5, 13, 1])
    order = check(recorded(miniature))
    assert len(order.turns) == 120
    assert order.most_copies <= copies
    assert order.most_gradients <= copies * 3


# -- logs that can't ---------------------------------------------------------------------------------------------------

READ = Read(0, 0, (0,), {0: 0, 1: 0})
APPLIED = Applied(0, 0, 0, 0, 0, 0, SETTINGS)


def refused(reads: Sequence[Read], applied: Sequence[Applied]) -> str:
    with pytest.raises(CheckpointError) as caught:
        replay_order(run_of(2, reads, applied))
    return str(caught.value)


def test_two_keys_that_wait_for_each_other_are_told() -> None:
    reads = [replace(READ, versions={0: 0, 1: 1}), Read(1, 0, (1,), {0: 1, 1: 0})]
    assert refused(reads, [APPLIED, Applied(0, 1, 0, 0, 1, 1, SETTINGS)]) == (
        "the log has no order: after version 0 key 0 has the gradient of round 0, lane 0 of worker 0, which read "
        "version 1 of key 1; after version 0 key 1 has the gradient of round 0, lane 1 of worker 1, which read "
        "version 1 of key 0; lines are missing, or of another run"
    )


def test_a_push_that_was_computed_from_its_own_update_is_told() -> None:
    assert "after version 0 key 0 has the gradient of round 0, lane 0 of worker 0, which read version 1 of key 0" in (
        refused([replace(READ, versions={0: 1, 1: 0})], [APPLIED])
    )


def test_a_gradient_without_its_read_is_told() -> None:
    assert refused([], [APPLIED]) == (
        "server 0, key 0, application 0: no worker's log says from which weights the gradient of round 0, lane 0 was "
        "computed; lines of it are missing"
    )


def test_a_gradient_that_was_applied_twice_is_told() -> None:
    assert refused([READ], [APPLIED, replace(APPLIED, order=1)]) == (
        "server 0, key 0, application 1: the gradient of round 0, lane 0 was there already as application 0; it may be "
        "applied once: the log is of two runs, or the server has a fault"
    )


def test_a_version_that_never_was_is_told() -> None:
    assert refused([replace(READ, versions={0: 5, 1: 0})], [APPLIED]) == (
        "round 0, lane 0 of worker 0 read version 5 of key 0, but its server's log has 1 updates; "
        "lines of it are missing"
    )


def test_a_read_that_is_there_twice_is_told() -> None:
    assert refused([READ, READ], []) == (
        "the log of worker 0 has round 0, lane 0 of worker 0 twice; lines are of another run"
    )


@settings(max_examples=100, deadline=None)
@given(shape=shapes(), choices=CHOICES, data=st.data())
def test_a_log_with_wrong_numbers_is_replayed_as_it_stands_or_refused(
    shape: Shape, choices: list[int], data: st.DataObject
) -> None:
    miniature = Miniature(BoundedStaleness(2, from_round=0), shape)
    miniature.run_to_end(choices)
    run = recorded(miniature)
    place = data.draw(st.integers(0, len(run.reads) - 1))
    versions = {key: data.draw(st.integers(0, 12)) for key in range(shape.keys)}
    reads = [replace(read, versions=versions) if n == place else read for n, read in enumerate(run.reads)]
    try:
        check(replace(run, reads=tuple(reads)))
    except CheckpointError as error:
        assert "missing" in str(error)  # noqa: PT017
