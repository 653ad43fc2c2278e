"""Pulls of weights: scripts that load weights on some workers only are told so; nothing stays open."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline import Engine, World
from paceline.collectives.communicator import Communicator
from paceline.strategies.fsdp.shard_pulls import ShardPulls
from paceline.strategies.zero.zero3 import Zero3Config
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from tests.engine.loops import prepared
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def loads_alone(world: World, *, late: bool) -> None:
    """Worker 0 loads weights after the first step; `late`: when the others wait for it in the second."""
    with Engine(world=world, lanes=2, strategy=Zero3Config(weights="in shards"), timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=32)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 1:
                time.sleep(1.0 if late == (world.rank == 0) else 0.0)
                if world.rank == 0:
                    model.load_state_dict(saved)


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_one_worker_alone_loads_are_told_at_once(late: bool) -> None:
    errors = [str(result.error) for result in run_workers(loads_alone, 2, late=late)]
    text = r"LoopError: worker 0 has called model\.load_state_dict\(\), and worker 1 trains on without: each has a part"
    assert any(re.match(text, error) for error in errors), errors
    assert not any("Timeout" in error for error in errors), errors


def sockets_left(world: World) -> int:
    gc.disable()
    with Engine(world=world, lanes=2, strategy=Zero3Config(weights="in shards")) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
    open_files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("eventpoll" in file for file in open_files)


def test_a_closed_engine_keeps_no_connection_of_its_groups() -> None:
    """The meeting point's own, on worker 0, is served as long as others may ask there."""
    results = run_workers(sockets_left, 2)
    assert results[1].value == 0, results


def asks_ahead(world: World) -> list[float]:
    """Worker 2 has yet to update, so a request stays on its way to it, while worker 0 asks worker 1 for many units."""
    store = open_store(world, NoSupervisor(), 20.0)
    comm = Communicator.connect(world, store, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    job: Any = SimpleNamespace(comm=comm, store=store, timeout_s=20.0)
    pulls = ShardPulls(job, lambda unit: [torch.full((4,), float(unit))], 0)
    if world.rank < 2:
        pulls.changed()
    got, works = [torch.zeros(4) for _ in range(2)], []
    if world.rank == 0:
        works = [work for unit in range(2) for work in pulls.start(unit, {2: [got[unit]]})]
        for unit in range(20):
            for work in pulls.start(unit, {1: [torch.zeros(4)]}):
                work.wait()
    comm.gather_json(None)
    if world.rank == 2:
        pulls.changed()
    for work in works:
        work.wait()
    pulls.close()
    comm.close()
    return [float(tensor.sum()) for tensor in got]


def test_a_request_that_waits_for_its_peer_outlives_those_that_follow_it() -> None:
    """gloo forgets a message whose work is gone."""
    results = run_workers(asks_ahead, 3, timeout_s=40)
    assert [result.error for result in results] == [None] * 3, results
    assert results[0].value == [0.0, 4.0]
