"""Pulls of weights: scripts that load weights on some workers only are told so; nothing stays open."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path

import pytest
import torch.nn.functional as F

from paceline import Engine, World
from paceline.strategies.zero.zero3 import Zero3Config
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
