"""zero1 and zero2: ddp's bits from sharded state, whatever is in the optimizer, and states that ddp can load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import ConfigError, LoopError
from paceline.strategies.zero.sharded import ShardedStrategy
from paceline.strategies.zero.zero3 import Zero3Config
from tests.bits.programs import gpt, tied_and_scheduled, wide
from tests.engine.loops import prepared
from tests.workers import hashes, run_workers

SHARDS = Zero3Config(weights="in shards")
ZERO = ["zero1", "zero2", SHARDS]


class CountingLion(torch.optim.Optimizer):
    """The sign of a momentum; steps are counted in the group, not for each parameter."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            group["count"] += bool(used)
            for p in used:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(0.9 * momentum + 0.1 * p.grad), alpha=-group["lr"] / group["count"] ** 0.5)
                momentum.lerp_(p.grad, 0.1)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adam": (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "custom": (CountingLion, {}),
}


@cache
def hash_of_ddp(optimizer: str) -> str:
    made, settings = OPTIMIZERS[optimizer]
    (found,) = hashes(run_workers(wide, 1, lanes=4, clip=0.1, optimizer=made, settings=dict(settings)))
    return found


@pytest.mark.workers
@pytest.mark.parametrize(("strategy", "workers"), [("zero1", 2), ("zero2", 3), (SHARDS, 2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_elementwise_optimizer_gives_the_bits_of_ddp(optimizer: str, strategy: str, workers: int) -> None:
    made, settings = OPTIMIZERS[optimizer]
    job = {"lanes": 4, "clip": 0.1, "optimizer": made, "settings": dict(settings), "bucket_mib": 0.05}
    assert hashes(run_workers(wide, workers, strategy=strategy, **job)) == {hash_of_ddp(optimizer)}


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ZERO)
def test_alone_and_with_two_threads_it_gives_the_bits_of_ddp(strategy: str) -> None:
    for workers, threads in ((1, 1), (2, 2)):
        job: dict[str, Any] = {"lanes": 4, "threads": threads, "samples": 32, "epochs": 1}
        assert hashes(run_workers(gpt, workers, strategy=strategy, **job)) == hashes(run_workers(gpt, 1, **job))


# -- saving ------------------------------------------------------------------------------------------------------------


def trains(world: World, *, until: int, folder: str | None = None, resume: bool = False, **job: Any) -> str:
    """A tied model with a layer that no sample uses, and a schedule made before it is prepared."""
    with Engine(world=world, **{"lanes": 4, "accumulate": 2, "bucket_mib": 0.01} | job) as engine:
        model, optimizer, loader, schedule = tied_and_scheduled(engine)
        if resume:
            assert folder is not None
            engine.load_state(folder)
        while engine.step < until:
            for x, y in loader:
                engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
                optimizer.step()
                schedule.step()
                if engine.stepped and engine.step == until:
                    break
        if folder is not None and not resume:
            engine.save_state(folder)
        return engine.weights_hash()


@cache
def straight() -> frozenset[str]:
    return frozenset(hashes(run_workers(trains, 1, until=6)))


def saves_twice(world: World, *, folder: str, **job: Any) -> list[str]:
    """Once before the first step and once after; goes on from the first, then from the second."""
    with Engine(world=world, lanes=2, **job) as engine:
        model, loader = nn.Linear(8, 1), DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=4)
        optimizer = CountingLion([{"params": [model.weight]}, {"params": [model.bias]}])
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        engine.save_state(folder + "0")
        found = []
        for resumed in (None, folder + "0", folder + "2"):
            if resumed is not None:
                engine.load_state(resumed)
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                if engine.step == 2 and engine.stepped and resumed is None:
                    engine.save_state(folder + "2")
            found.append(engine.weights_hash())
        return found


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ZERO)
def test_a_state_saved_and_loaded_in_the_same_run_repeats_the_run(strategy: str, tmp_path: Path) -> None:
    """Worker 1 owns nothing of either group here, and still knows their counts."""
    results = run_workers(saves_twice, 2, folder=str(tmp_path / "state"), strategy=strategy)
    alone = run_workers(saves_twice, 1, folder=str(tmp_path / "alone"), strategy="ddp")
    for result in (*results, *alone):
        assert result.error is None, result.traceback
        assert result.value == alone[0].value
        assert len(set(result.value)) == 1


# -- who holds what ----------------------------------------------------------------------------------------------------


def active(engine: Engine) -> ShardedStrategy:
    strategy = engine._training().active
    assert isinstance(strategy, ShardedStrategy)
    return strategy


def elements_of_state(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(
        value.numel() for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()
    )


def holds(world: World, *, strategy: str) -> tuple[int, int, int, int]:
    """Elements of the model, of this worker's optimizer state, of the user's optimizer's, of the gradients it keeps."""
    with Engine(world=world, strategy=strategy, bucket_mib=0.1) as engine:
        model = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 300), nn.Tanh(), nn.Linear(300, 1))
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        zero = active(engine)
        kept = sum(total.numel() for total in getattr(zero, "_sums", []))
        mine = elements_of_state([zero._parts.optimizers.of(optimizer)._on_pieces])
        return sum(p.numel() for p in model.parameters()), mine, elements_of_state([optimizer]), kept


@pytest.mark.workers
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", ZERO)
def test_a_worker_keeps_its_share_of_the_state_and_the_users_optimizer_nothing(strategy: str, workers: int) -> None:
    results = run_workers(holds, workers, strategy=strategy)
    for result in results:
        assert result.error is None, result.traceback
        model, state, users, gradients = result.value
        assert abs(state - 2 * model / workers) <= 2 * 2 * 4096
        assert users == 0
        gaps = gradients - (state // 2 if strategy != "zero1" else 0)  # each gradient starts where memory is aligned
        assert 0 <= gaps < 6 * 16
    assert sum(result.value[1] for result in results) == 2 * results[0].value[0]


# -- what a loop may do ------------------------------------------------------------------------------------------------


def freezes_and_thaws(world: World, **job: Any) -> str:
    """A layer that is trained, frozen, and trained again from where its state was; then one more group is added."""
    with Engine(world=world, lanes=4, **job) as engine:
        model = nn.Sequential(nn.Linear(8, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 1))
        late = nn.Parameter(torch.ones(1))
        model.register_parameter("late", late)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p is not late], lr=1e-2)
        data = TensorDataset(*torch.randn(160, 9, generator=torch.Generator().manual_seed(0)).split([8, 1], dim=1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x) * late, y))
            optimizer.step()
            optimizer.zero_grad()
            if engine.stepped:
                model[2].requires_grad_(engine.step not in (2, 3, 4))
                if engine.step == 7:
                    optimizer.add_param_group({"params": [late], "lr": 1e-3})
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ZERO)
def test_parameters_that_are_frozen_thawed_or_added_keep_their_state(strategy: str) -> None:
    ddp = hashes(run_workers(freezes_and_thaws, 1, strategy="ddp"))
    assert hashes(run_workers(freezes_and_thaws, 3, strategy=strategy)) == ddp


def loads_by_itself(world: World, **job: Any) -> str:
    """A state_dict that the script loads into the prepared optimizer, as it would alone."""
    with Engine(world=world, lanes=2, **job) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = TensorDataset(torch.ones(16, 8), torch.ones(16, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        saved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict()
        saved["state"] = {
            place: {"momentum_buffer": torch.full_like(p, 3.0)} for place, p in enumerate(model.parameters())
        }
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 1:
                optimizer.load_state_dict(saved)
        return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ZERO)
def test_a_state_dict_loaded_by_the_script_is_taken_over_by_the_shards(strategy: str) -> None:
    ddp = hashes(run_workers(loads_by_itself, 1, strategy="ddp"))
    assert hashes(run_workers(loads_by_itself, 2, strategy=strategy)) == ddp


def watches(world: World, *, strategy: str) -> tuple[list[str], float]:
    """What the optimizer's hooks saw, and the norm of a gradient that is clipped."""
    with Engine(world=world, lanes=2, strategy=strategy) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(f"before {float(model.bias.detach()):.6f}"))
        optimizer.register_step_post_hook(lambda *_: seen.append(f"after {float(model.bias.detach()):.6f}"))
        norm = 0.0
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            norm = engine.clip_grad_norm_(0.01)
            optimizer.step()
        return seen, norm


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ZERO)
def test_hooks_of_the_optimizer_see_weights_before_and_after_and_clipping_tells_ddps_norm(strategy: str) -> None:
    (alone,) = run_workers(watches, 1, strategy="ddp")
    assert [line.split()[0] for line in alone.value[0]] == ["before", "after"] * 2
    for result in run_workers(watches, 2, strategy=strategy):
        assert result.value == alone.value, result.traceback


# -- what it may not do ------------------------------------------------------------------------------------------------


def errors_of(program: Callable[..., Any], workers: int, **options: Any) -> set[str]:
    return {str(result.error) for result in run_workers(program, workers, **options)}


def clips_with_torch(world: World, *, strategy: str, how: str) -> None:
    with Engine(world=world, lanes=2, strategy=strategy) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            if how == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif how == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            elif how == "look":
                print(model.weight.grad)
            optimizer.step()


@pytest.mark.workers
@pytest.mark.parametrize(("strategy", "how"), [("zero1", "norm"), ("zero2", "value"), ("zero2", "look")])
def test_torchs_clipping_and_a_look_at_gradients_name_the_engines(strategy: str, how: str) -> None:
    for error in errors_of(clips_with_torch, 2, strategy=strategy, how=how):
        assert re.match(
            rf"LoopError: the gradient of 'weight' is not here: under strategy='{strategy}' every worker has its part "
            r"of the summed gradient.*engine\.clip_grad_norm_\(max_norm\)",
            error,
        ), error


def saves_by_itself(world: World) -> None:
    with Engine(world=world, strategy="zero1") as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.state_dict()


@pytest.mark.workers
def test_a_state_dict_of_one_workers_part_is_refused_with_what_to_call() -> None:
    (error,) = errors_of(saves_by_itself, 2)
    assert error.startswith("LoopError: optimizer.state_dict() under strategy='zero1': the state is spread over the")
    assert "engine.save_state(folder)" in error


@pytest.mark.parametrize("strategy", ZERO)
def test_an_optimizer_that_is_not_elementwise_is_refused(strategy: str) -> None:
    model = nn.Linear(8, 1)
    with (
        pytest.raises(ConfigError, match=r"Adafactor can't run on ranges.*strategy='ddp'"),
        Engine(world=World(), strategy=strategy) as engine,
    ):
        engine.prepare(model, torch.optim.Adafactor(model.parameters()))


def test_two_parameters_over_one_memory_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with (
        pytest.raises(
            ConfigError, match=r"parameters '0\.weight' and '1\.weight' are two objects over the same memory"
        ),
        Engine(world=World(), strategy="zero1") as engine,
    ):
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_algorithm_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"strategy='zero2' with algorithm='ring'.*strategy='ddp' to train over it"),
        Engine(world=World(), strategy="zero2", reduction="fast", algorithm="ring") as engine,
    ):
        prepared(engine)


def test_closing_leaves_no_hook_behind() -> None:
    with Engine(world=World(), strategy="zero2") as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        with pytest.raises(LoopError, match=r"engine\.save_state"):
            optimizer.state_dict()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert optimizer.state_dict()["state"] == {}
