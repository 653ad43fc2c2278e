"""`engine.traffic` has what a step sent to the servers and read from them, by server: the formula's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import sum_plan
from paceline.strategies.server import ParameterServer
from tests.benchmarks import script
from tests.workers import run_workers

pytestmark = pytest.mark.workers

theory = script("traffic_theory")

LANES = 4
ANSWER: dict[str, str] = {"update": "weights", "aggregate": "sum"}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 12))


def elements() -> int:
    return sum(parameter.numel() for parameter in network().parameters())


def traffic_of_the_last_step(world: World, *, mode: Any, steps: int = 3) -> Traffic:
    data = TensorDataset(torch.ones(2 * LANES * steps, 12))
    options: dict[str, Any] = {"lanes": LANES, "backend": "gloo", "timeout_s": 20.0, "device": "cpu"}
    with Engine(world=world, strategy=ParameterServer(mode=mode, key_mib=0.004), **options) as engine:
        model: Any = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(data, batch_size=2)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        assert engine.step == steps
        return engine.traffic


def traffic_of(workers: int, servers: int, mode: str) -> list[Traffic]:
    results = run_workers(traffic_of_the_last_step, workers, servers=servers, mode=mode)
    for result in results:
        assert result.error is None, result.traceback
    return [result.value for result in results[:workers]]


@pytest.mark.parametrize("mode", ["update", "aggregate"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 2), (2, 1), (2, 3)])
def test_a_step_pushes_each_root_and_reads_each_weight_once(workers: int, servers: int, mode: str) -> None:
    plan = sum_plan(LANES, workers, tuple(range(LANES)))
    for worker, traffic in enumerate(traffic_of(workers, servers, mode)):
        pushes, answers = traffic.of("push"), traffic.of(ANSWER[mode])
        moved = theory.parameter_server([elements()], plan)[worker]
        assert (pushes.sent_bytes, answers.received_bytes) == (4 * moved.sent, 4 * moved.received), f"worker {worker}"
        assert pushes.sent.keys() == answers.received.keys() == set(range(workers, workers + servers))
        assert (pushes.received_bytes, answers.sent_bytes) == (0, 0)


def test_it_is_counted_too_where_worker_0_doubles_as_the_server() -> None:
    """Of worker 1: what worker 0 does for others may fall between two of its own steps."""
    moved = theory.parameter_server_inside(elements(), sum_plan(LANES, 2, tuple(range(LANES))))[1]
    traffic = traffic_of(2, 0, "update")[1]
    assert (traffic.of("push").sent_bytes, traffic.of("weights").received_bytes) == (4 * moved.sent, 4 * moved.received)


def test_what_workers_tell_each_other_is_in_it_too() -> None:
    for traffic in traffic_of(2, 1, "update"):
        assert traffic.native == {"all_gather": 1}  # the vote


def test_alone_nothing_moves() -> None:
    (traffic,) = traffic_of(1, 0, "update")
    assert traffic == Traffic()
