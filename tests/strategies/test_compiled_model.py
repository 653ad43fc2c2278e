"""torch.compile beside weights that hooks bring: refused in one line where it would go wrong, and only there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline import Engine, World
from paceline.strategies.zero.zero3 import Zero3Config
from tests.engine.loops import prepared
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers


def compiles(world: World, *, how: str, strategy: Any) -> str:
    with Engine(world=world, lanes=2, strategy=strategy, timeout_s=20) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has not seen a hook like ours
        model, optimizer, loader = prepared(engine, samples=16)
        used: Any = torch.compile(model, backend="eager") if how == "torch.compile(model)" else model
        if how == "model.compile()":
            model.compile(backend="eager")
        for x, y in loader:
            engine.backward(F.mse_loss(used(x), y))
            optimizer.step()
        return engine.weights_hash()


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()"])
def test_a_model_that_is_compiled_after_prepare_is_refused_where_weights_are_in_shards(how: str) -> None:
    for result in run_workers(compiles, 2, how=how, strategy=Zero3Config(weights="in shards")):
        assert result.error == (
            "LoopError: fsdp, hybrid and zero3 gather weights in the modules' hooks, which torch.compile does not see; "
            "use the model that engine.prepare() gave back as it is, with Engine(compile=True)"
        ), result.traceback


def test_where_weights_are_in_shared_memory_it_may_be_compiled() -> None:
    alone = hashes(run_workers(compiles, 1, how="not", strategy="ddp"))
    assert hashes(run_workers(compiles, 2, how="torch.compile(model)", strategy="zero3")) == alone
