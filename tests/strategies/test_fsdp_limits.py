"""What scripts do to a model under fsdp beside training it: it works as under ddp, or one line says what won't."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from tests.strategies.test_fsdp import errors_of
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers


def trains(world: World, *, strategy: str, does: str = "nothing", **job: Any) -> str:
    """Six steps; after the second, or before the first, the script does something else."""
    with Engine(world=world, strategy=strategy, **{"lanes": 2} | job) as engine:
        model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = TensorDataset(*torch.randn(48, 9, generator=torch.Generator().manual_seed(0)).split([8, 1], dim=1))
        if does == "hooks before prepare":
            model[2].weight.register_hook(lambda gradient: gradient * 2)
        loaded = {name: value.clone() for name, value in model.state_dict().items()}
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        kept: dict[str, Any] = {}
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 1:
                kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
            if engine.stepped and engine.step == 2:
                _do(does, world, model, x, loaded, kept)
        return engine.weights_hash()


def _do(does: str, world: World, model: nn.Sequential, x: Any, loaded: dict[str, Any], kept: dict[str, Any]) -> None:
    if does == "inference":
        with torch.inference_mode():
            model(x)
    elif does == "load" or (does == "load on worker 0" and world.rank == 0):
        model.load_state_dict(loaded)
    elif does == "load what was":
        model.load_state_dict(kept)
    elif does == "clamp":
        with torch.no_grad():
            model[2].weight.clamp_(-0.1, 0.1)


# -- works -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("does", ["inference", "load", "load what was"])
def test_it_gives_the_bits_of_ddp(does: str, precision: str) -> None:
    job = {"does": does, "precision": precision}
    assert hashes(run_workers(trains, 2, strategy="fsdp", **job)) == hashes(
        run_workers(trains, 1, strategy="ddp", **job)
    )


def test_a_first_forward_in_inference_mode_leaves_nothing_that_training_could_not_use() -> None:
    assert errors_of(infers_first, 2) == {"None"}


def infers_first(world: World) -> None:
    with Engine(world=world, strategy="fsdp") as engine:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(8, 8))))
        with torch.inference_mode():
            model(torch.ones(1, 8))
        for (x,) in loader:
            engine.backward(model(x).mean())
            optimizer.step()


def test_a_look_at_a_parameter_sees_all_of_it() -> None:
    for result in run_workers(norms, 3):
        assert result.error is None, result.traceback
        seen, whole = result.value
        assert seen == whole


def norms(world: World) -> tuple[float, float]:
    with Engine(world=world, strategy="fsdp") as engine:
        model = nn.Linear(8, 7)
        whole = float(model.weight.detach().norm())
        model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return float(model.weight.detach().norm()), whole


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp", "hybrid"])
def test_hooks_on_parameters_change_gradients_as_they_do_in_torch(strategy: str) -> None:
    with_hook = hashes(run_workers(trains, 2, strategy=strategy, does="hooks before prepare", backend="gloo"))
    assert with_hook == hashes(run_workers(trains, 1, strategy="ddp", does="hooks before prepare"))
    assert with_hook != hashes(run_workers(trains, 1, strategy="ddp"))


# -- is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_the_script_changes_in_place_are_named(precision: str) -> None:
    for error in errors_of(trains, 2, strategy="fsdp", does="clamp", precision=precision):
        assert re.match(r"LoopError: clamp_\(\) on a parameter whose weights are in shards .*load_state_dict", error), (
            error
        )


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_weights_loaded_on_one_worker_only_are_told_before_they_are_used(backend: str) -> None:
    errors = errors_of(trains, 2, strategy="fsdp", does="load on worker 0", backend=backend)
    text = (
        r"LoopError: worker 0 has called model\.load_state_dict\(\), and worker 1 trains on.* all workers have to load"
    )
    assert any(re.match(text, error) for error in errors), errors
