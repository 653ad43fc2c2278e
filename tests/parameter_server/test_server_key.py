"""Weights as they will be: where momentum carries them while a gradient is on its way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.clock import BoundedStaleness
from paceline.parameter_server.server_key import LookAhead, ServerKey, hold_keys
from paceline.parameter_server.wire import AS_THEY_ARE, Kind
from tests.parameter_server.core_jobs import Job, Make, ask, open_of, push_of, table_of, tell

LATE, PROMPT = 0, 1  # workers


def momentum(parameters: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Sequence[Tensor]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, betas=(0.9, 1 - 1e-9))


def plain(parameters: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def held_by(make: Make) -> tuple[ServerKey, list[float]]:
    """A key whose weights have moved three times, with pushes of worker 0 that came two updates late."""
    parameters = [Parameter(torch.randn(7, generator=torch.Generator().manual_seed(0)))]
    optimizer = make(parameters)
    settings = GroupSettings([optimizer])
    held = hold_keys(table_of(parameters, 1, 4096).keys, parameters, [optimizer], settings, look_ahead=True)[0]
    for number in range(3):
        held.came_back(LATE, held.version - 2)
        held.came_back(PROMPT, held.version)
        held.update(torch.randn(7, generator=torch.Generator().manual_seed(number)), 1, settings.read())
    return held, settings.read()


def test_a_late_worker_reads_where_momentum_alone_will_carry_the_weights() -> None:
    held, settings = held_by(momentum)
    told = held.seen_by(LATE)
    for _ in range(2 + 1):  # the delay, and the update that its gradient will be part of
        held.update(torch.zeros(7), 1, settings)
    torch.testing.assert_close(told, held.weights)


def test_a_late_worker_reads_nearly_where_adam_will_go() -> None:
    held, settings = held_by(adam)
    before, told = held.weights.clone(), held.seen_by(LATE)
    for _ in range(2 + 1):
        held.update(torch.zeros(7), 1, settings)
    assert float((told - held.weights).norm()) < 0.4 * float((before - held.weights).norm())


@pytest.mark.parametrize("make", [momentum, adam])
def test_a_worker_whose_pushes_are_not_late_reads_the_weights_as_they_are(make: Make) -> None:
    held, _ = held_by(make)
    assert torch.equal(held.seen_by(PROMPT), held.weights)
    assert torch.equal(held.seen_by(2), held.weights), "a worker that has not pushed yet"


def test_without_momentum_nothing_is_known_of_the_way_and_nothing_is_looked_ahead() -> None:
    held, _ = held_by(plain)
    assert torch.equal(held.seen_by(LATE), held.weights)


@pytest.mark.parametrize(("delay", "reach"), [(0, 0.0), (1, 0.9 + 0.81), (2, 0.9 + 0.81 + 0.729), (1000, 9.0)], ids=str)
def test_the_reach_counts_the_delay_and_one_more_and_ends_where_momentum_has_forgotten(
    delay: int, reach: float
) -> None:
    assert LookAhead(torch.ones(1), {0: delay}, 0.9).reach(0) == pytest.approx(reach)


def test_the_delay_follows_a_worker_that_becomes_slow() -> None:
    ahead = LookAhead(torch.ones(1), momentum=0.9)
    for updates in [1] * 20 + [4] * 60:
        ahead.came_back(0, updates)
    assert ahead.reach(0) == pytest.approx(LookAhead(torch.ones(1), {0: 4}, 0.9).reach(0), rel=1e-3)


def test_loaded_weights_are_read_as_they_are() -> None:
    held, _ = held_by(momentum)
    held.load_weights(torch.zeros(7), 0)
    assert torch.equal(held.seen_by(LATE), torch.zeros(7))


def test_a_snapshot_is_read_as_its_version_was() -> None:
    held, settings = held_by(adam)
    told, snapshot = held.seen_by(LATE), held.snapshot()
    held.came_back(LATE, held.version - 5)
    held.update(torch.ones(7), 1, settings)
    assert torch.equal(snapshot.seen_by(LATE), told)


def test_a_pull_for_a_boundary_gets_the_weights_as_they_are_and_one_for_a_round_looks_ahead() -> None:
    job = Job([torch.zeros(3)], momentum, BoundedStaleness(4, from_round=0), holders=[[0], [1]], look_ahead=True)
    for round in range(3):
        tell(job, open_of(job, 0, round, [0]))
        tell(job, push_of(job, 0, round, 0, version=max(0, round - 1)))
    (ahead,) = ask(job, Kind.PULL, 0, round=3, key=0)
    (as_they_are,) = ask(job, Kind.PULL, 0, round=3, key=0, flags=AS_THEY_ARE)
    assert ahead.payload is not None
    assert as_they_are.payload is not None
    assert (ahead.header.flags, as_they_are.header.flags) == (0, AS_THEY_ARE)
    assert torch.equal(as_they_are.payload, job.held[0][0].weights)
    assert not torch.equal(ahead.payload, as_they_are.payload)
