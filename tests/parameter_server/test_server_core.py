"""The server's decisions that do not depend on the clock: saving, resuming, and clear ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.parameter_server.clock import BoundedDelay, BoundedStaleness, Clock
from paceline.parameter_server.server_core import Reply
from paceline.parameter_server.server_key import pack_states, unpack_states
from paceline.parameter_server.wire import LOADS_STATE, LOADS_WEIGHTS, Header, Kind, WireError, text_of
from paceline.strategies.server.space import states_of_keys, whole_states
from tests.parameter_server.core_jobs import (
    Job,
    adamw,
    ask,
    goodbye,
    model,
    one_process,
    open_of,
    plain,
    push_of,
    same,
    sgd,
    tell,
    two_workers,
    whole_numbers,
)

SYNCHRONOUS = BoundedStaleness(0)
ASYNCHRONOUS = BoundedStaleness(math.inf)


# -- saving and resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [SYNCHRONOUS, BoundedDelay(1)])
def test_a_job_saved_and_loaded_into_other_servers_goes_on_with_the_same_bits(clock: Clock) -> None:
    setups = [plain(range(3), learning_rate=0.1 * (round + 1)) for round in range(4)]
    first = Job(model(), adamw, clock, holders=[[0], [1, 2]], servers=2)
    go_on(first, setups, range(2))
    weights = first.on_servers()
    wholes = whole_states(first.table, saved(first), weights)
    second = Job(model(seed=5), adamw, clock, holders=[[0, 1, 2]], servers=3, key_bytes=3 * 4096)
    load(second, weights, states_of_keys(second.table, wholes), complete=1)
    second.read = [[tensor.clone() for tensor in weights]]
    go_on(second, setups, range(2, 4))
    *_, (expected, optimizer) = one_process(model(), adamw, clock, setups)
    assert same(second.on_servers(), expected)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, state in zip(parameters, whole_states(second.table, saved(second), expected), strict=True):
        assert state.keys() == optimizer.state[parameter].keys()
        assert all(torch.equal(value, optimizer.state[parameter][name]) for name, value in state.items())


def go_on(job: Job, setups: Sequence[Any], rounds: range) -> None:
    for round in rounds:
        job.say_round(round, setups[round])
        if job.clock.pulls_before(round + 1):
            job.say_pulls(round + 1, round)
            job.deliver_all()
            for worker in range(job.workers):
                job.read_pulled(worker, round + 1)
    job.deliver_all()


def saved(job: Job) -> dict[int, Any]:
    by_key = {}
    for key in job.table.keys:
        (reply,) = job.cores[key.server].handle(job.header(Kind.STATE, 0, key=key.number, complete=1))
        assert (reply.header.kind, reply.header.key) == (Kind.STATE, key.number)
        assert reply.payload is not None
        by_key[key.number] = unpack_states(reply.payload)
    return by_key


def load(job: Job, weights: Sequence[Tensor], states: dict[int, Any], complete: int) -> None:
    for key in job.table.keys:
        parts = {LOADS_WEIGHTS: key.gathered(weights), LOADS_STATE: pack_states(states[key.number])}
        for flags, payload in parts.items():
            header = job.header(Kind.LOAD, 0, key=key.number, flags=flags, complete=complete, version=2)
            (answer,) = job.cores[key.server].handle(header.holding(payload), payload)
            assert (answer.to, answer.header.kind, answer.header.key) == (0, Kind.LOAD, key.number)
            assert (answer.header.version, answer.header.complete) == (2, complete)


def test_state_is_handed_out_when_its_round_is_in() -> None:
    job = Job([torch.zeros(3), torch.zeros(2)], adamw, SYNCHRONOUS, holders=[[0]])
    assert ask(job, Kind.STATE, 0, key=0, complete=0) == []
    job.say_round(0, plain([0]))
    job.deliver_all()
    (reply,) = job.came[0]
    assert reply.payload is not None
    assert [float(state["step"]) for state in unpack_states(reply.payload)] == [1.0, 1.0]


def test_an_asynchronous_job_goes_on_after_what_was_loaded() -> None:
    job = two_workers(BoundedStaleness(1, from_round=0))
    load(job, [torch.full((3,), 7.0)], {0: [{}]}, complete=4)
    assert job.cores[0].complete(0) == 4
    for worker in (0, 1):
        tell(job, open_of(job, worker, 5, [worker]))
        tell(job, push_of(job, worker, 5, worker))
    assert (job.cores[0].complete(0), job.held[0][0].version) == (5, 4)
    assert torch.equal(job.held[0][0].weights, 7.0 - whole_numbers(3, 5, 0) - whole_numbers(3, 5, 1))


def test_states_survive_the_wire_with_everything_that_optimizers_keep() -> None:
    states = [
        {"step": torch.tensor(3.0), "exp_avg": torch.randn(5), "low": torch.randn(2).bfloat16()},
        {"momentum_buffer": None, "mu": 0.1, "count": 7, "flag": True},
        {},
        {
            "odd": torch.randn(1001).bfloat16(),
            "wide": torch.randn(3, 50, dtype=torch.float64),
            "mask": torch.ones(77) > 0,
        },
    ]
    back = unpack_states(pack_states(states))
    assert [state.keys() for state in back] == [state.keys() for state in states]
    assert all(torch.equal(back[n][name], value) for n in (0, 3) for name, value in states[n].items())
    assert back[1] == states[1]


def test_damaged_state_is_refused() -> None:
    packed = pack_states([{"step": 1}])
    with pytest.raises(CheckpointError, match="a key's optimizer state can't be read"):
        unpack_states(packed[:5])


# -- clear ends --------------------------------------------------------------------------------------------------------


def error_texts(replies: list[Reply]) -> dict[int, str]:
    assert {reply.header.kind for reply in replies} == {Kind.ERROR}
    return {reply.to: text_of(reply.payload) for reply in replies}


def test_a_lost_worker_ends_a_synchronous_job_for_everybody_by_name() -> None:
    job = Job([torch.zeros(3)], sgd, SYNCHRONOUS, holders=[[0], [1], [2]])
    tell(job, open_of(job, 0, 0, [0]))
    texts = error_texts(list(job.cores[0].worker_left(1, said_goodbye=False)))
    assert texts == dict.fromkeys(
        [0, 2],
        "worker 1 was lost in round 0, before it had pushed all of it; a round needs the gradients of all workers, so "
        "training stops here: resume from the last saved state",
    )
    assert error_texts(ask(job, Kind.PULL, 2, round=0, complete=-1, key=0)) == {2: texts[2]}
    assert error_texts(ask(job, Kind.PING, 2)) == {2: texts[2]}
    assert tell(job, push_of(job, 0, 0, 0)) == []
    assert job.cores[0].failure == texts[0]


def test_the_first_reason_stays() -> None:
    job = two_workers(SYNCHRONOUS)
    assert error_texts(list(job.cores[0].fail("the disk is full"))) == dict.fromkeys([0, 1], "the disk is full")
    assert error_texts(list(job.cores[0].worker_left(1, said_goodbye=False))) == {0: "the disk is full"}


def test_workers_that_left_are_not_told_and_losing_them_is_nothing() -> None:
    job = two_workers(SYNCHRONOUS)
    assert goodbye(job, 0) == []
    assert list(job.cores[0].worker_left(0, said_goodbye=False)) == []
    assert goodbye(job, 1) == []


def test_a_worker_that_leaves_early_is_named_to_those_who_go_on() -> None:
    job = two_workers(SYNCHRONOUS)
    goodbye(job, 1)
    assert error_texts(tell(job, open_of(job, 0, 0, [0]))) == {
        0: "worker 1 said goodbye but worker 0 starts round 0; all workers must take the same number of steps"
    }
    job = two_workers(SYNCHRONOUS)
    tell(job, open_of(job, 0, 3, [0]))
    assert "worker 1 said goodbye in round 3, which others are waiting for" in error_texts(goodbye(job, 1))[0]


def test_a_ping_is_answered() -> None:
    (reply,) = ask(two_workers(ASYNCHRONOUS), Kind.PING, 1)
    assert (reply.to, reply.header.kind) == (1, Kind.PING)


@pytest.mark.parametrize("clock", [SYNCHRONOUS, ASYNCHRONOUS])
@pytest.mark.parametrize("lanes", [[0, 0], [2], [-1]])
def test_lanes_that_are_not_there_or_twice_are_refused(lanes: list[int], clock: Clock) -> None:
    job = two_workers(clock)
    with pytest.raises(
        WireError, match=r"worker 0 sent OPEN of round 0 whose lanes are .*, expected different ones of"
    ):
        tell(job, open_of(job, 0, 0, lanes))


def test_every_message_is_held_against_the_layout() -> None:
    with pytest.raises(WireError, match="worker 0 sent PING of round 0 whose layout digest is 1, expected"):
        tell(two_workers(ASYNCHRONOUS), (Header(Kind.PING, 0, 1), None))


def test_an_error_sent_to_a_server_is_refused() -> None:
    with pytest.raises(WireError, match="worker 0 sent ERROR, which is not for servers"):
        ask(two_workers(ASYNCHRONOUS), Kind.ERROR, 0)
